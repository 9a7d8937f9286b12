"""Latents that take long to make: shards written by many processes, each whole or not at all, found again after a kill.

- the plan (what is encoded, by what, in which shards) is written first; another plan is refused there
- a shard carries the moments of its rows in its header, so that exact statistics need no second reading; they are
  merged in the order of the shards, and are the same however many processes there were
- the index comes last: without it, nothing reads the folder
- for Zarr the shards lie in a hidden folder beside it, until all rows are copied from them
"""

import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vitrail.data.latents_write import Moments, Rows, describe, drafts_of, write_latents
from vitrail.data.sources.latents import PLAN, open_rows
from vitrail.errors import UserError
from vitrail.recipe.changes import diff

HEADER = "vitrail"  # name of a shard's facts in its header


class ShardedLatents:
    """One store of latents in the making; `plan` is what tells it from others, in JSON."""

    def __init__(self, path: str | Path, plan: Mapping[str, Any], *, store: Literal["safetensors", "zarr"]):
        self.target, self.store = Path(path), store
        self.plan: dict[str, Any] = json.loads(json.dumps(plan))
        self.folder = self.target if store == "safetensors" else self.target.with_name(f".{self.target.name}.shards")

    def begin(self) -> bool:
        """Write down the plan, or find the same one; whether all is done already. For one process."""
        try:
            self._sweep()
            done = self._done()
            if done is not None:
                self._compare(done)
                self._clear()
                return True
            if self._is_strange():
                raise UserError(f"--out: {self.target} holds something else; choose another folder")
            self.folder.mkdir(parents=True, exist_ok=True)
            if (self.folder / PLAN).is_file():
                self._compare(json.loads((self.folder / PLAN).read_bytes()))
            else:
                write_whole(self.folder / PLAN, json.dumps(self.plan, indent=1).encode())
        except OSError as error:
            raise UserError(f"--out: {self.target} cannot be written ({error.strerror}); choose another") from error
        return False

    def place(self, number: int) -> Path:
        return self.folder / f"latents-{number:05d}.safetensors"

    def has(self, number: int) -> bool:
        """Whether a shard is there and whole."""
        return self._moments(number) is not None

    def write(self, number: int, batches: Iterator[Rows]) -> int:
        """Write a shard of all that the batches hold, which may be nothing; returns how many rows that is."""
        from safetensors.numpy import save

        moments, found = Moments(), []
        for latents, labels in batches:
            if len(latents):
                moments.add(latents)
                found.append((latents, labels))
        tensors: dict[str, np.ndarray] = {}
        if found:
            tensors["latents"] = np.concatenate([latents for latents, _ in found])
        if found and found[0][1] is not None:
            tensors["labels"] = np.concatenate([np.asarray(labels) for _, labels in found]).astype(np.int64)
        write_whole(self.place(number), save(tensors, metadata={HEADER: json.dumps(moments.state())}))
        return moments.rows

    def finish(
        self, shards: int, *, classes: Sequence[str] = (), variables: Sequence[str] | None = None, least: int = 1
    ) -> dict[str, Any]:
        """Merge the statistics and write the index; returns the facts. For one process, when all shards are there.

        `least` is the number of rows that there must be: what was left out is counted here, over all processes.
        """
        moments, kept = Moments(), []
        for number in range(shards):
            state = self._moments(number)
            assert state is not None
            moments.merge(state)
            if state["rows"]:
                kept.append({"file": self.place(number).name, "rows": state["rows"]})
        if not moments.rows:
            raise UserError(f"{self.target} would hold no latents: nothing could be read; mend the data")
        if moments.rows < least:
            raise UserError(
                f"{self.target} would hold {moments.rows} rows, and data.most_bad lets no less than {least} be: too "
                "many samples cannot be read; mend the data, or raise it"
            )
        facts = describe(moments, classes=classes, variables=variables) | self.plan
        if self.store == "zarr":
            write_latents(self.target, self._rows(kept), classes=classes, store="zarr", more=facts)
        else:
            facts["shards"] = kept
            write_whole(self.target / "index.json", json.dumps(facts, indent=1).encode())
        self._clear()
        return facts

    def facts(self) -> dict[str, Any]:
        """Of a store that is complete."""
        return open_rows(str(self.target))[0]

    def _rows(self, shards: Sequence[Mapping[str, Any]]) -> Iterator[Rows]:
        from safetensors.numpy import load_file

        for shard in shards:
            tensors = load_file(self.folder / shard["file"])
            yield tensors["latents"], tensors.get("labels")

    def _moments(self, number: int) -> dict[str, Any] | None:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.place(number), "np") as file:
                return json.loads((file.metadata() or {})[HEADER])
        except (FileNotFoundError, KeyError, SafetensorError, ValueError):
            return None  # it is written anew

    def _done(self) -> dict[str, Any] | None:
        """The plan of latents that are complete."""
        names = ("index.json",) if self.store == "safetensors" else ("zarr.json",)
        if not any((self.target / name).is_file() for name in names):
            return None
        facts = self.facts()
        return {name: facts.get(name) for name in self.plan}

    def _is_strange(self) -> bool:
        """Whether something lies there that is not of these latents; drafts are hidden files."""
        if not self.target.exists() or (self.folder / PLAN).is_file():
            return False
        return not self.target.is_dir() or any(not path.name.startswith(".") for path in self.target.iterdir())

    def _compare(self, found: Any) -> None:
        # The same codec may lie elsewhere by now, or be spelled otherwise; its fingerprint tells it from others.
        changes = [change for change in diff(found, self.plan) if change[0] != "codec.origin"]
        if changes:
            key, old, new = changes[0]
            raise UserError(
                f"--out: {self.target} was begun with other settings ({key}: {old!r} became {new!r}); go back to "
                "these, or choose another folder"
            )

    def _clear(self) -> None:
        """Take away what was needed on the way."""
        if self.folder != self.target:
            shutil.rmtree(self.folder, ignore_errors=True)
            return
        for left in (self.folder / PLAN, *self.folder.glob(".*.part")):
            left.unlink(missing_ok=True)

    def _sweep(self) -> None:
        """Take away copies that a kill has left half written."""
        if self.store == "zarr":
            for draft in drafts_of(self.target):
                shutil.rmtree(draft, ignore_errors=True)


def write_whole(path: Path, content: bytes) -> None:
    """To the disk first, then to its name: a kill, of the machine too, leaves the whole file or none."""
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")
    with draft.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
