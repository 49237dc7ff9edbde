"""Boxes, submission, cameras and CAN bus against published code (fixture G_nuscenes_format).

The fixture was made by mmdetection3d 0.17.1 and BEVFormer; its boxes are in their *legacy* layout
``[x, y, z_bottom, w, l, h, yaw_legacy, vx, vy]`` with ``yaw_legacy = -yaw - pi / 2``.
"""

import json
import math
import os
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.spatial.transform import Rotation
from torch import Tensor

from bev_lightning.data.nuscenes.can_bus import can_bus_vectors
from bev_lightning.data.nuscenes.sample import can_bus_change
from bev_lightning.metrics.submission import to_entries
from bev_lightning.structures.boxes import Boxes3D
from bev_lightning.structures.geometry import make_transform, wrap_angle

FOLDER = Path(os.environ.get("BEV_PARITY_DIR", "")) / "G_nuscenes_format"
pytestmark = pytest.mark.skipif(
    not (FOLDER / "config.json").is_file(),
    reason="BEV_PARITY_DIR names no folder of parity fixtures",
)
SAMPLES = ("s0", "s1", "s2")
UNKNOWN_VELOCITY_ROW = 3
"""The fixture made this annotation's velocity NaN after the inputs had been stored."""
DROPPED_ROW = {"ann_valid1": 7, "ann_valid0": 5}
"""The annotation each of the two validity rules leaves out (flags that the fixture does not
hold)."""

TESTED = {
    *(
        f"{s}/{name}"
        for s in SAMPLES
        for name in (
            "info_gt_boxes",
            "info_gt_velocity",
            "pred_corners",
            "pred_bev_xywhr",
            "pred_gravity_center",
            "pred_yaw_nuscenes",
            "pred_nusc_box_lidar_corners",
            "ann_valid1/gt_bboxes_3d",
            "ann_valid1/gt_labels_3d",
            "ann_valid0/gt_bboxes_3d",
            "ann_valid0/gt_labels_3d",
        )
    ),
    "bevformer/f0/lidar2img",
    *(
        f"bevformer/f{i}/{name}"
        for i in range(5)
        for name in ("can_bus_abs", "can_bus_delta", "prev_bev_exists")
    ),
}
ELSEWHERE = {
    # The box code of BEVFormer's head.
    "normalize_bbox_s0",
    "denormalize_bbox_s0",
}
"""Outputs of parts that this file does not speak for."""


@lru_cache
def load(name: str) -> Any:
    path = FOLDER / name
    return json.loads(path.read_text()) if path.suffix == ".json" else dict(np.load(path))


def read(name: str) -> Tensor:
    return torch.from_numpy(np.asarray(load("inputs.npz")[name]))


def want(name: str) -> Tensor:
    return torch.from_numpy(np.asarray(load("outputs.npz")[name]))


def quaternion_to_rotation(quaternion: Tensor) -> Tensor:
    """``(..., 3, 3)`` of quaternions w, x, y, z."""
    return torch.from_numpy(Rotation.from_quat(quaternion.roll(-1, -1).numpy()).as_matrix())


def pose(prefix: str, rotation: str = "rotation") -> Tensor:
    return make_transform(
        quaternion_to_rotation(read(f"{prefix}_{rotation}")), read(f"{prefix}_translation")
    )


def global_from_lidar(sample: str) -> Tensor:
    return pose(f"{sample}/ego2global") @ pose(f"{sample}/lidar2ego")


def predictions(sample: str, dtype: torch.dtype = torch.float32) -> Boxes3D:
    """The fixture's predictions ``(40,)`` in our layout."""
    legacy = read(f"{sample}/pred_boxes_bottom_center").to(dtype)
    return Boxes3D(
        centre=legacy[:, :3] + legacy[:, 5:6] * legacy.new_tensor([0.0, 0.0, 0.5]),
        size=legacy[:, [4, 3, 5]],
        yaw=wrap_angle(-legacy[:, 6] - math.pi / 2),
        velocity=legacy[:, 7:],
        label=read(f"{sample}/pred_labels"),
        valid=torch.ones(len(legacy), dtype=torch.bool),
        score=read(f"{sample}/pred_scores"),
    )


