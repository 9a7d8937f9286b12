"""Spans of a run: durations (steps, samples, epochs, percent of the run) and clocks (hours, minutes, seconds).

A duration is kept as it is written: 200, "200 samples", "2.5 epochs" or "10%"; `steps_of` counts its steps.
A clock ("02:00:00", "90m", "1d12h") becomes whole seconds.

`Rule`: a value with its own small grammar, checked by one function and described by one phrase.

A rule is put in an annotation, `Annotated[int | str, Rule(parse, expected, ...)]`. It holds no pydantic until pydantic
asks for its schema, so modules that only name such types stay cheap to import.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from math import ceil
from typing import Annotated, Any, NamedTuple

from vitrail.errors import UserError


@dataclass(frozen=True)
class Rule:
    """The way in which pydantic reads, writes and describes a value."""

    parse: Callable[[Any], Any]  # the value as stored; raises ValueError when it is not of the grammar
    expected: str  # completes "expected ..."
    json: Callable[[], dict[str, Any]]  # its JSON Schema
    write: Callable[[Any], Any] | None = None  # the stored value as it is written in a recipe

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import PydanticCustomError, core_schema

        def read(value: Any) -> Any:
            try:
                return self.parse(value)
            except ValueError as error:
                raise PydanticCustomError("expected", "expected {expected}", {"expected": self.expected}) from error

        writer = None if self.write is None else core_schema.plain_serializer_function_ser_schema(self.write)
        return core_schema.no_info_plain_validator_function(read, serialization=writer)

    def __get_pydantic_json_schema__(self, source: Any, handler: Any) -> dict[str, Any]:
        return self.json()


_DURATION = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*(%|steps?|samples?|epochs?)")
_COLONS = re.compile(r"([0-9]{1,4}):([0-5][0-9]):([0-5][0-9])")
_LETTERS = re.compile(r"(?:([0-9]{1,9})d)?(?:([0-9]{1,9})h)?(?:([0-9]{1,9})m(?:in)?)?(?:([0-9]{1,9})s)?")

DURATION_WORDS = 'a duration in steps (200), "N samples", "N epochs" or a percent of the run ("10%")'
STEPS_WORDS = 'more than 0 steps (200), "N samples" or "N epochs"'
CLOCK_WORDS = 'a clock such as "02:00:00", "90m", "2h", "45s" or "1d12h"'


class Span(NamedTuple):
    """A duration taken apart; the unit is steps, samples, epochs or %."""

    number: Fraction
    unit: str


def parse_duration(value: int | str) -> Span:
    """Take a duration apart, or say what one looks like."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return Span(Fraction(value), "steps")
    found = _DURATION.fullmatch(value.strip()) if isinstance(value, str) else None
    if found:
        number, unit = Fraction(found.group(1)), found.group(2)
        unit = unit if unit == "%" else unit.rstrip("s") + "s"
        whole = number.denominator == 1
        if (whole or unit in ("%", "epochs")) and (unit != "%" or number <= 100):
            return Span(number, unit)
    raise UserError(f"duration {value!r}: expected {DURATION_WORDS}")


def steps_of(
    duration: int | str, *, total: int | None = None, batch: int | None = None, epoch: int | None = None
) -> int:
    """Count the steps in a duration, rounded up: at least 1 unless the duration is 0.

    `total` is the run's steps (for percents), `batch` the samples of one step over all ranks, `epoch` the samples of
    one pass over the data.
    """
    number, unit = parse_duration(duration)
    if unit == "steps":
        return int(number)
    needed = {"%": {"total": total}, "samples": {"batch": batch}, "epochs": {"batch": batch, "epoch": epoch}}[unit]
    missing = [name for name, value in needed.items() if not value]
    if missing:
        raise UserError(f"duration {duration!r}: it cannot be counted in steps without the {' and '.join(missing)}")
    if unit == "%":
        return ceil(number * (total or 0) / 100)
    samples = number if unit == "samples" else number * (epoch or 0)
    return ceil(samples / (batch or 1))


def seconds_of(clock: int | str) -> int:
    """Return the seconds of a clock; a whole number is taken as seconds already."""
    if isinstance(clock, int) and not isinstance(clock, bool) and clock >= 0:
        return clock
    text = clock.strip() if isinstance(clock, str) else ""
    if found := _COLONS.fullmatch(text):
        hours, minutes, seconds = map(int, found.groups())
        return hours * 3600 + minutes * 60 + seconds
    if text and (found := _LETTERS.fullmatch(text)):
        days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
        return days * 86400 + hours * 3600 + minutes * 60 + seconds
    raise UserError(f"clock {clock!r}: expected {CLOCK_WORDS}")


def _tidy(value: Any) -> int | str:
    """Return a duration in its one spelling, so that "10 steps" and 10 are the same recipe."""
    number, unit = parse_duration(value)
    if unit == "steps":
        return int(number)
    text = f"{Decimal(number.numerator) / Decimal(number.denominator):f}"
    return text + "%" if unit == "%" else f"{text} {unit}"


def _tidy_positive(value: Any) -> int | str:
    if parse_duration(value).number == 0:
        raise UserError(f"duration {value!r}: expected more than 0")
    return _tidy(value)


def _tidy_run(value: Any) -> int | str:
    if parse_duration(value).unit == "%":
        raise UserError(f"duration {value!r}: the run's own length cannot be a percent of itself")
    return _tidy_positive(value)


def _tidy_or_off(value: Any) -> int | str:
    return "off" if value == "off" else _tidy_positive(value)


def _tidy_save(value: Any) -> int | str:
    seconds = clock_of(value)
    return _tidy_or_off(value) if seconds is None else f"{seconds}s"


def clock_of(value: Any) -> int | None:
    """Return the seconds of an interval that is a clock, not a duration in steps."""
    try:
        return _clock(value)
    except UserError:
        return None


def _clock(value: Any) -> int:
    if not isinstance(value, str) or seconds_of(value) == 0:
        raise UserError(f"clock {value!r}: expected {CLOCK_WORDS}")
    return seconds_of(value)


def _json(units: str, least: int, *, off: bool = False) -> dict[str, Any]:
    text = {"type": "string", "pattern": rf"^\s*[0-9]+(\.[0-9]+)?\s*({units})\s*$"}
    return {"anyOf": [{"type": "integer", "minimum": least}, text, *([{"const": "off"}] if off else [])]}


_UNITS = "steps?|samples?|epochs?"

# 0 is a duration too: a warm-up of no steps. What happens "every" so often needs more than 0.
Duration = Annotated[int | str, Rule(_tidy, DURATION_WORDS, lambda: _json(f"%|{_UNITS}", 0))]
Every = Annotated[int | str, Rule(_tidy_positive, f"{DURATION_WORDS}, above 0", lambda: _json(f"%|{_UNITS}", 1))]
EveryOrOff = Annotated[
    int | str, Rule(_tidy_or_off, f"off or {DURATION_WORDS}, above 0", lambda: _json(f"%|{_UNITS}", 1, off=True))
]
SaveEvery = Annotated[
    int | str, Rule(_tidy_save, f"off, {DURATION_WORDS}, above 0, or {CLOCK_WORDS}", lambda: _json(".*", 1, off=True))
]
RunLength = Annotated[int | str, Rule(_tidy_run, STEPS_WORDS, lambda: _json(_UNITS, 1))]
Clock = Annotated[int, Rule(_clock, CLOCK_WORDS, lambda: {"type": "string"}, lambda seconds: f"{seconds}s")]
