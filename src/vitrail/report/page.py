"""Page of a run: `report.html`, one file that opens offline, with everything in it.

Its tables are rows of text, which the template escapes and lays out. Of a recipe, what differs from the defaults comes
first: the short form of a long file."""

from __future__ import annotations

import json
import math
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING as NOTHING
from dataclasses import fields, is_dataclass
from functools import lru_cache, partial
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.contents import is_begun
from vitrail.disk import sweep, write_output, write_own
from vitrail.errors import UserError
from vitrail.report import plots
from vitrail.report.charts import chart_of, script, script_hash
from vitrail.report.facts import (
    MOST_LINES,
    describe_bad,
    describe_flops,
    describe_time,
    explain_no_mfu,
    read_intervals,
    summarize,
    warn_of_torn,
)
from vitrail.report.figures import embed_image, save_svg, try_to_draw
from vitrail.report.metrics import (
    Line,
    find_inside,
    is_there,
    merge_lines,
    name_metric,
    open_run,
    read_json,
    read_lines,
    read_picture,
    read_recipe,
    select,
)
from vitrail.report.probes import list_probes
from vitrail.report.profiles import Profiled, show_profile
from vitrail.report.units import MISSING, compact, count, duration, number_of, percent, plain, size

if TYPE_CHECKING:
    from jinja2 import Template


Row = tuple[str, ...]
_MOST_PICTURES = 5
RENEW = 30  # seconds after which the page of a run that goes on looks for a newer one
_MOST_ROWS = 200  # of a table: the newest


def list_tiles(facts: dict[str, Any]) -> list[Row]:
    """List the few numbers to see first: label, value, remark."""
    speed, cost, found = facts["speed"], facts["cost"], facts["eval"]
    tiles: list[Row] = []
    metrics = found["metrics"] if found else {}
    ratio = number_of(metrics.get("mse_over_variance"))
    if math.isfinite(ratio):
        tiles.append(("Error / variance", f"{ratio:.2f}", "1 is predicting the mean; lower is better"))
    elif facts["best_metric"] not in (None, "loss") and facts["best_metric"] in metrics:
        tiles.append(_describe_best(facts, metrics[facts["best_metric"]]))
    elif math.isfinite(number_of(metrics.get("loss"))):
        tiles.append(("Evaluation loss", plain(metrics["loss"]), f"at step {count(found['step'])}"))
    tiles.append(("Training loss", plain(facts["loss"]), "last logged"))
    tiles.append(("Samples per second", compact(speed["samples_per_s"]), f"{compact(speed['tokens_per_s'])} tokens/s"))
    if speed["mfu"] is not None:
        tiles.append(("MFU", percent(speed["mfu"]), f"{compact(speed['tflops'])} TFLOP/s"))
    else:
        tiles.append(("Model TFLOP/s", compact(speed["tflops"]), "no MFU, see below"))
    tiles.append(("Wall time", duration(facts["seconds"]), f"{compact(cost['samples'])} samples"))
    tiles.append(("Parameters", compact(facts["parameters"]), describe_place(facts)))
    return tiles


def _describe_best(facts: dict[str, Any], value: Any) -> Row:
    """Describe the last value of the metric that chooses the best checkpoint, and the best one beside it."""
    name, best = facts["best_metric"], facts["best_eval"]
    label = name_metric(name)
    remark = f"{'higher' if facts['larger_is_better'] else 'lower'} is better"
    if best and best["metric"] == name and best["step"] != facts["eval"]["step"]:
        remark = f"best {plain(best['metrics'][name])} at step {count(best['step'])}; {remark}"
    return label[:1].upper() + label[1:], plain(value), remark


def describe_place(facts: dict[str, Any]) -> str:
    ranks = "" if facts["world"] is None else _ranks(facts["world"])
    if ranks and facts["world"] != 1 and facts.get("layout"):
        ranks += f" ({facts['layout']})"
    return ", ".join(part for part in (ranks, str(facts["device"] or "")) if part)


