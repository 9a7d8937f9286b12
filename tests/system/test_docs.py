"""The code in the documentation runs, as it stands there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = ("models.md", "weights.md")


@pytest.mark.parametrize("page", PAGES)
def test_code_in_the_docs_runs(page: str, tmp_path: Path) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    blocks = BLOCK.findall(text)
    assert blocks
    # One process for a page, a namespace for a block: each must stand alone, and start-up is paid once.
    lines = [f"exec(compile({code!r}, {f'{page}, block {i}'!r}, 'exec'), {{}})" for i, code in enumerate(blocks, 1)]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_examples_of_ucf_vit_are_all_there() -> None:
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    for name in ("VIT", "MAE", "UNETR", "SAP", "DiffusionVIT"):
        section = text.split(f"### {name}\n", 1)[1].split("\n## ", 1)[0]
        assert BLOCK.search(section), name
