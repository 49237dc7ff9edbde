"""Losses of the detection heads, in float32 whatever the precision around them."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from bev_lightning.losses.heatmap import gaussian_heatmap
from bev_lightning.losses.iou import widen
from bev_lightning.losses.matching import Assignment, Matching, TransFusionMatcher
from bev_lightning.structures import Batch, Boxes3D
from bev_lightning.structures.constants import constant
from bev_lightning.structures.predictions import (
    BEVFusionPredictions,
    BoxCodec,
    HeatmapPredictions,
    TransFusionPredictions,
)

# Of cx, cy, cz, log w, log l, log h, sin, cos, vx, vy.
CODE_WEIGHTS = (1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.2, 0.2)


class DetectionLoss(Protocol):
    """The loss of a network, as terms whose sum is trained."""

    def __call__(
        self, predictions: Any, targets: Boxes3D, counts: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Weighted scalars by name, each divided by its own count, or by what is given."""
        ...

    def count(self, network: Any, batch: Batch) -> dict[str, Tensor]:
        """The count of each term, of a batch with annotations alone, without predictions."""
        ...


class TransFusionLoss:
    """TransFusion's loss: Gaussian focal on the class heatmap; focal and L1 on the matched queries
    of each layer.

    A frame without boxes, or a batch of them, trains: its heatmap and queries learn background,
    the box term is 0. Of a box with unknown velocity only the velocity is left out (the published
    code trains it towards standing still, because its data reader writes 0 for unknown).

    As published, the terms of every layer are divided by the number of matched queries in all
    layers and samples together, at least 1.

    Args:
        class_weight, box_weight, heatmap_weight: of the three terms.
        code_weights: of the ten numbers of a box in the L1 term.
        matcher: None takes the published costs.
        min_overlap, min_radius_cells: see :func:`gaussian_heatmap`.
    """

    def __init__(
        self,
        class_weight: float = 1.0,
        box_weight: float = 0.25,
        heatmap_weight: float = 1.0,
        code_weights: Sequence[float] = CODE_WEIGHTS,
        matcher: TransFusionMatcher | None = None,
        min_overlap: float = 0.1,
        min_radius_cells: int = 2,
    ) -> None:
        self.class_weight, self.box_weight = class_weight, box_weight
        self.heatmap_weight = heatmap_weight
        self.code_weights = tuple(map(float, code_weights))
        self.matcher = TransFusionMatcher() if matcher is None else matcher
        self.min_overlap, self.min_radius_cells = min_overlap, min_radius_cells

    def __call__(
        self,
        predictions: TransFusionPredictions,
        targets: Boxes3D,
        counts: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Weighted scalars ``heatmap``, ``class`` and ``box``; the layers are summed.

        Args:
            counts: what each term is divided by; None for the batch's own :meth:`count`.
        """
        with torch.autocast(predictions.heatmap.device.type, enabled=False):
            matching = self.match(predictions, targets)
            by_heatmap = self.heatmap_term(predictions, targets, counts)
            by_class, by_box = self.layer_terms(predictions, targets, matching.finish(), counts)
            return {"heatmap": by_heatmap, "class": by_class.sum(), "box": by_box.sum()}

    def count(self, network: Any, batch: Batch) -> dict[str, Tensor]:
        """What the terms of a batch are divided by, before anything is predicted: peaks of the
        heatmap, matched queries of all layers."""
        head, targets = network.head, batch.targets
        assert targets is not None
        wanted = self._heatmap(head.codec, head.num_classes, targets)
        matched = targets.valid.sum(-1).clamp(max=head.num_queries).sum() * len(head.decoder)
        return {"heatmap": (wanted == 1).sum(), "class": matched, "box": matched}

    def match(self, predictions: TransFusionPredictions, targets: Boxes3D) -> Matching:
        """Begin to find which query answers for which box."""
        codec = predictions.codec
        return self.matcher(
            predictions.logits.detach(),
            codec.footprints(predictions.code.detach()),
            targets.label,
            codec.footprints(codec.encode(targets)),
            targets.valid,
            codec.grid,
        )

    def heatmap_term(
        self,
        predictions: TransFusionPredictions,
        targets: Boxes3D,
        counts: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        wanted = self._heatmap(predictions.codec, predictions.heatmap.shape[1], targets)
        count = None if counts is None else counts["heatmap"]
        return self.heatmap_weight * gaussian_focal_loss(predictions.heatmap, wanted, count)

    def _heatmap(self, codec: BoxCodec, num_classes: int, targets: Boxes3D) -> Tensor:
        return gaussian_heatmap(
            targets, codec.grid, num_classes, self.min_overlap, self.min_radius_cells
        )

    def layer_terms(
        self,
        predictions: TransFusionPredictions,
        targets: Boxes3D,
        assignment: Assignment,
        counts: Mapping[str, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Weighted class and box terms of each layer, ``(L,)`` each."""
        num_positive = divisor(assignment.positive.sum(), counts, "class")
        num_classes = predictions.logits.shape[-1]
        background = torch.full_like(assignment.box, num_classes)
        labels = torch.where(assignment.positive, assignment.gather(targets.label), background)
        by_class = sigmoid_focal_loss(predictions.logits, labels).sum((1, 2, 3))
        wanted = assignment.gather(predictions.codec.encode(targets))
        weight = assignment.positive.unsqueeze(-1) * constant(self.code_weights, predictions.code)
        by_box = masked_l1_loss(predictions.code, wanted, weight).sum((1, 2, 3))
        return self.class_weight * by_class / num_positive, self.box_weight * by_box / num_positive


class CentreLoss:
    """CenterPoint's loss: Gaussian focal on the class heatmap, L1 on the box predicted by the cell
    that holds a box's centre. Boxes outside the grid are left out, and unknown velocities.

    Args:
        box_weight, heatmap_weight: of the two terms.
        code_weights: of the ten numbers of a box in the L1 term.
        min_overlap, min_radius_cells: see :func:`gaussian_heatmap`.
    """

    def __init__(
        self,
        box_weight: float = 0.25,
        heatmap_weight: float = 1.0,
        code_weights: Sequence[float] = CODE_WEIGHTS,
        min_overlap: float = 0.1,
        min_radius_cells: int = 2,
    ) -> None:
        self.box_weight, self.heatmap_weight = box_weight, heatmap_weight
        self.code_weights = tuple(map(float, code_weights))
        self.min_overlap, self.min_radius_cells = min_overlap, min_radius_cells

    def __call__(
        self,
        predictions: HeatmapPredictions,
        targets: Boxes3D,
        counts: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Weighted scalars ``heatmap`` and ``box``.

        Args:
            counts: what each term is divided by; None for the batch's own :meth:`count`.
        """
        codec, logits = predictions.codec, predictions.heatmap
        with torch.autocast(logits.device.type, enabled=False):
            heatmap = self._heatmap(codec, logits.shape[1], targets)
            wanted = codec.encode(targets)  # (B, M, 10)
            cell, inside = self._find_cells(codec, wanted, targets.valid)
            predicted = predictions.code.flatten(2).transpose(1, 2)  # (B, Y * X, 10)
            predicted = predicted.gather(1, cell.unsqueeze(-1).expand_as(wanted))
            weight = inside.unsqueeze(-1) * constant(self.code_weights, predicted)
            by_box = masked_l1_loss(predicted, wanted, weight).sum()
            peaks = None if counts is None else counts["heatmap"]
            return {
                "heatmap": self.heatmap_weight * gaussian_focal_loss(logits, heatmap, peaks),
                "box": self.box_weight * by_box / divisor(inside.sum(), counts, "box"),
            }

    def count(self, network: Any, batch: Batch) -> dict[str, Tensor]:
        """What the terms of a batch are divided by, before anything is predicted: peaks of the
        heatmap, boxes in the grid."""
        head, targets = network.head, batch.targets
        assert targets is not None
        heatmap = self._heatmap(head.codec, head.num_classes, targets)
        _, inside = self._find_cells(head.codec, head.codec.encode(targets), targets.valid)
        return {"heatmap": (heatmap == 1).sum(), "box": inside.sum()}

    def _heatmap(self, codec: BoxCodec, num_classes: int, targets: Boxes3D) -> Tensor:
        return gaussian_heatmap(
            targets, codec.grid, num_classes, self.min_overlap, self.min_radius_cells
        )

    @staticmethod
    def _find_cells(codec: BoxCodec, code: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """The cell ``(B, M)`` that holds each box's centre, and whether the grid has it."""
        height, width = codec.grid.shape
        i, j = code[..., 0].nan_to_num().floor(), code[..., 1].nan_to_num().floor()
        inside = valid & (i >= 0) & (i < width) & (j >= 0) & (j < height)
        return (j * width + i).long() * inside, inside


class BEVFusionLoss:
    """The loss of the head and, where the network supervises depth, of the camera's depth.

    Args:
        detection: the loss of the head: TransFusionLoss or CentreLoss.
        depth_weight: of the term ``depth``.
    """

    def __init__(self, detection: DetectionLoss, depth_weight: float = 0.3) -> None:
        self.detection, self.depth_weight = detection, depth_weight

    def __call__(
        self,
        predictions: BEVFusionPredictions,
        targets: Boxes3D,
        counts: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        terms = self.detection(predictions.detections, targets, counts)
        if predictions.depth_logits is not None and predictions.depth_target is not None:
            terms["depth"] = self.depth_weight * depth_loss(
                predictions.depth_logits,
                predictions.depth_target,
                None if counts is None else counts["depth"],
            )
        return terms

    def count(self, network: Any, batch: Batch) -> dict[str, Tensor]:
        """As of the head's loss, and the pixels whose depth the lidar saw."""
        counts = self.detection.count(network, batch)
        if network.supervise_depth:
            target = network.camera.depth_targets(batch.cameras, batch.points)
            counts["depth"] = (target >= 0).sum()
        return counts


def divisor(own: Tensor, counts: Mapping[str, Tensor] | None, name: str) -> Tensor:
    """What a term is divided by: its own count, at least 1, or what is given."""
    return own.clamp(min=1) if counts is None else counts[name]


def gaussian_focal_loss(logits: Tensor, heatmap: Tensor, count: Tensor | None = None) -> Tensor:
    """CornerNet's focal loss (Law and Deng, ECCV 2018, equation 1), divided by the number of peaks.

    Args:
        logits: ``(B, K, Y, X)``.
        heatmap: the same shape, 0..1, exactly 1 at the centre of a box.
        count: what it is divided by instead.
    """
    probability = widen(logits).sigmoid().clamp(1e-4, 1 - 1e-4)
    peak = heatmap == 1
    hit = -probability.log() * (1 - probability).square() * peak
    miss = -(1 - probability).log() * probability.square() * (1 - heatmap).pow(4)
    return (hit + miss).sum() / (peak.sum().clamp(min=1) if count is None else count)


def sigmoid_focal_loss(
    logits: Tensor, labels: Tensor, alpha: float = 0.25, gamma: float = 2.0
) -> Tensor:
    """RetinaNet's focal loss of each logit, ``(..., K)`` of labels ``(...)``; K is background."""
    logits = widen(logits)
    wanted = F.one_hot(labels, logits.shape[-1] + 1)[..., :-1].to(logits.dtype)
    entropy = F.binary_cross_entropy_with_logits(logits, wanted, reduction="none")
    probability = logits.sigmoid()
    wrong = probability + wanted - 2 * probability * wanted
    return entropy * (alpha * wanted + (1 - alpha) * (1 - wanted)) * wrong.pow(gamma)


def masked_l1_loss(predicted: Tensor, wanted: Tensor, weight: Tensor) -> Tensor:
    """Weighted absolute difference of each number; none where what is wanted is NaN (a velocity
    that is unknown) or the weight is 0, and no gradient from there either."""
    counts = torch.isfinite(wanted) & (weight > 0)
    difference = torch.where(counts, widen(predicted) - wanted.nan_to_num(), 0.0)
    return difference.abs() * weight


def depth_loss(depth_logits: Tensor, target: Tensor, count: Tensor | None = None) -> Tensor:
    """Cross entropy of the depth distribution where the lidar saw something (BEVDepth, section
    4.1), averaged over those pixels; 0 where there are none.

    Args:
        depth_logits: ``(B, N, D, h, w)``.
        target: ``(B, N, h, w)`` int64 index of the depth bin, -1 for none.
        count: what the sum is divided by; None for the number of those pixels.
    """
    with torch.autocast(depth_logits.device.type, enabled=False):
        entropy = F.cross_entropy(
            widen(depth_logits).flatten(0, 1),
            target.flatten(0, 1),
            ignore_index=-1,
            reduction="sum",
        )
        return entropy / ((target >= 0).sum().clamp(min=1) if count is None else count)
