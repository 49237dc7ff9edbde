"""Which query answers for which box: costs and the Hungarian method.

Costs are computed on the device for all layers and samples together; they cross to the host once
per step, are solved there by SciPy, and the answer crosses back once.
"""

from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from bev_lightning.objectives.overlap import pairwise_iou, widen
from bev_lightning.structures import BevGrid

# Stands for a cost that is NaN or infinite, so that a broken prediction is matched last.
WORST_COST = 1e6


@dataclass(frozen=True)
class Assignment:
    """Attributes:
    box: ``(L, B, Q)`` int64 index of the box that a query answers for, -1 where for none.
    overlap: ``(L, B, Q)`` the pair's intersection over union, 0 where there is no pair.
    """

    box: Tensor
    overlap: Tensor

    @property
    def positive(self) -> Tensor:
        """``(L, B, Q)`` bool."""
        return self.box >= 0

    def gather(self, values: Tensor) -> Tensor:
        """What belongs to each query of ``(B, M, ...)``: ``(L, B, Q, ...)``; of no box, zeros."""
        if values.shape[1] == 0:
            return values.new_zeros(*self.box.shape, *values.shape[2:])
        sample = torch.arange(values.shape[0], device=values.device).view(1, -1, 1)
        picked = values[sample, self.box.clamp(min=0)]
        positive = self.positive.view(*self.box.shape, *(1,) * (values.dim() - 2))
        return torch.where(positive, picked, torch.zeros_like(picked))


class TransFusionMatcher:
    """Hungarian matching by class, distance and overlap (TransFusion, section 3.3).

    Args:
        class_weight, distance_weight, overlap_weight: of the three costs.
    """

    def __init__(
        self,
        class_weight: float = 0.15,
        distance_weight: float = 0.25,
        overlap_weight: float = 0.25,
    ) -> None:
        self.class_weight = class_weight
        self.distance_weight = distance_weight
        self.overlap_weight = overlap_weight

    @torch.no_grad()
    def __call__(
        self,
        logits: Tensor,
        boxes: Tensor,
        labels: Tensor,
        targets: Tensor,
        valid: Tensor,
        grid: BevGrid,
    ) -> Assignment:
        """Match every layer and sample on its own.

        Args:
            logits: ``(L, B, Q, K)``.
            boxes: ``(L, B, Q, 7) [x, y, z, l, w, h, yaw]`` predicted, metres and radians.
            labels: ``(B, M)`` int64; targets ``(B, M, 7)``; valid ``(B, M)`` bool.
            grid: by whose extent distances are scaled.
        """
        with torch.autocast(logits.device.type, enabled=False):
            cost, overlap = self.costs(logits, boxes, labels, targets, grid)
            box = assign(cost, valid)
            matched = box.clamp(min=0).unsqueeze(-1)
            empty = overlap.shape[-1] == 0
            paired = (
                overlap.new_zeros(box.shape) if empty else overlap.gather(-1, matched).squeeze(-1)
            )
            return Assignment(box, torch.where(box >= 0, paired, torch.zeros_like(paired)))

    def costs(
        self, logits: Tensor, boxes: Tensor, labels: Tensor, targets: Tensor, grid: BevGrid
    ) -> tuple[Tensor, Tensor]:
        """Cost and overlap, ``(L, B, Q, M)`` each."""
        overlap = pairwise_iou(boxes, targets)
        cost = self.class_weight * focal_cost(logits, labels)
        cost = cost + self.distance_weight * distance_cost(boxes[..., :2], targets[..., :2], grid)
        return cost - self.overlap_weight * overlap, overlap


def focal_cost(logits: Tensor, labels: Tensor, alpha: float = 0.25, gamma: float = 2.0) -> Tensor:
    """What the focal loss would gain by calling query q the class of box m: ``(L, B, Q, M)`` of
    logits ``(L, B, Q, K)`` and labels ``(B, M)``."""
    probability = widen(logits).sigmoid()
    negative = -(1 - probability + 1e-12).log() * (1 - alpha) * probability.pow(gamma)
    positive = -(probability + 1e-12).log() * alpha * (1 - probability).pow(gamma)
    layers, _, queries, _ = logits.shape
    index = labels[None, :, None, :].expand(layers, -1, queries, -1)
    return (positive - negative).gather(-1, index)


def distance_cost(centres: Tensor, targets: Tensor, grid: BevGrid) -> Tensor:
    """L1 distance of centres ``(L, B, Q, 2)`` and ``(B, M, 2)`` [m], in extents of the grid."""
    x_min, y_min, _, x_max, y_max, _ = grid.range
    extent = centres.new_tensor([x_max - x_min, y_max - y_min], dtype=torch.float32)
    offset = centres.float().unsqueeze(-2) - targets.float()[None, :, None]
    return (offset.abs() / extent).sum(-1)


def assign(cost: Tensor, valid: Tensor) -> Tensor:
    """Solve the assignment of each layer and sample.

    Args:
        cost: ``(L, B, Q, M)``.
        valid: ``(B, M)`` bool; other boxes are left out.

    Returns:
        ``(L, B, Q)`` int64 on the device of the costs, index into M or -1. Where there are more
        boxes than queries, every query gets one.
    """
    layers, batch, queries, boxes = cost.shape
    if boxes == 0:
        return torch.full((layers, batch, queries), -1, dtype=torch.int64, device=cost.device)
    cost = cost.float().nan_to_num(WORST_COST, WORST_COST, -WORST_COST)
    # Padding travels as infinity inside the costs, so that one transfer carries both.
    host = cost.masked_fill(~valid[None, :, None, :], torch.inf).cpu().numpy()
    result = np.full((layers, batch, queries), -1, dtype=np.int64)
    for layer, sample in np.ndindex(layers, batch):
        columns = np.flatnonzero(np.isfinite(host[layer, sample, 0]))
        if columns.size:
            rows, matched = linear_sum_assignment(host[layer, sample][:, columns])
            result[layer, sample, rows] = columns[matched]
    return torch.from_numpy(result).to(cost.device, non_blocking=True)
