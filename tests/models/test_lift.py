import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from bev_lightning.errors import InputError
from bev_lightning.models.image import LiftFPN, ResNet
from bev_lightning.models.lift import CameraBranch, LiftSplat, depth_map, depth_targets
from bev_lightning.structures import BevGrid, Cameras, Points

# Not square, not centred, cells not square: nothing can be swapped unseen.
GRID = BevGrid((-10.0, -4.0, -3.0, 38.0, 28.0, 5.0), (2.0, 1.0))  # X = 24, Y = 32
IMAGE = (32, 80)  # H, W
FEATURE = (4, 10)  # h, w
BINS = (2.0, 22.0, 0.5)
INTRINSIC = np.array([[50.0, 0, 39.5], [0, 52.0, 15.5], [0, 0, 1]])


def camera_pose(yaw: float, position: tuple[float, float, float]) -> np.ndarray:
    """lidar_from_camera of a camera that looks along ``yaw`` [rad] in the x-y plane."""
    c, s = math.cos(yaw), math.sin(yaw)
    pose = np.eye(4)
    pose[:3, :3] = np.array([[s, 0, c], [-c, 0, s], [0, -1, 0]])  # right, down, forward
    pose[:3, 3] = position
    return pose


POSES = (camera_pose(0.3, (1.0, 0.2, 0.4)), camera_pose(1.4, (0.5, 0.6, 0.5)))
# Image augmentation: scale, flip and shift. BEV augmentation: turn, scale, flip and shift.
PIXEL_MAP = np.array([[-0.9, 0.05, 75.0], [-0.04, 0.9, 3.0], [0, 0, 1]])
TURN = np.array([[math.cos(0.5), -math.sin(0.5)], [math.sin(0.5), math.cos(0.5)]])
BEV_AUGMENTATION = np.eye(4)
BEV_AUGMENTATION[:2, :2] = 1.05 * TURN @ np.diag([1.0, -1.0])
BEV_AUGMENTATION[2, 2] = 1.05
BEV_AUGMENTATION[:3, 3] = (3.0, 14.0, 0.2)


def make_cameras(augmented: bool = True) -> Cameras:
    matrices = []
    for pose in POSES:
        pixel_map = PIXEL_MAP if augmented else np.eye(3)
        image_from_camera = np.eye(4)
        image_from_camera[:3, :3] = pixel_map @ INTRINSIC
        matrix = image_from_camera @ np.linalg.inv(pose)
        matrices.append(matrix @ np.linalg.inv(BEV_AUGMENTATION) if augmented else matrix)
    image_from_lidar = torch.tensor(np.stack(matrices), dtype=torch.float32).unsqueeze(0)
    return Cameras(torch.zeros(1, len(POSES), 3, *IMAGE), image_from_lidar)


def locate(camera: int, row: int, column: int, depth: float, augmented: bool = True) -> np.ndarray:
    """Model frame position of a feature pixel at a depth, step by step."""
    pixel = np.array([column * (IMAGE[1] - 1) / (FEATURE[1] - 1), 0.0, 1.0])
    pixel[1] = row * (IMAGE[0] - 1) / (FEATURE[0] - 1)
    if augmented:
        pixel = np.linalg.inv(PIXEL_MAP) @ pixel
    in_camera = depth * np.linalg.inv(INTRINSIC) @ pixel
    in_lidar = POSES[camera] @ np.array([*in_camera, 1.0])
    return (BEV_AUGMENTATION @ in_lidar if augmented else in_lidar)[:3]


def make_lift(**options: object) -> LiftSplat:
    settings: dict = {"truncate_cells": False, **options}
    return LiftSplat(6, 5, GRID, BINS, **settings)


def make_points(*rows: np.ndarray, padding: int = 0) -> Points:
    features = torch.zeros(1, len(rows) + padding, 5)
    for k, row in enumerate(rows):
        features[0, k, :3] = torch.tensor(row)
    return Points(features, torch.tensor([len(rows)]))


