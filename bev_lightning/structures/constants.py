"""Configured numbers as tensors, without a copy from the host."""

from collections.abc import Sequence

import torch
from torch import Tensor


def constant(values: Sequence[float], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """``values`` as a tensor ``(len(values),)`` on the device of ``like`` and, without ``dtype``,
    in its type.

    ``like.new_tensor(values)`` would copy them from the host and synchronise. Here the device fills
    them in asynchronously, also in a CUDA graph.
    """
    dtype = like.dtype if dtype is None else dtype
    return torch.stack([torch.full((), v, dtype=dtype, device=like.device) for v in values])