def _ranks(world: Any) -> str:
    return f"{count(world)} rank{'' if world == 1 else 's'}"


def list_speed(facts: dict[str, Any]) -> list[Row]:
    """List speeds in the steady state: medians over the logged windows."""
    speed = facts["speed"]
    spread = ""
    if speed.get("step_seconds_low") is not None:
        spread = (
            f"8 of 10 windows between {_seconds(speed['step_seconds_low'])} and {_seconds(speed['step_seconds_high'])}"
        )
    memory = facts["memory_gib"]
    return [
        ("Step", _seconds(speed["step_seconds"]), spread),
        ("Samples", f"{compact(speed['samples_per_s'])} /s", ""),
        ("Tokens", f"{compact(speed['tokens_per_s'])} /s", ""),
        ("Model rate", f"{compact(speed['tflops'])} TFLOP/s", ""),
        ("MFU", percent(speed["mfu"]), explain_no_mfu(facts) or "the model's own operations over the device's peak"),
        ("HFU", percent(speed["hfu"]), "with recomputed operations" if speed["hfu"] is not None else ""),
        ("Data wait", percent(speed["data_wait"]), "share of the step spent waiting for the reader"),
        ("Memory", MISSING if memory is None else f"{plain(memory, 3)} GiB", "largest logged"),
        ("Windows", count(speed["windows"]), "the first of every session is left out: it is warm-up"),
    ]


def list_cost(facts: dict[str, Any]) -> list[Row]:
    """List what the whole run took, with evaluation, checkpoints and repeated steps."""
    cost = facts["cost"]
    epochs = "" if cost["epochs"] is None else f"{plain(cost['epochs'], 3)} epochs"
    world = facts["world"]
    rows: list[Row] = [
        ("Wall time", duration(facts["seconds"]), "all sessions, evaluation and checkpoints included"),
        (
            "Device time",
            duration(number_of(cost["device_hours"]) * 3600),
            f"wall time on {_ranks(world)}" if world else "",
        ),
        ("Samples", count(cost["samples"]), epochs),
        ("Tokens", compact(cost["tokens"]), ""),
        ("Model operations", describe_flops(cost["model_tflop"]), "forward and backward, without recomputation"),
        ("Rate over all", f"{compact(cost['tflops_over_all'])} TFLOP/s", "model operations over wall time"),
    ]
    if number_of(cost["hardware_tflop"]) > number_of(cost["model_tflop"]):
        rows.insert(-1, ("With recomputation", describe_flops(cost["hardware_tflop"]), ""))
    return rows


def _seconds(value: Any) -> str:
    number = number_of(value)
    return f"{plain(1000 * number, 3)} ms" if number < 1 else duration(value)


def list_evals(lines: Sequence[Line]) -> tuple[list[str], list[Row]]:
    """List heads and rows of every evaluation, the newest first."""
    evals = [line for line in select(lines, "eval") if isinstance(line.get("metrics"), dict)]
    names = list(dict.fromkeys(str(name) for line in evals for name in line["metrics"]))
    rows: list[Row] = []
    for line in evals[: -_MOST_ROWS - 1 : -1]:
        sure = read_intervals(line).get("metrics", {})
        values = [
            plain(line["metrics"].get(name))
            + (f" ({plain(sure[name][0])} to {plain(sure[name][1])})" if name in sure else "")
            for name in names
        ]
        rows.append((count(line.get("step")), str(line.get("weights") or MISSING), *values, count(line.get("samples"))))
    heads = ["step", "weights", *map(name_metric, names), "samples"]
    return heads, rows + _leave_out(len(evals) - len(rows), len(heads))


def _leave_out(number: int, columns: int) -> list[Row]:
    """Return a row on those that the table has no room for."""
    return [(f"… {count(number)} more in metrics.jsonl", *[""] * (columns - 1))] if number > 0 else []


