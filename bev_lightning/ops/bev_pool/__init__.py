"""BEV pooling: sum the depth-weighted image features that fall into each cell of the BEV grid.

The lift of Lift, Splat, Shoot (Philion and Fidler 2020, section 3) is an outer product
``depth (D, h, w) x features (C, h, w)``, pooled over the BEV cells its points fall into. The
product is never materialised: a cell is an interval in a list of points sorted by cell (as in
BEVPoolV2, Huang and Huang 2022), and each sum has one owner, which adds in the list's order and
writes once. So there is no atomic addition and the result is the same to the bit at every run and
thread count.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bev_lightning.ops.backend import choose


@dataclass(frozen=True)
class PoolIndex:
    """Which points fall into which cell; it depends on the calibration and the grid alone, so that
    it can be built once for a fixed rig.

    A point is a pixel at one of its D depths; points are numbered as in a ``(B, N, D, h, w)``
    tensor and there are P. No length depends on the calibration, so that building needs no host
    synchronisation and shapes are the same at every step. All tensors are int32.

    Attributes:
        cells: ``(B, N, D, h, w)`` cell ``j * X + i`` of each point, -1 outside the grid.
        points: ``(P,)`` points sorted by sample and cell, ascending within a cell; those outside
            the grid come last.
        pixels: ``(P,)`` pixel of each row of ``points``, numbered as in a ``(B, N, h, w)`` tensor.
        starts: ``(B * Y * X + 1,)`` first row of each cell in ``points``, and the end of the last.
        shape: Y, X.
    """

    cells: Tensor
    points: Tensor
    pixels: Tensor
    starts: Tensor
    shape: tuple[int, int]


@torch.no_grad()
def build_pool_index(cells: Tensor, shape: tuple[int, int]) -> PoolIndex:
    """Sort the points by cell, where ``cells`` is.

    Under training augmentation this happens in every step. It belongs on the device that pools, not
    into the loader: the cells follow from a few 4 x 4 matrices, while the index is 8 bytes a point,
    which the loader would have to sort and ship.

    Args:
        cells: ``(B, N, D, h, w)`` integer, BEV cell ``j * X + i`` of each point, -1 outside the
            grid.
        shape: Y, X of the grid.

    Raises:
        ValueError: more points or cells than an int32 counts.
    """
    height, width = int(shape[0]), int(shape[1])
    if max(cells.numel(), cells.shape[0] * height * width) >= 2**31 - 1:
        raise ValueError(
            f"bev_pool counts points and cells in int32, which the frustum {tuple(cells.shape)} or "
            f"the grid {(height, width)} exceeds; lower the batch size"
        )
    cells = cells.to(torch.int32).contiguous()
    build = _build_index if choose(cells.device) == "numba" else _build_index_torch
    points, pixels, starts = build(cells, height * width)
    return PoolIndex(cells, points, pixels, starts, (height, width))


def bev_pool(depth: Tensor, features: Tensor, index: PoolIndex) -> Tensor:
    """Pool ``depth x features`` into BEV cells, ``out[b, :, cell] += depth[b, n, d, v, u] *
    features[b, n, :, v, u]``.

    Sums are taken in float32 (float64 for float64 inputs), whatever the precision around; gradients
    flow to the depth and to the features.

    Args:
        depth: ``(B, N, D, h, w)`` weight of each point.
        features: ``(B, N, C, h, w)``.
        index: the cell of each point, from :func:`build_pool_index`.

    Returns:
        ``(B, C, Y, X)`` in the type of ``features``, laid out channels last; cells without a point
        are zero.

    Raises:
        ValueError: the shapes do not fit one another.
    """
    channels = features.shape[2]
    if depth.shape != index.cells.shape or (
        (*features.shape[:2], *features.shape[3:]) != (*depth.shape[:2], *depth.shape[3:])
    ):
        raise ValueError(
            f"bev_pool got depth {tuple(depth.shape)} and features {tuple(features.shape)} for "
            f"points {tuple(index.cells.shape)}"
        )
    rows = features.movedim(2, -1).reshape(-1, channels)
    if choose(depth.device) == "reference":
        pooled = _pool_reference(depth, rows, index)
    else:
        pooled = _pool(depth, rows, index.cells, index.points, index.pixels, index.starts)
    return pooled.view(len(depth), *index.shape, channels).permute(0, 3, 1, 2)


def _pool_reference(depth: Tensor, rows: Tensor, index: PoolIndex) -> Tensor:
    """Rows of pixels ``(B * N * h * w, C)`` to rows of cells ``(B * Y * X, C)``: the product in
    full, one row more for the points outside the grid."""
    batch, num_cameras, _, height, width = depth.shape
    num_cells = index.shape[0] * index.shape[1]
    sample = torch.arange(batch, device=depth.device).view(-1, 1, 1, 1, 1)
    target = torch.where(index.cells < 0, batch * num_cells, index.cells + sample * num_cells)
    accumulate = _accumulate_type(depth, rows)
    pixels = rows.to(accumulate).view(batch, num_cameras, 1, height, width, rows.shape[1])
    lifted = (depth.to(accumulate).unsqueeze(-1) * pixels).flatten(0, -2)
    pooled = lifted.new_zeros(batch * num_cells + 1, rows.shape[1])
    return pooled.index_add(0, target.flatten(), lifted)[:-1].to(rows.dtype)


@torch.library.custom_op("bev_lightning::bev_pool", mutates_args=())
def _pool(
    depth: Tensor, rows: Tensor, cells: Tensor, points: Tensor, pixels: Tensor, starts: Tensor
) -> Tensor:
    depth, rows = depth.contiguous(), rows.contiguous()
    accumulate = _accumulate_type(depth, rows)
    if choose(depth.device) == "triton":
        from bev_lightning.ops.bev_pool.triton import pool

        return pool(depth, rows, points, pixels, starts, accumulate)
    from bev_lightning.ops.bev_pool.cpu import pool as pool_cpu

    wide = pool_cpu(depth.to(accumulate), rows.to(accumulate), points, pixels, starts)
    return wide.to(rows.dtype)


@_pool.register_fake
def _(
    depth: Tensor, rows: Tensor, cells: Tensor, points: Tensor, pixels: Tensor, starts: Tensor
) -> Tensor:
    return rows.new_empty(starts.shape[0] - 1, rows.shape[1])


@torch.library.custom_op("bev_lightning::bev_pool_backward", mutates_args=())
def _pool_backward(
    grad: Tensor, depth: Tensor, rows: Tensor, cells: Tensor
) -> tuple[Tensor, Tensor]:
    grad, depth, rows = grad.contiguous(), depth.contiguous(), rows.contiguous()
    accumulate = _accumulate_type(depth, rows)
    if choose(depth.device) == "triton":
        from bev_lightning.ops.bev_pool.triton import pool_backward

        return pool_backward(grad, depth, rows, cells, accumulate)
    from bev_lightning.ops.bev_pool.cpu import pool_backward as backward_cpu

    grad_depth, grad_rows = backward_cpu(
        grad.to(accumulate), depth.to(accumulate), rows.to(accumulate), cells
    )
    return grad_depth.to(depth.dtype), grad_rows.to(rows.dtype)


@_pool_backward.register_fake
def _(grad: Tensor, depth: Tensor, rows: Tensor, cells: Tensor) -> tuple[Tensor, Tensor]:
    return depth.new_empty(depth.shape), rows.new_empty(rows.shape)


def _setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    # The backward goes pixel by pixel: the cells as they are, its own intervals, are all it needs.
    ctx.save_for_backward(*inputs[:3])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
    return *_pool_backward(grad, *ctx.saved_tensors), None, None, None, None


_pool.register_autograd(_backward, setup_context=_setup_context)


@torch.library.custom_op("bev_lightning::pool_index", mutates_args=())
def _build_index(cells: Tensor, num_cells: int) -> tuple[Tensor, Tensor, Tensor]:
    from bev_lightning.ops.bev_pool.cpu import sort_points

    return sort_points(cells, num_cells)


@_build_index.register_fake
def _(cells: Tensor, num_cells: int) -> tuple[Tensor, Tensor, Tensor]:
    points = cells.new_empty(cells.numel())
    return points, torch.empty_like(points), cells.new_empty(cells.shape[0] * num_cells + 1)


def _build_index_torch(cells: Tensor, num_cells: int) -> tuple[Tensor, Tensor, Tensor]:
    batch, _, num_depths, height, width = cells.shape
    sample = torch.arange(batch, device=cells.device, dtype=torch.int32).view(-1, 1, 1, 1, 1)
    key = torch.where(cells < 0, batch * num_cells, cells + sample * num_cells).flatten()
    # A stable sort: the order of summation, and so the last bit, is the same at every run.
    key, points = key.sort(stable=True)
    wanted = torch.arange(batch * num_cells + 1, device=cells.device, dtype=torch.int32)
    starts = torch.searchsorted(key, wanted, out_int32=True)
    area = height * width
    pixels = points // (num_depths * area) * area + points % area if area else points
    return points.int(), pixels.int(), starts


def _accumulate_type(depth: Tensor, rows: Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(depth.dtype, rows.dtype), torch.float32)
