"""Numbers of a configuration as tensors."""

from collections.abc import Sequence

import torch
from torch import Tensor


def constant(values: Sequence[float], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """``values`` as a tensor ``(len(values),)`` on the device of ``like`` and, without ``dtype``,
    in its type.

    ``like.new_tensor(values)`` would copy them from the host and wait until the device has come to
    it. Here the device writes them itself, in its own time; a CUDA graph can hold that too.
    """
    dtype = like.dtype if dtype is None else dtype
    return torch.stack([torch.full((), v, dtype=dtype, device=like.device) for v in values])
