"""Hungarian matching of queries and boxes.

Costs are computed on the device for all layers and samples together. They are copied to the host
once per step, where SciPy solves the assignment, and the result is copied back once. Meanwhile the
device computes the other loss terms.
"""

from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from bev_lightning.losses.functional import widen
from bev_lightning.losses.iou import pairwise_iou
from bev_lightning.structures import BevGrid
from bev_lightning.structures.constants import constant

# Replaces a cost that is NaN or infinite, so that a broken prediction is matched last.
WORST_COST = 1e6


@dataclass(frozen=True)
class Assignment:
    """The box of each query.

    Attributes:
        box: ``(L, B, Q)`` int64 index of the box matched to a query, -1 for none.
        overlap: ``(L, B, Q)`` intersection over union with it, 0 without a box.
    """

    box: Tensor
    overlap: Tensor

    @property
    def positive(self) -> Tensor:
        """``(L, B, Q)`` bool."""
        return self.box >= 0

    def gather(self, values: Tensor) -> Tensor:
        """Values ``(B, M, ...)`` of each query's box: ``(L, B, Q, ...)``; zeros without a box."""
        if values.shape[1] == 0:
            return values.new_zeros(*self.box.shape, *values.shape[2:])
        sample = torch.arange(values.shape[0], device=values.device).view(1, -1, 1)
        picked = values[sample, self.box.clamp(min=0)]
        positive = self.positive.view(*self.box.shape, *(1,) * (values.dim() - 2))
        return torch.where(positive, picked, torch.zeros_like(picked))


class Matching:
    """An asynchronous assignment: the costs are copied to the host while the device goes on.

    Each layer and sample is solved independently. With more boxes than queries every query gets a
    box.

    Args:
        cost: ``(L, B, Q, M)``.
        valid: ``(B, M)`` bool; other boxes are left out.
        overlap: ``(L, B, Q, M)`` for :attr:`Assignment.overlap`, which is 0 without it.
    """

    @torch.no_grad()
    def __init__(self, cost: Tensor, valid: Tensor, overlap: Tensor | None = None) -> None:
        self._device, self._overlap = cost.device, overlap
        # Boxes first: the solver needs the shorter side there, or transposes each matrix itself.
        cost = cost.detach().float().transpose(-1, -2)
        cost = cost.nan_to_num(WORST_COST, WORST_COST, -WORST_COST)
        # Padding is marked by infinite costs, so that one copy transfers both.
        self._cost = cost.masked_fill(~valid[None, :, :, None], torch.inf).contiguous()
        self._cost = self._cost.to("cpu", non_blocking=True)
        self._arrived = torch.cuda.Event() if cost.is_cuda else None
        if self._arrived is not None:
            self._arrived.record()

    @torch.no_grad()
    def finish(self) -> Assignment:
        """Wait for the costs (the loss's only synchronisation) and solve."""
        if self._arrived is not None:
            self._arrived.synchronize()
        layers, batch, _, queries = self._cost.shape
        pinned = self._arrived is not None
        box = torch.empty(layers, batch, queries, dtype=torch.int64, pin_memory=pinned)
        solve(self._cost, box)
        box = box.to(self._device, non_blocking=True)
        overlap = torch.zeros(box.shape, device=self._device)
        if self._overlap is not None and self._overlap.shape[-1]:
            paired = self._overlap.gather(-1, box.clamp(min=0).unsqueeze(-1)).squeeze(-1)
            overlap = torch.where(box >= 0, paired, 0.0)
        return Assignment(box, overlap)


def solve(cost: Tensor, box: Tensor) -> None:
    """Write the optimal assignment of costs ``(L, B, M, Q)`` on the host to ``box`` ``(L, B, Q)``
    int64, -1 for no box; a box whose costs are infinite is left out.

    Sequential: SciPy holds the GIL, so that threads would not help.
    """
    costs, result = cost.numpy(), box.numpy()
    result.fill(-1)
    for layer, sample in np.ndindex(result.shape[:2]):
        rows = np.flatnonzero(np.isfinite(costs[layer, sample, :, 0]))
        if rows.size:
            matched, columns = linear_sum_assignment(costs[layer, sample, rows])
            result[layer, sample, columns] = rows[matched]


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
        self.class_weight, self.distance_weight = class_weight, distance_weight
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
    ) -> Matching:
        """Start to match each layer and sample.

        Args:
            logits: ``(L, B, Q, K)``.
            boxes: ``(L, B, Q, 7) [x, y, z, l, w, h, yaw]`` predicted, metres and radians.
            labels: ``(B, M)`` int64; targets ``(B, M, 7)``; valid ``(B, M)`` bool.
            grid: distances are divided by its extent.
        """
        with torch.autocast(logits.device.type, enabled=False):
            overlap = pairwise_iou(boxes, targets)
            distance = distance_cost(boxes[..., :2], targets[..., :2], grid)
            cost = self.class_weight * focal_cost(logits, labels) + self.distance_weight * distance
            return Matching(cost - self.overlap_weight * overlap, valid, overlap)


def focal_cost(logits: Tensor, labels: Tensor, alpha: float = 0.25, gamma: float = 2.0) -> Tensor:
    """Classification cost ``(L, B, Q, M)``: the change of the focal loss if query q gets the class
    of box m, for logits ``(L, B, Q, K)`` and labels ``(B, M)``."""
    probability = widen(logits).sigmoid()
    negative = -(1 - probability + 1e-12).log() * (1 - alpha) * probability.pow(gamma)
    positive = -(probability + 1e-12).log() * alpha * (1 - probability).pow(gamma)
    layers, _, queries, _ = logits.shape
    index = labels[None, :, None, :].expand(layers, -1, queries, -1)
    return (positive - negative).gather(-1, index)


def distance_cost(centres: Tensor, targets: Tensor, grid: BevGrid) -> Tensor:
    """L1 distance of centres ``(L, B, Q, 2)`` and ``(B, M, 2)`` [m], in extents of the grid."""
    x_min, y_min, _, x_max, y_max, _ = grid.range
    extent = constant((x_max - x_min, y_max - y_min), centres, torch.float32)
    offset = centres.float().unsqueeze(-2) - targets.float()[None, :, None]
    return (offset.abs() / extent).sum(-1)
