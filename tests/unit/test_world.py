"""Where a process finds itself under every launcher, and how the living ones agree on an attempt."""

import contextlib
import os
import socket
import struct
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from support import LONG, run, torchrun

from vitrail.errors import RunFailed, UserError
from vitrail.launch import mpi, slurm, world
from vitrail.launch.variables import port_for
from vitrail.launch.world import (
    World,
    agree_on_attempt,
    count_attempt,
    find_local_master,
    find_master,
    find_world,
    is_chief,
    share_of_cores,
    usable_cores,
)

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "1",
    "GROUP_WORLD_SIZE": "2",
}
SHELL = {  # of sbatch or salloc, as Slurm 22.05 writes it
    "SLURM_JOB_ID": "17",
    "SLURM_NTASKS": "7",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_TASKS_PER_NODE": "2(x3),1",
    "SLURM_JOB_NODELIST": "node[01-03,07]",
}
SRUN = SHELL | {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "node[01-03,07]",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "3",
    "PMIX_NAMESPACE": "1337196545",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
CRAY = {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"}
OTHER = {"rank": 3, "size": 4, "local_rank": 1, "local_size": 2}


@pytest.mark.parametrize(
    ("env", "expected", "note"),
    [
        ({}, World(), "alone: no launcher was found"),
        ({"WORLD_SIZE": "1"}, World(), "alone"),
        (SHELL, World(), "alone: in Slurm job 17, but not started by srun"),
        (SHELL | {"SLURM_STEP_ID": "4294967290"}, World(), "alone: in Slurm job 17"),
        (TORCHRUN, World(**OTHER, launcher="torchrun"), "torchrun: 4 processes, 2 on this host (RANK is set)"),
        (SRUN | TORCHRUN | {"SLURM_STEP_NUM_TASKS": "2"}, World(**OTHER, launcher="torchrun"), "torchrun: 4"),
        (SRUN, World(5, 7, 1, 2, "slurm"), "srun: 7 processes, 2 on this host (SLURM_STEP_ID is set)"),
        (SRUN | {"SLURM_NODEID": "3", "SLURM_PROCID": "6", "SLURM_LOCALID": "0"}, World(6, 7, 0, 1, "slurm"), "srun"),
        (SRUN | {"PMI_RANK": "5", "PMI_SIZE": "7", "PMIX_RANK": "5"}, World(5, 7, 1, 2, "slurm"), "srun"),
        (OPEN_MPI, World(**OTHER, launcher="mpi"), "mpirun: 4 processes, 2 on this host (OMPI_COMM_WORLD_RANK is set)"),
        (SRUN | OPEN_MPI, World(**OTHER, launcher="mpi"), "mpirun"),  # mpirun's helpers are tasks of Slurm
        (SRUN | MPICH, World(**OTHER, launcher="mpi"), "mpirun"),
        (SHELL | MPICH, World(**OTHER, launcher="mpi"), "mpirun"),
        (MPICH, World(**OTHER, launcher="mpi"), "mpirun"),
        (CRAY, World(**OTHER, launcher="mpi"), "mpirun"),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, World(launcher="mpi"), "mpirun: 1 process, 1 on this host"),
    ],
)
def test_every_launcher_is_found(env: dict[str, str], expected: World, note: str) -> None:
    found = find_world(env)
    assert found == expected
    assert found.note.startswith(note)
    assert is_chief(env) == (expected.rank == 0)


def without(env: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in names}


@pytest.mark.parametrize(
    ("env", "words"),
    [
        (without(TORCHRUN, "MASTER_PORT"), "not MASTER_PORT: start with torchrun"),
        ({"LOCAL_RANK": "0"}, "not RANK, WORLD_SIZE"),
        (TORCHRUN | {"RANK": "4"}, "rank 4 of 4 processes cannot be"),
        (TORCHRUN | {"LOCAL_RANK": "2"}, "local rank 2 of 2"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "8"}, "8 processes on this host are more than the 4"),
        (TORCHRUN | {"RANK": "one"}, "RANK='one': expected a whole number"),
        (TORCHRUN | {"MASTER_PORT": "http"}, "MASTER_PORT='http': expected a whole number"),
        ({"WORLD_SIZE": "8"}, "WORLD_SIZE=8 is set but RANK is not"),
        (SRUN | TORCHRUN | {"GROUP_WORLD_SIZE": "1"}, "started 7 processes, and each started a torchrun"),
        (OPEN_MPI | TORCHRUN | {"GROUP_WORLD_SIZE": "1"}, "started 4 processes, and each started a torchrun"),
        (SRUN | without(TORCHRUN, "GROUP_WORLD_SIZE"), "WORLD_SIZE=4, but srun or mpirun started 7"),
        (SRUN | {"WORLD_SIZE": "2"}, "WORLD_SIZE=2, but slurm started 7 processes"),
        (SRUN | {"SLURM_PROCID": "7"}, "srun: rank 7 of 7"),
        (SRUN | {"SLURM_STEP_ID": "x"}, "SLURM_STEP_ID='x'"),
        (without(SRUN, "SLURM_PROCID", "SLURM_LOCALID"), "not SLURM_PROCID, SLURM_LOCALID: start with srun"),
        (without(OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK"), "not OMPI_COMM_WORLD_LOCAL_RANK: start with mpirun"),
        (without(OPEN_MPI, "OMPI_COMM_WORLD_RANK"), "OMPI_COMM_WORLD_SIZE but not OMPI_COMM_WORLD_RANK"),
        ({"PMI_RANK": "1"}, "PMI_RANK but not PMI_SIZE"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "not MPI_LOCALRANKID and MPI_LOCALNRANKS"),
        ({"PMIX_RANK": "1", "PMIX_NAMESPACE": "n"}, "nothing says how many"),
    ],
)
def test_half_a_set_or_a_contradiction_is_refused(env: dict[str, str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        find_world(env)


def test_who_speaks_even_where_the_environment_is_wrong() -> None:
    assert is_chief(without(SRUN, "SLURM_LOCALID") | {"SLURM_PROCID": "0"})
    assert not is_chief(without(SRUN, "SLURM_LOCALID"))
    assert not is_chief(without(TORCHRUN, "MASTER_PORT"))
    assert is_chief({"WORLD_SIZE": "8"})


# ---------------------------------------------------------------- devices and cores


def test_a_process_takes_its_own_gpu() -> None:
    assert World(**OTHER, launcher="torchrun").device_index(8, {}) == 1
    assert World().device_index(1, {}) == 0
    bound = World(rank=7, size=16, local_rank=7, local_size=8, launcher="slurm")
    assert bound.device_index(1, {"ROCR_VISIBLE_DEVICES": "7"}) == 0  # srun --gpus-per-task=1
    assert bound.device_index(8, {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}) == 7
    for found in (World(**OTHER, launcher="torchrun"), World(**OTHER, launcher="mpi")):
        with pytest.raises(UserError, match=r"rank 3: 2 processes were started on this host, but 1 GPU is visible"):
            found.device_index(1, {})
    with pytest.raises(UserError, match=r"2 GPUs are visible to them.*at most 2 a host"):
        bound.device_index(2, {"CUDA_VISIBLE_DEVICES": "0,1"})


@pytest.fixture(autouse=True)
def _nobody_met(monkeypatch) -> None:
    """Other tests of this process may have met others."""
    monkeypatch.setattr(world, "_alike", [])


def test_cores_are_divided_among_the_ranks_of_a_host() -> None:
    assert share_of_cores(World()) == usable_cores()
    assert share_of_cores(World(size=64, local_size=64)) == max(1, usable_cores() // 64)


def test_cores_that_a_launcher_has_divided_are_not_divided_again() -> None:
    assert find_world(SRUN).cores is None
    assert find_world(SRUN | {"SLURM_CPUS_PER_TASK": "1"}).cores == 1
    assert find_world(SRUN | {"SLURM_CPU_BIND": "quiet,mask_cpu:0x1,0x2"}).cores == usable_cores()
    bound = find_world(OPEN_MPI | {"OMPI_MCA_orte_bound_at_launch": "1"})
    assert share_of_cores(bound) == usable_cores()


@pytest.mark.parametrize("env", [TORCHRUN, OPEN_MPI, OPEN_MPI | {"OMPI_MCA_orte_bound_at_launch": "1"}, MPICH])
def test_cores_are_divided_among_the_processes_that_have_the_same(env: dict[str, str], monkeypatch) -> None:
    """Once they have met, whatever their launcher says: bound to cores of their own, to a socket, or not at all."""
    monkeypatch.setattr(world, "usable_cores", lambda: 14)
    for alike, share in ((1, 14), (2, 7), (8, 1), (99, 1)):
        monkeypatch.setattr(world, "_alike", [3, alike])
        found = share_of_cores(find_world(env))
        assert found == share
    monkeypatch.setattr(world, "_alike", [1])
    assert share_of_cores(find_world(SRUN | {"SLURM_CPUS_PER_TASK": "3"})) == 3
    assert share_of_cores(World()) == 14


def test_processes_with_the_same_cores_find_each_other(tmp_path: Path) -> None:
    """Three processes of one host: two share a core, the third has the rest."""
    code = (
        "import os, sys\n"
        "from datetime import timedelta\n"
        "from vitrail.launch import world\n"
        "cores = sorted(os.sched_getaffinity(0))\n"
        "found = world.find_world()\n"
        "os.sched_setaffinity(0, cores[:1] if found.rank < 2 else cores[1:])\n"
        "world.connect(found, 'cpu', timeout=timedelta(seconds=600))\n"
        "os.write(1, f'alike {world._alike}{chr(10)}'.encode())\n"  # at once: lines of others must not come between
        "from vitrail.cli.words import end\n"
        "end(0)\n"
    )
    if usable_cores() < 2:
        pytest.skip("one core can only be shared")
    (tmp_path / "meet.py").write_text(code)
    status, output = run(*torchrun(3, tmp_path / "meet.py"))
    assert status == 0, output
    assert sorted(line for line in output.splitlines() if line.startswith("alike")) == ["alike [1]", *["alike [2]"] * 2]


# ---------------------------------------------------------------- lists of hosts


def test_lists_of_hosts_as_slurm_writes_them() -> None:
    assert slurm.expand_hosts("node[01-03,07],gpu5") == ["node01", "node02", "node03", "node07", "gpu5"]
    assert slurm.expand_hosts("r[1-2]n[08-10]-ib") == [f"r{r}n{n}-ib" for r in (1, 2) for n in ("08", "09", "10")]
    assert slurm.expand_hosts("frontier[09999-10000]") == ["frontier09999", "frontier10000"]
    assert slurm.expand_hosts("host") == ["host"]
    assert slurm.expand_counts("2(x3),1") == [2, 2, 2, 1]
    assert slurm.expand_counts("x") == []


@pytest.mark.parametrize("text", ["", "node[1-", "node]", "node[3-1]", "node[a-b]", "node[]", "a,,b", "n[0-99999999]"])
def test_what_is_no_list_of_hosts_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"SLURM_STEP_NODELIST.*set MASTER_ADDR"):
        slurm.first_host({"SLURM_STEP_NODELIST": text})


@st.composite
def host_lists(draw) -> tuple[str, list[str]]:
    """A list as Slurm shortens it, and the hosts it stands for."""
    text, hosts = [], []
    for _ in range(draw(st.integers(1, 4))):
        prefix = draw(st.from_regex(r"[a-z][a-z0-9-]{0,4}[a-z]", fullmatch=True))
        if draw(st.booleans()):
            text.append(prefix)
            hosts.append(prefix)
            continue
        width, ranges = draw(st.integers(1, 4)), []
        for _ in range(draw(st.integers(1, 3))):
            low = draw(st.integers(0, 10**width - 1))
            high = draw(st.integers(low, min(low + 5, 10**width - 1)))
            ranges.append(f"{low:0{width}}" + (f"-{high:0{width}}" if high > low else ""))
            hosts += [f"{prefix}{n:0{width}}" for n in range(low, high + 1)]
        text.append(f"{prefix}[{','.join(ranges)}]")
    return ",".join(text), hosts


@given(host_lists())
def test_every_list_of_hosts_expands_to_its_hosts(case: tuple[str, list[str]]) -> None:
    assert slurm.expand_hosts(case[0]) == case[1]


@given(st.text(alphabet="ab01[]-, ", max_size=12))
def test_no_text_breaks_the_reader_of_hosts(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert all(slurm.expand_hosts(text))


# ---------------------------------------------------------------- where rank 0 listens


def test_the_master_of_each_launcher() -> None:
    assert find_master(find_world(TORCHRUN), TORCHRUN) == ("localhost", 1)
    job = port_for("17.0")
    assert 20000 <= job < 32000
    assert find_master(find_world(SRUN), SRUN) == ("node01", job)
    assert port_for("17.1") != job
    given_ = {"MASTER_ADDR": "node01-ib", "MASTER_PORT": "5000"}
    assert find_master(find_world(SRUN | given_), SRUN | given_) == ("node01-ib", 5000)
    one = SRUN | {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_NODEID": "0",
        "SLURM_PROCID": "1",
    }
    assert find_master(find_world(one), one) == ("localhost", job)  # the node that started it may be another
    assert find_master(find_world(OPEN_MPI), OPEN_MPI) is None  # mpi4py tells
    assert find_master(find_world(OPEN_MPI | given_), OPEN_MPI | given_) == ("node01-ib", 5000)


def test_a_master_that_cannot_be_is_refused() -> None:
    for env in (SRUN, OPEN_MPI):
        wrong = env | {"MASTER_ADDR": "localhost", "MASTER_PORT": "5000"}
        with pytest.raises(UserError, match=r"MASTER_ADDR=localhost, but .* several hosts"):
            find_master(find_world(wrong), wrong)
    with pytest.raises(UserError, match="MASTER_PORT=70000: expected a port"):
        find_master(find_world(SRUN), SRUN | {"MASTER_PORT": "70000"})
    with pytest.raises(UserError, match="nothing says where rank 0 listens: install mpi4py"):
        find_local_master(find_world(OPEN_MPI), OPEN_MPI)


def test_processes_of_one_host_need_no_mpi4py() -> None:
    local = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    host, port = find_local_master(find_world(local), local)
    assert (host, port) == ("localhost", port_for("PMIX_NAMESPACE=1337196545"))
    assert find_local_master(find_world(local), local | {"MASTER_PORT": "5000"}) == ("localhost", 5000)
    assert mpi.job_name({}).startswith("parent=")


def test_mpi_carries_the_address_as_bytes_and_is_ended_at_once() -> None:
    calls = []

    class Communicator:
        def Get_size(self) -> int:
            return 2

        def Ibcast(self, message: list, root: int) -> types.SimpleNamespace:
            assert message[1] == "BYTE"
            assert root == 0
            message[0][: len(b"node01 4000")] = b"node01 4000"
            answers = iter([False, True])
            return types.SimpleNamespace(Test=lambda: next(answers))

    fake = types.SimpleNamespace(
        Is_initialized=lambda: False,
        Init=lambda: calls.append("init"),
        Finalize=lambda: calls.append("end"),
        COMM_WORLD=Communicator(),
        BYTE="BYTE",
    )
    assert mpi.tell(fake, "node01 4000", 0, 2) == "node01 4000"
    assert mpi.tell(fake, "", 1, 2).split("\0")[0] == "node01 4000"
    assert mpi.tell(fake, "", 1, 4) is None  # of another MPI: each process sees itself alone
    assert calls == ["init", "end"] * 3


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"port {port} of .* is in use .* set MASTER_PORT"):
            world._open_store("localhost", port, World(rank=0, size=2, launcher="slurm"))


def listeners(port: int) -> set[str]:
    """Addresses on which somebody listens at a port, as the kernel writes them; it writes IPv4 and IPv6 apart."""
    lines = [line.split() for kind in ("tcp", "tcp6") for line in Path("/proc/net", kind).read_text().splitlines()[1:]]
    return {words[1].partition(":")[0] for words in lines if words[1].endswith(f":{port:04X}") and words[3] == "0A"}


LOCAL = "0100007F"  # 127.0.0.1


def pair(monkeypatch: pytest.MonkeyPatch, **variables: str) -> tuple[Any, Any, int]:
    """The stores of two ranks of this host that meet by variables, and their port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for name, value in {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), **variables}.items():
        monkeypatch.setenv(name, value)
    for name in ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    ranks = [World(rank=rank, size=2, local_rank=rank, local_size=2, launcher="torchrun") for rank in range(2)]
    first, second = (world._meet.__wrapped__(rank, None, None) for rank in ranks)
    return first, second, port


def test_ranks_of_one_host_are_reached_from_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, port = pair(monkeypatch)
    assert listeners(port) == {LOCAL}
    first.set("word", "1")
    assert second.get("word") == b"1"
    # A number that is an address of this host is the one to listen on; a name, or a gateway's number, is not.
    numbered = world._open_store("127.0.0.2", 0, World(rank=0, size=2, launcher="slurm"))
    assert listeners(numbered.port) == {"0200007F"}
    assert world._listen(socket.gethostname(), 0) is None
    assert world._listen("192.0.2.1", 0) is None  # of documentation, nobody's
    several = world._open_store("", 0, World(rank=0, size=2, launcher="mpi"))
    assert listeners(several.port) not in (set(), {LOCAL})


def test_gloo_listens_where_no_other_host_reaches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    world._choose_interface(World(size=2, local_size=1, launcher="slurm"))
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    world._choose_interface(World(size=2, local_size=2, launcher="slurm"))
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    world._choose_interface(World(size=2, local_size=1, launcher="slurm"))  # what it was in a process that was alone
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    for local in (1, 2):
        world._choose_interface(World(size=2, local_size=local, launcher="slurm"))
        assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"


def test_strangers_at_the_port_harm_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who does not speak PyTorch's protocol, or guesses at keys: the store goes on, and its memory does not grow."""
    first, second, port = pair(monkeypatch, VITRAIL_SECRET="of this job")
    first.set("word", "1")
    magic, most = struct.pack("<BI", 0, 0x3C85F7CE), struct.pack("<Q", 2**62)
    words = [b"GET / HTTP/1.0\r\n\r\n", b"\0" * 5, b"\xff" * 64, bytes(range(256)) * 16, magic]
    words += [magic + bytes([query]) + most for query in range(32)]  # a key of 2^62 bytes, in every kind of request
    words += [magic + b"\1" + struct.pack("<Q", 1) + b"k" + struct.pack("<Q", 2**size) for size in (24, 33, 40, 62)]
    before = memory()
    waiting = []
    for word in words:
        stranger = socket.create_connection(("127.0.0.1", port), timeout=600)
        stranger.sendall(word)
        if word == magic:  # and then nothing more
            waiting.append(stranger)
        else:
            with contextlib.suppress(OSError):
                stranger.shutdown(socket.SHUT_WR)
                stranger.recv(1)
            stranger.close()
        assert second.get("word") == b"1"
    waiting += [socket.create_connection(("127.0.0.1", port), timeout=600) for _ in range(100)]
    assert second.add("counted", 1) == 1
    assert memory() - before < 64 * 2**20
    # Somebody with the protocol, who guesses: keys as PyTorch and older versions name them, and no secret.
    guest = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    for key in ("word", "vitrail/word", "failed", "vitrail/failed", "default_pg/0//cpu//0/0"):
        assert not guest.delete_key(key)
        guest.set(key, "2")
    assert second.get("word") == b"1"
    assert not second.check(["failed"])
    for stranger in waiting:
        stranger.close()
    # What is not promised: who speaks the protocol may ask for the names of all keys.
    assert any(key.endswith("/word") for key in guest.list_keys())


def memory() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_job_with_another_secret_is_another_job(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    names = []
    for secret, number in (("", ""), ("a", ""), ("b", ""), ("a", "run"), ("", "run")):
        monkeypatch.setenv("VITRAIL_SECRET", secret)
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", number)
        for told in ("", "by MPI"):
            apart = world._keep_apart(store, told)
            assert not apart.check(["key"])
            apart.set("key", "1")
            assert world._keep_apart(store, told).check(["key"])
            names.append(told)
    assert len(names) == 10
    with pytest.raises(UserError, match=r"look for one that failed to start, or that has another VITRAIL_SECRET"):
        world.count_attempt(apart, World(rank=0, size=2, launcher="slurm"), timedelta(seconds=0))


def test_mpi_tells_the_secret_too(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    def tell(interface: Any, text: str, rank: int, size: int) -> str:
        told.append(text or told[0])
        return told[0]

    monkeypatch.setattr(mpi, "load", lambda: "MPI")
    monkeypatch.setattr(mpi, "tell", tell)
    for name in ("MASTER_ADDR", "MASTER_PORT", "VITRAIL_SECRET"):
        monkeypatch.delenv(name, raising=False)
    ranks = [World(rank=rank, size=2, local_rank=rank, local_size=2, launcher="mpi") for rank in range(2)]
    first, second = (world._meet.__wrapped__(rank, None, None) for rank in ranks)
    host, port, secret = told[0].split()
    assert (host, len(secret)) == ("127.0.0.1", 32)
    assert len(told[0]) < mpi.LONGEST_NAME
    assert listeners(int(port)) == {LOCAL}
    first.set("word", "1")
    assert second.get("word") == b"1"


def test_a_rank_0_that_is_not_there_is_named(monkeypatch) -> None:
    monkeypatch.setattr(world, "MEETING", timedelta(seconds=1))
    with socket.socket() as free:
        free.bind(("", 0))  # taken, but nobody listens
        port = free.getsockname()[1]
        with pytest.raises(UserError, match=rf"rank 1 could not reach rank 0 at 127.0.0.1:{port} within 1 s"):
            world._open_store("localhost", port, World(rank=1, size=2, launcher="slurm"))
    with pytest.raises(UserError, match=r"'no-such-host\.invalid', has no address here"):
        world._resolve("no-such-host.invalid", 1, patience=0)


# ---------------------------------------------------------------- attempts


def agree(store: dist.Store, size: int) -> set[str]:
    with ThreadPoolExecutor(size) as pool:
        worlds = [World(rank=rank, size=size, launcher="torchrun") for rank in range(size)]
        return set(pool.map(lambda world: agree_on_attempt(store, world, timedelta(seconds=LONG)), worlds))


def test_every_attempt_has_a_name_that_all_its_ranks_share() -> None:
    """The keys of earlier attempts stay in the store, those of smaller and larger worlds too."""
    store = dist.HashStore()
    names = [agree(store, size) for size in (1, 2, 2, 4, 2)]
    assert all(len(found) == 1 for found in names)
    assert len(set.union(*names)) == 5


@pytest.mark.parametrize("agree", [agree_on_attempt, count_attempt])
def test_a_rank_that_stays_away_is_an_error(agree) -> None:
    with pytest.raises(UserError, match="waited 0 s for the 2 processes"):
        agree(dist.HashStore(), World(rank=0, size=2), timedelta(seconds=0.1))


class Counting:
    """A store that counts what it is asked."""

    def __init__(self) -> None:
        self.store, self.requests = dist.HashStore(), 0

    def __getattr__(self, name: str):
        self.requests += 1
        return getattr(self.store, name)


def test_a_large_world_asks_little_of_its_store() -> None:
    store = Counting()
    store.set("hello/1", "of a rank that died")
    assert len(agree(store, 32)) == 1
    assert store.requests < 32 * 100  # all ranks asking about all ranks, once, would be 1024 already


def test_a_meeting_in_a_fresh_store_is_counted(monkeypatch) -> None:
    monkeypatch.setattr(world, "_meetings", iter([0, 0, 1, 1]))  # of two processes, which are threads here
    store = dist.HashStore()
    for number in range(2):
        with ThreadPoolExecutor(2) as pool:
            ranks = [World(rank=rank, size=2, launcher="slurm") for rank in range(2)]
            names = set(pool.map(lambda rank: count_attempt(store, rank, timedelta(seconds=LONG)), ranks))
        assert names == {f"meeting-{number}"}


def test_an_attempt_that_is_in_vain_is_not_repeated(monkeypatch) -> None:
    """torchrun starts all again whatever one ends with."""
    store = dist.HashStore()
    monkeypatch.setattr(world, "_agents_store", lambda: store)

    def attempt(number: int, error: Exception | None = None, code: int = 0) -> None:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(number))
        with contextlib.suppress(UserError), world.tried_once():
            if error is not None:
                raise error
            if code:
                world.end_for_good(code)

    attempt(0, UserError("wrong"))  # not torchrun's
    assert store.num_keys() == 0
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    attempt(0, RunFailed("a rank died"))
    attempt(1, UserError("a trace of that, perhaps"))
    attempt(2)
    attempt(2, code=75)
    attempt(0)  # a new job would have a new store
    with pytest.raises(SystemExit) as left:
        attempt(3)
    assert left.value.code == 75
    store.delete_key("ended")
    attempt(0, UserError("a wrong recipe"))
    with pytest.raises(SystemExit) as left:
        attempt(1)
    assert left.value.code == 2


def test_a_signal_is_heard_while_rank_0_is_awaited() -> None:
    """PyTorch's own wait would not let Python's handlers run before its end."""
    code = (
        "import os, signal, threading, time\n"
        "from vitrail.launch import world\n"
        "signal.signal(signal.SIGUSR1, lambda *_: os._exit(75))\n"
        "threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGUSR1)).start()\n"
        "world._open_store('localhost', {port}, world.World(rank=1, size=2, launcher='slurm'))\n"
    )
    with socket.socket() as free:
        free.bind(("", 0))  # taken, but nobody listens
        assert run(sys.executable, "-c", code.format(port=free.getsockname()[1]))[0] == 75


def test_a_restart_finds_the_folder_that_the_first_attempt_chose(tmp_path: Path, monkeypatch) -> None:
    """`--fresh` under torchrun --max-restarts must not begin anew with every restart."""
    from vitrail.training import session

    recipe = types.SimpleNamespace(run_dir=tmp_path / "run")
    place = types.SimpleNamespace(root_store=dist.HashStore())
    (tmp_path / "run").mkdir()

    def process() -> Path:
        monkeypatch.setattr(session, "_sittings", iter(range(10)))
        chosen = session.choose_folder(recipe, place, fresh=True)
        chosen.mkdir(exist_ok=True)
        return chosen

    assert process() == process() == tmp_path / "run-2"
    assert session.choose_folder(recipe, place, fresh=False) == tmp_path / "run"
