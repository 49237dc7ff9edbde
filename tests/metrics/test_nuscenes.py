"""The metric on a hand-made tree of three scenes, against the devkit's ``DetectionEval``."""

import json
import math
import os
import shutil
from collections import Counter
from dataclasses import replace
from itertools import chain
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from PIL import Image

from bev_lightning.classes import ATTRIBUTES as KNOWN_ATTRIBUTES
from bev_lightning.data.nuscenes.ground_truth import check_predicted, read_ground_truth
from bev_lightning.data.nuscenes.index import Index, open_index
from bev_lightning.errors import InputError
from bev_lightning.metrics.nuscenes import NuScenesEvaluator, Scores

CATEGORIES = {
    "car": "vehicle.car",
    "truck": "vehicle.truck",
    "construction_vehicle": "vehicle.construction",
    "bus": "vehicle.bus.rigid",
    "trailer": "vehicle.trailer",
    "barrier": "movable_object.barrier",
    "motorcycle": "vehicle.motorcycle",
    "bicycle": "vehicle.bicycle",
    "pedestrian": "human.pedestrian.adult",
    "traffic_cone": "movable_object.trafficcone",
}
CLASSES = tuple(CATEGORIES)
RACK = "static_object.bicycle_rack"
ATTRIBUTES = {
    "barrier": [],
    "traffic_cone": [],
    "pedestrian": ["pedestrian.moving"],
    "bicycle": ["cycle.with_rider"],
    "motorcycle": ["cycle.without_rider"],
}
SCENES = {
    "scene-0061": 1,
    "scene-0103": 3,
    "scene-0916": 2,
}  # mini_train: the first; mini_val: the others


def write_tree(root: Path) -> Path:
    """Tables of v1.0-mini: in each frame two objects of each class but bus, tracked over the
    scene, 8 to 46 m off; each third object without points, and a bicycle in a rack."""
    rng = np.random.default_rng(5)
    tables: dict[str, list[dict]] = {"visibility": []}

    def add(table: str, token: str, **columns: object) -> None:
        tables.setdefault(table, []).append({"token": token, **columns})

    for name in [*CATEGORIES.values(), RACK]:
        add("category", name, name=name, description="")
    for name in ("vehicle.parked", "vehicle.moving", *chain.from_iterable(ATTRIBUTES.values())):
        add("attribute", name, name=name, description="")
    add("sensor", "lidar", channel="LIDAR_TOP", modality="lidar")
    pose = {"translation": [0.9, 0.0, 1.8], "rotation": [1, 0, 0, 0]}
    add("calibrated_sensor", "rig", sensor_token="lidar", camera_intrinsic=[], **pose)
    add("log", "log", logfile="log", vehicle="", date_captured="", location="")
    add("map", "map", log_tokens=["log"], category="", filename="maps/m.png")
    (root / "maps").mkdir(parents=True)
    Image.new("L", (4, 4)).save(root / "maps" / "m.png")

    ego = np.array([1000.0, 500.0, 0.0])
    for scene, num in SCENES.items():
        samples = [f"{scene}-{i}" for i in range(num)]
        ends = {"first_sample_token": samples[0], "last_sample_token": samples[-1]}
        add("scene", scene, log_token="log", nbr_samples=num, name=scene, description="", **ends)
        for i, sample in enumerate(samples):
            time = {"timestamp": 1_500_000_000_000_000 + i * 500_000}
            add("sample", sample, scene_token=scene, **time, **neighbours(scene, i, num))
            add("ego_pose", sample, rotation=[1, 0, 0, 0], translation=ego.tolist(), **time)
            links = {"ego_pose_token": sample, "calibrated_sensor_token": "rig"}
            file = {"filename": f"samples/{sample}.bin", "fileformat": "pcd", "is_key_frame": True}
            size = {"height": 0, "width": 0, **time, **neighbours(scene, i, num)}
            add("sample_data", sample, sample_token=sample, **links, **file, **size)
        objects = [(name, copy) for name in CLASSES if name != "bus" for copy in range(2)]
        for index, (name, copy) in enumerate([*objects, (RACK, 0)]):
            token = f"{scene}-{name}-{copy}"
            ends = {
                "first_annotation_token": f"{token}-0",
                "last_annotation_token": f"{token}-{num - 1}",
            }
            category = CATEGORIES.get(name, RACK)
            add("instance", token, category_token=category, nbr_annotations=num, **ends)
            radius, azimuth = 8.0 + 38.0 * rng.random(), 2 * math.pi * rng.random()
            start = ego + [radius * math.cos(azimuth), radius * math.sin(azimuth), 1.0]
            if (name, copy) in (("bicycle", 0), (RACK, 0)):
                start = ego + [9.0, 9.0, 1.0]
            speed = np.array([*rng.normal(0, 3, 2), 0.0]) * (name != RACK) * (index % 2)
            yaw = rng.uniform(-math.pi, math.pi)
            attributes = [] if name == RACK else ATTRIBUTES.get(name, ["vehicle.parked"])
            for i, sample in enumerate(samples):
                add(
                    "sample_annotation",
                    f"{token}-{i}",
                    sample_token=sample,
                    instance_token=token,
                    attribute_tokens=attributes,
                    visibility_token="",
                    translation=(start + speed * 0.5 * i).tolist(),
                    size=[2.0, 2.0, 2.0] if name == RACK else rng.uniform(0.5, 4.0, 3).tolist(),
                    rotation=[math.cos(yaw / 2), 0.0, 0.0, math.sin(yaw / 2)],
                    num_lidar_pts=0 if index % 3 == 2 else 5,
                    num_radar_pts=0,
                    **neighbours(token, i, num),
                )
    tables["splits"] = {"only_0916": ["scene-0916"]}  # type: ignore[assignment]
    (root / "v1.0-mini").mkdir()
    for name, rows in tables.items():
        (root / "v1.0-mini" / f"{name}.json").write_text(json.dumps(rows))
    return root


