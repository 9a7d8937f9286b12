"""What the command line answers without PyTorch: recipe errors, missing files, help and completion; and colours."""

import io
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support import ROOT

from vitrail.cli import words
from vitrail.recipe import early, json_schema, kinds
from vitrail.recipe.load import read_tree

DEMO = ROOT / "configs" / "demo" / "mae3d.yaml"
NOTHING = "nothing.yaml: there is no such file"
CASES = {
    ("--help",): (0, "Usage: vitrail"),
    ("train", "--help"): (0, "Usage: vitrail train"),
    ("train", "nothing.yaml"): (2, NOTHING),
    ("tune", "nothing.yaml"): (2, NOTHING),
    ("plan", "nothing.yaml", "--cluster", "laptop"): (2, NOTHING),
    ("bench", "nothing.yaml"): (2, NOTHING),
    ("launch", "slurm", "nothing.yaml"): (2, NOTHING),
    ("data", "preview", "nothing.yaml"): (2, NOTHING),
    ("data", "balance", "nothing.yaml"): (2, NOTHING),
    ("data", "encode", "nothing.yaml", "--out", "x"): (2, NOTHING),
    ("eval", "nowhere"): (2, "nowhere: it is not there; give the folder of a run"),
    ("sample", "nowhere"): (2, "nowhere: it is not there; give the folder of a run"),
    ("predict", "nowhere", "x.tif", "--out", "y.tif"): (2, "nowhere: it is not there; give the folder of a run"),
    ("embed", "nowhere", "x.tif", "--out", "y.zarr"): (2, "nowhere: it is not there; give the folder of a run"),
    ("probe", "nowhere"): (2, "nowhere: it is not there; give the folder of a run"),
    ("probe", ".", "--data", "nothing.yaml"): (2, NOTHING),
    ("embed", ".", "x.tif.none", "--out", "y.zarr"): (2, "data path 'x.tif.none' does not exist"),
    ("predict", ".", "x.none", "--out", "y.tif"): (2, "data path 'x.none' does not exist"),
    ("new", "x.none", "--task", "segment"): (2, "data path 'x.none' does not exist"),
    ("data", "inspect", "x.none"): (2, "data path 'x.none' does not exist"),
    ("export", "nowhere", "--out", "y"): (2, "nowhere: it is not there; give the folder of a run"),
    ("report", "nowhere"): (2, "run folder 'nowhere' does not exist"),
    ("report", "nowhere", "elsewhere"): (2, "run folder 'nowhere' does not exist"),
    ("train", DEMO, "steps=5"): (2, "steps: unknown key; did you mean 'run.steps' or 'schedule.steps'?"),
    ("train", DEMO, "lr=1"): (2, "lr: unknown key; did you mean 'optimizer.lr'?"),
    ("train", DEMO, "run.stepz=5"): (2, "run.stepz: unknown key; did you mean 'steps'?"),
    ("train", DEMO, "model.encoder.widht=5"): (2, "model.encoder.widht: unknown key; did you mean 'width'?"),
    ("train", DEMO, "model.mask.ratoi=1"): (2, "model.mask.ratoi: unknown key; did you mean 'ratio'? (keys here:"),
    ("train", DEMO, "model.kind=mea"): (2, "model.kind: 'mea' is not a known model; did you mean 'mae'?"),
    ("train", DEMO, "optimizer.kind=adam", "optimizer.momentum=1"): (2, "optimizer.momentum: unknown key"),
    ("train", DEMO, "run.steps=many"): (2, "run.steps: expected more than 0 steps (200)"),
}
RUN = """
import contextlib, io, json, sys
from vitrail.cli import main
for words in json.loads(sys.argv[1]):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            main(words)
        except SystemExit as ended:
            code = ended.code
    print(json.dumps([code, out.getvalue(), "torch" in sys.modules]))
"""


def run(code: str, *arguments: str, cwd: Path, **more: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=cwd, env=os.environ | more, capture_output=True, text=True
    )
    assert not done.returncode, done.stderr
    return done.stdout


def test_mistakes_and_help_need_no_torch(tmp_path: Path) -> None:
    import json

    words = [[str(word) for word in case] for case in CASES]
    answers = [json.loads(line) for line in run(RUN, json.dumps(words), cwd=tmp_path).splitlines()]
    for case, (code, text, torch) in zip(CASES, answers, strict=True):
        assert (code or 0, torch) == (CASES[case][0], False), (case, text)
        assert CASES[case][1] in text, case


