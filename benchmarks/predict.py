"""How fast a volume is segmented: `vitrail predict` beside MONAI's sliding_window_inference, in one run.

The same network and weights, tiles, overlap, Gaussian weights, type of numbers and batch. Both begin with a run and a
Zarr on disk and end with the class of every voxel in a Zarr on disk, chunks of 64 voxels, compressed alike; ours has
coarser levels besides. MONAI's has the whole volume, logits and all, on the device, which is its fastest way.

    python benchmarks/predict.py --out DIR                             2 to 3 minutes on an H200
    python benchmarks/predict.py --out DIR --size 512 --seconds 30     about 1 minute
    python benchmarks/predict.py --out DIR --size 128 --width 48 --crop 32 --compute fp32 --device cpu --seconds 20

For each overlap (0.25 is MONAI's default, 0.5 ours) both are called in turn, once uncounted and then as often as fit
into a share of `--seconds`, at least once; times are medians. Beside whole calls stand MONAI's without loading the
network, its inference without any disk, and the network alone (one batch on the device, times the number of batches):
below that no tiling of an eager network can come. Blending is compared on a part of the volume, in fp32: the largest
difference of a probability.
"""

import argparse
import json
import statistics
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zarr

import vitrail
from vitrail.data.generate import generate_em, write_ome_zarr
from vitrail.data.order.tiles import tile_starts
from vitrail.data.sources.zarr import OmeZarrConfig
from vitrail.objectives.objective import normalise
from vitrail.parallel.shard import Solo


