"""The machine of a run: `environment` is stored with every run, `doctor` tries the parts that training needs.

A check is a dictionary: name, status (ok, warn or fail), detail (what was found) and remedy (what to do, or "").
Nothing here reads environment variables wholesale: a stored run must never carry a secret.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import metadata, util
from pathlib import Path
from typing import Any, Literal

import vitrail
from vitrail import disk
from vitrail.credentials import strip
from vitrail.foreign import memory_bytes
from vitrail.launch.world import usable_cores

Check = dict[str, str]

GIB = 2**30
PACKAGES = ("torch", "numpy", "tensorstore", "zarr", "torchao")  # what decides the numbers and the data of a run
SPEED_BYTES = 32 * 2**20  # written to measure the disk
LEAST_FREE_GIB = 5.0
LEAST_WRITE_MB_S = 50.0
LEAST_OPEN_FILES = 1024
LEAST_SHM_GIB = 1.0


def environment() -> dict[str, Any]:
    """Return versions, hardware and command line, for environment.json."""
    import torch

    commit, modified = find_commit()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": describe_command(sys.argv),
        "host": socket.gethostname(),
        "vitrail": vitrail.__version__,
        "commit": commit,
        "modified": modified,
        "python": platform.python_version(),
        "packages": {name: find_version(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "platform": platform.platform(),
        "cpu": {"model": cpu_model(), "cores": usable_cores(), "memory_gib": round(memory_bytes() / GIB, 1)},
        "devices": list_devices(),
    }


def find_commit() -> tuple[str | None, bool | None]:
    """Return the commit of this package's checkout and whether tracked files differ; None where it lies in none."""
    folder = Path(vitrail.__file__).parent
    # An installed copy may lie in somebody else's repository: only one that tracks this file counts.
    tracked = _run_git(folder, "ls-files", "--error-unmatch", "__init__.py")
    commit = _run_git(folder, "rev-parse", "HEAD") if tracked else None
    if not commit:
        return None, None
    changes = _run_git(folder, "status", "--porcelain", "--untracked-files=no")
    return commit, None if changes is None else bool(changes)


def _run_git(folder: Path, *words: str) -> str | None:
    # The variables that git sets for its hooks would point at another repository.
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(["git", *words], cwd=folder, env=env, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def describe_command(words: list[str]) -> str:
    """Return the command line without the passwords and tokens of URLs."""
    program = Path(words[0]).name if words else ""
    program = "python -m vitrail" if program == "__main__.py" else shlex.quote(program)
    return strip(" ".join([program, *map(shlex.quote, words[1:])]))


def find_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cpu_model() -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def list_devices() -> list[dict[str, Any]]:
    """List the accelerators that PyTorch sees: CUDA's, or ROCm's under the same name."""
    import torch

    if not torch.cuda.is_available():
        return []
    found = (torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count()))
    return [{"name": device.name, "memory_gib": round(device.total_memory / GIB, 1)} for device in found]


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


# ---------------------------------------------------------------- doctor


def doctor(folder: str | Path = ".") -> list[Check]:
    """Try every part that training needs; the disk is tried in `folder`. A check that breaks is one that fails."""
    checks: dict[str, Callable[[], Check]] = {
        "python": check_python,
        "packages": check_packages,
        "devices": check_devices,
        "attention": check_attention,
        "bf16": check_bf16,
        "compile": check_compile,
        "gloo": check_gloo,
        "nccl": check_nccl,
        "threads": check_threads,
        "disk": lambda: check_disk(Path(folder)),
        "open files": check_open_files,
        "shared memory": check_shared_memory,
        "tensorboard": check_tensorboard,
        "zarr": check_zarr,
    }
    return [_try(name, check) for name, check in checks.items()]


def _try(name: str, check: Callable[[], Check]) -> Check:
    try:
        found = check()
    except Exception as error:  # whatever a broken library raises: the other checks still matter
        first = (str(error).strip().splitlines() or [""])[0]
        found = _fail(f"{type(error).__name__}: {first}", "mend or reinstall the library that this names")
    return {"name": name, **found}


def _ok(detail: str, remedy: str = "") -> Check:
    return {"status": "ok", "detail": detail, "remedy": remedy}


def _warn(detail: str, remedy: str) -> Check:
    return {"status": "warn", "detail": detail, "remedy": remedy}


def _fail(detail: str, remedy: str) -> Check:
    return {"status": "fail", "detail": detail, "remedy": remedy}


