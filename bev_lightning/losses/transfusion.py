"""TransFusion's loss (Bai et al., CVPR 2022)."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bev_lightning.losses.functional import (
    CODE_WEIGHTS,
    masked_l1_loss,
    normalizer,
    sigmoid_focal_loss,
)
from bev_lightning.losses.heatmap import count_peaks, heatmap_loss
from bev_lightning.losses.matching import Assignment, Matching, TransFusionMatcher
from bev_lightning.structures import Batch, Boxes3D
from bev_lightning.structures.constants import constant
from bev_lightning.structures.predictions import TransFusionPredictions


class TransFusionLoss:
    """Gaussian focal loss on the class heatmap; focal and L1 loss on the queries of each layer.

    In a frame without boxes heatmap and queries learn background, and the box term is 0. For a box
    with unknown velocity only the velocity is ignored (the published code trains it to 0, because
    its data reader writes 0 for unknown).

    As published, the terms of every layer are divided by the number of matched queries in all
    layers and samples, at least 1.

    Args:
        class_weight, box_weight, heatmap_weight: of the three terms.
        code_weights: of the ten numbers of a box in the L1 term.
        matcher: None for the published costs.
        min_radius_cells: see :func:`bev_lightning.losses.heatmap.gaussian_heatmap`.
    """

    def __init__(
        self,
        class_weight: float = 1.0,
        box_weight: float = 0.25,
        heatmap_weight: float = 1.0,
        code_weights: Sequence[float] = CODE_WEIGHTS,
        matcher: TransFusionMatcher | None = None,
        min_radius_cells: int = 2,
    ) -> None:
        self.class_weight, self.box_weight = class_weight, box_weight
        self.heatmap_weight = heatmap_weight
        self.code_weights = tuple(map(float, code_weights))
        self.matcher = TransFusionMatcher() if matcher is None else matcher
        self.min_radius_cells = min_radius_cells

    def __call__(
        self,
        predictions: TransFusionPredictions,
        targets: Boxes3D,
        normalizers: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Weighted scalars ``heatmap``, ``class`` and ``box``; the layers are summed."""
        logits, grid = predictions.heatmap, predictions.codec.grid
        with torch.autocast(logits.device.type, enabled=False):
            matching = self.match(predictions, targets)
            by_heatmap = heatmap_loss(logits, targets, grid, self.min_radius_cells, normalizers)
            assignment = matching.finish()
            by_class, by_box = self.layer_terms(predictions, targets, assignment, normalizers)
            return {
                "heatmap": self.heatmap_weight * by_heatmap,
                "class": by_class.sum(),
                "box": by_box.sum(),
            }

    def normalizers(self, network: Any, batch: Batch) -> dict[str, Tensor]:
        """Numbers of heatmap peaks and of matched queries in all layers."""
        head, targets = network.head, batch.targets
        assert targets is not None
        peaks = count_peaks(targets, head.codec.grid, head.num_classes, self.min_radius_cells)
        matched = targets.valid.sum(-1).clamp(max=head.num_queries).sum() * len(head.decoder)
        return {"heatmap": peaks, "class": matched, "box": matched}

    def match(self, predictions: TransFusionPredictions, targets: Boxes3D) -> Matching:
        """Start to match queries and boxes."""
        codec = predictions.codec
        return self.matcher(
            predictions.logits.detach(),
            codec.footprints(predictions.code.detach()),
            targets.label,
            codec.footprints(codec.encode(targets)),
            targets.valid,
            codec.grid,
        )

    def layer_terms(
        self,
        predictions: TransFusionPredictions,
        targets: Boxes3D,
        assignment: Assignment,
        normalizers: Mapping[str, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Weighted class and box terms of each layer, ``(L,)`` each."""
        num_positive = normalizer(assignment.positive.sum(), normalizers, "class")
        num_classes = predictions.logits.shape[-1]
        background = torch.full_like(assignment.box, num_classes)
        labels = torch.where(assignment.positive, assignment.gather(targets.label), background)
        by_class = sigmoid_focal_loss(predictions.logits, labels).sum((1, 2, 3))
        target = assignment.gather(predictions.codec.encode(targets))
        weight = assignment.positive.unsqueeze(-1) * constant(self.code_weights, predictions.code)
        by_box = masked_l1_loss(predictions.code, target, weight).sum((1, 2, 3))
        return self.class_weight * by_class / num_positive, self.box_weight * by_box / num_positive
