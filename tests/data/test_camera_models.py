"""Camera models against OpenCV's, and their inverse."""

import math

import cv2
import numpy as np
import pytest
import torch

from bev_lightning.data.camera_models import CameraModel, make_camera_model, undistortion_map
from bev_lightning.data.distortion import check_camera_model
from bev_lightning.errors import InputError

MATRIX = np.array([[500.0, 0, 402], [0, 510, 301], [0, 0, 1]])
WIDE = (-0.19, 0.041, 0.0006, -0.0004, -0.004)
FISHEYE = (0.032, -0.011, 0.003, -0.0004)
NETWORK_FROM_VIEW = np.array([[0.5, 0.05, 3], [-0.05, 0.5, 2], [0, 0, 1]])
CASES = [
    ("pinhole", ()),
    ("brown_conrady", WIDE[:4]),
    ("brown_conrady", WIDE),
    ("brown_conrady", (*WIDE, 0.02, 0.01, 0.005)),
    ("kannala_brandt", FISHEYE),
]


def camera_model(name: str, distortion: tuple[float, ...], zoom: float = 1.0) -> CameraModel:
    return CameraModel(name, tuple(MATRIX.ravel().tolist()), distortion, zoom)


@pytest.mark.parametrize(("model", "distortion"), CASES)
def test_points_are_projected_as_opencv_does(model: str, distortion: tuple[float, ...]) -> None:
    rng = np.random.default_rng(0)
    points = rng.uniform((-3, -2, 2), (3, 2, 9), (200, 3))
    zero = np.zeros(3)
    if model == "kannala_brandt":
        expected, _ = cv2.fisheye.projectPoints(
            points[:, None], zero, zero, MATRIX, np.array(distortion)
        )
    else:
        expected, _ = cv2.projectPoints(points, zero, zero, MATRIX, np.array(distortion))
    found = camera_model(model, distortion).project(torch.from_numpy(points))
    np.testing.assert_allclose(found.numpy(), expected.reshape(-1, 2), atol=1e-9)


@pytest.mark.parametrize(("model", "distortion"), CASES)
@pytest.mark.parametrize("zoom", [0.8, 1.3])
def test_the_map_is_opencvs(model: str, distortion: tuple[float, ...], zoom: float) -> None:
    one = camera_model(model, distortion, zoom)
    size, view = (120, 200), NETWORK_FROM_VIEW @ one.view
    if model == "kannala_brandt":
        maps = cv2.fisheye.initUndistortRectifyMap(
            MATRIX, np.array(distortion), np.eye(3), view, size[::-1], cv2.CV_32FC1
        )
    else:
        maps = cv2.initUndistortRectifyMap(
            MATRIX, np.array(distortion), np.eye(3), view, size[::-1], cv2.CV_32FC1
        )
    found = undistortion_map(one, NETWORK_FROM_VIEW, size)
    np.testing.assert_allclose(found.numpy(), np.stack(maps, axis=-1), atol=0.1)
    half = undistortion_map(one, NETWORK_FROM_VIEW, size, scale=(0.5, 0.5))
    np.testing.assert_allclose(half.numpy(), (found.numpy() + 0.5) / 2 - 0.5, atol=1e-3)


def test_the_map_without_a_lens_is_the_inverse_of_the_matrix() -> None:
    found = undistortion_map(None, NETWORK_FROM_VIEW, (20, 30)).numpy()
    where = np.linalg.inv(NETWORK_FROM_VIEW) @ [7.0, 11.0, 1.0]
    np.testing.assert_allclose(found[11, 7], where[:2], atol=1e-4)
    assert undistortion_map(camera_model("kannala_brandt", FISHEYE), np.eye(3), (1, 1)).shape == (
        1,
        1,
        2,
    )


@pytest.mark.parametrize(("model", "distortion"), CASES)
def test_unproject_inverts_project(model: str, distortion: tuple[float, ...]) -> None:
    one = camera_model(model, distortion)
    pixels = torch.rand(300, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    pixels = pixels * torch.tensor([600.0, 450.0]) + torch.tensor([100.0, 75.0])
    rays = one.unproject(pixels)
    torch.testing.assert_close(one.project(rays * 3.7), pixels, atol=1e-6, rtol=0)


def test_a_fisheye_sees_beside_and_behind_itself() -> None:
    one = camera_model("kannala_brandt", FISHEYE)
    degrees = torch.tensor([0.0, 90.0, 110.0], dtype=torch.float64)
    angle = degrees.deg2rad()
    points = torch.stack([angle.sin(), torch.zeros(3, dtype=torch.float64), angle.cos()], dim=-1)
    pixels = one.project(points)
    bent = angle * (1 + sum(k * angle ** (2 * n + 2) for n, k in enumerate(FISHEYE)))
    torch.testing.assert_close(pixels[:, 0], 402 + 500 * bent)
    torch.testing.assert_close(one.unproject(pixels), points)


def test_no_second_picture_where_the_polynomial_turns_round() -> None:
    """A strong barrel: r (1 - 0.3 r^2) is largest at r = 1.054; beyond it everything would appear
    once more, upside down."""
    one = camera_model("brown_conrady", (-0.3, 0.0, 0.0, 0.0))
    turn = math.sqrt(1 / 0.9)
    points = torch.tensor([[turn - 1e-3, 0, 1], [turn + 1e-3, 0, 1], [1.8, 0, 1], [0, 0, -1.0]])
    assert one.project(points).isnan().any(-1).tolist() == [False, True, True, True]
    found = undistortion_map(one, np.diag([0.1, 0.1, 1.0]), (60, 160))
    assert (found[30, 120] < -1e5).all()  # x / z = 1.6
    assert (found[30, 60] > 0).all()


@pytest.mark.parametrize(
    ("model", "number", "sentence"),
    [
        ("ftheta", 4, "has the camera model 'ftheta': use one of pinhole, brown_conrady"),
        ("kannala_brandt", 5, "has 5 distortion coefficients; kannala_brandt takes 4"),
        ("brown_conrady", 6, "has 6 distortion coefficients; brown_conrady takes 4 or 5 or 8"),
        ("pinhole", 1, "has 1 distortion coefficients; pinhole takes 0"),
    ],
)
def test_odd_lenses_are_refused(model: str, number: int, sentence: str) -> None:
    with pytest.raises(InputError, match=f"^here {sentence}"):
        check_camera_model(model, number, "here")


def test_a_plain_pinhole_needs_no_lens() -> None:
    assert make_camera_model("pinhole", MATRIX, np.zeros(8)) is None
    assert make_camera_model("pinhole", MATRIX, np.zeros(8), zoom=0.5) == camera_model(
        "pinhole", (), 0.5
    )
    padded = np.pad(np.array(FISHEYE), (0, 4))
    assert make_camera_model("kannala_brandt", MATRIX, padded) == camera_model(
        "kannala_brandt", FISHEYE
    )


def test_a_view_looks_where_it_is_turned() -> None:
    one = CameraModel("pinhole", tuple(MATRIX.ravel().tolist()), (), 1.0, yaw_deg=30, pitch_deg=10)
    yaw, pitch = math.radians(30), math.radians(10)
    axis = [math.sin(yaw) * math.cos(pitch), -math.sin(pitch), math.cos(yaw) * math.cos(pitch)]
    u, v, depth = one.view @ axis  # y is down
    np.testing.assert_allclose([u, v, depth], [402, 301, 1], atol=1e-9)
    found = undistortion_map(one, np.eye(3), (600, 800)).numpy()[301, 402]
    expected = MATRIX @ axis
    np.testing.assert_allclose(found, expected[:2] / expected[2], atol=0.05)
