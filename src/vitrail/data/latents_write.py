"""Writes latents as `sources/latents.py` reads them, and measures their statistics on the way.

For latents that take long to make, by many processes and with interruptions, see latents_shards.py.
"""

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vitrail.data.latents_facts import VERSION
from vitrail.disk import new_folder, told, write_whole
from vitrail.errors import UserError
from vitrail.sums import sealed

FILE = 2**26  # bytes of a file of Zarr, at most: shards are put together in memory
Rows = tuple[np.ndarray, np.ndarray | None]  # latents [n, C, *S], and their classes [n]


def write_latents(
    path: str | Path,
    batches: Iterable[Rows],
    *,
    classes: Sequence[str] = (),
    variables: Sequence[str] | None = None,
    rows: int = 1024,
    store: Literal["safetensors", "zarr"] = "safetensors",
    more: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Write batches as they come, `rows` to a shard; all appears at once, when complete.

    Returns the facts that are stored, `more` among them. The mean and standard deviation of each channel are exact, in
    float64.
    """
    target = Path(path)
    moments = Moments()
    with told(target), new_folder(target) as draft:
        measured = _measured(batches, moments)
        shards = (_write_zarr if store == "zarr" else _write_shards)(draft, measured, rows)
        if not moments.count:
            raise UserError(f"{target} would hold no latents; give at least one batch")
        facts = describe(moments, classes=classes, variables=variables) | dict(more or {})
        if store == "zarr":
            import zarr

            from vitrail.data.sources.latents import ATTRIBUTE

            zarr.open_group(str(draft), mode="r+").attrs[ATTRIBUTE] = facts = sealed(facts)
        else:
            facts = sealed(facts | {"shards": shards})
            write_whole(draft / "index.json", json.dumps(facts, indent=1))
    return facts


def describe(moments: "Moments", *, classes: Sequence[str], variables: Sequence[str] | None) -> dict[str, Any]:
    """The facts that every store of latents has."""
    mean, std = moments.result()
    return {
        "version": VERSION,
        "shape": list(moments.shape),
        "dtype": moments.dtype,
        "rows": moments.rows,
        "variables": list(variables or [f"latent{number}" for number in range(moments.shape[0])]),
        "mean": mean,
        "std": std,
        "classes": list(classes),
        "labelled": moments.labelled,
    }


class Moments:
    """Mean and standard deviation of each channel, of parts merged in float64."""

    def __init__(self) -> None:
        self.count = self.rows = 0  # voxels of a channel; items
        self.shape: tuple[int, ...] = ()
        self.dtype = ""
        self.labelled = False

    def add(self, latents: np.ndarray, labels: np.ndarray | None = None) -> None:
        """Take in [n, C, *S], and their classes [n]."""
        self._expect(tuple(latents.shape[1:]), str(latents.dtype), labels is not None)
        values = np.moveaxis(latents, 1, 0).reshape(self.shape[0], -1).astype(np.float64)
        count, mean = values.shape[1], values.mean(axis=1)
        if not np.isfinite(mean).all():
            raise UserError(f"row {self.rows} and later ones hold NaN or infinite latents; encode without them")
        self._merge(count, len(latents), mean, np.square(values - mean[:, None]).sum(axis=1))

    def state(self) -> dict[str, Any]:
        """In JSON, from which merge() goes on exactly."""
        if not self.shape:
            return {"rows": 0}
        numbers = {"mean": self._mean.tolist(), "square": self._square.tolist()}
        facts = {"shape": list(self.shape), "dtype": self.dtype, "labelled": self.labelled}
        return {"rows": self.rows, "count": self.count, **facts, **numbers}

    def merge(self, state: Mapping[str, Any]) -> None:
        """Take in what others have measured."""
        if state["rows"]:
            self._expect(tuple(state["shape"]), state["dtype"], state["labelled"])
            self._merge(state["count"], state["rows"], np.array(state["mean"]), np.array(state["square"]))

    def _expect(self, shape: tuple[int, ...], dtype: str, labelled: bool) -> None:
        if not self.shape:
            self.shape, self.dtype, self.labelled = shape, dtype, labelled
            self._mean, self._square = np.zeros(shape[0]), np.zeros(shape[0])
        if shape != self.shape or dtype != self.dtype:
            raise UserError(
                f"latents of {list(shape)} {dtype} after those of {list(self.shape)} {self.dtype}; all must be alike"
            )
        if labelled != self.labelled:
            raise UserError("some latents have classes and others have none; give all of them one, or none")

    def _merge(self, count: int, rows: int, mean: np.ndarray, square: np.ndarray) -> None:
        total = self.count + count
        step = mean - self._mean
        self._mean += step * count / total
        self._square += square + step**2 * self.count * count / total
        self.count, self.rows = total, self.rows + rows

    def result(self) -> tuple[list[float], list[float]]:
        std = np.sqrt(self._square / self.count)
        return self._mean.tolist(), np.where(std > 0, std, 1.0).tolist()


def _measured(batches: Iterable[Rows], moments: Moments) -> Iterator[Rows]:
    for latents, labels in batches:
        if latents.ndim not in (4, 5) or (labels is not None and labels.shape != latents.shape[:1]):
            raise UserError(
                f"a batch of {list(latents.shape)} is none of latents [n, C, *S] with a class a row; mend it"
            )
        if len(latents):
            moments.add(latents, labels)
            yield latents, labels


def _write_shards(folder: Path, batches: Iterable[Rows], rows: int) -> list[dict[str, Any]]:
    from vitrail.data.sources.latents import open_shard

    shards: list[dict[str, Any]] = []
    waiting: list[Rows] = []

    def flush() -> None:
        latents, labels = _take(waiting, rows)
        name = f"latents-{len(shards):05d}.safetensors"
        write_whole(folder / name, shard_bytes(latents, labels))
        shards.append({"file": name, "rows": len(latents), "crc32": open_shard(str(folder / name)).head})

    for batch in batches:
        waiting.append(batch)
        while sum(len(latents) for latents, _ in waiting) >= rows:
            flush()
    if waiting:
        flush()
    return shards


def row_sums(latents: np.ndarray) -> np.ndarray:
    """CRC-32 of each row as it is stored."""
    stored = latents.astype(latents.dtype.newbyteorder("<"), copy=False)
    return np.array([zlib.crc32(row.tobytes()) for row in stored], np.uint32)


def shard_bytes(latents: np.ndarray, labels: np.ndarray | None, metadata: dict[str, str] | None = None) -> bytes:
    """A safetensors file of rows, their classes, and the CRC-32 of each row."""
    from safetensors.numpy import save

    return save(
        {"latents": latents, "sums": row_sums(latents), **({} if labels is None else {"labels": labels})}, metadata
    )


def _write_zarr(folder: Path, batches: Iterable[Rows], rows: int) -> list[dict[str, Any]]:
    """A chunk a row, which is what is read, and a file for many of them."""
    import zarr
    from zarr.codecs import ZstdCodec

    arrays: dict[str, Any] = {}
    waiting: list[Rows] = []
    for latents, labels in batches:
        if not arrays:
            # Rows of zeros are written too: to a reader, a chunk that is absent is a row that was lost.
            make = partial(
                zarr.create_group(str(folder)).create_array,
                config={"write_empty_chunks": True},
                compressors=ZstdCodec(level=0, checksum=True),
            )
            one = latents.shape[1:]
            rows = max(1, min(rows, FILE // latents[:1].nbytes))
            arrays["latents"] = make(
                "latents", shape=(0, *one), chunks=(1, *one), shards=(rows, *one), dtype=latents.dtype
            )
            if labels is not None:
                arrays["labels"] = make("labels", shape=(0,), chunks=(2**16,), dtype=np.int64)
        waiting.append((latents, labels))
        while sum(len(some) for some, _ in waiting) >= rows:
            _append(arrays, *_take(waiting, rows))  # whole files: one that grows is written anew each time
    if waiting:
        _append(arrays, *_take(waiting, rows))
    return []


def _append(arrays: Mapping[str, Any], latents: np.ndarray, labels: np.ndarray | None) -> None:
    arrays["latents"].append(latents)
    if labels is not None:
        arrays["labels"].append(labels)


def _take(waiting: list[Rows], count: int) -> tuple[np.ndarray, np.ndarray | None]:
    """The first rows that wait, which go; the others stay."""
    latents = np.concatenate([found for found, _ in waiting])
    labels = None if waiting[0][1] is None else np.concatenate([np.asarray(found) for _, found in waiting])
    rest = None if labels is None else labels[count:]
    waiting[:] = [(latents[count:], rest)] if len(latents) > count else []
    return np.ascontiguousarray(latents[:count]), None if labels is None else labels[:count].astype(np.int64)
