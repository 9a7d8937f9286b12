"""Pages as their readers use them: every block in order, pasted into a shell that stands in one folder.

A process that has imported PyTorch once forks for each command of the shell. `vitrail`, `python` and `torchrun` on the
PATH are small programs that hand their words, folder, variables and streams over to it, so commands are read by the
real shell and the real command line. Trainings and the like are made short by words that are added here behind those of
the page (`shortened`), and by nothing else.

PASTED_TIMES=FILE tells which command took how many seconds of the processor.
"""

import ast
import contextlib
import gc
import importlib
import itertools
import json
import os
import re
import runpy
import select
import shlex
import signal
import socket
import stat
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest
import typer
from support import LONG, ROOT, end, environment, start

from vitrail import cli

FENCE = re.compile(r"^([ \t]*)```(\w*)[^\n]*\n(.*?)^\1```[ \t]*$", re.MULTILINE | re.DOTALL)
SHELLS = ("sh", "bash", "console")
KEYS = ("data.batch=2/rank", "eval.samples=2", "log.pictures=off", "log.report=false", "run.device=cpu")
CLIENT = """#!{python} -ISE
import os, socket, sys
link = socket.socket(socket.AF_UNIX)
link.connect({address!r})
words = "\\0".join([{name!r}, os.getcwd(), str(len(sys.argv) - 1), *sys.argv[1:]])
words += "".join(f"\\0{{name}}={{value}}" for name, value in os.environ.items())
data = words.encode(errors="surrogateescape")
socket.send_fds(link, [len(data).to_bytes(8, "little")], [0, 1, 2])
link.sendall(data)
told = link.recv(1)
sys.exit(told[0] if told else 1)
"""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int  # of its first line of text
    language: str
    text: str


def pages() -> list[str]:
    """The pages that are pasted from, as paths from the root."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [path.relative_to(ROOT).as_posix() for path in found]


def blocks_of(page: str) -> list[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, match.start()) + 2, match[2], textwrap.dedent(match[3]))
        for match in FENCE.finditer(text)
    ]


def commands_of(block: Block) -> list[tuple[int, str]]:
    """The commands of a shell's block with their lines; what a console has shown is left out."""
    lines = list(enumerate(block.text.splitlines(), block.line))
    if block.language == "console":
        lines = [(number, line[2:]) for number, line in lines if line.startswith(("$ ", "> "))]
    found: list[tuple[int, str]] = []
    begun = ""
    for number, line in lines:
        at, command = (number, line) if not begun else (found.pop()[0], f"{begun}\n{line}")
        if not command.strip() or command.lstrip().startswith("#"):
            continue
        found.append((at, command))
        begun = command if _goes_on(command) else ""
    return found


def _goes_on(command: str) -> bool:
    """Whether the shell waits for another line: behind a backslash, in quotes, loops and here-documents."""
    if command.endswith("\\"):
        return True
    if not re.search(r"['\"(){}]|<<|\b(do|then|in)\b", command):
        return False
    read = subprocess.run(["bash", "-n", "-c", command], capture_output=True, text=True)
    return any(words in read.stderr for words in ("unexpected end of file", "unexpected EOF", "end-of-file"))


def is_signature(block: Block) -> bool:
    """Whether a block of Python only shows how something is called, as a reference does."""
    try:
        body = ast.parse(block.text).body
    except SyntaxError:
        return False
    return all(isinstance(part, ast.FunctionDef) and ast.unparse(part.body[-1]) == "..." for part in body)


def bare(command: str) -> str:
    """A command without the comment behind it, on one line."""
    return re.sub(r"\s+#\s.*$", "", re.sub(r"\\\n\s*", "", command), flags=re.MULTILINE).strip()


# ---------------------------------------------------------------- what makes commands short


def shortened(words: list[str]) -> list[str]:
    """The words of a `vitrail` command, with more behind them that make it a matter of seconds."""
    verb = " ".join(words[:2]) if words[:1] == ["data"] else words[0] if words else ""
    if "-h" in words or "--help" in words:
        return words
    more = {
        "train": ["--quiet", *keys_of(words[1:2], words)],
        "data generate": [] if "digits" in words else ["--shape", "30,64,64" if "slices" in words else "32,36,160"],
        "view": ["--no-browser", "--port", "0"],
        "data bench": ["--seconds", "0.1"],
        "sample": ["--steps", "2", "--number", "20", "--quiet"],
        "probe": ["--steps", "2", "--number", "40", "--quiet"],
        "bench": [
            "--windows",
            "1",
            "--steps",
            "1",
            "--warm-up",
            "1",
            *(["--ranks", "2"] if "--ranks" in words else []),
        ],
        "tune": ["--most", "8" if "--multiple" in words else "2"],
    }
    smaller = os.environ.get("PASTED_SMALLER", "").split() if verb in ("train", "bench", "tune") else []
    return [*words, *more.get(verb, []), *smaller]


