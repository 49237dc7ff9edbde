"""Plain PyTorch implementation of voxelisation, for any device."""

from collections.abc import Sequence

import torch
from torch import Tensor

Range = tuple[float, float, float, float, float, float]
Cell = tuple[float, float, float]


def grid_shape(range_m: Sequence[float], cell_m: Sequence[float]) -> tuple[int, int, int]:
    """Number of cells (Z, Y, X) of a range.

    Args:
        range_m: x_min, y_min, z_min, x_max, y_max, z_max [m].
        cell_m: extent of a cell along x, y, z [m].
    """
    x, y, z = (round((range_m[axis + 3] - range_m[axis]) / cell_m[axis]) for axis in (0, 1, 2))
    return z, y, x


def assign_cells(
    features: Tensor, count: Tensor, range_m: Sequence[float], cell_m: Sequence[float]
) -> Tensor:
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
        # The divisor is a tensor, because a GPU would multiply by the reciprocal of a number, which
        # rounds differently. torch.full fills it on the device; a copy would synchronise.
        divisor = torch.full((), cell_m[axis], dtype=torch.float32, device=features.device)
        cell = ((features[..., axis].float() - range_m[axis]) / divisor).floor_()
        inside = inside & (cell >= 0) & (cell < num_cells)
        cells.append(cell)
    x, y, z = (torch.where(inside, cell, 0).long() for cell in cells)
    sample = torch.arange(samples, device=features.device).unsqueeze(1)
    return torch.where(inside, ((sample * depth + z) * height + y) * width + x, -1)


def voxelize_hard_reference(
    features: Tensor,
    count: Tensor,
    range_m: Sequence[float],
    cell_m: Sequence[float],
    max_points: int,
    max_voxels: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Hard voxelisation by one sort; see :func:`bev_lightning.ops.voxelize.voxelize_hard`.

    Synchronises with the device once: the number of voxels is a shape of the results.
    """
    samples, num_rows, width = features.shape
    device = features.device
    cells = assign_cells(features, count, range_m, cell_m).flatten()
    inside = cells >= 0
    # Stable, so that the first point of each run is the first point of its cell.
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
    # In the order of the points: which would create a voxel, and which may.
    opens = (inside & (first == position)).view(samples, num_rows)
    opened = (opens & (opens.long().cumsum(1) <= max_voxels)).flatten()
    number = opened.long().cumsum(0) - 1
    first_point = opened.nonzero().squeeze(1)
    num_voxels = len(first_point)
    kept = inside & opened[first] & (rank < max_points)
    # Points that are not kept go to an extra row.
    row = torch.where(kept, number[first] * max_points + rank, num_voxels * max_points)
    voxels = features.new_zeros(num_voxels * max_points + 1, width)
    voxels[row] = features.flatten(0, 1)
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
