"""The page of a run that goes on: written at evaluations, renewed by itself; curves are drawn again from points."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support import events, merge, tiny_recipe

import vitrail
from vitrail.report import page, plots, write_report
from vitrail.report.charts import chart_of
from vitrail.report.figures import BLUE
from vitrail.training import journal
from vitrail.training.journal import Journal

TINY = {"run__steps": 6, "checkpoint__every": "off", "eval__every": 2, "eval__samples": 2, "data__batch": 2}


def points_of(html: str) -> list[dict[str, Any]]:
    return [json.loads(text) for text in re.findall(r'<script type="application/json">(.*?)</script>', html, re.DOTALL)]


def test_the_page_is_written_at_each_evaluation(volume: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "_PAGE_SHARE", 0)
    pages: list[str] = []
    usual = Journal.write_page

    def kept(self: Journal, step: int) -> None:
        usual(self, step)
        pages.append((tmp_path / "run" / "report.html").read_text())

    monkeypatch.setattr(Journal, "write_page", kept)
    vitrail.train(tiny_recipe(volume, tmp_path / "run", **TINY, log__report=True), quiet=True)
    assert [re.search(r"<title>tiny: ([^<]*)", html)[1] for html in pages] == [  # type: ignore[index]
        "Running, at step 2 of 6",
        "Running, at step 4 of 6",
        "Done at step 6 of 6",
    ]
    assert [f'data-renew="{page.RENEW}"' in html for html in pages] == [True, True, False]
    assert ['http-equiv="refresh"' in html for html in pages] == [True, True, False]


def test_pages_take_a_small_share_of_the_time(volume: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    monkeypatch.setattr(Journal, "write_page", lambda self, step: written.append(step))
    monkeypatch.setattr(journal, "_PAGE_SHARE", 10**12)
    vitrail.train(tiny_recipe(volume, tmp_path / "run", **TINY, log__report=True), quiet=True)
    assert written == [2, 6]
    written.clear()
    vitrail.train(tiny_recipe(volume, tmp_path / "off", **TINY), quiet=True)
    assert written == []


def test_a_page_that_fails_ends_no_run_and_is_told_once(
    volume: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Any) -> None:
        raise RuntimeError("no ink")

    monkeypatch.setattr(page, "write_report", fail)
    monkeypatch.setattr(journal, "_PAGE_SHARE", 0)
    tree = tiny_recipe(volume, tmp_path / "run", **TINY, log__report=True)
    assert vitrail.train(tree, quiet=True).code == 0
    [warning] = events(tmp_path / "run", "warning")
    assert "no ink" in warning["text"]
    monkeypatch.undo()
    assert "no ink" in write_report(tmp_path / "run").read_text()
    assert vitrail.train(merge(tree, {"run.dir": str(tmp_path / "more")}), quiet=True).code == 0


def test_curves_give_the_points_that_they_are_drawn_of() -> None:
    lines = [{"event": "train", "step": step, "loss": 1 / step, "data_wait": 0.1} for step in range(1, 31)]
    lines += [{"event": "eval", "step": 30, "weights": "raw", "metrics": {"loss": 0.05}}]
    chart = chart_of(plots.loss_curve(lines))
    assert chart is not None
    [panel] = chart["panels"]
    assert [line["name"] for line in panel["lines"]] == ["train", "train, smoothed", "evaluation"]
    train, _, evaluated = panel["lines"]
    assert (train["colour"], train["pale"], train["x"][:2]) == (BLUE, True, [1.0, 2.0])
    assert train["y"][2] == 0.333333
    assert (evaluated["joined"], evaluated["dots"], evaluated["y"]) == (False, True, [0.05])
    assert panel["log"]
    json.dumps(chart, allow_nan=False)
    layers = {f"layer.{n}": 1.0 for n in range(12)}
    heat = [{"event": "train", "step": step, "activation_rms": layers} for step in (1, 2)]
    assert chart_of(plots.activations(heat)) is None  # a heat map stays a picture


def test_points_on_a_page_hold_no_markup(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    evil = "</script><script>alert(1)</script>"
    metrics = {f"dice_{evil}": 0.5, "loss": 1.0}
    lines = [{"event": "start", "step": 0}, {"event": "eval", "step": 1, "weights": "raw", "metrics": metrics}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    html = write_report(run).read_text()
    assert "<script>alert" not in html
    assert any("alert(1)" in line["name"] for chart in points_of(html) for line in chart["panels"][0]["lines"])