class FixedDepth(LiftSplat):
    """One feature pixel at one depth bin carries a context of 1, 2, ..; all else is zero."""

    location = (0, 0, 0, 0)  # camera, bin, row, column

    def predict_depth(
        self, features: Tensor, cameras: Cameras, points: Points | None
    ) -> tuple[Tensor, Tensor]:
        camera, k, row, column = self.location
        logits = torch.full((1, 2, self.num_depths, *FEATURE), -50.0)
        logits[0, camera, k, row, column] = 50.0
        context = torch.zeros(1, 2, self.out_channels, *FEATURE)
        context[0, camera, :, row, column] = torch.arange(self.out_channels) + 1.0
        return logits, context


@pytest.mark.parametrize("augmented", [False, True])
@pytest.mark.parametrize("location", [(0, 9, 1, 2), (0, 35, 2, 8), (1, 20, 1, 5), (1, 14, 0, 9)])
def test_a_pixel_at_a_depth_lands_in_its_cell(
    location: tuple[int, int, int, int], augmented: bool
) -> None:
    lift = FixedDepth(6, 5, GRID, BINS, truncate_cells=False)
    lift.location = location
    camera, k, row, column = location
    x, y, z = locate(camera, row, column, BINS[0] + k * BINS[2], augmented)
    i, j = math.floor((x + 10) / 2), math.floor(y + 4)
    inside = 0 <= i < 24 and 0 <= j < 32 and -3 <= z < 5
    bev, _ = lift(torch.zeros(1, 2, 6, *FEATURE), make_cameras(augmented))
    assert bev.shape == (1, 5, 32, 24)
    if inside:
        torch.testing.assert_close(bev[0, :, j, i], torch.arange(5) + 1.0)
        bev[0, :, j, i] = 0
    assert bev.abs().sum() < 1e-6


def test_most_of_those_locations_are_inside() -> None:
    locations = [(0, 9, 1, 2), (0, 35, 2, 8), (1, 20, 1, 5), (1, 14, 0, 9)]
    for augmented in (False, True):
        located = [locate(c, r, u, BINS[0] + k * BINS[2], augmented) for c, k, r, u in locations]
        inside = GRID.contains(torch.tensor(np.stack(located)))
        assert inside.sum() >= 3


def test_frustum_in_the_augmented_frame() -> None:
    frustum = make_lift().frustum(make_cameras(), FEATURE)
    assert frustum.shape == (1, 2, 40, *FEATURE, 3)
    for camera, k, row, column in [(0, 0, 0, 0), (0, 39, 3, 9), (1, 7, 2, 4)]:
        wanted = locate(camera, row, column, BINS[0] + k * BINS[2])
        found = frustum[0, camera, k, row, column].numpy()
        np.testing.assert_allclose(found, wanted, atol=2e-5)


def test_truncation_keeps_points_just_below_the_range() -> None:
    right = make_lift().cells(make_cameras(), FEATURE)
    published = make_lift(truncate_cells=True).cells(make_cameras(), FEATURE)
    assert torch.equal(published[right >= 0], right[right >= 0])
    x, y, z = (
        make_lift().frustum(make_cameras(), FEATURE)[(right < 0) & (published >= 0)].unbind(-1)
    )
    below = (x < -10) | (y < -4) | (z < -3)
    assert len(x) > 0 and bool(below.all())
    assert x.min() > -12 and y.min() > -5 and z.min() > -11
    frustum = make_lift().frustum(make_cameras(), FEATURE)
    assert torch.equal(right >= 0, GRID.contains(frustum))


def test_nothing_in_the_grid() -> None:
    lift = LiftSplat(6, 5, BevGrid((500, 500, -3, 520, 520, 5), (1, 1)), BINS)
    features = torch.randn(1, 2, 6, *FEATURE, requires_grad=True)
    bev, _ = lift(features, make_cameras())
    assert bev.shape == (1, 5, 20, 20) and not bev.any()
    bev.sum().backward()
    assert features.grad is not None and not features.grad.any()


