"""What happens in a scene: no overlaps, motion fits attributes, classes are spread out."""

import numpy as np
import pytest
from numpy.typing import NDArray

from bev_lightning.data.synthetic.placement import build_scene, tracks_overlap
from bev_lightning.data.synthetic.rig import (
    CAMERAS,
    LIDAR,
    build_rig,
    quaternion_from_rotation,
    rotation_from_euler,
)
from bev_lightning.data.synthetic.scene import LEAD_IN_S, Scene
from bev_lightning.data.synthetic.shapes import KINDS

NUM_FRAMES = 20


@pytest.fixture(scope="module")
def scenes() -> list[Scene]:
    return [build_scene(np.random.default_rng([0, seed]), NUM_FRAMES, 64) for seed in range(4)]


def corners(pose: NDArray[np.float64], size: NDArray[np.float64]) -> NDArray[np.float64]:
    """``(4, 2)`` of a rectangle."""
    unit = np.array([[0.5, 0.5], [0.5, -0.5], [-0.5, -0.5], [-0.5, 0.5]]) * size[:2]
    c, s = np.cos(pose[2]), np.sin(pose[2])
    return np.asarray(unit @ np.array([[c, s], [-s, c]]) + pose[:2])


def touch(a: NDArray[np.float64], b: NDArray[np.float64]) -> bool:
    """Separating axes of two convex polygons, written without shortcuts."""
    for polygon in (a, b):
        for i in range(4):
            edge = polygon[(i + 1) % 4] - polygon[i]
            normal = np.array([-edge[1], edge[0]])
            if (a @ normal).max() < (b @ normal).min() or (b @ normal).max() < (a @ normal).min():
                return False
    return True


def test_overlaps_agrees_with_a_plain_separating_axis_test() -> None:
    rng = np.random.default_rng(0)
    found = 0
    for _ in range(300):
        poses = rng.uniform([-3, -3, -3.2], [3, 3, 3.2], (2, 3))
        sizes = rng.uniform(0.5, 4, (2, 2))
        expected = touch(corners(poses[0], sizes[0]), corners(poses[1], sizes[1]))
        halves = sizes / 2
        got = tracks_overlap(poses[:1], halves[0], poses[None, 1:], halves[1:], 1, 0.0)
        assert got == expected
        found += expected
    assert 60 < found < 240


def test_nothing_ever_overlaps_another_object_or_the_ego(scenes: list[Scene]) -> None:
    ego_size = np.array([4.6, 1.8])
    for scene in scenes[:1]:
        for time in np.arange(0.0, 9.6, 0.32):  # not the times of the table
            poses = scene.object_poses(time)
            polygons = [corners(p, s) for p, s in zip(poses, scene.sizes, strict=True)]
            ego = scene.ego_pose(time)
            yaw = np.arctan2(ego[1, 0], ego[0, 0])
            middle = ego[:2, 3] + 1.25 * ego[:2, 0]
            polygons.append(corners(np.array([*middle, yaw]), ego_size))
            radii = [np.hypot(*(p - p.mean(axis=0)).T).max() for p in polygons]
            for i in range(len(polygons)):
                for j in range(i):
                    apart = np.hypot(*(polygons[i].mean(axis=0) - polygons[j].mean(axis=0)))
                    if apart < radii[i] + radii[j]:
                        assert not touch(polygons[i], polygons[j]), (time, i, j)


def test_all_classes_stand_and_move_with_fitting_attributes(scenes: list[Scene]) -> None:
    still_names = {
        "vehicle.parked",
        "vehicle.stopped",
        "cycle.without_rider",
        "pedestrian.standing",
        "",
    }
    seen: dict[str, set[bool]] = {kind.name: set() for kind in KINDS}
    for scene in scenes:
        motion = scene.object_motion(3.0)
        for n, kind in enumerate(scene.kinds):
            if not kind.name:
                assert scene.categories[n] == ""
                continue
            moving = bool(np.hypot(*motion[n, :2]) > 0.3)
            assert moving == (scene.attributes[n] not in still_names), scene.attributes[n]
            assert scene.categories[n] in kind.categories
            seen[kind.name].add(moving)
    fixed = {"barrier", "traffic_cone"}
    assert {name: seen[name] for name in fixed} == {name: {False} for name in fixed}
    assert all(states == {True, False} for name, states in seen.items() if name not in fixed)
    turning = [np.abs(scene.object_motion(3.0)[:, 2]).max() for scene in scenes]
    assert max(turning) > 0.1


