"""Outputs of the detection heads, and the box codecs they are trained with.

Only a codec converts between a head's regression code and :class:`Boxes3D`. Predictions carry their
codec, so that decoding and losses use the same one.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from bev_lightning.structures.boxes import Boxes3D
from bev_lightning.structures.grid import BevGrid


@dataclass(frozen=True)
class BoxCodec:
    """TransFusion's box code of ten numbers:

    ``(..., 10) [cx, cy, cz, log w, log l, log h, sin, cos, vx, vy]``: centre in cells of the
    head's map (the first cell's centre is 0.5), height and sizes in metres, velocity [m/s]. Sine
    and cosine are those of mmdetection3d's angle before version 1.0, ``-yaw - pi / 2``, because
    the published weights were trained with it; here they are ``-cos(yaw)`` and ``-sin(yaw)``.

    Attributes:
        grid: the head's map.
        height_shift: cz lies this share of the box's height above its gravity centre. The published
            BEVFusion took the annotated centre for the bottom of the box, so that its weights
            predict half a height too much: they need 0.5. 0 means no shift.
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
        (shifted by ``height_shift``), for the overlaps in the matcher."""
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
    """Output of TransFusionHead: K classes, Q queries, L decoder layers (the last is decoded).

    Attributes:
        heatmap: ``(B, K, Y, X)`` logits of the class heatmap.
        query_label: ``(B, Q)`` int64 class of the peak a query started from.
        query_score: ``(B, K, Q)`` the heatmap's probabilities at that cell, zero for classes
            without a peak there.
        logits: ``(L, B, Q, K)`` class logits of each layer.
        code: ``(L, B, Q, 10)`` boxes in the code of ``codec``.
        codec: decodes codes to boxes.
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
        code: ``(B, 10, Y, X)`` the box centred in each cell, in the code of ``codec``.
        codec: decodes codes to boxes.
    """

    heatmap: Tensor
    code: Tensor
    codec: BoxCodec


@dataclass(frozen=True)
class BEVFusionPredictions:
    """Output of BEVFusion and its head.

    Attributes:
        detections: output of the head.
        depth_logits: ``(B, N, D, h, w)`` logits over the depth bins of the camera branch; None if
            depth is not supervised.
        depth_target: ``(B, N, h, w)`` int64 bin of the lidar's depth, -1 without a lidar point.
    """

    detections: TransFusionPredictions | HeatmapPredictions
    depth_logits: Tensor | None = None
    depth_target: Tensor | None = None


@dataclass(frozen=True)
class MetricBoxCodec:
    """BEVFormer's box code of ten numbers:

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
    """Output of L decoder layers for Q queries; boxes are decoded from the last layer.

    Attributes:
        logits: ``(L, B, Q, K)`` class logits.
        code: ``(L, B, Q, 10)`` boxes in the code of :class:`MetricBoxCodec`.
    """

    logits: Tensor
    code: Tensor


@dataclass(frozen=True)
class DenoisingPredictions(QueryPredictions):
    """Queries made from noised annotations, which they shall reconstruct (DN-DETR, Li et al., CVPR
    2022); in training only.

    Attributes:
        box: ``(B, Q)`` int64 index of the query's annotation.
        valid: ``(B, Q)`` bool, False for padding.
    """

    box: Tensor
    valid: Tensor


@dataclass(frozen=True)
class PerspectivePredictions:
    """Auxiliary 2D detections in the images; in training only.

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
        codec: decodes codes to boxes.
        heatmap: ``(B, K, Y, X)`` logits of the class heatmap that initialises the queries, or None
            if they are learned.
        denoising, perspective: None outside training, and if the model has none.
    """

    bev: Tensor
    queries: QueryPredictions
    codec: MetricBoxCodec
    heatmap: Tensor | None = None
    denoising: DenoisingPredictions | None = None
    perspective: PerspectivePredictions | None = None
