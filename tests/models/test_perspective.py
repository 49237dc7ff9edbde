"""The detector in the images is there in training, and gone afterwards."""

import math

import torch

from bev_lightning.models.perspective import PerspectiveHead


def test_shapes_and_first_guess() -> None:
    torch.manual_seed(0)
    head = PerspectiveHead(8, 3).eval()
    matrix = torch.eye(4).expand(2, 4, 4, 4)
    predicted = head(torch.zeros(2, 4, 8, 6, 10), matrix, (48, 80))
    assert predicted.heatmap.shape == (2, 4, 3, 6, 10) and predicted.log_depth.shape == (
        2,
        4,
        6,
        10,
    )
    assert predicted.scale == (0.125, 0.125) and predicted.image_from_lidar is matrix
    # A probability of 0.1 and 20 m where nothing is known.
    torch.testing.assert_close(predicted.heatmap.sigmoid(), torch.full_like(predicted.heatmap, 0.1))
    torch.testing.assert_close(
        predicted.log_depth.exp(), torch.full_like(predicted.log_depth, math.exp(3.0))
    )
