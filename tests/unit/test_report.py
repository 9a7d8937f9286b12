"""The page, the summary, the panels and the curves of a run, for whole runs and for broken ones."""

import base64
import hashlib
import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from PIL import Image
from support import LONG

from vitrail.disk import write_whole
from vitrail.errors import UserError
from vitrail.report import plots, read_metrics, summary, write_report
from vitrail.report.facts import describe_score, total_steps
from vitrail.report.figures import save_svg
from vitrail.report.metrics import read_picture
from vitrail.report.page import list_checkpoints, list_tiles
from vitrail.report.panels import reconstruction_panel
from vitrail.report.units import clock, compact, duration, percent, plain, size
from vitrail.report.views import BROKEN, HIDDEN

RECIPE = """\
run: {name: demo, steps: 40}
data: {batch: 4}
"""
START = {
    "event": "start",
    "time": 1000.0,
    "step": 0,
    "resumed": False,
    "world": 1,
    "parameters": 931456,
    "tokens_per_sample": 512,
    "samples_per_epoch": 100,
    "device": "cpu",
    "groups": [{"name": "decay", "parameters": 900000, "tensors": 20, "lr": 0.002, "weight_decay": 0.05}],
    "flops_per_sample": {"model": 2e9, "hardware": 3e9},
}


def train_line(step, loss=0.5, **more):
    line = {"event": "train", "time": 1000.0 + step, "step": step, "samples": 4 * step, "loss": loss, "lr": 1e-3}
    line |= {"grad_norm": 0.3, "step_seconds": 0.1, "samples_per_s": 40.0, "tokens_per_s": 20480.0, "tflops": 0.08}
    return line | {"mfu": None, "hfu": None, "memory_gib": 0.8, "data_wait": 0.03, "skipped": 0} | more


def eval_line(step, mse=12.3, variance=34.5, weights="ema"):
    metrics = {"loss": mse / variance, "mse": mse, "variance": variance, "mse_over_variance": mse / variance}
    return {"event": "eval", "time": 1000.0 + step, "step": step, "weights": weights, "metrics": metrics, "samples": 64}


def end_line(step, reason="done", message=""):
    return {"event": "end", "time": 1000.0 + step, "step": step, "reason": reason, "seconds": step, "message": message}


def make_run(folder: Path, lines, recipe: str = RECIPE, tail: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.yaml").write_text(recipe)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)
    return folder


@pytest.fixture
def whole_run(tmp_path):
    """A finished run that was killed once and resumed, with every kind of file."""
    lines = [START, *(train_line(s, loss=2.0) for s in range(10, 31, 10))]
    lines += [START | {"step": 20, "resumed": True, "time": 1100.0}]
    lines += [train_line(s, loss=0.5, time=1080.0 + s, activation_rms={"blocks.0": 1.0}) for s in (30, 40)]
    lines += [eval_line(20), eval_line(40)]
    lines += [{"event": "checkpoint", "time": 1120.0, "step": 40, "path": "checkpoints/step-000040", "bytes": 2**20}]
    lines += [{"event": "picture", "time": 1120.0, "step": 40, "path": "pictures/a.png", "caption": "middle slice"}]
    lines += [{"event": "skip", "time": 1120.0, "step": 35, "reason": "loss is nan", "counters": [140, 141]}]
    lines += [end_line(40) | {"time": 1125.0}]
    run = make_run(tmp_path / "demo", lines)
    (run / "checkpoints/step-000040").mkdir(parents=True)
    (run / "pictures").mkdir()
    Image.new("L", (4, 4)).save(run / "pictures/a.png")
    (run / "environment.json").write_text(json.dumps({"torch": "2.13.0", "cpu": {"cores": 2}}))
    card = {
        "shape": [64, 64, 64],
        "axes": ["z", "y", "x"],
        "spacing": [40, 4, 4],
        "unit": "nanometer",
        "dtype": "uint8",
    }
    card |= {
        "min": 0,
        "max": 255,
        "mean": 119.6,
        "std": 34.2,
    }
    (run / "data.json").write_text(json.dumps(card))
    return run


class Links(HTMLParser):
    """Collects what a page would load or run."""

    def __init__(self):
        super().__init__()
        self.tags, self.targets = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.targets += [value for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]
        assert not [name for name, _ in attrs if name.startswith("on")]


def read_page(run):
    html = write_report(run).read_text()
    links = Links()
    links.feed(html)
    return html, links


# Reading metrics


def test_torn_last_line_is_left_out(tmp_path):
    run = make_run(tmp_path / "r", [START, train_line(10)], tail='{"event":"train","time":1020,"st')
    assert [line["event"] for line in read_metrics(run)] == ["start", "train"]
    assert "1 line cut short" in " ".join(summary(run)["warnings"])


def test_event_appended_behind_a_torn_half_is_found(tmp_path):
    resumed = START | {"step": 10, "resumed": True}
    run = make_run(tmp_path / "r", [START, train_line(10)], tail='{"event":"train","ti' + json.dumps(resumed) + "\n")
    assert [line["event"] for line in read_metrics(run)] == ["start", "train", "start"]


def test_rubbish_in_metrics_is_left_out(tmp_path):
    run = make_run(tmp_path / "r", [START], tail='\x00\x00\n[1]\n"x"\n{"step": 3}\n\n{"event": 5}\n')
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b"\xff\xfe{}\n" + json.dumps(train_line(10)).encode() + b"\r\n")
    assert [line["event"] for line in read_metrics(run)] == ["start", "train"]


