"""Which of a head's boxes are kept."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from bev_lightning.ops.nms import circle_nms
from bev_lightning.structures import Boxes3D


@dataclass(frozen=True)
class BoxSelection:
    """Which decoded boxes stay valid.

    Attributes:
        score_threshold: those with a score above it.
        range_m: those with ``low <= x, y, z <= high`` of x_min, y_min, z_min, x_max, y_max, z_max.
        circle_radius_m: those of ``circle_classes`` with no better one of the same class within
            this distance.
        circle_classes: indices; None takes every class.
    """

    score_threshold: float | None = None
    range_m: Sequence[float] | None = None
    circle_radius_m: float | None = None
    circle_classes: Sequence[int] | None = None

    def __call__(self, boxes: Boxes3D) -> Boxes3D:
        """The same boxes ``(B, M)``, those not chosen marked invalid."""
        valid, score = boxes.valid, boxes.score
        assert score is not None
        if self.score_threshold is not None:
            valid = valid & (score > self.score_threshold)
        if self.range_m is not None:
            low, high = boxes.centre.new_tensor(tuple(self.range_m)).view(2, 3)
            valid = valid & ((boxes.centre >= low) & (boxes.centre <= high)).all(-1)
        if self.circle_radius_m is not None:
            radius = torch.full_like(score, self.circle_radius_m)
            if self.circle_classes is not None:
                chosen = torch.tensor(tuple(self.circle_classes), device=score.device)
                radius = radius * torch.isin(boxes.label, chosen)
            valid = circle_nms(boxes.centre[..., :2], score, radius, boxes.label, valid)
        return replace(boxes, valid=valid)