def list_groups(lines: Sequence[Line]) -> list[Row]:
    """List the parameter groups of the last session."""
    groups: list[Any] = next(
        (s["groups"] for s in reversed(select(lines, "start")) if isinstance(s.get("groups"), list)), []
    )
    return [
        (
            str(group.get("name", MISSING)),
            count(group.get("parameters")),
            count(group.get("tensors")),
            plain(group.get("lr"), 3),
            plain(group.get("weight_decay"), 3),
        )
        for group in groups
        if isinstance(group, dict)
    ]


def list_initial(facts: dict[str, Any]) -> list[Row]:
    """List what the run started from, where that was not random numbers alone, and what was noted about it."""
    initial = facts["initial"]
    if initial is None:
        return []
    counts = ", ".join(f"{count(number)} {action}" for action, number in initial["counts"].items())
    place = f"{initial['path']} ({initial['adapter']})"
    return [("Started from", f"{place}: {counts}" if counts else place, "; ".join(initial["notes"]))]


def list_made_changes(facts: dict[str, Any]) -> list[Row]:
    """List what was changed on purpose when the run was continued."""
    return [
        (f"At step {count(one['step'])}", f"{one['key']}: {show(one['old'])} became {show(one['new'])}", "")
        for one in facts["changes"]
    ]


def list_sessions(facts: dict[str, Any]) -> list[Row]:
    """List each start of the run: when, from where to where, on what, how it ended."""
    rows: list[Row] = []
    for index, session in enumerate(facts["sessions"]):
        last = index == len(facts["sessions"]) - 1
        ended = session["reason"] or (facts["status"] if last else "killed")
        span = f"{count(session['from_step'])} → {count(session['to_step'])}"
        place = describe_place({"world": session["world"], "device": session["device"]})
        kind = "resumed" if session["resumed"] else "fresh"
        rows.append((describe_time(session["started"]), kind, span, duration(session["seconds"]), place, str(ended)))
    return rows


def list_checkpoints(run: Path, facts: dict[str, Any]) -> list[Row]:
    """List checkpoints, the newest first, and whether they are still there; of very many, old ones only if they are."""
    rows: list[Row] = []
    for place, point in enumerate(reversed(facts["checkpoints"])):
        there = is_there(find_inside(run, point["path"]))
        if there or place < _MOST_ROWS:
            kept = "yes" if there else "no"
            if point["step"] == (facts["best_eval"] or {}).get("step"):
                kept += ", the best"
            rows.append(
                (count(point["step"]), show(point["path"]), size(point["bytes"]), duration(point["seconds"]), kept)
            )
    return rows + _leave_out(len(facts["checkpoints"]) - len(rows), 5)


def is_worst(picture: dict[str, Any]) -> bool:
    """Tell whether a picture is one of the samples that did worst."""
    return "-worst-" in str(picture["path"])


def list_pictures(
    run: Path, facts: dict[str, Any], warnings: list[str], *, worst: bool = False
) -> list[dict[str, str]]:
    """List the first picture, some between and the last, in order, or the last of the worst samples.

    What cannot be shown becomes a warning.
    """
    pictures = [picture for picture in facts["pictures"] if is_worst(picture) == worst]
    if worst:
        pictures = pictures[-1:]
    if len(pictures) > _MOST_PICTURES:
        stride = (len(pictures) - 1) / (_MOST_PICTURES - 1)
        pictures = [pictures[round(i * stride)] for i in range(_MOST_PICTURES)]
    shown = []
    for picture in pictures:
        if uri := read_shown(run, picture, warnings):
            shown.append({"uri": uri, "step": count(picture["step"]), "caption": str(picture["caption"] or "")})
    return shown


def read_shown(run: Path, picture: dict[str, Any], warnings: list[str]) -> str | None:
    """Return a picture as a data URL; why it cannot be shown becomes a warning."""
    uri, complaint = read_picture(run, picture["path"])
    warnings += [complaint] if complaint else []
    return uri