def test_later_line_wins_for_a_repeated_step(tmp_path):
    lines = [
        START,
        train_line(10, 3.0),
        train_line(20, 3.0),
        START | {"step": 10, "resumed": True},
        train_line(20, 1.0),
    ]
    found = [(line["step"], line["loss"]) for line in read_metrics(make_run(tmp_path / "r", lines)) if "loss" in line]
    assert found == [(10, 3.0), (20, 1.0)]


def test_lines_beyond_the_resumed_step_are_void(tmp_path):
    again = START | {"step": 10, "resumed": True}
    lines = [START, train_line(10), train_line(20), eval_line(20), end_line(25, "failed"), again, train_line(15)]
    run = make_run(tmp_path / "r", lines)
    assert [line["step"] for line in read_metrics(run) if line["event"] in ("train", "eval")] == [10, 15]
    assert summary(run)["step"] == 15


def test_evaluations_of_two_weights_at_one_step_both_count(tmp_path):
    run = make_run(tmp_path / "r", [START, eval_line(10, weights="ema"), eval_line(10, mse=20.0, weights="raw")])
    assert len([line for line in read_metrics(run) if line["event"] == "eval"]) == 2
    assert summary(run)["eval"]["weights"] == "ema"


@pytest.mark.parametrize("read", [read_metrics, summary, write_report])
def test_what_is_not_a_run_folder_is_refused(tmp_path, read):
    (tmp_path / "file.yaml").write_text("x")
    for path, word in (
        (tmp_path / "none", "does not exist"),
        (tmp_path, "neither recipe.yaml"),
        (tmp_path / "file.yaml", "a file"),
    ):
        with pytest.raises(UserError, match=word) as caught:
            read(path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)


# The summary


def test_summary_of_a_whole_run(whole_run):
    facts = summary(whole_run)
    json.dumps(facts, allow_nan=False)
    assert facts["status"] == "done"
    assert facts["verdict"] == "Done at step 40 of 40"
    assert facts["score"] == "hidden voxels: mean squared error 12.3 against a variance of 34.5, ratio 0.36"
    assert facts["seconds"] == pytest.approx(30 + 25)  # two sessions; the pause between them does not count
    assert facts["cost"]["samples"] == 160
    assert facts["cost"]["tokens"] == 160 * 512
    assert facts["cost"]["model_tflop"] == pytest.approx(160 * 2e9 / 1e12)
    assert [s["resumed"] for s in facts["sessions"]] == [False, True]
    assert facts["loss"] == 0.5
    assert len(facts["skipped"]) == 1


def test_the_headline_is_the_metric_that_the_best_checkpoint_is_chosen_by() -> None:
    """A run whose best is chosen by its loss was headed by its error all the same."""
    found = {"metrics": {"mse": 12.3, "variance": 34.5, "mse_over_variance": 0.36, "loss": 0.4}}
    assert describe_score(found, "mse_over_variance").startswith("hidden voxels: mean squared error 12.3")
    assert describe_score(found, "loss").startswith("loss 0.4, ")


def test_speed_leaves_out_the_first_window_of_each_session(tmp_path):
    slow = {"samples_per_s": 1.0, "step_seconds": 9.0, "data_wait": 0.9}
    lines = [START, train_line(10, **slow), train_line(20), START | {"step": 20, "resumed": True}]
    lines += [train_line(30, **slow), train_line(40)]
    speed = summary(make_run(tmp_path / "r", lines))["speed"]
    assert (speed["windows"], speed["samples_per_s"], speed["step_seconds"], speed["data_wait"]) == (2, 40.0, 0.1, 0.03)


