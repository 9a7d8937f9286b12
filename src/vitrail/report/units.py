"""Numbers as people read them: 12.3k, 1 h 05 min, 3.4 GiB, 36%.

Every function takes None and non-finite values, because a report must not fail on the run that needs it most.
"""

import math
from collections.abc import Mapping
from typing import Any

MISSING = "–"  # an en dash: shown where a value is not known
_SHORT = {
    "nanometer": "nm",
    "micrometer": "µm",
    "millimeter": "mm",
    "centimeter": "cm",
    "meter": "m",
    "angstrom": "Å",
    "degree": "°",
}
_PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z")


def number_of(value: Any) -> float:
    """Return the value as a float, NaN where it is not a number; `true` is not a number."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    return math.nan


def plain(value: Any, digits: int = 4) -> str:
    """Write a number with so many digits and no prefix: 0.4321, 12.3, 2e-05; whole parts stay whole: 1176."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return MISSING
    number = number_of(value)
    if not math.isfinite(number):
        return str(number) if isinstance(value, float) else str(value)
    if abs(number) < 1e9 and (abs(number) >= 10**digits or number == int(number)):
        return f"{number:.0f}"
    return f"{number:.{digits}g}"


def compact(value: Any, unit: str = "") -> str:
    """Write three significant digits and a prefix: 12.3k, 1.21M; with a unit, "12.3 kvoxel"."""
    number = number_of(value)
    gap = " " if unit else ""
    if not math.isfinite(number):
        return MISSING if math.isnan(number) else f"{number}{gap}{unit}"
    size = abs(number)
    power = 0
    while size >= 999.5 and power < len(_PREFIXES) - 1:
        size /= 1000
        power += 1
    if power == 0 and number == int(number):
        text = str(int(number))
    elif 0 < size < 0.001:
        text = f"{number:.1e}"
    else:
        digits = 2 if size < 9.995 else 1 if size < 99.95 else 0
        text = f"{math.copysign(size, number):.{digits}f}"
    return f"{text}{gap}{_PREFIXES[power]}{unit}"


def count(value: Any) -> str:
    """Write a whole number with thousands set apart: 1,334."""
    number = number_of(value)
    return f"{round(number):,}" if math.isfinite(number) else MISSING


def describe_most(counts: Mapping[str, int], most: int = 3) -> str:
    """Name in brackets what was counted most often: ` (a.png 3 times, b.png once and 2 others)`; nothing of nothing."""
    ordered = sorted(counts.items(), key=lambda pair: -pair[1])
    named = [f"{name} {'once' if n == 1 else f'{n} times'}" for name, n in ordered[:most]]
    more = len(ordered) - len(named)
    rest = f" and {more} other{'s' * (more > 1)}" if more else ""
    return f" ({', '.join(named)}{rest})" if named else ""


def percent(fraction: Any) -> str:
    """Write a fraction as a percentage: 34.1%, 3%."""
    number = number_of(fraction) * 100
    if not math.isfinite(number):
        return MISSING
    digits = 0 if abs(number) < 0.05 or abs(number) >= 99.95 or number == int(number) else 1
    return f"{number:.{digits}f}%"


def duration(seconds: Any) -> str:
    """Write seconds as two units at most: 45 s, 2 min 50 s, 1 h 05 min, 3 d 4 h."""
    number = number_of(seconds)
    if not math.isfinite(number) or number < 0:
        return MISSING
    if number < 9.95:
        return f"{number:.1f} s"
    whole = round(number)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def clock(seconds: Any) -> str:
    """Write seconds as a short clock for a progress line: 0:45, 2:50, 1:05:00, 3d 04h."""
    number = number_of(seconds)
    if not math.isfinite(number) or number < 0:
        return "-:--"
    whole = round(number)
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d}"
    if whole < 86400:
        return f"{whole // 3600}:{whole % 3600 // 60:02d}:{whole % 60:02d}"
    return f"{whole // 86400}d {whole % 86400 // 3600:02d}h"


def size(num_bytes: Any) -> str:
    """Write bytes in binary units: 12.3 MiB."""
    number = number_of(num_bytes)
    if not math.isfinite(number):
        return MISSING
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(number) < 1023.5 or unit == "TiB":
            break
        number /= 1024
    return f"{number:.0f} {unit}" if unit == "B" or abs(number) >= 99.95 else f"{number:.1f} {unit}"


def scale_bar(width: int, spacing: float, unit: str | None) -> tuple[float, str]:
    """Return a bar of a round length, about a quarter of the picture: its share of the width, and its words."""
    length = round_length(width * spacing / 4)
    words = f"{length:g} pixels" if unit is None and spacing == 1 else f"{length:g} {short(unit)}"
    return length / spacing / width, words


def round_length(wanted: float) -> float:
    """Return the largest of 1, 2 or 5 times a power of ten that is not above what is wanted."""
    power = 10.0 ** math.floor(math.log10(wanted))
    return max(step * power for step in (1, 2, 5) if step * power <= wanted * (1 + 1e-9))


def short(unit: str | None) -> str:
    """Return the sign of a unit of length: nm."""
    return "(unit unknown)" if unit is None else _SHORT.get(unit, unit)
