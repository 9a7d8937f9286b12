"""Batches in order, read ahead by threads and sent to the device while it computes.

Threads, not processes: decoding releases the GIL, blocks are shared, and nothing has to be forked or pickled. What a
rank reads is a slice of the global batch, named by counters alone; of each sample the whole window or, where ranks
share the sample, a slab of the turned crop. Augmentation happens on the device, on the stream that copies.

Bad data follow a policy: an error, or another sample in its place. Whatever a reading thread raises is raised where
batches are asked for, and a read that does not end is named there after a while, instead of waited for.
"""

import math
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vitrail.data.augment import Augmenter, Raw, window
from vitrail.data.bad import BadData, Policy, Tally
from vitrail.data.batch import Batch, Statistics
from vitrail.data.buffers import Buffers
from vitrail.data.pool import Job, Pool
from vitrail.data.reader import Reader
from vitrail.data.sampler import Order, Sample
from vitrail.layers.parts import Slab
from vitrail.recipe.sections import Augment

_Ready = tuple[Batch, "torch.cuda.Event | None"]  # and when it is, on the device


class Loader:
    """Reads samples by counter, one batch at a time or ahead of training; `counters(step)` names a step's samples."""

    def __init__(
        self,
        sampler: Order,
        reader: Reader,
        counters: Callable[[int], Sequence[int]] = lambda step: (),
        *,
        device: torch.device,
        workers: int,
        prefetch: int,
        slab: Slab | None = None,
        augmenter: Augmenter | None = None,
        statistics: Sequence[Statistics] | None = None,
        policy: Policy | None = None,
    ):
        self.sampler, self.reader, self.counters = sampler, reader, counters
        self.device, self.workers, self.prefetch = device, workers, prefetch
        self.slab = slab  # of each crop, read alone
        of = None if reader.labelling is None else reader.labelling.of
        self.augmenter = augmenter or Augmenter(Augment(), reader.crop, seed=0, labels=of)
        self.statistics = None if statistics is None else [s.tensors() for s in statistics]  # of each source
        reader.whole_images = getattr(self.augmenter, "settings", Augment()).resized_crop is not None
        self.bad = Tally()
        self.obey(policy or Policy())
        sizes = {reader.size_of(e.source, e.item, e.window or reader.crop) for e in sampler.extents}
        self.room = tuple(max(along) for along in zip(*sizes, strict=True))  # that holds every window
        self._values, self._labels = Buffers(), Buffers()  # memory of batches
        self.samples: list[Sample] = []  # of the batch that was made last, of which some may stand for bad ones

    def obey(self, policy: Policy) -> None:
        """Treat bad data so from now on."""
        self.policy, self.reader.retries = policy, policy.retries

    def load(self, counters: Sequence[int], *, whole: bool = False) -> Batch:
        """The samples with these counters, now; `whole` crops even where slabs are read otherwise."""
        pool = Pool(max(1, self.workers))
        try:
            return self._finish(self._start(counters, pool, whole=whole))
        finally:
            pool.close()

    def batches(self, first: int, last: int) -> Iterator[Batch]:
        """Batches of the steps first..last-1, read ahead by threads (or one at a time, with no workers)."""
        if self.workers == 0:
            yield from (self.load(self.counters(step)) for step in range(first, last))
            return
        ready: queue.Queue[_Ready | BaseException] = queue.Queue(maxsize=self.prefetch)
        stopped = threading.Event()
        pool = Pool(self.workers)
        feeder = threading.Thread(
            target=self._feed, args=(first, last, pool, ready, stopped), name="vitrail-feeder", daemon=True
        )
        feeder.start()
        try:
            for _ in range(first, last):
                got = ready.get()
                if isinstance(got, BaseException):
                    raise got
                batch, made = got
                if made is not None:
                    # Made on the feeder's stream: wait for that, and keep the memory until this stream is done.
                    torch.cuda.current_stream().wait_event(made)
                    for tensor in (batch.values, batch.labels, batch.soft, *(batch.statistics or ())):
                        if tensor is not None:
                            tensor.record_stream(torch.cuda.current_stream())
                yield batch
        finally:
            stopped.set()
            pool.close()
            while feeder.is_alive():  # it may be waiting to put
                try:
                    ready.get_nowait()
                except queue.Empty:
                    feeder.join(0.01)

    def _feed(
        self,
        first: int,
        last: int,
        pool: Pool,
        ready: "queue.Queue[_Ready | BaseException]",
        stopped: threading.Event,
    ) -> None:
        pending: deque[_Pending] = deque()
        try:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
                torch.cuda.set_stream(torch.cuda.Stream())  # of this thread alone
            upcoming = iter(range(first, last))
            while not stopped.is_set():
                while len(pending) < self.prefetch and (step := next(upcoming, None)) is not None:
                    pending.append(self._start(self.counters(step), pool))
                if not pending:
                    return
                batch = self._finish(pending.popleft())
                ready.put((batch, torch.cuda.current_stream().record_event() if batch.values.is_cuda else None))
        except BaseException as error:
            ready.put(error)

    def _start(self, counters: Sequence[int], pool: Pool, *, whole: bool = False) -> "_Pending":
        samples, reader = [self.sampler(counter) for counter in counters], self.reader
        # Ranks with parts of a sample would not all see that it is bad, and resampling needs what lies around.
        alone = not whole and not self.augmenter.resamples and self.room == reader.crop and self.policy.on_bad != "skip"
        slab = self.slab if alone else None
        variables = reader.sources[samples[0].source].variables if samples else reader.variables
        # Slabs lie along other axes in each file, but are all as large: they are kept flat until they are turned.
        room = self._room_of(samples)
        size = room if slab is None else (math.prod(slab.shape),)
        host = self._host((len(samples), len(variables), *size), reader.dtype, self._values)
        labels: Tensor | None = None
        rows: Sequence[np.ndarray | None] = [None] * len(samples)
        if reader.label_dtype is not None:
            labels = self._host((len(samples), *room), reader.label_dtype, self._labels)
            rows = list(labels.numpy())
        jobs = []
        for counter, out, row, sample in zip(counters, host.numpy(), rows, samples, strict=True):
            read = _Read(self, counter, sample, out, row, slab)
            jobs.append(pool.submit(read, read.name))
        return _Pending(list(counters), host, labels, slab, tuple(variables), jobs)

    def _room_of(self, samples: Sequence[Sample]) -> tuple[int, ...]:
        """What holds the windows of a batch: of whole images that of its own, as one panorama would enlarge them all.

        Another sample in place of a bad one may be of any size.
        """
        if not self.reader.whole_images or self.policy.on_bad == "skip" or not samples:
            return self.room
        sizes = [self.reader.size_of(s.source, s.item, s.window or self.reader.crop) for s in samples]
        return tuple(max(along) for along in zip(*sizes, strict=True))

    def _host(self, shape: tuple[int, ...], dtype: np.dtype, buffers: Buffers) -> Tensor:
        if self.device.type == "cuda":
            kind = torch.from_numpy(np.empty(0, dtype)).dtype
            return torch.empty(shape, dtype=kind, pin_memory=True)  # which PyTorch itself uses again
        batches = 2 * self.prefetch + 2  # that are being read, that wait, the one in use and the one before
        limit = batches * math.prod(shape) * dtype.itemsize
        return torch.from_numpy(buffers.take(shape, dtype, limit=limit))

    def _finish(self, pending: "_Pending") -> Batch:
        reader = self.reader
        samples: list[Sample] = [job.result(self.policy.limit) for job in pending.jobs]
        self.samples = samples
        if pending.labels is not None:
            labels: Tensor | None = pending.labels.to(self.device, non_blocking=True)
        elif reader.labelling is not None:
            classes = [reader.item_label(sample) for sample in samples]
            labels = torch.tensor(classes, dtype=torch.int64).to(self.device)
        else:
            labels = None
        items = [reader.sources[sample.source].items[sample.item] for sample in samples]
        factors = [reader.factors(s.source, s.item, s.window or reader.crop) for s in samples]
        scales = [[s / f for s, f in zip(i.scale, each, strict=True)] for i, each in zip(items, factors, strict=True)]
        spacings = [
            [s * f for s, f in zip(i.spacing, each, strict=True)] for i, each in zip(items, factors, strict=True)
        ]
        statistics = None
        if self.statistics is not None:
            rows = [self.statistics[sample.source] for sample in samples]
            mean, std = (torch.stack(part).to(self.device) for part in zip(*rows, strict=True))
            statistics = (mean, std)
        raw = Raw(
            counters=pending.counters,
            values=pending.host.to(self.device, non_blocking=True),
            labels=labels,
            sizes=[reader.size_of(s.source, s.item, s.window or reader.crop) for s in samples],
            scales=[reader.kept(s.source, s.item, each) for s, each in zip(samples, scales, strict=True)],
            spacings=[reader.kept(s.source, s.item, each) for s, each in zip(samples, spacings, strict=True)],
            orientations=[sample.orientation for sample in samples],
            sources=[sample.source for sample in samples],
            variables=pending.variables,
            slab=pending.slab,
            statistics=statistics,
        )
        return self.augmenter(raw)


