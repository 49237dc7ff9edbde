"""Numba CPU kernels of BEV pooling, compiled on first use.

``fastmath`` lets the compiler vectorise sums; their order is fixed when a loop is compiled.
"""

import numpy as np
import torch
from numba import njit
from torch import Tensor

from bev_lightning.ops.parallel_for import parallel_for

_FAST = {"contract", "reassoc", "nsz"}


def sort_points(cells: Tensor, num_cells: int) -> tuple[Tensor, Tensor, Tensor]:
    """``points``, ``pixels`` and ``starts`` of a PoolIndex, by counting sort."""
    batch, num_cameras, num_depths, height, width = cells.shape
    points = cells.new_empty(cells.numel())
    pixels = torch.empty_like(points)
    # With an extra cell for the points outside the grid, whose end is cut off.
    starts = cells.new_zeros(batch * num_cells + 2)
    shape = (batch, num_cameras, num_depths, height * width)
    _sort_points(
        cells.view(shape).numpy(), num_cells, points.numpy(), pixels.numpy(), starts.numpy()
    )
    return points, pixels, starts[:-1].clone()


def pool(
    depth: Tensor, rows: Tensor, points: Tensor, pixels: Tensor, starts: Tensor, dtype: torch.dtype
) -> Tensor:
    """Sum pixel features ``(B * N * h * w, C)`` into cells ``(B * Y * X, C)``."""
    out = rows.new_empty(len(starts) - 1, rows.shape[1], dtype=dtype)
    inputs = depth.flatten().to(dtype), rows.to(dtype), points, pixels, starts
    parallel_for(_sum_points, len(out), *inputs, out)
    return out.to(rows.dtype)


def pool_backward(
    grad: Tensor, depth: Tensor, rows: Tensor, cells: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Gradients of depth and pixel features from that of the cells ``(B * Y * X, C)``."""
    batch, num_cameras, num_depths, height, width = depth.shape
    shape = (batch * num_cameras, num_depths, height * width)
    by_sample = grad.to(dtype).view(batch, len(grad) // max(batch, 1), grad.shape[1])
    inputs = by_sample, depth.to(dtype).view(shape), rows.to(dtype), cells.view(shape)
    grads = inputs[1].new_empty(shape), torch.empty_like(inputs[2])
    parallel_for(_backward, len(rows), num_cameras, *inputs, *grads)
    return grads[0].view_as(depth).to(depth.dtype), grads[1].to(rows.dtype)


@njit(cache=True, nogil=True)
def _sort_points(cells, num_cells, points, pixels, starts):  # type: ignore[no-untyped-def]
    batch, num_cameras, num_depths, area = cells.shape
    outside = batch * num_cells
    for sample in range(batch):
        for cell in cells[sample].flat:
            starts[outside + 1 if cell < 0 else sample * num_cells + cell + 1] += 1
    for cell in range(1, outside + 2):
        starts[cell] += starts[cell - 1]
    next_row = starts[:-1].copy()
    point = 0
    for sample in range(batch):
        for camera in range(num_cameras):
            first = (sample * num_cameras + camera) * area
            for depth in range(num_depths):
                for pixel in range(area):
                    cell = cells[sample, camera, depth, pixel]
                    cell = outside if cell < 0 else sample * num_cells + cell
                    row = next_row[cell]
                    next_row[cell] = row + 1
                    points[row] = point
                    pixels[row] = first + pixel
                    point += 1


@njit(cache=True, nogil=True, fastmath=_FAST)
def _sum_points(first, last, depth, rows, points, pixels, starts, out):  # type: ignore[no-untyped-def]
    channels = rows.shape[1]
    total = np.empty(channels, rows.dtype)
    for cell in range(first, last):
        total[:] = 0
        for row in range(starts[cell], starts[cell + 1]):
            weight, pixel = depth[points[row]], pixels[row]
            for c in range(channels):
                total[c] += weight * rows[pixel, c]
        for c in range(channels):
            out[cell, c] = total[c]


@njit(cache=True, nogil=True, fastmath=_FAST)
def _backward(  # type: ignore[no-untyped-def]
    first, last, num_cameras, grad, depth, rows, cells, grad_depth, grad_rows
):
    """Runs over pixels in memory order: the D cells and weights of a pixel are on D cache lines,
    which the next pixels use too."""
    num_depths, area = depth.shape[1:]
    channels = rows.shape[1]
    for pixel in range(first, last):
        image, offset = pixel // area, pixel % area
        sample = image // num_cameras
        for c in range(channels):
            grad_rows[pixel, c] = 0.0
        for d in range(num_depths):
            cell = cells[image, d, offset]
            if cell < 0:
                grad_depth[image, d, offset] = 0.0
                continue
            weight = depth[image, d, offset]
            total = weight * 0
            for c in range(channels):
                total += grad[sample, cell, c] * rows[pixel, c]
                grad_rows[pixel, c] += weight * grad[sample, cell, c]
            grad_depth[image, d, offset] = total
