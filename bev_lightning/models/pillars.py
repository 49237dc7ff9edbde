"""Encodes lidar points or radar returns as a BEV map of pillars, with no limit per pillar."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bev_lightning.ops.scatter import scatter_max, scatter_mean
from bev_lightning.ops.voxelize import assign_cells
from bev_lightning.structures import BevGrid
from bev_lightning.structures.constants import constant


class RowNorm(nn.BatchNorm1d):
    """Batch norm over the rows of a point cloud ``(M, C)`` that may be empty.

    With fewer than two rows there is no variance, so the running statistics are used as in
    evaluation. It converts to SyncBatchNorm like any other batch norm.
    """

    def forward(self, rows: Tensor) -> Tensor:
        if self.training and rows.shape[0] < 2:
            return F.batch_norm(
                rows,
                self.running_mean,
                self.running_var,
                self.weight,
                self.bias,
                False,
                0.0,
                self.eps,
            )
        return super().forward(rows)


class PillarEncoder(nn.Module):
    """Dynamic pillars (PointPillars, Lang et al. 2019, with the dynamic voxelisation of Zhou et al.
    2020): a point's inputs are its position in the grid, its offsets from its pillar's centre and
    from the mean of the pillar's points, and its features; then one linear layer, norm, ReLU, and
    the maximum over the pillar.

    Positions are divided by the range's half extent and offsets by the cell, so that the inputs of
    the linear layer are of the order of one for any grid.

    Args:
        grid: BEV grid of the result; points outside its range are dropped.
        num_features: features of a point besides x, y, z, of the order of one.
        out_channels: channels of the BEV map.
        norm_momentum: of the batch norm; the published value is for trainings of 10,000 steps.
    """

    def __init__(
        self, grid: BevGrid, num_features: int, out_channels: int, norm_momentum: float = 0.01
    ) -> None:
        super().__init__()
        self.grid = grid
        self.num_features = num_features
        self.out_channels = out_channels
        self.linear = nn.Linear(3 + 2 + 3 + num_features, out_channels, bias=False)
        self.norm = RowNorm(out_channels, eps=1e-3, momentum=norm_momentum)

    def forward(self, xyz: Tensor, features: Tensor, count: Tensor) -> Tensor:
        """Pool points into pillars.

        Args:
            xyz: ``(B, P, 3)`` [m].
            features: ``(B, P, num_features)``.
            count: ``(B,)`` points of each sample; the rows after them are padding.

        Returns:
            ``(B, out_channels, Y, X)``, zero in pillars without points (channels last in memory).
        """
        low, high = self.grid.range[:3], self.grid.range[3:]
        height, width = self.grid.shape
        num_cells = xyz.shape[0] * height * width
        cells = assign_cells(
            xyz, count, self.grid.range, (*self.grid.cell, high[2] - low[2])
        ).flatten()
        # The only host synchronisation; padding must not enter the norm's statistics.
        kept = (cells >= 0).nonzero().squeeze(1)
        cells = cells[kept]
        points = xyz.flatten(0, 1)[kept].float()
        least, most = constant(low, points), constant(high, points)
        centre, half_extent = (least + most) / 2, (most - least) / 2
        size = constant((*self.grid.cell, (high[2] - low[2]) / 2), points)
        index = torch.stack([cells % width, cells // width % height], dim=1)
        position = (points - centre) / half_extent
        from_centre = (points[:, :2] - least[:2]) / size[:2] - index - 0.5
        from_mean = (points - scatter_mean(points, cells, num_cells)[cells]) / size
        rows = torch.cat(
            [position, from_centre, from_mean, features.flatten(0, 1)[kept].float()], dim=1
        )
        rows = F.relu(self.norm(self.linear(rows)))
        bev = scatter_max(rows, cells, num_cells)
        return bev.view(xyz.shape[0], height, width, self.out_channels).permute(0, 3, 1, 2)
