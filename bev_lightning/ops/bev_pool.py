"""BEV pooling: sum the depth-weighted image features that fall into each cell of the BEV grid.

The lift of Lift, Splat, Shoot (Philion and Fidler 2020, section 3) is an outer product
``depth (D, h, w) x features (C, h, w)``, pooled over the BEV cells its points fall into. The
product is never materialised: a cell is a short list of (pixel, depth weight) pairs, a sparse
matrix times the features.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class PoolIndex:
    """Which points fall into which cell; it depends on the calibration and the grid alone, so that
    it can be built once for a fixed rig and passed to :func:`bev_pool_indexed` again and again.

    P counts the points inside the grid. A point is a pixel at one of its D depths; points are
    numbered pixel by pixel, as in a ``(B, N, h, w, D)`` tensor. All tensors are int32 (int64 past
    2^31 points).

    Attributes:
        points: ``(P,)`` number of each point, ascending: the order of pixels.
        cells: ``(P,)`` its cell, numbered as in a ``(B, Y, X)`` tensor.
        pixel_starts: ``(B * N * h * w,)`` first row of each pixel in ``points`` and ``cells``.
        order: ``(P,)`` rows of ``points`` sorted by cell, ascending within a cell.
        pixels: ``(P,)`` pixel of each row of ``order``, numbered as in a ``(B, N, h, w)`` tensor.
        cell_starts: ``(B * Y * X,)`` first row of each cell in ``order`` and ``pixels``.
        batch_size: B.
        shape: Y, X.
    """

    points: Tensor
    cells: Tensor
    pixel_starts: Tensor
    order: Tensor
    pixels: Tensor
    cell_starts: Tensor
    batch_size: int
    shape: tuple[int, int]


@torch.no_grad()
def build_pool_index(cells: Tensor, shape: tuple[int, int]) -> PoolIndex:
    """Sort the points inside the grid by pixel and by cell.

    Args:
        cells: ``(B, N, D, h, w)`` integer, BEV cell ``j * X + i`` of each point, -1 outside the
            grid.
        shape: Y, X of the grid.
    """
    batch_size, _, num_depths = cells.shape[:3]
    num_cells = shape[0] * shape[1]
    integer = torch.int32 if max(cells.numel(), batch_size * num_cells) < 2**31 else torch.int64
    by_pixel = cells.movedim(2, -1).reshape(batch_size, -1)
    # The number of points inside the grid is known to the device only, and the size of every list
    # below depends on it: the one host synchronisation of this file. A cached index never pays it.
    points = (by_pixel.flatten() >= 0).nonzero().squeeze(1)
    sample = torch.arange(batch_size, device=cells.device, dtype=by_pixel.dtype).unsqueeze(1)
    cell = (by_pixel.long() + sample * num_cells).flatten()[points].to(integer)
    pixel = (points // num_depths).to(integer)
    # A stable sort: the order of summation, and so the last bit, is the same at every run.
    sorted_cell, order = cell.sort(stable=True)
    num_pixels = cells.numel() // num_depths
    longest = max(num_pixels, batch_size * num_cells)
    arange = torch.arange(longest, device=cells.device, dtype=integer)
    return PoolIndex(
        points=points.to(integer),
        cells=cell,
        pixel_starts=_first_rows(pixel, arange[:num_pixels]),
        order=order.to(integer),
        pixels=pixel[order],
        cell_starts=_first_rows(sorted_cell, arange[: batch_size * num_cells]),
        batch_size=batch_size,
        shape=(shape[0], shape[1]),
    )


def _first_rows(values: Tensor, wanted: Tensor) -> Tensor:
    return torch.searchsorted(values, wanted, out_int32=wanted.dtype == torch.int32)


def bev_pool(depth: Tensor, features: Tensor, cells: Tensor, shape: tuple[int, int]) -> Tensor:
    """Pool ``depth x features`` into BEV cells, ``out[b, :, cell] += depth[b, n, d, v, u] *
    features[b, n, :, v, u]``.

    Sums are taken in float32 (float64 for float64 inputs), in a fixed order; gradients flow to the
    depth and to the features.

    Args:
        depth: ``(B, N, D, h, w)`` weight of each point.
        features: ``(B, N, C, h, w)``.
        cells: ``(B, N, D, h, w)`` integer, BEV cell ``j * X + i`` of each point, -1 outside the
            grid.
        shape: Y, X of the grid.

    Returns:
        ``(B, C, Y, X)`` in the type of ``features``; cells without a point are zero.
    """
    return bev_pool_indexed(depth, features, build_pool_index(cells, shape))


def bev_pool_indexed(depth: Tensor, features: Tensor, index: PoolIndex) -> Tensor:
    """:func:`bev_pool` with an index built before."""
    channels = features.shape[2]
    accumulate = torch.promote_types(depth.dtype, features.dtype)
    accumulate = torch.promote_types(accumulate, torch.float32)
    rows = features.movedim(2, -1).reshape(-1, channels).to(accumulate)
    weights = depth.movedim(2, -1).reshape(-1).to(accumulate)[index.points]
    pooled: Tensor = _Pool.apply(weights, rows, index)
    pooled = pooled.view(index.batch_size, *index.shape, channels)
    return pooled.permute(0, 3, 1, 2).to(features.dtype)


class _Pool(torch.autograd.Function):
    """Rows of pixels ``(B * N * h * w, C)`` and weights of points ``(P,)`` to rows of cells
    ``(B * Y * X, C)``."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, rows: Tensor, index: PoolIndex) -> Tensor:
        ctx.save_for_backward(weights, rows)
        ctx.index = index
        return _sum_rows(rows, index.pixels, index.cell_starts, weights[index.order])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        weights, rows = ctx.saved_tensors
        index: PoolIndex = ctx.index
        grad = grad.contiguous()
        # The gradient of a pixel is the same sum with the roles of pixels and cells exchanged, and
        # the gradient of a weight is the dot product <row of its pixel, gradient of its cell>,
        # which is the gradient of that exchanged sum with respect to its weights. Pixel by pixel
        # both read memory in order, so this is several times faster than the backward of the
        # forward sum.
        with torch.enable_grad():
            weights = weights.detach().requires_grad_(ctx.needs_input_grad[0])
            grad_rows = _sum_rows(grad, index.cells, index.pixel_starts, weights)
        grad_weights = None
        if ctx.needs_input_grad[0]:
            (grad_weights,) = torch.autograd.grad(grad_rows, weights, rows)
        return grad_weights, grad_rows.detach(), None


def _sum_rows(table: Tensor, rows: Tensor, starts: Tensor, weights: Tensor) -> Tensor:
    """``out[k] = sum over r in starts[k] .. starts[k + 1] of weights[r] * table[rows[r]]``."""
    if not rows.numel():
        # Tied to both inputs, so that an empty batch has zero gradients instead of none.
        return table.new_zeros(starts.numel(), table.shape[1]) + weights.sum()
    return F.embedding_bag(rows, table, starts, mode="sum", per_sample_weights=weights)
