"""Sensors against geometry worked out another way."""

from dataclasses import replace

import numpy as np
import pytest

from bev_lightning.data.synthetic.camera import render_camera
from bev_lightning.data.synthetic.lidar import scan_lidar
from bev_lightning.data.synthetic.placement import build_scene
from bev_lightning.data.synthetic.radar import RETURN, pack_returns, scan_radar
from bev_lightning.data.synthetic.rays import count_inside
from bev_lightning.data.synthetic.rig import LIDAR, build_rig
from bev_lightning.data.synthetic.scene import Scene
from bev_lightning.data.synthetic.shapes import KINDS, build_parts

TIME = 1.0
SIZE = (90, 160)


@pytest.fixture(scope="module")
def scene() -> Scene:
    return build_scene(np.random.default_rng([0, 1]), 4, 60)


@pytest.fixture(scope="module")
def rig() -> dict:
    return build_rig("s001", SIZE, seed=0)


def stage(
    scene: Scene, kind_name: str, pose: tuple[float, float, float], rider: bool = True
) -> Scene:
    """The scene with one object alone, at x, y, yaw in the ego's frame at TIME."""
    kind = next(kind for kind in KINDS if kind.name == kind_name)
    size = np.array(kind.size)
    parts = build_parts(kind, size, True, np.random.default_rng(0))
    ego = scene.ego_pose(TIME)
    yaw = np.arctan2(ego[1, 0], ego[0, 0])
    xy = ego[:2, :2] @ np.array(pose[:2]) + ego[:2, 3]
    track = np.tile([*xy, pose[2] + yaw], (len(scene.times), 1, 1))
    low, high = (parts[:, :3] - parts[:, 3:6]).min(0), (parts[:, :3] + parts[:, 3:6]).max(0)
    return replace(
        scene,
        tracks=track,
        kinds=(kind,),
        sizes=size[None],
        parts=parts,
        first_part=np.array([0, len(parts)]),
        hulls=np.concatenate([(low + high) / 2, (high - low) / 2])[None],
    )


def test_lidar_points_lie_on_the_object_that_they_name(scene: Scene, rig: dict) -> None:
    pose = scene.ego_pose(TIME) @ rig[LIDAR].ego_from_sensor
    points, owner = scan_lidar(scene, pose, TIME, 32, 180, np.random.default_rng(0))
    assert points.dtype == np.float32
    assert len(points) > 2000
    assert 0 <= points[:, 3].min() <= points[:, 3].max() <= 255
    assert set(np.unique(points[:, 4])) <= set(range(32))
    elevation = np.rad2deg(np.arctan2(points[:, 2], np.hypot(points[:, 0], points[:, 1])))
    np.testing.assert_allclose(elevation, -25 + points[:, 4] * 30 / 31, atol=0.01)
    xyz = points[:, :3] @ pose[:3, :3].T + pose[:3, 3]
    ground = owner == -1
    assert np.abs(xyz[ground, 2]).max() < 0.15
    poses = scene.object_poses(TIME)
    for n in np.unique(owner[owner >= 0]):
        own = xyz[owner == n]
        c, s = np.cos(poses[n, 2]), np.sin(poses[n, 2])
        local = own - [*poses[n, :2], 0]
        local[:, :2] = local[:, :2] @ np.array([[c, -s], [s, c]])
        parts = scene.parts[scene.first_part[n] : scene.first_part[n + 1]]
        gap = np.abs(local[:, None] - parts[None, :, :3]) - parts[None, :, 3:6]
        # Signed distance to a box: within the range noise of some part's surface.
        outside = np.linalg.norm(np.maximum(gap, 0), axis=-1)
        distance = np.abs(outside + np.minimum(gap.max(axis=-1), 0)).min(axis=1)
        assert distance.max() < 0.12, n


def test_nothing_is_seen_through_something_nearer(scene: Scene, rig: dict) -> None:
    alone = stage(scene, "bus", (12.0, 0.0, 0.0))
    pose = scene.ego_pose(TIME) @ rig[LIDAR].ego_from_sensor
    points, owner = scan_lidar(alone, pose, TIME, 32, 720, np.random.default_rng(0))
    ahead = (np.abs(points[:, 0]) < 0.8) & (points[:, 1] > 0)
    # The bus begins 5.5 m before its centre; the lidar sits 0.96 m ahead of the ego's origin.
    near_face = 12.0 - 5.5 - 0.96
    on_bus = points[ahead & (owner == 0)]
    assert len(on_bus) > 50
    assert abs(np.median(on_bus[:, 1]) - near_face) < 0.15
    # Below its bumper the ground is seen for a little further, behind it not at all.
    assert points[ahead & (owner == -1), 1].max() < near_face + 1.0


@pytest.mark.parametrize(
    "name", ["car", "truck", "bus", "trailer", "construction_vehicle", "motorcycle", "bicycle"]
)
def test_front_and_back_differ_in_picture_and_echo(scene: Scene, rig: dict, name: str) -> None:
    echoes, colours = [], []
    for yaw in (np.pi, 0.0):  # facing the ego, then facing away
        alone = stage(scene, name, (11.0, 0.0, yaw))
        pose = scene.ego_pose(TIME)
        points, owner = scan_lidar(
            alone, pose @ rig[LIDAR].ego_from_sensor, TIME, 64, 720, np.random.default_rng(0)
        )
        echoes.append(float(points[owner == 0, 3].mean()))
        front = rig["CAM_FRONT"]
        image, pixels, totals = render_camera(alone, pose @ front.ego_from_sensor, front, TIME)
        assert (pixels == 0).sum() == totals[0] > 30
        colours.append(image[pixels == 0].mean(axis=0))
    assert echoes[1] > 1.25 * echoes[0]
    assert np.abs(colours[0] - colours[1]).max() > 20