def neighbours(stem: str, i: int, num: int) -> dict[str, str]:
    return {
        "prev": f"{stem}-{i - 1}" if i else "",
        "next": f"{stem}-{i + 1}" if i + 1 < num else "",
    }


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tree(tmp_path_factory.mktemp("tree"))


@pytest.fixture(scope="module")
def index(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Index:
    return open_index(tree, "v1.0-mini", tmp_path_factory.mktemp("cache"))


def score(index: Index, results: dict, tokens, classes=CLASSES, **settings) -> Scores:
    truth = read_ground_truth(index, list(tokens))
    return NuScenesEvaluator(classes, **settings).evaluate(results, truth)


def truth_entries(
    tree: Path, version: str = "v1.0-mini", with_points: bool = False
) -> dict[str, list[dict]]:
    """All annotations of detection classes as predictions of score 1, from the JSON tables
    alone."""
    tables = {
        name: json.loads((tree / version / f"{name}.json").read_text())
        for name in ("category", "instance", "sample", "sample_annotation", "attribute")
    }
    category = {row["token"]: row["name"] for row in tables["category"]}
    of_instance = {row["token"]: category[row["category_token"]] for row in tables["instance"]}
    attribute = {row["token"]: row["name"] for row in tables["attribute"]}
    names = {value: key for key, value in CATEGORIES.items()}
    results: dict[str, list[dict]] = {row["token"]: [] for row in tables["sample"]}
    for row in tables["sample_annotation"]:
        name = names.get(of_instance[row["instance_token"]])
        if name is None or (with_points and row["num_lidar_pts"] + row["num_radar_pts"] == 0):
            continue
        results[row["sample_token"]].append(
            {
                "sample_token": row["sample_token"],
                "translation": row["translation"],
                "size": row["size"],
                "rotation": row["rotation"],
                "velocity": [0.0, 0.0],
                "detection_name": name,
                "detection_score": 1.0,
                "attribute_name": attribute[row["attribute_tokens"][0]]
                if row["attribute_tokens"]
                else "",
            }
        )
    return results


def disturb(results: dict[str, list[dict]], seed: int) -> dict[str, list[dict]]:
    """Imperfect predictions: moved, resized, turned, some lost, some doubled, with scores."""
    rng = np.random.default_rng(seed)
    disturbed: dict[str, list[dict]] = {}
    for token, entries in results.items():
        disturbed[token] = []
        for entry in entries:
            for _ in range(rng.choice(3, p=[0.2, 0.5, 0.3])):
                yaw = rng.uniform(-math.pi, math.pi)
                disturbed[token].append(
                    {
                        **entry,
                        "translation": (
                            np.array(entry["translation"]) + rng.normal(0, 1, 3)
                        ).tolist(),
                        "size": (np.array(entry["size"]) * rng.uniform(0.7, 1.4, 3)).tolist(),
                        "rotation": [math.cos(yaw / 2), 0.0, 0.0, math.sin(yaw / 2)],
                        "velocity": rng.normal(0, 2, 2).tolist(),
                        "detection_score": float(rng.random()),
                    }
                )
    return disturbed


VAL = ("scene-0103-0", "scene-0103-1", "scene-0103-2", "scene-0916-0", "scene-0916-1")


def val_only(results: dict[str, list[dict]]) -> dict[str, list[dict]]:
    return {token: results[token] for token in VAL}


def official_evaluation(root: Path, version: str, split: str, results: dict, folder: Path):
    """The devkit's own evaluation, which reads the tables itself."""
    from nuscenes import NuScenes
    from nuscenes.eval.common.config import config_factory
    from nuscenes.eval.detection.evaluate import DetectionEval

    path = folder / "results.json"
    path.write_text(json.dumps({"meta": {"use_camera": True}, "results": results}))
    with patch("nuscenes.nuscenes.MapMask"):  # a real tree has no maps
        devkit = NuScenes(version, str(root), verbose=False)
    config = config_factory("detection_cvpr_2019")
    return DetectionEval(devkit, config, str(path), split, str(folder), verbose=False)


@pytest.mark.parametrize("seed", [0, 1])
def test_an_official_split_scores_as_the_devkit_scores_it(
    tree: Path, index: Index, tmp_path: Path, seed: int
) -> None:
    results = disturb(val_only(truth_entries(tree)), seed)
    official = official_evaluation(tree, "v1.0-mini", "mini_val", results, tmp_path)
    want = official.evaluate()[0].serialize()

    scores = score(index, results, VAL)
    assert 0.05 < want["mean_ap"] < 0.8
    # The classes are added up in another order: the means may differ in their last bit.
    assert scores.mAP == pytest.approx(want["mean_ap"], rel=1e-14)
    assert scores.NDS == pytest.approx(want["nd_score"], rel=1e-14)
    assert scores.AP == {name: want["mean_dist_aps"][name] for name in CLASSES}
    errors = want["tp_errors"]
    assert (scores.mATE, scores.mASE, scores.mAOE, scores.mAVE, scores.mAAE) == pytest.approx(
        [errors[name] for name in ("trans_err", "scale_err", "orient_err", "vel_err", "attr_err")],
        rel=1e-14,
    )
    assert scores.errors["car"]["ATE"] == want["label_tp_errors"]["car"]["trans_err"]
    assert scores.errors["traffic_cone"]["AVE"] is None and scores.errors["barrier"]["AAE"] is None
    counts = Counter(box.detection_name for box in official.gt_boxes.all)
    assert scores.truth == {name: counts[name] for name in CLASSES}
    assert scores.truth_per_frame == len(official.gt_boxes.all) / 5
    counts = Counter(box.detection_name for box in official.pred_boxes.all)
    assert scores.predictions == {name: counts[name] for name in CLASSES}
    assert scores.frames == 5


def test_ground_truth_as_prediction_is_perfect_where_there_is_ground_truth(
    tree: Path, index: Index
) -> None:
    results = val_only(truth_entries(tree, with_points=True))
    scores = score(index, results, VAL)
    present = [name for name in CLASSES if scores.truth[name]]
    assert set(CLASSES) - set(present) == {"bus"}  # none was made
    assert {name: scores.AP[name] for name in present} == pytest.approx(dict.fromkeys(present, 1.0))
    assert scores.AP["bus"] == 0.0
    assert scores.mAP == pytest.approx(len(present) / 10)
    assert scores.mAP_present == pytest.approx(1.0)
    assert scores.errors["car"]["ATE"] == pytest.approx(0.0, abs=1e-9)
    assert scores.errors["car"]["AAE"] == pytest.approx(0.0, abs=1e-9)


def test_means_go_over_the_classes_of_the_model(tree: Path, index: Index) -> None:
    results = val_only(truth_entries(tree, with_points=True))
    scores = score(index, results, VAL, ("barrier", "traffic_cone"))
    assert scores.mAP == pytest.approx(1.0)
    assert list(scores.AP) == ["barrier", "traffic_cone"]
    assert scores.mAVE == 1.0  # neither class defines a velocity error
    assert math.isfinite(scores.NDS)
    assert json.loads(json.dumps(scores.to_dict(), allow_nan=False)) == scores.to_dict()


def test_a_custom_split_and_missing_samples(tree: Path, index: Index) -> None:
    results = truth_entries(tree, with_points=True)
    one = score(index, {"scene-0916-0": results["scene-0916-0"]}, ["scene-0916-0"])
    assert (one.frames, one.AP["car"]) == (1, pytest.approx(1.0))
    # Half of the samples predicted: half of the cars found, each at precision 1.
    half = score(index, {"scene-0916-0": results["scene-0916-0"]}, ["scene-0916-0", "scene-0916-1"])
    empty = score(
        index,
        {"scene-0916-0": results["scene-0916-0"], "scene-0916-1": []},
        ["scene-0916-0", "scene-0916-1"],
    )
    assert half == replace(empty, left_out=1) and empty.left_out == 0
    assert str(half).endswith("1 of the samples have no results and count as empty")
    assert half.truth["car"] == 2 * one.truth["car"]
    assert half.AP["car"] == pytest.approx(
        (50 - 10) / 90, abs=0.01
    )  # recall 0.1 to 0.5 of 0.1 to 1


@pytest.mark.parametrize("results", [{}, {token: [] for token in VAL}])
def test_no_prediction_at_all_scores_zero(tree: Path, index: Index, results: dict) -> None:
    scores = score(index, results, VAL)
    assert (scores.mAP, scores.NDS, scores.mATE) == (0.0, 0.0, 1.0)
    assert sum(scores.truth.values()) > 20 and sum(scores.predictions.values()) == 0
    json.dumps(scores.to_dict(), allow_nan=False)


def test_too_many_and_broken_boxes_do_not_stop_the_evaluation(tree: Path, index: Index) -> None:
    results = val_only(truth_entries(tree, with_points=True))
    car = next(e for e in results["scene-0103-0"] if e["detection_name"] == "car")
    noise = [
        {**car, "translation": [1020.0, 480.0, 0.0], "detection_score": 0.1 + i * 1e-5}
        for i in range(600)
    ]
    broken = {**car, "size": [0.0, 1.0, 1.0]}
    clean_scores = score(index, results, VAL)
    kept = len(results["scene-0103-0"])
    results["scene-0103-0"] = noise + [broken] + results["scene-0103-0"]
    scores = score(index, results, VAL)
    assert (scores.over_limit, scores.invalid) == (100 + kept, 1)
    assert scores.predictions["car"] == 500 - kept + clean_scores.predictions["car"]
    assert scores.AP["pedestrian"] == clean_scores.AP["pedestrian"]


def test_the_wrong_split_is_named(index: Index) -> None:
    with pytest.raises(InputError) as error:
        check_predicted(index, ["scene-0061-0"], VAL)
    assert str(error.value) == (
        "1 of the 1 predicted samples are not evaluated: the predictions are of mini_train, the "
        "evaluation is on mini_val; predict and evaluate the same data.val_split"
    )
    with pytest.raises(
        InputError, match="predictions are of only_0916, the evaluation is on mini_train"
    ):
        check_predicted(index, ["scene-0916-1"], ["scene-0061-0"])
    with pytest.raises(InputError, match="predictions are of 1 samples that .* does not have"):
        check_predicted(index, ["elsewhere"], VAL)
    check_predicted(index, VAL[:2], VAL)
    with pytest.raises(InputError, match="1 of the 1 predicted samples, such as scene-0061-0, are"):
        score(index, {"scene-0061-0": []}, VAL)


def test_inputs_that_cannot_be_evaluated_are_named(index: Index) -> None:
    with pytest.raises(InputError, match="1 of the 6 samples to evaluate on, such as nowhere"):
        score(index, {}, [*VAL, "nowhere"])
    with pytest.raises(InputError, match="no sample to evaluate"):
        score(index, {}, [])


def test_an_annotation_of_two_attributes_is_named(tree: Path, tmp_path: Path) -> None:
    copy = tmp_path / "tree"
    shutil.copytree(tree, copy)
    path = copy / "v1.0-mini" / "sample_annotation.json"
    rows = json.loads(path.read_text())
    broken = next(row for row in rows if row["token"] == "scene-0103-car-1-1")
    broken["attribute_tokens"] = ["vehicle.parked", "vehicle.moving"]
    path.write_text(json.dumps(rows))
    index = open_index(copy, "v1.0-mini", tmp_path / "cache")
    with pytest.raises(InputError, match="annotation scene-0103-car-1-1 has several attributes"):
        read_ground_truth(index, VAL)
    assert len(read_ground_truth(index, VAL[:1])) == 1
    # It is no error in a box without a class.
    others = open_index(copy, "v1.0-mini", tmp_path / "cache", class_of_category={"bus": "bus"})
    assert read_ground_truth(others, VAL)[VAL[1]].class_name == ()


def assert_equals_devkit_truth(index: Index, official) -> int:
    """The ground truth equals what ``DetectionEval`` has loaded, before and after its filter."""
    from nuscenes.eval.common.loaders import load_gt
    from nuscenes.eval.detection.data_classes import DetectionBox

    devkit = load_gt(official.nusc, official.eval_set, DetectionBox)
    truth = read_ground_truth(index, devkit.sample_tokens)
    evaluator, num_boxes = NuScenesEvaluator(CLASSES), 0
    for token, boxes in truth.items():
        ours = evaluator._truth_boxes(token, boxes)
        theirs = devkit[token]
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(one.velocity, other.velocity)
            assert (one.detection_name, one.attribute_name, one.num_pts) == (
                other.detection_name,
                other.attribute_name,
                other.num_pts,
            )
            for name in ("translation", "size", "rotation"):
                assert list(getattr(one, name)) == list(getattr(other, name))
        sample = official.nusc.get("sample", token)
        pose = official.nusc.get("sample_data", sample["data"]["LIDAR_TOP"])["ego_pose_token"]
        pose = official.nusc.get("ego_pose", pose)
        assert boxes.ego_position.tolist() == pose["translation"]
        num_boxes += len(ours)
    return num_boxes


@pytest.mark.devkit
def test_the_ground_truth_is_the_devkits(tree: Path, index: Index, tmp_path: Path) -> None:
    results = val_only(truth_entries(tree))
    official = official_evaluation(tree, "v1.0-mini", "mini_val", results, tmp_path)
    assert assert_equals_devkit_truth(index, official) == 5 * 18
    # One bicycle of each frame stands in a rack and is left out on both sides.
    scores = score(index, results, VAL)
    counts = Counter(box.detection_name for box in official.gt_boxes.all)
    assert scores.truth["bicycle"] == counts["bicycle"] < 5 * 2
    assert scores.predictions["bicycle"] == 5


@pytest.mark.devkit
def test_three_classes_score_as_among_the_ten(tree: Path, index: Index) -> None:
    results = disturb(val_only(truth_entries(tree)), 0)
    every, three = (
        score(index, results, VAL, names) for names in (CLASSES, CLASSES[:2] + CLASSES[8:9])
    )
    assert list(three.AP) == ["car", "truck", "pedestrian"]
    assert three.AP == {name: every.AP[name] for name in three.AP}
    assert three.errors == {name: every.errors[name] for name in three.AP}
    assert three.mAP == pytest.approx(sum(three.AP.values()) / 3)


def test_own_classes_are_scored_as_the_classes_that_they_map_to(
    tree: Path, index: Index, tmp_path: Path
) -> None:
    """Renaming classes renames nothing else: scores are those of the nuScenes names."""
    own = {"person": "pedestrian", "bike": "bicycle"}
    class_of_category = {
        CATEGORIES["pedestrian"]: "person",
        CATEGORIES["bicycle"]: "bike",
        CATEGORIES["car"]: "vehicle",
        CATEGORIES["truck"]: "vehicle",
    }
    renamed = open_index(tree, "v1.0-mini", tmp_path, class_of_category=class_of_category)
    assert renamed.stamp != open_index(tree, "v1.0-mini", tmp_path).stamp
    results = disturb(val_only(truth_entries(tree)), 1)
    names = {detection: name for name, detection in own.items()}
    mine = {
        token: [
            {**entry, "detection_name": names.get(entry["detection_name"], "vehicle")}
            for entry in entries
            if entry["detection_name"] in (*names, "car", "truck")
        ]
        for token, entries in results.items()
    }
    with pytest.warns(UserWarning, match="the nuScenes metric leaves out vehicle: map them"):
        scores = score(renamed, mine, VAL, ("vehicle", "person", "bike"), detection_names=own)
    want = score(index, results, VAL, ("pedestrian", "bicycle"))
    assert scores.AP == want.AP and scores.errors == want.errors and scores.mAP == want.mAP
    # All vehicles as one class with the rules of cars.
    merged = score(renamed, mine, VAL, ("vehicle",), detection_names={"vehicle": "car"})
    both = score(index, results, VAL)
    assert merged.truth["car"] == both.truth["car"] + both.truth["truck"]
    with pytest.raises(InputError, match=r"knows none of data.classes=\['vehicle'\]: map some"):
        NuScenesEvaluator(["vehicle"])


def test_foreign_attributes_count_as_none(index: Index) -> None:
    truth = read_ground_truth(index, VAL)
    foreign = {
        token: replace(boxes, attribute=("towed",) * len(boxes.attribute))
        for token, boxes in truth.items()
    }
    none = {
        token: replace(boxes, attribute=("",) * len(boxes.attribute))
        for token, boxes in truth.items()
    }
    assert "towed" not in KNOWN_ATTRIBUTES
    evaluator = NuScenesEvaluator(CLASSES)
    assert evaluator.evaluate({}, foreign) == evaluator.evaluate({}, none)


def test_the_log_holds_flat_numbers(tree: Path, index: Index) -> None:
    log = score(index, {}, VAL).to_log()
    assert log["NDS"] == 0.0 and log["AP/traffic_cone"] == 0.0
    assert len(log) == 8 + 10


def test_the_table_has_a_line_for_each_class(tree: Path, index: Index) -> None:
    results = val_only(truth_entries(tree, with_points=True))
    lines = str(score(index, results, VAL)).split("\n")
    assert lines[0].startswith("mAP 0.900   NDS 0.")
    assert lines[1].split() == [
        "class",
        "AP",
        "ATE",
        "ASE",
        "AOE",
        "AVE",
        "AAE",
        "truth",
        "predicted",
    ]
    assert [line.split()[0] for line in lines[2:12]] == list(CLASSES)
    assert lines[11].split()[:4] == ["traffic_cone", "1.000", "0.000", "0.000"]
    assert lines[11].split()[4:7] == ["-", "-", "-"]
    assert lines[12].startswith("5 samples, ")


def test_nothing_is_printed(tree: Path, index: Index, capfd: pytest.CaptureFixture[str]) -> None:
    score(index, val_only(truth_entries(tree)), VAL)
    assert capfd.readouterr() == ("", "")


REAL = os.environ.get("BEV_NUSCENES_DIR")


@pytest.mark.skipif(not REAL, reason="BEV_NUSCENES_DIR names no folder of real nuScenes frames")
@pytest.mark.parametrize(
    ("split", "want"),
    [
        ("real_lidar", {"car": 28, "truck": 2, "barrier": 14, "pedestrian": 15, "traffic_cone": 6}),
        ("real_temporal", {"car": 7, "pedestrian": 32}),
    ],
)
def test_real_ground_truth_as_prediction(split: str, want: dict[str, int], tmp_path: Path) -> None:
    root = Path(REAL or "")
    scenes = json.loads((root / "v1.0-trainval" / "splits.json").read_text())[split]
    names = {
        row["token"]: row["name"]
        for row in json.loads((root / "v1.0-trainval/scene.json").read_text())
    }
    samples = json.loads((root / "v1.0-trainval/sample.json").read_text())
    tokens = [row["token"] for row in samples if names[row["scene_token"]] in scenes]
    results = truth_entries(root, "v1.0-trainval", with_points=True)
    index = open_index(root, "v1.0-trainval", tmp_path / "cache")
    scores = score(index, {token: results[token] for token in tokens}, tokens)
    assert {name: count for name, count in scores.truth.items() if count} == want
    assert {name: scores.AP[name] for name in want} == pytest.approx(dict.fromkeys(want, 1.0))
    assert scores.mAP_present == pytest.approx(1.0)
    assert scores.frames == 2


@pytest.mark.devkit
@pytest.mark.skipif(not REAL, reason="BEV_NUSCENES_DIR names no folder of real nuScenes frames")
@pytest.mark.parametrize("split", ["train", "val"])
def test_real_frames_score_as_the_devkit_scores_them(split: str, tmp_path: Path) -> None:
    root = Path(REAL or "")
    index = open_index(root, "v1.0-trainval", tmp_path / "cache")
    if split not in index.splits:
        pytest.skip(f"no real frame is of {split}")
    tokens = index.split(split)
    entries = truth_entries(root, "v1.0-trainval")
    results = disturb({token: entries[token] for token in tokens}, 0)
    official = official_evaluation(root, "v1.0-trainval", split, results, tmp_path)
    assert assert_equals_devkit_truth(index, official) > 0
    want, scores = official.evaluate()[0].serialize(), score(index, results, tokens)
    assert scores.mAP == pytest.approx(want["mean_ap"], rel=1e-14)
    assert scores.NDS == pytest.approx(want["nd_score"], rel=1e-14)
    assert scores.AP == {name: want["mean_dist_aps"][name] for name in CLASSES}
