"""The tree on disk, read with the official devkit."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bev_lightning.data.synthetic.camera import render_camera
from bev_lightning.data.synthetic.dataset import SyntheticSpec, generate
from bev_lightning.data.synthetic.placement import build_scene
from bev_lightning.data.synthetic.rig import Mount
from bev_lightning.data.synthetic.scene import Scene
from bev_lightning.data.synthetic.tables import official_scenes

pytestmark = pytest.mark.devkit

SPEC = SyntheticSpec(
    version="v1.0-mini",
    num_train_scenes=1,
    num_val_scenes=1,
    frames_per_scene=3,
    seed=5,
    image_size=(90, 160),
    num_azimuths=180,
    objects_per_scene=64,
)
VAL = "scene-0103"
POSES = (("ego_pose", "ego_pose_token"), ("calibrated_sensor", "calibrated_sensor_token"))


@pytest.fixture(scope="module")
def nusc(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    from nuscenes import NuScenes

    root = tmp_path_factory.mktemp("synthetic") / "mini"
    generate(root, SPEC, num_workers=1)
    return NuScenes(SPEC.version, str(root), verbose=False)


@pytest.fixture(scope="module")
def scene() -> Scene:
    """The val scene as it was when it was written."""
    rng = np.random.default_rng([SPEC.seed, 103])
    return build_scene(rng, SPEC.frames_per_scene, SPEC.objects_per_scene)


def frames(nusc) -> Iterator[dict]:  # type: ignore[no-untyped-def]
    """Samples of the val scene in order."""
    token = next(s for s in nusc.scene if s["name"] == VAL)["first_sample_token"]
    while token:
        sample = nusc.get("sample", token)
        yield sample
        token = sample["next"]


def object_of(scene: Scene, annotation: dict, time_s: float) -> int:
    """Index of the object that an annotation describes."""
    away = np.hypot(*(scene.object_poses(time_s)[:, :2] - annotation["translation"][:2]).T)
    assert away.min() < 1e-6
    return int(away.argmin())


def test_names_are_those_of_the_official_splits() -> None:
    from nuscenes.utils import splits

    train, val = official_scenes("v1.0-trainval")
    assert list(train) == splits.train
    assert list(val) == splits.val
    assert official_scenes("v1.0-mini") == (tuple(splits.mini_train), tuple(splits.mini_val))


def test_every_foreign_key_is_valid_and_fields_are_the_official_ones(nusc) -> None:  # type: ignore[no-untyped-def]
    root = Path(nusc.dataroot)
    tables = {p.stem: json.loads(p.read_text()) for p in (root / SPEC.version).glob("*.json")}
    assert len(tables) == 13
    rows = {name: {row["token"]: row for row in table} for name, table in tables.items()}
    assert all(len(rows[name]) == len(table) for name, table in tables.items())
    keys = {
        "calibrated_sensor": {"sensor_token": "sensor"},
        "instance": {
            "category_token": "category",
            "first_annotation_token": "sample_annotation",
            "last_annotation_token": "sample_annotation",
        },
        "sample": {"scene_token": "scene", "prev": "sample", "next": "sample"},
        "sample_annotation": {
            "sample_token": "sample",
            "instance_token": "instance",
            "visibility_token": "visibility",
            "prev": "sample_annotation",
            "next": "sample_annotation",
        },
        "sample_data": {
            "sample_token": "sample",
            "ego_pose_token": "ego_pose",
            "calibrated_sensor_token": "calibrated_sensor",
            "prev": "sample_data",
            "next": "sample_data",
        },
        "scene": {
            "log_token": "log",
            "first_sample_token": "sample",
            "last_sample_token": "sample",
        },
    }
    for name, columns in keys.items():
        for row in tables[name]:
            for column, target in columns.items():
                value = row[column]
                assert value in rows[target] or (value == "" and column in ("prev", "next"))
    for row in tables["sample_annotation"]:
        assert all(token in rows["attribute"] for token in row["attribute_tokens"])
    assert set(tables["map"][0]["log_tokens"]) == set(rows["log"])
    for instance in tables["instance"]:
        chain = [rows["sample_annotation"][instance["first_annotation_token"]]]
        while chain[-1]["next"]:
            chain.append(rows["sample_annotation"][chain[-1]["next"]])
        assert len(chain) == instance["nbr_annotations"]
        assert chain[-1]["token"] == instance["last_annotation_token"]
        assert {row["instance_token"] for row in chain} == {instance["token"]}
    assert set(tables["sample_data"][0]) == {
        "token", "sample_token", "ego_pose_token", "calibrated_sensor_token", "timestamp",
        "fileformat", "is_key_frame", "height", "width", "filename", "prev", "next",
    }  # fmt: skip
    assert set(tables["sample_annotation"][0]) == {
        "token", "sample_token", "instance_token", "visibility_token", "attribute_tokens",
        "translation", "size", "rotation", "prev", "next", "num_lidar_pts", "num_radar_pts",
    }  # fmt: skip


def test_files_exist_as_in_the_tables_and_sweeps_precede_key_frames(nusc) -> None:  # type: ignore[no-untyped-def]
    assert all((Path(nusc.dataroot) / row["filename"]).is_file() for row in nusc.sample_data)
    sample = next(frames(nusc))
    assert len(sample["data"]) == 12
    row = nusc.get("sample_data", sample["data"]["LIDAR_TOP"])
    assert row["timestamp"] == sample["timestamp"]
    ages = []
    while row["prev"]:
        row = nusc.get("sample_data", row["prev"])
        assert not row["is_key_frame"]
        assert row["filename"].startswith("sweeps/LIDAR_TOP/")
        assert nusc.get("ego_pose", row["ego_pose_token"])["timestamp"] == row["timestamp"]
        ages.append((sample["timestamp"] - row["timestamp"]) * 1e-6)
    # Even the first key frame has its sweeps.
    np.testing.assert_allclose(ages, [1 / 6, 1 / 3], atol=1e-5)


def test_boxes_hold_exactly_the_points_that_they_claim(nusc) -> None:  # type: ignore[no-untyped-def]
    from nuscenes.utils.data_classes import LidarPointCloud, RadarPointCloud
    from nuscenes.utils.geometry_utils import points_in_box, transform_matrix
    from pyquaternion import Quaternion

    with_lidar = with_radar = 0
    for sample in frames(nusc):
        radar = []
        for channel, token in sample["data"].items():
            if "RADAR" not in channel:
                continue
            row = nusc.get("sample_data", token)
            path = str(Path(nusc.dataroot) / row["filename"])
            cloud = RadarPointCloud.from_file(
                path, list(range(18)), list(range(18)), list(range(18))
            )
            assert cloud.points.shape[0] == 18
            for table, key in (
                ("calibrated_sensor", "calibrated_sensor_token"),
                ("ego_pose", "ego_pose_token"),
            ):
                pose = nusc.get(table, row[key])
                cloud.transform(transform_matrix(pose["translation"], Quaternion(pose["rotation"])))
            radar.append(cloud.points[:3])
        radar_points = np.concatenate(radar, axis=1)
        path, boxes, _ = nusc.get_sample_data(sample["data"]["LIDAR_TOP"])
        points = LidarPointCloud.from_file(path).points[:3]
        for box in boxes:
            row = nusc.get("sample_annotation", box.token)
            assert points_in_box(box, points).sum() == row["num_lidar_pts"]
            upright = nusc.get_box(box.token)
            assert points_in_box(upright, radar_points).sum() == row["num_radar_pts"]
            with_lidar += row["num_lidar_pts"] > 0
            with_radar += row["num_radar_pts"] > 0
    assert with_lidar > 60
    assert with_radar > 20


def test_velocities_are_the_true_ones(nusc, scene: Scene) -> None:  # type: ignore[no-untyped-def]
    sample = list(frames(nusc))[1]  # the middle one: the devkit takes a central difference
    time_s = 0.5
    speeds = []
    for token in sample["anns"]:
        row = nusc.get("sample_annotation", token)
        if not row["prev"] or not row["next"]:
            continue
        n = object_of(scene, row, time_s)
        expected = scene.object_motion(time_s)[n, :2]
        speed = float(np.hypot(*expected))
        got = nusc.box_velocity(token)[:2]
        np.testing.assert_allclose(got, expected, atol=0.05 + 0.03 * speed)
        attributes = [nusc.get("attribute", key)["name"] for key in row["attribute_tokens"]]
        assert attributes == ([scene.attributes[n]] if scene.attributes[n] else [])
        speeds.append(speed)
    assert len(speeds) > 30
    assert max(speeds) > 3


def test_boxes_project_onto_the_pixels_of_their_objects(nusc, scene: Scene) -> None:  # type: ignore[no-untyped-def]
    from nuscenes.utils.geometry_utils import BoxVisibility, transform_matrix, view_points
    from pyquaternion import Quaternion

    sample = list(frames(nusc))[1]
    checked, orange = 0, []
    for channel in ("CAM_FRONT", "CAM_FRONT_LEFT", "CAM_BACK", "CAM_BACK_RIGHT"):
        row = nusc.get("sample_data", sample["data"][channel])
        path, boxes, intrinsic = nusc.get_sample_data(row["token"], box_vis_level=BoxVisibility.ALL)
        picture = np.asarray(Image.open(path)).astype(int)
        pose = np.eye(4)
        for table, key in (
            ("ego_pose", "ego_pose_token"),
            ("calibrated_sensor", "calibrated_sensor_token"),
        ):
            record = nusc.get(table, row[key])
            pose = pose @ transform_matrix(record["translation"], Quaternion(record["rotation"]))
        time_s = 0.5 + (row["timestamp"] - sample["timestamp"]) * 1e-6
        mount = Mount(np.eye(4), intrinsic, 0.0, SPEC.image_size)
        image, owner, _ = render_camera(scene, pose, mount, time_s)
        assert np.abs(picture - image).mean() < 6  # JPEG
        for box in boxes:
            n = object_of(scene, nusc.get("sample_annotation", box.token), 0.5)
            rows, columns = np.nonzero(owner == n)
            if len(rows) < 4 or np.hypot(*scene.object_motion(0.5)[n, :2]) > 0.01:
                continue  # what moves is elsewhere when the camera fires
            u, v, _ = view_points(box.corners(), intrinsic, normalize=True)
            assert u.min() - 0.5 <= columns.min() <= columns.max() <= u.max() + 0.5
            assert v.min() - 0.5 <= rows.min() <= rows.max() <= v.max() + 0.5
            checked += 1
            if box.name == "movable_object.trafficcone" and len(rows) > 12:
                orange.append(picture[rows, columns].mean(axis=0))
    assert checked >= 10
    assert orange
    assert all(red > blue + 20 for red, _, blue in orange), orange


def test_can_bus_and_map_agree_with_the_poses(nusc, scene: Scene) -> None:  # type: ignore[no-untyped-def]
    messages = json.loads((Path(nusc.dataroot) / "can_bus" / f"{VAL}_pose.json").read_text())
    assert set(messages[0]) == {"accel", "orientation", "pos", "rotation_rate", "utime", "vel"}
    sample = list(frames(nusc))[1]
    lidar = nusc.get("sample_data", sample["data"]["LIDAR_TOP"])
    pose = nusc.get("ego_pose", lidar["ego_pose_token"])
    before = [m for m in messages if m["utime"] <= sample["timestamp"]][-1]
    assert sample["timestamp"] - before["utime"] < 25_000
    np.testing.assert_allclose(before["pos"], pose["translation"], atol=0.3)
    assert before["vel"][0] == pytest.approx(np.hypot(*scene.ego_motion(0.5)[:2]), abs=0.1)
    assert before["accel"][2] == pytest.approx(9.8, abs=0.3)
    mask = nusc.map[0]["mask"]
    x, y = pose["translation"][:2]
    assert mask.is_on_mask(x, y)
    assert not mask.is_on_mask(x - 80, y - 80) or not mask.is_on_mask(x + 80, y - 80)


def test_ground_truth_as_prediction_scores_one(nusc, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    from nuscenes.eval.common.config import config_factory
    from nuscenes.eval.detection.evaluate import DetectionEval
    from nuscenes.eval.detection.utils import category_to_detection_name

    config = config_factory("detection_cvpr_2019")
    results: dict[str, list] = {}
    present = set()
    for sample in frames(nusc):
        results[sample["token"]] = []
        lidar = nusc.get("sample_data", sample["data"]["LIDAR_TOP"])
        ego = nusc.get("ego_pose", lidar["ego_pose_token"])["translation"]
        for token in sample["anns"]:
            row = nusc.get("sample_annotation", token)
            if row["num_lidar_pts"] + row["num_radar_pts"] == 0:
                continue  # the evaluator leaves these out of the ground truth
            name = category_to_detection_name(row["category_name"])
            if np.hypot(*(np.subtract(row["translation"], ego)[:2])) < config.class_range[name]:
                present.add(name)
            attributes = [nusc.get("attribute", key)["name"] for key in row["attribute_tokens"]]
            results[sample["token"]].append(
                {
                    "sample_token": sample["token"],
                    "translation": row["translation"],
                    "size": row["size"],
                    "rotation": row["rotation"],
                    "velocity": np.nan_to_num(nusc.box_velocity(token)[:2]).tolist(),
                    "detection_name": name,
                    "detection_score": 1.0,
                    "attribute_name": attributes[0] if attributes else "",
                }
            )
    uses = {f"use_{name}": False for name in ("camera", "lidar", "radar", "map", "external")}
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"meta": uses, "results": results}))
    judge = DetectionEval(nusc, config, str(path), "mini_val", str(tmp_path), verbose=False)
    metrics, _ = judge.evaluate()
    assert len(present) >= 8
    for name in present:
        assert all(ap == pytest.approx(1.0) for ap in metrics._label_aps[name].values()), name
        assert metrics.get_label_tp(name, "trans_err") == pytest.approx(0.0, abs=1e-6)


def test_val_scenes_give_the_metric_enough_of_every_class(tmp_path: Path) -> None:
    """The scenes of the default spec (its pictures and sweeps do not matter here)."""
    from nuscenes.eval.common.config import config_factory
    from nuscenes.eval.detection.utils import category_to_detection_name

    spec = SyntheticSpec(num_train_scenes=0, image_size=(18, 32), sweeps_per_frame=0)
    generate(tmp_path / "val", spec, num_workers=1)
    tables = {
        path.stem: json.loads(path.read_text()) for path in (tmp_path / "val").glob("v1.0*/*.json")
    }
    rows = {name: {row["token"]: row for row in table} for name, table in tables.items()}
    ego = {
        row["sample_token"]: rows["ego_pose"][row["ego_pose_token"]]["translation"][:2]
        for row in tables["sample_data"]
        if "LIDAR_TOP" in row["filename"]
    }
    ranges = config_factory("detection_cvpr_2019").class_range
    frame_counts, class_counts = dict.fromkeys(ego, 0), dict.fromkeys(ranges, 0)
    for row in tables["sample_annotation"]:
        instance = rows["instance"][row["instance_token"]]
        name = category_to_detection_name(rows["category"][instance["category_token"]]["name"])
        away = np.hypot(*np.subtract(row["translation"][:2], ego[row["sample_token"]]))
        if away < ranges[name] and row["num_lidar_pts"] + row["num_radar_pts"] > 0:
            frame_counts[row["sample_token"]] += 1
            class_counts[name] += 1
    assert len(frame_counts) == 80
    assert min(frame_counts.values()) >= 15
    assert min(class_counts.values()) >= 100, class_counts