@pytest.mark.parametrize(
    ("end", "status", "words"),
    [
        (end_line(20, "signal"), "stopped", "Stopped at step 20 of 40 (signal)"),
        (end_line(20, "time limit"), "stopped", "Stopped at step 20 of 40 (time limit)"),
        (
            end_line(20, "failed", "the disk is full"),
            "failed",
            "Failed at step 20 of 40, nothing saved: the disk is full",
        ),
    ],
)
def test_verdict_says_how_the_run_ended(tmp_path, end, status, words):
    facts = summary(make_run(tmp_path / "r", [START, train_line(20), end]))
    assert (facts["status"], facts["verdict"]) == (status, words)


def test_the_verdict_of_a_failure_says_what_is_saved(tmp_path):
    saves = [{"event": "checkpoint", "time": 1010.0, "step": step, "path": f"checkpoints/{step}"} for step in (5, 10)]
    lines = [START, train_line(5), *saves, train_line(20), end_line(20, "failed", "the disk is full")]
    words = "Failed at step 20 of 40, saved up to step 10: the disk is full"
    assert summary(make_run(tmp_path / "r", lines))["verdict"] == words
    again = START | {"step": 10, "resumed": True, "time": 1100.0}
    facts = summary(make_run(tmp_path / "s", [*lines, again, train_line(15)]), now=9e9)
    assert facts["verdict"].startswith("Interrupted at step 15 of 40, saved up to step 10: the run fell silent")


def bad_line(step, samples, items, **more):
    return {"event": "bad", "time": 1000.0 + step, "step": step, "samples": samples, "items": items, **more}


def test_bad_samples_of_all_sessions_are_one_row(tmp_path):
    """What a session repeats counts once, and one of before items were written down has a number alone."""
    lines = [START, bad_line(3, 2, {"a<b>.png": 2}), train_line(10), bad_line(14, 3, {"c.png": 1}), train_line(20)]
    lines += [START | {"step": 10, "resumed": True}, bad_line(14, 3, {"c.png": 1}), bad_line(30, 4, {"a<b>.png": 1})]
    run = make_run(tmp_path / "r", [*lines, train_line(40), end_line(40)])
    facts = summary(run)
    assert facts["bad"] == {"samples": 4, "items": {"a<b>.png": 3, "c.png": 1}}
    sentence = "4 samples skipped (a<b>.png 3 times, c.png once)"
    assert f"Bad data: {sentence}." in facts["warnings"]
    html = write_report(run).read_text()
    assert f'<tr><th scope="row">bad data</th><td>{sentence.replace("<b>", "&lt;b&gt;")}</td>' in html
    old = [START, bad_line(3, 1, None, sentences=["a is cut short"]), train_line(10), end_line(40)]
    assert "Bad data: 1 sample skipped." in summary(make_run(tmp_path / "s", old))["warnings"]
    assert summary(make_run(tmp_path / "t", [START, train_line(40)]))["bad"] == {"samples": 0, "items": {}}


def test_run_without_an_end_is_running_or_interrupted(tmp_path):
    run = make_run(tmp_path / "r", [START, train_line(10), train_line(20)])
    assert summary(run, now=1030.0)["status"] == "running"
    assert summary(run, now=1e6)["status"] == "interrupted"


def test_a_resumed_run_is_not_judged_by_the_end_of_an_earlier_session(tmp_path):
    run = make_run(
        tmp_path / "r", [START, end_line(10, "signal"), START | {"step": 10, "time": 1020.0, "resumed": True}]
    )
    assert summary(run, now=1030.0)["status"] == "running"


@pytest.mark.parametrize(
    ("steps", "batch", "expected"),
    [
        (40, 4, 40),
        ("40 steps", 4, 40),
        ("100 samples", 8, 13),
        ("2 epochs", "5/rank", 20),
        ("lots", 4, None),
        (None, 4, None),
    ],
)
def test_total_steps(steps, batch, expected):
    start = {"samples_per_epoch": 100, "world": 2}
    assert total_steps({"run": {"steps": steps}, "data": {"batch": batch}}, start) == expected


def test_total_steps_of_the_start_event_come_first():
    assert total_steps({"run": {"steps": 40}}, {"steps": 50}) == 50


def test_warnings_name_what_went_wrong(tmp_path):
    lines = [START, train_line(10, loss=math.nan), *(train_line(s, data_wait=0.5) for s in (20, 30, 40))]
    lines += [eval_line(20, mse=10.0), eval_line(40, mse=40.0)]
    facts = summary(make_run(tmp_path / "r", lines))
    said = " ".join(facts["warnings"])
    for words in ("not finite in 1 of 4", "50% of the step time", "no better than predicting the mean", "worse than"):
        assert words in said
    json.dumps(facts, allow_nan=False)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(-(10**400)) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FIELDS = (
    "time",
    "step",
    "steps",
    "world",
    "metrics",
    "path",
    "groups",
    "seconds",
    "bytes",
    "samples",
    "device",
    "reason",
    "best_metric",
    "entries",
    "notes",
)
LINES = st.builds(
    lambda event, fields: {"event": event} | fields,
    st.sampled_from(["start", "init", "train", "eval", "picture", "checkpoint", "skip", "end", "warning", "new"]),
    st.dictionaries(
        st.sampled_from(FIELDS), VALUES | st.integers(0, 100) | st.dictionaries(st.text(max_size=3), VALUES)
    ),
)


