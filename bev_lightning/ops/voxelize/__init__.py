"""Voxelisation of point clouds: dynamic (a cell per point) and hard (first come, first served).

Cells are ordered (z, y, x) as in BEV maps ``(B, C, Y, X)``; MIT BEVFusion orders them (x, y, z).
"""

from torch import Tensor

from bev_lightning.ops.voxelize import custom_op
from bev_lightning.ops.voxelize.reference import Cell, Range, assign_cells, grid_shape

__all__ = ["Cell", "Range", "assign_cells", "grid_shape", "voxelize_hard"]


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
    points. Once a sample has ``max_voxels`` voxels no new one is created, but later points still
    enter existing ones. CPU and GPU give the same voxels in the same order. No gradient.

    Args:
        features: ``(B, P, F)`` points, x, y, z [m] first.
        count: ``(B,)`` points of each sample; the rows after them are padding.
        range_m: x_min, y_min, z_min, x_max, y_max, z_max [m].
        cell_m: extent of a voxel along x, y, z [m].
        max_points: points kept per voxel.
        max_voxels: voxels kept per sample.

    Returns:
        Points of the V voxels of the batch ``(V, max_points, F)``, padded with zeros; their
        coordinates ``(V, 4)`` int64 as sample, z, y, x; and their number of points ``(V,)`` int64.
        Samples are in order, each with all its voxels.
    """
    result: tuple[Tensor, Tensor, Tensor] = custom_op.voxelize_hard(
        features.detach(), count, range_m, cell_m, max_points, max_voxels
    )
    return result