def test_nothing_writes_into_the_files_of_a_shell(tmp_path: Path) -> None:
    code = "import sys\nfrom vitrail.cli import main\nmain(sys.argv[1:])\n"
    for asked in (["--install-completion"], ["completion", "bash"], ["completion", "zsh"], ["completion", "fish"]):
        more = {"HOME": str(tmp_path), "SHELL": "/bin/bash"}
        command = [sys.executable, "-c", code, *asked]
        done = subprocess.run(command, cwd=tmp_path, env=os.environ | more, capture_output=True, text=True)
        assert (not done.returncode) is (asked[0] == "completion")
        assert asked[0] != "completion" or f"_VITRAIL_COMPLETE=complete_{asked[1]}" in done.stdout
    assert not [path for path in tmp_path.iterdir() if path.name.startswith((".bash", ".zsh", ".config"))]


@pytest.mark.parametrize(("shell", "needed"), [("bash", "run.steps=\n"), ("zsh", '"run.steps="\n')])
def test_completion_needs_no_torch(tmp_path: Path, shell: str, needed: str) -> None:
    line = f"vitrail train {DEMO} run.st"
    code = (
        "import sys\nfrom vitrail.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    print('torch' in sys.modules)\n"
    )
    more = {"COMP_WORDS": line, "COMP_CWORD": "3", "_TYPER_COMPLETE_ARGS": line}
    found = run(code, cwd=tmp_path, _VITRAIL_COMPLETE=f"complete_{shell}", **more)
    assert needed in found
    assert found.endswith("False\n")


def test_stored_keys_are_those_of_the_code() -> None:
    stored = (ROOT / "src" / "vitrail" / "recipe" / early.FILE).read_text(encoding="utf-8")
    assert stored == early.write_keys(json_schema()), "write it anew with: python docs/tables.py"


def test_stored_keys_are_not_for_kinds_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = early.stored_keys()
    tree = {"model": {"kind": "mae", "colour": 1}, "objective": {"kind": "own", "colour": 1}}
    assert [key for key, _ in early.unknown_keys(tree, schema)] == [("model", "colour")]
    monkeypatch.setitem(kinds.BUILT_IN["model"], "mae", "elsewhere:MAEConfig")
    assert not list(early.unknown_keys(tree, schema))


@pytest.mark.parametrize(
    ("start", "found"),
    [
        ("run.st", ["run.steps=", "run.stop_after_skips="]),
        ("model.mask.", ["model.mask.ratio=", "model.mask.kind="]),
        ("precision.compute=f", ["precision.compute=fp32", "precision.compute=float8"]),
        ("objective.kind=f", ["objective.kind=flow"]),
        ("run.report=", []),
        ("log.report=", []),
        ("nothing", []),
    ],
)
def test_completions(start: str, found: list[str]) -> None:
    assert early.complete(start, read_tree(DEMO, set())) == found


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colours_are_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    help_text = "Usage: vitrail x\n\nOptions:\n  --out FILE  Where.\n\nCommands:\n  train    Train.\n"
    for stream, more, colour in (
        (Terminal(), {}, True),
        (Terminal(), {"NO_COLOR": "1"}, False),
        (Terminal(), {"TERM": "dumb"}, False),
        (io.StringIO(), {}, False),
    ):
        for name, value in ({"NO_COLOR": "", "TERM": "xterm"} | more).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "stderr", stream)
        words.note("mend \x1b[1mit", before="error: ")
        monkeypatch.setattr(sys, "stdout", stream)
        shown = words.coloured(help_text)
        if colour:
            assert stream.getvalue() == "\x1b[1;31merror: \x1b[0mmend it\n"
            assert "\x1b[1mOptions:\x1b[0m" in shown
            assert "  \x1b[36m--out FILE\x1b[0m  Where." in shown
        else:
            assert stream.getvalue() == "error: mend it\n"
        assert re.sub(r"\x1b\[[0-9;]*m", "", shown) == help_text
        assert (shown != help_text) is colour


def test_every_extra_is_on_the_page_of_installing() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == sorted(extras)
