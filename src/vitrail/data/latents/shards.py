"""Latents that take long to make: shards written by many processes, each whole or not at all, found again after a kill.

- the plan (what is encoded, by what, in which shards) is written first; another plan is refused there
- a shard carries the moments of its rows in its header, so that exact statistics need no second reading; they are
  merged in the order of the shards, and are the same however many processes there were
- a shard that does not match its checksums is written anew
- the index comes last: without it, nothing reads the folder
- for Zarr the shards lie in a hidden folder beside it, until all rows are copied from them
"""

import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vitrail import disk
from vitrail.data.files.fingerprint import changed
from vitrail.data.latents.store import (
    PLAN,
    Moments,
    Rows,
    describe,
    joined,
    open_rows,
    open_shard,
    row_sums,
    shard_bytes,
    write_index,
    write_latents,
)
from vitrail.disk import write_whole
from vitrail.errors import BadData, UserError
from vitrail.foreign import read_plain
from vitrail.recipe.load import diff
from vitrail.sums import sealed, unsealed

HEADER = "vitrail"  # name of a shard's facts in its header
_SHARD = re.compile(r"latents-\d{5,}\.safetensors")


class ShardedLatents:
    """A store of latents in the making; its `plan`, in JSON, tells it from others."""

    def __init__(self, path: str | Path, plan: Mapping[str, Any], *, store: Literal["safetensors", "zarr"]):
        self.target, self.store = Path(path), store
        self.plan: dict[str, Any] = json.loads(json.dumps(plan))
        self.folder = self.target if store == "safetensors" else self.target.with_name(f".{self.target.name}.shards")

    def begin(self) -> bool:
        """Write down the plan, or find the same one; return whether all is done already. For one process."""
        try:
            done = self._done()
            if done is not None:
                self._compare(done)
                if self.folder == self.target or self._has_own_plan():
                    self._clear()
                else:
                    disk.remove_empty(self.folder)  # which a kill may have left
                return True
            if self._is_strange():
                place = self.target if self.target.exists() else self.folder
                raise UserError(f"--out: {place} holds something else; choose another folder")
            self.folder.mkdir(parents=True, exist_ok=True)
            if (self.folder / PLAN).is_file():
                self._compare(self._read_plan())
            else:
                write_whole(self.folder / PLAN, json.dumps(self.plan, indent=1).encode())
        except OSError as error:
            raise UserError(f"--out: {self.target} cannot be written ({error.strerror}); choose another") from error
        return False

    def place(self, number: int) -> Path:
        return self.folder / f"latents-{number:05d}.safetensors"

    def has(self, number: int) -> bool:
        """Tell whether a shard is there and whole, to the last bit."""
        state = self._moments(number)
        if state is None or not state["rows"]:
            return state is not None
        try:
            shard = open_shard(str(self.place(number)), state["rows"])
            if _sum_beside(shard.sums, shard.labels) != state["crc32"]:
                return False
            for row in range(state["rows"]):
                shard.row(row)
        except BadData:
            return False
        return True

    def write(self, number: int, batches: Iterator[Rows]) -> int:
        """Write a shard of all rows of the batches, which may be none; return their number."""
        moments, found = Moments(), []
        for latents, labels in batches:
            if len(latents):
                moments.add(latents, labels)
                found.append((latents, labels))
        with disk.told(self.place(number)):
            write_whole(self.place(number), _shard(moments, found))
        return moments.rows

    def finish(
        self,
        shards: int,
        *,
        classes: Sequence[str] = (),
        variables: Sequence[str] | None = None,
        least: int = 1,
        tick: Callable[[], None] = lambda: None,
    ) -> dict[str, Any]:
        """Merge the statistics, write the index and return the facts. For one process, when all shards are there.

        `least` is the number of rows that there must be: what was left out is counted here, over all processes.
        """
        moments, kept = Moments(), []
        for number in range(shards):
            tick()
            state = self._moments(number)
            assert state is not None
            moments.merge(state)
            if state["rows"]:
                head = open_shard(str(self.place(number))).head
                kept.append({"file": self.place(number).name, "rows": state["rows"], "crc32": head})
        if not moments.rows:
            raise UserError(f"{self.target} would hold no latents: nothing could be read; mend the data")
        if moments.rows < least:
            raise UserError(
                f"{self.target} would hold {moments.rows} rows, and data.most_bad lets no less than {least} be: too "
                "many samples cannot be read; mend the data, or raise it"
            )
        facts = describe(moments, classes=classes, variables=variables) | self.plan
        if self.store == "zarr":
            write_latents(self.target, self._rows(kept, tick), classes=classes, store="zarr", more=facts)
        else:
            with disk.told(self.target):
                facts = write_index(self.target, facts, kept)
        self._clear()
        return facts

    def facts(self) -> dict[str, Any]:
        """Return the facts of a store that is complete."""
        return open_rows(str(self.target))[0]

    def _rows(self, shards: Sequence[Mapping[str, Any]], tick: Callable[[], None]) -> Iterator[Rows]:
        for each in shards:
            tick()
            shard = open_shard(str(self.folder / each["file"]), each["rows"], each["crc32"])
            yield np.stack([shard.row(row) for row in range(each["rows"])]), shard.labels

    def _moments(self, number: int) -> dict[str, Any] | None:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.place(number), "np") as file:
                return unsealed(json.loads((file.metadata() or {})[HEADER]))
        except (FileNotFoundError, KeyError, AttributeError, SafetensorError, ValueError):
            return None  # it is written anew

    def _done(self) -> dict[str, Any] | None:
        """Return the plan of latents that are complete."""
        if not (self.target / ("index.json" if self.store == "safetensors" else "zarr.json")).is_file():
            return None
        facts = self.facts()
        return {name: facts.get(name) for name in self.plan}

    def _is_strange(self) -> bool:
        """Tell whether something lies there that is not of these latents; drafts are hidden files."""
        if self.folder != self.target and self.folder.is_symlink():
            return True
        if self.folder != self.target and self.folder.exists():
            names = [path.name for path in self.folder.iterdir() if not disk.is_draft(path)]
            if any(name != PLAN and not _SHARD.fullmatch(name) for name in names):
                return True
        if not self.target.exists() or (self.folder / PLAN).is_file():
            return False
        return not self.target.is_dir() or any(not path.name.startswith(".") for path in self.target.iterdir())

    def _has_own_plan(self) -> bool:
        """Tell whether the plan there is this one; what lies beside another, or beside none, is somebody's."""
        try:
            if self.folder.is_symlink() or not (self.folder / PLAN).is_file():
                return False
            self._compare(self._read_plan())
        except UserError:
            return False
        return True

    def _read_plan(self) -> Any:
        try:
            return json.loads(read_plain(self.folder / PLAN, 256 << 20))
        except ValueError as error:
            raise UserError(
                f"--out: {self.folder / PLAN} cannot be read ({error}); choose another folder, or remove this one"
            ) from None

    def _compare(self, found: Any) -> None:
        found, plan = json.loads(json.dumps(found)), json.loads(json.dumps(self.plan))
        before, now = (_take_states(tree) for tree in (found, plan))
        # The same codec may lie elsewhere by now, or be spelled otherwise; its fingerprint tells it from others.
        self._compare_states(before, now)
        changes = [change for change in diff(found, plan) if change[0] != "codec.origin"]
        if changes:
            key, old, new = changes[0]
            raise UserError(
                f"--out: {self.target} was begun with other settings ({key}: {old!r} became {new!r}); go back to "
                "these, or choose another folder"
            )

    def check_states(self, now: Sequence[Any]) -> None:
        """Refuse where the data are others than the plan says."""
        self._compare_states(self.plan["data"]["state"], now)

    def _compare_states(self, before: Sequence[Any], now: Sequence[Any]) -> None:
        for number, (then, new) in enumerate(zip(before, now, strict=False)):
            if (what := changed(then, new)) is not None:
                raise UserError(
                    f"--out: {self.target} was encoded from data that have changed since (entry {number}: {what}); "
                    "choose another folder for latents of what is there now, or put the data back"
                )

    def _clear(self) -> None:
        """Take away what was needed on the way, and nothing else: what a person put there stays, and its folder.

        The plan goes last: as long as it is there, a later call takes away what is left, such as drafts.
        """
        hidden = self.folder != self.target
        for path in self.folder.iterdir() if hidden else ():
            if _SHARD.fullmatch(path.name) and path.is_file() and not path.is_symlink():
                disk.remove(path, inside=self.folder)
        disk.sweep(self.folder.resolve())
        if not hidden:
            if self._has_own_plan():
                disk.remove(self.folder / PLAN, inside=self.folder)
        elif [path.name for path in self.folder.iterdir()] == [PLAN]:
            disk.remove(self.folder / PLAN, inside=self.folder)
            disk.remove_empty(self.folder)


def _take_states(plan: Any) -> list[Any]:
    """Take the states of the data out of a plan, where it has them: those of version 1 do not."""
    data = plan.get("data") if isinstance(plan, dict) else None
    return (data.pop("state", None) or []) if isinstance(data, dict) else []


def _shard(moments: Moments, found: list[Rows]) -> bytes:
    from safetensors.numpy import save

    if not found:
        return save({}, {HEADER: json.dumps(sealed(moments.state()))})
    latents, labels = joined(found)
    state = moments.state() | {"crc32": _sum_beside(row_sums(latents), labels)}
    return shard_bytes(latents, labels, {HEADER: json.dumps(sealed(state))})


def _sum_beside(sums: np.ndarray | None, labels: np.ndarray | None) -> int:
    """Return the CRC-32 of what a shard holds beside its rows."""
    return zlib.crc32(b"" if labels is None else labels.tobytes(), zlib.crc32(b"" if sums is None else sums.tobytes()))
