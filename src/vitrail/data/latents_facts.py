"""What stored latents say of themselves, checked before any of it is used.

Version 2 has checksums: of the facts themselves (`seal`), of the head of each shard (`crc32`) and of each row (`sums`).
Version 1, and what other programs write, has none and is read all the same.
"""

import math
from collections.abc import Sequence
from typing import Any

from vitrail.data.files import base_name
from vitrail.errors import BadData, UserError
from vitrail.sums import unsealed
from vitrail.versions import check_version

VERSION = 2
MOST_CLASSES = 100_000  # without names; each gets one
# Types of safetensors; bfloat16, which NumPy has not, is read as its upper half of float32.
TYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "uint16", "I64": "int64", "I32": "int32"}


def check_facts(facts: dict[str, Any], where: str) -> None:
    """Refuse facts that cannot be those of latents; what is not told is not missed."""
    check_version(facts.get("version", 1), VERSION, where)
    shape = facts.get("shape")
    channels = len(_list(facts, "variables", where))
    if shape is not None:
        known = isinstance(shape, list) and len(shape) in (3, 4) and all(_is_count(size) for size in shape)
        _expect(known, where, "shape", shape, "[C, y, x] or [C, z, y, x] of whole numbers above 0")
        _expect(channels in (0, shape[0]), where, "variables", facts.get("variables"), f"{shape[0]} names")
        channels = shape[0]
    rows = facts.get("rows")
    _expect(rows is None or _is_count(rows), where, "rows", rows, "a whole number above 0")
    for name in ("variables", "classes"):
        values = _list(facts, name, where)
        alike = all(isinstance(value, str) for value in values) and len(set(values)) == len(values)
        _expect(alike, where, name, values, "names that differ")
    for name, least in (("mean", -math.inf), ("std", 0.0)):
        values = _list(facts, name, where)
        wanted = "finite numbers" if name == "mean" else "finite numbers above 0"
        _expect(all(_is_number(value) and value > least for value in values), where, name, values, wanted)
        _expect(not values or len(values) == (channels or len(values)), where, name, values, f"{channels} numbers")
    _expect(len(facts.get("mean") or ()) == len(facts.get("std") or ()), where, "std", facts.get("std"), "one a mean")
    if "seal" in facts and unsealed(facts) is None:
        raise BadData(
            f"{where} does not match its own checksum: it was damaged or edited; restore it, or take `seal` out of it "
            "if the change is meant"
        )


def check_shards(shards: Any, where: str, folder: str) -> None:
    """Refuse a list of shards that are not files beside it, each of them once."""
    if not isinstance(shards, list) or not shards or not all(isinstance(s, dict) and "file" in s for s in shards):
        raise BadData(f"{where} lists no shards ([{{file, rows}}, ...]); write it anew")
    seen = set()
    for shard in shards:
        name, rows = shard["file"], shard.get("rows")
        if not isinstance(name, str) or base_name(name) != name or name in ("", ".", "..") or "\0" in name:
            raise UserError(f"{folder}: the shard {name!r} does not lie in its folder; use plain names")
        if name in seen:
            raise BadData(f"{where} lists the shard {name} twice; write it anew")
        seen.add(name)
        _expect(rows is None or _is_count(rows), where, f"rows of {name}", rows, "a whole number above 0")


def compare_facts(facts: dict[str, Any], shards: Sequence[Any], where: str) -> None:
    """Refuse facts that are not those of the shards: number of rows, shape, type, and whether there are labels."""
    shape, dtype = facts.get("shape"), facts.get("dtype")
    first = shards[0]
    total, found = sum(shard.shape[0] for shard in shards), list(first.shape[1:])
    for shard in shards:
        if list(shard.shape[1:]) != found or shard.dtype != first.dtype:
            raise BadData(f"{where}: its shards differ in shape or type; write them anew")
    kind = "bfloat16" if first.dtype == "BF16" else TYPES.get(first.dtype, first.dtype)
    _expect(shape in (None, found), where, "shape", shape, f"the {found} of the latents")
    _expect(dtype in (None, kind), where, "dtype", dtype, f"{kind}, as the latents are")
    _expect(facts.get("rows") in (None, total), where, "rows", facts.get("rows"), f"the {total} that there are")
    for name in ("mean", "std", "variables"):
        values = facts.get(name)
        _expect(not values or len(values) == found[0], where, name, values, f"{found[0]}, one a channel")
    for labels in (shard.labels for shard in shards if shard.labels is not None):
        _expect(labels.dtype.kind in "iu", where, "labels", labels.dtype.name, "whole numbers")
        highest, limit = int(labels.max(initial=0)), max(MOST_CLASSES, len(facts.get("classes") or ()))
        _expect(highest < limit, where, "labels", highest, f"classes below {limit:,}")
    labelled = all(shard.labels is not None for shard in shards)
    if facts.get("labelled", labelled) != labelled:
        raise BadData(f"{where}: the labels of its latents are missing; restore them, or write all anew")


def _list(facts: dict[str, Any], name: str, where: str) -> list[Any]:
    values = facts.get(name)
    _expect(values is None or isinstance(values, list), where, name, values, "a list")
    return values or []


def _expect(good: bool, where: str, name: str, value: Any, wanted: str) -> None:
    if not good:
        shown = repr(value) if len(repr(value)) < 100 else f"{repr(value)[:97]}..."
        raise BadData(f"{where}: `{name}` is {shown}, expected {wanted}; restore it, or encode the data anew")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**62


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