def annotations(sample: str) -> Boxes3D:
    """The fixture's annotations ``(14,)`` in the model frame, float64."""
    rotation = quaternion_to_rotation(read(f"{sample}/gt_global_quat_wxyz"))
    velocity = read(f"{sample}/gt_global_velocity").clone()
    velocity[UNKNOWN_VELOCITY_ROW] = math.nan
    boxes = Boxes3D(
        centre=read(f"{sample}/gt_global_center"),
        size=read(f"{sample}/gt_global_wlh")[:, [1, 0, 2]],
        yaw=torch.atan2(rotation[:, 1, 0], rotation[:, 0, 0]),
        velocity=velocity,
        label=read(f"{sample}/gt_label"),
        valid=torch.ones(len(rotation), dtype=torch.bool),
    )
    return boxes.transform(torch.linalg.inv(global_from_lidar(sample)))


def to_legacy(boxes: Boxes3D) -> Tensor:
    """``[x, y, z_centre, w, l, h, yaw_legacy]``, the angle in (-pi, pi]."""
    yaw = wrap_angle(-boxes.yaw - math.pi / 2)
    return torch.cat([boxes.centre, boxes.size[:, [1, 0, 2]], yaw[:, None]], dim=1)


YAW_ATOL = 1e-3
"""The published preparation takes yaw from pyquaternion's ``yaw_pitch_roll``, which is that of the
box's LEFT axis; the metric, and we, take that of its heading. They differ by half the tilt squared
[rad]."""


def assert_same_boxes(got: Tensor, wanted: Tensor, atol: float, yaw_atol: float) -> None:
    """Compare legacy boxes, the angle modulo a full turn."""
    torch.testing.assert_close(got[:, :6], wanted[:, :6], atol=atol, rtol=1e-6)
    turn = wrap_angle(got[:, 6] - wanted[:, 6])
    torch.testing.assert_close(turn, torch.zeros_like(turn), atol=yaw_atol, rtol=0)


def assert_same_entries(got: dict, wanted: dict, yaw_atol: float = 2e-6) -> None:
    for key in ("sample_token", "detection_name", "attribute_name"):
        assert got[key] == wanted[key]
    assert got["detection_score"] == pytest.approx(wanted["detection_score"], abs=1e-7)
    assert got["translation"] == pytest.approx(wanted["translation"], abs=1e-4)
    assert got["size"] == pytest.approx(wanted["size"], abs=1e-5)
    assert got["velocity"] == pytest.approx(wanted["velocity"], abs=1e-4)
    a, b = np.array(got["rotation"]), np.array(wanted["rotation"])
    np.testing.assert_allclose(a * np.sign(a @ b), b, atol=yaw_atol)  # q and -q are one rotation


def test_every_output_of_the_fixture_has_a_home() -> None:
    assert set(load("outputs.npz")) == TESTED | ELSEWHERE
    assert not TESTED & ELSEWHERE


@pytest.mark.parametrize("sample", SAMPLES)
def test_annotations_reach_the_model_frame_as_published(sample: str) -> None:
    boxes = annotations(sample)
    published = want(f"{sample}/info_gt_boxes")
    assert_same_boxes(to_legacy(boxes), published, atol=1e-6, yaw_atol=YAW_ATOL)
    lidar_from_global = torch.linalg.inv(global_from_lidar(sample))[:3, :3]
    rotation = lidar_from_global @ quaternion_to_rotation(read(f"{sample}/gt_global_quat_wxyz"))
    left_axis = torch.atan2(-rotation[:, 0, 1], rotation[:, 0, 0])
    turn = wrap_angle(-left_axis - math.pi / 2 - published[:, 6])
    torch.testing.assert_close(turn, torch.zeros_like(turn), atol=1e-9, rtol=0)
    torch.testing.assert_close(
        boxes.velocity, want(f"{sample}/info_gt_velocity"), atol=1e-9, rtol=0, equal_nan=True
    )
    assert boxes.velocity[UNKNOWN_VELOCITY_ROW].isnan().all()


