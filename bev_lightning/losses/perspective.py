"""Auxiliary loss on 2D detections in the images (BEVFormer v2, Yang et al., CVPR 2023, 3.2)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bev_lightning.losses.functional import gaussian_focal_loss, normalizer
from bev_lightning.losses.heatmap import draw_gaussians
from bev_lightning.structures import Batch, Boxes3D
from bev_lightning.structures.constants import constant
from bev_lightning.structures.geometry import project
from bev_lightning.structures.predictions import PerspectivePredictions

# Radius of the Gaussian at an object's centre [cells]; least depth of an object [m].
RADIUS_CELLS = 2.0
MIN_DEPTH = 0.5


@dataclass(frozen=True)
class ImageTargets:
    """The boxes' centres in the images.

    Attributes:
        cells: ``(B, N, M, 2)`` x, y in cells of the map.
        depth: ``(B, N, M)`` [m].
        seen: ``(B, N, M)`` bool, whether the centre is in the image.
        heatmap: ``(B * N, K, h, w)`` a Gaussian at each visible centre.
    """

    cells: Tensor
    depth: Tensor
    seen: Tensor
    heatmap: Tensor


def perspective_terms(
    predictions: PerspectivePredictions,
    targets: Boxes3D,
    normalizers: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Gaussian focal loss of the classes at the boxes' centres in each image
    (``perspective_class``), and L1 of the logarithm of their depths (``perspective_depth``), each
    divided by the number of centres in all images, at least 1, or by what is given."""
    num_classes, height, width = predictions.heatmap.shape[2:]
    image_targets = project_targets(
        targets, predictions.image_from_lidar, predictions.scale, num_classes, (height, width)
    )
    x, y = image_targets.cells.where(image_targets.seen.unsqueeze(-1), 0.0).long().unbind(-1)
    found = predictions.log_depth.float().flatten(2).gather(2, y * width + x)
    error = (found - image_targets.depth.clamp(min=MIN_DEPTH).log()).abs() * image_targets.seen
    peaks = None if normalizers is None else normalizers["perspective_class"]
    divided = error.sum() / normalizer(image_targets.seen.sum(), normalizers, "perspective_depth")
    return {
        "perspective_class": gaussian_focal_loss(
            predictions.heatmap.flatten(0, 1), image_targets.heatmap, peaks
        ),
        "perspective_depth": divided,
    }


def perspective_normalizers(network: Any, batch: Batch) -> dict[str, Tensor]:
    """Normalizers of the terms, from the annotations of a batch."""
    assert batch.cameras is not None and batch.targets is not None
    cameras, shape = batch.cameras, network.map_size(batch.cameras)
    covered = network.padded_size(cameras)
    scale = (shape[1] / covered[1], shape[0] / covered[0])
    image_targets = project_targets(
        batch.targets, cameras.image_from_lidar, scale, network.head.num_classes, shape
    )
    return {
        "perspective_class": (image_targets.heatmap == 1).sum(),
        "perspective_depth": image_targets.seen.sum(),
    }


def project_targets(
    targets: Boxes3D,
    image_from_lidar: Tensor,
    scale: tuple[float, float],
    num_classes: int,
    shape: tuple[int, int],
) -> ImageTargets:
    """Project box centres into the images.

    Args:
        targets: ``(B, M)``.
        image_from_lidar: ``(B, N, 4, 4)``.
        scale: cells of the map for a pixel of the image, along u and v.
        shape: h, w of the map.
    """
    height, width = shape
    num_cameras = image_from_lidar.shape[1]
    centre = targets.centre.float().nan_to_num().unsqueeze(1)
    pixels, depth = project(image_from_lidar.float(), centre)  # (B, N, M)
    # Pixel centres lie at integers; a map's cell begins at one.
    cells = (pixels + 0.5) * constant(scale, pixels)
    inside = ((cells >= 0) & (cells < constant((width, height), cells))).all(-1)
    known = targets.valid & torch.isfinite(targets.centre).all(-1)
    seen = known.unsqueeze(1) & (depth > MIN_DEPTH) & inside
    heatmap = draw_gaussians(
        cells.flatten(0, 1),
        torch.full_like(depth, RADIUS_CELLS).flatten(0, 1),
        seen.flatten(0, 1),
        targets.label.unsqueeze(1).expand(-1, num_cameras, -1).flatten(0, 1),
        num_classes,
        shape,
    )
    return ImageTargets(cells, depth, seen, heatmap)