@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(lines=st.lists(LINES, max_size=8), environment=VALUES, data=VALUES)
def test_any_values_make_a_page(tmp_path, monkeypatch, lines, environment, data):
    monkeypatch.setattr(plots, "CURVES", {})  # drawing is tested elsewhere, and is slow
    monkeypatch.setattr("vitrail.report.page.list_changes", lambda run: None)
    run = make_run(tmp_path / "r", lines)
    (run / "environment.json").write_text(json.dumps(environment))
    (run / "data.json").write_text(json.dumps(data))
    json.dumps(summary(run), allow_nan=False)
    assert write_report(run).is_file()


# The page


def test_page_of_a_whole_run_shows_everything_and_loads_nothing(whole_run):
    html, links = read_page(whole_run)
    assert set(links.targets)
    assert all(target.startswith("data:") for target in links.targets)
    assert "iframe" not in links.tags
    assert not re.search(r"url\(|@import|https?://", html)
    [script] = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)  # the only one that its policy lets run
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in html
    for words in (
        "Done at step 40 of 40",
        "ean squared error 12.3 against a variance of 34.5, ratio 0.36",
        "middle slice",
        "checkpoints/step-000040",
        "loss is nan",
        "40 × 4 × 4 nanometer",
        "resumed",
        "2.13.0",
        "No MFU",
        "steps: 40",
        "vitrail eval ",
        "vitrail train ",
        "continues from the newest checkpoint, that of step 40, while steps are left",
    ):
        assert words in html, words
    other = {"Score over the steps", "Dice of each class"}  # of runs that do not reconstruct
    other |= {"Time of a step", "Model FLOPs utilisation"}  # what was not logged
    curves = len(plots.CURVES) - len(other)
    assert len([t for t in links.targets if t.startswith("data:image/svg")]) == curves
    assert not list(whole_run.glob(".*.part"))


def test_names_are_escaped(tmp_path):
    evil = '<script>alert("$x_1")</script>'
    start = START | {"device": evil, "groups": [{"name": evil}]}
    lines = [start, train_line(10, activation_rms={evil: 1.0}), train_line(20), end_line(20, "failed", evil)]
    lines += [
        {"event": "skip", "step": 3, "reason": evil},
        {"event": "picture", "step": 3, "path": evil, "caption": evil},
    ]
    recipe = "run: {name: '" + evil + "', steps: 40}\n"
    run = make_run(tmp_path / "r", lines, recipe)
    (run / "environment.json").write_text(json.dumps({evil: evil}))
    (run / "data.json").write_text(json.dumps({"shape": [1], "unit": evil, "spacing": [1.0], evil: evil}))
    html, _ = read_page(run)
    assert "alert(" not in re.sub(r"&lt;script&gt;alert\(|\\u003cscript\\u003ealert\(", "", html)
    assert "&lt;script&gt;" in html
    svg = save_svg(plots.activations(read_metrics(run)))
    assert svg
    assert "<script" not in svg


@pytest.mark.parametrize("lines", [[], [START], [START, train_line(10)], [START, eval_line(10)]])
def test_page_of_a_run_with_missing_pieces(tmp_path, lines):
    run = make_run(tmp_path / "r", lines)
    html, _ = read_page(run)
    assert ("Not started" in html) == (not lines)
    (run / "recipe.yaml").unlink()
    (run / "environment.json").write_text("{broken")
    html, _ = read_page(run)
    assert "recipe.yaml is missing" in html
    assert "environment.json cannot be read" in html


def test_page_shows_first_some_and_last_picture(tmp_path):
    lines = [START]
    run = tmp_path / "r"
    (run / "pictures").mkdir(parents=True)
    for step in range(10, 101, 10):
        Image.new("L", (2, 2), step).save(run / f"pictures/{step}.png")
        lines.append({"event": "picture", "step": step, "path": f"pictures/{step}.png", "caption": f"caption {step}"})
    html, _ = read_page(make_run(run, lines))
    assert [int(step) for step in re.findall(r"caption (\d+)", html)] == [100, 10, 30, 50, 80]


def test_unwritable_page_is_one_sentence(tmp_path):
    run = make_run(tmp_path / "r", [])
    (run / "report.html").mkdir()  # a folder cannot be replaced by a file, for any user
    with pytest.raises(UserError, match=r"report\.html is a folder, where a file is expected"):
        write_report(run)
    assert not list(run.glob(".*.part"))


