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
    # A tensor as divisor: a GPU would multiply by the reciprocal of a number, which rounds otherwise.
    cell = ((xyz - xyz.new_tensor(range_m[:3])) / xyz.new_tensor(cell_m)).floor_()
    inside = ((cell >= 0) & (cell < cell.new_tensor([width, height, depth]))).all(dim=-1)
    inside &= torch.arange(rows, device=features.device) < count.unsqueeze(1)
    x, y, z = torch.where(inside.unsqueeze(-1), cell, 0).long().unbind(-1)
    sample = torch.arange(samples, device=features.device).unsqueeze(1)
    return torch.where(inside, ((sample * depth + z) * height + y) * width + x, -1)