def train(place: Path, given: argparse.Namespace) -> Path:
    """A network of a step: how fast it is does not depend on what it has learned."""
    volume = generate_em((max(64, given.crop),) * 3, seed=1)
    write_ome_zarr(place / "small.zarr", volume, levels=1)
    entry = {"path": str(place / "small.zarr"), "labels": "structures"}
    encoder = {"width": given.width, "depth": 12, "heads": given.width // 16, "patch": 16, "positions": "rope"}
    tree = {
        "run": {"name": "predict", "dir": str(place / "run"), "steps": 1, "device": given.device},
        "model": {"kind": "unetr", "ndim": 3, "features": given.features, "encoder": encoder},
        "objective": {"kind": "segment"},
        "data": {"train": [entry], "valid": [entry], "crop": given.crop, "batch": 1},
        "eval": {"samples": 1},
        "log": {"pictures": "off", "report": False, "tensorboard": False},
    }
    vitrail.train(tree, quiet=True)
    return place / "run"


def write_large(path: Path, size: int) -> None:
    """Generated tissue, repeated."""
    tissue = generate_em((64, 64, 64), seed=2).image
    times = -(-size // 64)
    write_ome_zarr(path, _Volume(np.tile(tissue, (times,) * 3)[:size, :size, :size]), levels=1)


class _Volume:
    labels = None
    label_names: tuple[str, ...] = ()

    def __init__(self, image: np.ndarray):
        self.image = image


class Slider:
    """MONAI's way: the whole volume in memory, windows of it through the network, the result written at the end."""

    def __init__(self, run: Path, given: argparse.Namespace, *, fp32: bool = False):
        from monai.inferers import sliding_window_inference

        self.slide, self.given, began = sliding_window_inference, given, time.perf_counter()
        self.model = vitrail.load(run).to(given.device)
        bf16 = given.compute == "bf16" and not fp32
        self.solo = Solo(self.model, self.model.blocks(), torch.bfloat16 if bf16 else torch.float32)
        self.loading = time.perf_counter() - began

    def look(self, windows: torch.Tensor) -> torch.Tensor:
        return self.model(**self.model.inputs(windows)).float()

    @torch.no_grad()
    def logits(self, values: np.ndarray, overlap: float) -> torch.Tensor:
        images = normalise(torch.from_numpy(values)[None].to(self.given.device), self.model.eyes.statistics)
        crop = (self.given.crop,) * 3
        with self.solo.computing():
            return self.slide(images, crop, self.given.batch, self.look, overlap, mode="gaussian")[0]

    @torch.no_grad()
    def network(self, overlap: float) -> float:
        """Return the seconds that the network alone takes for all windows."""
        given = self.given
        windows = torch.randn(given.batch, 1, *(given.crop,) * 3, device=given.device)
        times = []
        with self.solo.computing():
            for _ in range(8):
                began = time.perf_counter()
                self.look(windows)
                wait(given.device)
                times.append(time.perf_counter() - began)
        number = len(tile_starts(given.size, given.crop, overlap)) ** 3
        return statistics.median(times[3:]) * number / given.batch

    def __call__(self, path: Path, out: Path, overlap: float) -> float:
        values = np.asarray(zarr.open_group(str(path), mode="r")["s0"])[None]
        began = time.perf_counter()
        found = self.logits(values, overlap).argmax(dim=0).to(torch.uint8).cpu().numpy()
        seconds = time.perf_counter() - began
        chunks = tuple(min(64, n) for n in found.shape)
        zarr.create_array(str(out), data=found, chunks=chunks, compressors=zarr.codecs.ZstdCodec(level=3))
        return seconds


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def compare(run: Path, volume: Path, given: argparse.Namespace, overlap: float, until: float) -> dict[str, Any]:
    """Call both in turn, and return their times."""
    options = {"overlap": overlap, "batch": given.batch, "compute": given.compute, "memory": 8.0}
    ours, theirs, inference, loading = list[float](), list[float](), list[float](), list[float]()
    while len(ours) < 2 or time.monotonic() + ours[-1] + theirs[-1] < until:
        name = f"{overlap:g}-{len(ours)}"
        began = time.perf_counter()
        vitrail.predict(run, volume, out=given.out / f"ours-{name}.ome.zarr", **options)
        ours.append(time.perf_counter() - began)
        began = time.perf_counter()
        slider = Slider(run, given)
        inference.append(slider(volume, given.out / f"theirs-{name}.zarr", overlap))
        theirs.append(time.perf_counter() - began)
        loading.append(slider.loading)
        print(f"overlap {overlap:g}, {len(ours) - 1}: ours {ours[-1]:.2f} s, MONAI {theirs[-1]:.2f} s", flush=True)
    mine, its = statistics.median(ours[1:]), statistics.median(theirs[1:])
    return {
        "overlap": overlap,
        "seconds": mine,
        "monai_seconds": its,
        "monai_loading_seconds": statistics.median(loading[1:]),
        "monai_inference_seconds": statistics.median(inference[1:]),
        "network_seconds": slider.network(overlap),
        "voxels_per_s": given.size**3 / mine,
        "ratio": its / mine,
        "ratio_without_loading": (its - statistics.median(loading[1:])) / mine,
        "all": {"ours": ours, "monai": theirs},
    }


def compare_numbers(run: Path, volume: Path, given: argparse.Namespace, overlap: float) -> float:
    """Return the largest difference of a probability between both, in fp32."""
    part = OmeZarrConfig(path=str(volume)).open().read(0, (slice(0, min(2 * given.crop, given.size)),) * 3)
    slider = Slider(run, given, fp32=True)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    shares = slider.logits(part, overlap).softmax(dim=0).cpu().numpy()
    mine = slider.model.predict(part, write="probabilities", overlap=overlap, batch=given.batch, compute="fp32")
    return float(np.abs(shares - mine).max())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True, help="a new folder")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--compute", default="bf16", choices=["bf16", "fp32"])
    options = {"size": 768, "crop": 96, "width": 384, "features": 16, "batch": 8}
    for name, value in options.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--overlap", type=float, nargs="+", default=[0.25, 0.5])
    parser.add_argument("--seconds", type=float, default=90.0, help="for the calls of all overlaps")
    given = parser.parse_args()
    given.out.mkdir(parents=True)
    run = train(given.out, given)
    volume = given.out / "large.zarr"
    write_large(volume, given.size)
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if given.device == "cuda" else "cpu",
        "versions": {"vitrail": vitrail.__version__, "torch": torch.__version__, "monai": version("monai")},
        **{key: value for key, value in vars(given).items() if key not in ("out", "overlap")},
        "overlaps": [],
    }
    ends = time.monotonic() + given.seconds
    for number, overlap in enumerate(given.overlap, start=1):
        until = ends - given.seconds * (1 - number / len(given.overlap))
        found["overlaps"].append(compare(run, volume, given, overlap, until))
        (given.out / "predict.json").write_text(json.dumps(found, indent=1) + "\n")  # so far
    found["largest_difference"] = max(compare_numbers(run, volume, given, overlap) for overlap in given.overlap)
    (given.out / "predict.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