def test_depth_map_keeps_the_nearest_point() -> None:
    cameras = make_cameras(augmented=False)
    near, far = locate(0, 1, 4, 6.0, False), locate(0, 1, 4, 15.0, False)
    behind = POSES[0][:3, 3] - 3 * POSES[0][:3, 2]
    for rows in ((near, far, behind), (far, near, behind)):
        points = make_points(*rows, padding=2)
        points.features[0, 3:, :3] = torch.tensor(locate(0, 2, 2, 3.0, False))  # padding
        drawn = depth_map(cameras, points)
        assert drawn.shape == (1, 2, *IMAGE)
        assert (drawn[0, 0] > 0).sum() == 1
        v, u = (drawn[0, 0] > 0).nonzero()[0].tolist()
        assert (v, u) == (int(31 / 3), int(4 * 79 / 9))
        assert drawn[0, 0, v, u] == pytest.approx(6.0, abs=1e-4)


def test_depth_map_of_no_points() -> None:
    cameras = make_cameras()
    assert not depth_map(cameras, Points(torch.zeros(1, 0, 5), torch.tensor([0]))).any()
    assert not depth_map(cameras, Points(torch.ones(1, 3, 5), torch.tensor([0]))).any()


def test_depth_is_metres_of_the_camera_under_bev_scaling() -> None:
    points = make_points(locate(1, 1, 6, 9.0))
    assert depth_map(make_cameras(), points).max() == pytest.approx(9.0, abs=1e-4)


