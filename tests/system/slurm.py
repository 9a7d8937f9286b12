"""A real Slurm on this host for the length of a test: its own key, ports, folder and daemons, all ended afterwards."""

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from support import environment

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
START = 600.0  # seconds for the daemons to be ready

CONFIG = """\
ClusterName=vitrail
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={home}/munge.socket
CredType=cred/munge
SlurmctldPort={controller}
SlurmdPort={worker}
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd.pid
SlurmctldLogFile={home}/slurmctld.log
SlurmdLogFile={home}/slurmd.log
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=bf_interval=1,sched_interval=1
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
JobRequeue=1
KillWait=5
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Unavailable(Exception):
    """Why there is no Slurm here."""


def find_missing() -> str:
    """What keeps Slurm from being started here, or an empty string."""
    if os.getuid() != 0:
        return "Slurm's daemons need root"
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    missing = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    return f"{', '.join(missing)} not installed (Debian: apt-get install slurm-wlm munge)" if missing else ""


def free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


class Slurm:
    """Commands to a cluster of one node."""

    def __init__(self, home: Path):
        self.home = home
        self.environment = environment(SLURM_CONF=str(home / "slurm.conf"))
        self.environment["PATH"] += ":/usr/sbin:/sbin"

    def call(self, *words: str | Path, timeout: float = 60.0) -> str:
        done = subprocess.run(
            [str(word) for word in words], env=self.environment, capture_output=True, text=True, timeout=timeout
        )
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def show(self, job: str, name: str) -> str:
        """A field of a job, such as JobState."""
        told = dict(word.partition("=")[::2] for word in self.call("scontrol", "-o", "show", "job", job).split())
        return told[name]

    def wait(self, job: str, *states: str, timeout: float = 1200.0) -> str:
        """Until the job is in one of the states."""
        deadline = time.monotonic() + timeout
        while (state := self.show(job, "JobState")) not in states:
            if time.monotonic() > deadline:
                raise AssertionError(f"job {job} is {state} and not {' or '.join(states)} after {timeout:.0f} s")
            time.sleep(0.1)
        return state

    def hurry(self, job: str) -> None:
        """Slurm lets a job that was put back into the queue wait for two minutes; not in a test.

        But the node revokes what was started up to the second in which the first run ended ("Job credential revoked").
        """
        deadline = time.monotonic() + 600
        while not is_idle(self):
            assert time.monotonic() < deadline, f"the node is still busy with job {job}"
            time.sleep(0.1)
        time.sleep(2.5)
        self.call("scontrol", "update", f"JobId={job}", "StartTime=now")

    def logs(self) -> str:
        """The last lines of the daemons."""
        return "\n".join(path.read_text(errors="replace")[-3000:] for path in sorted(self.home.glob("slurm*.log")))


@contextlib.contextmanager
def started(home: Path, *, cpus: int = 4) -> Iterator[Slurm]:
    """Munge, controller and worker, in the foreground as our own children; more CPUs may be promised than there are."""
    reason = find_missing()
    if reason:
        raise Unavailable(reason)
    for name in ("state", "spool"):
        (home / name).mkdir(parents=True)
    home.chmod(0o755)  # munge refuses a socket that others cannot reach
    key = home / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    host = socket.gethostname().partition(".")[0]
    controller, worker = free_ports(2)
    config = CONFIG.format(home=home, host=host, user="root", controller=controller, worker=worker, cpus=cpus)
    (home / "slurm.conf").write_text(config)
    slurm = Slurm(home)
    munge = [f"--{name}={home / file}" for name, file in (("key-file", key.name), ("socket", "munge.socket"))]
    munge += [f"--{name}-file={home / f'munge.{name}'}" for name in ("pid", "log", "seed")]
    daemons: list[subprocess.Popen[bytes]] = []

    def start(*words: str) -> None:
        with (home / f"{words[0]}.out").open("wb") as out:
            daemons.append(subprocess.Popen(words, env=slurm.environment, stdout=out, stderr=out))

    try:
        start("munged", "--foreground", "--force", *munge)
        deadline = time.monotonic() + START
        wait_for(lambda: (home / "munge.socket").exists(), daemons, deadline, home)
        start("slurmctld", "-D", "-f", str(home / "slurm.conf"))
        start("slurmd", "-D", "-f", str(home / "slurm.conf"), "-N", host)
        wait_for(lambda: is_idle(slurm), daemons, deadline, home)
        yield slurm
    finally:
        with contextlib.suppress(Exception):
            slurm.call("scancel", "--user=root", "--full", timeout=10)
            deadline = time.monotonic() + 15
            while slurm.call("squeue", "--noheader", timeout=10).strip() and time.monotonic() < deadline:
                time.sleep(0.2)
        for daemon in reversed(daemons):
            daemon.terminate()
            try:
                daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def is_idle(slurm: Slurm) -> bool:
    told = subprocess.run(
        ["sinfo", "--noheader", "-o", "%T"], env=slurm.environment, capture_output=True, text=True, timeout=60
    )
    return told.stdout.strip() == "idle"


def wait_for(ready, daemons: list[subprocess.Popen[bytes]], deadline: float, home: Path) -> None:
    while not ready():
        ended = [str(daemon.args[0]) for daemon in daemons if daemon.poll() is not None]
        if ended or time.monotonic() > deadline:
            told = "".join(path.read_text(errors="replace")[-500:] for path in sorted(home.glob("*.out")))
            raise Unavailable(f"{', '.join(ended) or 'Slurm'} did not start: {told}")
        time.sleep(0.1)
