"""Pages in a real browser, narrow and wide, light and dark: nothing is cut off, charts are drawn, words can be read."""

import html
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent.parent / "unit"))
from browsing import find_browser
from support import LONG, environment
from test_bench_report import H200, ablation, result, scaling, write_bench
from test_report import START, end_line, eval_line, make_run, train_line

from vitrail.report import write_bench_report, write_comparison, write_report

WIDTHS = (500, 1400)
SCHEMES = {"dark": 0, "light": 1}  # as the browser counts them
LEAST_CONTRAST = 3.0  # of words against what they stand on
HARNESS = Path(__file__).with_name("browser_pages.js")


@pytest.fixture(scope="module")
def browser() -> str:
    return find_browser()


def write_run(folder: Path, name: str, factor: float) -> Path:
    """A finished run with everything that a page can show."""
    steps = range(10, 410, 10)
    layers = {f"encoder.blocks.{n}": 1.0 + n for n in range(8)}
    speeds = {"slowest_step_seconds": 0.2, "mfu": 0.3 * factor, "hfu": 0.35 * factor, "reserved_gib": 1.5}
    lines = [START | {"device": "NVIDIA H200", "steps": 400}]
    for step in steps:
        lines.append(train_line(step, factor * (0.2 + 9 / step), activation_rms=layers, **speeds))
        if step % 100 == 0:
            line = eval_line(step, mse=factor * (10 + 900 / step))
            ratio = line["metrics"]["mse_over_variance"]
            sure = {"mse_over_variance": [0.9 * ratio, 1.1 * ratio]}
            lines.append(line | {"intervals": {"level": 0.95, "over": "40 items", "metrics": sure}})
            line = {"event": "picture", "time": 1000.0 + step, "step": step, "path": f"pictures/{step}.png"}
            lines.append(line | {"caption": "held-out samples", "samples": ["a.tif", "b.tif"]})
    lines.append({"event": "warning", "time": 1400.0, "step": 400, "text": "a_very_long_word_of_a_path/" * 12})
    run = make_run(folder / name, [*lines, end_line(400)], f"run: {{name: {name}, steps: 400}}\ndata: {{batch: 4}}\n")
    (run / "pictures").mkdir()
    for step in range(100, 401, 100):
        noise = np.random.default_rng(step).integers(0, 255, (500, 1500), dtype=np.uint8)
        Image.fromarray(noise).save(run / f"pictures/{step}.png")
    tree = {"torch": "2.13.0", "cpu": {"cores": 2}, "packages": {"a" * 80: "1.0"}}
    (run / "environment.json").write_text(json.dumps(tree))
    return run


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    runs = [write_run(folder, f"run_{n}", 1 + n / 4) for n in range(3)]
    lines = ablation() + [line | {"environment": H200 | {"device": "NVIDIA A100"}} for line in scaling()]
    lines.append(result({"parallel.compile": "x" * 90}, status="failed", error="it hung " * 40))
    bench = write_bench(folder / "grid", lines, cells=["never"])
    long = folder / "a_run_whose_name_is_long_and_has_no_place_to_break_it_at_all_because_of_underscores"
    runs.append(runs[0].rename(long))
    return {
        "run": write_report(runs[1], now=1500.0),
        "comparison": write_comparison(runs[1:], now=1500.0),
        "bench": write_bench_report(bench, now=1500.0),
    }


def look(browser: str, pages: dict[str, Path], scheme: str, folder: Path) -> tuple[list[dict[str, Any]], str]:
    """Open all pages in all widths in one browser; return what was seen of each, and what the browser complained of."""
    cases = [{"page": name, "url": path.as_uri(), "width": wide} for name, path in pages.items() for wide in WIDTHS]
    script = HARNESS.read_text(encoding="utf-8").replace("CASES", json.dumps(cases))
    style = "<style>:root { color-scheme: light dark }</style>"
    (folder / "look.html").write_text(f"<!doctype html>{style}<body><script>{script}</script>", encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    options += ["--allow-file-access-from-files", "--enable-logging=stderr", "--virtual-time-budget=60000"]
    options += [f"--user-data-dir={folder / 'profile'}", f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}"]
    command = [browser, *options, "--dump-dom", (folder / "look.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG, env=environment(HOME=str(folder)))
    found = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return json.loads(html.unescape(found[1])), "\n".join(said)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_pages_in_a_browser(browser: str, pages: dict[str, Path], scheme: str, tmp_path: Path) -> None:
    seen, complaints = look(browser, pages, scheme, tmp_path)
    assert complaints == ""
    assert len(seen) == len(pages) * len(WIDTHS)
    for one in seen:
        where = f"{one['page']} at {one['width']} px, {scheme}"
        assert "error" not in one, f"{where}: {one}"
        assert one["dark"] == (scheme == "dark"), where
        assert (max(one["background"]) < 60) if scheme == "dark" else (min(one["background"]) > 200), where
        assert one["inner"] == one["width"], where
        assert one["overflow"] <= 0, f"{where}: wider by {one['overflow']} px because of {one['wide']}"
        assert one["zoomed"] <= 0, f"{where}: a picture shown large makes the page wider"
        assert one["large"] or not one["pictures"], f"{where}: a click does not show a picture large"
        assert one["unread"] == [], f"{where}: words that cannot be read"
        assert one["broken"] == [], f"{where}: pictures that are not shown"
        assert one["charts"] == one["drawn"], f"{where}: {one['drawn']} of {one['charts']} charts are drawn"
        assert one["cut"] == [], f"{where}: words of charts that are cut off"
        assert one["crossed"] == [], f"{where}: words of charts that lie on each other"
        if one["page"] != "bench":
            assert one["charts"] >= 8, where
            assert "step" in one["tip"], where
        if one["page"] == "comparison":
            assert one["choices"] == ["step", "samples", "minutes"], where
            assert one["axes"] == ["step", "samples", "minutes"], where
            assert one["legend"] == 3, where
