"""The page of several runs: where it goes, what it refuses, and that it says what the runs have logged."""

import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from PIL import Image
from test_report import LINES, START, VALUES, end_line, eval_line, make_run, train_line

from vitrail.cli import main
from vitrail.errors import UserError
from vitrail.report import compare, compare_summary, write_comparison, write_report
from vitrail.report.compare import default_page, find_differences, name_runs
from vitrail.report.compare_plots import MOST_RUNS, Track, axes_of, seen
from vitrail.report.metrics import merge_lines

RECIPE = "run: {{name: {name}, steps: {steps}}}\noptimizer: {{kind: adamw, lr: {lr}}}\n"
RECIPE += "data: {{batch: {batch}, valid: [{{path: x}}]}}\n"


def dice_line(step: int, dice: float, spread: float | None = 0.02) -> dict[str, Any]:
    metrics = {"loss": 1 - dice, "mean_dice": dice, "dice_a": dice}
    line = {"event": "eval", "time": 1000.0 + step, "step": step, "weights": "raw", "metrics": metrics, "samples": 9}
    sure = {name: [value - (spread or 0), value + (spread or 0)] for name, value in metrics.items()}
    return line if spread is None else line | {"intervals": {"level": 0.95, "over": "9 items", "metrics": sure}}


def write_run(folder: Path, dice: float = 0.8, *, end: bool = True, picture: Any = None, **more: Any) -> Path:
    keys = {"name": folder.name, "steps": 40, "batch": 4, "lr": 0.001} | more
    spread = keys.pop("spread", 0.02)
    lines = [START | {"best_metric": "mean_dice", "larger_is_better": True, "steps": keys["steps"]}]
    lines += [train_line(step, 1 / step, samples=keys["batch"] * step) for step in range(10, keys["steps"] + 1, 10)]
    lines += [dice_line(step, dice * (0.5 + step / keys["steps"] / 2), spread) for step in (20, keys["steps"])]
    if picture is not None:
        lines.append({"event": "picture", "step": 20, "path": "pictures/a.png", "caption": "some", "samples": picture})
    run = make_run(folder, [*lines, *([end_line(keys["steps"])] if end else [])], RECIPE.format(**keys))
    (run / "pictures").mkdir()
    Image.new("L", (4, 4)).save(run / "pictures" / "a.png")
    return run


