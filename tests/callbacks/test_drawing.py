import math

import numpy as np
import pytest
import torch

from bev_lightning.callbacks.drawing import (
    TRUTH,
    TextLayer,
    TopView,
    box_vertices,
    denormalise,
    draw_lines,
    project_lines,
)
from bev_lightning.structures import Boxes3D

# Model frame x right, y forward, z up; the camera looks along y: u right, v down.
IMAGE_FROM_LIDAR = torch.tensor(
    [[100.0, 50.0, 0.0, 0.0], [0.0, 30.0, -100.0, 0.0], [0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]]
)
SIZE = (60, 100)


def box(centre: tuple[float, float, float], size=(4.0, 2.0, 1.0), yaw=0.0) -> Boxes3D:
    return Boxes3D(
        centre=torch.tensor([centre]),
        size=torch.tensor([size]),
        yaw=torch.tensor([yaw]),
        velocity=torch.zeros(1, 2),
        label=torch.zeros(1, dtype=torch.int64),
        valid=torch.ones(1, dtype=torch.bool),
    )


def test_the_corners_of_a_box_land_where_they_project() -> None:
    vertices = box_vertices(box((0.0, 10.0, 0.0)))  # heading to the right, all of it in view
    lines, owner = project_lines(vertices, IMAGE_FROM_LIDAR, SIZE)
    assert lines.shape == (13, 2, 2) and owner.tolist() == [0] * 13
    # The near face is 9 m off, from x = -2 to 2 and z = -0.5 to 0.5; the far one 11 m.
    near_u, near_v = 100 * 2 / 9, 100 * 0.5 / 9
    ends = {tuple(np.round(point, 4)) for point in lines.reshape(-1, 2)}
    for sign_u in (-1, 1):
        for sign_v in (-1, 1):
            corner = (round(50 + sign_u * near_u, 4), round(30 + sign_v * near_v, 4))
            assert corner in ends
    # The heading: on the bottom face, from its centre at 10 m to its front edge at x = 2.
    assert lines[12] == pytest.approx(np.array([[50.0, 35.0], [70.0, 35.0]]))


def test_a_box_behind_the_camera_is_not_drawn() -> None:
    lines, owner = project_lines(box_vertices(box((0.0, -10.0, 0.0))), IMAGE_FROM_LIDAR, SIZE)
    assert lines.shape == (0, 2, 2) and owner.shape == (0,)


def test_edges_that_cross_the_plane_of_the_camera_are_cut_before_it() -> None:
    # A wall beside the camera, from 5 m behind it to 15 m ahead, 1.5 m to the right.
    vertices = box_vertices(box((1.5, 5.0, 0.0), size=(20.0, 0.2, 1.0), yaw=math.pi / 2))
    lines, _ = project_lines(vertices, IMAGE_FROM_LIDAR, SIZE)
    assert len(lines) > 0
    assert lines[..., 0].min() > 50.0  # it stays on the right: nothing is mirrored
    assert (lines <= np.array([99.5, 59.5]) + 1e-9).all()
    assert lines[..., 0].max() == pytest.approx(99.5)  # and reaches the border


def test_a_box_around_the_camera_does_not_leave_the_image() -> None:
    lines, _ = project_lines(
        box_vertices(box((0.0, 0.0, 0.0), size=(6.0, 6.0, 6.0))), IMAGE_FROM_LIDAR, SIZE
    )
    assert np.isfinite(lines).all()
    assert (lines >= -0.5 - 1e-9).all()
    assert (lines <= np.array([99.5, 59.5]) + 1e-9).all()


def test_no_box_gives_no_line() -> None:
    lines, owner = project_lines(box_vertices(Boxes3D.empty(0)), IMAGE_FROM_LIDAR, SIZE)
    assert lines.shape == (0, 2, 2) and owner.shape == (0,)


def test_a_line_is_drawn_at_its_pixels() -> None:
    image = np.zeros((9, 9, 3), np.uint8)
    draw_lines(image, np.array([[[2.0, 4.0], [6.0, 4.0]]]), (200, 100, 50))
    brightest = image[..., 0].argmax(axis=0)
    assert brightest[2:7].tolist() == [4] * 5
    assert image[4, 4].tolist() == pytest.approx([200, 100, 50], abs=20)  # anti-aliased
    assert image[:, 0].sum() == 0 and image[2].sum() == 0


@pytest.mark.parametrize(
    ("forward", "ahead", "right"),
    [((0.0, 1.0), (0.0, 20.0), (20.0, 0.0)), ((1.0, 0.0), (20.0, 0.0), (0.0, -20.0))],
)
def test_the_top_view_has_forward_up_in_any_frame(forward, ahead, right) -> None:
    lidar_from_ego = torch.eye(4, dtype=torch.float64)
    lidar_from_ego[:2, 0] = torch.tensor(forward)
    view = TopView(400, 50.0, lidar_from_ego)  # 4 pixels a metre
    assert view.to_pixels(np.array([0.0, 0.0])) == pytest.approx([199.5, 199.5])
    assert view.to_pixels(np.array(ahead)) == pytest.approx([199.5, 119.5])
    assert view.to_pixels(np.array(right)) == pytest.approx([279.5, 199.5])
    view.draw_points(np.array([[*ahead, 2.5], [*ahead, -3.0], [0.0, 99.0, 0.0]]))
    assert view.image[120, 200].tolist() == [186, 206, 232]  # the highest point stays on top


def test_the_top_view_shows_outline_heading_and_motion() -> None:
    view = TopView(400, 50.0, torch.eye(4, dtype=torch.float64))  # x is forward
    moving = box((20.0, 0.0, 0.0))
    moving.velocity[:] = torch.tensor([[0.0, 5.0]])
    view.draw_boxes(moving, TRUTH, 1)
    green = (view.image[..., 1].astype(int) - view.image[..., 0]) > 60
    rows, columns = np.nonzero(green)
    # 4 m long and 2 m wide at 20 m ahead: rows 119.5 +- 8, columns 199.5 +- 4; then 5 m
    # to the left.
    assert rows.min() == pytest.approx(111.5, abs=1) and rows.max() == pytest.approx(127.5, abs=1)
    assert columns.max() == pytest.approx(203.5, abs=1)
    assert columns.min() == pytest.approx(199.5 - 20, abs=1)
    assert green[113:118, 199:201].any(axis=1).all()  # heading: forward half of the middle
    assert not green[122:126, 198:202].any()


def test_rings_and_axes_are_numbered_in_metres() -> None:
    text_layer = TextLayer()
    view = TopView(400, 50.0, torch.eye(4, dtype=torch.float64))
    view.draw_rings(text_layer, (0, 0))
    texts = [text for _, text, *_ in text_layer._texts]
    assert sorted(texts) == sorted(
        ["-40", "-20", "0", "20", "40"] * 2 + ["to the right [m]", "forward [m]"]
    )
    ring = np.array([view.image[200, 199 + 4 * metres].astype(int).sum() for metres in (20, 25)])
    assert ring[0] > ring[1] + 20
    blank = np.zeros((400, 400, 3), np.uint8)
    assert text_layer.write(blank).any() and not blank.any()


def test_images_get_their_colours_back() -> None:
    mean, std = (123.0, 116.0, 103.0), (58.0, 57.0, 56.0)
    colours = torch.tensor([[[0.0]], [[128.0]], [[255.0]]])
    normalised = (colours - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    assert denormalise(normalised, mean, std).tolist() == [[[0, 128, 255]]]
