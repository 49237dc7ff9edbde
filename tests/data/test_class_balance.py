"""What the training samples hold, and class-balanced sampling."""

from pathlib import Path

import numpy as np

from bev_lightning.data.class_balance import BoxCounts, balance, count_boxes
from bev_lightning.data.nuscenes.index import open_index
from bev_lightning.data.samplers import TrainSampler
from bev_lightning.data.samples.frame import FrameSource
from bev_lightning.data.transforms.augment import Augment
from bev_lightning.structures import Inputs, LidarInput

INPUTS = Inputs(lidar=LidarInput((-20.0, -20.0, -5.0, 20.0, 20.0, 5.0), sweeps=0))
CLASSES = ("car", "truck", "pedestrian", "barrier")


def counts_of(rows: list[list[int]]) -> BoxCounts:
    return BoxCounts(("car", "bus", "truck"), np.array(rows), 0)


def test_boxes_that_are_trained_on_are_counted(make_tree, tmp_path: Path) -> None:
    root = make_tree(scenes=(("scene-0061", 1), ("scene-0103", 2)), empty=[("scene-0103", 1)])
    index = open_index(root, "v1.0-mini", tmp_path / "cache")
    counts = count_boxes(index, index.tokens, CLASSES, min_points=1)
    assert counts.num_boxes.tolist() == [[1, 0, 1, 0], [1, 0, 1, 0], [0, 0, 0, 0]]
    assert counts.num_unknown_velocity == 4  # each box is the only one of its track
    assert counts.warnings() == [
        "no training sample has a box of truck, barrier to train on",
        "training boxes without a known velocity, which is left out of their loss: 4 of 4",
    ]
    assert count_boxes(index, index.tokens, CLASSES, 0).num_boxes[0].tolist() == [1, 0, 1, 1]
    empty = count_boxes(index, index.tokens, ("bus",), 1)
    assert (
        len(empty.warnings()) == 1
        and "has a box to train on: check data.classes" in empty.warnings()[0]
    )
    assert balance(empty, 0) == [0, 1, 2]


def test_rare_classes_are_met_as_often_as_common_ones() -> None:
    rows = [[1, 0, 0]] * 90 + [[2, 1, 0]] * 8 + [[0, 0, 0]] * 50
    chosen = balance(counts_of(rows), seed=1)
    # 106 samples hold a car or a bus, counted once for each: 53 are drawn for each of two classes.
    assert len(chosen) == 106
    held = counts_of(rows).num_boxes[chosen] > 0
    assert held[:, 1].sum() >= 53 and held[:53, 0].all() and held[53:, 1].all()
    assert max(chosen) < 98  # samples without boxes are left out
    assert len(balance(counts_of([[3, 0, 0]] * 7), 0)) == 7
    assert chosen == balance(counts_of(rows), seed=1) != balance(counts_of(rows), seed=2)


def test_repeated_samples_are_augmented_independently(make_tree, tmp_path: Path) -> None:
    index = open_index(make_tree(), "v1.0-mini", tmp_path / "cache")
    frames = FrameSource(index, index.tokens, INPUTS, CLASSES, augment=Augment(), seed=1)
    again = frames.with_tokens([frames.tokens[2]] * 3 + [frames.tokens[1]])
    assert len(again) == 4 and len(frames) == 5
    sampler = TrainSampler(len(again), 4, seed=1, shuffle=False)
    drawn = [again.frame(*item) for item in sampler.batch(0)]
    assert [f.sample_token for f in drawn[:3]] == [frames.tokens[2]] * 3
    matrices = np.stack([f.lidar[0].lidar_from_sweep for f in drawn[:3]])
    assert len(np.unique(matrices[:, 0, 0])) == 3
    # Still knows the frame before, which the selection may leave out.
    assert drawn[3].batch.has_previous.tolist() == [True]