def keys_of(recipe: list[str], words: Sequence[str]) -> list[str]:
    """Keys for a short training, beside those of the page; one that is there already goes two steps further."""
    from vitrail.recipe.load import find_recipe

    given = {word.partition("=")[0] for word in words}
    done = 0
    with contextlib.suppress(Exception):  # the command will say what is wrong
        run = find_recipe(*recipe, [word for word in words if re.match(r"run\.\w+=", word)]).run
        lines = Path(run.dir or f"runs/{run.name}", "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        done = 0 if "--fresh" in words else max(json.loads(line).get("step", 0) for line in lines)
    if recipe and Path(recipe[0]).is_dir():
        return [f"run.steps={done + 2}"] if "run.steps" in given else []
    return [*(key for key in KEYS if key.partition("=")[0] not in given), f"run.steps={done + 2}"]


# ---------------------------------------------------------------- the process that forks


NEEDED = ("matplotlib.pyplot", "tensorboard.compat.proto.event_pb2", "tensorstore", "torch", "vitrail.bench")
NEEDED += (
    "torch.distributed.run",
    "vitrail.cost.plan",
    "vitrail.infer.predict",
    "vitrail.infer.sample",
    "vitrail.training.run",
)


def serve(address: str) -> NoReturn:
    """Import what commands need, then do one after another's in a fork of this process, until standard input ends."""
    for name in NEEDED:
        importlib.import_module(name)
    gc.freeze()  # else the forks copy all of it when they collect
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(address)
    listening.listen(64)
    print("ready", flush=True)
    running: dict[int, socket.socket] = {}  # process -> who waits for its end
    while True:
        ready, _, _ = select.select([listening, sys.stdin, *running.values()], [], [], 0.02 if running else 5)
        if sys.stdin in ready:
            for number in running:
                os.kill(number, signal.SIGKILL)
            os._exit(0)
        for number, link in list(running.items()):
            if link in ready and _has_gone(link):
                os.kill(number, signal.SIGKILL)
        while running and (ended := os.wait4(-1, os.WNOHANG))[0]:
            number, status, usage = ended
            code = os.waitstatus_to_exitcode(status)
            if "PASTED_TIMES" in os.environ:
                with open(os.environ["PASTED_TIMES"], "a") as file:
                    print(number, round(usage.ru_utime + usage.ru_stime, 1), file=file)
            with running.pop(number) as link, contextlib.suppress(OSError):
                link.sendall(bytes([code if code >= 0 else 128 - code]))
        if listening in ready:
            link, _ = listening.accept()
            head, streams, _, _ = socket.recv_fds(link, 8, 3)
            number = os.fork()
            if number == 0:
                listening.close()
                _carry_out(link, int.from_bytes(head, "little"), streams)
            running[number] = link
            for stream in streams:
                os.close(stream)


def _has_gone(link: socket.socket) -> bool:
    """Whether the program that waits was ended, and has not merely sent words that the fork will read."""
    try:
        return not link.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False


def _carry_out(link: socket.socket, size: int, streams: list[int]) -> NoReturn:
    """Be the program that was called."""
    data = b""
    while len(data) < size:
        data += link.recv(size - len(data))
    link.close()
    name, folder, count, *rest = data.decode(errors="surrogateescape").split("\0")
    words, variables = rest[: int(count)], rest[int(count) :]
    os.environ.clear()
    os.environ.update(variable.split("=", 1) for variable in variables)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(folder)
    if "PASTED_TIMES" in os.environ:
        with open(os.environ["PASTED_TIMES"], "a") as file:
            print(os.getpid(), name, *words, file=file)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    code: Any = 1
    try:
        _PROGRAMS[name](words)
        code = 0
    except SystemExit as ended:
        code = ended.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except BaseException:
        import traceback

        traceback.print_exc()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _interrupt(*_: Any) -> None:
    """Press Ctrl-C where a command that shows something waits for it."""
    if "_wait" in getattr(signal.getsignal(signal.SIGINT), "__qualname__", ""):
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.raise_signal(signal.SIGINT)


def _vitrail(words: list[str]) -> None:
    import vitrail.cli

    sys.argv = ["vitrail", *shortened(words)]
    if words[:1] == ["view"]:
        signal.signal(signal.SIGALRM, _interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)
    sys.executable = os.environ["PYTHON_EXEC"]  # what it starts itself is forked, too
    vitrail.cli.console()


def _shorten_calls() -> None:
    """Make trainings and measurements short that code in Python asks for."""
    import vitrail
    import vitrail.bench
    from vitrail.training import run

    train, bench = run.train, vitrail.bench.bench

    def short_train(recipe: Any, overrides: Sequence[str] = (), **options: Any) -> Any:
        return train(recipe, overrides=[*overrides, *keys_of([recipe], overrides)], **options)

    def short_bench(recipe: Any, overrides: Sequence[str] = (), **options: Any) -> Any:
        return bench(recipe, overrides, windows=1, steps=1, warm_up=1, **options)

    run.train = vitrail.train = short_train
    vitrail.bench.bench = short_bench


def _python(words: list[str]) -> None:
    while words and words[0] in ("-u", "-I", "-S", "-E"):
        words = words[1:]
    if words[:2] == ["-m", "vitrail"]:
        return _vitrail(words[2:])
    _shorten_calls()
    if words[:1] == ["-m"]:
        sys.argv = words[1:]
        sys.path.insert(0, "")
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[:1] in (["-c"], ["-"], []):
        code = words[1] if words[:1] == ["-c"] else sys.stdin.read()
        sys.argv = ["-c", *words[2:]]
        sys.path.insert(0, "")
        exec(compile(code, "<pasted>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = words
        sys.path.insert(0, "")
        runpy.run_path(words[0], run_name="__main__")


def _torchrun(words: list[str]) -> None:
    """The real one, whose ranks are forked, too."""
    from torch.distributed.run import main

    main(words)


_PROGRAMS = {"vitrail": _vitrail, "python": _python, "python3": _python, "torchrun": _torchrun}


class Shell:
    """Runs the blocks of a page in a folder."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.programs = place / "bin"
        self.programs.mkdir()
        address = str(place / "s")
        for name in _PROGRAMS:
            program = self.programs / name
            program.write_text(CLIENT.format(python=sys.executable, address=address, name=name))
            program.chmod(stat.S_IRWXU)
        words = [sys.executable, Path(__file__), "serve", address]
        self.server = start(*words, stdin=subprocess.PIPE, cwd=place, env=environment())
        assert self.server.stdout is not None
        if self.server.stdout.readline() != "ready\n":
            raise AssertionError(self.server.communicate()[0])

    def close(self) -> None:
        end(self.server)

    def variables(self, folder: Path) -> dict[str, str]:
        """Those that a command finds: its folders are temporary ones, and the network is not asked for anything."""
        home = folder.parent / "home"
        (home / "tmp").mkdir(parents=True, exist_ok=True)
        path = os.pathsep.join([str(self.programs), str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        own = {"HOME": str(home), "TMPDIR": str(home / "tmp"), "PATH": path, "HF_HUB_OFFLINE": "1", "MPLBACKEND": "agg"}
        return environment(**own, PYTHON_EXEC=str(self.programs / "python"))

    def paste(self, steps: Sequence[tuple[str, str]], folder: Path, smaller: str = "") -> tuple[str, str] | None:
        """Run (where, command) one after another in one shell; where and why one failed."""
        lines = ["set -E -o pipefail", "trap 'exit $?' ERR"]
        for where, command in steps:
            lines += [f"echo {shlex.quote(MARK + where)}", command]
        told = folder.parent / "told.txt"
        variables = self.variables(folder) | {"PASTED_SMALLER": smaller}
        with told.open("w") as file:
            words = ["bash", "-c", "\n".join(lines)]
            shell = subprocess.Popen(
                words,
                cwd=folder,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
            try:
                code = shell.wait(timeout=LONG)
            finally:
                end(shell)
        if code == 0:
            return None
        last = told.read_text(encoding="utf-8", errors="replace").rpartition(MARK)[2]
        where, _, output = last.partition("\n")
        return where, f"ended with {code}:\n{output[-3000:]}"


MARK = "=== pasted: "


def parsed(line: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the command line takes of the `vitrail` in a line, if there is one; no verb runs."""
    words = shlex.split(line, comments=True)
    words = words[words.index("vitrail") + 1 :] if "vitrail" in words else []
    words = list(itertools.takewhile(lambda word: word not in (">", "|", "&&", ";", "&"), words))
    if not words:
        return {}
    given: list[dict[str, Any]] = []
    with monkeypatch.context() as patch:
        patch.setattr(typer.core.TyperCommand, "invoke", lambda self, ctx: given.append(ctx.params))
        patch.setenv("HOME", "/nowhere")  # an option that acts at once, such as one that installs, finds nothing there
        with pytest.raises(SystemExit) as ended:
            cli.main(words)
        assert not ended.value.code, line
        assert len(given) == (0 if "--help" in words else 1), line
    return given[0] if given else {}


if __name__ == "__main__":
    serve(sys.argv[2])
