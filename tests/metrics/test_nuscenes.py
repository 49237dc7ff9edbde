"""The metric on a hand-made tree of three scenes, against the devkit's ``DetectionEval``."""

import json
import math
import os
import shutil
from collections import Counter
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bev_lightning.errors import InputError
from bev_lightning.metrics.nuscenes import NuScenesEvaluator

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


@pytest.mark.parametrize("seed", [0, 1])
def test_an_official_split_scores_as_the_devkit_scores_it(
    tree: Path, tmp_path: Path, seed: int
) -> None:
    from nuscenes import NuScenes
    from nuscenes.eval.common.config import config_factory
    from nuscenes.eval.detection.evaluate import DetectionEval

    results = disturb(val_only(truth_entries(tree)), seed)
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"meta": {"use_camera": True}, "results": results}))
    official = DetectionEval(
        NuScenes("v1.0-mini", str(tree), verbose=False),
        config_factory("detection_cvpr_2019"),
        str(path),
        "mini_val",
        str(tmp_path),
        verbose=False,
    )
    want = official.evaluate()[0].serialize()

    scores = NuScenesEvaluator(tree, "v1.0-mini", CLASSES).evaluate(results, VAL)
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


def test_ground_truth_as_prediction_is_perfect_where_there_is_ground_truth(tree: Path) -> None:
    results = val_only(truth_entries(tree, with_points=True))
    scores = NuScenesEvaluator(tree, "v1.0-mini", CLASSES).evaluate(results, VAL)
    present = [name for name in CLASSES if scores.truth[name]]
    assert set(CLASSES) - set(present) == {"bus"}  # none was made
    assert {name: scores.AP[name] for name in present} == pytest.approx(dict.fromkeys(present, 1.0))
    assert scores.AP["bus"] == 0.0
    assert scores.mAP == pytest.approx(len(present) / 10)
    assert scores.mAP_present == pytest.approx(1.0)
    assert scores.errors["car"]["ATE"] == pytest.approx(0.0, abs=1e-9)
    assert scores.errors["car"]["AAE"] == pytest.approx(0.0, abs=1e-9)


