"""Weights of a model here as another project's file: the names and pieces by which such files are read, backwards.

- a name is what the rules of names.py would turn into ours, in the style of the project
- what is read as a piece of a tensor is put where that piece takes it from: numbers that stand for places go through
  the piece once, and tell where each came from
- last, all of it is read as such a file is, and must give the model's own numbers
"""

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from re import _parser  # type: ignore[attr-defined]
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.errors import UserError
from vitrail.weights.adapters import translate
from vitrail.weights.files import Weights
from vitrail.weights.names import INSIDE, TABLES, rename
from vitrail.weights.pieces import Target

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Style:
    """How a project spells names, where its files have been read in several ways."""

    adapter: str  # whose tables are read
    names: str  # a pattern that all its names match
    fused: bool = True  # queries, keys and values are one tensor
    packed: bool = False  # gate and value of an MLP are one tensor
    cls_row: bool = True  # the table of positions begins with a row of the class token
    without: str | None = None  # a name in the vocabulary that its files do not have, since it is 0
    more: tuple[tuple[str, str], ...] = ()  # patterns of names, and the layer beside which the file wants one, unused


def spell(name: str, style: Style) -> str:
    """Return the name in a file that is read as this name of the vocabulary."""
    for candidate in itertools.chain(*(_unread(each, TABLES[style.adapter]) for each in _inside(name, style.adapter))):
        if re.fullmatch(style.names, candidate) and rename(candidate, TABLES[style.adapter]) == name:
            return candidate
    raise ValueError(f"{name} has no name in files of {style.adapter}")


def _inside(name: str, adapter: str) -> Iterator[str]:
    """List the name with what a block calls its parts undone in every way, and as it is."""
    if found := re.fullmatch(r"((?:decoder\.)?blocks\.\d+\.)(.*)", name):
        for pattern, to in INSIDE.get(adapter, ()):
            there = re.match(_as_pattern(to), found[2])
            if there is not None:
                for spelt in _matches(_parser.parse(pattern), dict(enumerate(there.groups(), 1))):
                    yield found[1] + spelt + found[2][there.end() :]
    yield name


def _unread(name: str, rules: Any) -> Iterator[str]:
    """List what rules turn into a name."""
    for pattern, to in rules:
        parsed = _parser.parse(pattern)
        if callable(to):
            yield from (each for each in _matches(parsed, {}) if to(re.fullmatch(pattern, each)) == name)
        elif there := re.fullmatch(_as_pattern(to), name):
            yield from _matches(parsed, {int(key[1:]): value for key, value in there.groupdict().items()})


def _as_pattern(to: str) -> str:
    """Return a pattern of what a replacement makes, whose groups are those that it puts in."""
    parts = re.split(r"\\(\d)", to)
    return "".join(f"(?P<g{part}>.*)" if place % 2 else re.escape(part) for place, part in enumerate(parts))


def _matches(parsed: Any, groups: Mapping[int, str]) -> Iterator[str]:
    """List what a parsed pattern matches where its groups are these: what comes first in it first, with all options."""
    parts: list[list[str]] = []
    for kind, value in parsed:
        what = str(kind)
        if what == "LITERAL":
            parts.append([chr(value)])
        elif what == "IN":
            parts.append([one for each in value for one in _letters(*each)])
        elif what == "BRANCH":
            parts.append([one for branch in value[1] for one in _matches(branch, groups)])
        elif what == "SUBPATTERN":
            number, _, _, inner = value
            parts.append([groups[number]] if number in groups else list(_matches(inner, groups)))
        elif what == "MAX_REPEAT" and value[0] == 0 and str(value[2][0][0]) != "ANY":
            once = list(_matches(value[2], groups))  # at most twice, which is as often as any file says it
            parts.append([*once, *([one * 2 for one in once] if value[1] != 1 else []), ""])
        else:
            return  # without an end, and of no known group
    yield from map("".join, itertools.product(*parts))


