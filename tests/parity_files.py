"""Reads the recordings of the official code (folder ``BEV_PARITY_DIR``) for the parity tests."""

import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

ROOT = os.environ.get("BEV_PARITY_DIR")
needs_parity_files = pytest.mark.skipif(
    not ROOT, reason="BEV_PARITY_DIR is not set to a folder of outputs of the official code"
)


def parity_folders(pattern: str) -> list[Path]:
    """Folders of recordings; empty where there are none."""
    return sorted(Path(ROOT).glob(pattern)) if ROOT else []


@lru_cache(maxsize=8)
def read_arrays(folder: Path, name: str) -> dict[str, np.ndarray]:
    with np.load(folder / name) as arrays:
        return {key: arrays[key] for key in arrays.files}


@lru_cache(maxsize=8)
def read_tensors(folder: Path, name: str) -> dict[str, Tensor]:
    return {key: torch.from_numpy(value) for key, value in read_arrays(folder, name).items()}


def recorded_outputs(pattern: str) -> list[Any]:
    """``(folder, name)`` of every recorded output, for parametrize."""
    cases = []
    for folder in parity_folders(pattern):
        with np.load(folder / "outputs.npz") as arrays:
            cases += [pytest.param(folder, name, id=f"{folder.name}:{name}") for name in arrays]
    return cases