class Page(HTMLParser):
    """The words of a page and of the cells of its tables, and its pictures."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self.rows, self.images, self.deep = "", [], 0, ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.deep = tag
        self.images += tag == "img"
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th") and self.rows:
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self.deep not in ("script", "style"):
            self.text += data
        if self.deep in ("td", "th", "i") and self.rows and data.strip():
            self.rows[-1][-1] += data.strip()


def page_of(*runs: Path, out: Path) -> Page:
    return Page(write_comparison(runs, out).read_text())


def test_a_page_of_two_runs_is_one_file_that_says_what_differs(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", 0.8, picture=["x", "y"])
    b = write_run(tmp_path / "b", 0.9, lr=0.002, picture=["x", "y"])
    path = write_comparison([a, b])
    assert path == tmp_path / "compare-a+b.html"
    text = path.read_text()
    assert not re.findall(r"(?:src|href)=\"(?!data:)", text)
    assert "default-src 'none'" in text
    page = Page(text)
    assert "Mean Dice: b 0.9, a 0.8" in page.text
    assert "b is best; its interval of 95 % overlaps no other" in page.text
    assert ["optimizer.lr", "0.001", "0.002"] in page.rows
    assert not any(row[0] in ("run.name", "data.batch") for row in page.rows)
    assert ["mean Dice", "0.8 (0.78 to 0.82)", "0.9 (0.88 to 0.92)"] in page.rows
    assert ["Memory", "0.8 GiB", "0.8 GiB"] in page.rows
    assert '<td class="best">0.9 (0.88 to 0.92)</td>' in text
    assert "All show the same held-out samples" in page.text
    charts = [json.loads(found) for found in re.findall(r"json\">(.*?)</script>", text, re.DOTALL)]
    loss = next(chart for chart in charts if chart["title"] == "Training loss")
    assert [line["name"] for line in loss["panels"][0]["lines"]] == ["a", "b"]
    assert [one["over"] for one in (loss, *loss["others"])] == ["step", "samples", "seconds"]
    assert loss["others"][0]["panels"][0]["lines"][0]["x"] == [40, 80, 120, 160]
    assert {chart["title"] for chart in charts} >= {"Held-out: mean Dice", "Held-out: loss", "Samples a second"}
    assert page.images == len(charts) + 3  # scores, and a picture of each run


def test_facts_are_those_of_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [write_run(tmp_path / name, dice) for name, dice in (("a", 0.80), ("b", 0.81), ("c", 0.5), ("d", 0.4))]
    with pytest.raises(SystemExit) as ended:
        main(["report", *map(str, runs), "--out", str(tmp_path / "all.html"), "--json"])
    assert not ended.value.code
    facts = json.loads(capsys.readouterr().out)
    assert facts["report"] == str(tmp_path / "all.html")
    text = Page((tmp_path / "all.html").read_text()).text
    for sentence in (facts["headline"], facts["verdict"], *facts["notes"]):
        assert sentence in text
    assert facts["headline"] == "Mean Dice of 4 runs: from 0.81 (b) to 0.4 (d)"
    assert "its interval overlaps that of a, so the choice of held-out samples may make the difference" in text
    chosen = facts["scores"][0]
    assert (chosen["metric"], chosen["larger_is_better"]) == ("mean_dice", True)
    assert [value["best"] for value in chosen["values"]] == [False, True, False, False]
    assert chosen["values"][1]["low"] == pytest.approx(0.79)
    assert facts["same_samples"] is True
    assert [run["name"] for run in facts["runs"]] == ["a", "b", "c", "d"]


def test_a_score_without_interval_is_not_said_to_be_sure(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "a", 0.8, spread=None), write_run(tmp_path / "b", 0.9)]
    assert "cannot be told, since not all runs have an interval" in page_of(*runs, out=tmp_path / "x.html").text


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda run: [run, run], "this run is given twice"),
        (lambda run: [run, run.parent / "link"], "this run is given twice"),
        (lambda run: [run, bench(run.parent / "bench-x")], r"the folder of a bench, .*\(vitrail report .*bench-x\)"),
        (lambda run: [run, make_run(run.parent / "new", [])], "has logged no step yet"),
        (lambda run: [run, make_run(run.parent / "new", [START])], "has logged no step yet"),
        (lambda run: [run, run.parent], "is not a run folder"),
        (lambda run: [run, run.parent / "nowhere"], "does not exist"),
        (lambda run: [run] * (MOST_RUNS + 1), f"of 2 to {MOST_RUNS} runs, and {MOST_RUNS + 1} were given"),
        (lambda run: [run], "of 2 to"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_a_sentence(tmp_path: Path, make: Any, words: str) -> None:
    run = write_run(tmp_path / "a")
    (tmp_path / "link").symlink_to(run)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=words) as error:
        write_comparison(made := make(run))
    assert "\n" not in str(error.value)
    assert list(tmp_path.glob("*.html")) == []
    assert set(before) <= set(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=words):
        compare_summary(made)


def bench(folder: Path) -> Path:
    folder.mkdir()
    (folder / "sweep.json").write_text("{}")
    return folder


def test_a_page_replaces_only_its_own(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b")]
    page = write_comparison(runs)
    assert write_comparison(runs) == page
    page.write_text(page.read_text() + "my notes")
    with pytest.raises(UserError, match="not as vitrail would have written it"):
        write_comparison(runs)
    assert page.read_text().endswith("my notes")
    with pytest.raises(UserError, match="is a folder"):
        write_comparison(runs, tmp_path / "a")
    for name in ("metrics.jsonl", "report.html"):
        before = (runs[0] / "metrics.jsonl").read_bytes()
        with pytest.raises(UserError, match=r"not replaced|the page of .* itself"):
            write_comparison(runs, runs[0] / name)
        assert (runs[0] / "metrics.jsonl").read_bytes() == before
    with pytest.raises(UserError, match="File name too long"):
        write_comparison(runs, tmp_path / ("x" * 300))
    assert write_comparison(runs, tmp_path / "new" / "x.html").is_file()


def test_other_runs_of_the_same_names_have_another_page(tmp_path: Path) -> None:
    here = default_page([tmp_path / "p" / "a", tmp_path / "p" / "b"])
    assert here == tmp_path / "p" / "compare-a+b.html"
    apart = {default_page([tmp_path / "p" / "a", tmp_path / other / "b"]) for other in "pqr"}
    assert len(apart) == 3
    assert {path.parent for path in apart} == {tmp_path / "p"}
    joined = {default_page([tmp_path / a, tmp_path / b]) for a, b in (("a+b", "c"), ("a", "b+c"))}
    assert len(joined) == 2
    for letter in "n字":
        long = default_page([tmp_path / (letter * 80 + str(place)) for place in range(9)])
        assert len(os.fsencode(long.name)) < 150


def test_a_run_whose_score_is_not_finite_is_compared(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, dice, spread=None) for name, dice in (("a", 0.8), ("b", 0.9), ("c", 0.7))]
    lost = [write_run(tmp_path / f"lost{n}", float("nan"), spread=None) for n in range(3)]
    facts = compare_summary([lost[0], *runs[:2]])
    assert facts["headline"] == "Mean Dice: b 0.9, a 0.8, lost0 not finite"
    assert facts["verdict"].startswith("Higher is better, and b is best")
    assert [value["best"] for value in facts["scores"][0]["values"]] == [False, False, True]
    assert "to 0.7 (c)" in compare_summary([*runs, *lost])["headline"]
    facts = compare_summary([*lost, runs[0]])
    assert (facts["headline"], facts["verdict"]) == ("Mean Dice of 4 runs: lost0, lost1 and lost2 not finite", "")
    assert "not finite" in page_of(*lost, out=tmp_path / "x.html").text


def test_of_runs_with_the_best_score_none_is_said_to_be_it(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, dice) for name, dice in (("a", 0.9), ("b", 0.5), ("c", 0.9))]
    verdict = compare_summary(runs)["verdict"]
    assert verdict == "Higher is better, and a and c are best, with the same score."


def test_legends_name_every_run_in_a_few_letters(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, name=long) for name, long in (("a", "_a"), ("b", "b" * 300))]
    text = write_comparison(runs, tmp_path / "x.html").read_text()
    chart = json.loads(re.findall(r"json\">(.*?)</script>", text, re.DOTALL)[0])
    names = [line["name"] for line in chart["panels"][0]["lines"]]
    assert names[0].strip() == "_a"
    assert 20 < len(names[1]) < 50


def test_the_page_of_one_run_takes_no_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["report", str(write_run(tmp_path / "a")), "--out", str(tmp_path / "x.html")])
    assert ended.value.code == 2
    assert "give several runs, or leave it out" in capsys.readouterr().err


def test_what_does_not_compare_is_said(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", end=False, picture=["x"])
    b = write_run(tmp_path / "b", steps=80, picture=["z"])
    with (b / "recipe.yaml").open("a") as file:
        file.write("objective: {kind: segment, loss: ce}\n")
    page = page_of(a, b, out=tmp_path / "x.html")
    assert "a: Interrupted at step 40 of 40" in page.text
    assert "Losses do not compare: the runs differ in objective.kind and objective.loss." in page.text
    assert "The runs are of 40 and 80 steps; scores are of the last evaluation of each." in page.text
    assert "The samples are not the same: the runs differ in what was drawn." in page.text
    facts = compare_summary([a, b], now=1041.0)  # a second after its last line
    assert any(
        note.startswith("a is still running, at step 40 of 40: write this page again") for note in facts["notes"]
    )
    loss = next(score for score in facts["scores"] if score["metric"] == "loss")
    assert not any(value["best"] for value in loss["values"])


def test_pictures_of_training_samples_are_called_so(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, picture=["x"]) for name in ("a", "b")]
    for run in runs:
        recipe = (run / "recipe.yaml").read_text()
        (run / "recipe.yaml").write_text(recipe.replace("valid:", "train:"))
    assert "All show the same training samples." in page_of(*runs, out=tmp_path / "x.html").text
    (runs[0] / "recipe.yaml").write_text(recipe.replace("valid: [{path: x}]", "train: [{path: y}]"))
    assert compare_summary(runs)["same_samples"] is False


def test_errors_of_what_was_hidden_otherwise_are_not_ranked(tmp_path: Path) -> None:
    runs = []
    for name, ratio in (("a", 0.5), ("b", 0.75)):
        text = f"run: {{name: {name}}}\nmodel: {{mask: {{ratio: {ratio}}}}}\n"
        lines = [START, train_line(10), eval_line(10, mse=10 + 10 * ratio), end_line(10)]
        runs.append(make_run(tmp_path / name, lines, text))
    facts = compare_summary(runs)
    assert facts["scores"][0]["metric"] == "mse_over_variance"
    assert facts["verdict"] == ""
    assert not any(value["best"] for score in facts["scores"] for value in score["values"])
    assert "Errors of what is hidden do not compare: the runs differ in model.mask.ratio." in facts["notes"]


def test_runs_without_a_score_in_common_have_curves(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a")
    b = make_run(tmp_path / "b", [START, train_line(10), train_line(20), end_line(20)], "run: {name: b}\n")
    c = make_run(tmp_path / "c", [START, train_line(10), eval_line(10), end_line(10)], "run: {name: c}\n")
    page = page_of(a, b, c, out=tmp_path / "x.html")
    assert "3 runs, which have no score in common" in page.text
    assert "b: no evaluation yet." in page.text
    assert page.images > 4
    assert "Held-out: " not in page_of(b, c, out=tmp_path / "y.html").text  # one evaluation is no curve


def test_names_are_as_short_as_tells_runs_apart() -> None:
    assert name_runs([("x", Path("/r/a")), ("y", Path("/r/b"))]) == ["x", "y"]
    assert name_runs([("x", Path("/r/a")), ("x", Path("/r/b"))]) == ["a", "b"]
    assert name_runs([("x", Path("/r/1/a")), ("x", Path("/r/2/a"))]) == ["1/a", "2/a"]


def test_differences_are_keys_with_the_value_of_each() -> None:
    trees = [{"a": {"b": 1, "c": [1, 2]}, "d": [{"e": 1}]}, {"a": {"b": 1.0, "c": [1, 3]}, "d": [{"e": 1, "f": None}]}]
    assert find_differences(trees) == {"a.c": [[1, 2], [1, 3]]}
    assert find_differences([{"a": []}, {"a": None, "b": {}}, {}]) == {}
    assert find_differences([{"a": True}, {"a": 1}, {"b": 0}]) == {"a": [True, 1, None], "b": [None, None, 0]}


def test_curves_over_samples_and_time_leave_pauses_out() -> None:
    raw = [START, train_line(10), train_line(20), START | {"step": 10, "resumed": True, "time": 9000.0}]
    raw += [train_line(20, time=9010.0), eval_line(20) | {"time": 9012.0}]
    lines = merge_lines(seen(raw, 4))
    track = Track("a", 0, lines)
    (_, [steps]), (_, [samples]), (unit, [time]) = axes_of([track])
    assert unit == "seconds"
    assert steps.train("loss")[0] == [10, 20]
    assert samples.train("loss")[0] == [40, 80]
    assert time.train("loss")[0] == [10, 30]  # 20 s in the first session, 10 s in the second
    assert time.held_out("mse")[0] == [32]
    assert samples.held_out("mse")[0] == [80]


@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(lines=st.lists(LINES, max_size=8), environment=VALUES)
def test_any_values_make_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: Any, environment: Any) -> None:
    monkeypatch.setattr(compare, "draw_curve", lambda *_: None)  # drawing is tested elsewhere, and is slow
    monkeypatch.setattr(compare, "draw_scores", lambda *_: None)
    monkeypatch.setattr(compare, "_whole_recipes", lambda runs: [run.recipe for run in runs])
    ours = make_run(tmp_path / "a", [START, train_line(10), eval_line(10)])
    theirs = make_run(tmp_path / "b", [*lines, train_line(10)])
    (theirs / "environment.json").write_text(json.dumps(environment))
    json.dumps(compare_summary([ours, theirs]), allow_nan=False)
    assert write_comparison([ours, theirs]).is_file()


def test_values_nested_deep_are_left_out_of_both_pages(tmp_path: Path) -> None:
    ours, theirs = (write_run(tmp_path / name) for name in ("a", "b"))
    nested = "[" * 700 + "]" * 700
    with (theirs / "metrics.jsonl").open("a") as file:
        file.write(f'{{"event": "picture", "step": 40, "path": "pictures/a.png", "samples": {nested}}}\n')
    (theirs / "environment.json").write_text(f'{{"packages": {nested}}}')
    page = Page(write_report(theirs).read_text()).text
    assert "environment.json cannot be read: it is nested too deep." in page
    assert "holds 1 line" in page
    assert write_comparison([ours, theirs]).is_file()


def test_markup_in_names_stays_text(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script>"
    runs = [write_run(tmp_path / "a", name=json.dumps(evil)), write_run(tmp_path / "b")]
    text = write_comparison(runs, tmp_path / "x.html").read_text()
    assert "<script>alert" not in text
    assert "alert(1)" in Page(text).text
