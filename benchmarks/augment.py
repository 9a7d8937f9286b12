"""Time and error of every augmentation, and what free rotation costs a training run.

    python benchmarks/augment.py [--size 256] [--repeats 20] [--out benchmarks/results]
    python benchmarks/augment.py --train [--steps 24] [--side 704]

The first takes one uint8 volume of size^3 through each key of `data.augment` by itself, as a loader does (draws on the
host included), on the GPU if there is one, and a batch of images through those for images. Errors are against a float64
reference at random voxels of a volume of noise, in parts of the range 0 to 255. Medians over the repeats, without
the first. PyTorch's affine_grid + grid_sample on the same device, and scipy where it is installed, stand beside.

`--picture FILE` draws examples instead.

`--train` trains configs/mae3d/2b.yaml on one GPU from an OME-Zarr on the local disk (see mae3d_2b.py), without and with
free rotation, scale and flip, and prints the ratio of the throughputs and the shares of the steps that waited for data.
"""

import argparse
import datetime
import json
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from vitrail.data.augment import Augmenter, Raw
from vitrail.data.augment.affine import resample, resample_labels
from vitrail.data.augment.geometry import Geometry, Move
from vitrail.data.batch import Statistics
from vitrail.data.source import Item
from vitrail.launch.machine import environment
from vitrail.recipe.sections import Augment

ROOT = Path(__file__).resolve().parent.parent
TURN: dict[str, Any] = {"rotate": 180, "scale": [0.9, 1.1], "flip": True}
VOLUMES: dict[str, dict[str, Any]] = {
    "rotate + scale + flip": TURN,
    "the same, sheared and bent": TURN | {"shear": 10, "elastic": {"amplitude": 8}},
    "gamma, contrast, brightness": {"gamma": [0.7, 1.4], "contrast": [0.7, 1.4], "brightness": 0.3},
    "noise": {"noise": 0.3},
    "blur": {"blur": [0.5, 2.0]},
    "sections": {"sections": {"missing": 0.02, "shifted": 0.02, "blurred": 0.02}},
}
IMAGES: dict[str, dict[str, Any]] = {
    "resized_crop + flip": {"resized_crop": {}, "flip": ["x"]},
    "the same + jitter": {"resized_crop": {}, "flip": ["x"], "jitter": {"brightness": 0.4, "hue": 0.1}},
    "mixup + cutmix": {"mixup": 0.8, "cutmix": 1.0},
}  # fmt: skip


def reference(values: np.ndarray, move: Move, size: tuple[int, ...], places: np.ndarray, step: int) -> np.ndarray:
    """A sample [*room] at voxels [N, n] of its crop, in float64: mirrored, linear, no taps."""
    at = places.astype(np.float64)
    if move.nodes is not None:
        at = at + np.stack([_between(m, places / step, m.shape) for m in move.nodes], axis=1)
    return _between(values, at @ move.matrix.T + move.origin, size)


def _between(values: np.ndarray, at: np.ndarray, size: tuple[int, ...]) -> np.ndarray:
    low = np.floor(at).astype(np.int64)
    total = np.zeros(len(at))
    for corner in np.ndindex(*[2] * at.shape[1]):
        weight = np.prod(np.where(corner, at - low, 1 - (at - low)), axis=1)
        period = np.maximum(1, 2 * (np.array(size) - 1))
        index = np.abs(low + corner) % period
        index = np.minimum(np.minimum(index, period - index), np.array(size) - 1)
        total += weight * values[tuple(index.T)]
    return total


def errors(device: torch.device, crop: tuple[int, ...], keys: dict[str, Any], *, samples: int = 3) -> float:
    """Largest error of sampling noise, in parts of its range, at 200,000 voxels of each sample."""
    geometry = Geometry(Augment(**keys), crop, ("z", "y", "x")[-len(crop) :], seed=0)
    ones = (1.0,) * len(crop)
    size = geometry.window([2 * c for c in crop], ones, ones)
    rng = np.random.default_rng(0)
    values = rng.integers(0, 256, size, dtype=np.uint8)
    worst = 0.0
    for counter in range(samples):
        move = geometry.draw(counter, size, ones, ones, 0)
        found = resample(torch.from_numpy(values)[None, None].to(device), [move], [size], crop, step=geometry.step)
        places = np.stack([rng.integers(0, c, 200_000) for c in crop], axis=1)
        expected = reference(values, move, size, places, geometry.step)
        worst = max(worst, float(np.abs(found[0, 0].cpu().numpy()[tuple(places.T)] - expected).max()) / 255)
    return worst


