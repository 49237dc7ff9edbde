import math

import pytest
import torch

from bev_lightning.structures.geometry import (
    apply_transform,
    make_transform,
    project,
    wrap_angle,
    yaw_of,
)


def random_pose(generator: torch.Generator) -> torch.Tensor:
    matrix = torch.randn(3, 3, generator=generator, dtype=torch.float64)
    translation = torch.randn(3, generator=generator, dtype=torch.float64) * 100
    return make_transform(torch.linalg.qr(matrix).Q, translation)


def image_from_camera() -> torch.Tensor:
    intrinsic = torch.tensor([[100.0, 0.0, 80.0], [0.0, 100.0, 45.0], [0.0, 0.0, 1.0]])
    return make_transform(intrinsic, torch.zeros(3))


def test_neighbours_cancel():
    generator = torch.Generator().manual_seed(0)
    a_from_b, b_from_c = random_pose(generator), random_pose(generator)
    points = torch.randn(7, 3, generator=generator, dtype=torch.float64)
    chained = apply_transform(a_from_b @ b_from_c, points)
    torch.testing.assert_close(
        chained, apply_transform(a_from_b, apply_transform(b_from_c, points))
    )


def test_project_a_point_ahead_of_the_camera():
    pixels, depth = project(image_from_camera(), torch.tensor([[1.0, -0.5, 10.0]]))
    torch.testing.assert_close(pixels, torch.tensor([[90.0, 40.0]]))
    torch.testing.assert_close(depth, torch.tensor([10.0]))


def test_pixel_map_moves_pixels_at_every_depth():
    shrink_and_crop = torch.tensor([[0.5, 0.0, -10.0], [0.0, 0.5, -3.0], [0.0, 0.0, 1.0]])
    points = torch.tensor([[1.0, -0.5, 10.0], [2.0, 3.0, 40.0]])
    before, _ = project(image_from_camera(), points)
    network_from_image = make_transform(shrink_and_crop, torch.zeros(3))
    after, depth = project(network_from_image @ image_from_camera(), points)
    torch.testing.assert_close(after, before * 0.5 - torch.tensor([10.0, 3.0]))
    torch.testing.assert_close(depth, points[:, 2])


def test_behind_the_camera_has_negative_depth_and_finite_pixels():
    pixels, depth = project(torch.eye(4), torch.tensor([[1.0, 1.0, -2.0]]))
    assert depth.item() == -2.0
    assert torch.isfinite(pixels).all()


@pytest.mark.parametrize(
    ("angle", "wrapped"),
    [
        (0.0, 0.0),
        (math.pi, math.pi),
        (-math.pi, math.pi),
        (3.5, 3.5 - 2 * math.pi),
        (-9.0, 4 * math.pi - 9.0 - 2 * math.pi),
    ],
)
def test_wrap_angle(angle: float, wrapped: float):
    value = wrap_angle(torch.tensor(angle, dtype=torch.float64)).item()
    assert value == pytest.approx(wrapped, abs=1e-12)


def test_yaw_of():
    cos, sin = math.cos(0.8), math.sin(0.8)
    rotation = torch.tensor([[cos, -sin, 0.0], [sin, cos, 0.0], [0.0, 0.0, 1.0]])
    assert yaw_of(make_transform(rotation, torch.zeros(3))).item() == pytest.approx(0.8, abs=1e-6)
