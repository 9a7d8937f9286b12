"""The page of a sweep as a reader gets it: one file that opens offline, with pictures beside it in two formats."""

import json
import re
import sys
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent.parent / "unit"))
from test_bench_report import H200, ablation, result, scaling, write_bench

from vitrail.cli import main
from vitrail.errors import UserError
from vitrail.report.bench_cells import read_bench, split_studies
from vitrail.report.bench_page import bench_summary, write_bench_report
from vitrail.report.bench_plots import choose_bars


class Page(HTMLParser):
    """Text, pictures and tags of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self.images, self.tags = "", [], []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "img":
            self.images.append(dict(attrs))

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All pictures at once: an ablation on one device, scaling on another; one cell tried to be HTML."""
    lines = ablation()
    lines.append(result({"parallel.compile": "<script>alert(1)</script> $x$"}, status="skipped", error="<b>no</b>"))
    lines += [line | {"environment": H200 | {"device": "NVIDIA A100"}} for line in scaling()]
    folder = write_bench(tmp_path_factory.mktemp("bench") / "grid", lines, cells=["never"])
    assert write_bench_report(folder) == folder / "report.html"
    return folder


def test_page_is_one_file_without_links(bench: Path) -> None:
    text = (bench / "report.html").read_text()
    page = Page(text)
    assert "default-src 'none'" in text
    assert not re.findall(r"(?:src|href)=\"(?!data:)", text)
    assert "script" not in page.tags
    assert all(image["src"].startswith("data:image/svg+xml;base64,") and image["alt"] for image in page.images)
    assert "29 of 34 cells measured, 2 out of memory, 1 failed, 1 skipped, 1 not run yet" in page.text
    for words in ("NVIDIA H200", "NVIDIA A100", "2.11.0", "throughput falls", "<b>no</b>"):
        assert words in page.text, words


def test_pictures_lie_beside_in_both_formats(bench: Path) -> None:
    names = {path.stem for path in (bench / "plots").glob("*.svg")}
    assert names == {path.stem for path in (bench / "plots").glob("*.png")}
    for kind in ("weak-scaling", "configurations", "effects", "interactions", "ladder", "batch", "step"):
        assert any(name.startswith(kind) for name in names), kind
    assert len(Page((bench / "report.html").read_text()).images) == len(names)
    for path in (bench / "plots").glob("*.png"):
        with Image.open(BytesIO(path.read_bytes())) as image:
            assert image.width > 800
            assert image.convert("L").getextrema() != (255, 255)


def test_page_and_facts_agree(bench: Path) -> None:
    facts = json.loads(json.dumps(bench_summary(bench), allow_nan=False))
    text = Page((bench / "report.html").read_text()).text
    for sentence in facts["conclusions"] + facts["warnings"] + facts["flags"]:
        assert sentence in text


def test_no_two_things_are_called_the_same(bench: Path) -> None:
    """The fastest cells of two patches and two devices, each with its own name in tiles and sentences."""
    text = (bench / "report.html").read_text()
    tiles = re.findall(r'class="tile"><span>(.*?)</span>', text)
    assert len([tile for tile in tiles if tile.startswith("Fastest")]) == 3
    assert len(set(tiles)) == len(tiles)
    facts = bench_summary(bench)
    titles = [sentence.partition(": ")[0] for sentence in facts["conclusions"] if sentence.startswith("Fastest")]
    assert titles == [cell["title"] for cell in facts["fastest"]]
    assert len(set(titles)) == len(titles) == 3
    assert {"Fastest with patch=2 (NVIDIA H200, real)", "Fastest (NVIDIA A100, real)"} <= set(titles)
    pictures = re.findall(r"<figcaption><b>(.*?)</b>", text)
    assert "Configurations: patch=2 (NVIDIA H200, real)." in pictures
    assert len(set(pictures)) == len(pictures)


def test_narrow_screens(bench: Path) -> None:
    """A row of a wide table becomes a list whose entries are named; a click shows a picture large, in its box."""
    text = (bench / "report.html").read_text()
    style = text[: text.index("</style>")]
    narrow = style[style.index("@media (max-width: 560px)") :]
    for rule in ("stack thead { display: none; }", "stack tr { display: block;", "content: attr(data-head);"):
        assert rule in narrow, rule
    for table in re.findall(r'<table class="stack">(.*?)</table>', text, re.DOTALL):
        heads = re.findall(r"<th(?: [^>]*)?>(.*?)</th>", table)
        for row in re.findall(r"<tr>(.*?)</tr>", table, re.DOTALL)[1:]:
            assert re.findall(r'<td[^>]* data-head="(.*?)"', row) == heads
    assert text.count('<table class="stack">') == 2  # effects and cells
    pictures = text.count("<img ")
    assert text.count('<label class="scroll"><input type="checkbox" class="zoom" ') == pictures > 0
    assert text.count('<source media="(max-width: 560px)" srcset="data:image/svg+xml;base64,') == pictures


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_bench(tmp_path / "b", [result({"parallel.compile": on}, 0.1 - 0.05 * on) for on in (False, True)])
    with pytest.raises(SystemExit) as ended:
        main(["report", str(folder), "--json"])
    assert not ended.value.code
    facts = json.loads(capsys.readouterr().out)
    assert facts["report"] == str(folder / "report.html")
    assert facts["effects"][0]["percent"] == pytest.approx(100, abs=5)


def test_a_later_report_replaces_the_pictures_of_an_earlier(tmp_path: Path) -> None:
    folder = write_bench(tmp_path / "b", [result({"a.b": n}, 0.1) for n in (1, 2)])
    write_bench_report(folder)
    assert (folder / "plots" / "effects.png").is_file()
    (folder / "plots" / "mine.png").write_bytes(b"")
    write_bench_report(write_bench(folder, [result({"a.b": 1})]))
    names = {path.name for path in (folder / "plots").iterdir()}
    assert names == {"configurations.png", "configurations.svg", "step.png", "step.svg", "mine.png"}


def test_many_cells_keep_those_without_a_speed(tmp_path: Path) -> None:
    lines = [result({"a.b": n}, 0.1 + n) for n in range(40)] + [result({"a.b": 40}, status="oom")]
    (study,) = split_studies(read_bench(write_bench(tmp_path / "b", lines))[1])
    kept, left = choose_bars(study.cells)
    assert (len(kept), left) == (32, 9)
    assert [cell.status for cell in kept[-2:]] == ["ok", "oom"]


def test_empty_sweep_has_a_page(tmp_path: Path) -> None:
    page = Page(write_bench_report(write_bench(tmp_path / "empty", [])).read_text())
    assert "No cell has a result yet" in page.text
    assert "Not shown" in page.text
    assert page.images == []
    only_failures = [result({"a.b": n}, status="failed", error="it hung") for n in (1, 2)]
    page = Page(write_bench_report(write_bench(tmp_path / "failed", only_failures)).read_text())
    assert "0 of 2 cells measured, 2 failed" in page.text
    assert "it hung" in page.text


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    folder = write_bench(tmp_path / "b", ablation()[:2])
    (folder / "plots").write_text("in the way")
    with pytest.raises(UserError, match="plots is a file, where a folder is expected"):
        write_bench_report(folder)
