"""Chooses the implementation of an operator: plain PyTorch, Numba or Triton.

``reference`` is plain PyTorch: it runs on any device, can be exported, and the kernels are tested
against it. ``numba`` (CPU) and ``triton`` (GPU) run behind a custom operator, so that FakeTensor,
torch.compile and torch.export see one opaque node.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor

# Triton reads it when a kernel is defined, that is, at import.
_IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_HAS_TRITON = find_spec("triton") is not None
_is_reference_forced = False


@contextmanager
def use_reference() -> Iterator[None]:
    """Context in which all operators run their reference, in all threads of the process."""
    global _is_reference_forced
    before, _is_reference_forced = _is_reference_forced, True
    try:
        yield
    finally:
        _is_reference_forced = before


def choose_backend(device: torch.device) -> Literal["reference", "numba", "triton"]:
    """The implementation for tensors on a device.

    With TRITON_INTERPRET=1 the Triton kernels also run on the CPU, slowly, to test them without a
    GPU.
    """
    if _is_reference_forced:
        return "reference"
    if _HAS_TRITON and (device.type == "cuda" or (_IS_INTERPRETED and device.type == "cpu")):
        return "triton"
    return "numba" if device.type in ("cpu", "meta") else "reference"


def load_kernels(package: str, device: torch.device) -> Any:
    """The kernels of an operator for a device: the module ``triton`` or ``cpu`` of its package."""
    return import_module(f"{package}.{'triton' if choose_backend(device) == 'triton' else 'cpu'}")


def accumulation_dtype(*tensors: Tensor) -> torch.dtype:
    """The dtype in which sums over tensors are taken: their common one, at least float32."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype
