"""The tables through the devkit: same answers, and a sentence for each kind of breakage."""

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest

from bev_lightning.data.sample import pose_to_transform
from bev_lightning.data.tables import Tables, derive_motion, read_samples, read_splits
from bev_lightning.errors import InputError

VERSION = "v1.0-mini"


def read(root: Path) -> list:
    return list(read_samples(Tables(root, VERSION), root / "can_bus"))


def edit(root: Path, name: str, change) -> None:
    path = root / VERSION / f"{name}.json"
    records = json.loads(path.read_text())
    change(records)
    path.write_text(json.dumps(records))


def test_samples_go_scene_by_scene_forward_in_time(make_tree) -> None:
    samples = read(make_tree())
    assert [s.token for s in samples] == [
        "scene-0061_0",
        "scene-0061_1",
        "scene-0061_2",
        "scene-0103_0",
        "scene-0103_1",
    ]
    assert [s.previous for s in samples] == ["", "scene-0061_0", "scene-0061_1", "", "scene-0103_0"]
    assert samples[1].timestamp - samples[0].timestamp == 500_000


def test_sweeps_go_back_to_the_scenes_start(make_tree) -> None:
    readings = read(make_tree())[1].readings
    rows = readings.find("LIDAR_TOP")
    assert readings.depth[rows].tolist() == [0, 1, 2, 3]
    assert [readings.path[r].split("/")[0] for r in rows] == [
        "samples",
        "sweeps",
        "sweeps",
        "samples",
    ]
    ages = (readings.timestamp[rows[0]] - readings.timestamp[rows]) * 1e-6
    np.testing.assert_allclose(ages, [0, 0.05, 0.1, 0.5])
    assert readings.find("CAM_FRONT") and len(readings.find("CAM_FRONT")) == 1
    assert readings.size[readings.find("CAM_FRONT")[0]].tolist() == [90, 160]


def test_boxes_are_the_devkits(make_tree) -> None:
    root = make_tree()
    tables = Tables(root, VERSION)
    for sample in read_samples(tables, root / "can_bus"):
        boxes = sample.annotations
        assert boxes.detection == ("car", "pedestrian", "barrier", "")
        assert boxes.attribute[0] == "vehicle.moving" and boxes.attribute[1] == ""
        for row, token in enumerate(boxes.token):
            theirs = tables.get_box(token)
            np.testing.assert_array_equal(boxes.centre[row], theirs.center)
            np.testing.assert_array_equal(boxes.size[row], theirs.wlh[[1, 0, 2]])
            np.testing.assert_array_equal(boxes.velocity[row], tables.box_velocity(token))
    np.testing.assert_allclose(np.linalg.norm(boxes.velocity[0]), 10.0, rtol=1e-6)


def test_single_annotation_and_long_gap_have_no_velocity(make_tree) -> None:
    root = make_tree(scenes=(("scene-0061", 1), ("scene-0103", 2)))

    def later(records: list) -> None:
        records[2]["timestamp"] += 1_500_000  # now 2 s after the one before

    edit(root, "sample", later)
    samples = read(root)
    assert np.isnan(samples[0].annotations.velocity).all()
    assert np.isnan(samples[1].annotations.velocity).all()


def test_can_bus_has_the_published_layout(make_tree) -> None:
    samples = read(make_tree(can_bus=["scene-0061"]))
    measured, derived = samples[1], samples[4]
    assert measured.from_can_bus and not derived.from_can_bus
    pose = measured.readings.global_from_ego[measured.readings.find("LIDAR_TOP")[0]]
    np.testing.assert_array_equal(measured.can_bus[:3], pose[:3])
    np.testing.assert_array_equal(measured.can_bus[3:7], [pose[3]] * 4)
    # The first message after the key frame at 0.5 s: number 26 at 0.51 s.
    np.testing.assert_allclose(measured.can_bus[7:16], [0.1, 0.2, 9.8, 0, 0, 0.26, 10, 0, 0])
    np.testing.assert_allclose(measured.can_bus[16:], [0.3, np.degrees(0.3)])
    np.testing.assert_allclose(derived.can_bus[13:16], [10, 0, 0], atol=1e-6)
    np.testing.assert_allclose(derived.can_bus[7:10], [0, 0, 9.81], atol=1e-6)


def test_derived_motion_of_a_circle() -> None:
    times = np.arange(9) * 0.1
    angle = 0.5 * times  # 0.5 rad/s at radius 20 m: 10 m/s, 5 m/s^2 to the left
    poses = np.zeros((9, 7))
    poses[:, 0], poses[:, 1] = 20 * np.sin(angle), 20 * (1 - np.cos(angle))
    poses[:, 3], poses[:, 6] = np.cos(angle / 2), np.sin(angle / 2)
    motion = derive_motion(poses, times)[4]
    np.testing.assert_allclose(motion, [0, 5, 9.81, 0, 0, 0.5, 10, 0, 0], atol=0.02)
    assert derive_motion(poses[:1], times[:1]).tolist() == [[0, 0, 9.81, 0, 0, 0, 0, 0, 0]]


def test_splits_are_the_official_and_the_custom_ones_with_scenes_here(make_tree) -> None:
    root = make_tree()
    (root / VERSION / "splits.json").write_text('{"mine": ["scene-0103"], "gone": ["scene-9999"]}')
    splits = read_splits(Tables(root, VERSION))
    assert splits["mine"] == ("scene-0103",) and "gone" not in splits
    assert splits["mini_train"] == ("scene-0061",) and splits["mini_val"] == ("scene-0103",)
    (root / VERSION / "splits.json").write_text('["scene-0103"]')
    with pytest.raises(InputError, match="splits.json must read"):
        read_splits(Tables(root, VERSION))


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../secret.jpg", "samples/../../x.jpg", "C:\\x.jpg"]
)
def test_paths_that_leave_the_root_are_refused(make_tree, name: str) -> None:
    root = make_tree()
    edit(root, "sample_data", lambda records: records[0].update(filename=name))
    with pytest.raises(InputError, match="lies outside data.root"):
        read(root)