@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize("rule", ["ann_valid1", "ann_valid0"])
def test_training_targets_are_the_published_ones(sample: str, rule: str) -> None:
    boxes = annotations(sample)
    keep = torch.arange(boxes.num) != DROPPED_ROW[rule]
    targets = boxes[keep]
    legacy = to_legacy(targets)
    legacy[:, 2] -= targets.size[:, 2] / 2
    published = want(f"{sample}/{rule}/gt_bboxes_3d").double()
    assert_same_boxes(legacy, published[:, :7], atol=1e-5, yaw_atol=YAW_ATOL)
    # We keep NaN to mask the loss; the published code trains towards zero.
    torch.testing.assert_close(targets.velocity.nan_to_num(), published[:, 7:], atol=1e-6, rtol=0)
    assert targets.label.equal(want(f"{sample}/{rule}/gt_labels_3d"))


@pytest.mark.parametrize("sample", SAMPLES)
def test_corners_centres_and_yaw_of_predictions(sample: str) -> None:
    boxes = predictions(sample)
    corners = boxes.corners()
    # Ours: bottom face front left, front right, back right, back left, then the top face.
    # mmdetection3d: (x0 y0 z0), (x0 y0 z1), (x0 y1 z1), (x0 y1 z0), then x1; there x is the width
    # axis, which points left -> right at our yaw, and y the heading axis.
    published = want(f"{sample}/pred_corners")
    order = nearest(published[0], corners[0])
    assert sorted(order) == list(range(8))
    torch.testing.assert_close(corners[:, order], published, atol=2e-5, rtol=0)
    devkit = want(f"{sample}/pred_nusc_box_lidar_corners").float()
    order = nearest(devkit[0], corners[0])
    assert order == [4, 5, 1, 0, 7, 6, 2, 3]  # the devkit: front face first, top left clockwise
    torch.testing.assert_close(corners[:, order], devkit, atol=2e-5, rtol=0)

    torch.testing.assert_close(
        boxes.centre, want(f"{sample}/pred_gravity_center"), atol=1e-6, rtol=0
    )
    turn = wrap_angle(boxes.yaw - want(f"{sample}/pred_yaw_nuscenes"))
    torch.testing.assert_close(turn, torch.zeros_like(turn), atol=1e-6, rtol=0)
    legacy = to_legacy(boxes)
    bev = want(f"{sample}/pred_bev_xywhr")
    torch.testing.assert_close(legacy[:, [0, 1, 3, 4]], bev[:, :4], atol=1e-6, rtol=0)
    turn = wrap_angle(legacy[:, 6] - bev[:, 4])
    torch.testing.assert_close(turn, torch.zeros_like(turn), atol=1e-6, rtol=0)


def nearest(points: Tensor, candidates: Tensor) -> list[int]:
    return torch.cdist(points, candidates).argmin(dim=1).tolist()


@pytest.mark.parametrize("index", range(3))
def test_the_submission_is_the_published_one(index: int) -> None:
    """All that was published comes out; what more comes out is what the published code drops
    itself: boxes beyond their class range, which the evaluator ignores."""
    config = load("config.json")
    sample, token = SAMPLES[index], list(load("results_nusc.json")["results"])[index]
    boxes = predictions(sample)
    batch = Boxes3D.stack([boxes])
    ours = to_entries(batch, global_from_lidar(sample)[None], [token], config["classes"])[token]
    assert len(ours) == 40
    in_ego = boxes.to(dtype=torch.float64).transform(pose(f"{sample}/lidar2ego")).centre
    reach = torch.tensor([config["class_range"][config["classes"][label]] for label in boxes.label])
    kept = (in_ego[:, :2].norm(dim=1) <= reach).nonzero().squeeze(1).tolist()
    published = load("results_nusc.json")["results"][token]
    assert len(kept) == len(published) == (18, 14, 17)[index]
    for i, entry in zip(kept, published, strict=True):
        assert_same_entries(ours[i], entry)


