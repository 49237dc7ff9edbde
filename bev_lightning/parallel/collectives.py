"""Differentiable collectives between processes that share the rows of a BEV map.

A gradient returns to the process whose value it belongs to, summed over all that used the value.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class RowParallelGroup:
    """:class:`bev_lightning.models.protocol.RowParallel` over a process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    @property
    def size(self) -> int:
        return self.group.size()

    @property
    def rank(self) -> int:
        return self.group.rank()

    def gather_samples(self, value: Tensor) -> Tensor:
        gathered: Tensor = _Gather.apply(value, self.group)
        return gathered

    def gather_rows(self, value: Tensor) -> Tensor:
        gathered: Tensor = _Gather.apply(value, self.group)
        return gathered.view(self.size, *value.shape).movedim(0, 1).flatten(1, 2)

    def rows_to_samples(self, value: Tensor, dim: int) -> Tensor:
        exchanged: Tensor = _Exchange.apply(value, self.group)
        parts = exchanged.view(self.size, -1, *value.shape[1:])
        return parts.movedim(0, dim).flatten(dim, dim + 1)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        # Not every backend supports booleans.
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
