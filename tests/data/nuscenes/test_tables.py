"""The tables: equal to the devkit's reading; each kind of broken table is reported."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bev_lightning.benchmarks.random_tables import write_tables
from bev_lightning.data.nuscenes import build_index
from bev_lightning.data.nuscenes.can_bus import derive_motion
from bev_lightning.data.nuscenes.index import Index, open_index
from bev_lightning.data.nuscenes.sample import pose_to_transform
from bev_lightning.data.nuscenes.schema import MAX_SWEEPS
from bev_lightning.errors import InputError

VERSION = "v1.0-mini"


def open_tree(root: Path, version: str = VERSION) -> Index:
    return open_index(root, version, root.parent / "cache")


def read(root: Path) -> list:
    index = open_tree(root)
    return [index.sample(token) for token in index.tokens]


def assert_equals_devkit(index: Index, devkit: Any) -> int:
    """Every reading, pose, calibration, box and velocity; returns how many boxes there were."""
    from nuscenes.eval.detection.utils import category_to_detection_name

    num_boxes = 0
    assert set(index.tokens) == {record["token"] for record in devkit.sample}
    for token in index.tokens:
        sample, record = index.sample(token), devkit.get("sample", token)
        assert (sample.timestamp, sample.previous, sample.next, sample.scene_token) == tuple(
            record[name] for name in ("timestamp", "prev", "next", "scene_token")
        )
        readings, row = sample.readings, 0
        for channel in sorted(record["data"]):
            reading = devkit.get("sample_data", record["data"][channel])
            for depth in range(1 if channel.startswith("CAM") else MAX_SWEEPS + 1):
                if depth:
                    if not reading["prev"]:
                        break
                    reading = devkit.get("sample_data", reading["prev"])
                assert (readings.channel[row], readings.sweep[row]) == (channel, depth)
                assert readings.token[row] == reading["token"]
                assert str(index.root / readings.path[row]) == devkit.get_sample_data_path(
                    reading["token"]
                )
                assert readings.timestamp[row] == reading["timestamp"]
                assert readings.size[row].tolist() == [reading["height"], reading["width"]]
                pose = devkit.get("ego_pose", reading["ego_pose_token"])
                mounted = devkit.get("calibrated_sensor", reading["calibrated_sensor_token"])
                for ours, theirs in (
                    (readings.global_from_ego[row], pose),
                    (readings.ego_from_sensor[row], mounted),
                ):
                    assert ours.tolist() == [*theirs["translation"], *theirs["rotation"]]
                intrinsic = mounted["camera_intrinsic"] or np.zeros((3, 3))
                np.testing.assert_array_equal(readings.intrinsic[row], intrinsic)
                row += 1
            assert_boxes_in_the_sensor_are_the_devkits(sample, channel, devkit)
        assert row == len(readings.token)
        boxes = sample.annotations
        assert boxes.token == tuple(record["anns"])
        for box, annotation in enumerate(record["anns"]):
            theirs, fields = devkit.get_box(annotation), devkit.get("sample_annotation", annotation)
            np.testing.assert_array_equal(boxes.centre[box], theirs.center)
            np.testing.assert_array_equal(boxes.size[box], theirs.wlh[[1, 0, 2]])
            np.testing.assert_array_equal(boxes.rotation[box], fields["rotation"])
            np.testing.assert_array_equal(boxes.velocity[box], devkit.box_velocity(annotation))
            assert (boxes.category[box], boxes.instance[box]) == (
                theirs.name,
                fields["instance_token"],
            )
            attributes = [devkit.get("attribute", t)["name"] for t in fields["attribute_tokens"]]
            assert boxes.attribute[box] == (attributes or [""])[0]
            name = category_to_detection_name(theirs.name) or ""
            assert boxes.class_name[box] == name
            for name in ("num_lidar_pts", "num_radar_pts"):
                assert getattr(boxes, name)[box] == fields[name]
            assert str(boxes.visibility[box]) == fields["visibility_token"]
        num_boxes += len(boxes.token)
    return num_boxes


def assert_boxes_in_the_sensor_are_the_devkits(sample, channel: str, devkit: Any) -> None:
    """The boxes of ``get_sample_data`` equal ours, transformed into the sensor frame."""
    row = sample.readings.find(channel)[0]
    if channel.startswith("CAM"):
        return  # the devkit leaves out what the camera does not see
    _, boxes, _ = devkit.get_sample_data(sample.readings.token[row])
    global_from_sensor = pose_to_transform(
        sample.readings.global_from_ego[row]
    ) @ pose_to_transform(sample.readings.ego_from_sensor[row])
    inverse = np.linalg.inv(global_from_sensor)
    centres = sample.annotations.centre @ inverse[:3, :3].T + inverse[:3, 3]
    theirs = np.reshape([box.center for box in boxes], (-1, 3))
    np.testing.assert_allclose(centres, theirs, atol=1e-8)


@pytest.mark.devkit
def test_a_small_tree_equals_the_devkit(make_tree, open_devkit) -> None:
    root = make_tree(can_bus=["scene-0061"])
    assert assert_equals_devkit(open_tree(root), open_devkit(root)) == 20


@pytest.mark.devkit
def test_tables_in_many_pieces_equal_the_devkit(tmp_path, open_devkit, monkeypatch) -> None:
    monkeypatch.setattr(build_index, "_CHUNK_BYTES", 50_000)
    monkeypatch.setattr(build_index, "_SCENES_PER_PART", 2)
    root = tmp_path / "tree"
    counts = write_tables(root, ["scene-0001", "scene-0003", "scene-0916"], 14)
    index = open_tree(root, "v1.0-trainval")
    devkit = open_devkit(root, "v1.0-trainval")
    assert assert_equals_devkit(index, devkit) == counts["sample_annotation"] > 400
    assert sum(len(index.sample(t).readings.token) for t in index.tokens) > 700


@pytest.mark.devkit
@pytest.mark.parametrize("version", ["v1.0-mini", "v1.0-trainval"])
def test_real_tables_equal_the_devkit(nuscenes_dir, tmp_path, open_devkit, version) -> None:
    index = open_index(nuscenes_dir, version, tmp_path / "cache")
    assert assert_equals_devkit(index, open_devkit(nuscenes_dir.resolve(), version)) == 168


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
    assert readings.sweep[rows].tolist() == [0, 1, 2, 3]
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
    splits = open_tree(root).splits
    assert splits["mine"] == ("scene-0103",) and "gone" not in splits
    assert splits["mini_train"] == ("scene-0061",) and splits["mini_val"] == ("scene-0103",)
    (root / VERSION / "splits.json").write_text('["scene-0103"]')
    with pytest.raises(InputError, match="splits.json must read"):
        read(root)


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


@pytest.mark.parametrize(
    ("table", "field", "value", "message"),
    [
        ("ego_pose", "translation", [1.0, 2.0], "translation = .* 3 finite numbers"),
        ("ego_pose", "translation", [math.nan, 0.0, 0.0], "3 finite numbers"),
        ("ego_pose", "rotation", [0, 0, 0, 0], "ego_pose.json has a rotation of four zeros"),
        ("sample_annotation", "size", [1.0, "wide", 1.0], "size = .* 3 finite numbers"),
        ("sample_annotation", "size", [1.0, -1.0, 1.0], "must be positive"),
        ("sample_data", "filename", "", "instead of the path of a file"),
        ("sample_data", "filename", None, "instead of the path of a file"),
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
    with pytest.raises(InputError, match="that cannot be inverted"):
        read(root)


def test_table_that_is_no_list_is_refused(make_tree) -> None:
    root = make_tree()
    (root / "v1.0-mini" / "sample_annotation.json").write_text("null")
    with pytest.raises(InputError, match=r"sample_annotation.json holds no list"):
        read(root)
