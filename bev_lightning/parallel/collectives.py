"""What the processes of one axis of a mesh tell one another while a network runs; differentiable.

A gradient goes back to the process whose value it is of, summed over all that used the value.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def gather_samples(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Every process's samples ``(B, ...)``, as ``(G * B, ...)`` in the order of the G processes."""
    gathered: Tensor = _Gather.apply(value, group)
    return gathered


def gather_rows(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Every process's rows ``(B, R, C)`` of the same samples, as ``(B, G * R, C)``."""
    gathered: Tensor = _Gather.apply(value, group)
    return gathered.view(group.size(), *value.shape).movedim(0, 1).flatten(1, 2)


def rows_to_samples(value: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """From some rows of everybody's samples to all rows of one's own.

    Args:
        value: ``(G * B, ..., R, ...)``, samples in the order of the processes.
        dim: where the rows are, at least 1.

    Returns:
        ``(B, ..., G * R, ...)``.
    """
    exchanged: Tensor = _Exchange.apply(value, group)
    parts = exchanged.view(group.size(), -1, *value.shape[1:])
    return parts.movedim(0, dim).flatten(dim, dim + 1)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        # Not every backend knows booleans.
        sent = value.contiguous().view(torch.uint8) if value.dtype == torch.bool else value
        gathered = sent.new_empty(group.size() * sent.shape[0], *sent.shape[1:])
        dist.all_gather_into_tensor(gathered, sent.contiguous(), group=group)
        return gathered.view(value.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        own = grad.new_empty(grad.shape[0] // ctx.group.size(), *grad.shape[1:])
        dist.reduce_scatter_tensor(own, grad.contiguous(), group=ctx.group)
        return own, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(value, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, value.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        received = torch.empty_like(grad, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, grad.contiguous(), group=ctx.group)
        return received, None