@pytest.mark.parametrize("index", range(3))
def test_annotations_survive_the_round_trip(index: int) -> None:
    sample, token = SAMPLES[index], list(load("gt_roundtrip.json")["results"])[index]
    boxes = annotations(sample)
    keep = torch.arange(boxes.num) != DROPPED_ROW["ann_valid1"]
    batch = Boxes3D.stack([boxes[keep]])
    classes = load("config.json")["classes"]
    ours = to_entries(batch, global_from_lidar(sample)[None], [token], classes)[token]
    published = load("gt_roundtrip.json")["results"][token]
    rows = keep.nonzero().squeeze(1).tolist()
    assert len(ours) == len(published) == len(rows) == 13
    for row, got, entry in zip(rows, ours, published, strict=True):
        assert_same_entries(got, entry, yaw_atol=YAW_ATOL)
        turned = np.array(got["rotation"]) @ read(f"{sample}/gt_global_quat_wxyz")[row].numpy()
        assert abs(turned) == pytest.approx(1.0, abs=5e-4)  # the tilt of the lidar stays in
        assert got["translation"] == pytest.approx(
            read(f"{sample}/gt_global_center")[row].tolist(), abs=1e-9
        )
        assert got["size"] == pytest.approx(
            read(f"{sample}/gt_global_wlh")[row].tolist(), abs=1e-12
        )
        velocity = (
            [0.0, 0.0]
            if row == UNKNOWN_VELOCITY_ROW
            else read(f"{sample}/gt_global_velocity")[row].tolist()
        )
        assert got["velocity"] == pytest.approx(
            velocity, abs=0.01
        )  # the vertical part is lost on the way


def test_camera_matrices_are_the_published_ones() -> None:
    matrices = []
    for camera in load("config.json")["cams"]:
        prefix = f"bevformer/f0/{camera}"
        lidar_from_camera = make_transform(
            read(f"{prefix}/sensor2lidar_rotation"), read(f"{prefix}/sensor2lidar_translation")
        )
        intrinsic = read(f"{prefix}/cam_intrinsic")
        image_from_camera = make_transform(intrinsic, intrinsic.new_zeros(3))
        matrices.append(image_from_camera @ torch.linalg.inv(lidar_from_camera))
    torch.testing.assert_close(
        torch.stack(matrices), want("bevformer/f0/lidar2img"), atol=1e-9, rtol=1e-9
    )


def test_the_can_bus_vector_is_the_published_one() -> None:
    scenes = "AABBB"
    frames: list[Any] = []
    for i in range(5):
        prefix = f"bevformer/f{i}"
        position = read(f"{prefix}/ego2global_translation"), read(f"{prefix}/ego2global_rotation")
        vector = can_bus_vectors(
            torch.cat(position).numpy()[None], read(f"{prefix}/raw_can_bus")[7:16].numpy()[None]
        )[0]
        np.testing.assert_allclose(vector, want(f"{prefix}/can_bus_abs").numpy(), atol=1e-9)
        frames.append(SimpleNamespace(can_bus=vector))
    for i, frame in enumerate(frames):
        previous = frames[i - 1] if i and scenes[i] == scenes[i - 1] else None
        assert bool(want(f"bevformer/f{i}/prev_bev_exists")) == (previous is not None)
        change = can_bus_change(frame, previous)
        published = want(f"bevformer/f{i}/can_bus_delta").numpy()
        np.testing.assert_allclose(change, published, atol=1e-9)
