"""The ``torch.library`` operators of pooling rows into cells, and their gradients."""

from typing import Any

import torch
from torch import Tensor

from bev_lightning.ops.backend import accumulation_dtype
from bev_lightning.ops.scatter.reference import (
    scatter_max_reference,
    scatter_sum_reference,
    scatter_sum_sorted,
)


@torch.library.custom_op("bev_lightning::scatter_max", mutates_args=())
def scatter_max(values: Tensor, index: Tensor, num_cells: int) -> tuple[Tensor, Tensor]:
    """Maximum of each cell and the row that holds it, -1 in cells without rows."""
    if values.device.type == "cpu":
        from bev_lightning.ops.scatter import cpu

        wide = values.detach().to(accumulation_dtype(values)).contiguous()
        pooled, winner = cpu.scatter_max(wide, index.contiguous(), num_cells)
        return pooled.to(values.dtype), winner
    return scatter_max_reference(values, index, num_cells)


@scatter_max.register_fake
def _(values: Tensor, index: Tensor, num_cells: int) -> tuple[Tensor, Tensor]:
    shape = (num_cells, values.shape[1])
    return values.new_empty(shape), index.new_empty(shape)


def _max_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])
    ctx.num_rows = inputs[0].shape[0]


def _max_backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor, None, None]:
    (winner,) = ctx.saved_tensors
    # Cells without rows write into one extra row; every other (row, channel) has a single writer.
    result = grad.new_zeros(ctx.num_rows + 1, grad.shape[1])
    result.scatter_(0, torch.where(winner < 0, ctx.num_rows, winner), grad)
    return result[: ctx.num_rows], None, None


scatter_max.register_autograd(_max_backward, setup_context=_max_context)


@torch.library.custom_op("bev_lightning::scatter_sum", mutates_args=())
def scatter_sum(values: Tensor, index: Tensor, num_cells: int) -> Tensor:
    """Sum of each cell, added in the order of the rows."""
    if values.device.type == "cpu":
        return scatter_sum_reference(values, index, num_cells)  # index_add is sequential on a CPU
    return scatter_sum_sorted(values, index, num_cells)


@scatter_sum.register_fake
def _(values: Tensor, index: Tensor, num_cells: int) -> Tensor:
    return values.new_empty((num_cells, values.shape[1]))


def _sum_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _sum_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    (index,) = ctx.saved_tensors
    return grad.index_select(0, index), None, None


scatter_sum.register_autograd(_sum_backward, setup_context=_sum_context)
