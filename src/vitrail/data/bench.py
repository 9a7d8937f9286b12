"""Where the time of loading goes: a probe around a loader's own parts, which stay as they are.

Seconds are those of threads, and of each thread's innermost part alone: what a read waits for inside is not counted
twice. Voxels decoded are whole chunks, because reading part of a chunk costs all of it.
"""

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from vitrail.data.chunks import ChunkReader
from vitrail.data.pool import Job
from vitrail.data.source import Item, ManySource

PARTS = ("choose samples", "read and decode", "cut and copy", "to the device", "augment")


class Probe:
    """Seconds and voxels of a loader's parts, by name."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.decoded = 0  # voxels, each variable counts
        self._lock = threading.Lock()
        self._stack = threading.local()

    def wrap(self, name: str, call: Callable[..., Any], note: Callable[..., int] | None = None) -> Callable[..., Any]:
        """The call, timed; `note` tells from its arguments how many voxels it decodes."""

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
        """Percent of the threads' busy time that each part takes."""
        total = sum(self.seconds[name] for name in PARTS) or 1.0
        return {name: 100 * self.seconds[name] / total for name in PARTS}


@contextmanager
def probed(loader: Any) -> Iterator[Probe]:
    """Measure a loader for the time of the block."""
    probe, on_cuda = Probe(), loader.device.type == "cuda"

    def replace(stack: ExitStack, owner: Any, name: str, part: str, note: Callable[..., int] | None = None) -> None:
        stack.enter_context(mock.patch.object(owner, name, probe.wrap(part, getattr(owner, name), note)))

    def augment(raw: Any) -> Any:
        if on_cuda:
            torch.cuda.synchronize()  # copies are counted where they belong
        return finish(raw)

    def finish_now(raw: Any) -> Any:
        batch = augmenter(raw)
        if on_cuda:
            torch.cuda.synchronize()
        return batch

    augmenter, finish = loader.augmenter, probe.wrap("augment", lambda raw: finish_now(raw))
    with ExitStack() as stack:
        for source in loader.reader.sources:
            # A source with chunks of its own copies from them in read(); what it decodes is seen below.
            own = bool(getattr(source, "keeps_chunks", False))
            note = None if own else _whole_chunks(source)
            part = "cut and copy" if own else "read and decode"
            replace(stack, source, "read", part, note)
            if isinstance(source, ManySource):
                replace(stack, source, "read_many", part, None if own else _whole_items(source))
            if getattr(source, "label_dtype", None) is not None:
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


def _whole_chunks(source: Any) -> Callable[..., int]:
    """Voxels of the chunks that a read touches."""

    def count(item: int, region: tuple[slice, ...]) -> int:
        return touched(source.items[item], region) * len(source.variables)

    return count


def _whole_items(source: ManySource) -> Callable[..., int]:
    """Voxels of items that are alike."""
    size = math.prod(source.alike.shape) * len(source.variables)
    return lambda items: len(items) * size


def touched(item: Item, region: tuple[slice, ...]) -> int:
    """Voxels of the whole chunks around a window of an item, within its array as far as it is known."""
    voxels = 1
    for window, chunk, origin, size in zip(region, item.chunk, item.origin, item.shape, strict=True):
        first, last = (window.start + origin) // chunk, -(-(window.stop + origin) // chunk)
        voxels *= min((last - first) * chunk, max(size, chunk))
    return voxels


def measure_io(loader: Any, *, seconds: float) -> dict[str, Any]:
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
    """Most memory that this process has had so far, in GiB."""
    import resource
    import sys

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)
