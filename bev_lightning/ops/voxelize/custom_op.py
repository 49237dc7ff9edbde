"""The ``torch.library`` operator of hard voxelisation."""

from collections.abc import Sequence

import torch
from torch import Tensor

from bev_lightning.ops.backend import choose_backend
from bev_lightning.ops.voxelize.reference import Cell, Range, grid_shape, voxelize_hard_reference


@torch.library.custom_op("bev_lightning::voxelize_hard", mutates_args=())
def voxelize_hard(
    features: Tensor,
    count: Tensor,
    range_m: Sequence[float],
    cell_m: Sequence[float],
    max_points: int,
    max_voxels: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`bev_lightning.ops.voxelize.voxelize_hard`."""
    x_min, y_min, z_min, x_max, y_max, z_max = range_m
    extent: Range = (x_min, y_min, z_min, x_max, y_max, z_max)
    x, y, z = cell_m
    cell: Cell = (x, y, z)
    if choose_backend(features.device) == "numba":
        from bev_lightning.ops.voxelize import cpu

        shape = grid_shape(extent, cell)
        return cpu.voxelize_hard(features, count, extent, cell, shape, max_points, max_voxels)
    return voxelize_hard_reference(features, count, extent, cell, max_points, max_voxels)


@voxelize_hard.register_fake
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
