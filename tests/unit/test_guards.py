"""Signals that ask for a stop, the clock that ends a hang, the lock and the log of a run folder."""

import errno
import json
import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from vitrail.errors import UserError
from vitrail.launch.world import World, agree_on_attempt
from vitrail.training import failures as guards
from vitrail.training import runfolder
from vitrail.training.failures import STOP_SIGNALS, Cause, StopRequest, Watchdog
from vitrail.training.runfolder import RunFolder, beside

LONG = 600.0  # seconds after which a test gives up


# ---------------------------------------------------------------- signals


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_is_noted_and_handlers_are_put_back(number: int) -> None:
    before = [signal.getsignal(n) for n in STOP_SIGNALS]
    with StopRequest() as stop:
        assert stop.signal is None
        os.kill(os.getpid(), number)
        assert stop.signal == number
    assert [signal.getsignal(n) for n in STOP_SIGNALS] == before


def test_under_nohup_the_end_of_a_terminal_is_no_stop() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.signal is None
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.signal == signal.SIGTERM
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_interrupt_ends_at_once() -> None:
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.signal == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_outside_the_main_thread_there_are_no_signals_to_watch() -> None:
    seen: list[Any] = []
    before = signal.getsignal(signal.SIGTERM)

    def use() -> None:
        with StopRequest() as stop:
            seen.append((stop.signal, signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert seen == [(None, before)]


# ---------------------------------------------------------------- watchdog


class Ended(Watchdog):
    """Notes its end instead of ending the process."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.ended = threading.Event()
        self.words = ""

    def _end(self, what: str, blame: Cause | str) -> None:
        if not self.ended.is_set():
            self.words = f"{what}; {blame}"
            self.ended.set()


def store_with(**beats: Any) -> Any:
    store = dist.HashStore()
    for rank, beat in beats.items():
        store.set(f"beat/{rank[1:]}", beat if isinstance(beat, str) else json.dumps(beat))
    return store


def test_no_progress_ends_the_run_and_names_the_silent_rank() -> None:
    store = store_with(r1=[7, "training", time.time() - 100])
    with Ended(store, 0, 2, least=0.2) as watchdog:
        watchdog.beat(8, "training")
        assert watchdog.ended.wait(LONG)
    assert "rank 1 has fallen silent" in watchdog.words


def test_a_silent_rank_is_found_in_a_slow_phase_too() -> None:
    store = store_with(r1=[7, "saving", time.time()])
    with Ended(store, 0, 2, least=0.2) as watchdog:
        watchdog.beat(7, "saving", allowance=10 * LONG)
        assert watchdog.ended.wait(LONG)
    assert "sign of life; rank 1 has fallen silent" in watchdog.words


def test_a_rank_that_has_left_in_order_is_not_blamed() -> None:
    """The first of two ranks to finish says so; the other may still write the report."""
    store = dist.HashStore()
    with Ended(store, 1, 2, least=0.2):
        pass
    assert store.get("beat/1") == Watchdog.LEFT
    with Ended(store, 0, 2, least=0.2) as watchdog:
        watchdog.beat(7, "saving", allowance=10 * LONG)
        assert not watchdog.ended.wait(1.0)


def test_two_ranks_that_talk_are_left_alone_in_a_slow_phase() -> None:
    store = dist.HashStore()
    with Ended(store, 0, 2, least=5) as first, Ended(store, 1, 2, least=5) as second:
        for watchdog in (first, second):
            watchdog._pause = 0.05
            watchdog.beat(1, "validation", allowance=10 * LONG)
        assert not first.ended.wait(1.0)
        assert not second.ended.is_set()
        assert json.loads(store.get("beat/1"))[:2] == [1, "validation"]


def test_a_store_that_does_not_answer_does_not_keep_a_hang_alive(monkeypatch) -> None:
    class Stuck:
        def set(self, *_: Any) -> None:
            threading.Event().wait()

        check = get = set

    monkeypatch.setattr(Watchdog, "PATIENCE", 0.2)
    with Ended(Stuck(), 0, 2, least=0.2) as watchdog:
        watchdog.beat(3, "training")
        assert watchdog.ended.wait(LONG)
        watchdog._threads.clear()  # one of them never ends
    assert "the shared store does not answer" in watchdog.words


def test_a_process_that_was_stopped_and_goes_on_is_not_a_hang(monkeypatch) -> None:
    """All ranks of a job may be suspended together, by a scheduler say."""
    now = [1000.0]
    monkeypatch.setattr(guards.time, "monotonic", lambda: now[0])
    watchdog = Ended(dist.HashStore(), 0, 2, least=60)
    watchdog.beat(3, "training")
    rounds = iter([0.5, 3600.0, 0.5, 30.0, 1.0])

    def wait(_: float) -> bool:
        step = next(rounds, None)
        now[0] += step or 0.0
        return step is None

    monkeypatch.setattr(watchdog._stop, "wait", wait)
    watchdog._watch()
    assert not watchdog.ended.is_set()


def test_the_limit_follows_the_usual_step(monkeypatch) -> None:
    now = [0.0]
    monkeypatch.setattr(guards.time, "monotonic", lambda: now[0])
    watchdog = Watchdog(dist.HashStore(), 0, 2, least=60)
    watchdog.beat(0, "start", allowance=1800)
    assert watchdog.limit == 1800
    for step in range(5):
        watchdog.beat(step, "training")
        now[0] += 20
    assert watchdog.limit == 200
    watchdog.beat(5, "saving", allowance=1800)
    assert watchdog.limit == 1800


@pytest.mark.parametrize(
    ("beat", "words"),
    [
        ([7, "training", 0], "rank 1 has fallen silent"),
        ([6, "validation", None], "rank 1 is behind, in validation of step 6"),
        ([8, "training", None], "all other ranks answer"),
    ],
)
def test_blame(beat: list[Any], words: str) -> None:
    beat = [*beat[:2], time.time() + LONG if beat[2] is None else beat[2]]
    watchdog = Watchdog(store_with(r1=beat), 0, 2, least=60)
    watchdog.beat(8, "training")
    assert words in str(watchdog._find_blame())


def test_alone_nothing_watches() -> None:
    with Watchdog(dist.HashStore(), 0, 1, least=0.01) as watchdog:
        assert watchdog._threads == []


# ---------------------------------------------------------------- ranks find each other


def test_ranks_agree_although_the_dead_have_left_their_words() -> None:
    """torchrun keeps its store over a restart: what the last attempt has written is still in it."""
    store = dist.HashStore()
    attempts = []
    for _ in range(3):
        names: dict[int, str] = {}

        def join(rank: int, names: dict[int, str] = names) -> None:
            time.sleep(0.05 * (rank == 1))  # rank 0 meets the old token of rank 1 first
            names[rank] = agree_on_attempt(
                store, World(rank=rank, size=2, launcher="torchrun"), timedelta(seconds=LONG)
            )

        threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert names[0] == names[1]
        attempts.append(names[0])
    assert len(set(attempts)) == 3


def test_a_rank_that_never_comes_is_told() -> None:
    with pytest.raises(UserError, match=r"rank 0 waited 0 s for the 2 processes"):
        agree_on_attempt(dist.HashStore(), World(size=2, launcher="torchrun"), timedelta(seconds=0.05))


# ---------------------------------------------------------------- run folder


def test_a_folder_in_use_is_refused_and_its_owner_named(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    first = RunFolder(tmp_path / "run")
    with pytest.raises(UserError, match=rf"in use by process {os.getpid()} on .*, job 4711; .* --fresh"):
        RunFolder(tmp_path / "run")
    first.close()
    RunFolder(tmp_path / "run").close()


def test_a_file_system_without_locks_is_used_with_a_note(tmp_path: Path, monkeypatch) -> None:
    def unsupported(*_: Any) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(runfolder.fcntl, "flock", unsupported)
    folder = RunFolder(tmp_path / "run")
    assert "cannot be locked" in (folder.note or "")
    folder.close()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"run\.dir: .* cannot be written"):
        RunFolder(tmp_path / "file" / "run")


def test_beside_never_names_what_is_there(tmp_path: Path) -> None:
    assert beside(tmp_path / "run") == tmp_path / "run"
    (tmp_path / "run").mkdir()
    (tmp_path / "run-2").mkdir()
    assert beside(tmp_path / "run") == tmp_path / "run-3"


def lines(folder: RunFolder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder.path / "metrics.jsonl").read_text().splitlines()]


def test_the_log_is_json_and_survives_a_torn_line(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.log("train", step=1, loss=float("nan"), grad_norm=float("inf"), metrics={"a": [1.5, float("-inf")]})
    folder.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"event": "train", "st')
    folder = RunFolder(tmp_path)
    folder.log("train", step=2)
    folder.close()
    first, torn, second = (tmp_path / "metrics.jsonl").read_text().splitlines()
    told = json.loads(first)
    assert (told["loss"], told["grad_norm"], told["metrics"]) == (None, None, {"a": [1.5, None]})
    assert torn == '{"event": "train", "st'
    assert json.loads(second)["step"] == 2


def test_lines_wait_while_the_disk_is_full(tmp_path: Path, monkeypatch) -> None:
    folder = RunFolder(tmp_path)
    folder.log("train", step=1)
    write = os.write
    room = [10]  # bytes left on the disk

    def full(handle: int, content: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = write(handle, content[: room[0]])
        room[0] -= written
        return written

    with monkeypatch.context() as patch:
        patch.setattr(runfolder.os, "write", full)
        folder.log("train", step=2)
        folder.log("train", step=3)
    folder.log("train", step=4)
    folder.close()
    assert [line["step"] for line in lines(folder)] == [1, 2, 3, 4]


def test_a_folder_that_was_never_used_is_taken_back(tmp_path: Path) -> None:
    RunFolder(tmp_path / "new").discard_if_new()
    assert not (tmp_path / "new").exists()
    (tmp_path / "old").mkdir()
    RunFolder(tmp_path / "old").discard_if_new()
    assert (tmp_path / "old").exists()
    used = RunFolder(tmp_path / "used")
    (tmp_path / "used" / "checkpoints" / "step-00000001").mkdir(parents=True)
    used.discard_if_new()
    assert (tmp_path / "used" / "checkpoints" / "step-00000001").exists()