def list_classes(lines: Sequence[Line]) -> dict[str, Any] | None:
    """Return scores of each class by the last evaluation, and in which shares each was taken for which."""
    found = select(lines, "classes")
    line: Any = max(found, key=lambda e: (number_of(e.get("step")), e.get("weights") == "ema"), default={})
    columns = [line.get(name) for name in ("names", "true", "predicted", "right")]
    if not all(isinstance(column, list) and len(column) == len(columns[0] or ()) for column in columns):
        return None
    rows: list[Row] = []
    for name, true, predicted, right in zip(*columns, strict=True):
        t, p, r = map(number_of, (true, predicted, right))
        shares = [_ratio(r, t), _ratio(r, p), _ratio(2 * r, t + p), _ratio(r, t + p - r)]
        rows.append((str(name), *(plain(share) for share in shares), count(true), count(predicted)))
    names = [str(name) for name in columns[0]]
    return {
        "step": count(line.get("step")),
        "of": str(line.get("of") or ""),
        "heads": ["class", "recall", "precision", "F1 / Dice", "IoU", "true", "predicted"],
        "rows": rows[:_MOST_ROWS] + _leave_out(len(rows) - _MOST_ROWS, 7),
        "names": names,
        "pairs": _list_pairs(line.get("pairs"), names),
    }


def _list_pairs(pairs: Any, names: Sequence[str]) -> list[tuple[str, list[Row]]]:
    """List rows of shares: for a shade, in words, and as numbers."""
    known = isinstance(pairs, list) and len(pairs) == len(names)
    if not known or not all(isinstance(row, list) and len(row) == len(names) for row in pairs):
        return []
    rows: list[tuple[str, list[Row]]] = []
    for name, row in zip(names, pairs, strict=True):
        total = sum(number for cell in row if (number := number_of(cell)) > 0)
        shares = [_ratio(number_of(cell), total) for cell in row]
        cells: list[Row] = [
            (f"{share:.3f}" if share >= 0 else "0", f"{100 * share:.0f}" if share >= 0.005 else "·", count(cell))
            for share, cell in zip(shares, row, strict=True)
        ]
        rows.append((name, cells))
    return rows


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else math.nan


def read_profile(run: Path, facts: dict[str, Any], warnings: list[str]) -> Profiled | None:
    """Read where the time of the last profiled steps went; what cannot be shown becomes a warning."""
    if not facts["profiles"]:
        return None
    path = find_inside(run, facts["profiles"][-1]["path"])
    if path is None:
        warnings.append("The profile was left out: its path does not lead into the run folder.")
        return None
    table, complaint = read_json(path)
    warnings += [complaint] if complaint else []
    return show_profile(table)


def list_skips(facts: dict[str, Any]) -> list[Row]:
    """List the steps whose update was not taken."""
    newest = facts["skipped"][-_MOST_ROWS:]
    rows = [(count(s["step"]), str(s["reason"] or ""), show(s["counters"])) for s in newest]
    return _leave_out(len(facts["skipped"]) - len(newest), 3) + rows


def list_environment(tree: Any) -> list[Row]:
    """List the environment as flat rows: cuda.version, 13.0."""
    rows: list[Row] = []

    def walk(value: Any, key: str) -> None:
        if isinstance(value, dict) and value:
            for name, inner in value.items():
                walk(inner, f"{key}.{name}" if key else str(name))
        elif key:
            rows.append((key, show(value)))

    walk(tree, "")
    return rows


def list_data(card: Any) -> list[Row]:
    """List what the source said of itself in `data.json`, the grid first."""
    if not isinstance(card, dict):
        return []
    rest = dict(card)
    axes, shape, spacing, unit, dtype = (rest.pop(key, None) for key in ("axes", "shape", "spacing", "unit", "dtype"))
    rows: list[Row] = []
    if isinstance(shape, list):
        rows.append(("shape", " × ".join(count(s) for s in shape)))
    if axes:
        rows.append(("axes", ", ".join(map(str, axes)) if isinstance(axes, list) else str(axes)))
    if isinstance(spacing, list):
        unit_text = f" {unit}" if unit else " (no unit given)"
        rows.append(("voxel size", " × ".join(plain(s) for s in spacing) + unit_text))
    if dtype is not None:
        rows.append(("dtype", show(dtype)))
    return rows + [(str(key), show(value)) for key, value in rest.items()]


