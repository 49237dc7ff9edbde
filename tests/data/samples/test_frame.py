"""Frames: geometry, targets, missing files, temporal queues."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from bev_lightning.data.nuscenes.index import Index, open_index
from bev_lightning.data.nuscenes.sample import pose_to_transform
from bev_lightning.data.nuscenes.sensor_files import read_lidar_file
from bev_lightning.data.samples.frame import FrameSource
from bev_lightning.data.transforms.augment import Augment
from bev_lightning.errors import InputError
from bev_lightning.structures import CameraInput, Inputs, LidarInput, RadarInput
from bev_lightning.structures.geometry import apply_transform, project

VERSION = "v1.0-mini"
CLASSES = (
    "car",
    "truck",
    "construction_vehicle",
    "bus",
    "trailer",
    "barrier",
    "motorcycle",
    "bicycle",
    "pedestrian",
    "traffic_cone",
)
RANGE = (-50.0, -50.0, -5.0, 50.0, 50.0, 5.0)
CAMERAS = ("CAM_FRONT", "CAM_BACK")
RADARS = ("RADAR_FRONT", "RADAR_BACK_LEFT")
EVERYTHING = Inputs(
    CameraInput((32, 64), CAMERAS), LidarInput(RANGE, sweeps=3), RadarInput(RANGE, RADARS, sweeps=2)
)
WIDE = (-1e4, -1e4, -9.0, 1e4, 1e4, 9.0)


@pytest.fixture
def index(make_tree, tmp_path: Path) -> Index:
    return open_index(make_tree(), VERSION, tmp_path / "cache")


def source(
    index: Index, inputs: Inputs = EVERYTHING, split: str = "mini_train", **kwargs
) -> FrameSource:
    return FrameSource(index, index.split(split), inputs, CLASSES, **kwargs)


def test_car_ahead_is_on_the_y_axis_and_in_the_front_image(index: Index) -> None:
    frame = source(index).frame(0, 1)
    boxes = frame.batch.targets
    # The ego drives along x, LIDAR_TOP (1 m ahead, 1.8 m up) looks along its own y.
    assert boxes.label.tolist() == [[0, 8]]  # neither the animal nor the barrier without points
    assert boxes.centre[0, 0].tolist() == pytest.approx([0, 11, -1.0], abs=1e-4)
    assert boxes.yaw[0, 0].item() == pytest.approx(np.pi / 2, abs=1e-5)
    assert boxes.velocity[0, 0].tolist() == pytest.approx([0, 10], abs=1e-4)
    assert boxes.size[0, 0].tolist() == pytest.approx([4.5, 1.9, 1.6])
    pixels, depth = project(frame.image_from_lidar[0].float(), boxes.centre[0, :1])
    # CAM_FRONT took its picture 12 ms (0.12 m) earlier: depth 12 + 0.12 - 1.5, 0.7 m below the
    # camera.
    assert depth[0, 0].item() == pytest.approx(10.62, abs=1e-3)
    u, v = 130 * 0.1 / 10.62 + 80, 130 * 0.7 / 10.62 + 45
    expected = [
        0.4 * (u + 0.5) - 0.5,
        0.4 * (v + 0.5) - 0.5 - 4,
    ]  # 90x160 to 36x64, 4 rows off the top
    assert pixels[0, 0].tolist() == pytest.approx(expected, abs=1e-3)
    assert depth[1, 0].item() < 0  # behind CAM_BACK


def test_poses_sources_and_ages(index: Index) -> None:
    frame = source(index).frame(0, 1)
    batch = frame.batch
    assert frame.sample_token == batch.sample_tokens[0] == "scene-0061_1"
    assert batch.has_previous.tolist() == [True]
    # 5 m of driving: the previous origin lies 5 m behind, which is -y.
    assert batch.lidar_from_previous_lidar[0, :3, 3].tolist() == pytest.approx([0, -5, 0], abs=1e-4)
    assert batch.can_bus[0, :3].tolist() == pytest.approx(
        [5 * np.cos(0.3), 5 * np.sin(0.3), 0], abs=1e-4
    )
    assert batch.can_bus[0, 16].item() == pytest.approx(0.3) and batch.can_bus[0, 17] == 0
    assert [s.age for s in frame.lidar] == pytest.approx([0, 0.05, 0.1, 0.5])
    shifts = [s.lidar_from_sweep[1, 3] for s in frame.lidar]
    assert shifts == pytest.approx([0, -0.5, -1, -5])
    assert [(s.sensor, round(s.age, 3)) for s in frame.radar] == [
        (0, 0.012),
        (1, 0.012),
        (0, 0.062),
        (1, 0.062),
        (0, 0.112),
        (1, 0.112),
    ]
    first = source(index).frame(0, 0)
    assert first.batch.has_previous.tolist() == [False]
    assert torch.equal(first.batch.lidar_from_previous_lidar[0], torch.eye(4))
    assert first.batch.can_bus[0, :3].tolist() == [0, 0, 0] and len(first.lidar) == 1


@pytest.mark.parametrize("seed", range(6))
def test_augmentation_moves_pixels_by_its_map_and_nothing_else(index: Index, seed: int) -> None:
    plain = source(index, target_range=WIDE).frame(2, 1)
    moved = source(index, target_range=WIDE, augment=Augment(), seed=seed).frame(2, 1)
    one, two = plain.batch, moved.batch
    augmented_from_lidar = torch.linalg.inv(two.global_from_lidar[0]) @ one.global_from_lidar[0]
    mirrored = bool(torch.linalg.det(augmented_from_lidar) < 0)
    order = [1, 0, 3, 2, 5, 4, 7, 6] if mirrored else list(range(8))  # left and right are swapped
    corners = one.targets.corners()[0].reshape(-1, 3)
    corners_moved = two.targets.corners()[0][:, order].reshape(-1, 3)
    torch.testing.assert_close(
        apply_transform(augmented_from_lidar.float(), corners), corners_moved, atol=2e-4, rtol=1e-5
    )
    pixels, depth = project(plain.image_from_lidar[0], corners)
    pixels_moved, depth_moved = project(moved.image_from_lidar[0], corners_moved)
    maps = [
        m.network_from_original @ np.linalg.inv(p.network_from_original)
        for m, p in zip(moved.images, plain.images, strict=True)
    ]
    for camera, moved_from_plain in enumerate(maps):
        seen = depth[camera] > 1
        expected = pixels[camera][seen] @ torch.from_numpy(moved_from_plain[:2, :2]).float().T
        expected = expected + torch.from_numpy(moved_from_plain[:2, 2]).float()
        torch.testing.assert_close(pixels_moved[camera][seen], expected, atol=0.02, rtol=1e-3)
        torch.testing.assert_close(
            depth_moved[camera][seen], depth[camera][seen], atol=1e-3, rtol=0
        )
    # A still point of the previous frame lands where it does without augmentation, then augmented.
    point = torch.tensor([[3.0, 4.0, 1.0]], dtype=torch.float64)
    expected = apply_transform(
        augmented_from_lidar, apply_transform(one.lidar_from_previous_lidar[0].double(), point)
    )
    got = apply_transform(
        two.lidar_from_previous_lidar[0].double(), apply_transform(augmented_from_lidar, point)
    )
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    for a, b in zip(plain.lidar + plain.radar, moved.lidar + moved.radar, strict=True):
        matrices = [getattr(s, "lidar_from_sweep", None) for s in (a, b)]
        matrices = (
            [getattr(s, "lidar_from_radar", None) for s in (a, b)]
            if matrices[0] is None
            else matrices
        )
        np.testing.assert_allclose(
            matrices[1], augmented_from_lidar.numpy() @ matrices[0], atol=1e-9
        )
    assert torch.equal(one.global_from_ego, two.global_from_ego) and torch.equal(
        one.can_bus, two.can_bus
    )


def test_frames_are_functions_of_seed_epoch_and_position(index: Index) -> None:
    frames = source(index, augment=Augment(), seed=1)
    first = frames.frame(3, 2)
    frames.frame(0, 0)
    again = source(index, augment=Augment(), seed=1).frame(3, 2)
    assert torch.equal(first.image_from_lidar, again.image_from_lidar)
    for other in (frames.frame(4, 2), source(index, augment=Augment(), seed=2).frame(3, 2)):
        assert not torch.equal(first.image_from_lidar, other.image_from_lidar)


def test_targets_keep_to_class_points_and_range(index: Index) -> None:
    def labels(**kwargs) -> list:
        return source(index, **kwargs).frame(0, 0).batch.targets.label[0].tolist()

    assert labels(min_points=0) == [0, 8, 5]
    assert labels(min_points=1) == [0, 8]
    assert labels(min_points=6) == []
    assert labels(target_range=(-5, 0, -5, 5, 15, 5)) == [0]
    frames = FrameSource(index, index.tokens, EVERYTHING, ("pedestrian", "barrier"), min_points=0)
    assert frames.frame(0, 0).batch.targets.label[0].tolist() == [0, 1]
    assert source(index, with_targets=False).frame(0, 0).batch.targets is None


def test_sample_without_boxes_and_single_sample_scene(make_tree, tmp_path: Path) -> None:
    root = make_tree(scenes=(("scene-0061", 2), ("scene-0103", 1)), empty=[("scene-0061", 1)])
    index = open_index(root, VERSION, tmp_path / "cache")
    assert source(index).frame(0, 1).batch.targets.valid.shape == (1, 0)
    alone = source(index, split="mini_val").frame(0, 0).batch
    assert (
        torch.isnan(alone.targets.velocity[0, 0]).all()
        and torch.isfinite(alone.targets.centre).all()
    )
    alone.validate()


def test_missing_files_matter_only_to_models_that_read_them(index: Index) -> None:
    camera_only = Inputs(camera=CameraInput((32, 64), CAMERAS))
    for path in (index.root / "samples" / "LIDAR_TOP").iterdir():
        if "0061_1" in path.name:
            path.unlink()
    assert len(source(index, camera_only)) == 3
    assert source(index, camera_only).frame(0, 1).lidar == ()
    lidar_only = Inputs(lidar=LidarInput(RANGE, sweeps=0))
    with pytest.raises(
        InputError, match=r"sample scene-0061_1 needs .*LIDAR_TOP_0.pcd.bin.*on_missing=skip"
    ):
        source(index, lidar_only)
    kept = source(index, lidar_only, on_missing="skip")
    assert kept.tokens == ("scene-0061_0", "scene-0061_2")
    assert list(kept.dropped) == ["scene-0061_1"]
    # The frame before is gone, so the next has no previous one rather than a wrong one.
    assert kept.frame(0, 1).batch.has_previous.tolist() == [False]


def test_absent_sensors_and_empty_splits_are_refused(index: Index) -> None:
    with pytest.raises(InputError, match=r"has no CAM_SIDE record"):
        source(index, Inputs(camera=CameraInput((32, 64), ("CAM_SIDE",))))
    with pytest.raises(InputError, match=r"no sample is left of 3 .*CAM_SIDE"):
        source(index, Inputs(camera=CameraInput((32, 64), ("CAM_SIDE",))), on_missing="skip")


def test_queue_never_leaves_the_scene_and_has_one_augmentation(index: Index) -> None:
    inputs = Inputs(camera=CameraInput((32, 64), CAMERAS), history=2)
    frames = FrameSource(index, index.tokens, inputs, CLASSES, augment=Augment(), seed=5)
    expected = {
        0: (["scene-0061_0"] * 2, [False, False], False),
        1: (["scene-0061_0"] * 2, [False, False], True),
        2: (["scene-0061_0", "scene-0061_1"], [False, True], True),
        3: (["scene-0103_0"] * 2, [False, False], False),
    }
    for position, (tokens, has_previous, current) in expected.items():
        frame = frames.frame(1, position)
        assert [past.sample_token for past in frame.history] == tokens
        assert [bool(past.batch.has_previous) for past in frame.history] == has_previous
        assert bool(frame.batch.has_previous) == current
        assert all(past.batch.targets is None for past in frame.history)
        assert frame.batch.targets is not None
    frame = frames.frame(1, 2)
    first, second = (past.batch for past in frame.history)
    chained = torch.linalg.inv(second.global_from_lidar[0]) @ first.global_from_lidar[0]
    torch.testing.assert_close(
        second.lidar_from_previous_lidar[0].double(), chained, atol=1e-4, rtol=0
    )
    assert first.can_bus[0, :3].tolist() == [0, 0, 0] and second.can_bus[0, 0] > 4
    for one, two in zip(frame.images, frame.history[0].images, strict=True):
        np.testing.assert_array_equal(one.network_from_original, two.network_from_original)


def test_published_queue_leaves_out_one_of_one_more(make_tree, tmp_path: Path) -> None:
    """BEVFormer's training: the frames of the queue are drawn from one more than it holds."""
    scenes = (("scene-0061", 6), ("scene-0103", 2))
    index = open_index(make_tree(scenes=scenes), VERSION, tmp_path / "cache")
    inputs = Inputs(camera=CameraInput((32, 64), CAMERAS), history=2)

    def open_frames(**kwargs) -> FrameSource:
        return FrameSource(index, index.tokens, inputs, CLASSES, augment=Augment(**kwargs), seed=5)

    frames = open_frames(history_drop=True)
    seen = set()
    for epoch in range(40):
        frame = frames.frame(epoch, 5)
        numbers = [int(past.sample_token[-1]) for past in frame.history]
        seen.add(tuple(numbers))
        assert [bool(past.batch.has_previous) for past in frame.history] == [False, True]
        first, second = (past.batch for past in frame.history)
        for batch, before in ((frame.batch, second), (second, first)):
            chained = torch.linalg.inv(batch.global_from_lidar) @ before.global_from_lidar
            found = batch.lidar_from_previous_lidar.double()
            torch.testing.assert_close(found, chained, atol=1e-3, rtol=0)
            driven = (batch.global_from_ego - before.global_from_ego)[0, :2, 3]
            torch.testing.assert_close(batch.can_bus[0, :2].double(), driven, atol=1e-3, rtol=0)
    assert seen == {(2, 3), (2, 4), (3, 4)}
    # No other random number changes, and the same position gives the same queue.
    other, again = open_frames().frame(7, 5), open_frames(history_drop=True).frame(7, 5)
    frame = frames.frame(7, 5)
    assert [f.sample_token for f in again.history] == [f.sample_token for f in frame.history]
    assert torch.equal(other.image_from_lidar, frame.image_from_lidar)
    assert torch.equal(other.batch.targets.centre, frame.batch.targets.centre)
    # At the second frame of a scene the one before it may be the one left out.
    second = [frames.frame(epoch, 7) for epoch in range(40)]
    assert {f.sample_token[:-2] for frame in second for f in frame.history} == {"scene-0103"}
    assert {bool(frame.batch.has_previous) for frame in second} == {True, False}
    for frame in second:
        alone = frame.history[-1].sample_token == "scene-0103_1"
        assert bool(frame.batch.has_previous) != alone
        if alone:
            assert frame.batch.can_bus[0, [0, 1, 2, 17]].tolist() == [0, 0, 0, 0]