def test_backslashes_become_slashes(make_tree) -> None:
    root = make_tree()
    edit(
        root,
        "sample_data",
        lambda rs: [r.update(filename=r["filename"].replace("/", "\\")) for r in rs],
    )
    assert read(root)[0].readings.path[0] == "samples/CAM_BACK/scene-0061_0_CAM_BACK_0.jpg"


def test_broken_tables_are_named(make_tree) -> None:
    root = make_tree()
    (root / VERSION / "instance.json").write_text("[{")
    with pytest.raises(InputError, match=r"instance.json \(2 bytes\) is not JSON"):
        read(root)
    (root / VERSION / "instance.json").unlink()
    with pytest.raises(InputError, match=r"instance.json is missing"):
        read(root)


def test_foreign_keys_that_lead_nowhere_are_named(make_tree) -> None:
    root = make_tree()
    edit(root, "sample_data", lambda records: records[0].update(ego_pose_token="nowhere"))
    with pytest.raises(InputError, match="'nowhere'"):
        read(root)


def test_a_rig_without_lidar_record_is_refused(make_tree) -> None:
    root = make_tree()

    def drop(records: list) -> None:
        records[:] = [r for r in records if "LIDAR" not in r["filename"]]

    edit(root, "sample_data", drop)
    with pytest.raises(InputError, match="has no LIDAR_TOP record"):
        read(root)


def test_unreadable_can_bus_is_named(make_tree) -> None:
    root = make_tree(can_bus=["scene-0061"])
    (root / "can_bus" / "scene-0061_pose.json").write_text("{}")
    assert not read(root)[0].from_can_bus  # no message at all
    (root / "can_bus" / "scene-0061_pose.json").write_text('[{"utime": 1}]')
    with pytest.raises(InputError, match="scene-0061_pose.json"):
        read(root)


@pytest.mark.skipif("BEV_NUSCENES_DIR" not in os.environ, reason="BEV_NUSCENES_DIR is not set")
def test_real_frames_equal_the_devkit() -> None:
    root = Path(os.environ["BEV_NUSCENES_DIR"]).resolve()
    tables = Tables(root, VERSION)
    for sample in read_samples(tables, root / "can_bus"):
        for channel, token in tables.get("sample", sample.token)["data"].items():
            row = sample.readings.find(channel)[0]
            path, boxes, intrinsic = tables.get_sample_data(token)
            assert root / sample.readings.path[row] == Path(path)
            if intrinsic is not None and len(intrinsic):
                np.testing.assert_array_equal(sample.readings.intrinsic[row], intrinsic)
                continue
            # The devkit's boxes in the sensor's frame, against ours taken there by our poses.
            pose, calibration = (
                sample.readings.global_from_ego[row],
                sample.readings.ego_from_sensor[row],
            )
            inverse = np.linalg.inv(pose_to_transform(pose) @ pose_to_transform(calibration))
            centres = sample.annotations.centre @ inverse[:3, :3].T + inverse[:3, 3]
            np.testing.assert_allclose(centres, [box.center for box in boxes], atol=1e-8)
        velocities = [tables.box_velocity(token) for token in sample.annotations.token]
        np.testing.assert_array_equal(sample.annotations.velocity, np.reshape(velocities, (-1, 3)))


@pytest.mark.parametrize(
    ("table", "field", "value", "message"),
    [
        ("ego_pose", "translation", [1.0, 2.0], "translation = .* 3 finite numbers"),
        ("ego_pose", "translation", [math.nan, 0.0, 0.0], "3 finite numbers"),
        ("ego_pose", "rotation", [0, 0, 0, 0], "ego_pose.json has a rotation of four zeros"),
        ("sample_annotation", "size", [1.0, "wide", 1.0], "size = .* 3 finite numbers"),
        ("sample_annotation", "size", [1.0, -1.0, 1.0], "must be positive"),
        ("sample_data", "filename", "", "where the path of a file belongs"),
        ("sample_data", "filename", None, "where the path of a file belongs"),
    ],
)
def test_records_that_hold_no_numbers_are_named(make_tree, table, field, value, message) -> None:
    root = make_tree()
    path = root / "v1.0-mini" / f"{table}.json"
    records = json.loads(path.read_text())
    for record in records:
        record[field] = value
    path.write_text(json.dumps(records))
    with pytest.raises(InputError, match=message):
        read(root)


def test_camera_matrix_that_projects_nothing_is_refused(make_tree) -> None:
    root = make_tree()
    path = root / "v1.0-mini" / "calibrated_sensor.json"
    records = json.loads(path.read_text())
    for record in records:
        if record["camera_intrinsic"]:
            record["camera_intrinsic"] = [[0.0] * 3] * 3
    path.write_text(json.dumps(records))
    with pytest.raises(InputError, match="that no image can come from"):
        read(root)


def test_table_that_is_no_list_is_refused(make_tree) -> None:
    root = make_tree()
    (root / "v1.0-mini" / "sample_annotation.json").write_text("null")
    with pytest.raises(InputError, match=r"sample_annotation.json holds no list"):
        read(root)