def test_a_page_of_an_early_version_is_kept_beside_the_new_one(tmp_path):
    run = make_run(tmp_path / "r", [])
    (run / "report.html").write_text("<!doctype html>without a mark")
    with pytest.raises(UserError, match="not as vitrail would have written it"):  # no run has written in that folder
        write_report(run)
    (run / "environment.json").write_text('{"vitrail": "0.1.0"}')
    page = write_report(run)
    assert "without a mark" not in page.read_text()
    (old,) = run.glob("report.html.old-*")
    assert old.read_text() == "<!doctype html>without a mark"
    write_report(run)
    assert len(list(run.glob("report.html*"))) == 2


def test_failed_write_keeps_the_old_page(tmp_path, monkeypatch):
    path = write_whole(tmp_path / "page", b"old")
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("no")))
    with pytest.raises(OSError, match="no"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["page"]


def test_pictures_outside_the_run_folder_are_not_read(tmp_path):
    run = make_run(tmp_path / "r", [])
    Image.new("L", (2, 2)).save(tmp_path / "secret.png")
    (run / "link.png").symlink_to(tmp_path / "secret.png")
    (run / "page.png").write_text("<svg onload='x'/>")
    for name in (
        "../secret.png",
        str(tmp_path / "secret.png"),
        "link.png",
        "page.png",
        "gone.png",
        "a\x00b",
        "long" * 1000,
        None,
        3,
        "",
    ):
        uri, complaint = read_picture(run, name)
        assert uri is None, name
        assert complaint


def test_checkpoints_with_odd_paths_are_not_on_disk(tmp_path):
    (tmp_path / "outside").mkdir()
    paths = ["../outside", str(tmp_path), "long" * 1000, None, {"a": 1}, "checkpoints"]
    lines = [START, *({"event": "checkpoint", "step": s, "path": path} for s, path in enumerate(paths))]
    run = make_run(tmp_path / "r", lines)
    (run / "checkpoints").mkdir()
    rows = list_checkpoints(run, summary(run))
    assert [row[-1] for row in rows] == ["yes", "no", "no", "no", "no", "no"]


def test_recipe_table_shows_what_differs_from_the_defaults(tmp_path, monkeypatch):
    from dataclasses import dataclass, field

    from vitrail.recipe.sections import Eval, Run, Section
    from vitrail.report import page as defaults

    @dataclass(frozen=True)
    class Encoder:
        width: int = 64
        depth: int = 2

    @dataclass(frozen=True)
    class Model:
        kind: str = "mae"
        ndim: int = 2
        encoder: Encoder = field(default_factory=lambda: Encoder(width=128))

    class Small(Section):
        run: Run
        model: Model
        eval: Eval = Eval()

    recipe = Small(run=Run(name="a", steps=40), model=Model(ndim=3, encoder=Encoder(width=128, depth=4)), eval=Eval())
    monkeypatch.setattr("vitrail.recipe.load.load_recipe", lambda path: recipe)
    rows = defaults.list_changes(make_run(tmp_path / "r", []))
    assert rows == [
        ("run.name", "a", "–"),
        ("run.steps", "40", "–"),
        ("model.kind", "mae", "–"),
        ("model.ndim", "3", "2"),
        ("model.encoder.depth", "4", "2"),
    ]


def test_recipe_that_cannot_be_loaded_has_no_table(tmp_path):
    from vitrail.report.page import list_changes

    assert (
        list_changes(make_run(tmp_path / "r", [], "run: {name: a, steps: 3}\nmodel: {kind: from_a_plugin}\n")) is None
    )


def test_package_imports_nothing_heavy():
    code = "import sys, vitrail.report; print({'torch', 'matplotlib', 'jinja2', 'yaml'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=LONG)
    assert found.stdout.strip() == "set()"


# Curves


def test_curves_keep_their_spikes_when_thinned():
    steps = list(range(10_000))
    values = [0.0] * 10_000
    values[7777] = 9.0
    thin_steps, thin_values = plots.thin(steps, values)
    assert len(thin_steps) <= 700
    assert (7777, 9.0) in zip(thin_steps, thin_values, strict=True)
    assert thin_steps == sorted(thin_steps)
    assert thin_steps[-1] == 9999


def test_smoothing_has_no_lag():
    assert plots.smooth([5.0] * 50) == pytest.approx([5.0] * 50)
    line = [float(i) for i in range(401)]
    assert plots.smooth(line)[200] == pytest.approx(200.0, abs=1e-6)


def test_curves_without_points_are_none():
    assert [draw([]) for draw in plots.CURVES.values()] == [None] * len(plots.CURVES)
    only_broken = [train_line(10, math.nan, lr=None, grad_norm=math.inf, samples_per_s=None, memory_gib=None)]
    assert [draw(only_broken) for draw in plots.CURVES.values()] == [None] * len(plots.CURVES)


def test_curve_text_is_text_and_the_same_each_time():
    lines = [train_line(s, 1.0 / s) for s in range(10, 300, 10)]
    lines[3]["loss"] = math.nan
    svg = save_svg(plots.loss_curve(lines))
    assert svg == save_svg(plots.loss_curve(lines))
    for words in (">Loss<", ">step<", ">train, smoothed<", ">not finite<"):
        assert words in svg


def test_evaluation_is_drawn_beside_predicting_the_mean():
    svg = save_svg(plots.eval_against_mean([eval_line(10), eval_line(20)]))
    assert "predicting the mean" in svg
    assert "averaged weights" in svg
    assert plots.eval_against_mean([{"event": "eval", "step": 1, "metrics": {"accuracy": 0.5}}]) is None


def score_lines(metric="mean_dice", larger=True, classes=("cell", "$x_1<b>", "none"), values=(0.5, 0.8, 0.7)):
    lines = [START | {"best_metric": metric, "larger_is_better": larger}]
    for number, value in enumerate(values):
        dices = {f"dice_{name}": None if name == "none" else value / (i + 1) for i, name in enumerate(classes)}
        metrics = {"loss": 1 - value, "accuracy": value, "mean_dice": value, **dices}
        metrics |= {"mean_iou": value / 2, "iou_cell": value / 2}
        step = 10 * (number + 1)
        lines.append({"event": "eval", "time": 1000.0 + step, "step": step, "weights": "ema", "metrics": metrics})
    return lines


def test_the_metric_of_the_best_checkpoint_is_shown(tmp_path):
    lines = score_lines()
    facts = summary(make_run(tmp_path / "r", lines))
    assert list_tiles(facts)[0] == ("Mean Dice", "0.7", "best 0.8 at step 20; higher is better")
    assert facts["score"] == "mean Dice 0.7, loss 0.3, accuracy 0.7, mean IoU 0.35"
    svg = save_svg(plots.score(lines))
    for words in (">Evaluation: mean Dice<", ">best, 0.8 at step 20<", ">averaged weights<", "higher is better<"):
        assert words in svg, words
    assert ">best, 0.5 at step 10<" in save_svg(plots.score(score_lines(larger=False)))
    html, links = read_page(tmp_path / "r")
    assert len([t for t in links.targets if t.startswith("data:image/svg")]) == 3  # loss, score, classes
    for words in (
        "Mean Dice",
        'alt="Score over the steps"',
        'alt="Dice of each class"',
        '<th class="n">Dice of cell<',
        '<th class="n">IoU of cell<',
    ):
        assert words in html, words
    facts = summary(make_run(tmp_path / "c", score_lines("accuracy", classes=(), values=(0.5,))))
    assert list_tiles(facts)[0] == ("Accuracy", "0.5", "higher is better")
    facts = summary(make_run(tmp_path / "l", score_lines("loss", larger=False, classes=())))
    assert list_tiles(facts)[0] == ("Evaluation loss", "0.3", "at step 30")
    assert plots.score(score_lines("loss", larger=False)) is None


def test_a_reconstruction_keeps_its_curve_and_tile(tmp_path):
    lines = [START | {"best_metric": "mse_over_variance", "larger_is_better": False}, eval_line(10), eval_line(20)]
    assert list_tiles(summary(make_run(tmp_path / "r", lines)))[0][0] == "Error / variance"
    assert plots.score(lines) is None
    assert plots.class_scores(lines) is None


def test_speed_and_memory_have_curves_where_they_were_logged():
    def points(draw, **more):
        figure = draw([START, *(train_line(step, **more) for step in (10, 20))])
        if figure is None:
            return None
        [ax] = figure.axes
        return figure.get_suptitle(), {line.get_label(): list(line.get_ydata()) for line in ax.get_lines()}

    assert points(plots.memory) == ("Memory, most so far", {"of the process": [0.8, 0.8]})
    assert points(plots.memory, reserved_gib=1.5) == (
        "GPU memory, most so far",
        {"allocated by tensors": [0.8, 0.8], "reserved, of the fullest rank": [1.5, 1.5]},
    )
    assert points(plots.memory, memory_gib=None) is None
    assert points(plots.utilisation) is None
    assert points(plots.utilisation, mfu=0.25, hfu=0.25) == ("Model FLOPs utilisation", {"MFU": [25.0, 25.0]})
    assert points(plots.utilisation, mfu=0.25, hfu=0.5)[1] == {
        "MFU": [25.0, 25.0],
        "HFU, with recomputation": [50.0, 50.0],
    }
    assert points(plots.step_time) is None
    slowest = points(plots.step_time, slowest_step_seconds=0.4)
    assert slowest == ("Time of a step", {"median": [100.0, 100.0], "slowest": [400.0, 400.0]})


def test_each_class_has_a_thin_line():
    svg = save_svg(plots.class_scores(score_lines()))
    assert ">cell<" in svg
    assert ">none<" not in svg  # it never had a Dice
    assert "<b>" not in svg
    many = save_svg(plots.class_scores(score_lines(classes=[f"kind {i}" for i in range(30)])))
    assert ">kind 29<" in many  # the lowest
    assert ">kind 0<" not in many


def test_what_a_run_started_from_is_told(tmp_path):
    entries = [{"action": "copied", "name": f"blocks.{i}"} for i in range(3)] + [{"action": "skipped", "name": "head"}]
    init = {"event": "init", "time": 900.0, "step": 0, "path": "a/<b>.pt", "adapter": "timm", "entries": entries}
    init["notes"] = ["heads were taken from the model"]
    run = make_run(tmp_path / "r", [init, START, train_line(10), init | {"time": 5000.0}, START | {"time": 5001.0}])
    facts = summary(run)
    assert facts["initial"]["counts"] == {"copied": 3, "skipped": 1}
    assert [(s["from_step"], s["seconds"]) for s in facts["sessions"]] == [(0, 10.0), (0, 0.0)]  # init begins none
    html, _ = read_page(run)
    assert "a/&lt;b&gt;.pt (timm): 3 copied, 1 skipped" in html
    assert "heads were taken from the model" in html
    assert "Started from" not in read_page(make_run(tmp_path / "s", [START]))[0]


@pytest.mark.parametrize(("layers", "windows"), [(3, 1), (3, 5), (20, 1), (20, 5)])
def test_activations_for_few_and_many_layers(layers, windows):
    rms = {f"encoder.blocks.{i}": 1.0 + i for i in range(layers)}
    assert plots.activations([train_line(10 * (w + 1), activation_rms=rms) for w in range(windows)])


# Panels


def make_row(shape=(8, 8), channels=1, seed=0):
    rng = np.random.default_rng(seed)
    target = rng.random((channels, *shape)).astype(np.float32)
    return {"target": target, "prediction": target + 0.1, "hidden": rng.random((1, *shape)) < 0.5}


@pytest.mark.parametrize(
    ("shape", "channels"),
    [((8, 8), 1), ((8, 8), 2), ((8, 8), 3), ((3, 8, 8), 1), ((4, 8, 6), 1), ((4, 8, 6), 2)],
)
def test_panel_takes_every_shape(tmp_path, shape, channels):
    path = reconstruction_panel(tmp_path / "a/p.png", [make_row(shape, channels)] * 2, title="t", caption="c")
    with Image.open(path) as image:
        assert image.format == "PNG"
        assert image.width > 1000


def colours_of(path):
    with Image.open(path) as image:
        return {colour: n for n, colour in image.convert("RGB").getcolors(2**24)}


def as_bytes(colour):
    return tuple(round(255 * part) for part in colour)


def test_panel_paints_hidden_and_broken_voxels(tmp_path):
    row = make_row((4, 4))
    row["hidden"] = np.zeros((1, 4, 4), bool)
    row["hidden"][:, :2] = True
    row["target"][:] = 0.5
    row["prediction"] = np.full((1, 4, 4), 0.5, np.float32)

    def draw():
        return colours_of(reconstruction_panel(tmp_path / "p.png", [row]))

    half = draw()
    assert as_bytes(BROKEN) not in half
    row["hidden"][:] = True
    assert draw()[as_bytes(HIDDEN)] > 1.8 * half[as_bytes(HIDDEN)] > 10_000
    row["prediction"][0, 1, 1] = np.nan
    assert draw()[as_bytes(BROKEN)] > 1000


def test_panel_pastes_the_visible_target_into_the_prediction(tmp_path):
    # The prediction is wild where the model was shown the answer: none of that may appear in the picture.
    row = make_row((4, 4))
    row["prediction"] = np.where(row["hidden"], row["target"], np.nan).astype(np.float32)
    found = colours_of(reconstruction_panel(tmp_path / "p.png", [row]))
    assert found.get(as_bytes(BROKEN), 0) < 500  # the key below the panel at most


def test_panel_takes_odd_words(tmp_path):
    row = make_row((4, 8, 8))
    assert reconstruction_panel(tmp_path / "p.png", [row], title="a $\\frac <b> 名", caption="$", slices=9).is_file()


def test_noisy_panel_stays_small(tmp_path):
    for channels in (1, 3):
        rows = [make_row((400, 400), channels, seed) for seed in range(4)]
        path = reconstruction_panel(tmp_path / f"{channels}.png", rows, title="noise")
        assert path.stat().st_size < 900_000


def test_constant_and_empty_panels(tmp_path):
    flat = {"target": np.ones((1, 4, 4)), "prediction": np.ones((1, 4, 4)), "hidden": np.zeros((1, 4, 4), bool)}
    assert reconstruction_panel(tmp_path / "p.png", [flat]).is_file()
    nothing = np.full((1, 4, 4), np.nan)
    lost = {"target": nothing, "prediction": nothing, "hidden": np.ones((1, 4, 4), bool)}
    assert reconstruction_panel(tmp_path / "p.png", [lost]).is_file()
    with pytest.raises(ValueError, match="at least one row"):
        reconstruction_panel(tmp_path / "p.png", [])
    with pytest.raises(ValueError, match="only images and volumes can be drawn"):
        reconstruction_panel(tmp_path / "p.png", [make_row((4, 4, 4, 4), 2)])


# Units


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (compact(12345), "12.3k"),
        (compact(999.7), "1.00k"),
        (compact(0.312), "0.31"),
        (compact(7), "7"),
        (compact(-1.5e6), "-1.50M"),
        (compact(2.5e15, "FLOP"), "2.50 PFLOP"),
        (compact(math.nan), "–"),
        (compact(None), "–"),
        (plain(0.43212), "0.4321"),
        (plain(1176.4, 3), "1176"),
        (plain(2e-5), "2e-05"),
        (plain(math.nan), "–"),
        (plain(math.inf), "inf"),
        (plain(None), "–"),
        (plain(3), "3"),
        (percent(0.341), "34.1%"),
        (percent(0), "0%"),
        (percent(None), "–"),
        (duration(45), "45 s"),
        (duration(170), "2 min 50 s"),
        (duration(3900), "1 h 05 min"),
        (duration(-1), "–"),
        (clock(3661), "1:01:01"),
        (clock(math.inf), "-:--"),
        (size(12_900_000), "12.3 MiB"),
        (size(10), "10 B"),
    ],
)
def test_units(call, expected):
    assert call == expected