def test_scene_sizes(index: Index) -> None:
    frames = FrameSource(index, index.tokens, EVERYTHING, CLASSES)
    assert frames.scene_sizes() == (3, 2)
    assert frames.with_tokens(index.tokens[1:4]).scene_sizes() == (2, 1)


real = pytest.mark.skipif(
    "BEV_NUSCENES_DIR" not in os.environ, reason="BEV_NUSCENES_DIR is not set"
)


@real
def test_real_boxes_hold_their_published_number_of_points(tmp_path: Path) -> None:
    index = open_index(os.environ["BEV_NUSCENES_DIR"], VERSION, tmp_path / "cache")
    frames = source(index, Inputs(lidar=LidarInput(RANGE, sweeps=0)), split="real_lidar")
    right = []
    for position in range(2):
        frame = frames.frame(0, position)
        boxes = index.sample(frame.sample_token).annotations
        points = read_lidar_file(frame.lidar[0].path)[:, :3].astype(np.float64)
        points = apply_transform(frame.batch.global_from_lidar[0], torch.from_numpy(points)).numpy()
        right.append(0)
        for row, expected in enumerate(boxes.num_lidar_pts):
            rotation = pose_to_transform(np.concatenate([boxes.centre[row], boxes.rotation[row]]))[
                :3, :3
            ]
            local = np.abs((points - boxes.centre[row]) @ rotation)
            right[-1] += int((2 * local <= boxes.size[row]).all(axis=1).sum() == expected)
    assert right == [68, 37]


