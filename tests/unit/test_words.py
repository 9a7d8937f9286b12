"""How the command line reads words, and hands them on."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from vitrail import cli
from vitrail.cli import words
from vitrail.cli.words import note, print_rows, print_tree, read_pair, read_sizes, refuse_options
from vitrail.errors import UserError
from vitrail.infer import sample
from vitrail.infer.neighbours import knn


def test_options_without_an_effect_are_refused():
    refuse_options({"--real": None, "--classes": []}, "nothing is compared", "--fid")
    with pytest.raises(UserError, match=r"^--real: nothing is compared, and this is for --fid; leave it out"):
        refuse_options({"--classes": None, "--real": "folder"}, "nothing is compared", "--fid")
    with pytest.raises(UserError, match="--batch"):
        refuse_options({"--batch": 0}, "nothing is compared", "--fid")


def test_one_number_stands_for_a_cube():
    assert read_sizes("32") == (32, 32, 32)
    assert read_sizes("8, 16,24") == (8, 16, 24)
    for text in ("8,16", "-8", "8.5", "", "8,16,24,32"):
        with pytest.raises(UserError, match="one whole number or three"):
            read_sizes(text)


def test_pairs_are_two_numbers():
    assert read_pair("0.2, 0.8", "--interval") == (0.2, 0.8)
    for text in ("0.2", "a,b", "1,2,3"):
        with pytest.raises(UserError, match=r"^--interval"):
            read_pair(text, "--interval")


def test_nothing_that_terminals_obey_is_printed(capsys):
    """Names in files of strangers may clear the screen, rename the window or write over lines."""
    evil = "a\x1b]0;title\x07\x1b[2Jb\rc\x9bd\te"
    note(evil)
    print_rows([{"name": evil, "size": 1}], as_json=False)
    print_tree({"facts": {evil: evil}, "rows": [{"name": evil}], "one": [evil]}, as_json=False)
    print_rows([{"name": evil}], as_json=True)
    shown = capsys.readouterr()
    assert not {"\x1b", "\x07", "\r", "\x9b"} & set(shown.out + shown.err)
    assert shown.err == "abcd\te\n"
    assert str(UserError(f"{evil}: wrong")) == "abcd\te: wrong"


def test_every_wish_for_samples_is_handed_on(monkeypatch, capsys, tmp_path):
    told = {}

    def sample_run(run, **wishes):
        told.update(wishes, run=str(run))
        return {"notes": [], "folder": "made"}

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sample, "sample_run", sample_run)
    numbers = {"--number": 3, "--steps": 4, "--seed": 5, "--batch": 6, "--checkpoint": 7, "--guidance": 2.5}
    texts = {"--classes": "a,b", "--sampler": "heun", "--weights": "raw", "--format": "npy"}
    words = [str(word) for pair in (numbers | texts).items() for word in pair]
    with pytest.raises(SystemExit) as ended:
        cli.main(["sample", str(tmp_path), *words, "--interval", "0.2,0.8", "--latents", "--json"])
    assert not ended.value.code, capsys.readouterr().err
    expected = {option.strip("-"): value for option, value in (numbers | texts).items()}
    expected |= {"run": str(tmp_path), "interval": (0.2, 0.8), "latents": True, "trust": False, "quiet": False}
    assert expected.items() <= told.items()


@pytest.mark.parametrize("seconds", [0, 10, 1000])
def test_a_rank_waits_until_the_first_has_spoken(seconds, tmp_path, monkeypatch, capfd) -> None:
    """torchrun ends all ranks when one ends: the sentence of the first was lost where another was much quicker."""
    mine, first = tmp_path / "1" / "error.json", tmp_path / "0" / "error.json"
    for path in (mine, first):
        path.parent.mkdir()
    clock = [0.0]

    def sleep(time: float) -> None:
        assert not mine.exists()
        clock[0] += time
        if clock[0] >= seconds:
            first.write_text("{}")

    monkeypatch.setattr(words, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    monkeypatch.setattr(words, "is_chief", lambda: False)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(mine))
    for name, value in {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    words.tell("data.batch: 3 samples")
    assert min(seconds, words.FIRST_SPEAKS) <= clock[0] <= words.FIRST_SPEAKS + 1
    assert mine.exists()
    assert capfd.readouterr().err == ""  # one of each host is enough


SLOW_END = """
import signal, threading, time
threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
threading.Thread(target=lambda: (time.sleep(0.5), print("late"))).start()
atexit.register(print, "bye")
"""


@pytest.mark.parametrize(
    ("before", "code", "told"),
    [
        ("", "'mend it'", (1, "", "mend it\n")),  # as sys.exit() prints
        ("import ctypes; ctypes.CDLL(None).printf(b'of a library')", "0", (0, "of a library", "")),
        ("print('x'); sys.stdout.close()", "75", (75, "x\n", "")),
        (SLOW_END, "75", (75, "bye\n", "")),  # interrupted while it waits for a thread
    ],
)
def test_the_end_of_a_process_loses_neither_words_nor_its_code(before: str, code: str, told: tuple) -> None:
    lines = f"import atexit, os, sys\nfrom vitrail.cli.words import end\n{before}\nend({code})"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    ended = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, env=env, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == told


def test_from_python_too_no_count_is_below_one_and_no_text_a_guidance() -> None:
    for name in ("neighbours", "batch", "number"):
        with pytest.raises(UserError, match=f"^{name}: 0 must be at least 1"):
            knn("no run", "no recipe", **{name: 0})
    with pytest.raises(UserError, match=r"^guidance: .* must be one number, or several different ones"):
        sample.Wishes(guidance="1,2").each()
