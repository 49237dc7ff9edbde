"""Points to voxels: dynamic (every point has its cell) and hard (first come, first served).

Cells are ordered (z, y, x) as in BEV maps ``(B, C, Y, X)``; MIT BEVFusion orders them (x, y, z).
"""

import torch
from torch import Tensor

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
    xyz = features[..., :3].float()
    # A tensor as divisor: a GPU would multiply by the reciprocal of a number, which rounds
    # otherwise.
    cell = ((xyz - xyz.new_tensor(range_m[:3])) / xyz.new_tensor(cell_m)).floor_()
    inside = ((cell >= 0) & (cell < cell.new_tensor([width, height, depth]))).all(dim=-1)
    inside &= torch.arange(rows, device=features.device) < count.unsqueeze(1)
    x, y, z = torch.where(inside.unsqueeze(-1), cell, 0).long().unbind(-1)
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
    depth, height, width = grid_shape(range_m, cell_m)
    cells = assign_cells(features, count, range_m, cell_m)
    if features.device.type == "cpu":
        from bev_lightning.ops.voxelize_cpu import number_voxels

        numbers, slots, first = number_voxels(cells.contiguous().numpy(), max_points, max_voxels)
        voxel, slot, first_point = (torch.from_numpy(array) for array in (numbers, slots, first))
    else:
        voxel, slot, first_point = _number_voxels(cells, max_points, max_voxels)
    kept = (slot >= 0).nonzero().squeeze(1)
    flat = features.flatten(0, 1).detach()
    voxels = flat.new_zeros(len(first_point), max_points, features.shape[2])
    voxels[voxel[kept], slot[kept]] = flat[kept]
    num_points = torch.bincount(voxel[kept], minlength=len(first_point))
    cell = cells.flatten()[first_point]
    coords = [cell // (width * height * depth), cell // (width * height) % depth]
    coords += [cell // width % height, cell % width]
    return voxels, torch.stack(coords, dim=1), num_points


def _number_voxels(
    cells: Tensor, max_points: int, max_voxels: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The voxel and the place in it of each point, by sorting: for any device.

    The sizes of the results are known to the device alone, so a GPU waits for the host three times.

    Args:
        cells: ``(B, P)`` cells, -1 for points that are dropped.

    Returns:
        ``(B * P,)`` number of the voxel (meaningless where the point is not kept), ``(B * P,)``
        place in it, -1 where the point is not kept, and ``(V,)`` row of each voxel's first point.
    """
    samples, rows = cells.shape
    flat = cells.flatten()
    order = (flat >= 0).nonzero().squeeze(1)
    # Stable: the points of a cell keep their order, so the first of a run is the cell's first
    # point.
    sorted_cells, permutation = torch.sort(flat[order], stable=True)
    order = order[permutation]
    _, run, lengths = torch.unique_consecutive(
        sorted_cells, return_inverse=True, return_counts=True
    )
    starts = lengths.cumsum(0) - lengths
    first_point, by_age = torch.sort(order[starts])
    sample = torch.div(first_point, max(rows, 1), rounding_mode="floor")
    before = torch.searchsorted(sample, torch.arange(samples, device=cells.device))
    opened = torch.arange(len(sample), device=cells.device) - before[sample] < max_voxels
    number = torch.empty_like(by_age)
    number[by_age] = torch.where(opened, opened.long().cumsum(0) - 1, -1)
    rank = torch.arange(len(order), device=cells.device) - starts[run]
    voxel, slot = torch.full_like(flat, -1), torch.full_like(flat, -1)
    voxel[order] = number[run]
    slot[order] = torch.where((rank < max_points) & (number[run] >= 0), rank, -1)
    return voxel, slot, first_point[opened]
