"""A preview of what a model will see, and a probe of where the time of loading goes.

- windows are drawn as they lie in their files, augmented, cut into tokens, masked: everything comes from the parts that
  a training uses, its sampler, loader and objective, with the draws of its seed
- volumes show the middle plane of their first axis; of several variables that are no colours the first is shown
- the probe is around a loader's own parts, which stay as they are. Seconds are those of threads, and of each thread's
  innermost part alone: what a read waits for inside is not counted twice
- voxels decoded are whole chunks, because reading part of a chunk costs all of it
"""

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from vitrail.data.augment.augmenter import Raw
from vitrail.data.batch import Batch
from vitrail.data.chunks.decoded import ChunkReader
from vitrail.data.look.picture import by, name_of, variable_groups
from vitrail.data.reading.loader import Loader
from vitrail.data.reading.pool import Job
from vitrail.data.source import Item, ManySource, Source, keeps_chunks, label_dtype, without
from vitrail.draws import Draws
from vitrail.report.units import scale_bar

if TYPE_CHECKING:
    from vitrail.report.views import Panel


PARTS = ("choose samples", "read and decode", "cut and copy", "to the device", "augment")


class Boxes(NamedTuple):
    """The places of the tokens of one sample, without padding and other variables' copies."""

    low: np.ndarray  # [N, ndim] first voxels
    high: np.ndarray  # one beyond the last
    numbers: np.ndarray  # [N] their places in the sequence
    held: np.ndarray | None = None  # [C, *crop] what their values say of the image, where that is known


