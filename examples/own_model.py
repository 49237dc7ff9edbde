"""A network of your own: points counted per BEV cell, three convolutions, a heatmap head."""

import torch
from torch import Tensor, nn

from bev_lightning.models.heads import CentreHead
from bev_lightning.structures import Batch, BevGrid, Boxes3D
from bev_lightning.structures.predictions import HeatmapPredictions


class OccupancyNet(nn.Module):
    """Detects from how many lidar points fall into each cell; a DetectionNetwork."""

    def __init__(self, grid: BevGrid, num_classes: int, channels: int = 32) -> None:
        super().__init__()
        self.grid = grid
        self.stem = nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.ReLU(),
        )
        self.head = CentreHead(grid, channels, num_classes, channels, num_boxes=100)

    def forward(self, batch: Batch) -> HeatmapPredictions:
        """Heatmap and boxes on the grid."""
        return self.head(self.stem(self.count_points(batch)))

    def decode(self, predictions: HeatmapPredictions) -> Boxes3D:
        """Boxes ``(B, M)`` in the model frame, with scores."""
        return self.head.decode(predictions)

    def count_points(self, batch: Batch) -> Tensor:
        """Log of the number of points per cell ``(B, 1, Y, X)``."""
        assert batch.points is not None
        height, width = self.grid.shape
        points, rows = batch.points.features, batch.points.features.shape[1]
        x, y = self.grid.to_cells(points[..., :2]).floor().long().unbind(-1)
        inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
        inside &= torch.arange(rows, device=points.device) < batch.points.count[:, None]
        counts = points.new_zeros(batch.size, height * width)
        cell = torch.where(inside, y * width + x, 0)
        counts.scatter_add_(1, cell, inside.to(points.dtype))
        return counts.log1p().view(batch.size, 1, height, width)