def _letters(kind: Any, value: Any) -> list[str]:
    if str(kind) == "LITERAL":
        return [chr(value)]
    if str(kind) == "RANGE":
        return [chr(code) for code in range(value[0], value[1] + 1)]
    return list("0123456789")  # a category; rules have no other


# ---------------------------------------------------------------- tensors


def vocabulary(target: Target, style: Style) -> Shapes:
    """Return the tensors of a file by their names in the vocabulary, and their shapes."""
    found: Shapes = {}
    c, width = target.config, target.encoder.width
    row = int(c.cls_token and style.cls_row)
    for name, parameter in target.parameters.items():
        shape, new = tuple(parameter.shape), name.removeprefix("encoder.")
        if new == "prefix_tokens":
            found |= {"cls_token": (1, 1, width)} if c.cls_token else {}
            found |= {"registers": (1, c.registers, width)} if c.registers else {}
        elif new.endswith("pos_embed.table"):
            found[new.removesuffix(".table")] = (1, row + shape[0], shape[1])
        elif new == "patch_embed.proj.weight":
            found[new] = (width, target.channels, *target.patch)
        elif ".attn.qkv." in new and not style.fused:
            part = (shape[0] // 3, *shape[1:])
            found |= {new.replace(".qkv.", f".{letter}."): part for letter in "qkv"}
        elif style.packed and re.search(r"\.mlp\.(gate|fc1)\.", new):
            found[re.sub(r"\.mlp\.(gate|fc1)\.", ".mlp.packed.", new)] = (2 * shape[0], *shape[1:])
        elif new not in ("pos_embed.cls", style.without):
            found[new] = shape
    return found


@torch.no_grad()
def as_file(model: nn.Module, style: Style, settings: dict[str, Any] | None = None) -> dict[str, Tensor]:
    """Return the tensors of a file that is read as this model; refused where that would be another one."""
    target = Target(model)
    shapes = {spell(name, style): shape for name, shape in vocabulary(target, style).items()}
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    weights = Weights("the export", shapes, tensors.__getitem__, settings=settings)
    told = translate(weights, target, style.adapter)
    if wrong := [*told.wrong, *told.problems, *told.decoder, *told.classes]:
        raise UserError(f"the model has no place in such a file: {'; '.join(wrong)}")
    missing = [name for name in target.parameters if name not in told.pieces]
    if missing:
        raise UserError(f"the model has no place in such a file: {missing[0]} would not be read from it")
    for name, parameter in target.parameters.items():
        piece = told.pieces[name]
        _put(piece.sources, piece.make, parameter.detach().float().cpu(), tensors)
    for name, parameter in target.parameters.items():
        piece = told.pieces[name]
        made = piece.make(*(tensors[source] for source in piece.sources)).value
        if not made.equal(parameter.detach().float().cpu()):
            raise AssertionError(f"{name} is not read from {piece.sources} as it was put there")
    for pattern, beside in style.more:
        for name in [name for name in tensors if re.fullmatch(beside, name)]:
            like = tensors[name]
            value = torch.ones_like(like) if name.endswith("weight") and like.ndim == 1 else torch.zeros_like(like)
            tensors[re.sub(beside, pattern, name)] = value
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _put(sources: tuple[str, ...], make: Callable[..., Any], value: Tensor, tensors: dict[str, Tensor]) -> None:
    """Put a parameter where the piece takes it from; of two numbers that are added, it becomes the first."""
    left = torch.ones(value.shape, dtype=torch.bool)
    for number, source in enumerate(sources):
        like = tensors[source]
        if like.numel() > 2**53:
            raise UserError(f"{source} has too many numbers to be told apart")
        places = torch.arange(1, like.numel() + 1, dtype=torch.float64).view(like.shape)
        given = [
            places if n == number else tensors[s].new_zeros(tensors[s].shape).double() for n, s in enumerate(sources)
        ]
        found = make(*given).value.long()
        here = left & (found > 0)
        like.view(-1)[found[here] - 1] = value[here]
        left &= ~here
