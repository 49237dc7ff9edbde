"""Lidar branches: points to a BEV map, by pillars or by voxels."""

from typing import cast

import torch
from torch import Tensor, nn

from bev_lightning.models.pillars import PillarEncoder
from bev_lightning.models.sparse_encoder import TYPICAL_NUM_VOXELS, SparseEncoder
from bev_lightning.ops.voxelize import Cell, Range, voxelize_hard
from bev_lightning.structures import BevGrid, Points
from bev_lightning.structures.constants import constant


class LidarPillarBranch(nn.Module):
    """Lidar points to a BEV map by pillars, the light branch of the toy models.

    Args:
        grid: BEV grid of the result.
        out_channels: channels of the BEV map.
        norm_momentum: see :class:`PillarEncoder`.
    """

    def __init__(self, grid: BevGrid, out_channels: int, norm_momentum: float = 0.01) -> None:
        super().__init__()
        self.pillars = PillarEncoder(grid, 2, out_channels, norm_momentum)
        self.out_channels = out_channels

    def forward(self, points: Points) -> Tensor:
        """``(B, out_channels, Y, X)``."""
        # Intensity is stored as 0..255 and ten sweeps span half a second.
        features = points.features[..., 3:] * constant((1 / 255, 2.0), points.features)
        bev: Tensor = self.pillars(points.features[..., :3], features, points.count)
        return bev


class MeanVoxels(nn.Module):
    """Hard voxels, each the mean of the points it keeps (the published mean VFE).

    Args:
        range: x_min, y_min, z_min, x_max, y_max, z_max [m].
        voxel: extent of a voxel along x, y, z [m].
        max_points: points kept in a voxel.
        max_voxels: voxels kept in a sample in training and in evaluation.
    """

    def __init__(
        self,
        range: Range,
        voxel: Cell,
        max_points: int = 10,
        max_voxels: tuple[int, int] = (120_000, 160_000),
    ) -> None:
        super().__init__()
        self.range = cast(Range, tuple(float(value) for value in range))
        self.voxel = cast(Cell, tuple(float(value) for value in voxel))
        self.max_points = max_points
        self.max_voxels = max_voxels

    @torch.no_grad()
    def forward(self, points: Points) -> tuple[Tensor, Tensor]:
        """Features ``(V, 5)`` float32 of the batch's voxels and their coordinates ``(V, 4)`` int64
        as sample, z, y, x."""
        voxels, coords, num_points = voxelize_hard(
            points.features,
            points.count,
            self.range,
            self.voxel,
            self.max_points,
            self.max_voxels[0 if self.training else 1],
        )
        return voxels.float().sum(dim=1) / num_points.unsqueeze(1), coords


class LidarVoxelBranch(nn.Module):
    """Lidar points to a BEV map by voxels and sparse convolutions, the published branch.

    Args:
        voxels: the voxeliser.
        encoder: the sparse encoder; its grid is at least the voxeliser's.
    """

    def __init__(self, voxels: MeanVoxels, encoder: SparseEncoder) -> None:
        super().__init__()
        self.voxels = voxels
        self.encoder = encoder
        self.out_channels = encoder.out_channels

    def forward(self, points: Points) -> Tensor:
        """``(B, out_channels, Y, X)``."""
        features, coords = self.voxels(points)
        plan = self.encoder.plan(coords, points.count.shape[0])
        bev: Tensor = self.encoder(features, plan)
        return bev

    def fake_forward(self, points: Points) -> Tensor:
        """The same with a typical number of voxels, see
        :class:`bev_lightning.models.protocol.SupportsFakeForward`."""
        size = points.count.shape[0]
        features = torch.empty(size * TYPICAL_NUM_VOXELS[0], points.features.shape[-1])
        bev: Tensor = self.encoder(features, self.encoder.typical_plan(size))
        return bev
