"""Facts of a run as one JSON-able dictionary: how it stands, what it scored, how fast it went, what it cost.

Speeds are medians over the logged windows, without the first window of every session: that one holds compilation,
the first reads and the warm-up of the device, and would understate the rest."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from vitrail.errors import UserError
from vitrail.report.metrics import (
    Line,
    merge_lines,
    name_metric,
    open_run,
    read_lines,
    read_recipe,
    select,
    split_sessions,
)
from vitrail.report.units import compact, count, describe_most, number_of, percent, plain

_QUIET = 300.0  # seconds without a line after which a run without an end is taken for dead
_SPEEDS = ("step_seconds", "samples_per_s", "tokens_per_s", "tflops", "mfu", "hfu", "data_wait")
MOST_LINES = 50_000  # of training that a summary is made from; a longer log is thinned
SLOW_DATA = 0.2  # share of the step spent waiting for data from which a warning is due


def summary(run_dir: str | Path, *, now: float | None = None) -> dict[str, Any]:
    """Read a run folder and sum it up; `now` is the time to judge a silent run by (default: the clock)."""
    run = open_run(run_dir)
    raw, torn = read_lines(run, most=MOST_LINES)
    recipe, _, complaint = read_recipe(run)
    warnings = ([complaint] if complaint else []) + warn_of_torn(torn)
    return summarize(run, raw, recipe, warnings, time.time() if now is None else now)


def warn_of_torn(torn: int) -> list[str]:
    """Return a sentence on lines that could not be read, if there are any."""
    some = "1 line" if torn == 1 else f"{torn} lines"
    return [f"metrics.jsonl holds {some} cut short by a crash; the rest was read."] if torn else []


def summarize(
    run: Path, raw: Sequence[Line], recipe: dict[str, Any], warnings: list[str], now: float
) -> dict[str, Any]:
    """Make the summary of what was read; `raw` holds every line, repeated steps included."""
    lines = merge_lines(raw)
    train, evals = select(lines, "train"), select(lines, "eval")
    stretches = split_sessions(raw)
    sessions = [_describe_session(stretch) for stretch in stretches]
    start: Line = (select(lines, "start") or [{}])[-1]
    status, reason, message = _judge(raw, now)
    section = recipe.get("run")
    facts: dict[str, Any] = {
        "run": str((section if isinstance(section, dict) else {}).get("name") or run.resolve().name),
        "dir": str(run),
        "status": status,
        "reason": reason,
        "message": message,
        "step": _last_step(stretches[-1]) if stretches else 0,  # an earlier session may have gone further in vain
        "steps": total_steps(recipe, start),
        "loss": _last(train, "loss"),
        "eval": latest_eval(evals),
        "best_eval": _best_eval(evals, start),
        "best_metric": start["best_metric"] if isinstance(start.get("best_metric"), str) else None,
        "larger_is_better": start.get("larger_is_better") is True,
        "initial": _describe_initial(lines),
        "changes": _list_changes(raw),
        "started": _first_time(raw),
        "updated": _last_time(raw),
        "seconds": sum(s["seconds"] or 0.0 for s in sessions),
        "parameters": start.get("parameters"),
        "world": start.get("world"),
        "layout": start["layout"] if isinstance(start.get("layout"), str) else None,
        "device": start.get("device"),
        "threads": start.get("threads"),
        "speed": _measure_speed(raw),
        "memory_gib": max(
            (m for m in (number_of(t.get("memory_gib")) for t in train) if math.isfinite(m)), default=None
        ),
        "sessions": sessions,
        "skipped": [{k: line.get(k) for k in ("step", "reason", "counters")} for line in select(lines, "skip")],
        "bad": _count_bad(lines),
        "checkpoints": [
            {k: line.get(k) for k in ("step", "path", "seconds", "bytes", "time")}
            for line in select(lines, "checkpoint")
        ],
        "pictures": [
            {k: line.get(k) for k in ("step", "path", "caption", "samples")} for line in select(lines, "picture")
        ],
        "profiles": [{k: line.get(k) for k in ("step", "steps", "path")} for line in select(lines, "profile")],
    }
    facts["cost"] = _count_cost(facts, train, start, recipe)
    facts["warnings"] = warnings + _find_warnings(facts, lines)
    facts["verdict"] = _state_verdict(facts)
    facts["score"] = describe_score(facts["eval"], facts["best_metric"])
    return strict(facts)


def describe_score(found: dict[str, Any] | None, first: str | None = None) -> str:
    """Say the last evaluation in a phrase, beginning with the metric `first`; single classes are left to the table.

    For a reconstruction that is chosen by its error, the error stands beside the variance.
    """
    if not found:
        return "no evaluation yet"
    metrics = found["metrics"]
    sure = (found.get("intervals") or {}).get("metrics", {})

    def interval(name: str) -> str:
        return f" (95 %: {plain(sure[name][0])} to {plain(sure[name][1])})" if name in sure else ""

    mse, variance = number_of(metrics.get("mse")), number_of(metrics.get("variance"))
    if math.isfinite(mse) and math.isfinite(variance) and first in (None, "mse", "mse_over_variance"):
        ratio = number_of(metrics.get("mse_over_variance"))
        if not math.isfinite(ratio):
            ratio = mse / variance if variance else math.nan
        return (
            f"hidden voxels: mean squared error {plain(mse, 3)} against a variance of {plain(variance, 3)}, "
            f"ratio {ratio:.2f}{interval('mse_over_variance')}"
        )
    ordered = sorted(metrics.items(), key=lambda item: item[0] != first)  # the others keep their order
    shown = [
        f"{name_metric(name)} {plain(value)}{interval(name) if name == first else ''}"
        for name, value in ordered
        if name == first or not str(name).startswith(("dice_", "iou_"))
    ]
    return ", ".join(shown) or "an evaluation without metrics"


def total_steps(recipe: dict[str, Any], start: Line) -> int | None:
    """Return the length of the run in steps: as its start event says, otherwise worked out from the recipe."""
    if math.isfinite(number_of(start.get("steps"))):
        return int(start["steps"])
    from vitrail.recipe import steps_of

    section = recipe.get("run")
    steps: Any = section.get("steps") if isinstance(section, dict) else None
    epoch = number_of(start.get("samples_per_epoch"))
    try:
        return steps_of(steps, batch=global_batch(recipe, start), epoch=int(epoch) if math.isfinite(epoch) else None)
    except UserError:
        return None


def global_batch(recipe: dict[str, Any], start: Line) -> int | None:
    """Return the samples of one step over all ranks."""
    data = recipe.get("data")
    batch = data.get("batch") if isinstance(data, dict) else None
    if isinstance(batch, int) and not isinstance(batch, bool):
        return batch
    found = re.fullmatch(r"\s*(\d+)\s*/\s*rank\s*", batch) if isinstance(batch, str) else None
    world = number_of(start.get("world"))
    return int(found[1]) * int(world) if found and math.isfinite(world) else None


def latest_eval(evals: Sequence[Line]) -> dict[str, Any] | None:
    """Return the last evaluation; of several weights at one step the averaged ones."""
    found = [_tidy_eval(line) for line in evals if isinstance(line.get("metrics"), dict)]
    return max(found, key=lambda e: (number_of(e["step"]), e["weights"] == "ema"), default=None)


def _best_eval(evals: Sequence[Line], start: Line) -> dict[str, Any] | None:
    """Return the best evaluation by the metric that chooses the best checkpoint, with the metric and its direction.

    Runs that do not say which one go by the smallest ratio, or the smallest loss where there is no ratio.
    """
    found = [_tidy_eval(line) for line in evals if isinstance(line.get("metrics"), dict)]
    chosen = start.get("best_metric")
    larger = start.get("larger_is_better") is True
    for name, sign in ((chosen, -1 if larger else 1), ("mse_over_variance", 1), ("loss", 1)):
        scored = [e for e in found if math.isfinite(number_of(e["metrics"].get(name)))]
        if scored:
            best = min(scored, key=lambda e: sign * number_of(e["metrics"][name]))
            return best | {"metric": name, "larger_is_better": sign < 0}
    return None


def _describe_initial(lines: Sequence[Line]) -> dict[str, Any] | None:
    """Return the file that the weights started from, how many tensors were taken in which way, and what was noted."""
    found = select(lines, "init")
    if not found:
        return None
    entries, notes = (found[-1].get(key) for key in ("entries", "notes"))
    actions = [str(e.get("action")) for e in (entries if isinstance(entries, list) else []) if isinstance(e, dict)]
    return {
        "path": str(found[-1].get("path")),
        "adapter": str(found[-1].get("adapter")),
        "counts": {action: actions.count(action) for action in dict.fromkeys(actions)},
        "notes": [str(note) for note in (notes if isinstance(notes, list) else [])],
    }


def _tidy_eval(line: Line) -> dict[str, Any]:
    return {k: line.get(k) for k in ("step", "weights", "samples", "metrics")} | {"intervals": read_intervals(line)}


def read_intervals(line: Line) -> dict[str, Any]:
    """Return what is known of how sure an evaluation is: what was drawn, and an interval of each metric."""
    found = line.get("intervals")
    given = found.get("metrics") if isinstance(found, dict) else None
    metrics = {
        str(name): [number_of(end) for end in ends]
        for name, ends in (given.items() if isinstance(given, dict) else ())
        if isinstance(ends, list) and len(ends) == 2
    }
    return {"over": str(found.get("over")), "metrics": metrics} if isinstance(found, dict) and metrics else {}


def _judge(raw: Sequence[Line], now: float) -> tuple[str, str | None, str | None]:
    """Return status, reason and message of the last session."""
    if not raw:
        return "empty", None, None
    end = next((line for line in reversed(raw) if line["event"] in ("end", "start")), {})
    if end.get("event") == "end":
        reason = str(end.get("reason") or "")
        status = reason if reason in ("done", "failed") else "stopped"
        return status, reason or None, str(end["message"]) if end.get("message") else None
    times = [t for t in (number_of(line.get("time")) for line in raw) if math.isfinite(t)]
    gap = max((b - a for a, b in zip(times[-10:], times[-9:], strict=False)), default=0.0)
    silent = now - times[-1] if times else math.inf
    return ("running" if silent < max(_QUIET, 5 * gap) else "interrupted"), None, None


def _count_bad(lines: Sequence[Line]) -> dict[str, Any]:
    """Count the samples that all sessions skipped as bad data, and the items that they would have come from."""
    found = select(lines, "bad")
    items: dict[str, int] = {}
    for line in found:
        for item, number in (line["items"] if isinstance(line.get("items"), dict) else {}).items():
            if math.isfinite(number_of(number)):
                items[item] = items.get(item, 0) + int(number_of(number))
    most = max((n for n in (number_of(line.get("samples")) for line in found) if math.isfinite(n)), default=0)
    return {"samples": max(int(most), sum(items.values())), "items": items}


def describe_bad(bad: dict[str, Any]) -> str:
    """Say how many samples were skipped and what most of them would have come from."""
    if not bad["samples"]:
        return ""
    return f"{count(bad['samples'])} sample{'s' * (bad['samples'] > 1)} skipped{describe_most(bad['items'])}"


def _state_verdict(facts: dict[str, Any]) -> str:
    """Say in one phrase how the run stands."""
    done, total = facts["step"], facts["steps"]
    where = f"at step {count(done)} of {count(total)}" if total else f"at step {count(done)}"
    if facts["status"] in ("failed", "interrupted"):
        saved = max((number_of(point["step"]) for point in facts["checkpoints"]), default=math.nan)
        where += f", saved up to step {count(saved)}" if math.isfinite(saved) else ", nothing saved"
    phrase = {
        "done": f"Done {where}",
        "failed": f"Failed {where}",
        "stopped": f"Stopped {where}" + (f" ({facts['reason']})" if facts["reason"] else ""),
        "running": f"Running, {where}",
        "interrupted": f"Interrupted {where}: the run fell silent without an end",
        "empty": "Not started: no step has been logged",
    }[facts["status"]]
    return f"{phrase}: {facts['message']}" if facts["message"] and facts["status"] in ("failed", "stopped") else phrase


def _list_changes(raw: Sequence[Line]) -> list[dict[str, Any]]:
    """List what was changed on purpose when the run was continued: step, key, old and new value."""
    found = []
    for line in select(raw, "change"):
        changes = line.get("changes")
        for one in changes if isinstance(changes, list) else ():
            if isinstance(one, dict) and isinstance(one.get("key"), str):
                found.append({"step": line.get("step"), **{name: one.get(name) for name in ("key", "old", "new")}})
    return found


def _describe_session(lines: Sequence[Line]) -> dict[str, Any]:
    """Describe one stretch from a start to its end: what it ran on, how far it came, how it ended."""
    first = lines[0]
    end = next((line for line in reversed(lines) if line["event"] == "end"), {})
    begun, ended = _first_time(lines), _last_time(lines)
    seconds = ended - begun if begun is not None and ended is not None else None
    return {
        "started": begun,
        "seconds": max(seconds, 0.0) if seconds is not None else max(number_of(end.get("seconds")), 0.0),
        "from_step": first.get("step") if first["event"] == "start" else None,
        "to_step": _last_step(lines),
        "resumed": bool(first.get("resumed")),
        "world": first.get("world"),
        "device": first.get("device"),
        "reason": end.get("reason"),
    }


def _measure_speed(raw: Sequence[Line]) -> dict[str, Any]:
    """Return median and middle four fifths of each speed over the windows after a session's first."""
    later = [line for session in split_sessions(raw) for line in select(session, "train")[1:]]
    speed: dict[str, Any] = {"windows": len(later)}
    for name in _SPEEDS:
        values = [v for v in (number_of(line.get(name)) for line in later) if math.isfinite(v)]
        speed[name] = median(values) if values else None
        if name == "step_seconds" and len(values) > 1:
            tenths = quantiles(values, n=10, method="inclusive")
            speed["step_seconds_low"], speed["step_seconds_high"] = tenths[0], tenths[-1]
    return speed


