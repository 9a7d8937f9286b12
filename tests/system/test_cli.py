"""The command line as a person meets it: help, exit codes, sentences, and pages that say what is true."""

import json
import re
import runpy
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
from pasting import parsed
from support import LONG, ROOT, end, environment, start, tiny_recipe, write_recipe

from vitrail import cli
from vitrail.errors import RunFailed, UserError
from vitrail.recipe import kinds
from vitrail.training import run as training

VERBS = (
    "train",
    "eval",
    "sample",
    "report",
    "data generate",
    "data inspect",
    "data preview",
    "data bench",
    "data encode",
    "data balance",
    "doctor",
    "plan",
    "bench",
    "tune",
    "launch",
    "schema",
    "completion",
)
HEAVY = ("torch", "numpy", "matplotlib", "zarr", "tensorstore", "yaml", "rich", "PIL", "jinja2")


def call(*words: str) -> int:
    """Run the command line in this process; its exit code."""
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    return ended.value.code or 0


def python(*words: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=LONG, **options)


@pytest.fixture
def trained(monkeypatch):
    """train() replaced by one that notes its call and returns, or raises, what a test asks for."""
    state = types.SimpleNamespace(calls=[], raises=None, outcome=training.Outcome(0, Path("runs/a"), 10, "done"))

    def train(recipe, **options):
        state.calls.append((recipe, options))
        if state.raises is not None:
            raise state.raises
        return state.outcome

    monkeypatch.setattr(training, "train", train)
    for check in ("check_recipe", "check_run"):  # there are no files
        monkeypatch.setattr(cli.train, check, lambda *_: None)
    monkeypatch.delenv("RANK", raising=False)
    return state


# ---------------------------------------------------------------- help


