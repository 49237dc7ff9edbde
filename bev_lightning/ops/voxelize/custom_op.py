"""The ``torch.library`` operator of hard voxelisation."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bev_lightning.ops.backend import choose_backend
from bev_lightning.ops.voxelize.reference import voxelize_hard_reference


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
    if choose_backend(features.device) == "numba":
        from bev_lightning.ops.voxelize import cpu

        return cpu.voxelize_hard(features, count, range_m, cell_m, max_points, max_voxels)
    return voxelize_hard_reference(features, count, range_m, cell_m, max_points, max_voxels)


@voxelize_hard.register_fake
def _(
    features: Tensor, count: Tensor, range_m: Any, cell_m: Any, max_points: int, max_voxels: int
) -> tuple[Tensor, Tensor, Tensor]:
    num_voxels = torch.library.get_ctx().new_dynamic_size()
    return (
        features.new_empty(num_voxels, max_points, features.shape[2]),
        features.new_empty((num_voxels, 4), dtype=torch.int64),
        features.new_empty((num_voxels,), dtype=torch.int64),
    )