def clock(work: Callable[[int], Any], repeats: int, device: torch.device) -> dict[str, float]:
    """Milliseconds of work(counter), with all that the device does for it."""
    seconds = []
    for counter in range(repeats + 3):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        work(counter)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(1000 * (time.perf_counter() - start))
    low, middle, high = statistics.quantiles(seconds[3:], n=4)
    return {"ms": middle, "low": low, "high": high}


def measure_volumes(device: torch.device, size: int, repeats: int) -> list[dict[str, Any]]:
    crop, ones, rows = (size,) * 3, (1.0,) * 3, []
    item = Item("volume", (4 * size,) * 3, (64,) * 3, (0,) * 3, ones, None)
    for name, keys in VOLUMES.items():
        augmenter = Augmenter(Augment(**keys), crop, seed=0, statistics=Statistics((128.0,), (40.0,)))
        window = augmenter.window(item)
        values = torch.randint(0, 256, (1, 1, *window), dtype=torch.uint8, device=device)

        def work(counter: int, augmenter: Augmenter = augmenter, values: torch.Tensor = values) -> None:
            augmenter(Raw([counter], values))

        rows.append({"what": name, "window": list(window)} | clock(work, repeats, device))
        if "rotate" in keys:
            rows[-1]["error"] = errors(device, crop, keys)
        if name == "rotate + scale + flip":
            rows += beside(device, crop, values, augmenter.geometry, repeats)
    return rows


def beside(
    device: torch.device, crop: tuple[int, ...], values: torch.Tensor, geometry: Geometry, repeats: int
) -> list[dict[str, Any]]:
    """The same rotations of labels, by PyTorch's own functions and by scipy."""
    size, ones = tuple(values.shape[2:]), (1.0,) * 3
    moves = [geometry.draw(n, size, ones, ones, 0) for n in range(repeats + 3)]
    rows: list[dict[str, Any]] = [
        {"what": "the same of labels"}
        | clock(lambda n: resample_labels(values[:, 0], [moves[n]], [size], crop), repeats, device)
    ]
    matrices = torch.tensor(np.stack([np.hstack([m.matrix, np.zeros((3, 1))]) for m in moves]), dtype=torch.float32)
    matrices = matrices.to(device)
    part = values[..., : crop[0], : crop[1], : crop[2]]

    def plain(n: int) -> None:
        grid = functional.affine_grid(matrices[n : n + 1], [1, 1, *crop], align_corners=True)
        functional.grid_sample(part.float(), grid, align_corners=True, padding_mode="reflection")

    rows.append({"what": "PyTorch's affine_grid + grid_sample"} | clock(plain, repeats, device))
    if device.type == "cpu":
        try:
            from scipy import ndimage
        except ImportError:
            return rows
        whole = values[0, 0].numpy()

        def scipy(n: int) -> None:
            move = moves[n]
            ndimage.affine_transform(whole, move.matrix, move.origin, crop, order=1, mode="mirror", output=np.float32)

        rows.append({"what": "scipy's affine_transform, order 1"} | clock(scipy, min(repeats, 3), device))
    return rows


def measure_images(device: torch.device, batch: int, repeats: int) -> list[dict[str, Any]]:
    rows, labels = [], torch.randint(0, 1000, (batch,), device=device)
    for name, keys in IMAGES.items():
        room = (375, 500) if "resized_crop" in keys else (224, 224)
        augmenter = Augmenter(Augment(**keys), (224, 224), seed=0, labels="item", num_classes=1000)
        values = torch.randint(0, 256, (batch, 3, *room), dtype=torch.uint8, device=device)

        def work(n: int, augmenter: Augmenter = augmenter, values: torch.Tensor = values) -> None:
            names = ("red", "green", "blue")
            augmenter(Raw(list(range(n * batch, (n + 1) * batch)), values, labels, variables=names))

        rows.append({"what": f"{batch} images: {name}", "window": list(room)} | clock(work, repeats, device))
    return rows


