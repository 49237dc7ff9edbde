"""Radar branch: returns of all radars to a BEV map."""

import torch
from torch import Tensor, nn

from bev_lightning.models.pillars import PillarEncoder
from bev_lightning.structures import BevGrid, Radar
from bev_lightning.structures.constants import constant


class RadarBranch(nn.Module):
    """Radar returns to a BEV map by pillars, with radar cross-section, compensated velocity, age
    and a one-hot sensor as features.

    Args:
        grid: BEV grid of the result.
        out_channels: channels of the BEV map.
        num_sensors: number of radars.
        norm_momentum: see :class:`PillarEncoder`.
    """

    def __init__(
        self, grid: BevGrid, out_channels: int, num_sensors: int = 5, norm_momentum: float = 0.01
    ) -> None:
        super().__init__()
        self.num_sensors = num_sensors
        self.pillars = PillarEncoder(grid, 4 + num_sensors, out_channels, norm_momentum)
        self.out_channels = out_channels

    def forward(self, radar: Radar) -> Tensor:
        """``(B, out_channels, Y, X)``."""
        # RCS is some tens of dBsm, velocities some m/s, six sweeps span half a second.
        scale = constant((1 / 20, 1 / 10, 1 / 10, 2.0), radar.features)
        sensors = torch.arange(self.num_sensors, device=scale.device)
        sensor = radar.features[..., 7:].round() == sensors
        features = torch.cat([radar.features[..., 3:7] * scale, sensor.to(scale.dtype)], dim=-1)
        bev: Tensor = self.pillars(radar.features[..., :3], features, radar.count)
        return bev
