"""Lidar branches: points to a BEV map."""

import torch
from torch import Tensor, nn

from bev_lightning.models.pillars import PillarEncoder
from bev_lightning.structures import BevGrid, Points


class LidarPillarBranch(nn.Module):
    """Lidar points to a BEV map by pillars: the light branch of the toy models.

    Args:
        grid: BEV grid of the result.
        out_channels: channels of the BEV map.
    """

    def __init__(self, grid: BevGrid, out_channels: int) -> None:
        super().__init__()
        self.pillars = PillarEncoder(grid, num_features=2, out_channels=out_channels)
        self.out_channels = out_channels

    def forward(self, points: Points) -> Tensor:
        """``(B, out_channels, Y, X)``."""
        # Intensity is stored as 0..255 and ten sweeps span half a second.
        scale = points.features.new_tensor([1 / 255, 2.0])
        return self.pillars(
            points.features[..., :3], points.features[..., 3:] * scale, points.count
        )