@real
def test_real_boxes_stand_in_the_images_their_devkit_puts_them_in(tmp_path: Path) -> None:
    from nuscenes.nuscenes import NuScenes
    from nuscenes.utils.geometry_utils import view_points

    devkit = NuScenes(VERSION, os.environ["BEV_NUSCENES_DIR"], verbose=False)
    index = open_index(os.environ["BEV_NUSCENES_DIR"], VERSION, tmp_path / "cache")
    frames = source(
        index,
        Inputs(camera=CameraInput((256, 704))),
        split="real_full_ann",
        min_points=0,
        target_range=WIDE,
    )
    worst = 0.0
    for position, token in enumerate(frames.tokens):
        frame = frames.frame(0, position)
        known = [i for i, name in enumerate(index.sample(token).annotations.class_name) if name]
        pixels, depth = project(
            frame.image_from_lidar[0].double(), frame.batch.targets.centre[0].double()
        )
        for camera, channel in enumerate(CameraInput((256, 704)).channels):
            boxes = devkit.get_sample_data(devkit.get("sample", token)["data"][channel])
            centres = np.array(
                [devkit.get_box(t).center for t in index.sample(token).annotations.token]
            )[known]
            _, _, intrinsic = boxes
            record = devkit.get("sample_data", devkit.get("sample", token)["data"][channel])
            pose = devkit.get("ego_pose", record["ego_pose_token"])
            calibration = devkit.get("calibrated_sensor", record["calibrated_sensor_token"])
            for part in (pose, calibration):
                matrix = pose_to_transform(np.array(part["translation"] + part["rotation"]))
                centres = (centres - matrix[:3, 3]) @ matrix[:3, :3]
            seen = centres[:, 2] > 2
            expected = view_points(centres.T, np.array(intrinsic), normalize=True)[:2].T
            expected = (expected + 0.5) * 0.44 - 0.5 - (0, 140)
            worst = max(worst, np.abs(expected[seen] - pixels[camera].numpy()[seen]).max(initial=0))
            np.testing.assert_allclose(depth[camera].numpy()[seen], centres[seen, 2], atol=2e-3)
    assert worst < 0.1