def list_bad(facts: dict[str, Any]) -> list[Row]:
    """List what was skipped as bad data in all sessions."""
    bad = describe_bad(facts["bad"])
    return [("bad data", bad)] if bad else []


def show(value: Any) -> str:
    """Return a JSON value as short text."""
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return plain(value, 5)
    if isinstance(value, list) and all(isinstance(item, str | int | float) for item in value):
        return ", ".join(map(show, value)) or MISSING
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 2000 else text[:2000] + "…"


_REQUIRED = object()  # stands for the default of a key that has none


def list_changes(run: Path) -> list[tuple[str, str, str]] | None:
    """List (key, value, default) of every key that is required or differs; None where the recipe cannot be loaded.

    A recipe cannot be loaded when it needs a plugin or another version; the page then shows the file alone.
    """
    from vitrail.recipe import load_recipe
    from vitrail.recipe.yaml import DEFAULT_KINDS

    try:
        recipe = load_recipe(run / "recipe.yaml")
    except (UserError, OSError, ImportError, RecursionError):
        return None
    rows = []
    for name, value, default in _fields_of(recipe):
        kind = getattr(value, "kind", None)
        if kind is not None and kind != DEFAULT_KINDS.get(name):
            rows.append((f"{name}.kind", _show_value(kind), _show_value(DEFAULT_KINDS.get(name, _REQUIRED))))
        rows += _compare(value, default, name)
    return rows


def _compare(value: Any, default: Any, key: str) -> Iterator[tuple[str, str, str]]:
    if _is_config(value):
        # Without a default of the same class, the class's own defaults are what the keys inside fall back to.
        same = type(default) is type(value)
        for name, inner, own in _fields_of(value):
            if name != "kind":
                yield from _compare(inner, getattr(default, name) if same else own, f"{key}.{name}")
    elif isinstance(value, list | tuple) and any(_is_config(item) for item in value):
        for index, item in enumerate(value):
            yield from _compare(item, _REQUIRED, f"{key}.{index}")
    elif default is _REQUIRED or value != default:
        yield key, _show_value(value), _show_value(default)


def _is_config(value: Any) -> bool:
    return hasattr(type(value), "model_fields") or (is_dataclass(value) and not isinstance(value, type))