def count_bad(*loaders: Loader) -> tuple[int, int]:
    """Samples that these loaders have skipped, and chunks that their sources have filled, so far."""
    filled = {id(source): getattr(source, "filled", 0) for loader in loaders for source in loader.reader.sources}
    return sum(loader.bad.total for loader in loaders), sum(filled.values())


class _Read:
    """One sample into its row of a batch, or another sample in its place; tells which it was."""

    def __init__(
        self,
        loader: Loader,
        counter: int,
        sample: Sample,
        out: np.ndarray,
        labels: np.ndarray | None,
        slab: Slab | None,
    ):
        self.loader, self.counter, self.sample = loader, counter, sample
        self.out, self.labels, self.slab = out, labels, slab

    def name(self) -> str:
        return self.loader.reader.name_of(self.sample)

    def __call__(self) -> Sample:
        loader, reader = self.loader, self.loader.reader
        while True:
            try:
                self._read(reader)
                return self.sample
            except BadData as error:
                if not loader.policy.skips(error):
                    raise
                item = reader.sources[self.sample.source].items[self.sample.item]
                loader.bad.add(item.name, error, loader.policy.most)
                self.sample = loader.sampler(self.counter, self.sample.attempt + 1)

    def _read(self, reader: Reader) -> None:
        sample = self.sample
        if self.slab is not None:
            region = window(sample.orientation, self.slab)
            out = self.out.reshape(len(self.out), *(r.stop - r.start for r in region))
            reader.read_into(out, sample, self.labels, region)
            return
        size = reader.size_of(sample.source, sample.item, sample.window or reader.crop)
        inside = tuple(slice(0, n) for n in size)
        labels = None if self.labels is None else self.labels[inside]
        reader.read_into(self.out[(slice(None), *inside)], sample, labels)


@dataclass(frozen=True)
class _Pending:
    """A batch whose samples are still being read."""

    counters: list[int]
    host: Tensor
    labels: Tensor | None  # of voxels
    slab: Slab | None
    variables: tuple[str, ...]
    jobs: list[Job]