# Long logs


def test_a_long_log_is_thinned_without_losing_spikes_and_ends(tmp_path):
    from vitrail.report.metrics import read_lines

    sessions = [[START, *(train_line(step, 1 + step % 7) for step in range(1, 2001)), eval_line(2000)]]
    again = START | {"step": 1500, "resumed": True}
    sessions.append([again, *(train_line(step, 1 + step % 7) for step in range(1501, 4001))])
    sessions[0][778]["loss"], sessions[1][778]["loss"] = 90.0, None
    run = make_run(tmp_path / "r", sessions[0] + sessions[1])
    assert len(read_lines(run)[0]) == 4503  # whole for who asks for no limit
    lines, torn = read_lines(run, most=200)
    train = [line for line in lines if line["event"] == "train"]
    assert torn == 0
    assert 150 < len(train) < 220
    assert [line["event"] for line in lines if line["event"] != "train"] == ["start", "eval", "start"]
    steps = [line["step"] for line in lines[1:]]
    second = lines.index(sessions[1][0])
    assert lines[:second] == sorted(lines[:second], key=lambda line: line["step"])  # in their order
    assert {1, 2000, 1501, 4000} <= set(steps)
    assert {line["loss"] for line in (sessions[0][778], sessions[1][778])} <= {line["loss"] for line in train}


def test_tables_of_a_page_end_somewhere(tmp_path):
    evals = [eval_line(step) for step in range(1, 1501)]
    saves = [{"event": "checkpoint", "time": 1e3 + step, "step": step, "path": f"checkpoints/step-{step:08d}"}
             for step in range(1, 1501)]  # fmt: skip
    skips = [{"event": "skip", "time": 1e3 + step, "step": step, "reason": "why"} for step in range(1, 1501)]
    run = make_run(tmp_path / "r", [START, train_line(10), *evals, *saves, *skips])
    (run / "checkpoints" / "step-00000007").mkdir(parents=True)  # the best one of an old time is still there
    html, _ = read_page(run)
    assert html.count("<tr>") < 900
    assert "step-00001500" in html
    assert "step-00000007" in html
    assert "step-00000008" not in html
    assert html.count("… 1,300 more in metrics.jsonl") == 2
    assert html.count("… 1,299 more in metrics.jsonl") == 1
    assert len(html) < 500_000


def test_halves_of_lines_cost_no_time(tmp_path):
    run = make_run(tmp_path / "r", [START], tail='{"event": ' * 200_000 + "\n" + json.dumps(train_line(3)) + "\n")
    assert [line["event"] for line in read_metrics(run)] == ["start", "train"]