def _fields_of(config: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, value and default of every field of a pydantic model or a dataclass."""
    if is_dataclass(config):
        for field in fields(config):
            default = field.default if field.default is not NOTHING else _REQUIRED
            if field.default_factory is not NOTHING:
                default = field.default_factory()
            yield field.name, getattr(config, field.name), default
        return
    for name, info in type(config).model_fields.items():
        default = _REQUIRED if info.is_required() else info.get_default(call_default_factory=True)
        yield name, getattr(config, name), default


def _show_value(value: Any) -> str:
    if value is _REQUIRED:
        return "–"
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 300 else text[:300] + "…"


def write_report(run_dir: str | Path, *, now: float | None = None) -> Path:
    """Write `report.html` into a run folder, whatever state the run is in, and return its path."""
    run = open_run(run_dir)
    html = load_template("page.html").render(_gather(run, time.time() if now is None else now))
    path = run / "report.html"
    sweep(run)
    with writing(path):
        # A page of somebody else's folder is replaced only if it is vitrail's.
        write = write_own if is_begun(run) else write_output
        return write(path, html.encode("utf-8", errors="replace"))


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Say what to do where a page, or what lies beside it, cannot be written."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}; make the folder writable.") from error


@lru_cache
def load_template(name: str) -> Template:
    """Return a template of this folder, compiled once: a run writes its page many times."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    loader = FunctionLoader(lambda name: resources.files("vitrail.report").joinpath(name).read_text("utf-8"))
    settings: Any = {"autoescape": True, "undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    environment = Environment(loader=loader, **settings)
    environment.filters["breaks"] = _allow_breaks
    return environment.get_template(name)


def _allow_breaks(text: Any) -> Any:
    """Return text as HTML that may go on in the next line after a comma: cells of a sweep have long names."""
    from markupsafe import Markup, escape

    return escape(text).replace(",", Markup(",<wbr>"))


def _gather(run: Path, now: float) -> dict[str, Any]:
    """Gather everything that the template shows."""
    raw, torn = read_lines(run, most=MOST_LINES)
    recipe, recipe_text, complaint = read_recipe(run)
    data, data_complaint = read_json(run / "data.json")
    environment, environment_complaint = read_json(run / "environment.json")
    warnings = [c for c in (complaint, data_complaint, environment_complaint) if c] + warn_of_torn(torn)
    facts = summarize(run, raw, recipe, warnings, now)
    lines = merge_lines(raw)
    heads, evals = list_evals(lines)
    notes = list(facts["warnings"])
    pictures = list_pictures(run, facts, notes)
    worst = list_pictures(run, facts, notes, worst=True)
    return {
        "facts": facts,
        "name": facts["run"],
        "status": facts["status"],
        "pill": facts["status"],
        "headline": facts["verdict"],
        "dir": facts["dir"],
        "written": describe_time(now),
        "eval_step": count((facts["eval"] or {}).get("step")),
        "tiles": list_tiles(facts),
        "warnings": notes,
        "curves": _draw_curves(lines, notes),
        "pictures": pictures,
        "worst": worst[0] if worst else None,
        "classes": list_classes(lines),
        "probes": list_probes(run, notes),
        "eval_heads": heads,
        "evals": evals,
        "sure_of": (facts["eval"] or {}).get("intervals", {}).get("over"),
        "speed": list_speed(facts),
        "cost": list_cost(facts),
        "groups": list_groups(lines),
        "profile": read_profile(run, facts, notes),
        "data": list_data(data) + list_bad(facts),
        "skips": list_skips(facts),
        "initial": list_initial(facts),
        "made_changes": list_made_changes(facts),
        "sessions": list_sessions(facts),
        "checkpoints": list_checkpoints(run, facts),
        "recipe": recipe_text,
        "changes": list_changes(run) if recipe else None,
        "environment": list_environment(environment),
        "commands": _list_commands(run, facts),
        "renew": RENEW if facts["status"] == "running" else 0,
        "script": script(),
        "script_hash": script_hash(),
    }


def _draw_curves(lines: list[dict[str, Any]], notes: list[str]) -> list[dict[str, Any]]:
    """Draw every curve that has points, and give the points, from which the page draws it again."""

    def draw(make: Callable[[Sequence[Line]], Any]) -> dict[str, Any] | None:
        figure = make(lines)
        return None if figure is None else {"chart": chart_of(figure), "uri": embed_image(save_svg(figure).encode())}

    drawn = {name: try_to_draw(f"curve {name!r}", partial(draw, make), notes) for name, make in plots.CURVES.items()}
    return [{"name": name, **curve} for name, curve in drawn.items() if curve]


def _list_commands(run: Path, facts: dict[str, Any]) -> list[tuple[str, str]]:
    """List what to run next."""
    folder, status = shlex.quote(str(run)), facts["status"]
    there = (point for point in reversed(facts["checkpoints"]) if is_there(find_inside(run, point["path"])))
    last = next(there, None)
    newest = f"the newest checkpoint, that of step {count(last['step'])}," if last else "the newest checkpoint"
    several = number_of(facts["world"]) > 1
    begun = f", with the launcher that began it for {facts['world']} processes" if several else ""
    evaluate = (f"vitrail eval {folder}", "scores the newest checkpoint on the held-out data")
    resume = (f"vitrail train {folder}", f"continues from {newest} while steps are left{begun}")
    again = (f"vitrail report {folder}", "writes this page anew")
    return {"running": [again, evaluate], "done": [evaluate, resume]}.get(status, [resume, evaluate, again])
