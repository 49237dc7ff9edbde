"""A head of your own: CenterPoint's with one more convolution before it."""

from typing import Any

from torch import Tensor, nn

from bev_lightning.models.heads import CentreHead
from bev_lightning.structures.predictions import HeatmapPredictions


class DeeperHead(CentreHead):
    """CentreHead behind a residual convolution."""

    def __init__(self, in_channels: int, **arguments: Any) -> None:
        super().__init__(in_channels=in_channels, **arguments)
        self.before = nn.Sequential(
            nn.Conv2d(in_channels, in_channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(in_channels),
            nn.ReLU(),
        )

    def forward(self, bev: Tensor) -> HeatmapPredictions:
        """Detect on a BEV map ``(B, C, Y, X)``."""
        return super().forward(bev + self.before(bev))
