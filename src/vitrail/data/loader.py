"""Batches in order, read ahead by threads and sent to the device while it computes.

Threads, not processes: decoding releases the GIL, blocks are shared, and nothing has to be forked or pickled. What a
rank reads is a slice of the global batch, named by counters alone; of each sample the whole crop or, where ranks share
the sample, a slab of the turned crop.
"""

import math
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vitrail.data.augment import orient, window
from vitrail.data.batch import Batch
from vitrail.data.reader import Reader
from vitrail.data.sampler import Sample, Sampler
from vitrail.layers.parts import Slab


class Loader:
    """Reads samples by counter, one batch at a time or ahead of training; `counters(step)` names a step's samples."""

    def __init__(
        self,
        sampler: Sampler,
        reader: Reader,
        counters: Callable[[int], Sequence[int]] = lambda step: (),
        *,
        device: torch.device,
        workers: int,
        prefetch: int,
        slab: Slab | None = None,
    ):
        self.sampler, self.reader, self.counters = sampler, reader, counters
        self.device, self.workers, self.prefetch = device, workers, prefetch
        self.slab = slab  # of each crop, read alone

    def load(self, counters: Sequence[int], *, whole: bool = False) -> Batch:
        """The samples with these counters, now; `whole` crops even where slabs are read otherwise."""
        slab = None if whole else self.slab
        if self.workers == 0:
            return self._finish(self._start(counters, None, slab))
        with ThreadPoolExecutor(self.workers, thread_name_prefix="vitrail-reader") as pool:
            return self._finish(self._start(counters, pool, slab))

    def batches(self, first: int, last: int) -> Iterator[Batch]:
        """Batches of the steps first..last-1, read ahead by threads (or at once, with no workers)."""
        if self.workers == 0:
            yield from (self.load(self.counters(step)) for step in range(first, last))
            return
        ready: queue.Queue[Batch | BaseException] = queue.Queue(maxsize=self.prefetch)
        stopped = threading.Event()
        pool = ThreadPoolExecutor(self.workers, thread_name_prefix="vitrail-reader")
        feeder = threading.Thread(target=self._feed, args=(first, last, pool, ready, stopped), daemon=True)
        feeder.start()
        try:
            for _ in range(first, last):
                got = ready.get()
                if isinstance(got, BaseException):
                    raise got
                if got.values.is_cuda:
                    # Copied on the feeder's stream: wait for the copy, and keep the memory until this stream is done.
                    torch.cuda.current_stream().wait_stream(self._copy_stream)
                    for tensor in (got.values, got.labels):
                        if tensor is not None:
                            tensor.record_stream(torch.cuda.current_stream())
                yield got
        finally:
            stopped.set()
            while feeder.is_alive():  # it may be waiting to put
                try:
                    ready.get_nowait()
                except queue.Empty:
                    feeder.join(0.01)
            pool.shutdown(wait=True, cancel_futures=True)

    def _feed(
        self,
        first: int,
        last: int,
        pool: ThreadPoolExecutor,
        ready: "queue.Queue[Batch | BaseException]",
        stopped: threading.Event,
    ) -> None:
        pending: deque[_Pending] = deque()
        try:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
                self._copy_stream = torch.cuda.Stream()
                torch.cuda.set_stream(self._copy_stream)
            upcoming = iter(range(first, last))
            while not stopped.is_set():
                while len(pending) < self.prefetch and (step := next(upcoming, None)) is not None:
                    pending.append(self._start(self.counters(step), pool, self.slab))
                if not pending:
                    return
                ready.put(self._finish(pending.popleft()))
        except BaseException as error:
            ready.put(error)

    def _start(self, counters: Sequence[int], pool: ThreadPoolExecutor | None, slab: Slab | None) -> "_Pending":
        samples = [self.sampler(counter) for counter in counters]
        reader = self.reader
        # Slabs lie along other axes in each file, but are all as large: they are kept flat until they are turned.
        size = reader.crop if slab is None else (math.prod(slab.shape),)
        host = self._host((len(samples), reader.channels, *size), reader.dtype)
        labels: Tensor | None = None
        rows: Sequence[np.ndarray | None] = [None] * len(samples)
        if reader.label_dtype is not None:
            labels = self._host((len(samples), *reader.crop), reader.label_dtype)
            rows = list(labels.numpy())
        jobs = []
        for out, row, sample in zip(host.numpy(), rows, samples, strict=True):
            region = None if slab is None else window(sample.orientation, slab)
            if region is not None:
                out = out.reshape(reader.channels, *(r.stop - r.start for r in region))
            if pool is None:
                reader.read_into(out, sample, row, region)
            else:
                jobs.append(pool.submit(reader.read_into, out, sample, row, region))
        return _Pending(list(counters), samples, host, labels, slab, jobs)

    def _host(self, shape: tuple[int, ...], dtype: np.dtype) -> Tensor:
        kind = torch.from_numpy(np.empty(0, dtype)).dtype
        return torch.empty(shape, dtype=kind, pin_memory=self.device.type == "cuda")

    def _finish(self, pending: "_Pending") -> Batch:
        for job in pending.jobs:
            job.result()
        codes = [sample.orientation for sample in pending.samples]
        values = orient(pending.host.to(self.device, non_blocking=True), codes, pending.slab)
        labels: Tensor | None = None
        if pending.labels is not None:  # turned as a channel of the image would be
            labels = orient(pending.labels.to(self.device, non_blocking=True)[:, None], codes)[:, 0]
        elif self.reader.labelling is not None:
            classes = [self.reader.item_label(sample) for sample in pending.samples]
            labels = torch.tensor(classes, dtype=torch.int64).to(self.device)
        return Batch(pending.counters, values, labels, self.reader.variables, pending.slab)


@dataclass(frozen=True)
class _Pending:
    """A batch whose samples are still being read."""

    counters: list[int]
    samples: list[Sample]
    host: Tensor
    labels: Tensor | None  # of voxels
    slab: Slab | None
    jobs: "list[Future[None]]"
