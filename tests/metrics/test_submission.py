import json
import logging
import math

import pytest
import torch

from bev_lightning.errors import InputError
from bev_lightning.metrics.submission import (
    Refused,
    attribute_of,
    clean,
    read_submission,
    to_entries,
    write_submission,
)
from bev_lightning.structures.boxes import Boxes3D

CLASSES = ("car", "bus", "pedestrian", "barrier")


def make_boxes(**changes: torch.Tensor) -> Boxes3D:
    """One sample of three boxes, the last of them padding."""
    values = {
        "centre": torch.tensor([[[1.0, 2.0, 0.5], [-3.0, 4.0, 1.0], [9.0, 9.0, 9.0]]]),
        "size": torch.tensor([[[4.0, 2.0, 1.5], [0.7, 0.6, 1.8], [1.0, 1.0, 1.0]]]),
        "yaw": torch.tensor([[0.3, -2.5, 0.0]]),
        "velocity": torch.tensor([[[3.0, 0.0], [0.0, 0.1], [0.0, 0.0]]]),
        "label": torch.tensor([[0, 2, 1]]),
        "valid": torch.tensor([[True, True, False]]),
        "score": torch.tensor([[0.75, 0.25, 1.0]]),
    }
    return Boxes3D(**{**values, **changes})


def entry(score: float = 0.5, **changes: object) -> dict:
    base = {
        "sample_token": "s",
        "translation": [1.0, 2.0, 3.0],
        "size": [1.0, 2.0, 3.0],
        "rotation": [1.0, 0.0, 0.0, 0.0],
        "velocity": [0.0, 0.0],
        "detection_name": "car",
        "detection_score": score,
        "attribute_name": "vehicle.parked",
    }
    return {**base, **changes}


def test_identity_pose_writes_the_boxes_as_they_are() -> None:
    (car, pedestrian) = to_entries(make_boxes(), torch.eye(4).double()[None], ["a"], CLASSES)["a"]
    assert car["translation"] == pytest.approx([1.0, 2.0, 0.5])
    assert car["size"] == pytest.approx([2.0, 4.0, 1.5])  # nuScenes: width, length, height
    assert car["rotation"] == pytest.approx([math.cos(0.15), 0, 0, math.sin(0.15)], abs=1e-7)
    assert car["velocity"] == pytest.approx([3.0, 0.0])
    assert (car["detection_name"], car["attribute_name"]) == ("car", "vehicle.moving")
    assert car["detection_score"] == pytest.approx(0.75)
    assert pedestrian["detection_name"] == "pedestrian"
    assert pedestrian["attribute_name"] == "pedestrian.standing"


def test_a_turned_pose_turns_centre_heading_and_velocity() -> None:
    pose = torch.tensor(
        [
            [0.0, -1.0, 0.0, 1000.0],
            [1.0, 0.0, 0.0, 2000.0],
            [0.0, 0.0, 1.0, 3.0],
            [0.0, 0.0, 0.0, 1.0],
        ],
        dtype=torch.float64,
    )
    car = to_entries(make_boxes(), pose[None], ["a"], CLASSES)["a"][0]
    assert car["translation"] == pytest.approx([998.0, 2001.0, 3.5])
    half = (0.3 + math.pi / 2) / 2
    assert car["rotation"] == pytest.approx([math.cos(half), 0, 0, math.sin(half)], abs=1e-7)
    assert car["velocity"] == pytest.approx([0.0, 3.0])


def test_bev_augmentation_is_undone_on_centre_size_heading_and_velocity() -> None:
    augment = torch.diag(torch.tensor([-1.1, 1.1, 1.1, 1.0], dtype=torch.float64))
    seen = make_boxes().transform(augment.float()[None])
    plain = to_entries(make_boxes(), torch.eye(4).double()[None], ["a"], CLASSES)["a"]
    undone = to_entries(seen, torch.linalg.inv(augment)[None], ["a"], CLASSES)["a"]
    for want, got in zip(plain, undone, strict=True):
        for key in ("translation", "size", "velocity"):
            assert got[key] == pytest.approx(want[key], abs=1e-5)
        sign = math.copysign(
            1.0, sum(a * b for a, b in zip(got["rotation"], want["rotation"], strict=True))
        )
        assert [sign * q for q in got["rotation"]] == pytest.approx(want["rotation"], abs=1e-5)


def test_annotations_get_score_one_and_unknown_velocity_becomes_zero() -> None:
    velocity = torch.full((1, 3, 2), math.nan)
    entries = to_entries(
        make_boxes(score=None, velocity=velocity), torch.eye(4).double()[None], ["a"], CLASSES
    )["a"]
    assert [e["detection_score"] for e in entries] == [1.0, 1.0]
    assert [e["velocity"] for e in entries] == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize(
    ("name", "still", "moving"),
    [
        ("car", "vehicle.parked", "vehicle.moving"),
        ("construction_vehicle", "vehicle.parked", "vehicle.moving"),
        ("bus", "vehicle.stopped", "vehicle.moving"),
        ("bicycle", "cycle.without_rider", "cycle.with_rider"),
        ("pedestrian", "pedestrian.standing", "pedestrian.moving"),
        ("barrier", "", ""),
        ("traffic_cone", "", ""),
    ],
)
def test_attributes_follow_the_published_rule(name: str, still: str, moving: str) -> None:
    assert (attribute_of(name, 0.2), attribute_of(name, 0.21)) == (still, moving)


