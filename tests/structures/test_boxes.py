import math

import pytest
import torch

from bev_lightning.structures import Boxes3D
from bev_lightning.structures.geometry import make_transform


def boxes() -> Boxes3D:
    return Boxes3D(
        centre=torch.tensor([[1.0, 2.0, 0.5], [-3.0, 0.0, 1.0]]),
        size=torch.tensor([[4.0, 2.0, 1.5], [1.0, 0.6, 1.8]]),
        yaw=torch.tensor([0.0, math.pi / 2]),
        velocity=torch.tensor([[5.0, 0.0], [math.nan, math.nan]]),
        label=torch.tensor([0, 8]),
        valid=torch.tensor([True, True]),
    )


def rotation_z(angle: float) -> torch.Tensor:
    cos, sin = math.cos(angle), math.sin(angle)
    return torch.tensor([[cos, -sin, 0.0], [sin, cos, 0.0], [0.0, 0.0, 1.0]])


def test_corners_start_at_the_front_left_of_the_bottom():
    corners = boxes().corners()
    assert corners.shape == (2, 8, 3)
    torch.testing.assert_close(corners[0, 0], torch.tensor([3.0, 3.0, -0.25]))
    torch.testing.assert_close(corners[0, 1], torch.tensor([3.0, 1.0, -0.25]))
    torch.testing.assert_close(corners[0, 6], torch.tensor([-1.0, 1.0, 1.25]))
    # Heading +y: the front is at larger y, the left at smaller x.
    torch.testing.assert_close(corners[1, 0], torch.tensor([-3.3, 0.5, 0.1]))


def test_transform_turns_centre_heading_and_velocity_together():
    turned = boxes().transform(
        make_transform(rotation_z(math.pi / 2), torch.tensor([10.0, 0.0, 0.0]))
    )
    torch.testing.assert_close(turned.centre[0], torch.tensor([8.0, 1.0, 0.5]))
    # Half a turn is +pi or -pi by rounding: compare directions.
    torch.testing.assert_close(turned.yaw.cos(), torch.tensor([0.0, -1.0]), atol=1e-6, rtol=0)
    torch.testing.assert_close(turned.velocity[0], torch.tensor([0.0, 5.0]), atol=1e-6, rtol=0)
    assert turned.velocity[1].isnan().all()


@pytest.mark.parametrize("scale", [0.9, 1.1])
def test_transform_with_scale_and_mirror_moves_the_corners_alike(scale: float):
    mirror = torch.diag(torch.tensor([1.0, -1.0, 1.0]))
    transform = make_transform(scale * rotation_z(0.3) @ mirror, torch.tensor([1.0, 2.0, 3.0]))
    moved = boxes().transform(transform)
    expected = boxes().corners() @ transform[:3, :3].T + transform[:3, 3]
    # Mirroring swaps left and right corners, so compare them as sets.
    order = [1, 0, 3, 2, 5, 4, 7, 6]
    torch.testing.assert_close(moved.corners(), expected[:, order], atol=1e-5, rtol=0)


def test_stack_pads_to_the_longest():
    batch = Boxes3D.stack([boxes(), Boxes3D.empty(0), boxes()[torch.tensor([False, True])]])
    assert batch.valid.tolist() == [[True, True], [False, False], [True, False]]
    assert batch.label[2, 0].item() == 8
    assert batch.score is None
    assert (batch.size > 0).all()


def test_pad_refuses_to_drop_boxes():
    with pytest.raises(ValueError, match="cannot pad 2 boxes to 1"):
        boxes().pad(1)


def test_cast_keeps_labels_and_masks():
    cast = boxes().to(torch.float64)
    assert (cast.centre.dtype, cast.label.dtype, cast.valid.dtype) == (
        torch.float64,
        torch.int64,
        torch.bool,
    )
