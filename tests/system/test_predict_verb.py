"""`vitrail predict` from the outside: ranks, kills, memory, and words for people."""

import filecmp
import json
import os
import re
import resource
import shlex
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from predicting import plain_probabilities, train_segmentation, write_em
from support import ROOT, end, environment, eventually, run, start, torchrun, vitrail

import vitrail as library
from vitrail.data.sources.zarr import OmeZarrConfig

# Many pillars and rows, so that ranks have some each and kills come between.
MANY: tuple[str, ...] = ("--write", "probabilities", "--chunk", "8", "--memory", "0.0002")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("predict")
    write_em(place / "em.zarr")
    train_segmentation(place, place / "em.zarr")
    library.predict(
        place / "seg", place / "em.zarr", out=place / "one.zarr", write="probabilities", chunk=8, memory=2e-4
    )
    return place


def same_files(one: Path, other: Path) -> bool:
    """Whether two folders hold the same files with the same bytes."""
    names, others = (sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file()) for root in (one, other))
    return names == others and filecmp.cmpfiles(one, other, names, shallow=False)[1:] == ([], [])


def test_ranks_write_the_same_bytes(place: Path, tmp_path: Path) -> None:
    words: list[Any] = ["-m", "vitrail", "predict", place / "seg", place / "em.zarr", *MANY, "--quiet"]
    code, output = run(*torchrun(4, *words, "--out", tmp_path / "four.zarr"))
    assert code == 0, output
    assert output.strip().splitlines()[-1] == str(tmp_path / "four.zarr")
    assert same_files(place / "one.zarr", tmp_path / "four.zarr")
    values = OmeZarrConfig(path=str(place / "em.zarr")).open().read(0, (slice(None),) * 3)
    found = np.asarray(zarr.open_group(str(tmp_path / "four.zarr"), mode="r")["s0"])
    assert np.abs(found - plain_probabilities(place / "seg", values)).max() < 1e-6


def test_a_kill_costs_no_row(place: Path, tmp_path: Path) -> None:
    out, work = tmp_path / "killed.zarr", tmp_path / ".killed.zarr.predict"
    words = (sys.executable, "-m", "vitrail", "predict", place / "seg", place / "em.zarr", *MANY, "--out", out)

    def rows() -> int:
        return sum(log.read_bytes().count(b"\n") for log in work.glob("rows-*.log"))

    for kill in (5, 17):
        process = start(*words, "--quiet")
        assert eventually(lambda least=kill, process=process: rows() >= least or process.poll() is not None)
        os.killpg(process.pid, signal.SIGKILL)
        end(process)
        assert not out.exists()
    before = rows()
    torn = sorted(work.glob("rows-*.log"))[-1]
    torn.write_bytes(torn.read_bytes() + b"[1")  # a line that a kill came upon
    code, output = run(*words, "--json", "--quiet")
    assert code == 0, output
    made = json.loads(output)
    assert 0 < made["made"] == made["rows"] - before < made["rows"]
    assert same_files(place / "one.zarr", out)
    assert [path.name for path in tmp_path.iterdir()] == ["killed.zarr"]
    code, output = run(*words)
    assert code == 2
    assert "exists and is not overwritten" in output


CHILD = """
import re, resource, sys
import numpy as np
import vitrail
from vitrail.infer.engine import Engine
run, volume, small, out, limit = *sys.argv[1:5], int(sys.argv[5])
options = dict(overlap=0.0, batch=1, memory=0.001, chunk=32, compute="fp32")
vitrail.predict(run, small, out=out + ".first.zarr", **options)  # what libraries take is not what is measured
rows = Engine.rows
def limited(*given, **more):  # all is open by now: what follows is reading, computing and writing
    data = int(re.search(r"VmData:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10
    resource.setrlimit(resource.RLIMIT_DATA, (data + limit, data + limit))
    try:
        np.load(volume)
    except MemoryError:
        print("does not fit")
    return rows(*given, **more)
Engine.rows = limited
made = vitrail.predict(run, volume, out=out, **options)
print("rows", made["rows"])
"""


