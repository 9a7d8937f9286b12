"""Fixtures that several tests share."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))

# Threads of a pool wait for each other in busy loops: beside other work, a step of milliseconds then takes seconds.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Nothing is judged by the clock.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

# Folders that tests make are their user's own, as those of stages must be; some systems let a group write them.
os.umask(0o022)

# A shell starts background jobs with Ctrl-C ignored, nohup with hang-ups, and what they start ignores them, too: tests
# send them.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, handler)


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is kept between runs (indexes, statistics, copies) stays out of the user's folders."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VITRAIL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A test that sets the number of threads does so for itself."""
    yield
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


@pytest.fixture(scope="session")
def volume(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small OME-Zarr volume."""
    from support import write_volume

    return write_volume(tmp_path_factory.mktemp("data") / "em.zarr")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked gpu are skipped where there is none."""
    if any(item.get_closest_marker("gpu") for item in items):
        import torch

        if not torch.cuda.is_available():
            for item in items:
                if item.get_closest_marker("gpu"):
                    item.add_marker(pytest.mark.skip(reason="PyTorch sees no GPU"))
