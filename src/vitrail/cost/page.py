"""A plan as a person reads it: a table of layouts, what the best is made of, a curve over numbers of GPUs."""

from __future__ import annotations

import io
import shlex
from collections.abc import Sequence
from pathlib import Path

from vitrail.cost.cluster import Cluster
from vitrail.cost.plan import HEADROOM, Estimate
from vitrail.disk import write_output
from vitrail.report.units import compact, count, duration

BAR = 30  # characters of the longest bar


def heading(name: str, cluster: Cluster, gpus: Sequence[int], parameters: int) -> list[str]:
    """Say what is planned where."""
    shown = count(gpus[0]) if len(gpus) == 1 else f"{count(gpus[0])} to {count(gpus[-1])}"
    device = cluster.device
    return [
        f"{name}, {count(parameters)} parameters, on {shown} GPU{'s' * (gpus[-1] > 1)} of {cluster.name} "
        f"({device.name}, {device.memory_gib:g} GiB, {cluster.gpus_per_node} a node)"
    ]


def table(layouts: Sequence[Estimate]) -> list[str]:
    """Show a line for each layout, numbers on the right; columns that say nothing are left out."""
    columns = {
        "strategy": [one.strategy for one in layouts],
        "group": [str(one.group or "-") for one in layouts],
        "tensor": [str(one.tensor) for one in layouts],
        "context": [str(one.context) for one in layouts],
        "pipeline": [str(one.pipeline) for one in layouts],
        "recompute": [one.recompute for one in layouts],
        "batch": [count(one.batch) for one in layouts],
        "a rank": [count(one.batch_per_rank) for one in layouts],
        "a pass": [count(one.micro_batch) for one in layouts],
        **_numbers(layouts),
    }
    dull = {"group": "-", "tensor": "1", "context": "1", "pipeline": "1"}
    shown = {name: cells for name, cells in columns.items() if set(cells) != {dull.get(name)}}
    return _lines(shown)


def _numbers(layouts: Sequence[Estimate]) -> dict[str, list[str]]:
    return {
        "memory GiB": [f"{one.memory_gib:.1f}{'' if one.fits else ' !'}" for one in layouts],
        "step s": [_seconds(one.step_seconds) for one in layouts],
        "samples/s": [compact(one.samples_per_second) for one in layouts],
        "tokens/s": [compact(one.tokens_per_second) for one in layouts],
        "MFU": [f"{100 * one.mfu:.1f} %" for one in layouts],
        "limited by": [one.limited_by for one in layouts],
    }


def parts(one: Estimate, cluster: Cluster) -> list[str]:
    """Show memory and time of one layout, and a sentence on what limits it."""
    sizes = ", ".join(f"{name} {size:.2f}" for name, size in one.memory.items() if size >= 0.005) or "next to nothing"
    names = ("compute", "exposed", "optimizer", "bubble")
    words = {"exposed": "waiting for communication", "bubble": "pipeline bubble"}
    times = ", ".join(f"{words.get(n, n)} {_seconds(one.time[n])}" for n in names if one.time.get(n, 0) > 0)
    when = f" ({one.moment})" if one.moment else ""
    lines = [
        f"memory of a rank in GiB: {sizes}; {one.memory_gib:.2f} allocated{when}, {one.reserved_gib:.2f} "
        f"reserved of {cluster.device.memory_gib:g}",
        f"seconds of a step: {times}; {_seconds(one.step_seconds)} in all; MFU {100 * one.mfu:.1f} %, "
        f"HFU {100 * one.hfu:.1f} %",
        limit(one, cluster),
    ]
    if one.run_hours is not None:
        price = "" if one.run_cost is None else f" and {count(one.run_cost)} {cluster.currency}"
        lines.append(
            f"the whole run takes {duration(3600 * one.run_hours)}{price}, without reading, evaluation and checkpoints"
        )
    if one.cost_per_million_samples is not None:
        lines.append(f"a million samples cost {one.cost_per_million_samples:.2f} {cluster.currency}")
    return [*lines, trust(one, cluster)]


def trust(one: Estimate, cluster: Cluster) -> str:
    """Say in one sentence how far plans like this one were off."""
    found = one.checked
    if not cluster.checked:
        return f"no plan for {cluster.name} has been compared with a measurement"
    if found is None:
        return (
            f"no plan of about this size for about as many GPUs of {cluster.name} has been compared with a measurement"
        )
    sizes = " to ".join(dict.fromkeys(f"{size / 1e9:.2g}" for size in found["parameters"]))
    gpus, several = " to ".join(dict.fromkeys(map(count, found["gpus"]))), found["gpus"][1] > 1
    words = [*(found["strategies"] if several else []), f"{sizes} billion parameters", f"{gpus} GPU{'s' * several}"]
    what = ", ".join(words)
    if found["rows"] == 1:
        return f"compared with what was measured, one plan like this ({what}) was off by {100 * found['most']:+.0f} %"
    return (
        f"compared with what was measured, {found['rows']} plans like this one ({what}) were off by "
        f"{100 * found['mean']:.0f} % in the mean, from {100 * found['least']:+.0f} to {100 * found['most']:+.0f} % "
        "in samples/s"
    )


