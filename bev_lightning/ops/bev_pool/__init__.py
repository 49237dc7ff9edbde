"""BEV pooling: sums depth-weighted image features in each cell of the BEV grid.

The lift of Lift, Splat, Shoot (Philion and Fidler 2020, section 3) is an outer product
``depth (D, h, w) x features (C, h, w)``, summed over the points in each BEV cell. The product is
never materialised: points are sorted by cell, so that a cell is an interval of the sorted list (as
in BEVPoolV2, Huang and Huang 2022). One thread sums each cell in the order of the list and writes
it once. There is no atomic addition, and the result is bit-identical at every run and thread count.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from bev_lightning.ops.backend import choose_backend
from bev_lightning.ops.bev_pool.custom_op import pool, sort_points
from bev_lightning.ops.bev_pool.reference import pool_reference, sort_points_reference


@dataclass(frozen=True)
class PoolIndex:
    """The points of each BEV cell.

    It depends only on the calibration and the grid, so that it can be reused for a fixed rig.

    A point is a pixel at one of its D depths; points are numbered as in a ``(B, N, D, h, w)``
    tensor and there are P of them. No shape depends on the calibration: building needs no host
    synchronisation and shapes are the same at every step. All tensors are int32.

    Attributes:
        cells: ``(B, N, D, h, w)`` cell ``j * X + i`` of each point, -1 outside the grid.
        points: ``(P,)`` points sorted by sample and cell, ascending within a cell; those outside
            the grid come last.
        pixels: ``(P,)`` pixel of each entry of ``points``, numbered as in a ``(B, N, h, w)``
            tensor.
        starts: ``(B * Y * X + 1,)`` index in ``points`` of the first point of each cell, and the
            end of the last cell.
        shape: Y, X.
    """

    cells: Tensor
    points: Tensor
    pixels: Tensor
    starts: Tensor
    shape: tuple[int, int]


@torch.no_grad()
def build_pool_index(cells: Tensor, shape: tuple[int, int]) -> PoolIndex:
    """Sort the points by cell, on the device of ``cells``.

    With training augmentation this runs in every step. Run it on the device that pools, not in the
    loader: the cells follow from a few 4 x 4 matrices, while the index takes 8 bytes per point.

    Args:
        cells: ``(B, N, D, h, w)`` integer, BEV cell ``j * X + i`` of each point, -1 outside the
            grid.
        shape: Y, X of the grid.

    Raises:
        ValueError: more points or cells than int32 can number.
    """
    height, width = int(shape[0]), int(shape[1])
    if max(cells.numel(), cells.shape[0] * height * width) >= 2**31 - 1:
        raise ValueError(
            f"bev_pool numbers points and cells in int32, which frustum {tuple(cells.shape)} or "
            f"grid {(height, width)} exceeds; lower the batch size"
        )
    cells = cells.to(torch.int32).contiguous()
    sort = sort_points if choose_backend(cells.device) == "numba" else sort_points_reference
    points, pixels, starts = sort(cells, height * width)
    return PoolIndex(cells, points, pixels, starts, (height, width))


def bev_pool(depth: Tensor, features: Tensor, index: PoolIndex) -> Tensor:
    """Sum ``depth x features`` in each BEV cell.

    ``out[b, :, cell] += depth[b, n, d, v, u] * features[b, n, :, v, u]``. Sums are taken in float32
    (float64 for float64 inputs), also under autocast. Gradients flow to depth and features.

    Args:
        depth: ``(B, N, D, h, w)`` weight of each point.
        features: ``(B, N, C, h, w)``.
        index: from :func:`build_pool_index`.

    Returns:
        ``(B, C, Y, X)`` in the dtype of ``features``, channels last; cells without a point are
        zero.

    Raises:
        ValueError: the shapes do not match.
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
    if choose_backend(depth.device) == "reference":
        pooled = pool_reference(depth, rows, index.cells, index.shape[0] * index.shape[1])
    else:
        pooled = pool(depth, rows, index.cells, index.points, index.pixels, index.starts)
    return pooled.view(len(depth), *index.shape, channels).permute(0, 3, 1, 2)
