"""The ``torch.library`` operators of BEV pooling and their gradients."""

from typing import Any

import torch
from torch import Tensor

from bev_lightning.ops.backend import accumulation_dtype, load_kernels


@torch.library.custom_op("bev_lightning::bev_pool", mutates_args=())
def pool(
    depth: Tensor, rows: Tensor, cells: Tensor, points: Tensor, pixels: Tensor, starts: Tensor
) -> Tensor:
    """Sum pixel features ``(B * N * h * w, C)`` into cells ``(B * Y * X, C)``."""
    kernels, dtype = load_kernels(__package__, rows.device), accumulation_dtype(depth, rows)
    inputs = depth.contiguous(), rows.contiguous(), points, pixels, starts
    out: Tensor = kernels.pool(*inputs, dtype)
    return out


@pool.register_fake
def _(depth: Tensor, rows: Tensor, *index: Tensor) -> Tensor:
    return rows.new_empty(index[-1].shape[0] - 1, rows.shape[1])


@torch.library.custom_op("bev_lightning::bev_pool_backward", mutates_args=())
def _pool_backward(
    grad: Tensor, depth: Tensor, rows: Tensor, cells: Tensor
) -> tuple[Tensor, Tensor]:
    kernels, dtype = load_kernels(__package__, rows.device), accumulation_dtype(depth, rows)
    inputs = grad.contiguous(), depth.contiguous(), rows.contiguous(), cells
    grads: tuple[Tensor, Tensor] = kernels.pool_backward(*inputs, dtype)
    return grads


@_pool_backward.register_fake
def _(grad: Tensor, depth: Tensor, rows: Tensor, cells: Tensor) -> tuple[Tensor, Tensor]:
    return depth.new_empty(depth.shape), rows.new_empty(rows.shape)


def _setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    # The backward runs over pixels and needs only the cell of each point, not the sorted list.
    ctx.save_for_backward(*inputs[:3])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
    return *_pool_backward(grad, *ctx.saved_tensors), None, None, None, None


pool.register_autograd(_backward, setup_context=_setup_context)


@torch.library.custom_op("bev_lightning::pool_index", mutates_args=())
def sort_points(cells: Tensor, num_cells: int) -> tuple[Tensor, Tensor, Tensor]:
    """``points``, ``pixels`` and ``starts`` of a PoolIndex, on a CPU."""
    from bev_lightning.ops.bev_pool import cpu

    return cpu.sort_points(cells, num_cells)


@sort_points.register_fake
def _(cells: Tensor, num_cells: int) -> tuple[Tensor, Tensor, Tensor]:
    points = cells.new_empty(cells.numel())
    return points, torch.empty_like(points), cells.new_empty(cells.shape[0] * num_cells + 1)