def check_python() -> Check:
    detail = f"{platform.python_version()} at {sys.executable}"
    return _ok(detail) if sys.version_info >= (3, 11) else _fail(detail, "use Python 3.11 or newer")


def check_packages() -> Check:
    """Compare every core requirement of the installed distribution with what is there."""
    try:
        requirements = metadata.requires("vitrail") or []
    except metadata.PackageNotFoundError:
        return _warn("vitrail is not installed, so its requirements are not known", "pip install -e .")
    found, wrong = [], []
    for requirement in requirements:
        wanted = re.fullmatch(r"([\w.-]+)>=([\w.]+)", requirement.replace(" ", ""))
        if wanted is None:  # an extra's
            continue
        name, least = wanted.groups()
        version = find_version(name)
        found.append(f"{name} {version}")
        if version is None or version_numbers(version) < version_numbers(least):
            wrong.append(f"{name}>={least}")
    if wrong:
        return _fail(f"{', '.join(wrong)} not met; found {', '.join(found)}", f"pip install {shlex.join(wrong)}")
    return _ok(", ".join(found))


def version_numbers(version: str) -> tuple[int, ...]:
    """Return the release of a version as numbers: 2.13.0+cpu is (2, 13, 0)."""
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in release.group().split(".")) if release else ()


def check_devices() -> Check:
    devices = list_devices()
    if devices:
        return _ok("; ".join(f"{device['name']}, {device['memory_gib']} GiB" for device in devices))
    detail = f"no GPU: training uses the CPU ({cpu_model()})"
    if Path("/dev/nvidia0").exists() or Path("/dev/kfd").exists():
        return _warn(
            f"{detail}, although this machine has a GPU",
            "install the CUDA or ROCm build of PyTorch, and check the driver with nvidia-smi or rocm-smi",
        )
    return _ok(detail)


def check_attention() -> Check:
    """Try which kernels run a small attention forward and backward in bf16, the way training does."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    device = "cuda" if torch.cuda.is_available() else "cpu"
    works, broken = [], []
    for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH"):
        if device == "cpu" and name in ("CUDNN_ATTENTION", "EFFICIENT_ATTENTION"):  # there are none
            continue
        values = torch.ones(1, 2, 16, 32, device=device, dtype=torch.bfloat16, requires_grad=True)
        try:
            with sdpa_kernel(getattr(SDPBackend, name)):
                scaled_dot_product_attention(values, values, values).sum().backward()
            works.append(name.partition("_")[0].lower())
        except RuntimeError:
            broken.append(name.partition("_")[0].lower())
    detail = f"{', '.join(works) or 'none'} on {device}" + (f"; not {', '.join(broken)}" if broken else "")
    if not works:
        return _fail(detail, "reinstall PyTorch for this device")
    if works == ["math"]:
        return _warn(f"{detail}: slow and large", "install a build of PyTorch with flash attention for this device")
    return _ok(detail)


def check_bf16() -> Check:
    import torch

    if torch.cuda.is_available():
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return _ok("the GPU computes in bf16")
        return _warn("the GPU only emulates bf16", "set precision.compute=fp32")
    torch.ones(4, 4, dtype=torch.bfloat16) @ torch.ones(4, 4, dtype=torch.bfloat16)
    flags = set(re.findall(r"\b(?:avx512_bf16|amx_bf16|bf16)\b", _read("/proc/cpuinfo")))
    return _ok(f"the CPU has {', '.join(sorted(flags))}" if flags else "the CPU emulates bf16, so fp32 is faster on it")


def check_compile() -> Check:
    """Look for a compiler and Python's headers; without them training runs uncompiled."""
    import torch

    compiler = next(
        (path for name in (os.environ.get("CXX"), "g++", "clang++", "c++") if (path := name and shutil.which(name))),
        None,
    )
    headers = Path(sysconfig.get_paths()["include"], "Python.h").is_file()
    triton = not torch.cuda.is_available() or util.find_spec("triton") is not None
    lacks = [
        what for what, there in (("C++ compiler", compiler), ("Python.h", headers), ("triton", triton)) if not there
    ]
    if lacks:
        return _warn(
            f"no {', no '.join(lacks)}", "install them (g++, python3-dev, triton), or set parallel.compile=false"
        )
    return _ok(f"{compiler}, Python headers{', triton' if torch.cuda.is_available() else ''}")


