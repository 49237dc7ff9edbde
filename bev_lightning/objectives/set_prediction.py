"""The loss of set prediction (DETR, Carion et al., ECCV 2020), as BEVFormer trains with it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from bev_lightning.objectives.heatmap import gaussian_heatmap
from bev_lightning.objectives.losses import (
    gaussian_focal_loss,
    masked_l1_loss,
    sigmoid_focal_loss,
)
from bev_lightning.objectives.matching import Assignment, Matching, focal_cost
from bev_lightning.objectives.overlap import widen
from bev_lightning.objectives.perspective import perspective_terms
from bev_lightning.structures import Boxes3D
from bev_lightning.structures.constants import constant
from bev_lightning.structures.predictions import (
    BEVFormerPredictions,
    DenoisingPredictions,
    QueryPredictions,
)

# Of cx, cy, log w, log l, cz, log h, sin, cos, vx, vy.
CODE_WEIGHTS = (1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.2, 0.2)


class SetPredictionObjective:
    """Focal loss and L1 on the queries that the Hungarian method gave to the boxes, for every
    decoder layer.

    A frame without boxes, or a batch of them, trains: its queries learn background. Boxes whose
    centre lies outside the head's range are left out, for it cannot predict them. The terms of
    every layer are divided by the number of boxes in all samples together, at least 1.

    Args:
        class_weight, box_weight: of the two terms, and of the two costs in the matching.
        code_weights: of the ten numbers of a box in the L1 term. The matching leaves out the
            velocity.
        skip_unknown_rows: as published, a box with unknown velocity adds nothing to the L1 term
            (its published data reader writes 0 for unknown, so that it never came to that). False
            leaves out its velocity only.
        heatmap_weight: of the Gaussian focal loss of a head whose queries start from a heatmap.
        min_overlap, min_radius_cells: see :func:`gaussian_heatmap`.
        denoising_weight: of class and box terms of the queries that started from annotations.
    """

    def __init__(
        self,
        class_weight: float = 2.0,
        box_weight: float = 0.25,
        code_weights: Sequence[float] = CODE_WEIGHTS,
        skip_unknown_rows: bool = False,
        heatmap_weight: float = 1.0,
        min_overlap: float = 0.1,
        min_radius_cells: int = 2,
        denoising_weight: float = 1.0,
    ) -> None:
        self.class_weight, self.box_weight = class_weight, box_weight
        self.code_weights = tuple(map(float, code_weights))
        self.skip_unknown_rows = skip_unknown_rows
        self.heatmap_weight, self.denoising_weight = heatmap_weight, denoising_weight
        self.min_overlap, self.min_radius_cells = min_overlap, min_radius_cells

    def __call__(self, predictions: BEVFormerPredictions, targets: Boxes3D) -> dict[str, Tensor]:
        """Weighted scalars ``class`` and ``box``, and where the model brings them ``heatmap``,
        ``perspective_class``, ``perspective_depth``, ``denoising_class`` and ``denoising_box``; the
        layers are summed."""
        with torch.autocast(predictions.bev.device.type, enabled=False):
            matching = self.match(predictions, targets)
            others: dict[str, Tensor] = {}
            if predictions.heatmap is not None:
                others["heatmap"] = self.heatmap_term(predictions, targets)
            if predictions.perspective is not None:
                others |= perspective_terms(predictions.perspective, targets)
            if predictions.denoising is not None:
                by_class, by_box = self.denoising_terms(predictions, targets)
                others["denoising_class"] = by_class.sum()
                others["denoising_box"] = by_box.sum()
            by_class, by_box = self.layer_terms(predictions, targets, matching.finish())
            return {"class": by_class.sum(), "box": by_box.sum(), **others}

    @torch.no_grad()
    def match(self, predictions: BEVFormerPredictions, targets: Boxes3D) -> Matching:
        """Begin to find which query answers for which box, in each layer and sample on its own."""
        with torch.autocast(predictions.bev.device.type, enabled=False):
            return Matching(self.costs(predictions, targets), _in_range(predictions, targets))

    def costs(self, predictions: BEVFormerPredictions, targets: Boxes3D) -> Tensor:
        """``(L, B, Q, M)``: the focal cost and the L1 distance of all but the velocity."""
        queries = predictions.queries
        wanted = predictions.codec.encode(targets)[None, ..., :8].nan_to_num()
        distance = torch.cdist(
            widen(queries.code[..., :8]), wanted.to(widen(queries.code).dtype), p=1
        )
        cost = self.class_weight * focal_cost(queries.logits, targets.label)
        return cost + self.box_weight * distance

    def layer_terms(
        self, predictions: BEVFormerPredictions, targets: Boxes3D, assignment: Assignment
    ) -> tuple[Tensor, Tensor]:
        """Weighted class and box terms of each layer, ``(L,)`` each."""
        return self._terms(
            predictions.queries,
            assignment.gather(targets.label),
            assignment.gather(predictions.codec.encode(targets)),
            assignment.positive,
            torch.ones_like(assignment.positive),
            assignment.positive[0].sum(),
        )

    def denoising_terms(
        self, predictions: BEVFormerPredictions, targets: Boxes3D
    ) -> tuple[Tensor, Tensor]:
        """The same of the queries that started from annotations, whose boxes are known."""
        denoising = predictions.denoising
        assert isinstance(denoising, DenoisingPredictions)
        layers = denoising.logits.shape[0]
        box = denoising.box.expand(layers, -1, -1)
        start = Assignment(box, torch.zeros_like(box, dtype=torch.float32))
        valid = denoising.valid.expand(layers, -1, -1)
        by_class, by_box = self._terms(
            denoising,
            start.gather(targets.label),
            start.gather(predictions.codec.encode(targets)),
            valid,
            valid,
            denoising.valid.sum(),
        )
        return self.denoising_weight * by_class, self.denoising_weight * by_box

    def heatmap_term(self, predictions: BEVFormerPredictions, targets: Boxes3D) -> Tensor:
        assert predictions.heatmap is not None
        wanted = gaussian_heatmap(
            targets,
            predictions.codec.grid,
            predictions.heatmap.shape[1],
            self.min_overlap,
            self.min_radius_cells,
        )
        return self.heatmap_weight * gaussian_focal_loss(predictions.heatmap, wanted)

    def _terms(
        self,
        queries: QueryPredictions,
        label: Tensor,
        wanted: Tensor,
        positive: Tensor,
        counted: Tensor,
        num_positive: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Focal loss of the ``counted`` queries, L1 of the ``positive`` ones, ``(L, B, Q)``
        bool."""
        label = torch.where(positive, label, queries.logits.shape[-1])
        by_class = (sigmoid_focal_loss(queries.logits, label) * counted.unsqueeze(-1)).sum(
            (1, 2, 3)
        )
        weight = positive.unsqueeze(-1) * constant(self.code_weights, queries.code)
        if self.skip_unknown_rows:
            weight = weight * torch.isfinite(wanted).all(-1, keepdim=True)
        by_box = masked_l1_loss(queries.code, wanted, weight).sum((1, 2, 3))
        share = num_positive.clamp(min=1)
        return self.class_weight * by_class / share, self.box_weight * by_box / share


def _in_range(predictions: BEVFormerPredictions, targets: Boxes3D) -> Tensor:
    """``(B, M)`` bool: boxes with their centre in the head's range along x and y, bounds
    excluded."""
    grid = predictions.codec.grid
    low, high = constant(grid.range, targets.centre).view(2, 3)[:, :2]
    xy = targets.centre[..., :2]
    return targets.valid & ((xy > low) & (xy < high)).all(-1)
