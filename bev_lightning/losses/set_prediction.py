"""BEVFormer's set-prediction loss (DETR, Carion et al., ECCV 2020)."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bev_lightning.losses.functional import (
    CODE_WEIGHTS,
    masked_l1_loss,
    normalizer,
    sigmoid_focal_loss,
    widen,
)
from bev_lightning.losses.heatmap import count_peaks, heatmap_loss
from bev_lightning.losses.matching import Assignment, Matching, focal_cost
from bev_lightning.losses.perspective import perspective_normalizers, perspective_terms
from bev_lightning.structures import Batch, BevGrid, Boxes3D
from bev_lightning.structures.constants import constant
from bev_lightning.structures.predictions import (
    BEVFormerPredictions,
    DenoisingPredictions,
    QueryPredictions,
)


class SetPredictionLoss:
    """Focal and L1 loss with Hungarian matching, for every decoder layer.

    In a frame without boxes all queries learn background. Boxes with their centre outside the
    head's range are left out, because it cannot predict them. The terms of every layer are divided
    by the number of boxes in all samples, at least 1.

    Args:
        class_weight, box_weight: of the two terms, and of the two matching costs.
        code_weights: of the ten numbers of a box in the L1 term. The matching ignores the velocity.
        skip_unknown_rows: a box with unknown velocity adds nothing to the L1 term, as in the
            published code (where it never happens, because the data reader writes 0 for unknown).
            False ignores only its velocity.
        heatmap_weight: of the Gaussian focal loss, for a head whose queries start from a heatmap.
        min_radius_cells: see :func:`bev_lightning.losses.heatmap.gaussian_heatmap`.
        denoising_weight: of the class and box terms of denoising queries.
    """

    def __init__(
        self,
        class_weight: float = 2.0,
        box_weight: float = 0.25,
        code_weights: Sequence[float] = CODE_WEIGHTS,
        skip_unknown_rows: bool = False,
        heatmap_weight: float = 1.0,
        min_radius_cells: int = 2,
        denoising_weight: float = 1.0,
    ) -> None:
        self.class_weight, self.box_weight = class_weight, box_weight
        self.code_weights = tuple(map(float, code_weights))
        self.skip_unknown_rows = skip_unknown_rows
        self.heatmap_weight, self.denoising_weight = heatmap_weight, denoising_weight
        self.min_radius_cells = min_radius_cells

    def __call__(
        self,
        predictions: BEVFormerPredictions,
        targets: Boxes3D,
        normalizers: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Weighted scalars ``class`` and ``box``, and if the model predicts them ``heatmap``,
        ``perspective_class``, ``perspective_depth``, ``denoising_class`` and ``denoising_box``; the
        layers are summed."""
        with torch.autocast(predictions.bev.device.type, enabled=False):
            matching = self.match(predictions, targets)
            others: dict[str, Tensor] = {}
            if predictions.heatmap is not None:
                logits, grid = predictions.heatmap, predictions.codec.grid
                by_heatmap = heatmap_loss(logits, targets, grid, self.min_radius_cells, normalizers)
                others["heatmap"] = self.heatmap_weight * by_heatmap
            if predictions.perspective is not None:
                others |= perspective_terms(predictions.perspective, targets, normalizers)
            if predictions.denoising is not None:
                by_class, by_box = self.denoising_terms(predictions, targets, normalizers)
                others["denoising_class"] = by_class.sum()
                others["denoising_box"] = by_box.sum()
            assignment = matching.finish()
            by_class, by_box = self.layer_terms(predictions, targets, assignment, normalizers)
            return {"class": by_class.sum(), "box": by_box.sum(), **others}

    def normalizers(self, network: Any, batch: Batch) -> dict[str, Tensor]:
        """Numbers of matched queries in a layer, of heatmap peaks and of denoising queries."""
        head, targets = network.head, batch.targets
        assert targets is not None
        grid = head.codec.grid
        matched = _in_range(grid, targets).sum(-1).clamp(max=head.num_queries).sum()
        normalizers = {"class": matched, "box": matched}
        if head.heatmap_start:
            peaks = count_peaks(targets, grid, head.num_classes, self.min_radius_cells)
            normalizers["heatmap"] = peaks
        if network.perspective is not None:
            normalizers |= perspective_normalizers(network, batch)
        if head.num_denoising:
            num_queries = (grid.contains(targets.centre) & targets.valid).sum() * head.num_denoising
            normalizers |= {"denoising_class": num_queries, "denoising_box": num_queries}
        return normalizers

    @torch.no_grad()
    def match(self, predictions: BEVFormerPredictions, targets: Boxes3D) -> Matching:
        """Start to match queries and boxes, in each layer and sample."""
        with torch.autocast(predictions.bev.device.type, enabled=False):
            costs = self.costs(predictions, targets)
            return Matching(costs, _in_range(predictions.codec.grid, targets))

    def costs(self, predictions: BEVFormerPredictions, targets: Boxes3D) -> Tensor:
        """``(L, B, Q, M)``: the focal cost and the L1 distance of all but the velocity."""
        queries = predictions.queries
        target = predictions.codec.encode(targets)[None, ..., :8].nan_to_num()
        code = widen(queries.code[..., :8])
        distance = torch.cdist(code, target.to(code.dtype), p=1)
        cost = self.class_weight * focal_cost(queries.logits, targets.label)
        return cost + self.box_weight * distance

    def layer_terms(
        self,
        predictions: BEVFormerPredictions,
        targets: Boxes3D,
        assignment: Assignment,
        normalizers: Mapping[str, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Weighted class and box terms of each layer, ``(L,)`` each."""
        target = predictions.codec.encode(targets)
        count = normalizer(assignment.positive[0].sum(), normalizers, "class")
        counted = torch.ones_like(assignment.positive)
        return self._terms(predictions.queries, targets.label, target, assignment, counted, count)

    def denoising_terms(
        self,
        predictions: BEVFormerPredictions,
        targets: Boxes3D,
        normalizers: Mapping[str, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The same for denoising queries, whose boxes are known without matching."""
        denoising = predictions.denoising
        assert isinstance(denoising, DenoisingPredictions)
        box = denoising.box.masked_fill(~denoising.valid, -1)
        box = box.expand(denoising.logits.shape[0], -1, -1)
        assignment = Assignment(box, torch.zeros_like(box, dtype=torch.float32))
        target = predictions.codec.encode(targets)
        count = normalizer(denoising.valid.sum(), normalizers, "denoising_class")
        by_class, by_box = self._terms(
            denoising, targets.label, target, assignment, assignment.positive, count
        )
        return self.denoising_weight * by_class, self.denoising_weight * by_box

    def _terms(
        self,
        queries: QueryPredictions,
        label: Tensor,
        code: Tensor,
        assignment: Assignment,
        counted: Tensor,
        count: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Focal loss of the ``counted`` queries ``(L, B, Q)``, L1 of those with a box, whose label
        and code are ``(B, M)``; both divided by ``count``."""
        positive, target = assignment.positive, assignment.gather(code)
        label = torch.where(positive, assignment.gather(label), queries.logits.shape[-1])
        by_class = sigmoid_focal_loss(queries.logits, label) * counted.unsqueeze(-1)
        by_class = by_class.sum((1, 2, 3))
        weight = positive.unsqueeze(-1) * constant(self.code_weights, queries.code)
        if self.skip_unknown_rows:
            weight = weight * torch.isfinite(target).all(-1, keepdim=True)
        by_box = masked_l1_loss(queries.code, target, weight).sum((1, 2, 3))
        return self.class_weight * by_class / count, self.box_weight * by_box / count


def _in_range(grid: BevGrid, targets: Boxes3D) -> Tensor:
    """``(B, M)`` bool: boxes with their centre in the head's range along x and y, bounds
    excluded."""
    low, high = constant(grid.range, targets.centre).view(2, 3)[:, :2]
    xy = targets.centre[..., :2]
    return targets.valid & ((xy > low) & (xy < high)).all(-1)
