"""Facts and page of several runs: curves over each other, keys that differ, scores, pictures and speed side by side.

- the facts are one JSON-able dictionary; the page is one file that opens offline, made of them
- what does not compare, because the runs were asked for other things, is said in a sentence"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from vitrail.disk import check_output, write_output
from vitrail.errors import UserError
from vitrail.report.charts import chart_of, script, script_hash
from vitrail.report.compare_plots import (
    MOST_RUNS,
    Curve,
    Track,
    axes_of,
    draw_curve,
    draw_scores,
    list_curves,
    seen,
)
from vitrail.report.facts import MOST_LINES, describe_time, global_batch, strict, summarize, warn_of_torn
from vitrail.report.figures import embed_image, save_svg, try_to_draw
from vitrail.report.metrics import Line, merge_lines, name_metric, open_run, read_json, read_lines, read_recipe, select
from vitrail.report.page import (
    Row,
    describe_place,
    is_worst,
    list_cost,
    list_speed,
    load_template,
    read_shown,
    show,
    writing,
)
from vitrail.report.units import MISSING, compact, count, duration, number_of, plain

_NAMES = ("run.name", "run.dir")  # keys that always differ: the page names runs by them
_LOSSES = ("loss", "mse", "mse_over_variance", "fid", "kid")  # metrics that are better when smaller
_SCORES = ("dice_", "iou_", "mean_dice", "mean_iou", "accuracy", "top5")  # and when larger
_HELD_OUT = ("data.valid", "data.crop", "data.fit", "data.tiles", "eval.tiles", "run.seed")  # choose held-out samples
_LOSS_OF = ("objective.", "data.normalize", "model.mask")  # keys that give a loss another meaning
_ERRORS, _ERROR_OF = ("mse", "mse_over_variance"), ("model.mask",)  # and that of what is hidden
_MACHINE = ("vitrail", "commit", "modified", "python", "packages", "cuda", "hip", "host", "platform", "cpu", "devices")
_LONGEST = 120  # bytes of the name of a page, of the 255 that a system allows


@dataclass(frozen=True)
class _Run:
    """A run that is compared: what was read of it."""

    path: Path
    facts: dict[str, Any]
    raw: list[Line]
    recipe: dict[str, Any]
    environment: Any


def compare_summary(runs: Sequence[str | Path], *, now: float | None = None) -> dict[str, Any]:
    """Read several run folders and sum up what they have in common and what tells them apart."""
    return strict(_summarize(_read_all(runs, time.time() if now is None else now)))


def write_comparison(runs: Sequence[str | Path], out: str | Path | None = None, *, now: float | None = None) -> Path:
    """Write the page of several runs to `out`, or beside the first of them, and return its path."""
    now = time.time() if now is None else now
    found = _read_all(runs, now)
    path = default_page([run.path for run in found]) if out is None else Path(out)
    with writing(path):
        _check_page(path)
    html = load_template("compare.html").render(_gather(found, path, now))
    with writing(path):
        return write_output(path, html.encode("utf-8", errors="replace"), parents=True)


def default_page(runs: Sequence[Path]) -> Path:
    """Return where a comparison lies that is given no path: beside the first run, and named by all of them."""
    first, places = runs[0], [run.resolve() for run in runs]
    folder = first.parent if first.name not in ("", "..") else places[0].parent
    name = "compare-" + "+".join(place.name for place in places)
    short = os.fsdecode(os.fsencode(name)[:_LONGEST])
    # Other runs may have the same names, or ones that are the same when they are put together.
    if short != name or name.count("+") >= len(runs) or len({place.parent for place in places}) > 1:
        digest = hashlib.blake2b("\0".join(map(str, places)).encode(errors="replace"), digest_size=4).hexdigest()
        name = f"{short}-{digest}"
    return folder / f"{name}.html"


def _check_page(path: Path) -> None:
    """Refuse a path that belongs to somebody else, before the work of drawing."""
    if path.name == "report.html" and any(
        (path.parent / name).exists() for name in ("recipe.yaml", "metrics.jsonl", "sweep.json", "results.jsonl")
    ):
        raise UserError(f"--out {path}: this is the page of {path.parent} itself; choose another path")
    check_output(path)


def _read_all(runs: Sequence[str | Path], now: float) -> list[_Run]:
    """Read the folders; refuse those that cannot be compared."""
    if not 2 <= len(runs) <= MOST_RUNS:
        raise UserError(f"a comparison is of 2 to {MOST_RUNS} runs, and {len(runs)} were given; name others")
    places: dict[Path, str | Path] = {}
    for run in runs:
        _check_run(Path(run))
        place = Path(run).resolve()
        if place in places:
            raise UserError(
                f"{run}: this run is given twice (as {places[place]}, too); a comparison is of different runs"
            )
        places[place] = run
    return [_read(Path(run), now) for run in runs]


def _check_run(run: Path) -> None:
    from vitrail.report import is_bench

    if is_bench(run):
        raise UserError(
            f"{run}: this is the folder of a bench, which has a page of its own (vitrail report {run}); give runs alone"
        )
    open_run(run)


def _read(run: Path, now: float) -> _Run:
    raw, torn = read_lines(run, most=MOST_LINES)
    if not (select(raw, "train") or select(raw, "eval")):
        raise UserError(f"{run}: this run has logged no step yet, so there is nothing to compare; leave it out")
    recipe, _, complaint = read_recipe(run)
    warnings = ([complaint] if complaint else []) + warn_of_torn(torn)
    facts = summarize(run, raw, recipe, warnings, now)
    return _Run(run, facts, seen(raw, global_batch(recipe, facts)), recipe, read_json(run / "environment.json")[0])


def name_runs(runs: Sequence[tuple[str, Path]]) -> list[str]:
    """Return a name for each run, by its own name and path, that no other has: as short as that allows."""
    parts = [path.resolve().parts for _, path in runs]
    for names in (
        [name for name, _ in runs],
        *(["/".join(part[-deep:]) for part in parts] for deep in range(1, max(map(len, parts)) + 1)),
    ):
        if len(set(names)) == len(names):
            return names
    return [f"{name} ({place + 1})" for place, (name, _) in enumerate(runs)]


# ---------------------------------------------------------------- facts


def _summarize(runs: Sequence[_Run]) -> dict[str, Any]:
    """Make the summary of what was read."""
    names = name_runs([(run.facts["run"], run.path) for run in runs])
    differ = find_differences(_whole_recipes(runs))
    scores = list_scores(runs, differ)
    headline, verdict = judge(names, scores)
    return {
        "headline": headline,
        "verdict": verdict,
        "runs": [{"name": name} | run.facts for name, run in zip(names, runs, strict=True)],
        "scores": scores,
        "differ": [{"key": key, "values": values} for key, values in differ.items() if key not in _NAMES],
        "machines": [
            {"key": key, "values": values}
            for key, values in find_differences([_machine(run.environment) for run in runs]).items()
        ],
        "speed": _beside([list_speed(run.facts) for run in runs]),
        "cost": _beside([list_cost(run.facts) for run in runs]),
        "same_samples": tell_samples(runs, names, differ)[0],
        "notes": list(_find_notes(runs, names, differ, scores)),
    }


def _whole_recipes(runs: Sequence[_Run]) -> list[dict[str, Any]]:
    """Return the recipes with all defaults, which an older version may not have had; as stored where one cannot be."""
    from vitrail.recipe.load import as_meant, load_recipe

    try:
        return [load_recipe(as_meant(run.recipe)).to_tree() for run in runs]
    except (UserError, ImportError, RecursionError):
        return [run.recipe for run in runs]


def _machine(environment: Any) -> dict[str, Any]:
    tree = environment if isinstance(environment, dict) else {}
    return {name: tree.get(name) for name in _MACHINE}


def find_differences(trees: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return the keys whose values differ, with the value of each tree; a key that a tree lacks is null."""
    flat = [dict(_flatten(tree)) for tree in trees]
    keys = dict.fromkeys(key for leaves in flat for key in leaves)
    found = {key: [leaves.get(key) for leaves in flat] for key in keys}
    return {key: values for key, values in found.items() if len({_spell(value) for value in values}) > 1}