def test_neither_map_masks_nor_lidarseg_are_read(tree: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(tree / "v1.0-mini", bare / "v1.0-mini")
    (bare / "v1.0-mini" / "lidarseg.json").write_text("[{}]")  # its folder is not there either
    results = disturb(val_only(truth_entries(tree)), 0)
    want, found = (NuScenesEvaluator(r, "v1.0-mini", CLASSES) for r in (tree, bare))
    assert found.evaluate(results, VAL) == want.evaluate(results, VAL)

    (bare / "v1.0-mini" / "log.json").write_text("[")
    again = bare.rename(tmp_path / "broken")
    with pytest.raises(InputError, match=r"broken/v1.0-mini cannot be read \(JSONDecodeError"):
        NuScenesEvaluator(again, "v1.0-mini", CLASSES).evaluate(results, VAL)


def test_means_go_over_the_classes_of_the_model(tree: Path) -> None:
    results = val_only(truth_entries(tree, with_points=True))
    scores = NuScenesEvaluator(tree, "v1.0-mini", ("barrier", "traffic_cone")).evaluate(
        results, VAL
    )
    assert scores.mAP == pytest.approx(1.0)
    assert list(scores.AP) == ["barrier", "traffic_cone"]
    assert scores.mAVE == 1.0  # neither class defines a velocity error
    assert math.isfinite(scores.NDS)
    assert json.loads(json.dumps(scores.to_dict(), allow_nan=False)) == scores.to_dict()


def test_a_custom_split_and_missing_samples(tree: Path) -> None:
    evaluator = NuScenesEvaluator(tree, "v1.0-mini", CLASSES)
    results = truth_entries(tree, with_points=True)
    one = evaluator.evaluate({"scene-0916-0": results["scene-0916-0"]}, ["scene-0916-0"])
    assert (one.frames, one.AP["car"]) == (1, pytest.approx(1.0))
    # Half of the samples predicted: half of the cars found, each at precision 1.
    half = evaluator.evaluate(
        {"scene-0916-0": results["scene-0916-0"]}, ["scene-0916-0", "scene-0916-1"]
    )
    empty = evaluator.evaluate(
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
def test_no_prediction_at_all_scores_zero(tree: Path, results: dict) -> None:
    scores = NuScenesEvaluator(tree, "v1.0-mini", CLASSES).evaluate(results, VAL)
    assert (scores.mAP, scores.NDS, scores.mATE) == (0.0, 0.0, 1.0)
    assert sum(scores.truth.values()) > 20 and sum(scores.predictions.values()) == 0
    json.dumps(scores.to_dict(), allow_nan=False)


def test_too_many_and_broken_boxes_do_not_stop_the_evaluation(tree: Path) -> None:
    results = val_only(truth_entries(tree, with_points=True))
    car = next(e for e in results["scene-0103-0"] if e["detection_name"] == "car")
    noise = [
        {**car, "translation": [1020.0, 480.0, 0.0], "detection_score": 0.1 + i * 1e-5}
        for i in range(600)
    ]
    broken = {**car, "size": [0.0, 1.0, 1.0]}
    clean_scores = NuScenesEvaluator(tree, "v1.0-mini", CLASSES).evaluate(results, VAL)
    kept = len(results["scene-0103-0"])
    results["scene-0103-0"] = noise + [broken] + results["scene-0103-0"]
    scores = NuScenesEvaluator(tree, "v1.0-mini", CLASSES).evaluate(results, VAL)
    assert (scores.over_limit, scores.invalid) == (100 + kept, 1)
    assert scores.predictions["car"] == 500 - kept + clean_scores.predictions["car"]
    assert scores.AP["pedestrian"] == clean_scores.AP["pedestrian"]


def test_the_wrong_split_is_named(tree: Path) -> None:
    evaluator = NuScenesEvaluator(tree, "v1.0-mini", CLASSES)
    with pytest.raises(InputError) as error:
        evaluator.evaluate({"scene-0061-0": []}, VAL)
    assert str(error.value) == (
        "1 of the 1 predicted samples are not evaluated: the predictions are of mini_train, the "
        "evaluation is on mini_val; predict and evaluate the same data.val_split"
    )
    with pytest.raises(
        InputError, match="predictions are of only_0916, the evaluation is on mini_train"
    ):
        evaluator.evaluate({"scene-0916-1": []}, ["scene-0061-0"])
    with pytest.raises(
        InputError, match="predictions are of 1 samples that v1.0-mini does not have"
    ):
        evaluator.evaluate({"elsewhere": []}, VAL)


def test_inputs_that_cannot_be_evaluated_are_named(tree: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no nuScenes tables; set data.root"):
        NuScenesEvaluator(tmp_path, "v1.0-mini", CLASSES).evaluate({}, VAL)
    with pytest.raises(InputError, match="does not know the classes tram; set data.classes"):
        NuScenesEvaluator(tree, "v1.0-mini", ("car", "tram")).evaluate({}, VAL)
    with pytest.raises(InputError, match="1 of the 6 samples to evaluate on, such as nowhere"):
        NuScenesEvaluator(tree, "v1.0-mini", CLASSES).evaluate({}, [*VAL, "nowhere"])
    with pytest.raises(InputError, match="no sample to evaluate on"):
        NuScenesEvaluator(tree, "v1.0-mini", CLASSES).evaluate({}, [])


def test_the_log_holds_flat_numbers(tree: Path) -> None:
    log = NuScenesEvaluator(tree, "v1.0-mini", CLASSES).evaluate({}, VAL).to_log()
    assert log["NDS"] == 0.0 and log["AP/traffic_cone"] == 0.0
    assert len(log) == 8 + 10


def test_the_table_has_a_line_for_each_class(tree: Path) -> None:
    results = val_only(truth_entries(tree, with_points=True))
    lines = str(NuScenesEvaluator(tree, "v1.0-mini", CLASSES).evaluate(results, VAL)).split("\n")
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


def test_nothing_is_printed(tree: Path, capfd: pytest.CaptureFixture[str]) -> None:
    NuScenesEvaluator(tree, "v1.0-mini", CLASSES).evaluate(val_only(truth_entries(tree)), VAL)
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
def test_real_ground_truth_as_prediction(split: str, want: dict[str, int]) -> None:
    root = Path(REAL or "")
    scenes = json.loads((root / "v1.0-trainval" / "splits.json").read_text())[split]
    names = {
        row["token"]: row["name"]
        for row in json.loads((root / "v1.0-trainval/scene.json").read_text())
    }
    samples = json.loads((root / "v1.0-trainval/sample.json").read_text())
    tokens = [row["token"] for row in samples if names[row["scene_token"]] in scenes]
    results = truth_entries(root, "v1.0-trainval", with_points=True)
    scores = NuScenesEvaluator(root, "v1.0-trainval", CLASSES).evaluate(
        {token: results[token] for token in tokens}, tokens
    )
    assert {name: count for name, count in scores.truth.items() if count} == want
    assert {name: scores.AP[name] for name in want} == pytest.approx(dict.fromkeys(want, 1.0))
    assert scores.mAP_present == pytest.approx(1.0)
    assert scores.frames == 2
