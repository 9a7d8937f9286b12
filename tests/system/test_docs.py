"""The code in the documentation runs, as it stands there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = (("models.md", "data.md"), ("weights.md",))


@pytest.mark.parametrize("pages", PAGES, ids=str)
def test_code_in_the_docs_runs(pages: tuple[str, ...], tmp_path: Path) -> None:
    lines = []
    for page in pages:
        blocks = BLOCK.findall((ROOT / "docs" / page).read_text(encoding="utf-8"))
        assert blocks
        # One process for some pages, a namespace for a block: each must stand alone, and start-up is paid once.
        for number, code in enumerate(blocks, 1):
            lines.append(f"exec(compile({code!r}, {f'{page}, block {number}'!r}, 'exec'), {{}})")
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_examples_of_ucf_vit_are_all_there() -> None:
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    for name in ("VIT", "MAE", "UNETR", "SAP", "DiffusionVIT"):
        section = text.split(f"### {name}\n", 1)[1].split("\n## ", 1)[0]
        assert BLOCK.search(section), name