def limit(one: Estimate, cluster: Cluster) -> str:
    """Say in one sentence what limits a layout."""
    if one.tight:
        return (
            f"it may only just run: {one.memory_gib:.1f} GiB are allocated, but with the usual gaps of the allocator "
            f"{one.reserved_gib:.1f} would be reserved, and plans leave {100 - 100 * HEADROOM:.0f} % of "
            f"{cluster.device.memory_gib:g} free"
        )
    if not one.fits:
        return f"it does not fit: {one.reserved_gib:.1f} GiB would be reserved on the fullest rank"
    share = one.limits.get(one.limited_by, 0.0) / one.step_seconds
    return f"it is limited by {one.limited_by}, to which {100 * share:.0f} % of the step goes"


def advice(found: Estimate | None, cluster: Cluster, gpus: int) -> str:
    """Say what to do where nothing fits."""
    room = f"{100 * HEADROOM:.0f} % of {cluster.device.memory_gib:g} GiB"
    if found is None:
        return f"does not fit in {room}: nothing does on this cluster; use a smaller model, crop or batch"
    more = f"{count(found.gpus)} GPUs" if found.gpus != gpus else ""
    how = " and ".join(filter(None, (more, shlex.join(found.changes))))
    return f"does not fit in {room}: nearest that fits is {how or 'the recipe itself'} ({found.memory_gib:.1f} GiB)"


def curve(layouts: Sequence[Estimate], scaling: str) -> list[str]:
    """Show a line for each number of GPUs: its best layout, its rate against the first one's, and a bar of it."""
    shares = efficiencies(layouts)
    columns = {
        "GPUs": [count(one.gpus) for one in layouts],
        "layout": [layout_words(one) for one in layouts],
        "batch": [count(one.batch) for one in layouts],
        **{name: cells for name, cells in _numbers(layouts).items() if name != "tokens/s"},
        "of ideal": [f"{100 * share:3.0f} % {'#' * round(BAR * min(1.0, share))}" for share in shares],
    }
    told = "batch per rank" if scaling == "weak" else "one batch for all"
    return [f"{scaling} scaling ({told}), against {count(layouts[0].gpus)} GPUs:", *_lines(columns)]


def efficiencies(layouts: Sequence[Estimate]) -> list[float]:
    """Return the rate of a GPU, as a share of the first one's."""
    first = layouts[0].samples_per_second / layouts[0].gpus
    return [one.samples_per_second / one.gpus / first for one in layouts]


def layout_words(one: Estimate) -> str:
    axes = [f"{axis} {size}" for axis in ("tensor", "context", "pipeline") if (size := getattr(one, axis)) > 1]
    group = [f"group {one.group}"] if one.group else []
    again = [] if one.recompute == "none" else [f"recompute {one.recompute}"]
    return ", ".join([one.strategy, *group, *axes, *again])


def draw(layouts: Sequence[Estimate], path: Path, title: str) -> None:
    """Draw samples a second against GPUs with the ideal line, and MFU below."""
    from matplotlib.figure import Figure

    gpus, rates = [one.gpus for one in layouts], [one.samples_per_second for one in layouts]
    figure = Figure(figsize=(6, 5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    above.plot(gpus, [rates[0] / gpus[0] * number for number in gpus], "--", color="#616e7c", label="ideal")
    above.plot(gpus, rates, "o-", color="#1f6feb", label="planned")
    lacking = [one for one in layouts if not one.fits]
    if lacking:
        above.plot([o.gpus for o in lacking], [o.samples_per_second for o in lacking], "x", color="#c0362c", zorder=4)
        above.plot([], [], "x", color="#c0362c", label="does not fit")
    above.set(xscale="log", yscale="log", ylabel="samples/s", title=title)
    above.legend(frameon=False)
    below.plot(gpus, [100 * one.mfu for one in layouts], "o-", color="#1a7f5a")
    below.set(xlabel="GPUs", ylabel="MFU, %", ylim=(0, 120 * max(one.mfu for one in layouts)))
    below.set_xticks(gpus, [count(number) for number in gpus], rotation=45)
    below.minorticks_off()
    stream = io.BytesIO()
    figure.savefig(stream, dpi=150, format=path.suffix[1:].lower())
    write_output(path, stream.getvalue())


def _lines(columns: dict[str, list[str]]) -> list[str]:
    left = {"strategy", "recompute", "limited by", "layout", "of ideal"}
    rows = [list(columns), *map(list, zip(*columns.values(), strict=True))]
    widths = [max(len(row[place]) for row in rows) for place in range(len(columns))]
    sides = [f"{'<' if name in left else '>'}{width}" for name, width in zip(columns, widths, strict=True)]
    return ["  ".join(format(*both) for both in zip(row, sides, strict=True)).rstrip() for row in rows]


def _seconds(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"