def _count_cost(facts: dict[str, Any], train: Sequence[Line], start: Line, recipe: dict[str, Any]) -> dict[str, Any]:
    """Count samples, tokens, model FLOPs and device time of the whole run."""
    samples = number_of(_last(train, "samples"))
    if not math.isfinite(samples):
        samples = number_of(facts["step"]) * number_of(global_batch(recipe, start))
    flops = start.get("flops_per_sample")
    flops = flops if isinstance(flops, dict) else {}
    model = samples * number_of(flops.get("model")) / 1e12
    seconds, world = number_of(facts["seconds"]), number_of(facts["world"])
    return {
        "samples": samples,
        "epochs": samples / number_of(start.get("samples_per_epoch")) if start.get("samples_per_epoch") else None,
        "tokens": samples * number_of(start.get("tokens_per_sample")),
        "model_tflop": model,
        "hardware_tflop": samples * number_of(flops.get("hardware")) / 1e12,
        "tflops_over_all": model / seconds if seconds else None,  # waiting, evaluation and checkpoints included
        "samples_per_s_over_all": samples / seconds if seconds else None,
        "device_hours": seconds * world / 3600,
    }


def _find_warnings(facts: dict[str, Any], lines: Sequence[Line]) -> list[str]:
    """Say what a reader should know before trusting the numbers."""
    found = [str(line.get("message") or line.get("text") or "") for line in select(lines, "warning")]
    skipped = len(facts["skipped"])
    if skipped:
        steps = ", ".join(plain(s["step"], 12) for s in facts["skipped"][:5]) + (", …" if skipped > 5 else "")
        found.append(f"{skipped} step{'s were' if skipped > 1 else ' was'} skipped (step {steps}).")
    if bad := describe_bad(facts["bad"]):
        found.append(f"Bad data: {bad}.")
    train = select(lines, "train")
    broken = sum(not math.isfinite(number_of(line.get("loss"))) for line in train)
    if broken:
        found.append(f"The loss was not finite in {broken} of {len(train)} logged windows.")
    wait = number_of(facts["speed"]["data_wait"])
    if wait >= SLOW_DATA:
        found.append(
            f"{percent(wait)} of the step time went into waiting for data; "
            "raise data.workers, data.prefetch or data.reuse, or store the data in larger chunks."
        )
    ratio = number_of((facts["eval"] or {}).get("metrics", {}).get("mse_over_variance"))
    if ratio >= 1:
        found.append(f"A ratio of {ratio:.2f} is no better than predicting the mean, which scores 1.")
    best = facts["best_eval"]
    if best:
        name, sign = best["metric"], -1 if best["larger_is_better"] else 1
        last, top = (number_of((e or {}).get("metrics", {}).get(name)) for e in (facts["eval"], best))
        if math.isfinite(last) and sign * (last - top) > 0.05 * abs(top):
            found.append(
                f"The last evaluation ({name} {plain(last, 3)}) is worse than that of "
                f"step {count(best['step'])} ({plain(top, 3)})."
            )
    return [sentence for sentence in found if sentence]


