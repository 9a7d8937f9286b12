"""The tables of adaptive_quality.md, from the results that adaptive_quality.py has written."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

DATA = {
    "tissue": "generated tissue, edge to edge",
    "resin": "generated tissue in a fifth of each image, resin around it",
    "isbi": "ISBI-2012",
    "tissue3d": "generated tissue, volumes",
}
Found = dict[str, Any]  # what a cell has found


@dataclass(frozen=True)
class Variant:
    """A way to cut images into tokens."""

    patch: int  # voxels along the side of a token
    tokens: int
    adaptive: bool

    @property
    def name(self) -> str:
        return f"{'adaptive' if self.adaptive else 'uniform'} {self.patch}, {self.tokens:,} tokens"


def last(found: Found) -> float:
    return list(found["dice"].values())[-1]


def after(found: Found, steps: int) -> float:
    """Dice of the evaluation after so many steps."""
    return found["dice"][str(steps)]


def variant_of(found: Found) -> Variant:
    return Variant(found["patch"], found["tokens"], found["adaptive"])


def groups(stored: dict[str, Any], data: str) -> dict[Variant, dict[int, Found]]:
    """The cells of some data that came to their end, by variant and seed; uniform ones first, small patches first."""
    table: dict[Variant, dict[int, Found]] = {}
    for found in stored["cells"].values():
        if found["data"] == data and found["status"] == "ok":
            table.setdefault(variant_of(found), {})[found["seed"]] = found
    return dict(sorted(table.items(), key=lambda item: (item[0].adaptive, item[0].patch, -item[0].tokens)))


def seconds_to(found: Found, target: float) -> float | None:
    """Seconds of training until the line through the evaluations comes to this Dice; None where it never does."""
    before: tuple[int, float] | None = None
    for step, dice in ((int(step), dice) for step, dice in found["dice"].items()):
        if dice >= target:
            share = 1.0 if before is None else (target - before[1]) / (dice - before[1])
            start = 0 if before is None else before[0]
            return (start + share * (step - start)) * found["step_seconds"]["median"]
        before = step, dice
    return None


@dataclass(frozen=True)
class Race:
    """The times that two variants take to the Dice which all seeds of the first have after the steps in common."""

    rival: Variant
    target: float
    seconds: float  # of the first; medians of the seeds
    rival_seconds: float | None  # None where not all seeds come to that Dice
    seeds: int

    @property
    def ratio(self) -> float:
        """The speed of the rival against the first; 0 where it does not arrive."""
        return 0.0 if self.rival_seconds is None else self.seconds / self.rival_seconds


def race(base: dict[int, Found], rival: dict[int, Found], variant: Variant, steps: int, seeds: Sequence[int]) -> Race:
    target = min(after(base[seed], steps) for seed in seeds)
    times, others = ([seconds_to(side[seed], target) for seed in seeds] for side in (base, rival))
    reached = [seconds for seconds in others if seconds is not None]
    whole = statistics.median(reached) if len(reached) == len(seeds) else None
    return Race(variant, target, statistics.median(s for s in times if s is not None), whole, len(seeds))


def races(table: dict[Variant, dict[int, Found]], base: Variant, steps: int) -> list[Race]:
    """One variant against each of the others, over the seeds that all of them have; none without such a seed."""
    seeds = sorted(set.intersection(*(set(found) for found in table.values())))
    if not seeds:
        return []
    return [race(table[base], rival, variant, steps, seeds) for variant, rival in table.items() if variant != base]


def first(found: list[Race]) -> Race | None:
    """The fastest of those that reach the Dice."""
    reached = [one for one in found if one.rival_seconds is not None]
    return max(reached, key=lambda one: one.ratio, default=None)


def tables(stored: dict[str, Any]) -> str:
    """Everything that was measured, what it says at equal quality, and what failed."""
    steps = stored["settings"]["steps"]
    shown = {data: table for data in DATA if (table := groups(stored, data))}
    lines = [line for data, table in shown.items() for line in measured_table(data, table, steps)]
    lines += ["", "## At equal quality", "", *equal_table(shown, steps)]
    failed = {name: found for name, found in stored["cells"].items() if found["status"] != "ok"}
    if failed:
        lines += ["", "Cells without a result:", ""]
        lines += [f"- {name}: {found['status']}, {found['error']}" for name, found in failed.items()]
    return "\n".join(lines) + "\n"


def measured_table(data: str, table: dict[Variant, dict[int, Found]], steps: int) -> list[str]:
    lines = [
        "",
        f"### {DATA[data][0].upper()}{DATA[data][1:]}",
        "",
        f"| tokens | seeds | Dice after {steps} steps, mean (range) | in the end | after steps | "
        "ms a step, median (quartiles) | images/s | data wait | peak GiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for variant, seeds in table.items():
        found = list(seeds.values())
        early, late = [after(one, steps) for one in found], [last(one) for one in found]
        low, middle, high = (
            1e3 * statistics.median(one["step_seconds"][k] for one in found) for k in ("low", "median", "high")
        )
        rate, wait = (statistics.median(one[k] for one in found) for k in ("images_per_s", "data_wait"))
        memory = [one["memory_gib"] for one in found if one["memory_gib"] is not None]
        lines.append(
            f"| {variant.name} | {len(found)} | {spread(early)} | {spread(late)} | {list(found[0]['dice'])[-1]} | "
            f"{middle:.1f} ({low:.1f} to {high:.1f}) | {rate:.0f} | {wait:.1%} | "
            f"{f'{max(memory):.2f}' if memory else '-'} |"
        )
    return lines


def spread(values: list[float]) -> str:
    return f"{statistics.fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def equal_table(shown: dict[str, dict[Variant, dict[int, Found]]], steps: int) -> list[str]:
    """Each uniform variant against the adaptive one, and the uniform one, that comes to its Dice first."""
    lines = [
        "| data | uniform patches | seeds | Dice to reach | s | adaptive, the first to reach it | s | times as fast | "
        "other patches, the first to reach it | s | times as fast |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    verdicts = []
    for data, table in shown.items():
        uniform = [variant for variant in table if not variant.adaptive]
        for base in uniform:
            found = races(table, base, steps)
            if not found:
                continue
            adaptive, other = ([one for one in found if one.rival.adaptive == which] for which in (True, False))
            lines.append(
                f"| {data} | {base.name} | {found[0].seeds} | {found[0].target:.3f} | {found[0].seconds:.2f} | "
                f"{racer(adaptive, table)} | {racer(other, table)} |"
            )
            if base == uniform[0]:
                verdicts.append(f"- {data}: {verdict(base, adaptive, other)}.")
    return [*lines, "", *verdicts] if verdicts else ["Nothing to compare yet."]


def racer(found: list[Race], table: dict[Variant, dict[int, Found]]) -> str:
    winner = first(found)
    if winner is not None:
        return f"{winner.rival.name} | {winner.rival_seconds:.2f} | {winner.ratio:.2f}"
    if not found:
        return "not measured | - | -"
    best = max(statistics.fmean(map(last, table[one.rival].values())) for one in found)
    return f"none (at most {best:.3f}) | - | -"


def verdict(base: Variant, adaptive: list[Race], others: list[Race]) -> str:
    """Say in a sentence what came out, whichever way; variants that are still to be measured are no result."""
    quality, best, other = f"the Dice of {base.name}", first(adaptive), first(others)
    if not adaptive:
        words = f"adaptive tokens are not measured yet against {quality}"
    elif best is None:
        words = f"no adaptive tokens come to {quality}"
    else:
        words = f"at {quality}, {best.rival.name} are {best.ratio:.1f} times as fast"
    if not others:
        return f"{words}; larger uniform patches are not measured yet"
    if other is None:
        return f"{words}; no larger uniform patches come to it"
    better = bool(adaptive) and (best is None or other.ratio > best.ratio)
    return f"{words}; {other.rival.name} are {other.ratio:.1f} times as fast{', and simpler' if better else ''}"


def trees_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = ["| data | tokens | Dice of the labels themselves | leaves by their side |", "|---|---|---|---|"]
    for row in rows:
        some = {side: share for side, share in row["leaves"].items() if share >= 0.005}
        sides = ", ".join(f"{share:.0%} {side}" for side, share in some.items())
        lines.append(f"| {row['data']} | {row['variant']} | {row['dice']:.3f} | {sides} |")
    return lines


def page(stored: dict[str, Any] | None, trees: dict[str, Any] | None) -> str:
    """Write what stands on the page below its mark."""
    lines: list[str] = []
    if stored is None or not stored["cells"]:
        lines += [
            "",
            "Numbers of a GPU are still missing. So far the command was only tried with `--quick`: its small models,",
            "and the seconds of a CPU that others use as well, say nothing about the claim and are not kept.",
            "",
        ]
    else:
        here, size = stored["machine"], stored["settings"]
        days = sorted({found["date"] for found in stored["cells"].values()})
        lines += [
            "",
            f"{here['device']}, PyTorch {here['torch']}, Python {here['python']}, {' and '.join(days)}. "
            f"{size['steps']} steps, or {size['longer']} times as many, of {size['batch']} crops of "
            f"{size['crop']}^2 pixels ({size['crop3d']}^3 voxels of volumes); {size['depth']} blocks of width "
            f"{size['width']}, AdamW at {size['rate']:g}.",
            tables(stored),
        ]
    if trees is not None:
        here = trees["machine"]
        lines += [
            "## What trees leave of the labels",
            "",
            f"{here['device']}, PyTorch {here['torch']}, Python {here['python']}, {trees['date']}; any machine makes "
            "the same.",
            "",
            *trees_table(trees["rows"]),
        ]
    return "\n".join(lines).rstrip("\n") + "\n"
