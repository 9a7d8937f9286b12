"""Code of one's own, named by `--plugin`: found as a file or in the current folder, and its errors are sentences."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import ROOT, environment, losses, tiny_recipe, write_recipe

from vitrail import cli
from vitrail.errors import UserError
from vitrail.recipe import kinds, plugins

IMAGES = {"kind": "synthetic", "shape": [16, 16], "items": 16}
PAGE = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
(TINY,) = [block for block in BLOCKS if "TinyConfig" in block]
(FOCAL,) = [block for block in BLOCKS if "FocalConfig" in block]
BARE = """from typing import Literal

from vitrail.models.model import Model
from vitrail.recipe import config, kinds


@config
class BareConfig:
    kind: Literal["tiny"] = "tiny"
    ndim: int = 2
    channels: int | None = None
    shape: tuple[int, ...] | None = None
    classes: int | None = None
    output = "classes"

    def build(self):
        return Bare()


class Bare(Model):
    pass


kinds.register("model", "tiny", BareConfig)
"""


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of one's own, whose kinds and modules are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(kinds, "_registered", {slot: {} for slot in kinds.BUILT_IN})
    monkeypatch.setattr(plugins, "_named", {})
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def call(*words: Any) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main([str(word) for word in words])
    return int(ended.value.code or 0)


def recipe(lab: Path, objective: str = "classify", **more: Any) -> Path:
    tree = tiny_recipe(lab / "none", lab / "run", run__steps=2, checkpoint__every=2, eval__every=2, **more)
    tree["data"] |= {"crop": 16, "batch": 4, "train": [IMAGES], "valid": [IMAGES], "augment": {}}
    tree |= {"model": {"kind": "tiny"}, "objective": {"kind": objective}}
    return write_recipe(lab / "recipe.yaml", tree)


def test_the_example_is_short() -> None:
    assert len([line for line in TINY.splitlines() if line.strip()]) <= 20


def test_a_file_trains_and_its_run_says_what_it_was_begun_with(
    lab: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (lab / "lab").mkdir()
    (lab / "lab" / "widths.py").write_text("WIDTH = 8\n")
    text = TINY.replace("from typing", "import widths\nfrom typing").replace("32  #", "widths.WIDTH  #")
    (lab / "lab" / "tiny.py").write_text(text)
    path = list(sys.path)
    assert call("train", recipe(lab), "--plugin", "lab/tiny.py", "--quiet") == 0
    assert len(losses(lab / "run")) == 2
    assert sys.path == path  # what lies in the folder by chance is no library
    capsys.readouterr()

    monkeypatch.setattr(kinds, "_registered", {slot: {} for slot in kinds.BUILT_IN})
    monkeypatch.setattr(plugins, "_named", {})
    words = f"--plugin {lab}/lab/tiny.py"
    for verb in ("train", "eval"):
        assert call(verb, "run") == 2
        said = capsys.readouterr().err
        assert said == f"error: run was begun with {words}, and no run imports code unasked; add these words\n"
    command = [sys.executable, "-m", "vitrail", "train", "run", "run.steps=3", *words.split()]
    done = subprocess.run(command, cwd=lab, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(losses(lab / "run")) == 3


def test_a_module_of_the_current_folder_is_found(lab: Path) -> None:
    (lab / "tiny_here.py").write_text(TINY)
    code = (
        "import sys; sys.path.remove('') if '' in sys.path else None\nfrom vitrail.cli import main; main(sys.argv[1:])"
    )
    command = [sys.executable, "-P", "-c", code, "data", "preview", str(recipe(lab)), "--plugin", "tiny_here"]
    done = subprocess.run(command, cwd=lab, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


MODEL = "return nn.Sequential(first, nn.GELU(), second, nn.GELU(), head)"
CASES = {
    "syntax": (TINY.replace("def network(self):", "def network(self)"), r"own_code.py:14: SyntaxError: expected ':'"),
    "name": (TINY.replace("nn.GELU()", "nn.Gelu()"), r"own_code.py:18, in network: AttributeError: .*has no attribute"),
    "library": ("import absent_library_y\n" + TINY, r"own_code.py:1: ModuleNotFoundError: No module named 'absent_"),
    "no module": (
        TINY.replace(MODEL, "return None"),
        r"TinyConfig.network\(\) returned a NoneType, expected a torch.nn",
    ),
    "buffer": (TINY.replace("nn.GELU(), second", "nn.BatchNorm2d(32), second"), r"has a buffer, 1.running_mean"),
    "shape": (
        TINY.replace("nn.Flatten(), ", ""),
        r"TinyConfig.network\(\) fails on images \[2, 1, 16, 16\]: RuntimeError",
    ),
    "mixed samples": (
        TINY.replace("nn.Flatten()", "nn.Flatten(0)"),
        r"TinyConfig.network\(\) fails on images \[2, 1, 16, 16\]: RuntimeError",
    ),
    "classes": (TINY.replace("self.classes)", "7)"), r"gave a tensor \[2, 7\] for images .*; expected \[2, 4\]"),
    "parameter": (
        TINY.replace("nn.GELU(), second", "nn.PReLU(), second"),
        r"nothing is known of how body.network.1.weight",
    ),
    "no network": (TINY.replace("def network", "def net"), r"TinyConfig has no network; see docs"),
    "no stages": (BARE, r"own_code.py:17, in build: TypeError: Can't instantiate abstract class Bare"),
    "no model": (
        BARE.replace("Bare()", "None"),
        r"BareConfig.build\(\) returned a NoneType, expected a vitrail.models",
    ),
    "no shape": (
        BARE.replace("    shape", "    size"),
        r"model kind 'tiny': BareConfig has no shape; see docs/plugins.md",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_with_a_model_is_a_sentence(case: str, lab: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, said = CASES[case]
    assert text not in (TINY, BARE) or case == "no stages"
    (lab / "own_code.py").write_text(text)
    assert call("train", recipe(lab), "--plugin", "own_code.py", "--quiet") == 2
    shown = capsys.readouterr().err
    assert len(shown.splitlines()) == 1, shown
    assert re.search(said, shown), shown
    assert not (lab / "run").exists()


LOSS = "return Loss(total, total.new_full((), len(targets)))"
WRONG = {
    "loss": (FOCAL.replace(LOSS, "return total"), r"Focal.loss\(\) returned a Tensor, expected a vitrail.objectives"),
    "error": (
        FOCAL.replace(LOSS, "return totl"),
        r"own_code.py:\d+, in loss: NameError: name 'totl'.*the line: return totl",
    ),
    "measure": (
        f"{FOCAL}\nFocal.measure = lambda *_: None\n",
        r"Focal.measure\(\) returned a NoneType, expected a dict",
    ),
    "summary": (f"{FOCAL}\nFocal.summarise = lambda *_: {{}}\n", r"Focal.summarise\(\) gives no loss, accuracy, which"),
    "objective": (
        FOCAL.replace("return Focal(self, model, statistics)", "pass"),
        r"FocalConfig.build\(\) returned a None",
    ),
    "best": (
        f"{FOCAL}\nClassify = object\n".replace("(Classify):", "(Classify):\n    best_metric = 3\n"),
        "checkpoint.best",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_with_an_objective_is_a_sentence(
    case: str, lab: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, said = WRONG[case]
    (lab / "tiny_too.py").write_text(TINY)
    (lab / "own_code.py").write_text(text)
    names = ("--plugin", "own_code.py", "--plugin", "tiny_too.py")
    assert call("train", recipe(lab, "focal"), *names, "--quiet") in (1, 2)
    shown = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(shown) == 1
    assert re.search(said, shown[0]), shown


def test_a_plugin_may_not_take_the_name_of_another_module(lab: Path) -> None:
    (lab / "json.py").write_text(TINY)
    with pytest.raises(UserError, match=r"--plugin json.py: another module has the name json, too; rename the file"):
        plugins.load_plugin("json.py")
    (lab / "my-own.py").write_text(TINY)
    plugins.load_plugin("my-own.py")
    plugins.load_plugin("my-own.py")  # again is no other module
    assert plugins.loaded() == [str(lab / "my-own.py")]


def test_a_traceback_can_be_asked_for(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (lab / "own_code.py").write_text("1 / 0\n")
    monkeypatch.setenv(plugins.TRACEBACK, "1")
    with pytest.raises(ZeroDivisionError):
        plugins.load_plugin("own_code.py")