def test_motion_is_the_derivative_of_poses_and_headings_follow_it(scenes: list[Scene]) -> None:
    for scene in scenes:
        time, step = 4.0, 0.05
        moved = scene.object_poses(time + step) - scene.object_poses(time - step)
        motion = scene.object_motion(time)
        np.testing.assert_allclose(motion, moved / (2 * step), atol=1e-9)
        speed = np.hypot(motion[:, 0], motion[:, 1])
        fast = speed > 0.5
        yaw = scene.object_poses(time)[fast, 2]
        along = (motion[fast, 0] * np.cos(yaw) + motion[fast, 1] * np.sin(yaw)) / speed[fast]
        assert along.min() > 0.99
        assert speed.max() < 16


def test_ego_drives_along_its_road(scenes: list[Scene]) -> None:
    for scene in scenes:
        assert scene.times[0] == -LEAD_IN_S
        pose, motion = scene.ego_pose(2.0), scene.ego_motion(2.0)
        yaw = np.arctan2(pose[1, 0], pose[0, 0])
        speed = np.hypot(*motion[:2])
        assert 1.0 < speed < 14.0
        assert motion[:2] @ [np.cos(yaw), np.sin(yaw)] > 0.999 * speed
        assert scene.road.clearance(pose[:2, 3]) < 1.0
        np.testing.assert_allclose(pose[:3, :3] @ pose[:3, :3].T, np.eye(3), atol=1e-12)
        assert 0 < np.abs(pose[2, 0]) < 0.01  # the body sways a little


def test_objects_are_spread_out_to_the_range_of_their_class(scenes: list[Scene]) -> None:
    shares: dict[str, list[float]] = {kind.name: [] for kind in KINDS}
    for scene in scenes:
        for time in np.arange(0, 9.6, 1.0):
            away = np.hypot(*(scene.object_poses(time)[:, :2] - scene.ego_pose(time)[:2, 3]).T)
            for kind, distance in zip(scene.kinds, away, strict=True):
                if kind.name and distance < kind.reach_m:
                    shares[kind.name].append(float(distance / kind.reach_m))
    for name, share in shares.items():
        counts = np.histogram(share, bins=[0, 0.4, 0.7, 1.0])[0]
        assert counts.min() > 0.06 * len(share), (name, counts)
        assert len(share) > 30, name


def test_rig_looks_where_nuscenes_looks() -> None:
    rig = build_rig("s001", (225, 400), seed=0)
    assert list(rig)[:6] == list(CAMERAS["nuscenes"])
    expected = {"CAM_FRONT": 0, "CAM_FRONT_LEFT": 55, "CAM_BACK": 180, "CAM_BACK_RIGHT": -110}
    for channel, degrees in expected.items():
        axis = rig[channel].ego_from_sensor[:3, 2]  # the optical axis
        turn = np.rad2deg(np.arctan2(axis[1], axis[0])) - degrees
        assert abs((turn + 180) % 360 - 180) < 2
        assert rig[channel].ego_from_sensor[2, 1] < -0.99  # y points down
        intrinsic = rig[channel].intrinsic
        assert intrinsic is not None
        assert intrinsic[0, 0] == pytest.approx(315 if channel != "CAM_BACK" else 201, rel=0.03)
    lidar = rig[LIDAR].ego_from_sensor
    np.testing.assert_allclose(lidar[:3, 1], [1, 0, 0], atol=0.03)  # y ahead
    np.testing.assert_allclose(lidar[:3, 0], [0, -1, 0], atol=0.03)  # x right


def test_quaternions_give_their_rotation_back() -> None:
    rng = np.random.default_rng(0)
    rotations = [rotation_from_euler(*rng.uniform(-3.2, 3.2, 3)) for _ in range(50)]
    for rotation in [*rotations, np.eye(3), rotation_from_euler(0, 0, np.pi)]:
        w, *v = quaternion_from_rotation(rotation)
        vector = np.array(v)
        cross = np.array([[0, -v[2], v[1]], [v[2], 0, -v[0]], [-v[1], v[0], 0]])
        rebuilt = (w * w - vector @ vector) * np.eye(3) + 2 * np.outer(vector, vector)
        np.testing.assert_allclose(rebuilt + 2 * w * cross, rotation, atol=1e-12)
        assert w >= 0
