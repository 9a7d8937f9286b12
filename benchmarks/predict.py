"""How fast a volume is segmented: `vitrail predict` beside MONAI's sliding_window_inference, in one run.

The same network and weights, tiles, overlap, Gaussian weights, type of numbers and batch. Both begin with a Zarr on
disk and end with the class of every voxel in a Zarr on disk, chunks of 64 voxels, compressed alike.

    python benchmarks/predict.py --out DIR                             about 3 minutes on an H200
    python benchmarks/predict.py --out DIR --size 128 --width 48 --crop 32 --compute fp32 --device cpu

Blending is compared on a part of the volume, in fp32: the largest difference of a probability. The times of both are
medians of `--times` calls after one that is not counted; that of the inference alone is MONAI's without disk.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zarr

import vitrail
from vitrail.data.generate import generate_em, write_ome_zarr
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

    def __init__(self, run: Path, given: argparse.Namespace):
        from monai.inferers import sliding_window_inference

        self.slide, self.given = sliding_window_inference, given
        self.model = vitrail.load(run).to(given.device)
        bf16 = given.compute == "bf16"
        self.solo = Solo(self.model, self.model.blocks(), torch.bfloat16 if bf16 else torch.float32)

    @torch.no_grad()
    def logits(self, values: np.ndarray) -> torch.Tensor:
        images = normalise(torch.from_numpy(values)[None].to(self.given.device), self.model.eyes.statistics)

        def look(windows: torch.Tensor) -> torch.Tensor:
            with self.solo.computing():
                return self.model(**self.model.inputs(windows)).float()

        crop = (self.given.crop,) * 3
        found = self.slide(images, crop, self.given.batch, look, self.given.overlap, mode="gaussian")
        return found[0]

    def __call__(self, path: Path, out: Path) -> float:
        values = np.asarray(zarr.open_group(str(path), mode="r")["s0"])[None]
        began = time.perf_counter()
        found = self.logits(values).argmax(dim=0).to(torch.uint8).cpu().numpy()
        seconds = time.perf_counter() - began
        chunks = tuple(min(64, n) for n in found.shape)
        zarr.create_array(str(out), data=found, chunks=chunks, compressors=zarr.codecs.ZstdCodec(level=3))
        return seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True, help="a new folder")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--compute", default="bf16", choices=["bf16", "fp32"])
    options = {"size": 768, "crop": 96, "width": 384, "features": 16, "batch": 8, "times": 3}
    for name, value in options.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--overlap", type=float, default=0.5)
    given = parser.parse_args()
    given.out.mkdir(parents=True)
    run = train(given.out, given)
    volume = given.out / "large.zarr"
    write_large(volume, given.size)
    slider = Slider(run, given)
    options = {"overlap": given.overlap, "batch": given.batch, "compute": given.compute, "memory": 8.0}
    ours, theirs, inference = [], [], []
    for number in range(given.times + 1):
        began = time.perf_counter()
        vitrail.predict(run, volume, out=given.out / f"ours-{number}.ome.zarr", **options)
        ours.append(time.perf_counter() - began)
        began = time.perf_counter()
        inference.append(slider(volume, given.out / f"theirs-{number}.zarr"))
        theirs.append(time.perf_counter() - began)
        print(f"{number}: ours {ours[-1]:.2f} s, MONAI {theirs[-1]:.2f} s", flush=True)
    part = OmeZarrConfig(path=str(volume)).open().read(0, (slice(0, 2 * given.crop),) * 3)
    slider.solo = Solo(slider.model, slider.model.blocks(), torch.float32)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    shares = slider.logits(part).softmax(dim=0).cpu().numpy()
    mine = slider.model.predict(part, write="probabilities", overlap=given.overlap, batch=given.batch, compute="fp32")
    voxels = given.size**3
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if given.device == "cuda" else "cpu",
        **{key: value for key, value in vars(given).items() if key != "out"},
        "seconds": statistics.median(ours[1:]),
        "monai_seconds": statistics.median(theirs[1:]),
        "monai_inference_seconds": statistics.median(inference[1:]),
        "voxels_per_s": voxels / statistics.median(ours[1:]),
        "ratio": statistics.median(theirs[1:]) / statistics.median(ours[1:]),
        "largest_difference": float(np.abs(shares - mine).max()),
        "all": {"ours": ours, "monai": theirs},
    }
    (given.out / "predict.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
