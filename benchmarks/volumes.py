"""Random unaligned crops of a compressed volume: zarr-python, tensorstore, bare decoding and vitrail in one run.

    python benchmarks/volumes.py [--side 1024] [--repeats 7] [--work FOLDER] [--out benchmarks/results]

Crops of 128^3 bytes out of a zarr of 64^3 chunks of noise, compressed by zstd to nine tenths; files in the page cache.
All methods take turns, several times, so that other work on the machine meets all of them; medians. Rates are of voxels
delivered. Reuse is voxels delivered for each voxel decoded, as counted: an unaligned crop alone has 0.3, because it
touches 27 chunks. The bare decoders deliver nothing: chunks are decoded by as many threads and dropped, from bytes that
lie in memory, or with their files read. Two more rows tell what a reader can reach that delivers each decoded voxel
once: chunks copied in one piece to memory as large as some batches, and the crops of "vitrail, reuse 1" made by a loop
that is written for them alone.

The same is done with two more kinds of data: images with labels of their voxels (a second volume of bytes, in pieces of
one class each), and volumes of float32, which take up to 5 GiB of disk. There tensorstore reads both volumes of a
labelled crop; rates are of bytes delivered.
"""

import argparse
import json
import math
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import tensorstore
import torch
import zarr

from vitrail.data.batch import Batch, Labelling
from vitrail.data.chunks.decoded import copy_part, shared
from vitrail.data.order.sampler import Extent, Sampler
from vitrail.data.reading.loader import Loader
from vitrail.data.reading.reader import Reader
from vitrail.data.sources.zarr import ZarrConfig
from vitrail.launch.machine import environment, usable_cores

ROOT = Path(__file__).resolve().parent.parent
CROP, CHUNK, BATCH = 128, 64, 8
CACHE = 240 * 2**20  # bytes of batches of byte images that are read together; others have as many times more
# Voxels along a block of starts (that of recipes by default, and one chunk), and crops of a block before the next one.
BLOCKS = {"vitrail, reuse 1": (128, 7), "vitrail, reuse 4": (64, 14)}
GOALS = {  # method: [(times, of what)]
    "vitrail, reuse 1": [(2.5, "tensorstore"), (0.8, "zstd alone")],
    "vitrail, reuse 4": [(7.0, "tensorstore")],
}
OTHER_GOALS = {
    "vitrail, reuse 1": [(2.0, "tensorstore")],
    "vitrail, reuse 4": [(5.0, "tensorstore")],
}
CLASSES = 8