def check_gloo() -> Check:
    """Form a group of this one process, and add up over it."""
    import torch
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        return _fail("this PyTorch was built without gloo", "install a build of PyTorch with torch.distributed")
    if dist.is_initialized():
        return _ok("a process group is running")
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        total = torch.ones(1)
        dist.all_reduce(total)
        if total.item() != 1:
            return _fail(f"the sum of 1 over one process is {total.item()}", "reinstall PyTorch")
    except RuntimeError as error:
        first = str(error).strip().splitlines()[0]
        return _fail(first, "give the host's name an address in /etc/hosts, or set GLOO_SOCKET_IFNAME to an interface")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return _ok("a group of one process adds up")


def check_nccl() -> Check:
    import torch
    import torch.distributed as dist

    there = dist.is_available() and dist.is_nccl_available()
    if not torch.cuda.is_available():
        return _ok("not needed without a GPU")
    if not there:
        return _warn("this PyTorch was built without NCCL or RCCL", "install a build with it to train on several GPUs")
    return _ok(f"version {'.'.join(map(str, torch.cuda.nccl.version()))}")


def check_threads() -> Check:
    import torch

    cores, threads, wanted = usable_cores(), torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")
    detail = f"{threads} threads on {cores} usable cores" + (f", OMP_NUM_THREADS={wanted}" if wanted else "")
    if threads > cores:
        return _warn(f"{detail}: they will wait for each other", f"set OMP_NUM_THREADS={cores} or leave it unset")
    return _ok(detail)


def check_disk(folder: Path) -> Check:
    """Measure free space, and how fast a small file is written to the disk itself."""
    free = shutil.disk_usage(folder).free / GIB
    block = os.urandom(2**20)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            began = time.perf_counter()
            for _ in range(SPEED_BYTES // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            speed = SPEED_BYTES / 1e6 / (time.perf_counter() - began)
    except OSError as error:
        return _fail(f"{folder.resolve()} cannot be written: {error.strerror}", "change to a folder that you may write")
    detail = f"{free:.1f} GiB free, {speed:.0f} MB/s written in {folder.resolve()}"
    if free < LEAST_FREE_GIB:
        return _warn(detail, f"free some space or set run.dir elsewhere: checkpoints may need {LEAST_FREE_GIB:g} GiB")
    if speed < LEAST_WRITE_MB_S:
        return _warn(f"{detail}: slow", "set run.dir on a faster disk")
    return _ok(detail)


def check_open_files() -> Check:
    import resource

    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft != resource.RLIM_INFINITY and soft < LEAST_OPEN_FILES:
        return _warn(f"at most {soft} open files", f"ulimit -n {LEAST_OPEN_FILES}")
    return _ok("no limit" if soft == resource.RLIM_INFINITY else f"at most {soft} open files")


def check_shared_memory() -> Check:
    """Measure what NCCL talks through between the GPUs of a host; reading threads do not need it."""
    place = Path("/dev/shm")
    if not place.is_dir():
        return _warn("there is no /dev/shm", "start the container with shared memory, for example --shm-size=8g")
    size = shutil.disk_usage(place).total / GIB
    detail = f"/dev/shm holds {size:.2f} GiB"
    if size < LEAST_SHM_GIB and len(list_devices()) > 1:
        return _warn(detail, "start the container with more, for example --shm-size=8g")
    return _ok(detail)


def check_tensorboard() -> Check:
    if util.find_spec("tensorboard") is None:
        return _ok("not installed (optional)", 'pip install "vitrail[tensorboard]" to log to it')
    return _ok(f"version {find_version('tensorboard')}")


def check_zarr() -> Check:
    """Compare what zarr writes with what tensorstore reads back."""
    import numpy as np
    import tensorstore
    import zarr

    values = np.arange(4**3, dtype=np.uint8).reshape(4, 4, 4)
    formats: tuple[tuple[Literal[2, 3], str], ...] = ((2, "zarr"), (3, "zarr3"))
    for version, driver in formats:
        with disk.scratch("vitrail-doctor-") as folder:
            stored = zarr.create_array(folder, shape=values.shape, chunks=(2, 2, 2), dtype="u1", zarr_format=version)
            stored[:] = values
            spec = {"driver": driver, "kvstore": {"driver": "file", "path": f"{folder}/"}}
            back = np.asarray(tensorstore.open(spec, open=True, read=True).result().read().result())
        if not np.array_equal(back, values):
            return _fail(
                f"zarr v{version} came back changed", "pip install the zarr and tensorstore of constraints.txt"
            )
    return _ok(f"zarr {find_version('zarr')} and tensorstore {find_version('tensorstore')} agree on v2 and v3")