def test_depth_targets() -> None:
    cameras = make_cameras(augmented=False)
    points = make_points(
        locate(0, 1, 4, 6.2, False),  # bin 8 at 6 m is nearer than bin 9 at 6.5 m
        locate(0, 1, 4, 15.0, False),  # hidden behind it
        locate(0, 2, 7, 1.5, False),  # before the first bin
        locate(0, 2, 2, 40.0, False),  # beyond the last
        locate(1, 2, 3, 21.6, False),  # bin 39 at 21.5 m, the last
    )
    targets = depth_targets(cameras, points, BINS, FEATURE)
    assert targets.shape == (1, 2, *FEATURE) and targets.dtype == torch.int64
    # Feature pixels are blocks of 8 x 8 image pixels; frustum rays run to the corners instead.
    assert targets[0, 0, 31 // 3 // 8, 4 * 79 // 9 // 8] == 8
    assert targets[0, 1, 2 * 31 // 3 // 8, 3 * 79 // 9 // 8] == 39
    assert (targets >= 0).sum() == 2
    empty = depth_targets(cameras, Points(torch.zeros(1, 0, 5), torch.tensor([0])), BINS, FEATURE)
    assert bool((empty == -1).all())


def test_depth_targets_of_sizes_that_do_not_divide() -> None:
    cameras = Cameras(torch.zeros(1, 2, 3, 30, 75), make_cameras(augmented=False).image_from_lidar)
    points = make_points(locate(0, 1, 4, 6.2, False))
    targets = depth_targets(cameras, points, BINS, FEATURE)
    assert targets.shape == (1, 2, *FEATURE)
    assert targets[targets >= 0].tolist() == [8]


@pytest.mark.parametrize("lidar_depth", [False, True])
def test_gradients_reach_every_parameter(lidar_depth: bool) -> None:
    torch.manual_seed(0)
    lift = make_lift(lidar_depth=lidar_depth, downsample=2)
    assert lift.grid.shape == (16, 12)
    features = torch.randn(1, 2, 6, *FEATURE, requires_grad=True)
    bev, logits = lift(features, make_cameras(), make_points(locate(0, 1, 4, 6.0)))
    assert bev.shape == (1, 5, 16, 12) and logits.shape == (1, 2, 40, *FEATURE)
    bev.square().sum().backward()
    assert features.grad is not None and features.grad.abs().sum() > 0
    for name, parameter in lift.named_parameters():
        assert parameter.grad is not None, name


def test_lidar_depth_changes_the_prediction() -> None:
    torch.manual_seed(0)
    lift = make_lift(lidar_depth=True).eval()
    features = torch.randn(1, 2, 6, *FEATURE)
    with torch.no_grad():
        _, without = lift(features, make_cameras(), Points(torch.zeros(1, 0, 5), torch.tensor([0])))
        _, seen = lift(features, make_cameras(), make_points(locate(0, 1, 4, 6.0)))
    changed = (without != seen).any(dim=2)
    assert changed[0, 0].any() and not changed[0, 1].any()


def test_refusals_of_user_errors() -> None:
    features = torch.zeros(1, 2, 6, *FEATURE)
    with pytest.raises(InputError, match="lidar_depth reads lidar points"):
        make_lift(lidar_depth=True)(features, make_cameras())
    with pytest.raises(InputError, match=r"features are \(4, 10\); set stride"):
        make_lift(lidar_depth=True, stride=16)(features, make_cameras(), make_points())
    with pytest.raises(InputError, match="downsample 3"):
        make_lift(downsample=3)
    with pytest.raises(InputError, match="even stride"):
        make_lift(lidar_depth=True, stride=5)


def test_autocast_keeps_geometry_and_softmax_in_float32() -> None:
    torch.manual_seed(0)
    lift = make_lift().eval()
    features = torch.randn(1, 2, 6, *FEATURE)
    cameras = make_cameras()
    points = make_points(locate(0, 1, 4, 6.0))
    with torch.no_grad():
        wanted, _ = lift(features, cameras)
        drawn = depth_map(cameras, points)
        cells = lift.cells(cameras, FEATURE)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            bev, logits = lift(features, cameras)
            assert torch.equal(lift.cells(cameras, FEATURE), cells)
            assert torch.equal(depth_map(cameras, points), drawn)
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(bev.float(), wanted, rtol=0.05, atol=0.02)


def test_camera_branch() -> None:
    torch.manual_seed(0)
    backbone = ResNet(18, width=8, out_stages=(1, 2))
    neck = LiftFPN(backbone.out_channels, 6)
    branch = CameraBranch(backbone, neck, make_lift())
    cameras = make_cameras()
    images = torch.randn(2, 2, 3, *IMAGE)
    cameras = Cameras(images, cameras.image_from_lidar.repeat(2, 1, 1, 1))
    bev, logits = branch(cameras)
    assert bev.shape == (2, 5, 32, 24) and logits.shape == (2, 2, 40, *FEATURE)
    bev.square().mean().backward()
    assert isinstance(backbone.conv1, nn.Conv2d) and backbone.conv1.weight.grad is not None
    branch.eval()
    with torch.no_grad():
        both = branch(cameras)[0]
        second = branch(Cameras(images[1:], cameras.image_from_lidar[1:]))[0]
    torch.testing.assert_close(both[1:], second)


def test_a_fixed_rig_builds_its_index_once() -> None:
    lift, cameras = make_lift(), make_cameras()
    with torch.inference_mode():
        first = lift.pool_index(make_cameras(), FEATURE)
    # What validation left serves training.
    assert lift.pool_index(cameras, FEATURE) is first and not first.points.is_inference()
    features = torch.randn(1, 2, 6, *FEATURE, requires_grad=True)
    lift(features, cameras)[0].sum().backward()
    assert features.grad is not None and features.grad.any()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        faked = replace(cameras, image_from_lidar=mode.from_tensor(cameras.image_from_lidar))
        assert lift.pool_index(faked, FEATURE).points.shape == first.points.shape
    for number in range(1, 5):
        moved = cameras.image_from_lidar.clone()
        moved[:, :, 0, 3] += number
        index = lift.pool_index(replace(cameras, image_from_lidar=moved), FEATURE)
        assert index is not first and not torch.equal(index.cells, first.cells)
    assert lift.pool_index(cameras, FEATURE) is not first  # the oldest has been dropped
    assert torch.equal(lift.pool_index(cameras, FEATURE).points, first.points)
