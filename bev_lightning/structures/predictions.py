"""What the detection heads return, and the codes they are trained in.

A codec is the border between a head's own numbers and :class:`Boxes3D`; nothing else knows the
code. Predictions carry the codec that made them, so that decoding and the losses cannot disagree.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from bev_lightning.structures.boxes import Boxes3D
from bev_lightning.structures.grid import BevGrid


@dataclass(frozen=True)
class BoxCodec:
    """The ten numbers in which TransFusion predicts a box:

    ``(..., 10) [cx, cy, cz, log w, log l, log h, sin, cos, vx, vy]``: centre in cells of the
    head's map (the first cell's centre is 0.5), height and sizes in metres, velocity [m/s]. Sine
    and cosine are those of mmdetection3d's angle before version 1.0, ``-yaw - pi / 2``, because
    the published weights were trained with it; here they are ``-cos(yaw)`` and ``-sin(yaw)``.

    Attributes:
        grid: the head's map.
        height_shift: cz lies this share of the box's height above its gravity centre. The published
            BEVFusion took the annotated centre for the bottom of the box, so its weights predict
            half a height too much: 0.5 gives right boxes with them. 0 is the plain reading of the
            code.
    """

    grid: BevGrid
    height_shift: float = 0.5

    def encode(self, boxes: Boxes3D) -> Tensor:
        """Boxes ``(..., M)`` to codes ``(..., M, 10)`` float32; an unknown velocity stays NaN."""
        length, width, height = boxes.size.float().clamp(min=1e-3).unbind(-1)
        cells = self.grid.to_cells(boxes.centre[..., :2].float())
        yaw = boxes.yaw.float()
        columns = [
            cells[..., 0],
            cells[..., 1],
            boxes.centre[..., 2].float() + self.height_shift * height,
            width.log(),
            length.log(),
            height.log(),
            -yaw.cos(),
            -yaw.sin(),
        ]
        return torch.cat([torch.stack(columns, dim=-1), boxes.velocity.float()], dim=-1)

    def decode(self, code: Tensor, label: Tensor, score: Tensor, valid: Tensor) -> Boxes3D:
        """Codes ``(..., M, 10)`` to boxes with label, score and validity ``(..., M)``."""
        code = code.float()
        width, length, height = code[..., 3:6].exp().unbind(-1)
        z = code[..., 2] - self.height_shift * height
        return Boxes3D(
            centre=torch.cat([self.grid.to_metres(code[..., :2]), z.unsqueeze(-1)], dim=-1),
            size=torch.stack([length, width, height], dim=-1),
            yaw=torch.atan2(-code[..., 7], -code[..., 6]),
            velocity=code[..., 8:10],
            label=label,
            valid=valid,
            score=score,
        )

    def footprints(self, code: Tensor) -> Tensor:
        """``(..., M, 7) [x, y, z, l, w, h, yaw]`` in metres and radians, z as the code has it
        (shifted by ``height_shift``): what overlaps are computed from, in the matcher."""
        code = code.float()
        columns = [
            code[..., 2:3],
            code[..., 4:5].exp(),
            code[..., 3:4].exp(),
            code[..., 5:6].exp(),
            torch.atan2(-code[..., 7], -code[..., 6]).unsqueeze(-1),
        ]
        return torch.cat([self.grid.to_metres(code[..., :2]), *columns], dim=-1)


@dataclass(frozen=True)
class TransFusionPredictions:
    """Output of TransFusionHead: K classes, Q queries, L decoder layers (the last one counts).

    Attributes:
        heatmap: ``(B, K, Y, X)`` logits of the class heatmap.
        query_label: ``(B, Q)`` int64 class of the peak a query started from.
        query_score: ``(B, K, Q)`` the heatmap's probabilities at that cell, zero where it is no
            peak.
        logits: ``(L, B, Q, K)`` class logits of each layer.
        code: ``(L, B, Q, 10)`` boxes in the code of ``codec``.
        codec: what turns codes into boxes.
    """

    heatmap: Tensor
    query_label: Tensor
    query_score: Tensor
    logits: Tensor
    code: Tensor
    codec: BoxCodec


@dataclass(frozen=True)
class HeatmapPredictions:
    """Output of CentreHead: K classes on the head's map.

    Attributes:
        heatmap: ``(B, K, Y, X)`` logits of the class heatmap.
        code: ``(B, 10, Y, X)`` at each cell the box centred in it, in the code of ``codec``.
        codec: what turns codes into boxes.
    """

    heatmap: Tensor
    code: Tensor
    codec: BoxCodec


@dataclass(frozen=True)
class BEVFusionPredictions:
    """Attributes:
    detections: what the head returned.
    depth_logits: ``(B, N, D, h, w)`` logits over the depth bins of the camera branch, or None where
        depth is not supervised.
    depth_target: ``(B, N, h, w)`` int64 index of the bin the lidar saw, -1 where it saw nothing.
    """

    detections: TransFusionPredictions | HeatmapPredictions
    depth_logits: Tensor | None = None
    depth_target: Tensor | None = None


@dataclass(frozen=True)
class MetricBoxCodec:
    """The ten numbers in which BEVFormer predicts a box:

    ``(..., 10) [cx, cy, log w, log l, cz, log h, sin, cos, vx, vy]``: gravity centre and sizes in
    metres, velocity [m/s]. Sine and cosine are those of mmdetection3d's angle before version 1.0,
    ``-yaw - pi / 2``, because the published weights were trained with it; here they are
    ``-cos(yaw)`` and ``-sin(yaw)``.

    Attributes:
        grid: the head's map; a predicted centre always lies in its range.
    """

    grid: BevGrid

    def encode(self, boxes: Boxes3D) -> Tensor:
        """Boxes ``(..., M)`` to codes ``(..., M, 10)`` float32; an unknown velocity stays NaN."""
        length, width, height = boxes.size.float().clamp(min=1e-3).log().unbind(-1)
        x, y, z = boxes.centre.float().unbind(-1)
        yaw = boxes.yaw.float()
        columns = [x, y, width, length, z, height, -yaw.cos(), -yaw.sin()]
        return torch.cat([torch.stack(columns, dim=-1), boxes.velocity.float()], dim=-1)

    def decode(self, code: Tensor, label: Tensor, score: Tensor, valid: Tensor) -> Boxes3D:
        """Codes ``(..., M, 10)`` to boxes with label, score and validity ``(..., M)``."""
        code = code.float()
        return Boxes3D(
            centre=torch.stack([code[..., 0], code[..., 1], code[..., 4]], dim=-1),
            size=torch.stack([code[..., 3], code[..., 2], code[..., 5]], dim=-1).exp(),
            yaw=torch.atan2(-code[..., 7], -code[..., 6]),
            velocity=code[..., 8:10],
            label=label,
            valid=valid,
            score=score,
        )


@dataclass(frozen=True)
class QueryPredictions:
    """Q queries through L decoder layers: class logits ``(L, B, Q, K)`` and boxes
    ``(L, B, Q, 10)`` in the code of :class:`MetricBoxCodec`; the last layer counts."""

    logits: Tensor
    code: Tensor


@dataclass(frozen=True)
class DenoisingPredictions(QueryPredictions):
    """Queries that started from disturbed annotations and shall restore them (DN-DETR, Li et al.,
    CVPR 2022); in training only.

    Attributes:
        box: ``(B, Q)`` int64 the annotation that a query started from.
        valid: ``(B, Q)`` bool, False where that is padding.
    """

    box: Tensor
    valid: Tensor


@dataclass(frozen=True)
class PerspectivePredictions:
    """Objects as the images show them; in training only.

    Attributes:
        heatmap: ``(B, N, K, h, w)`` logits of the classes at the objects' centres.
        log_depth: ``(B, N, h, w)`` logarithm of the centre's depth along the optical axis [m].
        image_from_lidar: ``(B, N, 4, 4)``.
        scale: cells of the map for a pixel of the image, along u and v.
    """

    heatmap: Tensor
    log_depth: Tensor
    image_from_lidar: Tensor
    scale: tuple[float, float]


@dataclass(frozen=True)
class BEVFormerPredictions:
    """Output of BEVFormer and its head.

    Attributes:
        bev: ``(B, C, Y, X)`` the encoder's map, which the next frame attends to.
        queries: the detections.
        codec: what turns codes into boxes.
        heatmap: ``(B, K, Y, X)`` logits of the class heatmap that the queries started from, or None
            where they are learned.
        denoising, perspective: None outside training, and where the model has none.
    """

    bev: Tensor
    queries: QueryPredictions
    codec: MetricBoxCodec
    heatmap: Tensor | None = None
    denoising: DenoisingPredictions | None = None
    perspective: PerspectivePredictions | None = None