def measure_training(steps: int, side: int, volume: Path | None) -> list[dict[str, Any]]:
    """The 2B recipe without and with free rotation; rows as in mae3d_2b.py."""
    import mae3d_2b  # beside this file

    home = Path(tempfile.mkdtemp())
    volume = volume or home / "volume.zarr"
    try:
        if not volume.exists():
            mae3d_2b.write_volume(volume, side)
        length = json.loads((volume / "s0/zarr.json").read_text())["shape"][0]
        turn = [f"data.augment.{key}={json.dumps(value)}" for key, value in TURN.items()]
        cases = [[], turn]
        rows = [mae3d_2b.measure(volume, home, steps, overrides) for overrides in cases]
    finally:
        shutil.rmtree(home)
    ratio = rows[0]["step_seconds"] / rows[1]["step_seconds"]  # type: ignore[operator]
    for row, name in zip(rows, ("as it is", "rotated, scaled and flipped"), strict=True):
        print(f"{name}: {row['step_seconds']:.4f} s/step, data wait {row['data_wait']:.2%}", flush=True)
    print(f"throughput with free rotation: {ratio:.4f} of that without")
    return [*rows, {"ratio": ratio, "side": length}]


EXAMPLES: dict[str, dict[str, Any]] = {
    "as read": {},
    "orientations": {"orientations": True},
    "rotate: 180": {"rotate": 180},
    "scale: [0.7, 1.4]": {"scale": [0.7, 1.4]},
    "shear: 20": {"shear": 20},
    "elastic: {amplitude: 12}": {"elastic": {"amplitude": 12, "grid": 3}},
    "gamma: [0.5, 2]": {"gamma": [0.5, 2.0]},
    "contrast: [0.5, 2]": {"contrast": [0.5, 2.0]},
    "brightness: 1": {"brightness": 1.0},
    "noise: 1": {"noise": 1.0},
    "blur: [1, 2]": {"blur": [1.0, 2.0]},
    "sections (z down)": {"sections": {"missing": 0.06, "shifted": 0.05, "blurred": 0.06, "shift": 6, "blur": 3}},
}
COLOURS: dict[str, dict[str, Any]] = {
    "as read": {},
    "flip: [x], resized_crop": {"flip": ["x"], "resized_crop": {"scale": [0.15, 0.8]}},
    "jitter": {"jitter": {"brightness": 0.4, "contrast": 0.4, "saturation": 0.6, "hue": 0.2}},
    "mixup: 1": {"mixup": 1.0},
    "cutmix: 1": {"cutmix": 1.0},
}


