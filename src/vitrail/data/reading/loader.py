"""Batches in order, read ahead by threads and sent to the device while it computes.

Threads, not processes: decoding releases the GIL, blocks are shared, and nothing has to be forked or pickled. What a
rank reads is a slice of the global batch, named by counters alone; of each sample the whole window or, where ranks
share the sample, a slab of the turned crop. Augmentation happens on the device, on the stream that copies.

Steps in a row whose samples come from the same blocks are begun together, where memory holds their batches: the reader
then decodes each chunk once, right into all of them. While these batches are handed out, those after them are read.
Small items that lie ready are copied many at once; after an error they are read one by one, as all others are.

Bad data follow a policy: an error, or another sample in its place. Whatever a reading thread raises is raised where
batches are asked for, and a read that does not end is named there after a while, instead of waited for.
"""

import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.data.augment import Augmenter, Raw, window
from vitrail.data.batch import Batch, Statistics
from vitrail.data.normalize import Values
from vitrail.data.order.sampler import Order, Sample, choose
from vitrail.data.reading.pool import PATIENCE, Buffers, Job, Policy, Pool, Several, Skip, SlowRead, Stopped, Tally
from vitrail.data.reading.reader import Destination, Reader, WindowLayout
from vitrail.draws import sent
from vitrail.errors import BadData
from vitrail.layers.patches import Slab
from vitrail.recipe.sections import Augment

HANDFUL = 64 * 2**10  # bytes of samples that one thread reads before it asks for more
MANY = 256 * 2**10  # bytes of samples that are copied at once

