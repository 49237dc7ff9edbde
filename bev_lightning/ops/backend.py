"""Which implementation an operator runs, the same rule for all of them.

``reference``: plain PyTorch operations, for any device, for export and to compare with; ``numba``:
loops for a CPU; ``triton``: kernels for a GPU. The latter two stand behind a custom operator, so
that FakeTensor, torch.compile and torch.export pass through it.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, Literal

import torch

# Triton decides when a kernel is defined, that is at import.
_IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_HAS_TRITON = find_spec("triton") is not None
_is_reference_forced = False


@contextmanager
def use_reference() -> Iterator[None]:
    """All operators called inside run their reference, in all threads of the process."""
    global _is_reference_forced
    before, _is_reference_forced = _is_reference_forced, True
    try:
        yield
    finally:
        _is_reference_forced = before


def choose(device: torch.device) -> Literal["reference", "numba", "triton"]:
    """The implementation for tensors on ``device``. With TRITON_INTERPRET=1 the Triton kernels run
    on the CPU too, slowly, which is how they are tested without a GPU."""
    if _is_reference_forced:
        return "reference"
    if _HAS_TRITON and (device.type == "cuda" or (_IS_INTERPRETED and device.type == "cpu")):
        return "triton"
    return "numba" if device.type in ("cpu", "meta") else "reference"


def share_out(loop: Callable[..., None], count: int, *arguments: Any) -> None:
    """Run ``loop(start, stop, *arguments)`` over ``0 <= item < count`` on PyTorch's number of
    threads, each with one run of items.

    The loop must release the GIL (``njit(nogil=True)``) and write to the outputs of its own items
    only; then the result does not depend on the number of threads.
    """
    parts = min(torch.get_num_threads(), count)
    if parts <= 1:
        loop(0, count, *arguments)
        return
    bounds = [count * part // parts for part in range(parts + 1)]
    with ThreadPoolExecutor(parts) as pool:
        jobs = [pool.submit(loop, start, stop, *arguments) for start, stop in pairwise(bounds)]
        for job in jobs:
            job.result()
