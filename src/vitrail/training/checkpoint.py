"""Checkpoints that survive a kill at any instant; weights/runs.py says what one is, and reads it.

One is written into a hidden folder, the manifest last, and published by one rename.
"""

import contextlib
import json
import math
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from vitrail import disk
from vitrail.errors import UserError
from vitrail.parallel.agree import Group, gather_json, share_json
from vitrail.parallel.mesh import Mesh, local, spread_like
from vitrail.report.facts import strict
from vitrail.sums import sealed, sum_of_file
from vitrail.weights.runs import (
    FORMAT,
    MANIFEST,
    BadCheckpoint,
    checkpoint_name,
    list_checkpoints,
    read_manifest,
    reason_of,
    verify,
)
from vitrail.weights.safe_dcp import TensorReader, TensorWriter, UnsafeCheckpoint

BEST = "best.json"
WRITTEN = re.compile(r"manifest\.json|\.metadata(\.tmp)?|__\d+_\d+\.distcp|\.manifest\.json\.[0-9a-f]{16}\.part")


def is_own(folder: Path) -> bool:
    """Tell whether a folder (no link) holds only files that a save writes; any other is never removed."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    return all(WRITTEN.fullmatch(p.name) and p.is_file() and not p.is_symlink() for p in folder.iterdir())


class Checkpoints:
    """The checkpoints of one run: saves in the background, keeps the last few and the best, finds the newest good.

    Only the next step shows that a checkpoint is good, by its finite loss. So one is removed when there is a newer one
    that was followed by such a step; with `keep=1` there are two until the run is done.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        background: bool,
        group: Group,
        cpu_mesh: Mesh,
        larger_is_better: bool = False,
    ):
        self.folder, self.keep, self.background = folder, keep, background
        self.larger_is_better = larger_is_better  # of the metric that the best is chosen by
        self.group, self.cpu_mesh = group, cpu_mesh  # planned over gloo, whatever computes
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.check: Callable[[], None] = lambda: None  # raises UserError where the folder is this run's no more
        self.best: tuple[float, int] | None = None  # metric and step
        self._best_before: tuple[float, int] | None = None  # what was best before the save under way
        self._failed = False  # the last save that ended
        self._thread: threading.Thread | None = None
        self._outcome: dict[str, Any] | None = None

    def save(self, step: int, state: dict[str, Tensor], manifest: dict[str, Any], metric: float | None = None) -> None:
        """Copy the state now, write it in the background; the copy is what is saved, whatever training does next."""
        self._join()
        if self._failed:  # taken back here, not when a rank happens to hear of it, so that all ranks agree on the best
            self.best = self._best_before
        self._best_before = self.best
        staged = {name: self._staged(tensor) for name, tensor in state.items()}
        if metric is not None and self.is_better(metric):
            self.best = (metric, step)
        best = {pair[1] for pair in (self.best, self._best_before) if pair}
        if "metrics" in manifest:  # a score that does not exist, of a class that never occurs, is no number of JSON
            manifest = manifest | {"metrics": strict(manifest["metrics"])}
        job = threading.Thread(target=self._write, args=(step, staged, manifest, best), daemon=True)
        self._thread = job
        job.start()
        if not self.background:
            job.join()

    def _staged(self, tensor: Tensor) -> Tensor:
        copied = local(tensor).detach().to("cpu", copy=True)
        mesh = self.cpu_mesh.like(tensor.device_mesh) if isinstance(tensor, DTensor) else None
        return spread_like(tensor, copied, mesh)

    def _write(self, step: int, state: dict[str, Tensor], manifest: dict[str, Any], best: set[int]) -> None:
        began = time.monotonic()
        try:
            size, error = self._write_together(step, state, manifest, best)
        except BaseException as caught:  # another rank is gone: there is nobody to agree with
            size, error = 0, reason_of(caught)
        self._failed = error is not None
        self._outcome = {"step": step, "error": error, "seconds": time.monotonic() - began, "bytes": size}

    def _write_together(
        self, step: int, state: dict[str, Tensor], manifest: dict[str, Any], best: set[int]
    ) -> tuple[int, str | None]:
        """Write this rank's tensors, and on rank 0 the rest; returns bytes written and an error, alike on all ranks."""
        # Agreed on before PyTorch's own collectives: a rank that stays away from those would leave the others waiting.
        held = {name: local(tensor) for name, tensor in state.items()}
        mine = [sum(t.nbytes for t in held.values()), next((n for n, t in held.items() if not _is_finite(t)), None)]
        sizes, broken = zip(*gather_json(mine, self.group), strict=True)
        needed, bad = sum(sizes), next((name for name in broken if name), None)
        if bad is not None:
            return 0, f"{bad!r} has values that are not finite, so it would replace a good one by one of no use"
        made, error = share_json(self._make_room(step, needed, best) if self.rank == 0 else None, self.group)
        if error is not None:
            return 0, error
        partial = self.folder / made
        sums: dict[str, dict[str, int]] = {}
        try:
            dcp.save(state, storage_writer=TensorWriter(partial), process_group=self.group, no_dist=False)
            files = [p for p in partial.iterdir() if p.name.startswith(f"__{self.rank}_")]
            files += [partial / ".metadata"] if self.rank == 0 else []
            sums = {p.name: {"bytes": p.stat().st_size, "crc32": sum_of_file(p)} for p in files}
        except (Exception, CheckpointException) as caught:
            error = reason_of(caught)
        reports = gather_json({"error": error, "files": sums}, self.group)
        errors = [f"rank {rank}: {r['error']}" for rank, r in enumerate(reports) if r["error"]]
        size = sum(f["bytes"] for r in reports for f in r["files"].values())
        if self.rank == 0:
            try:
                if not errors:
                    all_files = {name: entry for r in reports for name, entry in r["files"].items()}
                    self._publish(step, partial, manifest | {"format": FORMAT, "step": step, "files": all_files})
            except Exception as caught:
                errors = [reason_of(caught)]
            # What is not removed now is removed before the next save; the others wait to hear, whatever happens here.
            with contextlib.suppress(OSError, UserError):
                if errors:
                    free = shutil.disk_usage(self.folder).free
                    if free < needed:  # PyTorch may report a full disk in other words
                        errors[0] += f"; {_size(free)} are free, a checkpoint needs {_size(needed)}"
                    disk.remove(partial, inside=self.folder)
                else:
                    self._prune(max(2, self.keep))
                    self._mark_best()
        return size, share_json(errors[0] if errors else None, self.group)

    def _make_room(self, step: int, needed: int, best: set[int]) -> tuple[str, str | None]:
        """Make a hidden folder, if there is room for a checkpoint; returns its name, or what went wrong."""
        try:
            self.check()
            self.folder.mkdir(exist_ok=True)
            for leftover in self.folder.glob(".partial-step-*"):  # by a kill
                self._discard(leftover)
            self._prune(self.keep, best)  # the newest of these was followed by the step that is saved now
            check_space(self.folder, needed)
            partial = self.folder / f".partial-{checkpoint_name(step)}-{secrets.token_hex(4)}"
            partial.mkdir()
            return partial.name, None
        except (OSError, UserError) as caught:
            return "", str(caught).partition("; ")[0] if isinstance(caught, UserError) else reason_of(caught)

    def _publish(self, step: int, partial: Path, manifest: dict[str, Any]) -> None:
        missing = [name for name in manifest["files"] if not (partial / name).is_file()]
        if missing:
            raise OSError(f"rank 0 does not see {missing[0]}: run.dir must lie on a disk that all ranks share")
        disk.write_whole(partial / MANIFEST, json.dumps(sealed(manifest), sort_keys=True))
        disk.sync_folder(partial)
        self.check()
        final = self.folder / checkpoint_name(step)
        self._discard(final)  # a checkpoint that failed verification, made again
        disk.publish(partial, final)
        with contextlib.suppress(OSError):  # it is there, so it has not failed; the next save flushes its name, too
            disk.sync_folder(self.folder)

    def _discard(self, folder: Path) -> None:
        """Remove what a save has written, if that can be; anything else stays where it is."""
        with contextlib.suppress(OSError, UserError):
            if is_own(folder):
                disk.remove(folder, inside=self.folder)

    def _prune(self, keep: int, best: set[int] | None = None) -> None:
        """Remove all but the newest and the best; folders of other things are not counted."""
        best = {self.best[1]} if best is None and self.best else best or set()
        saved = [p for p in list_checkpoints(self.folder) if is_own(p) and (p / MANIFEST).is_file()]
        for old in saved[keep:]:
            if int(old.name[5:]) not in best:
                doomed = old.with_name(f".partial-{old.name}")
                with contextlib.suppress(OSError):  # a name that is taken: the next save tries again
                    disk.publish(old, doomed)  # so that a kill leaves no half checkpoint under a good name
                    self._discard(doomed)

    def _mark_best(self) -> None:
        """Tell whoever lists the folder which checkpoint is the best; `--checkpoint best` asks the manifests."""
        if self.best is not None:
            told = {"checkpoint": checkpoint_name(self.best[1]), "score": self.best[0]}
            disk.write_whole(self.folder / BEST, json.dumps(told) + "\n", durable=False)

    def tidy(self) -> None:
        """Keep no more than was asked for, at a good end."""
        with contextlib.suppress(OSError):  # a disk that does not answer: too many do no harm
            self.check()
            self._prune(self.keep)

    def wait(self) -> dict[str, Any] | None:
        """Let the save under way finish; returns its outcome once (step, error, seconds, bytes)."""
        self._join()
        outcome, self._outcome = self._outcome, None
        return outcome

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def is_saving(self) -> bool:
        """Tell whether a checkpoint is being written."""
        return self._thread is not None and self._thread.is_alive()

    def finished(self) -> dict[str, Any] | None:
        """Return the outcome of a save that has ended since the last call, without waiting."""
        return self.wait() if self._thread is not None and not self._thread.is_alive() else None

    # ------------------------------------------------------------ loading

    def load_newest(
        self, load: Callable[[Path, dict[str, Any]], None], note: Callable[[str], None]
    ) -> dict[str, Any] | None:
        """Load the newest checkpoint that every rank finds whole and can load; bad ones are named and passed over."""
        for path in share_json([str(p) for p in list_checkpoints(self.folder)], self.group):
            folder = Path(path)
            manifest: dict[str, Any] = {}
            error = None
            try:
                manifest = read_manifest(folder)
                verify(folder, manifest, rank=self.rank, world=self.world)
                TensorReader(folder, set(manifest["files"])).read_metadata()
            except (BadCheckpoint, UnsafeCheckpoint, OSError) as caught:
                error = str(caught) or repr(caught)
            errors = [e for e in gather_json(error, self.group) if e]
            if not errors:
                try:
                    load(folder, manifest)  # collective: what is wrong with the files themselves is wrong on every rank
                except ValueError as caught:
                    error = str(caught) or repr(caught)
                errors = [e for e in gather_json(error, self.group) if e]
            if not errors:
                return manifest
            note(f"checkpoint {folder} is passed over: {errors[0]}")
        return None

    def set_aside_newer(self, step: int) -> None:
        """Rename checkpoints after this step: they are unusable, and must not count among those that are kept."""
        for folder in list_checkpoints(self.folder):
            if int(folder.name[5:]) > step:
                number, aside = 2, folder.with_name(f"unusable-{folder.name}")
                self._discard(aside)
                while os.path.lexists(aside):
                    number, aside = number + 1, folder.with_name(f"unusable-{folder.name}-{number}")
                disk.publish(folder, aside)

    def is_better(self, metric: float) -> bool:
        """Tell whether a metric is better than the best so far; one that is not a number never is."""
        if not math.isfinite(metric):
            return False
        return self.best is None or (metric > self.best[0] if self.larger_is_better else metric < self.best[0])

    def remember_best(self, metric_name: str) -> None:
        """Find the best metric among the checkpoints that are there."""
        for folder in list_checkpoints(self.folder):
            try:
                value = (read_manifest(folder).get("metrics") or {}).get(metric_name)
            except (BadCheckpoint, UserError):
                continue
            if isinstance(value, int | float) and self.is_better(value):
                self.best = (value, int(folder.name[5:]))


def _is_finite(tensor: Tensor) -> bool:
    """Tell whether all values are finite, in one pass that takes no memory."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    return all(bool(end.isfinite()) for end in tensor.aminmax())


def _size(number: int) -> str:
    return f"{number / 2**30:.2f} GiB" if number >= 2**30 else f"{number / 2**20:.2f} MiB"


def check_space(folder: Path, needed: int) -> None:
    """Refuse to start what cannot be saved."""
    place = folder
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < needed:
        raise UserError(
            f"{place} has {_size(free)} free, but a checkpoint needs about {_size(needed)}; "
            "free some space or choose another run.dir"
        )
