import math

import pytest
import torch

from bev_lightning.structures.geometry import (
    apply_transform,
    intrinsic_to_transform,
    invert_rigid,
    make_transform,
    pixel_map_to_transform,
    project,
    quaternion_to_rotation,
    wrap_angle,
    yaw_of,
)


def random_pose(generator: torch.Generator) -> torch.Tensor:
    quaternion = torch.randn(4, generator=generator, dtype=torch.float64)
    translation = torch.randn(3, generator=generator, dtype=torch.float64) * 100
    return make_transform(quaternion_to_rotation(quaternion), translation)


def test_quaternion_turns_x_to_y_by_a_quarter_about_z():
    quarter = torch.tensor([math.cos(math.pi / 4), 0.0, 0.0, math.sin(math.pi / 4)])
    rotation = quaternion_to_rotation(2.5 * quarter)
    torch.testing.assert_close(
        rotation @ torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.0, 1.0, 0.0])
    )


def test_neighbours_cancel():
    generator = torch.Generator().manual_seed(0)
    a_from_b, b_from_c = random_pose(generator), random_pose(generator)
    points = torch.randn(7, 3, generator=generator, dtype=torch.float64)
    chained = apply_transform(a_from_b @ b_from_c, points)
    torch.testing.assert_close(
        chained, apply_transform(a_from_b, apply_transform(b_from_c, points))
    )
    torch.testing.assert_close(
        invert_rigid(a_from_b) @ a_from_b, torch.eye(4, dtype=torch.float64), atol=1e-12, rtol=0
    )


def test_project_a_point_ahead_of_the_camera():
    image_from_camera = intrinsic_to_transform(
        torch.tensor([[100.0, 0.0, 80.0], [0.0, 100.0, 45.0], [0.0, 0.0, 1.0]])
    )
    pixels, depth = project(image_from_camera, torch.tensor([[1.0, -0.5, 10.0]]))
    torch.testing.assert_close(pixels, torch.tensor([[90.0, 40.0]]))
    torch.testing.assert_close(depth, torch.tensor([10.0]))


def test_pixel_map_moves_pixels_at_every_depth():
    shrink_and_crop = torch.tensor([[0.5, 0.0, -10.0], [0.0, 0.5, -3.0], [0.0, 0.0, 1.0]])
    image_from_camera = intrinsic_to_transform(
        torch.tensor([[100.0, 0.0, 80.0], [0.0, 100.0, 45.0], [0.0, 0.0, 1.0]])
    )
    points = torch.tensor([[1.0, -0.5, 10.0], [2.0, 3.0, 40.0]])
    before, _ = project(image_from_camera, points)
    after, depth = project(pixel_map_to_transform(shrink_and_crop) @ image_from_camera, points)
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
    rotation = quaternion_to_rotation(torch.tensor([math.cos(0.4), 0.0, 0.0, math.sin(0.4)]))
    assert yaw_of(make_transform(rotation, torch.zeros(3))).item() == pytest.approx(0.8, abs=1e-6)