def test_broken_boxes_are_left_out_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    bad = [
        entry(translation=[math.nan, 0.0, 0.0]),
        entry(size=[1.0, 0.0, 1.0]),
        entry(size=[1.0, -1.0, 1.0]),
        entry(velocity=[math.inf, 0.0]),
        entry(detection_score=math.nan),
    ]
    with caplog.at_level(logging.WARNING):
        results, refused = clean({"broken-1": [*bad, entry()], "whole": [entry()]})
    assert refused == Refused(invalid=5, over_limit=0)
    assert {token: len(entries) for token, entries in results.items()} == {
        "broken-1": 1,
        "whole": 1,
    }
    (record,) = caplog.records
    assert record.message == (
        "5 predicted boxes hold NaN or infinity or have no extent and were left out "
        "(first in sample broken-1)"
    )


def test_network_that_puts_out_nan_does_not_stop_the_conversion() -> None:
    boxes = make_boxes(yaw=torch.full((1, 3), math.nan), centre=torch.full((1, 3, 3), math.nan))
    results = to_entries(boxes, torch.eye(4).double()[None], ["a"], CLASSES)
    assert clean(results) == ({"a": []}, Refused(invalid=2))


@pytest.mark.parametrize("num", [500, 501, 2000])
def test_only_the_best_500_boxes_of_a_sample_stay(
    num: int, caplog: pytest.LogCaptureFixture
) -> None:
    results = {f"crowd-{num}": [entry(score=(i * 7919 % num) / num) for i in range(num)]}
    with caplog.at_level(logging.WARNING):
        cleaned, refused = clean(results)
        clean(results)
    scores = [e["detection_score"] for e in cleaned[f"crowd-{num}"]]
    assert sorted(scores) == [i / num for i in range(num - 500, num)]
    assert refused.over_limit == num - 500
    assert len(caplog.records) == (1 if num > 500 else 0)


def test_the_file_is_a_submission(tmp_path) -> None:
    path = write_submission(
        tmp_path / "new" / "results.json",
        {"a": [entry(), entry(size=[0.0, 1.0, 1.0])], "b": []},
        {"use_lidar": True},
    )
    content = json.loads(path.read_text())
    assert content["meta"] == {
        "use_camera": False,
        "use_lidar": True,
        "use_radar": False,
        "use_map": False,
        "use_external": False,
    }
    assert content["results"] == {"a": [entry()], "b": []}
    assert [p.name for p in path.parent.iterdir()] == ["results.json"]


def test_a_submission_is_read_as_it_was_written(tmp_path) -> None:
    results = {"s": [entry(), entry(attribute_name=""), entry(translation=[math.nan, 0, 0])]}
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"meta": {}, "results": results}))
    assert read_submission(path)["s"][:2] == results["s"][:2]
    assert clean(read_submission(path))[1] == Refused(invalid=1)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"sample_token": "t"}, "whose sample_token is 't'"),
        ({"translation": [1.0, 2.0]}, "whose translation is [1.0, 2.0] and not 3 numbers"),
        ({"velocity": [0.0, "fast"]}, 'whose velocity is [0.0, "fast"] and not 2 numbers'),
        ({"rotation": None}, "whose rotation is null and not 4 numbers"),
        ({"size": 3.0}, "whose size is 3.0 and not 3 numbers"),
        ({"detection_score": "high"}, "whose detection_score is 'high' and no number"),
        ({"detection_name": "tram"}, "whose detection_name is 'tram', which is no nuScenes class"),
        (
            {"detection_name": ["car"]},
            "whose detection_name is ['car'], which is no nuScenes class",
        ),
        (
            {"attribute_name": "vehicle.fast"},
            "whose attribute_name is 'vehicle.fast', which nuScenes does not have",
        ),
    ],
)
def test_a_wrong_value_is_named_with_sample_and_field(tmp_path, change, sentence: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"results": {"s": [entry(), entry(**change)]}}))
    with pytest.raises(InputError) as error:
        read_submission(path)
    assert str(error.value) == (
        f"{path} has a box in sample s {sentence}; write it in the nuScenes detection format"
    )


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({"results": {"s": [{"size": [1, 2, 3]}]}}, "box in sample s without sample_token, transl"),
        ({"results": {"s": ["car"]}}, 'box in sample s that is "car" and no object'),
        ({"results": {"s": 3}}, "is no nuScenes submission"),
        ({"results": []}, "is no nuScenes submission"),
        ([], "is no nuScenes submission"),
    ],
)
def test_what_is_no_submission_is_refused(tmp_path, content, sentence: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=sentence):
        read_submission(path)
    with pytest.raises(InputError, match="cannot be read"):
        read_submission(tmp_path / "absent.json")
