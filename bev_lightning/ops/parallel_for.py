"""Runs a compiled loop on several threads."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import torch


def parallel_for(loop: Callable[..., None], count: int, *arguments: Any) -> None:
    """Run ``loop(start, stop, *arguments)`` over items 0..count-1, split evenly over the threads.

    The loop gets tensors as arrays. It must release the GIL (``njit(nogil=True)``) and write only
    to the outputs of its own items; then the result does not depend on the number of threads, which
    is PyTorch's.
    """
    arguments = tuple(a.detach().numpy() if isinstance(a, torch.Tensor) else a for a in arguments)
    parts = min(torch.get_num_threads(), count)
    if parts <= 1:
        loop(0, count, *arguments)
        return
    bounds = [count * part // parts for part in range(parts + 1)]
    with ThreadPoolExecutor(parts) as pool:
        list(pool.map(lambda part: loop(*part, *arguments), pairwise(bounds)))