def draw_examples(path: Path, *, columns: int = 4, size: int = 80) -> None:
    """Each key by itself, a row a key: generated tissue with its labels outlined, and coloured shapes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from vitrail.data.generate import generate_em

    volume = generate_em((224, 224, 224), seed=4)
    crop = (size,) * 3
    ones = (1.0,) * 3
    item = Item("volume", (224,) * 3, (224,) * 3, (0,) * 3, ones, None)
    mean, std = float(volume.image.mean()), float(volume.image.std())
    rows: list[tuple[str, list[np.ndarray], list[np.ndarray | None]]] = []
    for name, keys in EXAMPLES.items():
        a = Augmenter(Augment(**keys), crop, seed=2, statistics=Statistics((mean,), (std,)), labels="voxel")
        window = a.window(item)
        first = [(224 - w) // 2 for w in window]
        inside = tuple(slice(f, f + w) for f, w in zip(first, window, strict=True))
        counters = list(range(4, 4 + columns))
        values = torch.from_numpy(np.stack([volume.image[inside]] * columns))[:, None].clone()
        labels = torch.from_numpy(np.stack([volume.labels[inside]] * columns).astype(np.int64))
        codes = [0, 5, 18, 29] if "orientations" in keys else [0] * columns
        batch = a(Raw(counters, values, labels, orientations=codes))
        assert batch.labels is not None
        plane = (slice(None), size // 2) if "sections" in keys else (size // 2,)
        images = [v[0][plane].float().numpy() for v in batch.values]
        rows.append((name, images, [found[plane].numpy() for found in batch.labels]))
    for name, keys in COLOURS.items():
        a = Augmenter(Augment(**keys), (size, size), seed=3, labels="item", num_classes=columns)
        room = (140, 180) if "resized_crop" in keys else (size, size)
        same = ("jitter" in keys) or ("resized_crop" in keys)
        shapes = [_shapes(room, 0 if same else n) for n in range(columns)]
        raw = Raw(list(range(columns)), torch.from_numpy(np.stack(shapes)), torch.arange(columns))
        raw.variables = ("red", "green", "blue")
        batch = a(raw)
        images = [v.float().permute(1, 2, 0).numpy() / 255 for v in batch.values]
        rows.append((name, images, [None] * columns))
    half = -(-len(rows) // 2)
    figure, grid = pyplot.subplots(half, 2 * columns, figsize=(2 * columns * 1.1, half * 1.32), squeeze=False)
    for axes in grid.flat:
        axes.axis("off")
    for number, (name, images, outlines) in enumerate(rows):
        place = columns * (number // half)
        for column, (image, outline) in enumerate(zip(images, outlines, strict=True)):
            axes = grid[number % half][place + column]
            limits = {"vmin": 0, "vmax": 255} if image.ndim == 2 else {}
            axes.imshow(image if image.ndim == 2 else image.clip(0, 1), cmap="gray", **limits)
            if outline is not None:
                axes.contour(outline > 0, [0.5], colors=["#e8a33d"], linewidths=0.6)
        grid[number % half][place].set_title(name, loc="left", fontsize=9)
    figure.subplots_adjust(left=0.01, right=0.99, top=0.97, bottom=0.01, wspace=0.05, hspace=0.22)
    figure.savefig(path, dpi=75)


def _shapes(size: tuple[int, int], seed: int) -> np.ndarray:
    """Coloured discs and boxes on a gradient, uint8 [3, *size]."""
    rng = np.random.default_rng(seed)
    y, x = np.meshgrid(*[np.linspace(0, 1, n) for n in size], indexing="ij")
    image = np.stack([60 + 60 * y, 80 + 50 * x, 120 + 60 * (1 - y)])
    for number in range(6):
        cy, cx, radius = rng.uniform(0.1, 0.9), rng.uniform(0.1, 0.9), rng.uniform(0.08, 0.22)
        away = np.maximum(abs(y - cy), abs(x - cx)) if number % 2 else np.hypot(y - cy, x - cx)
        image[:, away < radius] = rng.uniform(20, 250, (3, 1))
    return image.astype(np.uint8)


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| what | window | ms (quartiles) | error |", "|---|---|---|---|"]
    for row in rows:
        error = f"{row['error'] * 255:.4f} / 255" if "error" in row else ""
        window = " x ".join(map(str, row.get("window", [])))
        lines.append(f"| {row['what']} | {window} | {row['ms']:.3f} ({row['low']:.3f}-{row['high']:.3f}) | {error} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--side", type=int, default=704)
    parser.add_argument("--volume", type=Path, help="an OME-Zarr to train on, which is written if it is not there")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if arguments.picture:
        draw_examples(arguments.picture)
        return
    if arguments.train:
        rows = measure_training(arguments.steps, arguments.side, arguments.volume)
    else:
        rows = measure_volumes(device, arguments.size, arguments.repeats)
        rows += measure_images(device, arguments.images, arguments.repeats)
        print(table(rows))
    result = {
        "benchmark": "augment",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "environment": environment(),
        "rows": rows,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    name = f"augment{'_train' if arguments.train else ''}_{device.type}.json"
    (arguments.out / name).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