def test_a_picture_shows_each_object_where_the_matrices_put_it(scene: Scene, rig: dict) -> None:
    checked = 0
    for name, xy in (
        ("car", (14.0, 1.5)),
        ("traffic_cone", (7.0, -1.0)),
        ("pedestrian", (9.0, 2.0)),
    ):
        alone = stage(scene, name, (*xy, 0.6))
        front = rig["CAM_FRONT"]
        pose = scene.ego_pose(TIME) @ front.ego_from_sensor
        _, pixels, _ = render_camera(alone, pose, front, TIME)
        rows, columns = np.nonzero(pixels == 0)
        object_pose, size = alone.object_poses(TIME)[0], alone.sizes[0]
        signs = np.array([[x, y, z] for x in (-1, 1) for y in (-1, 1) for z in (0, 2)]) / 2
        local = signs * size
        c, s = np.cos(object_pose[2]), np.sin(object_pose[2])
        world = local @ np.array([[c, s, 0], [-s, c, 0], [0, 0, 1]]) + [*object_pose[:2], 0]
        camera = (world - pose[:3, 3]) @ pose[:3, :3]
        image = camera @ front.intrinsic.T
        u, v = image[:, 0] / image[:, 2], image[:, 1] / image[:, 2]
        assert u.min() - 0.5 <= columns.min() <= columns.max() <= u.max() + 0.5
        assert v.min() - 0.5 <= rows.min() <= rows.max() <= v.max() + 0.5
        # It fills the height of its box, but for the inset and a pixel.
        assert rows.max() - rows.min() > 0.8 * (v.max() - v.min()) - 2
        checked += 1
    assert checked == 3


def test_a_nearer_object_hides_a_farther_one(scene: Scene, rig: dict) -> None:
    car, bus = stage(scene, "car", (20.0, 0.0, 0.0)), stage(scene, "bus", (10.0, 0.0, 0.0))
    both = replace(
        car,
        tracks=np.concatenate([car.tracks, bus.tracks], axis=1),
        kinds=car.kinds + bus.kinds,
        sizes=np.concatenate([car.sizes, bus.sizes]),
        parts=np.concatenate([car.parts, bus.parts]),
        first_part=np.concatenate([car.first_part, len(car.parts) + bus.first_part[1:]]),
        hulls=np.concatenate([car.hulls, bus.hulls]),
    )
    front = rig["CAM_FRONT"]
    pose = scene.ego_pose(TIME) @ front.ego_from_sensor
    _, pixels, totals = render_camera(both, pose, front, TIME)
    assert totals[0] > 50
    assert (pixels == 0).sum() < 0.1 * totals[0]
    assert (pixels == 1).sum() == totals[1]


def test_radar_measures_the_radial_speed_over_ground(scene: Scene, rig: dict) -> None:
    alone = stage(scene, "bus", (20.0, 0.0, 0.0))
    ego = scene.ego_pose(TIME)
    velocity = ego[:2, :2] @ np.array([6.0, 0.0])
    tracks = alone.tracks + (alone.times - TIME)[:, None, None] * np.array([*velocity, 0.0])
    alone = replace(alone, tracks=tracks)
    mount = rig["RADAR_FRONT"].ego_from_sensor
    scans = [scan_radar(alone, mount, TIME, np.random.default_rng(seed)) for seed in range(8)]
    returns = np.concatenate(scans)
    # The back of the bus: 20 - 5.5 m from the ego's origin, the radar 3.41 m ahead of that.
    on_bus = returns[(np.abs(returns["x"] - 11.1) < 0.6) & (np.abs(returns["y"]) < 1.6)]
    assert len(on_bus) >= 8
    speed = np.hypot(on_bus["vx_comp"], on_bus["vy_comp"])
    assert abs(np.median(speed) - 6.0) < 0.15
    assert (on_bus["dyn_prop"] == 0).mean() > 0.7
    ego_speed = np.hypot(*scene.ego_motion(TIME)[:2])
    assert abs(np.median(on_bus["vx"]) - (6.0 - ego_speed)) < 0.15
    still = returns[returns["dyn_prop"] == 1]
    assert np.abs(still["vx_comp"]).max() < 0.5
    assert np.median(still["vx"]) < -0.3 * ego_speed


def test_a_radar_file_without_returns_holds_one_nan_record() -> None:
    header, body = pack_returns(np.zeros(0, RETURN)).split(b"DATA binary\n")
    assert b"WIDTH 1\n" in header
    assert b"FIELDS x y z dyn_prop id rcs vx vy vx_comp vy_comp is_quality_valid" in header
    assert len(body) == 43 + 1
    assert np.isnan(np.frombuffer(body, RETURN, 1)["x"][0])


def test_count_inside_counts_what_a_plain_test_counts() -> None:
    rng = np.random.default_rng(1)
    points = rng.uniform([-5, -5, -1], [5, 5, 3], (500, 3))
    poses, sizes = rng.uniform(-3, 3, (6, 3)), rng.uniform(1, 5, (6, 3))
    expected = []
    for pose, size in zip(poses, sizes, strict=True):
        c, s = np.cos(pose[2]), np.sin(pose[2])
        local = (points[:, :2] - pose[:2]) @ np.array([[c, -s], [s, c]])
        inside = (np.abs(local) <= size[:2] / 2).all(axis=1)
        expected.append(int((inside & (points[:, 2] >= 0) & (points[:, 2] <= size[2])).sum()))
    assert count_inside(points, poses, sizes).tolist() == expected
    assert max(expected) > 20
