"""The progress line on terminals of every width, in pipes, and when the stream goes away."""

import contextlib
import io
import math
import os
import pty
import re
import sys
from itertools import pairwise

import pytest

from vitrail.training.journal import Progress

FIELDS = {
    "loss": 0.4321,
    "lr": 2e-3,
    "samples_per_s": 123.4,
    "tokens_per_s": 12345.6,
    "mfu": 0.341,
    "tflops": 337.0,
    "memory_gib": 12.25,
    "data_wait": 0.03,
}


class Clock:
    """A clock that the test turns."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


@pytest.fixture
def clock():
    return Clock()


def run_plain(clock, steps, seconds, total=100, start=0):
    stream = io.StringIO()
    with Progress(total, start, stream=stream, clock=clock) as progress:
        for step in steps:
            clock.now += seconds
            progress.update(step, FIELDS)
    return stream.getvalue().splitlines()


def test_pipe_gets_first_last_and_one_line_every_few_seconds(clock):
    lines = run_plain(clock, range(1, 101), seconds=1.0)
    steps = [int(re.match(r"step (\d+)/100 ", line).group(1)) for line in lines]
    assert steps[0] == 1
    assert steps[-1] == 100
    assert len(steps) == len(set(steps))
    assert all(b - a >= 5 for a, b in pairwise(steps[:-1]))


def test_pipe_gets_the_last_update_of_a_run_that_stops_early(clock):
    lines = run_plain(clock, range(1, 4), seconds=0.1)
    assert [line.split()[1] for line in lines] == ["1/100", "3/100"]


def test_pipe_gets_no_control_characters(clock):
    stream = io.StringIO()
    with Progress(10, stream=stream, clock=clock) as progress:
        progress.update(1, FIELDS)
        progress.note("\x1b[31mred\x1b[0m \x1b]0;title\x07[bold]text\r")
    text = stream.getvalue()
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", text)
    assert text.isascii()
    assert "red [bold]text\n" in text


def test_line_has_human_units_and_time_left(clock):
    last = run_plain(clock, range(1, 51), seconds=2.0)[-1]
    for words in (
        "loss 0.4321",
        "lr 0.002",
        "123 samples/s",
        "12.3k tokens/s",
        "MFU 34.1%",
        "12.2 GiB",
        "data wait 3%",
    ):
        assert words in last
    assert "TFLOP" not in last
    assert "1:40 left" in last


def test_tflops_stand_in_for_a_missing_mfu(clock):
    with Progress(10, clock=clock, stream=io.StringIO()) as progress:
        progress.update(1, FIELDS | {"mfu": None})
        assert "337 TFLOP/s" in progress.render(200).plain
        assert "MFU" not in progress.render(200).plain


def test_time_left_forgets_the_slow_first_stretch(clock):
    with Progress(100, 0, clock=clock, stream=io.StringIO()) as progress:
        clock.now += 60
        progress.update(1)
        for step in (2, 3, 4):
            clock.now += 1
            progress.update(step)
        assert progress.seconds_left() == pytest.approx(96)


def test_time_left_after_a_resume_counts_only_new_steps(clock):
    with Progress(100, 90, clock=clock, stream=io.StringIO()) as progress:
        clock.now += 3
        progress.update(93)
        assert progress.seconds_left() == pytest.approx(7)


def test_going_back_to_an_earlier_step_gives_no_negative_time(clock):
    with Progress(100, clock=clock, stream=io.StringIO()) as progress:
        for step in (10, 20, 15, 16):
            clock.now += 1
            progress.update(step, {})
        assert progress.seconds_left() == pytest.approx(84)


@pytest.mark.parametrize("width", [*range(0, 65), 79, 80, 119, 200])
@pytest.mark.parametrize("total", [0, 1300])
def test_line_fits_every_width(clock, width, total):
    with Progress(total, clock=clock, stream=io.StringIO()) as progress:
        clock.now += 1
        progress.update(650, FIELDS | {"loss": math.nan})
        line = progress.render(width)
        assert line.cell_len <= max(width, 1)
        assert "\n" not in line.plain
        if width >= 28:
            assert "650" in line.plain
            assert "loss nan" in line.plain
        assert ("━" in line.plain) or not (total > 0 and width >= 60)


def test_bar_is_full_at_the_end_and_never_longer(clock):
    for step, filled in ((0, 0), (50, 14), (100, 28), (250, 28)):
        with Progress(100, clock=clock, stream=io.StringIO()) as progress:
            progress.update(step, {})
            assert progress.render(120, ascii_only=True).plain.count("#") == filled


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf, 1e-12, 1e12, 0.0, None, "broken"])
def test_odd_values_do_not_break_the_line(clock, loss):
    odd = dict.fromkeys(FIELDS, math.nan) | {"loss": loss, "unknown": object()}
    with Progress(0, clock=clock, stream=io.StringIO()) as progress:
        progress.update(3, odd)
        assert "step 3" in progress.render(80).plain


def test_other_ranks_print_nothing(clock, capsys):
    terminal = Terminal()
    with Progress(10, enabled=False, stream=terminal, clock=clock) as progress:
        progress.update(1, FIELDS)
        progress.note("hello")
    assert terminal.getvalue() == ""
    assert capsys.readouterr() == ("", "")


def test_default_stream_is_standard_error(clock, capsys):
    with Progress(10, clock=clock) as progress:
        progress.update(1, FIELDS)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("step 1/10")


def test_terminal_shows_one_live_line_and_notes_above_it(clock, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    terminal = Terminal()
    before = sys.stdout, sys.stderr
    with Progress(10, stream=terminal, clock=clock) as progress:
        for step in range(1, 11):
            clock.now += 1
            progress.update(step, FIELDS)
        progress.note("saved [bold]checkpoints/step-10[/bold]")
    assert (sys.stdout, sys.stderr) == before
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    assert "saved [bold]checkpoints/step-10[/bold]" in text
    assert "10/10  loss 0.4321" in text
    assert text.count("\n") <= 3  # the live line is drawn over itself: no line is added by an update


def test_dumb_terminal_gets_plain_lines(clock, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    terminal = Terminal()
    with Progress(10, stream=terminal, clock=clock) as progress:
        progress.update(1, FIELDS)
    assert "\x1b" not in terminal.getvalue()
    assert terminal.getvalue().startswith("step 1/10")


def test_closed_streams_do_not_stop_the_run(clock):
    stream = io.StringIO()
    with Progress(10, stream=stream, clock=clock) as progress:
        progress.update(1, FIELDS)
        stream.close()
        clock.now += 60
        progress.update(2, FIELDS)
        progress.note("gone")


def test_hung_up_terminal_does_not_stop_the_run(clock, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    before = sys.stdout, sys.stderr
    master, slave = pty.openpty()
    terminal = open(slave, "w", encoding="utf-8")  # noqa: SIM115 (its close fails, which is the point)
    with Progress(10, stream=terminal, clock=clock) as progress:
        progress.update(1, FIELDS)
        os.close(master)  # the terminal window was closed: writes now fail
        for step in (2, 3):
            clock.now += 60
            progress.update(step, FIELDS)
        progress.note("gone")
    with contextlib.suppress(OSError):
        terminal.close()
    assert (sys.stdout, sys.stderr) == before
