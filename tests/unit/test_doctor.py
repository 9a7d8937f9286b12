"""The doctor finds what is wrong, says what to do, and a stored environment carries no secret."""

import json
import os
import subprocess
from pathlib import Path

import pytest

import vitrail
from vitrail.launch import machine


@pytest.fixture(scope="module")
def checks(tmp_path_factory):
    return {check["name"]: check for check in machine.doctor(tmp_path_factory.mktemp("disk"))}


def test_every_check_has_its_fields_and_passes_here(checks):
    assert len(checks) == 14
    for check in checks.values():
        assert set(check) == {"name", "status", "detail", "remedy"}
        assert check["status"] in ("ok", "warn", "fail")
        assert check["detail"]
        assert check["remedy"] or check["status"] == "ok"
    assert [name for name, check in checks.items() if check["status"] == "fail"] == []


def test_nothing_is_left_behind(tmp_path):
    import torch.distributed as dist

    machine.check_disk(tmp_path)
    machine.check_gloo()
    assert list(tmp_path.iterdir()) == []
    assert not dist.is_initialized()


def test_attention_names_the_kernels_that_ran(checks):
    assert "math" in checks["attention"]["detail"]


def test_a_check_that_breaks_fails_and_the_others_go_on(monkeypatch, tmp_path):
    def broken():
        raise OSError("libzarr.so: cannot open\nsecond line")

    monkeypatch.setattr(machine, "check_zarr", broken)
    monkeypatch.setattr(machine, "check_gloo", broken)
    found = {check["name"]: check for check in machine.doctor(tmp_path)}
    assert found["zarr"]["status"] == found["gloo"]["status"] == "fail"
    assert found["zarr"]["detail"] == "OSError: libzarr.so: cannot open"
    assert found["nccl"]["status"] == "ok" or found["nccl"]["remedy"]


def test_zarr_that_comes_back_changed_fails(monkeypatch):
    import tensorstore

    open_array = tensorstore.open

    class Changed:
        """Reads zeros, whatever was stored."""

        def __init__(self, value):
            self.value = value

        def result(self):
            return Changed(self.value.result())

        def read(self):
            return Changed(self.value.read())

        def __array__(self, dtype=None, copy=None):
            return self.value * 0

    monkeypatch.setattr(tensorstore, "open", lambda *args, **options: Changed(open_array(*args, **options)))
    assert machine.check_zarr()["status"] == "fail"


@pytest.mark.parametrize(
    ("requirements", "wrong"),
    [
        (["numpy>=99.1", "torch>=2.0"], "numpy>=99.1"),
        (["torch >= 2.0", "no-such-package>=1"], "no-such-package>=1"),
    ],
)
def test_a_package_that_is_old_or_missing_fails_with_the_command_to_mend_it(monkeypatch, requirements, wrong):
    monkeypatch.setattr(machine.metadata, "requires", lambda _: requirements)
    check = machine.check_packages()
    assert check["status"] == "fail"
    assert check["remedy"] == f"pip install '{wrong}'"


def test_packages_of_extras_are_not_asked_for(monkeypatch):
    monkeypatch.setattr(machine.metadata, "requires", lambda _: ['no-such-package>=1; extra == "dev"'])
    assert machine.check_packages()["status"] == "ok"


def test_versions_compare_as_numbers():
    assert machine.version_numbers("2.13.0+cpu") == (2, 13, 0)
    assert machine.version_numbers("0.1.86") > machine.version_numbers("0.1.9")
    assert machine.version_numbers("3.0.0rc1") == (3, 0, 0)


def test_a_disk_that_cannot_be_written_fails(monkeypatch, tmp_path):
    def refuse(**_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(machine.tempfile, "TemporaryFile", refuse)
    check = machine.check_disk(tmp_path)
    assert check["status"] == "fail"
    assert str(tmp_path) in check["detail"]


def test_a_full_disk_warns(monkeypatch, tmp_path):
    usage = type("Usage", (), {"free": 2**30, "total": 2**40})
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: usage)
    check = machine.check_disk(tmp_path)
    assert check["status"] == "warn"
    assert check["detail"].startswith("1.0 GiB free")


def test_more_threads_than_cores_warn(monkeypatch):
    import torch

    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(machine, "usable_cores", lambda: 2)
    check = machine.check_threads()
    assert check["status"] == "warn"
    assert "OMP_NUM_THREADS=2" in check["remedy"]


def test_few_open_files_warn(monkeypatch):
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    assert machine.check_open_files()["status"] == "warn"
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert machine.check_open_files() == {"status": "ok", "detail": "no limit", "remedy": ""}


def test_no_compiler_warns(monkeypatch):
    monkeypatch.setattr(machine.shutil, "which", lambda _: None)
    check = machine.check_compile()
    assert check["status"] == "warn"
    assert "no C++ compiler" in check["detail"]


def test_missing_tensorboard_names_the_extra(monkeypatch):
    monkeypatch.setattr(machine.util, "find_spec", lambda _: None)
    assert 'pip install "vitrail[tensorboard]"' in machine.check_tensorboard()["remedy"]


# ---------------------------------------------------------------- environment


def test_environment_is_json_and_holds_no_variable(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "hunter2hunter2")
    monkeypatch.setattr(machine.sys, "argv", ["/x/bin/vitrail", "train", "a.yaml", "u=s3://me:hunter2@host/a b"])
    stored = machine.environment()
    text = json.dumps(stored)
    assert "hunter2" not in text
    assert stored["command"] == "vitrail train a.yaml 'u=s3://host/a b'"
    assert stored["vitrail"] == vitrail.__version__
    assert set(stored["packages"]) == {"torch", "numpy", "tensorstore", "zarr", "torchao"}
    assert stored["cpu"]["cores"] == len(os.sched_getaffinity(0))
    assert stored["date"].endswith("+00:00")


def test_the_command_of_a_module_can_be_typed_again():
    assert machine.describe_command(["/x/vitrail/__main__.py", "doctor"]) == "python -m vitrail doctor"


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", *identity, *words], cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository with a package in it, which the machine takes for its own."""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    package = tmp_path / "src" / "vitrail"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    git(tmp_path, "init", "-q")
    monkeypatch.setattr(vitrail, "__file__", str(package / "__init__.py"))
    return tmp_path


def test_the_commit_of_a_checkout_is_found_and_changes_are_seen(checkout):
    git(checkout, "add", ".")
    git(checkout, "commit", "-qm", "one")
    assert machine.find_commit() == (git(checkout, "rev-parse", "HEAD"), False)
    (checkout / "src/vitrail/__init__.py").write_text("x = 1\n")
    assert machine.find_commit()[1] is True


def test_a_repository_that_does_not_track_the_package_is_not_its_own(checkout):
    (checkout / "other.txt").write_text("")
    git(checkout, "add", "other.txt")
    git(checkout, "commit", "-qm", "one")
    assert machine.find_commit() == (None, None)


def test_no_git_is_no_commit(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert machine.find_commit() == (None, None)