def preview(
    path: str | Path,
    *,
    sources: Sequence[Source],
    loader: Loader,
    objective: Any,
    seed: int,
    samples: int,
    batch: int,
    title: str,
) -> dict[str, Any]:
    """Draw samples of the first steps of a run, whose batches are so large, to a PNG; returns what they are."""
    from vitrail.report.figures import check_picture
    from vitrail.report.views import HIDDEN, draw_page, label_key

    path = check_picture(path)
    rows: list[list[Panel]] = []
    facts: list[dict[str, Any]] = []
    pair = 1 if batch % 2 else 2  # samples that are mixed with each other follow each other
    for step in range(-(-samples // pair)):
        # Another place of each batch: the same ones would show the same lanes, which stay on a block for a while.
        first = step * batch + step * pair % batch
        part: Batch = loader.load(range(first, first + pair), whole=True)
        draws = Draws(seed, part.counters)
        inputs, targets = objective.prepare(part, draws)
        visible = _visible(objective, targets, draws)
        for row in range(min(pair, samples - len(rows))):
            sample = loader.samples[row]  # which may stand for one that is bad
            source = sources[sample.source]
            item = source.items[sample.item]
            boxes = token_boxes(objective.model, inputs, targets, row)
            seen = None if visible is None or boxes is None else np.isin(boxes.numbers, visible[row].cpu().numpy())
            size = sample.window or tuple(part.values.shape[2:])
            facts.append(
                {
                    "counter": part.counters[row],
                    "item": item.name,
                    "start": list(sample.start),
                    "window": list(size),
                    "shape": list(part.values.shape[1:]),
                    "variables": list(part.variables),
                    "tokens": 0 if boxes is None else len(boxes.numbers),
                    "visible": None if seen is None else int(seen.sum()),
                    "label": _label(objective, part, row),
                }
            )
            raw = source.read(sample.item, tuple(slice(a, a + n) for a, n in zip(sample.start, size, strict=True)))
            if item.slices is not None:
                raw = raw.squeeze(item.slices + 1)
            rows.append(_panels(source, item, raw, part, row, boxes, seen, facts[-1]))
    one, hidden = facts[0], any(fact["visible"] is not None for fact in facts)
    words = f"samples of {by(one['shape'][1:])}; {', '.join(one['variables'][:6])}"
    words += ", ..." if len(one["variables"]) > 6 else ""
    if one["tokens"]:
        words += f"; {one['tokens']:,} tokens"
        words += f", of which the model is shown {one['visible']:,}" if hidden else ""
    key: list[tuple[str, tuple[float, ...]]] = [("hidden from the model", HIDDEN)] if hidden else []
    if part.labels is not None and part.labels.ndim > 1 and hasattr(objective.config, "names"):
        key += label_key(dict(enumerate(objective.names)))
    drawn = draw_page(path, rows, title=title, caption=words, key=key, tile=2.4)
    return {"picture": str(drawn), "samples": facts}


def _panels(
    source: Source,
    item: Item,
    raw: np.ndarray,
    batch: Batch,
    row: int,
    boxes: Boxes | None,
    seen: np.ndarray | None,
    fact: dict[str, Any],
) -> "list[Panel]":
    from vitrail.report.views import HIDDEN, Panel, colour_labels, shade

    variables = variable_groups(batch.variables or source.variables)[0][1]
    spacing = without(item.spacing, item.slices)
    wanted = [s * f for s, f in zip(spacing, without(item.scale, item.slices), strict=True)]
    read, values = middle(raw[variables]), middle(batch.values[row].float().cpu().numpy()[variables])
    aspect = wanted[-2] / wanted[-1]
    label = f"  [{fact['label']}]" if fact["label"] else ""
    position = ", ".join(f"{axis} {start}" for axis, start in zip(source.axes, fact["start"], strict=True))
    panels = [
        Panel(
            shade(read),
            f"{name_of(item, 34)}{label}\n{by(fact['window'])} from {position}",
            spacing[-2] / spacing[-1],
            scale_bar(read.shape[-1], spacing[-1], item.unit),
        )
    ]
    picture = shade(values)
    # Turned about, a sample's axes may differ in scale from one to the next: the bar is that of whole voxels.
    panels.append(Panel(picture, f"\naugmented: {by(fact['shape'][1:])}", aspect))
    if batch.labels is not None and batch.labels.ndim > 1:
        classes = middle(batch.labels[row].cpu().numpy()[None])[0]
        panels.append(Panel(colour_labels(picture, classes), "\nlabels", aspect))
    if boxes is None:
        return panels
    plane = batch.values.shape[2] // 2 if batch.values.ndim == 5 else None
    cut = (
        np.ones(len(boxes.numbers), bool) if plane is None else (boxes.low[:, 0] <= plane) & (plane < boxes.high[:, 0])
    )
    low, high = boxes.low[cut][:, -2:], boxes.high[cut][:, -2:]  # y x
    held = picture if boxes.held is None else shade(middle(boxes.held[variables]))
    panels.append(Panel(held, "\ncut into tokens", aspect, lines=outlines(low, high)))
    if seen is not None:
        shown = held.copy()
        for (top, left), (bottom, right) in zip(low[~seen[cut]], high[~seen[cut]], strict=True):
            shown[top:bottom, left:right] = HIDDEN
        panels.append(Panel(shown, "\nshown to the model", aspect))
    return panels


def token_boxes(model: Any, inputs: dict[str, Any], targets: Any, row: int) -> Boxes | None:
    """Find the tokens of a sample, of the first variable where each has its own; None for a model without tokens."""
    tokens = getattr(targets, "tokens", None)
    coordinates = inputs.get("coordinates") if tokens is None else tokens.coordinates
    if coordinates is None:
        return None
    encoder = getattr(model, "encoder", model)
    sizes = inputs.get("sizes") if tokens is None else tokens.sizes
    valid = inputs.get("valid") if tokens is None else tokens.valid
    copies = len(inputs["variables"]) if getattr(encoder, "separate", False) else 1
    number = coordinates.shape[1] // (copies if tokens is None else tokens.separate)
    centre = coordinates[row, :number].float().cpu().numpy()
    patch = np.broadcast_to(np.asarray(encoder.patch, np.float32), centre.shape[1:])
    side = np.broadcast_to(patch, centre.shape) if sizes is None else sizes[row, :number].float().cpu().numpy()
    keep = np.ones(number, bool) if valid is None else valid[row, :number].cpu().numpy()
    low = np.rint(centre - side / 2).astype(int)[keep]
    held = None
    if tokens is not None and tokens.tree is not None:
        held = tokens.paint(tokens.values)[row].float().cpu().numpy()
    return Boxes(low, low + np.rint(side[keep]).astype(int), np.flatnonzero(keep), held)


def _visible(objective: Any, targets: Any, draws: Draws) -> Tensor | None:
    """Return numbers of the tokens that a masked model is shown [B, n], as its objective draws them."""
    tokens = getattr(targets, "tokens", None)
    if tokens is None or not hasattr(objective, "split"):
        return None
    return objective.split(tokens, draws, True)[0]


def _label(objective: Any, batch: Batch, row: int) -> str | None:
    """Name the class of a sample, or the shares of several where samples are mixed."""
    if batch.labels is None or batch.labels.ndim > 1:
        return None
    if batch.soft is not None:
        shares = batch.soft[row].tolist()
        return " + ".join(f"{share:.0%} {objective.names[i]}" for i, share in enumerate(shares) if share > 0.005)
    return str(objective.names[int(batch.labels[row])])


def middle(values: np.ndarray) -> np.ndarray:
    """Return [C, H, W]: an image as it is, of a volume the middle plane."""
    return values if values.ndim == 3 else values[:, values.shape[1] // 2]


def outlines(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Return the upper and left line of each box [N, 2] (y, x); its neighbours draw the others."""
    top, left, bottom, right = low[:, 0], low[:, 1], high[:, 0], high[:, 1]
    across = np.stack([np.stack([left, top], 1), np.stack([right, top], 1)], 1)
    down = np.stack([np.stack([left, top], 1), np.stack([left, bottom], 1)], 1)
    return np.concatenate([across, down]).astype(float)  # 2N, from and to, (x, y)


class Probe:
    """Seconds and voxels of a loader's parts, by name."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.decoded = 0  # voxels, each variable counts
        self._lock = threading.Lock()
        self._stack = threading.local()

    def wrap(self, name: str, call: Callable[..., Any], note: Callable[..., int] | None = None) -> Callable[..., Any]:
        """Return the call, timed; `note` tells from its arguments how many voxels it decodes."""

        def timed(*arguments: Any, **options: Any) -> Any:
            inner = getattr(self._stack, "inner", 0.0)
            self._stack.inner = 0.0
            began = time.perf_counter()
            try:
                return call(*arguments, **options)
            finally:
                took = time.perf_counter() - began
                with self._lock:
                    self.seconds[name] += took - self._stack.inner
                    self.decoded += 0 if note is None else note(*arguments)
                self._stack.inner = inner + took

        return timed

    def reset(self) -> None:
        with self._lock:
            self.seconds.clear()
            self.decoded = 0

    def shares(self) -> dict[str, float]:
        """Return percent of the threads' busy time that each part takes."""
        total = sum(self.seconds[name] for name in PARTS) or 1.0
        return {name: 100 * self.seconds[name] / total for name in PARTS}


@contextmanager
def probed(loader: Loader) -> Iterator[Probe]:
    """Measure a loader for the time of the block."""
    probe, augmenter = Probe(), loader.augmenter
    settle = torch.cuda.synchronize if loader.device.type == "cuda" else lambda: None

    def replace(stack: ExitStack, owner: Any, name: str, part: str, note: Callable[..., int] | None = None) -> None:
        stack.enter_context(mock.patch.object(owner, name, probe.wrap(part, getattr(owner, name), note)))

    def augment_now(raw: Raw) -> Batch:
        batch = augmenter(raw)
        settle()
        return batch

    timed_augment = probe.wrap("augment", augment_now)

    def augment(raw: Raw) -> Batch:
        settle()  # copies are counted where they belong
        return timed_augment(raw)

    with ExitStack() as stack:
        for source in loader.reader.sources:
            # A source with chunks of its own copies from them in read(); what it decodes is seen below.
            own = keeps_chunks(source)
            part = "cut and copy" if own else "read and decode"
            replace(stack, source, "read", part, None if own else _whole_chunks(source))
            if isinstance(source, ManySource):
                replace(stack, source, "read_many", part, None if own else _whole_items(source))
            if label_dtype(source) is not None:
                replace(stack, source, "read_labels", part)
        timed_decode = probe.wrap("read and decode", ChunkReader.decode, lambda reader, *_: math.prod(reader.grid))
        stack.enter_context(mock.patch.object(ChunkReader, "decode", lambda self, *given: timed_decode(self, *given)))
        timed_wait = probe.wrap("wait for reads", Job.result)
        stack.enter_context(mock.patch.object(Job, "result", lambda self, *given: timed_wait(self, *given)))
        replace(stack, loader.reader, "read_into", "cut and copy")
        replace(stack, loader.reader, "read_many", "cut and copy")
        replace(stack, loader.reader, "_read_layer", "cut and copy")
        replace(stack, loader, "_choose", "choose samples")
        replace(stack, loader, "_finish", "to the device")
        stack.enter_context(mock.patch.object(loader, "augmenter", _Called(augmenter, augment)))
        yield probe


class _Called:
    """An object whose call is another's."""

    def __init__(self, inner: Any, call: Callable[[Any], Any]):
        self._inner, self._call = inner, call

    def __call__(self, raw: Any) -> Any:
        return self._call(raw)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _whole_chunks(source: Source) -> Callable[..., int]:
    def count(item: int, region: tuple[slice, ...]) -> int:
        return touched(source.items[item], region) * len(source.variables)

    return count


def _whole_items(source: ManySource) -> Callable[..., int]:
    size = math.prod(source.alike.shape) * len(source.variables)
    return lambda items: len(items) * size


def touched(item: Item, region: tuple[slice, ...]) -> int:
    """Count voxels of the whole chunks around a window of an item, within its array as far as it is known."""
    voxels = 1
    for window, chunk, origin, size in zip(region, item.chunk, item.origin, item.shape, strict=True):
        first, last = (window.start + origin) // chunk, -(-(window.stop + origin) // chunk)
        voxels *= min((last - first) * chunk, max(size, chunk))
    return voxels


def measure_io(loader: Loader, *, seconds: float) -> dict[str, Any]:
    """Load batches as a training would, and nothing else, for so long; the first ones only warm up."""
    samples = voxels = 0
    # As stored, not as kept here: types that PyTorch lacks are widened. Of several sources the mean.
    each = [source.dtype.itemsize for source in loader.reader.sources]
    with probed(loader) as probe:
        batches = loader.batches(0, 2**40)
        try:
            for _ in range(loader.prefetch + 1):
                batch = next(batches)
            probe.reset()
            began = time.perf_counter()
            while not samples or time.perf_counter() - began < seconds:
                batch = next(batches)
                samples += len(batch)
                voxels += batch.values.numel()
            if loader.device.type == "cuda":
                torch.cuda.synchronize()
            took = time.perf_counter() - began
            decoded, shares, busy = probe.decoded, probe.shares(), sum(probe.seconds[name] for name in PARTS)
        finally:
            batches.close()
    return {
        "mode": "io",
        "workers": loader.workers,
        "samples_per_s": samples / took,
        "gb_per_s": voxels * sum(each) / len(each) / took / 1e9,
        "decoded_per_voxel": decoded / voxels,
        "busy_threads": busy / took,
        "where_percent": shares,
        "peak_rss_gib": peak_rss(),
    }


def peak_rss() -> float:
    """Return the most memory that this process has had so far, in GiB."""
    import resource
    import sys

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)