def _spell(value: Any) -> str:
    """Return a value as text by which it is compared: 1 is 1.0, true is neither, and an empty list is null."""
    if value in ([], {}):
        return "null"
    if isinstance(value, list):
        return f"[{', '.join(map(_spell, value))}]"
    number = number_of(value)
    return json.dumps(value if math.isnan(number) else number, sort_keys=True, default=str)


def _flatten(tree: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield keys with dots and their values; a list of values is one value."""
    inner: Any = ()
    if isinstance(tree, dict):
        inner = tree.items()
    elif isinstance(tree, list) and any(isinstance(item, dict) for item in tree):
        inner = enumerate(tree)
    elif key:
        yield key, tree
    for name, value in inner:
        yield from _flatten(value, f"{key}.{name}" if key else str(name))


def list_scores(runs: Sequence[_Run], differ: dict[str, Any]) -> list[dict[str, Any]]:
    """List the metrics of the last evaluations, that by which the runs are compared first, with their intervals."""
    evals = [run.facts["eval"] or {} for run in runs]
    names = dict.fromkeys(str(name) for found in evals for name in found.get("metrics", {}))
    first = choose_metric([run.facts for run in runs])
    unlike = {"loss": _asked_apart(differ, _LOSS_OF)} | dict.fromkeys(_ERRORS, _asked_apart(differ, _ERROR_OF))
    scores = []
    for name in sorted(names, key=lambda name: name != first):
        larger = _is_better_larger(name, [run.facts for run in runs])
        if unlike.get(name):
            larger = None
        values = [_value_of(found, name) for found in evals]
        known = [value["value"] for value in values if value["value"] is not None]
        best = None if larger is None or len(known) < 2 else (max if larger else min)(known)
        scores.append(
            {
                "metric": name,
                "label": name_metric(name),
                "larger_is_better": larger,
                "chosen": name == first,
                "values": [value | {"best": best is not None and value["value"] == best} for value in values],
            }
        )
    return scores


def _value_of(found: dict[str, Any], name: str) -> dict[str, Any]:
    value = number_of(found.get("metrics", {}).get(name))
    low, high = ((found.get("intervals") or {}).get("metrics", {}).get(name)) or (None, None)
    if low is None or high is None:  # an end that is not finite is none
        low = high = None
    whole = math.isfinite(value)
    return {"value": value if whole else None, "low": low, "high": high, "step": found.get("step") if whole else None}


def choose_metric(facts: Sequence[dict[str, Any]]) -> str | None:
    """Return the metric by which the runs are compared: one by which a best checkpoint is chosen, that all have."""
    metrics = [(one["eval"] or {}).get("metrics", {}) for one in facts]
    wanted = [one["best_metric"] for one in facts]
    by_error = all(name in (None, "mse", "mse_over_variance", "loss") for name in wanted)
    order = ["mse_over_variance"] * by_error + wanted + ["mse_over_variance", "loss"]
    return next((name for name in order if name and all(name in mine for mine in metrics)), None)


def _is_better_larger(name: str, facts: Sequence[dict[str, Any]]) -> bool | None:
    """Tell whether more of a metric is better; None where that is not known."""
    for one in facts:
        if one["best_metric"] == name:
            return bool(one["larger_is_better"])
    return True if name.startswith(_SCORES) else False if name in _LOSSES else None


def judge(names: Sequence[str], scores: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """Say how the runs compare by the chosen metric, and how sure that is."""
    chosen = next((score for score in scores if score["chosen"]), None)
    if chosen is None:
        return f"{len(names)} runs, which have no score in common", ""
    label = chosen["label"][:1].upper() + chosen["label"][1:]
    pairs = list(zip(names, chosen["values"], strict=True))
    without = [pair for pair in pairs if pair[1]["value"] is None]  # what is not finite, as after a divergence
    ranked = sorted(
        (pair for pair in pairs if pair[1]["value"] is not None),
        key=lambda pair: pair[1]["value"] * (-1 if chosen["larger_is_better"] else 1),
    )
    if len(names) <= 3:
        shown = [f"{name} {plain(value['value'])}" for name, value in ranked]
        headline = f"{label}: {', '.join(shown + [f'{name} not finite' for name, _ in without])}"
    elif len(ranked) < 2:
        headline = f"{label} of {len(names)} runs: {_some([name for name, _ in without])} not finite"
    else:
        (best, top), (last, least) = ranked[0], ranked[-1]
        headline = (
            f"{label} of {len(names)} runs: from {plain(top['value'])} ({best}) to {plain(least['value'])} ({last})"
        )
    if chosen["larger_is_better"] is None or len(ranked) < 2:
        return headline, ""
    return headline, _tell_sure(ranked, "Higher" if chosen["larger_is_better"] else "Lower")


def _tell_sure(ranked: Sequence[tuple[str, dict[str, Any]]], better: str) -> str:
    """Say whether the interval of the best run overlaps those of others."""
    (name, best), *others = ranked
    if all(value["value"] == best["value"] for _, value in others):
        return "All have the same score."
    equal = [other for other, value in others if value["value"] == best["value"]]
    if equal:
        return f"{better} is better, and {_some([name, *equal])} are best, with the same score."
    words = f"{better} is better, and {name} is best"
    if best["low"] is None or any(value["low"] is None for _, value in others):
        return f"{words}; how sure that is cannot be told, since not all runs have an interval."
    near = [other for other, value in others if value["low"] <= best["high"] and best["low"] <= value["high"]]
    if near:
        why = "so the choice of held-out samples may make the difference"
        return f"{words}; its interval overlaps that of {_some(near)}, {why}."
    return f"{words}; its interval of 95 % overlaps no other."


def _some(names: Sequence[str], most: int = 3) -> str:
    shown, more = list(names[:most]), len(names) - most
    if more > 0:
        return ", ".join(shown) + f" and {more} other{'s' * (more > 1)}"
    return " and ".join(filter(None, (", ".join(shown[:-1]), shown[-1])))


def _beside(tables: Sequence[list[Row]]) -> list[dict[str, Any]]:
    """Return a row for each label with the words of each run; rows that say nothing of any run are left out."""
    labels = dict.fromkeys(row[0] for rows in tables for row in rows)
    found = [{row[0]: row[1] for row in rows} for rows in tables]
    rows = [{"label": label, "values": [mine.get(label, MISSING) for mine in found]} for label in labels]
    return [row for row in rows if any(not value.startswith(MISSING) for value in row["values"])]


def _asked_apart(differ: dict[str, Any], keys: Sequence[str]) -> list[str]:
    """Return the keys that differ among some, or below them."""
    return [key for key in differ if any(key == k or key.startswith(k.rstrip(".") + ".") for k in keys)]


def tell_samples(runs: Sequence[_Run], names: Sequence[str], differ: dict[str, Any]) -> tuple[bool, str]:
    """Tell whether the pictures of the runs show the same held-out samples, and say so."""
    shown = [_last_picture(run) or {} for run in runs]
    listed = [picture.get("samples") for picture in shown if picture]
    held_out = any(map(_holds_out, runs))  # else pictures are of training samples
    source = "data.valid" if held_out else "data.train"
    apart = _asked_apart(differ, (source, *_HELD_OUT[1:]))
    if all(isinstance(samples, list) and samples for samples in listed):
        apart = [key for key in apart if key.startswith(source)]
        if any(samples != listed[0] for samples in listed):
            apart = apart or ["what was drawn"]
    if apart:
        return False, f"The samples are not the same: the runs differ in {_some(apart)}."
    return True, f"All show the same {'held-out' if held_out else 'training'} samples."


def _holds_out(run: _Run) -> bool:
    data = run.recipe.get("data")
    return isinstance(data, dict) and bool(data.get("valid"))


def _last_picture(run: _Run) -> dict[str, Any] | None:
    return next((picture for picture in reversed(run.facts["pictures"]) if not is_worst(picture)), None)


def _find_notes(
    runs: Sequence[_Run], names: Sequence[str], differ: dict[str, Any], scores: Sequence[dict[str, Any]]
) -> Iterator[str]:
    """Yield what a reader should know before comparing, and then what each run's own page warns of."""
    for name, run in zip(names, runs, strict=True):
        status, verdict = run.facts["status"], run.facts["verdict"]
        if status == "running":
            yield f"{name} is still {verdict[:1].lower()}{verdict[1:]}: write this page again when it is done."
        elif status != "done":
            yield f"{name}: {verdict}."
    for meant, keys in (
        ("Losses do not compare", _LOSS_OF),
        ("Errors of what is hidden do not compare", _ERROR_OF),
        ("Scores are not of the same held-out data", _HELD_OUT[:5]),
    ):
        if apart := _asked_apart(differ, keys):
            yield f"{meant}: the runs differ in {_some(apart)}."
    steps = [run.facts["step"] for run in runs]
    done = [run.facts["cost"]["samples"] for run in runs]
    if len(set(steps)) > 1:
        many = _some([count(step) for step in steps], MOST_RUNS)
        yield f"The runs are of {many} steps; scores are of the last evaluation of each."
    elif len(set(done)) > 1:
        yield "A step is not as many samples in all runs: curves can be drawn over samples, too."
    if not any(score["chosen"] for score in scores):
        without = [name for name, run in zip(names, runs, strict=True) if not run.facts["eval"]]
        yield f"{_some(without)}: no evaluation yet." if without else "The runs have no metric in common."
    warned: dict[str, list[str]] = {}
    for name, run in zip(names, runs, strict=True):
        for warning in run.facts["warnings"]:
            warned.setdefault(warning, []).append(name)
    yield from (f"{_some(whose)}: {warning}" for warning, whose in warned.items())


# ---------------------------------------------------------------- the page


def _gather(runs: Sequence[_Run], path: Path, now: float) -> dict[str, Any]:
    """Gather everything that the template shows."""
    facts = strict(_summarize(runs))
    names, notes = [run["name"] for run in facts["runs"]], list(facts["notes"])
    tracks = [
        Track(name, place, merge_lines(run.raw)) for place, (name, run) in enumerate(zip(names, runs, strict=True))
    ]
    chosen = next((score for score in facts["scores"] if score["chosen"]), None)
    again = ["vitrail", "report", *(str(run.path) for run in runs), "--out", str(path)]
    return {
        "facts": facts,
        "name": "Comparison",
        "status": "running" if any(run.facts["status"] == "running" for run in runs) else "done",
        "pill": f"{len(runs)} runs",
        "headline": facts["headline"],
        "dir": ", ".join(str(run.path) for run in runs),
        "written": describe_time(now),
        "tiles": _list_tiles(facts, chosen),
        "warnings": notes,
        "heads": [{"name": track.name, "colour": track.colour, "dashed": track.dashed} for track in tracks],
        "runs": _list_runs(facts),
        "curves": _draw_curves(tracks, chosen, notes),
        "scores": _list_score_rows(facts),
        "sure": any(value["low"] is not None for score in facts["scores"] for value in score["values"]),
        "score_figure": _draw_scores(names, chosen, notes),
        "pictures": _list_pictures(runs, names, notes),
        "samples": tell_samples(runs, names, {one["key"]: one["values"] for one in facts["differ"]})[1],
        "differ": [(one["key"], [show(value) for value in one["values"]]) for one in facts["differ"]],
        "machines": [(one["key"], [show(value) for value in one["values"]]) for one in facts["machines"]],
        "speed": [(row["label"], row["values"]) for row in facts["speed"]],
        "cost": [(row["label"], row["values"]) for row in facts["cost"]],
        "command": shlex.join(again),
        "script": script(),
        "script_hash": script_hash(),
    }


def _list_tiles(facts: dict[str, Any], chosen: dict[str, Any] | None) -> list[Row]:
    """List the score of each run, where there are few enough to see at once."""
    if chosen is None or len(facts["runs"]) > 6:
        return []
    tiles: list[Row] = []
    for run, value in zip(facts["runs"], chosen["values"], strict=True):
        sure = f"95 %: {plain(value['low'])} to {plain(value['high'])}" if value["low"] is not None else ""
        remark = "; ".join(filter(None, (chosen["label"], sure)))
        tiles.append((run["name"], plain(value["value"]), remark))
    return tiles


def _list_runs(facts: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """List rows of what each run is."""
    rows = {
        "state": lambda run: run["status"],
        "steps": lambda run: f"{count(run['step'])} of {count(run['steps'])}" if run["steps"] else count(run["step"]),
        "training loss": lambda run: plain(run["loss"]),
        "parameters": lambda run: compact(run["parameters"]),
        "started": lambda run: describe_time(run["started"]),
        "wall time": lambda run: duration(run["seconds"]),
        "on": describe_place,
        "from": lambda run: run["initial"]["path"] if run["initial"] else "random weights",
        "folder": lambda run: run["dir"],
    }
    return [(label, [tell(run) for run in facts["runs"]]) for label, tell in rows.items()]


def _list_score_rows(facts: dict[str, Any]) -> list[tuple[str, list[Row]]]:
    """List rows of metrics: of each run the words and the class of a cell."""
    rows: list[tuple[str, list[Row]]] = []
    for score in facts["scores"]:
        cells: list[Row] = []
        for value in score["values"]:
            sure = f" ({plain(value['low'])} to {plain(value['high'])})" if value["low"] is not None else ""
            cells.append((f"{plain(value['value'])}{sure}", "best" if value["best"] else ""))
        rows.append((score["label"], cells))
    steps: list[Row] = []
    best: list[Row] = []
    for run in facts["runs"]:
        weights = ", averaged weights" if (run["eval"] or {}).get("weights") == "ema" else ""
        steps.append((f"{count(run['eval']['step'])}{weights}" if run["eval"] else MISSING, ""))
        top = run["best_eval"]
        name = top["metric"] if top else ""
        words = f"{name_metric(name)} {plain(top['metrics'][name])} at {count(top['step'])}" if top else MISSING
        best.append((words, ""))
    return [("at step", steps), *rows, ("best so far, at step", best)] if rows else []


def _draw_curves(tracks: Sequence[Track], chosen: dict[str, Any] | None, notes: list[str]) -> list[dict[str, Any]]:
    """Draw every curve that has points over the steps, and give its points over steps, samples and time."""
    axes = axes_of(tracks)

    def draw(curve: Curve) -> dict[str, Any] | None:
        figures = {over: draw_curve(curve, mine, over) for over, mine in axes}
        figure = figures["step"]
        if figure is None:
            return None
        chart, *others = [chart_of(one) for one in figures.values() if one is not None]
        return {
            "chart": chart and chart | {"others": list(filter(None, others))},
            "uri": embed_image(save_svg(figure).encode()),
        }

    curves = list(list_curves(tracks, chosen["metric"] if chosen else None))
    drawn = [(curve.name, try_to_draw(f"curve {curve.name!r}", partial(draw, curve), notes)) for curve in curves]
    return [{"name": name, **found} for name, found in drawn if found]


def _draw_scores(names: Sequence[str], chosen: dict[str, Any] | None, notes: list[str]) -> str | None:
    if chosen is None:
        return None
    draw = partial(draw_scores, names, chosen["values"], chosen["label"])
    figure = try_to_draw("picture of scores", draw, notes)
    return None if figure is None else embed_image(save_svg(figure).encode())


def _list_pictures(runs: Sequence[_Run], names: Sequence[str], notes: list[str]) -> list[dict[str, Any]]:
    """List rows of pictures, one of each run: those of the last step that all have one of, and the last of each."""
    by_step = [
        {
            number_of(picture["step"]): picture
            for picture in run.facts["pictures"]
            if not is_worst(picture) and math.isfinite(number_of(picture["step"]))
        }
        for run in runs
    ]
    if not any(by_step):
        return []
    last = [max(mine, default=None) for mine in by_step]
    common = set.intersection(*map(set, by_step))
    rows: list[tuple[str, list[Any]]] = []
    if common and len(set(last)) > 1:
        step = max(common)
        rows.append((f"At step {count(step)}, the last of which all have one", [step] * len(runs)))
    rows.append((f"At step {count(last[0])}" if len(set(last)) == 1 else "The last of each", last))
    found = []
    for title, steps in rows:
        shown = []
        for run, name, mine, step in zip(runs, names, by_step, steps, strict=True):
            uri = read_shown(run.path, mine[step], notes) if step is not None else None
            if uri is not None:
                caption = str(mine[step]["caption"] or "")
                shown.append({"name": name, "uri": uri, "step": count(step), "caption": caption})
        found.append({"title": title, "shown": shown})
    return [row for row in found if row["shown"]]