def explain_no_mfu(facts: dict[str, Any]) -> str | None:
    """Say why there is no MFU; None where there is one."""
    if facts["speed"]["mfu"] is not None:
        return None
    if not facts["speed"]["windows"]:
        return "No speed yet: the first window of a session is warm-up and is not counted."
    device = facts["device"] or "this device"
    return f"No MFU: the peak rate of {device} is not on record, so only the measured TFLOP/s are given."


def describe_flops(tflop: Any) -> str:
    """Return a count of operations given in TFLOP: 3.4 PFLOP."""
    return compact(number_of(tflop) * 1e12, "FLOP")


def describe_time(stamp: Any) -> str:
    """Return a moment in local time, with its zone."""
    number = number_of(stamp)
    try:
        return datetime.fromtimestamp(number).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z").strip()
    except (ValueError, OverflowError, OSError):
        return "–"


def _last(lines: Sequence[Line], name: str) -> Any:
    """Return the value of a field in the last line by step that has it."""
    found = [line for line in lines if line.get(name) is not None]
    return max(found, key=lambda line: number_of(line.get("step")), default={}).get(name)


def _last_step(lines: Sequence[Line]) -> int:
    steps = (number_of(line.get("step")) for line in lines)
    return int(max((s for s in steps if math.isfinite(s)), default=0))


def _first_time(lines: Sequence[Line]) -> float | None:
    return next((t for t in (number_of(line.get("time")) for line in lines) if math.isfinite(t)), None)


def _last_time(lines: Sequence[Line]) -> float | None:
    return _first_time(lines[::-1])


def strict(value: Any) -> Any:
    """Return the same tree with None for NaN and infinity, which JSON does not know."""
    if isinstance(value, dict):
        return {str(k): strict(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [strict(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
