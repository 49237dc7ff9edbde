"""Filters decoded boxes by score, range and circle NMS."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from bev_lightning.ops.nms import circle_nms
from bev_lightning.structures import Boxes3D


@dataclass(frozen=True)
class BoxSelection:
    """Filters for decoded boxes; each is optional.

    Attributes:
        score_threshold: keep boxes with a higher score.
        range_m: x_min, y_min, z_min, x_max, y_max, z_max; keep centres inside, bounds included.
        circle_radius_m: of ``circle_classes``, drop boxes within this distance of a kept box of the
            same class with a higher score.
        circle_classes: indices; None: every class.
    """

    score_threshold: float | None = None
    range_m: Sequence[float] | None = None
    circle_radius_m: float | None = None
    circle_classes: Sequence[int] | None = None

    def __call__(self, boxes: Boxes3D) -> Boxes3D:
        """The same boxes ``(B, M)``, those filtered out marked invalid."""
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
