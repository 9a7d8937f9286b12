"""Nothing of a sweep's pictures is cut off, and their captions say what the thin lines are."""

import itertools
from pathlib import Path
from typing import Any

import pytest
from test_bench_report import only, result, scaling, write_bench

from vitrail.report.bench_cells import read_bench, split_studies
from vitrail.report.bench_page import bench_summary, summarize_bench
from vitrail.report.bench_plots import Picture, draw_all
from vitrail.report.figures import shorten_middle

LONG = "parallel.prefetch_of_the_next_blocks_of_all"


def draw(folder: Path, lines: list[dict]) -> dict[str, Picture]:
    sweep, cells, notes = read_bench(write_bench(folder, lines))
    studies = split_studies(cells)
    pictures = draw_all(summarize_bench(folder, sweep, studies, notes), studies, notes)
    assert notes == []
    return {picture.name: picture for picture in pictures}


def assert_whole(picture: Picture, dpi: int) -> None:
    """Every word lies inside the picture, and every line inside its panel."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    figure: Any = picture.figure
    figure.set_dpi(dpi)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    ticks = [text for ax in figure.axes for text in [*ax.get_xticklabels(), *ax.get_yticklabels()]]
    numbers = {id(text) for text in ticks if text.get_text()[:1] in "-.0123456789"}  # some are not drawn
    for text in figure.findobj(lambda one: isinstance(one, Text) and one.get_text() and id(one) not in numbers):
        box = text.get_window_extent(canvas.get_renderer())
        inside = box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.width and box.y1 <= figure.bbox.height
        assert inside, (picture.name, text.get_text(), box, figure.bbox)
    for ax in figure.axes:
        for line in ax.get_lines():
            if line.get_transform() == ax.transData and picture.name.startswith(("configurations", "ladder")):
                assert ax.get_xlim()[0] <= min(line.get_xdata())
                assert max(line.get_xdata()) <= ax.get_xlim()[1]


def make_wide() -> list[dict]:
    """A bar whose thin line ends at three times its length, beside long names of batches."""
    lines = []
    for rate, batch in ((16.0, 100000), (15.0, 400000)):
        line = result({"data.batch": f"{batch}/rank"}, 2.0, batch=batch, batch_per_rank=batch)
        lines.append(line | {"samples_per_s": rate, "windows": [2.0, 0.68, 2.1, 0.66, 2.2]})
    return lines


def make_many(*keys: str) -> list[dict]:
    levels = {"parallel.recompute": ("none", "full"), "precision.compute": ("fp32", "bf16"), LONG: (False, True)}
    grid = itertools.product(*(levels[key] for key in keys), (16, 32))
    return [
        result(dict(zip(keys, values, strict=True)) | {"data.batch": batch}, batch=batch, batch_per_rank=batch)
        for *values, batch in grid
    ]


@pytest.mark.parametrize("dpi", [72, 150])
@pytest.mark.parametrize(
    "lines",
    [make_wide(), make_many("parallel.recompute", "precision.compute"), make_many("parallel.recompute", LONG)],
    ids=["thin lines", "legend", "names"],
)
def test_nothing_is_cut_off(tmp_path: Path, lines: list[dict], dpi: int) -> None:
    pictures = draw(tmp_path / "b", lines)
    assert {"configurations", "batch", "step"} <= set(pictures)
    for picture in pictures.values():
        assert_whole(picture, dpi)


def test_thin_lines_of_scaling_are_inside(tmp_path: Path) -> None:
    lines = [line | {"windows": [2.0, 0.2, 2.1, 0.2, 2.2]} if line["gpus"] == 16 else line for line in scaling()]
    speed = draw(tmp_path / "b", lines)["weak-scaling"].figure.axes[0]
    tops = [float(value) for line in speed.get_lines() for value in line.get_ydata()]
    assert max(tops) < speed.get_ylim()[1]


def test_long_names_keep_their_ends() -> None:
    assert shorten_middle("short", 5) == "short"
    assert shorten_middle("abcdefghij", 6) == "abc…ij"
    assert len(shorten_middle("x" * 99, 64)) == 64


@pytest.mark.parametrize(
    ("counts", "words", "head"),
    [
        ((5, 5), "Thin lines are the quartiles of the windows.", "quartiles"),
        ((3, 3), "Thin lines are the slowest and fastest of the windows.", "slowest and fastest"),
        (
            (5, 3),
            "Thin lines are the quartiles of the windows, the slowest and fastest of fewer than 4.",
            "quartiles, or slowest and fastest",
        ),
    ],
)
def test_thin_lines_are_named(tmp_path: Path, counts: tuple[int, int], words: str, head: str) -> None:
    from vitrail.report.bench_page import _list_cells

    lines = [result({"a.b": n}) for n in (1, 2)]
    lines = [line | {"windows": line["windows"][:count]} for line, count in zip(lines, counts, strict=True)]
    assert draw(tmp_path / "b", lines)["configurations"].caption == words
    facts = bench_summary(tmp_path / "b")
    assert [cell["windows"] for cell in facts["cells"]] == list(counts)
    assert head in _list_cells(facts)[0]


# ---------------------------------------------------------------- effects and words


def test_a_first_level_without_pairs_does_not_hide_an_effect(tmp_path: Path) -> None:
    lines = []
    for (strategy, bucket), ranks in itertools.product((("FULL_SHARD", None), ("DDP", 1), ("DDP", 25)), (1, 2)):
        keys = {"parallel.strategy": strategy, "parallel.bucket_mib": bucket, "ranks": ranks}
        seconds = 0.1 if bucket == 25 else 0.2
        lines.append(result(keys, seconds, noise=0.001, strategy=strategy, gpus=ranks, batch=32 * ranks))
    effect = only(bench_summary(write_bench(tmp_path / "b", lines))["effects"])
    assert (effect["factor"], effect["from"], effect["to"], effect["pairs"]) == ("bucket_mib", "1", "25", 2)
    assert effect["percent"] == pytest.approx(100, abs=1)


@pytest.mark.parametrize(("factor", "helped"), [(0.8, True), (1.0, False), (1.25, False)])
def test_a_ladder_that_does_not_help_says_so(tmp_path: Path, factor: float, helped: bool) -> None:
    chain = [("none", False), ("full", False), ("full", True)]
    lines = [
        result({"parallel.recompute": r, "parallel.compile": c}, 0.1 * factor**n, noise=0.0, recompute=r, compile=c)
        for n, (r, c) in enumerate(chain)
    ]
    words = " ".join(bench_summary(write_bench(tmp_path / "b", lines))["conclusions"])
    assert ("The ladder's best rung" in words) == helped
    assert ("Nothing on the ladder helped" in words) == (not helped)


def test_one_is_not_many(tmp_path: Path) -> None:
    lines = [result({"ranks": n, "a.b": b}, gpus=n, batch=32 * n) for n in (1, 2) for b in (1, 2)]
    (study,) = split_studies(read_bench(write_bench(tmp_path / "b", lines))[1])
    assert [study.describe(cell) for cell in study.cells[::2]] == ["b=1, 1 rank", "b=1, 2 ranks"]
    alone = bench_summary(write_bench(tmp_path / "one", [result({"a.b": 1}, status="failed")]))
    assert any("1 of 1 cell (" in sentence for sentence in alone["conclusions"])
