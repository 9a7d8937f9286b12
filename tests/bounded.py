"""A child process that opens foreign files, with little memory and watched: what came of each, in words.

`run_cases` is for tests. The child reads a JSON list of cases from its standard input and prints a line for each:
"array ...", "refused: ..." (a BadData, which data.bad can skip), "error: ..." (another UserError) or "BUG: ...".
"""

import copy
import faulthandler
import json
import os
import random
import resource
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

LIMIT = 300.0  # seconds of a case; far more than any needs, under any load
ROOM = 1536 << 20  # bytes beyond what the libraries take
EXTREMES = [0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 2**40, 2**50, 2**63 - 1, 2**64 - 1]
ODD: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**60, 2**70, 1.5, -0.0, float("nan"), float("inf"), "", "x", "../..", "/etc/passwd",
    "|O", "\x00", [], {}, [0], [-1], [2**60] * 3, [1] * 40, ["a"], [[]], {"a": 1}, {"name": "zstd"}, [None], "c" * 5000,
]  # fmt: skip


def run_cases(cases: list[dict[str, Any]], limit: float = 3600) -> dict[str, str]:
    """What came of each case, by its name; a child that dies is an outcome of the case that it was at."""
    outcomes: dict[str, str] = {}
    todo = list(cases)
    while todo:
        environment = os.environ | {
            "MALLOC_ARENA_MAX": "2",
            "OMP_NUM_THREADS": "1",
            "ARROW_DEFAULT_MEMORY_POOL": "system",
        }
        child = subprocess.run(
            [sys.executable, __file__],
            input=json.dumps(todo),
            capture_output=True,
            text=True,
            timeout=limit,
            env=environment,
        )
        lines = [line for line in child.stdout.splitlines() if line.startswith("CASE ")]
        for line in lines:
            name, outcome = json.loads(line[5:])
            outcomes[name] = outcome
        todo = todo[len(lines) :]
        if todo:
            outcomes[todo[0]["name"]] = f"BUG: the process ended with {child.returncode}: {child.stderr[-2000:]}"
            todo = todo[1:]
    return outcomes


def mutate(content: bytes, seed: int) -> bytes:
    """A file with some bytes changed, by a seed."""
    rng = random.Random(seed)
    if content.lstrip()[:1] == b"{" and rng.random() < 0.7:
        return _mutate_tree(content, rng)
    data = bytearray(content)
    for _ in range(rng.choice([1, 1, 1, 2, 4, 8])):
        if not data:
            break
        # Headers lie at either end, and are where a change matters.
        near = rng.choice([64, 512, len(data)])
        at = rng.randrange(max(1, min(near, len(data))))
        at = len(data) - 1 - at if rng.random() < 0.3 else at
        kind = rng.randrange(6)
        if kind == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            width = rng.choice([1, 2, 4, 8])
            value = (rng.choice(EXTREMES) & (2 ** (8 * width) - 1)).to_bytes(width, rng.choice(["little", "big"]))
            data[at : at + width] = value
        elif kind == 2:
            data[at : at + rng.randrange(1, 17)] = rng.randbytes(rng.randrange(1, 17))
        elif kind == 3:
            del data[at : at + rng.randrange(1, 33)]
        elif kind == 4:
            data[at:at] = data[max(0, at - 32) : at]
        elif len(data) > 1:
            del data[rng.randrange(1, len(data)) :]
    return bytes(data)


def _mutate_tree(content: bytes, rng: random.Random) -> bytes:
    """JSON with some values that are odd, missing or given twice."""
    tree = json.loads(content)
    for _ in range(rng.choice([1, 1, 2])):
        here = tree
        while True:
            keys = list(here) if isinstance(here, dict) else list(range(len(here)))
            if not keys:
                break
            key = rng.choice(keys)
            if isinstance(here[key], dict | list) and rng.random() < 0.8:
                here = here[key]
                continue
            if rng.random() < 0.1:
                del here[key]
            else:
                here[key] = copy.deepcopy(rng.choice(ODD))
            break
    text = json.dumps(tree)
    return (text.replace("{", '{"zarr_format": 2, "shape": [1], ', 1) if rng.random() < 0.05 else text).encode()


# ---------------------------------------------------------------- the child


def _look(case: dict[str, Any]) -> str:
    from vitrail.recipe import kinds

    source = kinds.find("source", case["kind"])(path=case["path"], **case.get("keys", {})).open()
    item = source.items[0]
    window = tuple(slice(0, min(8, size)) for size in item.shape)
    values = source.read(0, window)
    if getattr(source, "label_dtype", None) is not None:
        source.read_labels(0, window)
    if values.shape[1:] != tuple(w.stop for w in window):
        raise AssertionError(f"{values.shape} for {window}")
    return f"array {values.shape} {values.dtype}"


def _call(case: dict[str, Any]) -> str:
    """A function of a module, called with words."""
    import importlib

    module, _, name = case["call"].partition(":")
    return f"array {getattr(importlib.import_module(module), name)(*case.get('words', []))!r:.200}"


def _judge(case: dict[str, Any]) -> str:
    from vitrail.errors import BadData, UserError

    try:
        return _call(case) if "call" in case else _look(case)
    except BadData as error:
        return f"refused: {error}"
    except UserError as error:
        return f"error: {error}"
    except OSError as error:
        # The reader tries again, and then says so in a sentence (data/reading/pool.py).
        return f"refused: {error}" if "call" not in case else f"BUG: {traceback.format_exc()[-1500:]}"
    except BaseException:
        return f"BUG: {traceback.format_exc()[-1500:]}"


def main() -> None:
    import h5py  # noqa: F401
    import imagecodecs  # noqa: F401
    import netCDF4  # noqa: F401
    import nibabel  # noqa: F401
    import pyarrow.parquet  # noqa: F401
    import rasterio  # noqa: F401
    import tensorstore  # noqa: F401
    import tifffile  # noqa: F401
    import xarray  # noqa: F401
    import zarr  # noqa: F401
    from PIL import Image  # noqa: F401

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    cases = json.loads(sys.stdin.read())
    for case in cases:
        faulthandler.dump_traceback_later(LIMIT, exit=True)
        if "mutate" in case:
            made = Path(case["path"])
            made.write_bytes(mutate(Path(case["original"]).read_bytes(), case["mutate"]))
            if "folder" in case:
                case = case | {"path": case["folder"]}
        print("CASE " + json.dumps([case["name"], _judge(case)]), flush=True)
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # threads of libraries may hang at an orderly end, with so little memory
