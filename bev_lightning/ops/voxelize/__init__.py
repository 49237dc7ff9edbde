"""Points to voxels: dynamic (every point has its cell) and hard (first come, first served).

Cells are ordered (z, y, x) as in BEV maps ``(B, C, Y, X)``; MIT BEVFusion orders them (x, y, z).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from bev_lightning.ops.backend import choose

Range = tuple[float, float, float, float, float, float]
Cell = tuple[float, float, float]


def grid_shape(range_m: Range, cell_m: Cell) -> tuple[int, int, int]:
    """Number of cells (Z, Y, X) of the range x_min, y_min, z_min, x_max, y_max, z_max [m] cut into
    cells of the extent x, y, z [m]."""
    x, y, z = (round((range_m[axis + 3] - range_m[axis]) / cell_m[axis]) for axis in (0, 1, 2))
    return z, y, x


def assign_cells(features: Tensor, count: Tensor, range_m: Range, cell_m: Cell) -> Tensor:
    """Dynamic voxelisation: the cell of every point.

    The cell is ``floor((p - minimum) / cell)`` in float32, as in the published voxelisers.

    Args:
        features: ``(B, P, F)`` points, x, y, z [m] first.
        count: ``(B,)`` points of each sample; the rows after them are padding.
        range_m: x_min, y_min, z_min, x_max, y_max, z_max [m].
        cell_m: extent of a cell along x, y, z [m].

    Returns:
        ``(B, P)`` int64 flat cell ``((b * Z + z) * Y + y) * X + x``, -1 for padding and for points
        out of range.
    """
    depth, height, width = grid_shape(range_m, cell_m)
    samples, rows = features.shape[:2]
    inside = torch.arange(rows, device=features.device) < count.unsqueeze(1)
    cells = []
    for axis, num_cells in enumerate((width, height, depth)):
        # A tensor as divisor: a GPU would multiply by the reciprocal of a number, which rounds
        # otherwise. Filled by the device itself, which a copy would wait for.
        divisor = torch.full((), cell_m[axis], dtype=torch.float32, device=features.device)
        cell = ((features[..., axis].float() - range_m[axis]) / divisor).floor_()
        inside = inside & (cell >= 0) & (cell < num_cells)
        cells.append(cell)
    x, y, z = (torch.where(inside, cell, 0).long() for cell in cells)
    sample = torch.arange(samples, device=features.device).unsqueeze(1)
    return torch.where(inside, ((sample * depth + z) * height + y) * width + x, -1)


def voxelize_hard(
    features: Tensor,
    count: Tensor,
    range_m: Range,
    cell_m: Cell,
    max_points: int,
    max_voxels: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Hard voxelisation (VoxelNet, Zhou and Tuzel 2018), first come, first served.

    Voxels are numbered in the order of their first point. A voxel keeps its first ``max_points``
    points. Once a sample has ``max_voxels`` voxels no new one is opened, but later points still
    enter those that exist. CPU and GPU give the same voxels in the same order. No gradient.

    Args:
        features: ``(B, P, F)`` points, x, y, z [m] first.
        count: ``(B,)`` points of each sample; the rows after them are padding.
        range_m: x_min, y_min, z_min, x_max, y_max, z_max [m].
        cell_m: extent of a voxel along x, y, z [m].
        max_points: points kept in a voxel.
        max_voxels: voxels kept in a sample.

    Returns:
        Points of the V voxels of the batch ``(V, max_points, F)``, padded with zeros; their
        coordinates ``(V, 4)`` int64 as sample, z, y, x; and their number of points ``(V,)`` int64.
        Voxels of one sample stand together, samples in order.
    """
    result: tuple[Tensor, Tensor, Tensor] = _voxelize(
        features.detach(), count, range_m, cell_m, max_points, max_voxels
    )
    return result


@torch.library.custom_op("bev_lightning::voxelize_hard", mutates_args=())
def _voxelize(
    features: Tensor,
    count: Tensor,
    range_m: Sequence[float],
    cell_m: Sequence[float],
    max_points: int,
    max_voxels: int,
) -> tuple[Tensor, Tensor, Tensor]:
    extent, cell = _six(range_m), _three(cell_m)
    if choose(features.device) == "numba":
        from bev_lightning.ops.voxelize.cpu import voxelize

        shape = grid_shape(extent, cell)
        return voxelize(features, count, extent, cell, shape, max_points, max_voxels)
    return _voxelize_torch(features, count, extent, cell, max_points, max_voxels)


@_voxelize.register_fake
def _(
    features: Tensor,
    count: Tensor,
    range_m: Sequence[float],
    cell_m: Sequence[float],
    max_points: int,
    max_voxels: int,
) -> tuple[Tensor, Tensor, Tensor]:
    num_voxels = torch.library.get_ctx().new_dynamic_size()
    return (
        features.new_empty(num_voxels, max_points, features.shape[2]),
        features.new_empty((num_voxels, 4), dtype=torch.int64),
        features.new_empty((num_voxels,), dtype=torch.int64),
    )


def _voxelize_torch(
    features: Tensor,
    count: Tensor,
    range_m: Range,
    cell_m: Cell,
    max_points: int,
    max_voxels: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """By one sort, for any device. The number of voxels is known to the device alone: the host
    waits for it once, for it is the length of the result."""
    samples, num_rows, width = features.shape
    device = features.device
    cells = assign_cells(features, count, range_m, cell_m).flatten()
    inside = cells >= 0
    # Stable: the points of a cell keep their order, so that the first of a run is the cell's first.
    sorted_cells, order = torch.sort(
        torch.where(inside, cells, torch.iinfo(torch.int64).max), stable=True
    )
    position = torch.arange(len(order), device=device)
    begins = torch.ones_like(inside)
    begins[1:] = sorted_cells[1:] != sorted_cells[:-1]
    start = torch.where(begins, position, 0)
    start = start.cummax(0).values if len(start) else start
    first, rank = torch.empty_like(order), torch.empty_like(order)
    first[order], rank[order] = order[start], position - start
    # In the order of the points: who opens a voxel, and who still may.
    opens = (inside & (first == position)).view(samples, num_rows)
    opened = (opens & (opens.long().cumsum(1) <= max_voxels)).flatten()
    number = opened.long().cumsum(0) - 1
    first_point = opened.nonzero().squeeze(1)
    num_voxels = len(first_point)
    kept = inside & opened[first] & (rank < max_points)
    # One place more, for what is not kept.
    place = torch.where(kept, number[first] * max_points + rank, num_voxels * max_points)
    voxels = features.new_zeros(num_voxels * max_points + 1, width)
    voxels[place] = features.flatten(0, 1)
    num_points = torch.zeros(num_voxels + 1, dtype=torch.int64, device=device)
    num_points.index_add_(0, torch.where(kept, number[first], num_voxels), kept.long())
    cell = cells[first_point]
    depth, height, columns = grid_shape(range_m, cell_m)
    coords = [cell // (columns * height * depth), cell // (columns * height) % depth]
    coords += [cell // columns % height, cell % columns]
    return (
        voxels[:-1].view(num_voxels, max_points, width),
        torch.stack(coords, dim=1),
        num_points[:-1],
    )


def _six(values: Sequence[float]) -> Range:
    x_min, y_min, z_min, x_max, y_max, z_max = values
    return x_min, y_min, z_min, x_max, y_max, z_max


def _three(values: Sequence[float]) -> Cell:
    x, y, z = values
    return x, y, z
