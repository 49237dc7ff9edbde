"""The loss of objects seen in the images (BEVFormer v2, Yang et al., CVPR 2023, section 3.2)."""

import torch
from torch import Tensor

from bev_lightning.objectives.heatmap import draw_gaussians
from bev_lightning.objectives.losses import gaussian_focal_loss
from bev_lightning.structures import Boxes3D
from bev_lightning.structures.constants import constant
from bev_lightning.structures.geometry import project
from bev_lightning.structures.predictions import PerspectivePredictions

# Of the Gaussian at an object's centre [cells]; objects closer than this are not looked for [m].
RADIUS_CELLS = 2.0
MIN_DEPTH = 0.5


def perspective_terms(predictions: PerspectivePredictions, targets: Boxes3D) -> dict[str, Tensor]:
    """Gaussian focal loss of the classes at the boxes' centres in each image
    (``perspective_class``), and L1 of the logarithm of their depths (``perspective_depth``), each
    divided by the number of centres in all images, at least 1."""
    _, num_cameras, num_classes, height, width = predictions.heatmap.shape
    centre = targets.centre.float().nan_to_num().unsqueeze(1)
    pixels, depth = project(predictions.image_from_lidar.float(), centre)  # (B, N, M)
    # Pixel centres lie at integers, a map's cells begin there.
    cells = (pixels + 0.5) * constant(predictions.scale, pixels)
    inside = ((cells >= 0) & (cells < constant((width, height), cells))).all(-1)
    known = targets.valid & torch.isfinite(targets.centre).all(-1)
    seen = known.unsqueeze(1) & (depth > MIN_DEPTH) & inside
    wanted = draw_gaussians(
        cells.flatten(0, 1),
        torch.full_like(depth, RADIUS_CELLS).flatten(0, 1),
        seen.flatten(0, 1),
        targets.label.unsqueeze(1).expand(-1, num_cameras, -1).flatten(0, 1),
        num_classes,
        (height, width),
    )
    x, y = cells.where(seen.unsqueeze(-1), 0.0).long().unbind(-1)
    found = predictions.log_depth.float().flatten(2).gather(2, y * width + x)
    error = (found - depth.clamp(min=MIN_DEPTH).log()).abs() * seen
    return {
        "perspective_class": gaussian_focal_loss(predictions.heatmap.flatten(0, 1), wanted),
        "perspective_depth": error.sum() / seen.sum().clamp(min=1),
    }