def test_help_imports_nothing_heavy():
    program = f"""
import sys
from vitrail.cli import main
for verb in {("", "data", *VERBS)!r}:
    try:
        main([*verb.split(), "--help"])
    except SystemExit as end:
        assert not end.code, verb
print("imported:", sorted(set({HEAVY!r}) & set(sys.modules)))
"""
    done = python("-c", program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "imported: []"


def test_the_module_is_the_command():
    done = python("-m", "vitrail", "--version")
    assert (done.returncode, done.stdout.split()[0]) == (0, "vitrail")


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb_has_an_example_that_can_be_typed(verb, capsys, monkeypatch):
    assert call(*verb.split(), "--help") == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    examples = [line for line in lines if line.startswith(f"vitrail {verb}")]
    assert examples
    for example in examples:
        assert parsed(re.split(r"\s{2,}| > ", example)[0], monkeypatch)


def test_the_list_of_verbs_is_complete(capsys):
    assert call("--help") == 0
    out = capsys.readouterr().out
    for verb in VERBS:
        assert re.search(rf"^  {verb.split()[0]}\b", out, re.MULTILINE), verb


# ---------------------------------------------------------------- errors and exit codes


@pytest.mark.parametrize(
    "words",
    [
        ("trian",),
        ("train",),
        ("train", "a.yaml", "--frsh"),
        ("eval", "runs/a", "--weights", "best"),
        ("eval", "runs/a", "--samples", "0"),
        ("data", "generate", "a.zarr", "--ome-version", "0.3"),
    ],
)
def test_wrong_words_are_refused_with_2(words, capsys):
    assert call(*words) == 2
    assert "Error: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ("train", "nowhere.yaml"),
        ("train", "."),
        ("eval", "nowhere"),
        ("report", "nowhere"),
        ("data", "inspect", "nowhere"),
        ("data", "inspect", "nowhere.zarr"),
        ("data", "generate", "out.zarr", "--shape", "64,64"),
        ("data", "generate", "out.zarr", "--shape", "64,x,64"),
        ("data", "generate", "out.zarr", "--shape", "2"),
        ("train", "nowhere.yaml", "--plugin", "no_such_module"),
        ("schema", "--out", "nowhere/schema.json"),
    ],
)
def test_wrong_input_is_one_sentence_and_2(words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    assert call(*words) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert len(shown.err.splitlines()) == 1
    assert shown.err.startswith("error: ")
    assert list(tmp_path.iterdir()) == []


def test_every_problem_of_a_recipe_is_a_line(capsys, tmp_path, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    (tmp_path / "bad.yaml").write_text(
        "run: {name: a, stpes: 3}\nmodel: {kind: mae, encoder: {size: S/8}}\ndata: {train: [{path: a.zarr}], crop: 8}\n"
    )
    assert call("train", str(tmp_path / "bad.yaml")) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("error: ") for line in lines)
    assert any("run.stpes" in line and "steps" in line for line in lines)


@pytest.mark.parametrize(
    ("raised", "code", "shown"),
    [
        (UserError("a.yaml: wrong"), 2, "error: a.yaml: wrong\n"),
        (RunFailed("the disk is full"), 1, "error: the disk is full\n"),
        (KeyboardInterrupt(), 130, ""),
        (
            ModuleNotFoundError("No module named 'tensorboard'", name="tensorboard"),
            2,
            'error: tensorboard is not installed; pip install "vitrail[tensorboard]"\n',
        ),
        (ModuleNotFoundError("No module named 'x'", name="x.y"), 2, "error: x.y is not installed; pip install x\n"),
    ],
)
def test_what_a_run_raises_becomes_a_sentence_and_a_code(trained, capsys, raised, code, shown):
    trained.raises = raised
    assert call("train", "a.yaml") == code
    assert capsys.readouterr() == ("", shown)


@pytest.mark.parametrize("bug", [ZeroDivisionError("1 / 0"), ModuleNotFoundError("no", name="vitrail.nowhere")])
def test_a_bug_keeps_its_traceback(trained, bug):
    trained.raises = bug
    with pytest.raises(type(bug)):
        cli.main(["train", "a.yaml"])


def test_other_ranks_are_silent_unless_it_is_about_one_of_them(trained, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    trained.raises = UserError("a.yaml: wrong")
    assert call("train", "a.yaml") == 2
    assert capsys.readouterr().err == ""
    trained.raises = UserError("rank 3: no such file")
    assert call("train", "a.yaml") == 2
    assert capsys.readouterr().err == "error: rank 3: no such file\n"


def test_a_closed_pipe_is_quiet():
    writer = subprocess.Popen(
        [sys.executable, "-m", "vitrail", "schema"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    writer.stdout.close()
    assert writer.stderr.read() == ""
    writer.stderr.close()
    assert writer.wait(timeout=LONG) == 1


def test_a_training_goes_on_when_nobody_reads_it_any_more(volume, tmp_path):
    """As behind `| head -1`, or in a terminal that was closed: both pipes end before the first line."""
    recipe = write_recipe(tmp_path / "a.yaml", tiny_recipe(volume, tmp_path / "run", run__steps=6, log__report=True))
    words = [sys.executable, "-m", "vitrail", "train", recipe]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment())
    process.stdout.close()
    process.stderr.close()
    assert process.wait(timeout=LONG) == 0
    end_line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert (end_line["event"], end_line["reason"], end_line["step"]) == ("end", "done", 6)
    assert (tmp_path / "run" / "checkpoints" / "step-00000006").is_dir()
    assert (tmp_path / "run" / "report.html").is_file()


def test_descriptors_that_are_closed_at_the_start_are_filled(tmp_path):
    """Otherwise a checkpoint might get the number of standard error, and a warning of PyTorch's be written into it."""
    script = (
        "import os, sys\n"
        "for number in (0, 1, 2): os.close(number)\n"
        "sys.stdout = sys.stderr = None\n"
        "from vitrail.cli import words as streams\n"
        "streams.settle()\n"
        f"with open({str(tmp_path / 'told')!r}, 'w') as file:\n"
        "    file.write(str(file.fileno()))\n"
        "print('lost', flush=True)\n"
        "print('lost', file=sys.stderr, flush=True)\n"
        "streams.leave()\n"
    )
    assert subprocess.run([sys.executable, "-c", script], env=environment()).returncode == 0
    assert int((tmp_path / "told").read_text()) > 2


def test_a_process_ends_in_order_and_before_the_interpreter_does():
    """In the interpreter's own end, threads of gloo that held a tensor aborted ranks that had done all."""
    script = (
        "import atexit, sys\n"
        "from vitrail.cli.words import end\n"
        "class Late:\n"
        "    def __del__(self): sys.__stdout__.write('too late\\n')\n"
        "late = Late()\n"
        "atexit.register(print, 'in order')\n"
        "sys.stdout.write('buffered, ')\n"
        "end(75)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment())
    assert (ended.returncode, ended.stdout, ended.stderr) == (75, "buffered, in order\n", "")


def test_a_crash_in_compiled_code_tells_where_it_was(tmp_path):
    script = (
        "import resource, signal\n"
        "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
        "from vitrail.cli import words as streams\n"
        "streams.settle()\n"
        "def in_a_kernel(): signal.raise_signal(signal.SIGSEGV)\n"
        "in_a_kernel()\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script],
        env=environment(PYTHONFAULTHANDLER=""),
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == -signal.SIGSEGV
    assert "in in_a_kernel" in ended.stderr


# ---------------------------------------------------------------- the verbs


def test_train_hands_its_words_on_and_prints_the_path_of_the_report(trained, capsys):
    assert call("train", "a.yaml", "run.steps=3", "--fresh", "data.batch=4/rank") == 0
    options = {
        "overrides": ["run.steps=3", "data.batch=4/rank"],
        "fresh": True,
        "quiet": False,
        "trust": False,
        "other_data": False,
        "change": False,
    }
    assert trained.calls == [("a.yaml", options)]
    assert capsys.readouterr() == ("runs/a/report.html\n", "")


def test_a_run_without_a_report_prints_its_folder(trained, capsys):
    trained.outcome = training.Outcome(0, Path("runs/a"), 3, "done", report=False)
    assert call("train", "a.yaml") == 0
    assert capsys.readouterr() == ("runs/a\n", "")


def test_quiet_is_handed_on(trained):
    assert call("train", "a.yaml", "--quiet") == 0
    assert trained.calls[0][1]["quiet"] is True


def test_a_stopped_run_exits_with_75_and_says_how_to_go_on(trained, capsys):
    trained.outcome = training.Outcome(75, Path("runs/a"), 7, "signal")
    assert call("train", "a.yaml") == 75
    shown = capsys.readouterr()
    assert shown.out == "runs/a/report.html\n"
    assert shown.err == "stopped at step 7 (signal); continue with: vitrail train runs/a\n"


def test_only_the_first_rank_prints(trained, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert call("train", "a.yaml") == 0
    assert capsys.readouterr() == ("", "")


def test_plugins_are_imported_first(trained, tmp_path, monkeypatch):
    (tmp_path / "my_plugin.py").write_text("import sys\nsys.plugin_was_here = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "plugin_was_here", False, raising=False)
    trained.raises = UserError("stop here")
    assert call("train", "a.yaml", "--plugin", "my_plugin") == 2
    assert sys.plugin_was_here


def test_eval_prints_scores_and_strict_json(trained, monkeypatch, capsys):
    asked = []

    def evaluate(run, **options):
        asked.append((run, options))
        return {"step": 3, "metrics": {"mse": 0.25, "mse_over_variance": float("nan")}}

    monkeypatch.setattr(training, "evaluate", evaluate)
    assert call("eval", "runs/a", "--checkpoint", "3", "--samples", "9", "--weights", "raw", "--json") == 0
    options = {"checkpoint": 3, "samples": 9, "weights": "raw", "overrides": ()}
    assert asked == [(Path("runs/a"), options)]
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["metrics"] == {
        "mse": 0.25,
        "mse_over_variance": None,
    }
    assert call("eval", "runs/a") == 0
    assert "mse: 0.25\n" in capsys.readouterr().out


def test_report_prints_the_path_of_the_page(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"event": "train", "time": 1.0, "step": 1, "loss": 0.5}\n')
    assert call("report", str(tmp_path)) == 0
    assert capsys.readouterr().out == f"{tmp_path}/report.html\n"
    assert (tmp_path / "report.html").is_file()
    assert call("report", str(tmp_path), "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["report"], facts["loss"]) == (f"{tmp_path}/report.html", 0.5)


def test_a_volume_is_generated_inspected_and_not_overwritten(tmp_path, capsys):
    path = str(tmp_path / "deep" / "em.zarr")
    small = ("--shape", "16,16,24", "--levels", "2", "--chunk", "8")
    assert call("data", "generate", path, *small) == 0
    assert capsys.readouterr().out == f"{path}\n"
    assert call("data", "generate", path, *small) == 2
    assert "--force" in capsys.readouterr().err
    assert call("data", "generate", path, *small, "--force", "--seed", "1", "--json") == 0
    made = json.loads(capsys.readouterr().out)
    assert made["shape"] == [16, 16, 24]

    picture = tmp_path / "em.png"
    assert call("data", "inspect", path, "--picture", str(picture)) == 0
    out = capsys.readouterr().out
    assert "shape: 16, 16, 24\n" in out
    assert "histogram" not in out
    assert picture.is_file()
    assert call("data", "inspect", path, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["shape"], facts["chunk"], len(facts["levels"])) == ([16, 16, 24], [8, 8, 8], 2)


def test_doctor_prints_what_it_found_and_fails_with_2(monkeypatch, capsys):
    from vitrail.launch import machine

    checks = [
        {"name": "zarr", "status": "ok", "detail": "fine", "remedy": ""},
        {"name": "gloo", "status": "warn", "detail": "slow", "remedy": "do this"},
    ]
    monkeypatch.setattr(machine, "doctor", lambda: checks)
    assert call("doctor") == 0
    assert capsys.readouterr().out.splitlines() == ["ok    zarr  fine", "warn  gloo  slow", "            -> do this"]
    checks[0]["status"] = "fail"
    assert call("doctor", "--json") == 2
    told = json.loads(capsys.readouterr().out)
    assert told["checks"] == checks
    assert "python" in told["environment"]


def test_schema_goes_to_a_file(tmp_path, capsys):
    path = tmp_path / "schema.json"
    assert call("schema", "--out", str(path)) == 0
    assert capsys.readouterr().out == f"{path}\n"
    assert json.loads(path.read_text())["title"] == "vitrail recipe"


def test_the_python_api_stays_callable():
    """Importing a room of the package must not hide a function of the same name."""
    program = (
        "import vitrail; vitrail.train, vitrail.load; import vitrail.training.run; "
        "print({name for name in vitrail.__all__ if not callable(getattr(vitrail, name))})"
    )
    assert python("-c", program).stdout == "set()\n"


# ---------------------------------------------------------------- pages


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_a_page_lead_somewhere(page):
    for target in re.findall(r"(?<!!)\[[^\]]+\]\(([^):]+)\)", page.read_text(encoding="utf-8")):
        name, _, anchor = target.partition("#")
        place = page.parent / name if name else page
        assert place.exists(), target
        assert not anchor or anchor in anchors_of(place), target


def anchors_of(page):
    """What links to the headings of a page end with."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", sorted((ROOT / "configs").rglob("*.yaml")), ids=lambda path: path.stem)
def test_recipes_are_valid_and_give_their_command(path):
    from vitrail.recipe import load_recipe

    load_recipe(path)
    header = [line for line in path.read_text().splitlines() if line.startswith("#")]
    commands = [f"vitrail {verb} {path.relative_to(ROOT)}" for verb in ("train", "bench")]
    assert any(command in line for line in header for command in commands)


def test_the_reference_of_recipes_is_written_from_the_code():
    """`python docs/tables.py` writes it anew."""
    tables = runpy.run_path(str(ROOT / "docs" / "tables.py"))
    page = tables["PAGE"].read_text(encoding="utf-8")
    assert tables["write"](page) == page
    headings = re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    (schedules,) = [text for heading, text in headings if heading == "schedule"]
    for name in kinds.BUILT_IN["schedule"]:
        assert f"`{name}`" in schedules.partition("<!--")[0]
    alike = {"UniformTokens"}  # it has no key but its kind
    assert set(tables["places_of"](page)) | alike == set(tables["definitions"]())
    for line in (
        "| `crop` | whole number or list of whole numbers | *required* | size of a sample in voxels, one number",
        "| `hang_limit` | text | `60s` |",
        "| `smooth` | list of numbers | `[0.0, 1e-6]` |",
        "| `tokens` | mapping or [tokens: adaptive](#tokens-adaptive) | `{}` |",
    ):
        assert line in page


def test_the_pages_of_the_command_line_and_of_python_are_written_from_the_code():
    """`python docs/tables.py` writes them anew."""
    tables = runpy.run_path(str(ROOT / "docs" / "tables.py"))
    for place, write in (("COMMANDS", "write_commands"), ("API", "write_api")):
        assert tables[place].read_text(encoding="utf-8") == tables[write](), tables[place].name
    for verb in VERBS:
        assert f"## vitrail {verb}\n" in tables["write_commands"]()
    assert "| `--other-data` | Continue although the data are not" in tables["write_commands"]()


# ---------------------------------------------------------------- make


@pytest.fixture
def venv(tmp_path):
    """A made environment whose Python only says yes or no."""
    (tmp_path / "bin").mkdir()
    (tmp_path / ".created").touch()

    def answer(code: int) -> Path:
        program = tmp_path / "bin" / "python"
        program.write_text(f"#!/bin/sh\nexit {code}\n")
        program.chmod(0o755)
        return tmp_path

    return answer


def make(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["make", *words], cwd=ROOT, capture_output=True, text=True, timeout=LONG)


def test_an_install_is_done_once_and_a_failed_one_again(venv):
    failed = make("install", f"VENV={venv(1)}")
    assert failed.returncode != 0
    assert not (venv(0) / ".installed").exists()
    assert "pip install" in make("install", f"VENV={venv(0)}").stdout
    assert "pip install" not in make("install", f"VENV={venv(1)}").stdout


def test_the_install_of_the_tests_serves_the_demo(venv):
    assert make("lint", f"VENV={venv(0)}").returncode == 0
    assert "pip install" not in make("-n", "install", f"VENV={venv(0)}").stdout


def test_a_missing_python_is_one_sentence(tmp_path):
    done = make("install", f"VENV={tmp_path / 'venv'}", "PYTHON=")
    assert done.returncode != 0
    assert "Python 3.11 or newer" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_while_it_still_imports_ends_as_a_stopped_run(volume, tmp_path, number):
    """Nothing is saved yet, so there is nothing to lose, and a scheduler may start it again."""
    recipe = write_recipe(tmp_path / "a.yaml", tiny_recipe(volume, tmp_path / "run"))
    process = start(sys.executable, "-m", "vitrail", "train", recipe)
    try:
        maps = Path(f"/proc/{process.pid}/maps")
        deadline = time.monotonic() + LONG
        while "libtorch" not in maps.read_text() and time.monotonic() < deadline:
            time.sleep(0.005)
        process.send_signal(number)
        assert process.wait(timeout=LONG) == 75
    finally:
        end(process)
