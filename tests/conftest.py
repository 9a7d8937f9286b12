"""Fixtures that several tests share."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def volume(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small OME-Zarr volume."""
    from support import write_volume

    return write_volume(tmp_path_factory.mktemp("data") / "em.zarr")
