"""The first cause of a job's end: told once, by name; what torchrun reads; the flight recorder."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from support import LONG

from vitrail.errors import RunFailed, UserError
from vitrail.training import failures, run
from vitrail.training import failures as guards
from vitrail.training.failures import (
    STORE_GONE,
    Board,
    Cause,
    Watchdog,
    is_lost_connection,
    summary,
    tell_launcher,
    was_said,
    within,
)
from vitrail.training.session import Session

LOST = RuntimeError("[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4242")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)


def dead_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


# ---------------------------------------------------------------- the first cause


def test_the_first_cause_stands() -> None:
    store = dist.HashStore()
    boards = [Board(store, rank) for rank in range(3)]
    assert boards[0].read() is None
    first = boards[2].tell(2, "failed: x")
    assert first == boards[1].tell(0, "is gone") == boards[0].read() == Cause(2, "failed: x", 2)
    assert str(first) == "rank 2 failed: x"
    assert [board.is_mouth() for board in boards] == [True, False, False]


def test_a_store_that_is_gone_leaves_the_own_words() -> None:
    class Gone:
        def compare_set(self, *_: Any) -> None:
            raise RuntimeError("Broken pipe")

        add = compare_set

    board = Board(Gone(), 1)
    assert board.tell(1, "failed") == Cause(1, "failed", 1)
    assert board.is_mouth()


def test_only_a_dead_process_of_this_machine_is_called_dead() -> None:
    store = dist.HashStore()
    board = Board(store, 0)
    assert board.find_dead(1) is None  # it has not said where it is
    Board(store, 1).introduce()
    assert board.find_dead(1) is None
    number, here = dead_process(), failures.name_machine()
    assert here
    store.set("process/1", json.dumps([here, number, "node7"]))
    assert board.find_dead(1) is None  # asked once
    assert (Board(store, 0).find_dead(1) or "").startswith(f"(process {number} on node7) died without a word")
    for machine in ("another", ""):
        store.set("process/1", json.dumps([machine, number, "node7"]))
        assert Board(store, 0).find_dead(1) is None


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (LOST, True),
        (dist.DistNetworkError("x"), True),
        (RuntimeError("[/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1000ms for recv"), True),
        (RuntimeError("Application timeout caused pair closure"), True),
        (RuntimeError("ProcessGroupGloo::reduce_scatter: unsupported dtype"), False),
        (RuntimeError("DataLoader timed out after 60 seconds"), False),
        (dist.DistBackendError("NCCL error: ncclRemoteError: A call failed"), True),
        (dist.DistBackendError("NCCL error: ncclInternalError: Net: Connection closed by remote peer node7"), True),
        (dist.DistBackendError("NCCL communicator was aborted on rank 0"), True),
        (dist.DistBackendError("Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000"), False),
        (dist.DistBackendError("ncclUnhandledCudaError: Cuda failure 2 'out of memory'"), False),
        (RuntimeError("shapes differ"), False),
        (ValueError("Connection reset"), False),
    ],
)
def test_lost_connections(error: Exception, lost: bool) -> None:
    assert is_lost_connection(error) is lost


# ---------------------------------------------------------------- what ranks say


def watchdogs(number: int, store: Any = None) -> list[Watchdog]:
    store = store or dist.HashStore()
    found = [Watchdog(store, rank, number) for rank in range(number)]
    for watchdog in found:
        watchdog.beat(7, "training")
        store.set(f"beat/{watchdog.rank}", "[]")
    return found


def test_a_bug_is_told_by_name_and_repeated_once(capfd: pytest.CaptureFixture[str]) -> None:
    ranks = watchdogs(4)
    bug = ZeroDivisionError("by zero")
    error, story = ranks[2].explain(bug)
    assert error is bug
    assert story == "ZeroDivisionError: by zero"
    why = "rank 2 failed in training of step 7: ZeroDivisionError: by zero"
    assert bug.__notes__ == [why]
    assert capfd.readouterr().err == ""
    told = [ranks[rank].explain(LOST) for rank in (0, 1, 3)]
    assert all(isinstance(error, RunFailed) for error, _ in told)
    assert [story for _, story in told] == [f"rank {rank} ended because {why}" for rank in (0, 1, 3)]
    assert capfd.readouterr().err == f"error: rank 0 ended because {why}\n"
    assert all(was_said(str(error)) for error, _ in told)  # so that the command line is silent
    assert ranks[2].explain(bug) == (bug, story)
    assert bug.__notes__ == [why]  # asked twice, said once


@pytest.mark.parametrize(
    ("words", "order", "shown"),
    [
        ("x is wrong", (1, 0, 2), [0]),
        ("rank 1: x is wrong", (2, 0, 1), [2]),
        ("rank {}: not finite", (1, 0, 2), [1]),  # as a session signs them
        ("rank {}: not finite in {}", (0, 1, 2), [0, 1, 2]),
    ],
)
def test_the_same_error_on_all_ranks_is_shown_once(words: str, order: tuple[int, ...], shown: list[int]) -> None:
    ranks = watchdogs(3)
    errors = {rank: UserError(words.format(rank, rank)) for rank in order}
    assert all(ranks[rank].explain(error)[0] is error for rank, error in errors.items())
    if len(set(map(str, errors.values()))) == 1:  # ranks are processes, and this test is one
        assert was_said(str(errors[0]))
    else:
        assert [rank for rank, error in errors.items() if not was_said(str(error))] == shown


def test_the_same_bug_on_all_ranks_has_one_traceback() -> None:
    ranks = watchdogs(2)
    bugs = [KeyError("x"), KeyError("x")]
    assert ranks[1].explain(bugs[1])[0] is bugs[1]
    error, story = ranks[0].explain(bugs[0])
    assert isinstance(error, RunFailed)
    assert was_said(str(error))
    assert story == "KeyError: 'x'"
    stop = KeyboardInterrupt()
    assert watchdogs(2)[0].explain(stop)[0] is stop


def test_a_neighbour_that_was_killed_is_found_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    ranks = watchdogs(4, store)
    store.set("process/2", json.dumps([failures.name_machine(), dead_process(), socket.gethostname()]))
    naps: list[float] = []
    clock = SimpleNamespace(monotonic=time.monotonic, time=time.time, sleep=naps.append)
    monkeypatch.setattr(guards, "time", clock)
    error, _ = ranks[1].explain(LOST)
    assert str(error).startswith("rank 1 ended because rank 2 (process ")
    assert "killed, ran out of memory or crashed" in str(error)
    assert "rank 2 (process" in ranks[0].explain(LOST)[1]  # which is not its neighbour
    assert len(naps) <= 2  # one look each


def test_a_rank_that_left_in_order_is_not_blamed_and_silence_is(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = count()  # at a clock that goes on when it is looked at
    clock = SimpleNamespace(monotonic=lambda: float(next(looks)), time=time.time, sleep=lambda _: None)
    monkeypatch.setattr(guards, "time", clock)
    monkeypatch.setattr(Watchdog, "PATIENCE", LONG)
    store = dist.HashStore()
    ranks = watchdogs(2, store)
    store.set("process/1", json.dumps([failures.name_machine(), dead_process(), "here"]))
    store.set("beat/1", Watchdog.LEFT)
    error, _ = ranks[0].explain(LOST)
    why = f"rank 0 lost touch with another rank, which has not said why: RuntimeError: {LOST}"
    assert str(error) == why  # all that is known is told, here and to the others
    assert str(ranks[1].explain(LOST)[0]) == f"rank 1 ended because {why}"
    ranks = watchdogs(2)
    ranks[0]._silence = 5.0
    assert "rank 1 has fallen silent" in str(ranks[0].explain(LOST)[0])


def test_a_store_that_went_with_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        def check(self, *_: Any) -> bool:
            raise RuntimeError("Connection reset")

    error, _ = Watchdog(Gone(), 1, 2).explain(LOST)
    assert str(error) == f"rank 1 ended because rank 0 {STORE_GONE}"
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")  # then it went with the launcher
    error, _ = Watchdog(Gone(), 1, 2).explain(LOST)
    assert "has not said why" in str(error)


def test_errors_that_escape_are_explained_on_the_way_out() -> None:
    store = dist.HashStore()
    with pytest.raises(KeyError), Watchdog(store, 1, 2):
        raise KeyError("x")
    why = "rank 0 ended because rank 1 failed in start of step -1: KeyError: 'x'"
    with pytest.raises(RunFailed, match=why), Watchdog(store, 0, 2):
        raise LOST
    with pytest.raises(RuntimeError, match="closed by peer"), Watchdog(dist.HashStore(), 0, 1):
        raise LOST  # alone there is nobody else


def test_a_rank_that_cannot_notice_is_ended() -> None:
    """A collective over NCCL may wait for a dead rank for ever."""
    ended = threading.Event()
    words: list[str] = []

    class Ended(Watchdog):
        GRACE = 0.2

        def _end(self, what: str, blame: Cause | str) -> None:
            words.append(f"{what}; {blame}")
            ended.set()

    store = dist.HashStore()
    with Ended(store, 0, 2, least=0.5) as watchdog:
        watchdog.beat(3, "training", allowance=1000)
        Board(store, 1).tell(1, "failed: x")
        assert ended.wait(LONG)
    assert words[0] == "could not go on; rank 1 failed: x"


def test_the_save_of_a_rank_that_tells_of_its_failure_is_waited_for() -> None:
    """And its cause stands, whatever the own clock says meanwhile."""
    ended = threading.Event()
    words: list[str] = []

    class Ended(Watchdog):
        GRACE = 0.0

        def _end(self, what: str, blame: Cause | str) -> None:
            words.append(f"{what}; {blame}")
            ended.set()

    store = dist.HashStore()
    saving = threading.Event()
    saving.set()
    Board(store, 1).tell(1, "failed: x")
    watchdog = Ended(store, 0, 2, least=0.2)
    watchdog._look()
    with watchdog:
        watchdog.saving = saving.is_set
        watchdog.beat(3, "training")
        assert not ended.wait(0.8)
        saving.clear()
        assert ended.wait(LONG)
    assert words[0] == "could not go on; rank 1 failed: x"
    store, ended = dist.HashStore(), threading.Event()
    Board(store, 0).tell(1, "is gone")  # it helps with no save
    with Ended(store, 0, 2, least=0.2) as watchdog:
        watchdog.saving = lambda: True
        watchdog.beat(3, "training")
        assert ended.wait(LONG)


def test_a_failing_session_tells_before_it_waits_for_its_save() -> None:
    store, seen = dist.HashStore(), []

    def wait() -> dict[str, Any]:
        seen.append(Board(store, 0).read())
        return {"step": 4}

    session: Any = SimpleNamespace(
        place=SimpleNamespace(world=SimpleNamespace(rank=1, size=2)),
        recipe=None,
        watchdog=watchdogs(2, store)[1],
        checkpoints=SimpleNamespace(wait=wait),
        note_saved=lambda outcome, then: seen.append(outcome),
        folder=None,
        end=lambda *words: seen.append(words),
    )
    bug = KeyError("x")
    assert Session.fail(session, bug, begun=True) is bug
    why = "failed in training of step 7: KeyError: 'x'"
    assert seen == [Cause(1, why, 1), {"step": 4}, ("failed", "KeyError: 'x'")]


@pytest.mark.parametrize(("size", "destroyed"), [(1, 2), (2, 1)])
def test_a_failed_rank_of_several_leaves_its_groups(size: int, destroyed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their end may wait for the others; alone, a process can train again."""
    calls: list[str] = []
    place = SimpleNamespace(world=SimpleNamespace(rank=1, size=size), store=dist.HashStore())
    recipe: Any = SimpleNamespace(run=SimpleNamespace(hang_limit=60))
    monkeypatch.setattr(run, "find_place", lambda _: place)
    monkeypatch.setattr(run.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(run.dist, "destroy_process_group", lambda: calls.append("destroyed"))
    monkeypatch.setattr(run.atexit, "register", lambda *_: None)
    with run.joined(recipe):
        pass
    assert calls == ["destroyed"]
    with pytest.raises(KeyError), run.joined(recipe):
        raise KeyError("x")
    assert len(calls) == destroyed


def test_ranks_leave_after_the_last_words_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = watchdogs(2)
    left = threading.Thread(target=ranks[1].part)
    left.start()
    left.join(timeout=0.2)
    assert left.is_alive()
    before = signal.getsignal(signal.SIGTERM)
    try:
        ranks[0].part()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN  # a launcher must not change the code it ends with
    finally:
        signal.signal(signal.SIGTERM, before)
    left.join(timeout=LONG)
    assert not left.is_alive()
    monkeypatch.setattr(Watchdog, "FAREWELL", 0.1)
    alone = threading.Thread(target=watchdogs(2)[1].part)  # the first never comes
    alone.start()
    alone.join(timeout=LONG)
    assert not alone.is_alive()


def test_few_questions_are_asked() -> None:
    """One thousand ranks ask one store every second."""
    asked: list[str] = []

    class Counting:
        kept = dist.HashStore()

        def __getattr__(self, name: str) -> Any:
            if name == "clone":
                raise AttributeError(name)
            asked.append(name)
            return getattr(self.kept, name)

    store: Any = Counting()
    Board(store, 1).introduce()
    store.set("beat/1", "[]")
    watchdog = Watchdog(store, 0, 2)
    rounds = iter([False, False, True])

    def wait(_: float) -> bool:
        if not (over := next(rounds)):
            asked.clear()
        return over

    watchdog._stop = SimpleNamespace(wait=wait)  # type: ignore[assignment]
    watchdog._talk()
    assert asked == ["set", "get", "check", "set"]  # the last says that it has left


# ---------------------------------------------------------------- torchrun and the flight recorder


def test_torchrun_is_told_the_first_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tell_launcher("nobody listens")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    tell_launcher("")
    assert not (tmp_path / "error.json").exists()
    began = int(time.time())
    tell_launcher("rank 3 failed")
    tell_launcher("and so on")
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    failure = ProcessFailure(local_rank=3, pid=1, exitcode=1, error_file=str(tmp_path / "error.json"))
    assert failure.message["message"] == "rank 3 failed"
    assert began <= failure.timestamp <= time.time()


def test_summaries_are_one_line() -> None:
    assert summary(UserError("a\n b")) == "a b"
    assert summary(type("Special", (RunFailed,), {})("a")) == "a"
    assert summary(KeyError("a")) == "KeyError: 'a'"
    assert summary(KeyboardInterrupt()) == "KeyboardInterrupt"


def test_questions_without_an_answer() -> None:
    assert within(LONG, lambda: 3) == 3
    assert within(0.05, threading.Event().wait) is None
    assert within(LONG, lambda: 1 // 0) is None


def test_each_run_has_its_own_place_for_dumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "TORCH_FR_DUMP_TEMP_FILE"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.delenv("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", raising=False)
    monkeypatch.setenv(name, "")  # put back afterwards
    monkeypatch.delenv(name)
    for folder in (tmp_path / "one", tmp_path / "two"):
        failures.keep_collectives(folder)
        assert os.environ[name] == f"{folder}/nccl_rank_"
    monkeypatch.setenv(name, "/mine")
    failures.keep_collectives(tmp_path / "one")
    assert os.environ[name] == "/mine"


def test_the_flight_recorder_keeps_and_writes(tmp_path: Path) -> None:
    """In a process of its own: the recorder reads its size once."""
    words = (
        "import sys, torch, torch.distributed as dist; from pathlib import Path\n"
        "from vitrail.training import failures\n"
        "from vitrail.training.failures import dump_collectives, record_collectives\n"
        "failures.within = lambda seconds, ask: ask()\n"
        "record_collectives()\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "dist.all_reduce(torch.ones(2))\n"
        "print(dump_collectives(Path(sys.argv[1]), 5))\n"
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith(("TORCH_FR_", "TORCH_NCCL_"))}
    done = subprocess.run([sys.executable, "-c", words, tmp_path / "flights"], env=env, capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr
    assert b"gloo:all_reduce" in (tmp_path / "flights" / "gloo_rank_5").read_bytes()
