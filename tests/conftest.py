"""Fixtures that several rooms share."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def parity_dir() -> Path:
    """Recorded inputs, weights and outputs of the published models; skips where there are none."""
    return _folder("BEV_PARITY_DIR", "the recordings of the published models")


@pytest.fixture(scope="session")
def nuscenes_dir() -> Path:
    """A nuScenes data set with real frames; skips where there is none."""
    return _folder("BEV_NUSCENES_DIR", "real nuScenes frames")


@pytest.fixture(autouse=True)
def _single_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning leaves the rank of its last run in the environment."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def _folder(variable: str, content: str) -> Path:
    value = os.environ.get(variable)
    if not value:
        pytest.skip(f"{variable} is not set; it names the folder with {content}")
    return Path(value)