_Ready = tuple[Batch, "torch.cuda.Event | None", list[Skip]]  # and when it is, on the device, and what was bad


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
        values: Values | None = None,
        policy: Policy | None = None,
    ):
        self.sampler, self.reader, self.counters = sampler, reader, counters
        self.device, self.workers, self.prefetch = device, workers, prefetch
        self.slab = slab  # of each crop, read alone
        of = None if reader.labelling is None else reader.labelling.of
        self.augmenter = augmenter or Augmenter(Augment(), reader.crop, seed=0, labels=of)
        # Of each source [C], or of each of its items [N, C].
        self.statistics = None if statistics is None else [s.tensors() for s in statistics]
        self.known = values  # what normalisation changes before augmentation, and scores must know
        reader.whole_images = getattr(self.augmenter, "settings", Augment()).resized_crop is not None
        self.bad = Tally()
        self.obey(policy or Policy())
        sizes = {reader.size_of(e.source, e.item, e.window or reader.crop) for e in sampler.extents}
        self.room = tuple(max(along) for along in zip(*sizes, strict=True))  # that holds every window
        self._values, self._labels = Buffers(), Buffers()  # memory of batches
        self._waiting: queue.Queue[_Ready | BaseException] | None = None  # batches that were read ahead
        self.samples: list[Sample] = []  # of the batch that was made last, of which some may stand for bad ones

    def obey(self, policy: Policy) -> None:
        """Treat bad data so from now on."""
        self.policy, self.reader.retries = policy, policy.retries

    def load(self, counters: Sequence[int], *, whole: bool = False) -> Batch:
        """Load the samples with these counters, now; `whole` crops even where slabs are read otherwise."""
        pool = Pool(max(1, self.workers))
        try:
            pending = self._start([self._choose(counters)], pool, whole=whole)[0]
            batch = self._finish(pending)
            self.bad.take(pending.skips)
            return batch
        finally:
            pool.close()

    def has_next(self) -> bool:
        """Tell whether the next of the batches that were asked for last is here, and no error in its place."""
        waiting = [] if self._waiting is None else list(self._waiting.queue)[:1]
        return bool(waiting) and not isinstance(waiting[0], BaseException)

    def batches(self, first: int, last: int) -> Generator[Batch, None, None]:
        """Yield batches of the steps first..last-1, read ahead by threads (or one at a time, with no workers)."""
        if self.workers == 0:
            yield from (self.load(self.counters(step)) for step in range(first, last))
            return
        ready: queue.Queue[_Ready | BaseException] = queue.Queue(maxsize=self.prefetch)
        self._waiting = ready
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
                batch, made, skips = got
                self.bad.take(skips)
                if made is not None:
                    # Made on the feeder's stream: wait for that, and keep the memory until this stream is done.
                    torch.cuda.current_stream().wait_event(made)
                    small = (*(batch.statistics or ()), *(batch.span or ()))
                    for tensor in (batch.values, batch.labels, batch.soft, *small):
                        if tensor is not None:
                            tensor.record_stream(torch.cuda.current_stream())
                yield batch
        finally:
            if self._waiting is ready:
                self._waiting = None
            stopped.set()
            pool.close()
            deadline = time.monotonic() + PATIENCE
            while feeder.is_alive() and time.monotonic() < deadline:  # it may be waiting to put
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
            visits, together = self._visits(first, last), 0
            while not stopped.is_set():
                while len(pending) < max(self.prefetch, together + 1) and (steps := next(visits, None)) is not None:
                    pending.extend(self._start(steps, pool))
                    together = len(steps) if len(steps) > 1 else 0
                if not pending:
                    return
                coming = pending.popleft()
                batch, skips = self._finish(coming), coming.skips
                del coming  # and with it the memory that it was read into
                made = torch.cuda.current_stream().record_event() if batch.values.is_cuda else None
                ready.put((batch, made, skips))
        except BaseException as error:
            ready.put(error)

    def _visits(self, first: int, last: int) -> "Iterator[list[_Step]]":
        """Yield steps that are begun together: all that have samples of some blocks, or one."""
        if self.sampler.reuse == 1:  # no block serves two of them
            yield from ([self._choose(self.counters(number))] for number in range(first, last))
            return
        steps: list[_Step] = []
        before: set[Any] = set()  # blocks of the step before these
        for number in range(first, last):
            step = self._choose(self.counters(number))
            if steps and (len(steps) == self._most_together(steps[0]) or step.blocks != steps[0].blocks):
                yield from _together_or_not(steps, before, step.blocks)
                steps, before = [], steps[-1].blocks
            steps.append(step)
            if self._most_together(step) == 1:
                yield steps
                steps, before = [], step.blocks
        yield from _together_or_not(steps, before, set())

    def _most_together(self, step: "_Step") -> int:
        """Return how many batches may be begun at once: those of a visit, if the memory for blocks holds them, or 1."""
        reader, visit = self.reader, self.sampler.reuse
        labels = 0 if reader.label_dtype is None else reader.label_dtype.itemsize
        size = len(step.samples) * math.prod(self.room) * (reader.channels * reader.dtype.itemsize + labels)
        fits = visit * size <= reader.cache_bytes
        return visit if fits and all(reader.reads_together(s.source) for s in step.samples) else 1

    def _choose(self, counters: Sequence[int]) -> "_Step":
        return _Step(list(counters), choose(self.sampler, counters))

    def _start(self, steps: "Sequence[_Step]", pool: Pool, *, whole: bool = False) -> "list[_Pending]":
        """Start to read the batches of some steps."""
        pending = [self._prepare(step, pool, len(steps), whole=whole) for step in steps]
        shared: dict[_Read, list[Job]] = {}
        if len(steps) > 1:
            blocks: dict[Any, list[_Read]] = {}
            for batch in pending:
                for read in batch.reads:
                    blocks.setdefault(_block_of(read.sample), []).append(read)
            for reads in blocks.values():
                calls = self.reader.read_together([read.place() for read in reads])
                name = partial(self.reader.name_of, reads[0].sample)  # which holds no memory of a batch
                jobs = [pool.submit(call, name) for call in calls]
                shared |= dict.fromkeys(reads, jobs)
        for batch in pending:
            if len(steps) == 1 and self._start_many(batch):
                continue
            alone = [read for read in batch.reads if not shared.get(read)]
            for read in batch.reads:
                read.shared = shared.get(read, [])
            _start_several(alone, pool)
        return pending

    def _start_many(self, pending: "_Pending") -> bool:
        """Read whole items that are alike many at once, where that can be done."""
        size = None if pending.slab is not None or not pending.samples else self.reader.reads_many(pending.samples)
        if size is None:
            return False
        out = pending.host.numpy()[(slice(None), slice(None), *(slice(0, n) for n in size))]
        each = max(1, MANY // max(1, out[0].nbytes))
        for first in range(0, len(out), each):
            some = slice(first, first + each)
            call = partial(self.reader.read_many, pending.samples[some], out[some])
            job = pending.pool.submit(call, partial(self._name_many, pending.samples[some]))
            pending.many.append((some, job))
        return True

    def _name_many(self, samples: Sequence[Sample]) -> str:
        others = f" and {len(samples) - 1} others" if len(samples) > 1 else ""
        return f"{self.reader.name_of(samples[0])}{others}"

    def _prepare(self, step: "_Step", pool: Pool, together: int, *, whole: bool) -> "_Pending":
        """Take memory for the batch of a step."""
        samples, reader = step.samples, self.reader
        # Ranks with parts of a sample would not all see that it is bad, and resampling needs what lies around.
        alone = not whole and not self.augmenter.resamples and self.room == reader.crop and self.policy.on_bad != "skip"
        slab = self.slab if alone else None
        variables = reader.sources[samples[0].source].variables if samples else reader.variables
        # Slabs lie along other axes in each file, but are all as large: they are kept flat until they are turned.
        room = self._room_of(samples)
        size = room if slab is None else (math.prod(slab.shape),)
        host = self._host((len(samples), len(variables), *size), reader.dtype, self._values, together)
        labels: Tensor | None = None
        if reader.label_dtype is not None:
            labels = self._host((len(samples), *room), reader.label_dtype, self._labels, together)
        return _Pending(self, pool, step.counters, list(samples), host, labels, slab, tuple(variables))

    def _room_of(self, samples: Sequence[Sample]) -> tuple[int, ...]:
        """Return what holds the windows of a batch; of whole images its own, as one panorama would enlarge them all.

        Another sample in place of a bad one may be of any size.
        """
        if not self.reader.whole_images or self.policy.on_bad == "skip" or not samples:
            return self.room
        sizes = {layout.size for layout in self.reader.layouts(samples)}
        return tuple(max(along) for along in zip(*sizes, strict=True))

    def _host(self, shape: tuple[int, ...], dtype: np.dtype, buffers: Buffers, together: int) -> Tensor:
        if self.device.type == "cuda":
            kind = torch.from_numpy(np.empty(0, dtype)).dtype
            return torch.empty(shape, dtype=kind, pin_memory=True)  # which PyTorch itself uses again
        # Batches that are being read, that wait, the one in use and the one before.
        batches = (2 * together if together > 1 else self.prefetch) + self.prefetch + 2
        limit = batches * math.prod(shape) * dtype.itemsize
        return torch.from_numpy(buffers.take(shape, dtype, limit=limit))

    def _finish(self, pending: "_Pending") -> Batch:
        reader = self.reader
        self.samples = samples = pending.wait(self.policy.limit)
        if pending.labels is not None:
            labels: Tensor | None = sent(pending.labels, self.device)
        elif reader.labelling is not None:
            labels = sent(reader.item_labels(samples), self.device)
        else:
            labels = None
        sources = [sample.source for sample in samples]
        statistics = None
        if self.statistics is not None:
            tables = self.statistics
            places = [(s.source, s.item if tables[s.source][0].ndim > 1 else None) for s in samples]
            known = list(dict.fromkeys(places))
            rows = torch.tensor([known.index(place) for place in places])
            each = [[t if item is None else t[item] for t in tables[source]] for source, item in known]
            mean, std = (sent(torch.stack(part)[rows], self.device) for part in zip(*each, strict=True))
            statistics = (mean, std)
        values = sent(pending.host, self.device)
        if self.known is not None and any(self.known.changing):
            values = self.known.change(values, pending.variables, statistics)
        layouts = reader.layouts(samples)
        if pending.slab is None and self._are_crops(samples, layouts):
            batch = Batch(pending.counters, values, labels, pending.variables, None, statistics)
        else:
            raw = Raw(
                counters=pending.counters,
                values=values,
                labels=labels,
                sizes=[layout.size for layout in layouts],
                scales=[layout.scale for layout in layouts],
                spacings=[layout.spacing for layout in layouts],
                orientations=[sample.orientation for sample in samples],
                sources=sources,
                variables=pending.variables,
                slab=pending.slab,
                statistics=statistics,
            )
            batch = self.augmenter(raw)
        if self.known is not None and self.known.scored:
            batch.span = self.known.span(sources, pending.variables, statistics, self.device)
        return batch

    def _are_crops(self, samples: Sequence[Sample], layouts: Sequence[WindowLayout]) -> bool:
        """Tell whether samples are what the objective is to see as they were read, neither turned nor resampled."""
        if self.augmenter.resamples or self.room != self.reader.crop or any(s.orientation for s in samples):
            return False
        return all(layout.size == self.room and set(layout.scale) <= {1.0} for layout in layouts)


def count_bad(*loaders: Loader) -> tuple[int, int]:
    """Count the samples skipped for batches of these loaders, and the chunks that their sources have filled, so far."""
    filled = {id(source): getattr(source, "filled", 0) for loader in loaders for source in loader.reader.sources}
    return sum(loader.bad.total for loader in loaders), sum(filled.values())


@dataclass(eq=False)
class _Read:
    """One sample into its row of a batch, or another sample in its place; tells which it was."""

    loader: Loader
    pool: Pool
    counter: int
    sample: Sample
    out: np.ndarray
    labels: np.ndarray | None
    slab: Slab | None
    shared: list[Job] = field(default_factory=list)  # that read it together with others
    own: tuple[Job, int] | None = None  # that reads it by itself, after so many others
    skips: list[Skip] = field(default_factory=list)  # samples that it was to be before

    def name(self) -> str:
        return self.loader.reader.name_of(self.sample)

    def wait_for_others(self, limit: float) -> None:
        """Wait for what is read together; after an error read the sample by itself, so that it meets its own errors."""
        failed = False
        for job in self.shared:  # all of them: none may write to the row any more
            failed |= not _is_done(job, limit, Exception)
        if failed:
            _start_several([self], self.pool, urgent=True)

    def result(self, limit: float) -> Sample:
        own, self.own = self.own, None  # it refers to this read, and both to the memory of a batch
        return self.sample if own is None else own[0].result(limit)[own[1]]

    def __call__(self) -> Sample:
        loader, reader = self.loader, self.loader.reader
        while True:
            try:
                place = self.place()
                touched = self._touched if loader.augmenter.resamples else None
                reader.read_into(place.out, place.sample, place.labels, place.window, touched)
                return self.sample
            except BadData as error:
                if not loader.policy.skips(error):
                    raise
                item = reader.item(self.sample.source, self.sample.item)
                loader.bad.meet(item.name, error, loader.policy.most)
                self.skips.append((item.name, str(error)))
                self.sample = loader.sampler(self.counter, self.sample.attempt + 1)

    def place(self) -> Destination:
        """Return where the sample goes, and what of it."""
        sample, whole = self.sample, self.sample.window or self.loader.reader.crop
        if self.slab is not None:
            region = window(sample.orientation, self.slab)
            out = self.out.reshape(len(self.out), *(r.stop - r.start for r in region))
            return Destination(sample, region, out, self.labels)
        inside = tuple(slice(0, n) for n in self.loader.reader.size_of(sample.source, sample.item, whole))
        labels = None if self.labels is None else self.labels[inside]
        return Destination(sample, tuple(slice(0, n) for n in whole), self.out[(slice(None), *inside)], labels)

    def _touched(self, spans: Sequence[np.ndarray]) -> np.ndarray | None:
        """Tell which boxes of its window the sample is made of; None for all."""
        if self.slab is not None:
            return None
        (layout,) = self.loader.reader.layouts([self.sample])
        where = (layout.size, layout.spacing, layout.scale, self.sample.orientation)
        return self.loader.augmenter.touched(self.counter, *where, spans)


def _start_several(reads: Sequence[_Read], pool: Pool, *, urgent: bool = False) -> None:
    """Start reads, small ones by the handful: a job costs more than the copy of a few KiB."""
    if not reads:
        return
    size, workers = max(1, reads[0].out.nbytes), max(1, reads[0].loader.workers)
    handful = max(1, min(HANDFUL // size, len(reads) // workers))
    for first in range(0, len(reads), handful):
        some = reads[first : first + handful]
        job = pool.put(Several(some, [read.name for read in some]), urgent=urgent)
        for place, read in enumerate(some):
            read.own = job, place


class _Step(NamedTuple):
    """The samples of a batch."""

    counters: list[int]
    samples: list[Sample]

    @property
    def blocks(self) -> set[Any]:
        return {_block_of(sample) for sample in self.samples}


def _together_or_not(steps: list[_Step], before: set[Any], after: set[Any]) -> list[list[_Step]]:
    """Join steps of the same blocks to one visit, unless others of about the same blocks come before or after them.

    Then blocks that are kept serve them all; such are those of tiles, where each lane goes on by itself.
    """
    if not steps:
        return []
    blocks = steps[0].blocks
    few = (len(blocks) - 1) // 2  # blocks that are met again by chance
    whole = len(blocks & before) <= few and len(blocks & after) <= few
    return [steps] if whole else [[step] for step in steps]


def _block_of(sample: Sample) -> Any:
    return (sample.source, sample.item, *[(b.start, b.stop) for b in sample.block])


@dataclass
class _Pending:
    """A batch whose samples are still being read: many at once, or each by itself or together with others."""

    loader: Loader
    pool: Pool
    counters: list[int]
    samples: list[Sample]
    host: Tensor
    labels: Tensor | None  # of voxels
    slab: Slab | None
    variables: tuple[str, ...]
    many: list[tuple[slice, Job]] = field(default_factory=list)  # and which rows of the batch they read
    skips: list[Skip] = field(default_factory=list)  # bad samples, once all are read

    @cached_property
    def reads(self) -> list[_Read]:
        """List what is to be read into each row."""
        rows = [None] * len(self.samples) if self.labels is None else list(self.labels.numpy())
        each = zip(self.counters, self.samples, self.host.numpy(), rows, strict=True)
        return [_Read(self.loader, self.pool, *given, self.slab) for given in each]

    def wait(self, limit: float) -> list[Sample]:
        """Wait for the samples and return them as they were read: some may stand for bad ones."""
        mended = (BadData, OSError, EOFError)  # any other error is a mistake of the source
        if self.many and not (failed := [rows for rows, job in self.many if not _is_done(job, limit, mended)]):
            return self.samples
        if self.many:  # none writes to the batch any more
            for rows in failed:
                _start_several(self.reads[rows], self.pool, urgent=True)
        for read in self.reads:
            read.wait_for_others(limit)
        found = [read.result(limit) for read in self.reads]
        self.skips = [skip for read in self.reads for skip in read.skips]
        return found


def _is_done(job: Job, limit: float, mended: type[Exception] | tuple[type[Exception], ...]) -> bool:
    """Wait for a job and tell whether it ended well; after such errors samples are read by themselves."""
    try:
        job.result(limit)
    except (SlowRead, Stopped):
        raise
    except mended:  # and each meets its own
        return False
    return True