def test_memory_does_not_grow_with_the_volume(place: Path, tmp_path: Path) -> None:
    """The process may have 8 MiB more than when all is open, and predicts a volume of 64 MiB."""
    encoder = {"width": 8, "depth": 4, "heads": 1, "patch": 16, "positions": "rope"}
    model = {"kind": "unetr", "ndim": 3, "decoder": "linear", "encoder": encoder}
    labels = np.zeros((64, 64, 64), np.uint8)
    labels[:32] = 1
    np.save(tmp_path / "a.npy", labels * 100)
    np.save(tmp_path / "l.npy", labels)
    entry = [{"path": str(tmp_path / "a.npy"), "labels": str(tmp_path / "l.npy")}]
    changes: dict[str, Any] = {"data__crop": 32, "data__batch": 1, "objective__names": ["out", "in"]}
    run_dir = train_segmentation(
        tmp_path, tmp_path, "large", model=model, data__train=entry, data__valid=entry, **changes
    )
    shape, limit = (256, 512, 512), 8 << 20
    big = np.lib.format.open_memmap(tmp_path / "big.npy", mode="w+", dtype=np.uint8, shape=shape)
    big[100:200, :8, :8] = 90
    big[-1, -1, -1] = 200
    big.flush()
    del big
    assert (tmp_path / "big.npy").stat().st_size >= 8 * limit
    words = [run_dir, tmp_path / "big.npy", tmp_path / "a.npy", tmp_path / "out.zarr", limit]
    code, output = run(
        sys.executable,
        "-c",
        CHILD,
        *map(str, words),
        env=environment(MALLOC_ARENA_MAX="1"),
        cwd=tmp_path,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_STACK, (1 << 20, 1 << 20)),  # of each thread, too
    )
    assert code == 0, output
    assert "does not fit" in output
    stored = zarr.open_group(str(tmp_path / "out.zarr"), mode="r")["s0"]
    assert stored.shape == shape
    loaded = library.load(run_dir)
    for corner in ((0, 0, 0), (224, 480, 480), (128, 0, 0)):
        box = tuple(slice(n, n + 32) for n in corner)
        values = np.load(tmp_path / "big.npy", mmap_mode="r")[box]
        np.testing.assert_array_equal(np.asarray(stored[box]), loaded.predict(values))


def test_mistakes_are_sentences(place: Path, tmp_path: Path) -> None:
    for words, sentence in (
        ([place / "nothing", place / "em.zarr"], "it is not there; give the folder of a run"),
        ([place / "seg", tmp_path / "nothing.zarr"], "does not exist"),
        ([place / "seg", place / "em.zarr", "--write", "reconstructions"], "choose classes or probabilities"),
        ([place / "seg", place / "em.zarr", "--set", "level=9"], "level = 9 does not exist"),
    ):
        code, output = vitrail("predict", *words, "--out", tmp_path / "x.zarr")
        assert code == 2, output
        assert sentence in output
        assert "Traceback" not in output
    assert list(tmp_path.iterdir()) == []


def test_commands_of_the_page_work(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitrail import cli

    page = (ROOT / "docs/predict.md").read_text(encoding="utf-8")
    lines = [line for block in re.findall(r"^```sh\n(.*?)^```$", page, re.M | re.S) for line in block.splitlines()]
    calls = [shlex.split(line) for line in lines if line.startswith("vitrail predict runs/demo-unetr3d ")]
    assert len(calls) > 4
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    write_em(tmp_path / "data/em.zarr", shape=(24, 24, 80))
    (tmp_path / "runs").mkdir()
    shutil.copytree(place / "seg", tmp_path / "runs/demo-unetr3d")
    for words in calls:
        with pytest.raises(SystemExit) as ended:
            cli.main([*words[1:], "--quiet"])
        assert not ended.value.code, words
        assert Path(words[words.index("--out") + 1]).exists()
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    found: dict[str, Any] = {}
    exec(code, found)
    assert found["classes"].shape == found["values"].shape == (24, 24, 80)
    assert found["features"].shape == (24, 6, 6, 20)