def write_volume(path: Path, side: int, threads: int, kind: str = "noise") -> float:
    """Write chunks of a kind; return how much smaller they became.

    Noise has the spread of noisy electron microscopy, as bytes or as floats; labels are boxes of one class each.
    """
    dtype = np.dtype("float32" if kind == "floats" else "uint8")
    zarr.create_array(
        str(path), shape=(side,) * 3, chunks=(CHUNK,) * 3, dtype=dtype, compressors=zarr.codecs.ZstdCodec(level=3)
    )
    rng = np.random.default_rng(0)
    noise = rng.normal(128, 38, 2**24).astype(np.float32)
    if kind == "noise":
        noise = np.clip(noise, 0, 255).astype(np.uint8)
    elif kind == "labels":
        small = rng.integers(0, CLASSES, (2**12, 4, 4, 4), np.uint8)
        noise = small.repeat(4, axis=1).repeat(4, axis=2).repeat(4, axis=3).reshape(-1)
    size, codec = CHUNK**3, numcodecs.Zstd(3)
    names = [path / "c" / str(z) / str(y) for z in range(side // CHUNK) for y in range(side // CHUNK)]
    starts = rng.integers(0, len(noise) - size, (len(names), side // CHUNK))

    def write(row: int) -> int:
        names[row].mkdir(parents=True)
        chunks = [codec.encode(noise[s : s + size]) for s in starts[row]]
        return sum((names[row] / str(x)).write_bytes(chunk) for x, chunk in enumerate(chunks))

    with ThreadPoolExecutor(threads) as pool:
        return side**3 * dtype.itemsize / sum(pool.map(write, range(len(names))))


def open_tensorstore(path: Path) -> Any:
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/"}}
    return tensorstore.open(spec, open=True, read=True).result()


def make_loader(source: Any, side: int, block: int, turns: int, threads: int, labels: bool = False) -> Loader:
    """Batches of crops as training gets them."""
    labelling = Labelling("voxel", tuple(f"class {n}" for n in range(CLASSES))) if labels else None
    voxel = source.dtype.itemsize + labels
    reader = Reader([source], (CROP,) * 3, whole_blocks=True, cache_bytes=CACHE * voxel, labelling=labelling)
    extent = Extent(0, 0, (side,) * 3, (CHUNK,) * 3, (0,) * 3, 1.0)
    sampler = Sampler([extent], (CROP,) * 3, seed=0, lanes=BATCH, reuse=turns, block=(block,) * 3)
    return Loader(
        sampler,
        reader,
        lambda step: range(step * BATCH, (step + 1) * BATCH),
        device=torch.device("cpu"),
        workers=threads,
        prefetch=3,
    )


def some_windows(rng: np.random.Generator, side: int, number: int) -> list[tuple[slice, ...]]:
    starts = rng.integers(0, side - CROP + 1, (number, 3)).tolist()
    return [tuple(slice(a, a + CROP) for a in start) for start in starts]


class Others:
    """Crops of another kind of data, by tensorstore and by vitrail: floats, or images with their labels."""

    def __init__(self, paths: list[Path], side: int, threads: int):
        self.side, self.rng = side, np.random.default_rng(1)
        self.stores = [open_tensorstore(path) for path in paths]
        self.pool = ThreadPoolExecutor(threads)
        labels = str(paths[1]) if len(paths) > 1 else None
        self.source = ZarrConfig(path=str(paths[0]), labels=labels).open()
        self.decoder: Any = self.source.entries[0].images[0].chunk_reader
        shared.limit = CACHE  # of what is not read together
        self.loaders = {
            name: make_loader(self.source, side, *block, threads, labels is not None) for name, block in BLOCKS.items()
        }
        self.steps = dict.fromkeys(BLOCKS, 0)  # so far
        self.work: dict[str, Callable[[], int]] = {
            "tensorstore": self.take_tensorstore,
            f"tensorstore, {threads} at a time": self.take_tensorstore_at_once,
            **{name: partial(self.take_vitrail, name) for name in BLOCKS},
        }

    def _crop(self, window: tuple[slice, ...]) -> int:
        asked = [store[window].read() for store in self.stores]
        return sum(one.result().nbytes for one in asked)

    def take_tensorstore(self, number: int = 20) -> int:
        return sum(map(self._crop, some_windows(self.rng, self.side, number)))

    def take_tensorstore_at_once(self, number: int = 20) -> int:
        return sum(self.pool.map(self._crop, some_windows(self.rng, self.side, number)))

    def take_vitrail(self, name: str, number: int = 112) -> int:
        batches = take_batches(self.loaders[name], self.steps, name, number)
        return sum(b.values.nbytes + (0 if b.labels is None else b.labels.nbytes) for b in batches)


def take_batches(loader: Loader, steps: dict[str, int], name: str, number: int) -> Iterator[Batch]:
    """Batches from the first request to the last one: blocks that are used up."""
    first, turns = steps[name], loader.sampler.reuse
    steps[name] += turns * math.ceil(number / BATCH / turns)
    return loader.batches(first, steps[name])


class Methods:
    """Ways to get voxels out of the volume; each gives bytes delivered for about so many crops."""

    def __init__(self, path: Path, side: int, threads: int):
        self.side, self.threads = side, threads
        self.rng = np.random.default_rng(1)
        self.zarr = zarr.open_array(str(path), mode="r")
        self.tensorstore = open_tensorstore(path)
        self.pool = ThreadPoolExecutor(threads)
        count = side // CHUNK
        self.files = [str(path / "c" / str(z) / str(y) / str(x)) for z, y, x in np.ndindex(count, count, count)]
        self.chunks = [Path(file).read_bytes() for file in self.files[:: max(1, len(self.files) // 1024)]]
        self.source = ZarrConfig(path=str(path)).open()
        self.decoder: Any = self.source.entries[0].images[0].chunk_reader
        self.loaders = {name: make_loader(self.source, side, *block, threads) for name, block in BLOCKS.items()}
        self.steps = dict.fromkeys(BLOCKS, 0)  # so far
        self.by_hand = 0  # visits so far
        self.memory = np.zeros((BATCH * BLOCKS["vitrail, reuse 1"][1], CROP, CROP, CROP), np.uint8)

    def windows(self, number: int) -> list[tuple[slice, ...]]:
        return some_windows(self.rng, self.side, number)

    def take_zarr(self, number: int = 10) -> int:
        return sum(self.zarr[window].nbytes for window in self.windows(number))

    def take_tensorstore(self, number: int = 40) -> int:
        """One crop after the other; its own threads decode."""
        return sum(self.tensorstore[window].read().result().nbytes for window in self.windows(number))

    def take_tensorstore_at_once(self, number: int = 40) -> int:
        return sum(self.pool.map(lambda w: self.tensorstore[w].read().result().nbytes, self.windows(number)))

    def _decode(self, sources: list[Any], load: Callable[[Any], Any]) -> int:
        codec = numcodecs.Zstd()

        def work(part: int) -> int:
            out = np.empty(CHUNK**3, np.uint8)
            return sum(codec.decode(load(s), out).nbytes for s in sources[part :: self.threads])

        return sum(self.pool.map(work, range(self.threads)))

    def decode_memory(self) -> int:
        return self._decode(self.chunks, lambda chunk: chunk)

    def decode_files(self) -> int:
        places = self.rng.integers(0, len(self.files), len(self.chunks))
        return self._decode([self.files[i] for i in places], read_file)

    def copy_files(self) -> int:
        """Each chunk in one piece to memory as large as a visit's batches."""
        codec, places = numcodecs.Zstd(), self.rng.integers(0, len(self.files), len(self.chunks))

        def work(part: int) -> int:
            memory = np.array_split(self.memory, self.threads)[part].reshape(-1, CHUNK**3)
            out = np.empty(CHUNK**3, np.uint8)
            for number, place in enumerate(places[part :: self.threads]):
                memory[number % len(memory)] = codec.decode(read_file(self.files[place]), out)
            return len(places[part :: self.threads]) * CHUNK**3

        return sum(self.pool.map(work, range(self.threads)))

    def crops_by_hand(self, visits: int = 4) -> int:
        """The crops of "vitrail, reuse 1", block by block, with no more than they need."""
        sampler = self.loaders["vitrail, reuse 1"].sampler
        turns = sampler.reuse
        first, self.by_hand = self.by_hand, self.by_hand + visits
        blocks = [
            [sampler((visit * turns + turn) * BATCH + lane).start for turn in range(turns)]
            for visit in range(first, self.by_hand)
            for lane in range(BATCH)
        ]

        def work(part: int) -> None:
            codec, layer = numcodecs.Zstd(), np.empty((CHUNK, 2 * CROP, 2 * CROP), np.uint8)
            chunk = np.empty((CHUNK,) * 3, np.uint8)
            for number in range(part, len(blocks), self.threads):
                outs = self.memory[number % BATCH * turns :]
                cut_block(self.files, self.side, blocks[number], outs, codec, chunk, layer)

        list(self.pool.map(work, range(self.threads)))
        return len(blocks) * turns * CROP**3

    def take_vitrail(self, name: str, number: int = 448) -> int:
        return sum(batch.values.numel() for batch in take_batches(self.loaders[name], self.steps, name, number))


def cut_block(
    files: list[str], side: int, starts: list[Any], outs: np.ndarray, codec: Any, chunk: np.ndarray, layer: np.ndarray
) -> None:
    """Crops that begin in one block, by layers of chunks, put together and cut while they are in the cache."""
    low = [min(axis) // CHUNK for axis in zip(*starts, strict=True)]
    high = [(max(axis) + CROP - 1) // CHUNK + 1 for axis in zip(*starts, strict=True)]
    for z in range(low[0], high[0]):
        inside = [
            (s, out) for s, out in zip(starts, outs, strict=False) if s[0] < (z + 1) * CHUNK and s[0] + CROP > z * CHUNK
        ]
        needed = {
            (y, x)
            for (_, v, u), _ in inside
            for y in range(v // CHUNK, (v + CROP - 1) // CHUNK + 1)
            for x in range(u // CHUNK, (u + CROP - 1) // CHUNK + 1)
        }
        for y, x in needed:
            codec.decode(read_file(files[(z * (side // CHUNK) + y) * (side // CHUNK) + x]), chunk)
            v, u = (y - low[1]) * CHUNK, (x - low[2]) * CHUNK
            copy_part(layer[:, v : v + CHUNK, u : u + CHUNK], chunk)
        for (w, v, u), out in inside:
            first, last = max(w, z * CHUNK), min(w + CROP, (z + 1) * CHUNK)
            v, u = v - low[1] * CHUNK, u - low[2] * CHUNK
            part = layer[first - z * CHUNK : last - z * CHUNK, v : v + CROP, u : u + CROP]
            copy_part(out[first - w : last - w], part)


def read_file(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read()


def uniformity(starts: np.ndarray, places: int) -> dict[str, float]:
    """Chi-square of crop starts in equal boxes, and of places within a chunk; p by Wilson and Hilferty."""
    edges = np.linspace(0, places, 9)
    found = {}
    boxes, _ = np.histogramdd(starts, bins=[edges] * 3)
    exact = np.diff(np.ceil(edges))  # starts are whole numbers: boxes hold some more or fewer of them
    shares = np.einsum("i,j,k->ijk", exact, exact, exact) / places**3
    inside = np.stack([np.bincount(starts[:, axis] % CHUNK, minlength=CHUNK) for axis in range(3)])
    of_axis = np.bincount(np.arange(places) % CHUNK, minlength=CHUNK) / places
    for name, seen, share, free in (
        ("boxes", boxes, shares, boxes.size - 1),
        ("within chunks", inside, np.stack([of_axis] * 3), 3 * (CHUNK - 1)),
    ):
        expected = share * len(starts)
        square = float((np.square(seen - expected) / expected).sum())
        z = ((square / free) ** (1 / 3) - (1 - 2 / (9 * free))) / math.sqrt(2 / (9 * free))
        found |= {
            name: round(square, 1),
            f"{name}, free": free,
            f"{name}, p": round(math.erfc(z / math.sqrt(2)) / 2, 4),
        }
    return found


def work_of(methods: Methods) -> dict[str, Callable[[], int]]:
    return {
        "zarr-python": methods.take_zarr,
        "tensorstore": methods.take_tensorstore,
        f"tensorstore, {methods.threads} at a time": methods.take_tensorstore_at_once,
        "zstd alone": methods.decode_memory,
        "zstd and files": methods.decode_files,
        "zstd, files, one copy": methods.copy_files,
        "zstd, files, crops by hand": methods.crops_by_hand,
        **{name: partial(methods.take_vitrail, name) for name in BLOCKS},
    }


def measure(
    work: dict[str, Callable[[], int]], decoder: Any, repeats: int, bytes_of_voxel: int = 1
) -> dict[str, dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {name: {"rates": [], "cpu": [], "reuse": []} for name in work}
    for repeat in range(repeats + 1):
        for name, take in work.items():
            decoded, start, busy = decoder.decoded, time.perf_counter(), time.process_time()
            amount = take()
            seconds, busy = time.perf_counter() - start, time.process_time() - busy
            if not repeat:  # warm-up
                continue
            rows[name]["rates"].append(amount / seconds / 1e9)
            rows[name]["cpu"].append(busy / amount * 1e9)
            if name in BLOCKS:
                chunks = max(1, decoder.decoded - decoded)
                rows[name]["reuse"].append(amount / bytes_of_voxel / chunks / CHUNK**3)
    for row in rows.values():
        row["rate"] = statistics.median(row["rates"])
        row["cpu"] = statistics.median(row["cpu"])
        row["reuse"] = statistics.median(row["reuse"]) if row["reuse"] else None
    return rows


def table(rows: dict[str, dict[str, Any]]) -> str:
    peers = [name for name in ("tensorstore", "zstd alone", "zstd and files") if name in rows]
    lines = [
        f"| | GB/s (least-most) | {' | '.join(f'times {name}' for name in peers)} | CPU ns/byte | reuse |",
        "|---" * (len(peers) + 4) + "|",
    ]
    for name, row in rows.items():
        shares = " | ".join(f"{row['rate'] / rows[peer]['rate']:.2f}" for peer in peers)
        reuse = "" if row["reuse"] is None else f"{row['reuse']:.2f}"
        rates = f"{row['rate']:.2f} ({min(row['rates']):.2f}-{max(row['rates']):.2f})"
        lines.append(f"| {name} | {rates} | {shares} | {row['cpu']:.2f} | {reuse} |")
    return "\n".join(lines)


def judge(rows: dict[str, dict[str, Any]], goals: dict[str, list[tuple[float, str]]]) -> list[dict[str, Any]]:
    """Compare methods with their goals, and say so."""
    judged = []
    for m, each in goals.items():
        for t, o in each:
            # Methods take turns, so that each round is a fair comparison, however busy the machine is just then.
            ratios = [a / b for a, b in zip(rows[m]["rates"], rows[o]["rates"], strict=True)]
            found = {"found": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
            found["by_cpu"] = rows[o]["cpu"] / rows[m]["cpu"]
            met = "reached" if found["found"] >= t else "NOT reached"
            print(
                f"{m}: {found['found']:.2f} ({found['least']:.2f}-{found['most']:.2f}; by CPU time "
                f"{found['by_cpu']:.2f}) of {o}, goal {t}: {met}"
            )
            judged.append({"method": m, "times": t, "of": o, **found})
    return judged


def measure_others(folder: Path, side: int, threads: int, repeats: int) -> dict[str, Any]:
    """Rows and goals of labelled images and of floats."""
    found = {}
    for name, kinds in {"labelled": ("noise", "labels"), "float32": ("floats",)}.items():
        paths = [folder / name / f"{kind}.zarr" for kind in kinds]
        ratios = [write_volume(path, side, threads, kind) for path, kind in zip(paths, kinds, strict=True)]
        others = Others(paths, side, threads)
        rows = measure(others.work, others.decoder, repeats, 4 if kinds == ("floats",) else len(kinds))
        print(f"\n{name}: zstd ratios {', '.join(f'{ratio:.3f}' for ratio in ratios)}\n{table(rows)}")
        found[name] = {"zstd_ratios": ratios, "rows": rows, "goals": judge(rows, OTHER_GOALS)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=1024, help="voxels of the volume along each axis")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--work", type=Path, help="where the volume is written; a folder that is removed afterwards")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=arguments.work) as folder:
        path = Path(folder) / "noise.zarr"
        ratio = write_volume(path, arguments.side, arguments.threads)
        methods = Methods(path, arguments.side, arguments.threads)
        rows = measure(work_of(methods), methods.decoder, arguments.repeats)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        others = measure_others(Path(folder), arguments.side, arguments.threads, arguments.repeats)
    print(f"\nimages\n{table(rows)}")
    print(f"zstd ratio {ratio:.3f}; peak memory {peak:.2f} GiB")
    offsets = {}
    for name in BLOCKS:
        sampler = methods.loaders[name].sampler
        # Crops of one visit lie in one block, so that only one of each visit is a draw of its own.
        drawn = [c for c in range(sampler.epoch * 4) if c // sampler.lanes % sampler.reuse == 0]
        starts = np.array([sampler(counter).start for counter in drawn])
        offsets[name] = {"crops": len(starts), **uniformity(starts, arguments.side - CROP + 1)}
        print(f"{name}: offsets {offsets[name]}")
    goals = judge(rows, GOALS)
    result = {
        "benchmark": "volumes",
        "side": arguments.side,
        "threads": arguments.threads,
        "load_before": load,
        "zstd_ratio": ratio,
        "cache_bytes": CACHE,
        "peak_gib": peak,
        "offsets": offsets,
        "goals": goals,
        "rows": rows,
        "others": others,
        "environment": environment(),
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "volumes.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
