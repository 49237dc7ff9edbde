"""Initialises object queries: learned, or from given cells of the BEV map."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bev_lightning.structures import BevGrid
from bev_lightning.structures.constants import constant

# The bias of a classifier that starts at a probability of 0.1 (RetinaNet, section 4.1).
PRIOR_BIAS = -math.log(9.0)


@dataclass(frozen=True)
class InitialQueries:
    """Object queries before the first decoder layer.

    Attributes:
        query, position: ``(B, Q, C)`` content and positional encoding.
        reference: ``(B, Q, 3)`` x, y, z as fractions of the grid's range, float32.
        logits: ``(B, Q, K)`` class logits that every layer adds to, or None.
    """

    query: Tensor
    position: Tensor
    reference: Tensor
    logits: Tensor | None = None

    def join(self, other: "InitialQueries") -> "InitialQueries":
        """These queries, then the others; both with logits or both without."""
        logits = None
        if self.logits is not None and other.logits is not None:
            logits = torch.cat([self.logits, other.logits], dim=1)
        return InitialQueries(
            torch.cat([self.query, other.query.to(self.query.dtype)], dim=1),
            torch.cat([self.position, other.position.to(self.position.dtype)], dim=1),
            torch.cat([self.reference, other.reference], dim=1),
            logits,
        )


class LearnedQueries(nn.Module):
    """Learned content and position of each query; its reference is a linear function of its
    position (Deformable DETR)."""

    def __init__(self, channels: int, num_queries: int) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(num_queries, 2 * channels))
        self.reference = nn.Linear(channels, 3)
        nn.init.xavier_uniform_(self.reference.weight)
        nn.init.zeros_(self.reference.bias)

    def forward(self, batch: int) -> InitialQueries:
        position, query = self.embedding.chunk(2, dim=-1)
        reference = in_float32(self.reference, position).sigmoid()
        return InitialQueries(
            *(value.unsqueeze(0).expand(batch, -1, -1) for value in (query, position, reference))
        )


def in_float32(layer: nn.Module, value: Tensor) -> Tensor:
    """Run a layer that predicts positions in float32 under autocast: in 102 m, bfloat16 has steps
    of decimetres."""
    with torch.autocast(value.device.type, enabled=False):
        result: Tensor = layer(value.float())
    return result


class HeatmapQueries(nn.Module):
    """Queries at given cells of the BEV map: the feature there plus an encoding of a class.

    Args:
        grid: of the map.
        channels: width C.
        with_heatmap: predict a class heatmap whose peaks are the cells (TransFusion, Bai et al.,
            CVPR 2022, section 3.2); its logits there are added to the class predictions.
    """

    def __init__(self, grid: BevGrid, channels: int, num_classes: int, with_heatmap: bool) -> None:
        super().__init__()
        self.shape = grid.shape
        self.content = nn.Linear(channels, channels)
        self.class_embedding = nn.Embedding(num_classes, channels)
        self.position = nn.Sequential(
            nn.Linear(2, channels), nn.ReLU(), nn.Linear(channels, channels)
        )
        self.heatmap = None
        if with_heatmap:
            self.heatmap = nn.Sequential(
                nn.Conv2d(channels, channels, 3, padding=1, bias=False),
                nn.BatchNorm2d(channels),
                nn.ReLU(inplace=True),
                nn.Conv2d(channels, num_classes, 3, padding=1),
            )
            nn.init.constant_(self.heatmap[-1].bias, PRIOR_BIAS)  # type: ignore[arg-type]

    def from_heatmap(self, bev: Tensor, num_queries: int) -> tuple[Tensor, InitialQueries]:
        """Logits of the heatmap ``(B, K, Y, X)`` and queries at its highest local maxima; if there
        are fewer maxima than queries, the rest start at other cells."""
        assert self.heatmap is not None
        heatmap = self.heatmap(bev).float()
        probability = heatmap.detach().sigmoid()
        is_peak = probability == F.max_pool2d(probability, 3, stride=1, padding=1)
        best = (probability * is_peak).flatten(1).topk(num_queries, dim=-1).indices
        height, width = self.shape
        cell = best % (height * width)
        centres = torch.stack([cell % width, cell // width], dim=-1) + 0.5
        return heatmap, self.at(bev, heatmap, centres, best // (height * width))

    def at(
        self, bev: Tensor, heatmap: Tensor | None, cells: Tensor, label: Tensor
    ) -> InitialQueries:
        """Queries at positions ``(B, Q, 2)`` x, y in cells with classes ``(B, Q)``."""
        height, width = self.shape
        i = cells[..., 0].floor().long().clamp(0, width - 1)
        j = cells[..., 1].floor().long().clamp(0, height - 1)
        index = (j * width + i).unsqueeze(1)
        feature = bev.flatten(2).gather(2, index.expand(-1, bev.shape[1], -1)).transpose(1, 2)
        query = self.content(feature) + self.class_embedding(label)
        fraction = (cells / constant((width, height), cells)).float().clamp(0.0, 1.0)
        reference = torch.cat([fraction, torch.full_like(fraction[..., :1], 0.5)], dim=-1)
        logits = None
        if heatmap is not None:
            flat = heatmap.detach().flatten(2)
            logits = flat.gather(2, index.expand(-1, flat.shape[1], -1)).transpose(1, 2)
        return InitialQueries(query, self.position(2.0 * fraction - 1.0), reference, logits)
