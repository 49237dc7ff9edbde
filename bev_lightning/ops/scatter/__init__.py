"""Pooling of rows into cells: the maximum, the sum and the mean of the points in each pillar.

Each operator has one owner for each output and a fixed order of addition, so that the result does
not depend on the number of threads or on the order in which a GPU runs its blocks. (Of a reference
on a GPU it does.)
"""

from typing import Any

import torch
from torch import Tensor

from bev_lightning.ops.backend import choose


def scatter_max(values: Tensor, index: Tensor, num_cells: int) -> Tensor:
    """Channel-wise maximum of the rows that share a cell.

    The gradient goes to the row that holds the maximum, to the first one among equals.

    Args:
        values: ``(M, C)`` floating point.
        index: ``(M,)`` int64 cell of each row, in 0..num_cells-1.
        num_cells: rows of the result.

    Returns:
        ``(num_cells, C)``, zero in cells without rows.
    """
    if choose(values.device) == "reference":
        winner = _scatter_max_torch(values.detach(), index, num_cells)[1]
        padded = torch.cat([values, values.new_zeros(1, values.shape[1])])
        return padded.gather(0, torch.where(winner < 0, len(values), winner))
    pooled: Tensor = _scatter_max(values, index, num_cells)[0]
    return pooled


def scatter_sum(values: Tensor, index: Tensor, num_cells: int) -> Tensor:
    """Sum of the rows ``(M, C)`` that share a cell of ``index`` ``(M,)``: ``(num_cells, C)``, added
    in the order of the rows."""
    if choose(values.device) == "reference":
        wide = values.to(_wide(values.dtype))
        added = wide.new_zeros(num_cells, values.shape[1]).index_add(0, index, wide)
        return added.to(values.dtype)
    total: Tensor = _scatter_sum(values, index, num_cells)
    return total


def scatter_mean(values: Tensor, index: Tensor, num_cells: int) -> Tensor:
    """Mean of the rows ``(M, C)`` that share a cell of ``index`` ``(M,)``: ``(num_cells, C)``, zero
    in cells without rows."""
    count = torch.bincount(index, minlength=num_cells).clamp(min=1)
    return scatter_sum(values, index, num_cells) / count.unsqueeze(1).to(values.dtype)


@torch.library.custom_op("bev_lightning::scatter_max", mutates_args=())
def _scatter_max(values: Tensor, index: Tensor, num_cells: int) -> tuple[Tensor, Tensor]:
    if values.device.type == "cpu":
        from bev_lightning.ops.scatter.cpu import max_rows

        wide = values.detach().to(_wide(values.dtype)).contiguous()
        pooled, winner = max_rows(wide.numpy(), index.contiguous().numpy(), num_cells)
        return torch.from_numpy(pooled).to(values.dtype), torch.from_numpy(winner)
    return _scatter_max_torch(values, index, num_cells)


def _scatter_max_torch(values: Tensor, index: Tensor, num_cells: int) -> tuple[Tensor, Tensor]:
    """The same for any device: the maximum, then the lowest row that reaches it."""
    num_rows, channels = values.shape
    where = index.unsqueeze(1).expand(-1, channels)
    pooled = values.new_zeros(num_cells, channels)
    pooled.scatter_reduce_(0, where, values, "amax", include_self=False)
    rows = torch.arange(num_rows, device=values.device).unsqueeze(1).expand(-1, channels)
    rows = torch.where(values == pooled[index], rows, num_rows)
    winner = index.new_full((num_cells, channels), num_rows)
    winner.scatter_reduce_(0, where, rows, "amin")
    return pooled, torch.where(winner == num_rows, -1, winner)


@_scatter_max.register_fake
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


_scatter_max.register_autograd(_max_backward, setup_context=_max_context)


@torch.library.custom_op("bev_lightning::scatter_sum", mutates_args=())
def _scatter_sum(values: Tensor, index: Tensor, num_cells: int) -> Tensor:
    wide = values.to(_wide(values.dtype))
    total = wide.new_zeros(num_cells, values.shape[1])
    if values.device.type == "cpu":
        return total.index_add_(0, index, wide).to(values.dtype)  # rows are added one after another
    return _scatter_sum_torch(wide, index, total).to(values.dtype)


def _scatter_sum_torch(values: Tensor, index: Tensor, total: Tensor) -> Tensor:
    """The sum written into ``total``, for any device: index_add_ on a GPU adds in any order, a
    stable sort gives each cell its run of rows instead."""
    if len(index) == 0:
        return total
    cells, order = torch.sort(index, stable=True)
    cells, lengths = torch.unique_consecutive(cells, return_counts=True)
    runs = torch.segment_reduce(values[order], "sum", lengths=lengths, axis=0, unsafe=True)
    return total.index_copy_(0, cells, runs)


@_scatter_sum.register_fake
def _(values: Tensor, index: Tensor, num_cells: int) -> Tensor:
    return values.new_empty((num_cells, values.shape[1]))


def _sum_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _sum_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    (index,) = ctx.saved_tensors
    return grad.index_select(0, index), None, None


_scatter_sum.register_autograd(_sum_backward, setup_context=_sum_context)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Accumulate half precision in float32."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
