"""Objects cut out and pasted: database, draw, collisions, points, both loaders."""

import multiprocessing
import os
import pickle
import random
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from bev_lightning.classes import DETECTION_CLASSES
from bev_lightning.data import build_gt_database as ground_truth_writer
from bev_lightning.data.build_gt_database import build_gt_database, gt_database_path
from bev_lightning.data.loaders.torch import TorchLoader, assemble
from bev_lightning.data.nuscenes import build_index
from bev_lightning.data.nuscenes.index import open_index
from bev_lightning.data.samplers import TrainSampler
from bev_lightning.data.samples.frame import FrameSource
from bev_lightning.data.transforms import gt_database as ground_truth
from bev_lightning.data.transforms.augment import Augment
from bev_lightning.data.transforms.gt_database import GroundTruthDatabase
from bev_lightning.data.transforms.gt_sampling import (
    GTSampler,
    GTSampling,
    bev_overlaps,
    points_inside,
)
from bev_lightning.errors import InputError
from bev_lightning.structures import Boxes3D, CameraInput, Inputs, LidarInput

VERSION = "v1.0-mini"
CLASSES = ("car", "pedestrian", "truck")
RANGE = (-40.0, -40.0, -5.0, 40.0, 40.0, 5.0)
LIDAR = LidarInput(RANGE, sweeps=2, min_distance=0.0)
INPUTS = Inputs(lidar=LIDAR)
PASTE = GTSampling({"car": 4, "pedestrian": 3, "truck": 2}, min_points=1)


def boxes_of(rows: list[list[float]]) -> Boxes3D:
    values = torch.tensor(rows)
    return Boxes3D(
        centre=torch.cat([values[:, :2], torch.zeros(len(rows), 1)], 1),
        size=torch.cat([values[:, 2:4], torch.ones(len(rows), 1)], 1),
        yaw=values[:, 4],
        velocity=torch.zeros(len(rows), 2),
        label=torch.zeros(len(rows), dtype=torch.int64),
        valid=torch.ones(len(rows), dtype=torch.bool),
    )


@pytest.fixture
def index(make_tree, tmp_path: Path):
    """Points everywhere in a box of 60 x 60 m would leave the objects empty: each sample's car and
    pedestrian get a cloud of their own."""
    index = open_index(
        make_tree(scenes=(("scene-0061", 3), ("scene-0103", 2))), VERSION, tmp_path / "cache"
    )
    rng = np.random.default_rng(1)
    frames = FrameSource(index, index.tokens, INPUTS, DETECTION_CLASSES)
    for position in range(len(frames)):
        frame = frames.frame(0, position)
        parts = [rng.uniform((-30, -30, -3, 0, 0), (30, 30, 2, 9, 31), (300, 5))]
        targets = frame.batch.targets[0]
        for box in range(targets.num):
            cloud = rng.uniform(-0.5, 0.5, (40 + 10 * position, 5))
            local = cloud[:, :3] * targets.size[box].numpy()
            cos, sin = np.cos(float(targets.yaw[box])), np.sin(float(targets.yaw[box]))
            turn = np.array([[cos, -sin, 0], [sin, cos, 0], [0, 0, 1]])
            cloud[:, :3] = local @ turn.T + targets.centre[box].numpy()
            cloud[:, 3] = 100 + int(targets.label[box])  # the intensity identifies the box
            parts.append(cloud)
        frame.lidar[0].path.write_bytes(np.concatenate(parts).astype(np.float32).tobytes())
    return index


@pytest.fixture
def database(index) -> GroundTruthDatabase:
    return build_gt_database(index, "mini_train", LIDAR)


def source(
    index, database, gt_sampling: GTSampling = PASTE, split: str = "mini_val", **kwargs
) -> FrameSource:
    gt_sampler = GTSampler(gt_sampling, database, CLASSES, seed=7)
    return FrameSource(
        index, index.split(split), INPUTS, CLASSES, seed=7, gt_sampler=gt_sampler, **kwargs
    )


def test_database_holds_the_objects_of_the_split_with_their_points(index, database) -> None:
    assert database.sweeps == 2 and len(database) == 6
    cars = database.rows("car", 1)
    assert [database.sample(int(row)) for row in cars] == [f"scene-0061_{k}" for k in range(3)]
    assert database.rows("car", 55).tolist() == cars[2:].tolist()
    box = database.boxes(cars, CLASSES)
    targets = FrameSource(index, index.split("mini_train"), INPUTS, CLASSES).frame(0, 1)
    targets = targets.batch.targets[0]
    assert torch.equal(box.centre[1], targets.centre[0]) and box.label.tolist() == [0, 0, 0]
    assert torch.equal(box.velocity[1], targets.velocity[0])
    for i, row in enumerate(cars.tolist()):
        points = database.points(row)
        assert len(points) == database.num_points[row] >= 40 + 10 * i
        assert len(points_inside(points, box, i)) == len(points)
        assert (points[:, 3] == 100).sum() == 40 + 10 * i
    again = pickle.loads(pickle.dumps(database))
    np.testing.assert_array_equal(again.points(3), database.points(3))


def test_database_is_kept_and_rebuilt_when_the_tables_change(index, database) -> None:
    path = gt_database_path(index, "mini_train", LIDAR)
    before = path.stat().st_mtime_ns
    assert build_gt_database(index, "mini_train", LIDAR).stamp == database.stamp
    assert path.stat().st_mtime_ns == before
    table = index.root / VERSION / "attribute.json"
    table.write_text(table.read_text() + " ")
    changed = open_index(index.root, VERSION, index.path.parent)
    assert build_gt_database(changed, "mini_train", LIDAR, num_workers=2).stamp != database.stamp
    assert not list(path.parent.glob("*.tmp"))


def cut_until(num_writes: int, index, where: Path) -> None:
    """Run in a child process: it is killed before it would write one more file."""
    replace, left = os.replace, [num_writes]

    def count(source: str, target: Path) -> None:
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
        with where.open("a") as file:
            file.write(f"{Path(target).name}\n")
        replace(source, target)

    os.replace, ground_truth_writer._SAMPLES_PER_PART = count, 1
    build_gt_database(index, "mini_train", LIDAR)


def test_a_killed_database_goes_on_to_the_same_bytes(index, tmp_path: Path) -> None:
    def start(where: str, num_writes: int) -> int | None:
        args = (num_writes, index, tmp_path / where)
        process = multiprocessing.get_context("fork").Process(target=cut_until, args=args)
        process.start()
        process.join()
        return process.exitcode

    assert start("undisturbed", -1) == 0
    path = gt_database_path(index, "mini_train", LIDAR)
    expected, every = path.read_bytes(), (tmp_path / "undisturbed").read_text().split()
    assert every == ["0.arrow", "1.arrow", "2.arrow", "whole.arrow", path.name]
    path.unlink()
    assert start("killed", 1) == start("killed", 0) == start("killed", 2) == -signal.SIGKILL
    assert start("killed", -1) == 0
    assert (tmp_path / "killed").read_text().split() == every  # nothing was written twice
    assert path.read_bytes() == expected and not path.with_suffix(".parts").exists()


def make_both(kill_after_s: float | None, root: Path, cache: Path, where: Path) -> None:
    """Run in a child process: builds index and database, and is killed after some seconds."""
    replace = os.replace

    def note(source: str, target: Path) -> None:
        with where.open("a") as file:
            file.write(f"{Path(target).name}\n")
        replace(source, target)

    os.replace, ground_truth_writer._SAMPLES_PER_PART = note, 1
    build_index._CHUNK_BYTES, build_index._SCENES_PER_PART = 3000, 1
    if kill_after_s is not None:
        timer = threading.Timer(kill_after_s, os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()
    build_gt_database(open_index(root, VERSION, cache), "mini_train", LIDAR)


@pytest.mark.parametrize("seed", range(3))
def test_three_kills_at_any_moments_change_no_byte(make_tree, tmp_path: Path, seed: int) -> None:
    root = make_tree(sweeps=2)

    def start(where: str, kill_after_s: float | None) -> int | None:
        args = (kill_after_s, root, tmp_path / where, tmp_path / f"{where}.txt")
        process = multiprocessing.get_context("fork").Process(target=make_both, args=args)
        process.start()
        process.join()
        return process.exitcode

    began = time.monotonic()
    assert start("undisturbed", None) == 0
    took = time.monotonic() - began
    moments = random.Random(seed)
    ends = [start("killed", moments.uniform(0, took / 2)) for _ in range(3)]
    assert set(ends) <= {-signal.SIGKILL, 0}
    assert start("killed", None) == 0
    expected, written = (
        Counter((tmp_path / f"{where}.txt").read_text().split())
        for where in ("undisturbed", "killed")
    )
    assert set(written) == set(expected)
    assert written.total() <= expected.total() + 3  # the part that a kill cut off, and no more
    one, two = (
        {path.name: path.read_bytes() for path in (tmp_path / where).glob("*.arrow")}
        for where in ("undisturbed", "killed")
    )
    assert one == two and len(one) == 2


def test_a_database_of_another_schema_is_rebuilt(index, monkeypatch) -> None:
    monkeypatch.setattr(ground_truth_writer, "SCHEMA_VERSION", 999)
    monkeypatch.setattr(ground_truth, "SCHEMA_VERSION", 999)
    build_gt_database(index, "mini_train", LIDAR)
    monkeypatch.undo()
    with pytest.raises(InputError, match="schema 999, not 1: start again to rebuild it"):
        ground_truth.GroundTruthDatabase(gt_database_path(index, "mini_train", LIDAR))
    assert len(build_gt_database(index, "mini_train", LIDAR)) == 6


def test_sweeps_are_not_mixed(index, database) -> None:
    fewer = LidarInput(RANGE, sweeps=0, min_distance=0.0)
    with pytest.raises(InputError, match=r"sweeps=2 and the model reads sweeps=0.*sweeps=2"):
        database.check(fewer)
    database.path.rename(gt_database_path(index, "mini_train", fewer))
    with pytest.raises(InputError, match="sweeps=2 and the model reads sweeps=0"):
        build_gt_database(index, "mini_train", fewer)


def test_broken_files_stop_or_are_left_out(index) -> None:
    path = index.root / "samples/LIDAR_TOP/scene-0061_1_LIDAR_TOP_0.pcd.bin"
    path.write_bytes(b"12345")
    with pytest.raises(InputError, match=r"sample scene-0061_\d: .*\(5 bytes\) is cut"):
        build_gt_database(index, "mini_train", LIDAR)
    with pytest.warns(UserWarning, match="the ground-truth database lacks 1 samples"):
        database = build_gt_database(index, "mini_train", LIDAR, on_missing="skip")
    assert len(database) == 4


@pytest.mark.parametrize("seed", range(3))
def test_overlap_of_turned_rectangles(seed: int) -> None:
    import cv2

    rng = np.random.default_rng(seed)
    rows = np.concatenate(
        [rng.uniform(-6, 6, (14, 2)), rng.uniform(1, 5, (14, 2)), rng.uniform(-4, 4, (14, 1))], 1
    )
    boxes = boxes_of(rows.tolist())
    got = bev_overlaps(boxes[:8], boxes)
    for i, j in np.ndindex(got.shape):
        one, other = (
            ((x, y), (w, h), float(np.degrees(a))) for x, y, w, h, a in (rows[i], rows[j])
        )
        kind, _ = cv2.rotatedRectangleIntersection(one, other)
        assert got[i, j] == (kind != cv2.INTERSECT_NONE), (i, j)
    assert bev_overlaps(boxes, Boxes3D.empty(0)).shape == (14, 0)
    touching = boxes_of([[0, 0, 2, 2, 0], [2, 0, 2, 2, 0], [1.9, 0, 2, 2, 0]])
    assert bev_overlaps(touching[:1], touching).tolist() == [[True, False, True]]


@pytest.mark.parametrize("augment", [None, Augment()])
def test_pasted_boxes_stand_free_and_hold_their_points(index, database, augment) -> None:
    frames = source(index, database, augment=augment)
    plain = FrameSource(index, frames.tokens, INPUTS, CLASSES, augment=augment, seed=7)
    num_pasted = 0
    for epoch in range(6):
        frame, without = frames.frame(epoch, 1), plain.frame(epoch, 1)
        own = without.batch.targets[0]
        targets = frame.batch.targets[0]
        assert torch.equal(targets.centre[: own.num], own.centre)  # the scene's own are untouched
        among = bev_overlaps(targets, targets)
        np.fill_diagonal(among, False)
        assert not among.any()
        assert (targets.label == 0).sum() <= 4 and (targets.label == 1).sum() <= 3
        if frame.pasted is None:
            continue
        num_pasted += frame.pasted.boxes.num
        batch = assemble(frame, INPUTS).validate()
        points = batch.points.features[0].numpy()
        for i, row in enumerate(frame.pasted.rows):
            inside = points[points_inside(points, frame.pasted.boxes, i)]
            assert set(inside[:, 4].tolist()) <= {0.0, *np.float32([0.05, 0.1]).tolist()}
            stored = database.points(row)
            # Exactly the object's points, up to those the range cuts: the scene's gave way.
            assert len(inside) <= len(stored)
            if augment is None:
                assert len(inside) == len(stored)
                assert sorted(inside[:, 3]) == sorted(stored[:, 3])
        # Boxes, velocities and points went through one matrix.
        back = torch.linalg.inv(torch.from_numpy(frame.pasted.augmented_from_lidar)).float()
        stored_boxes = database.boxes(frame.pasted.rows, CLASSES)
        restored = frame.pasted.boxes.transform(back)
        torch.testing.assert_close(restored.centre, stored_boxes.centre, atol=1e-3, rtol=0)
        torch.testing.assert_close(restored.velocity, stored_boxes.velocity, equal_nan=True)
        torch.testing.assert_close(restored.size, stored_boxes.size)
        torch.testing.assert_close(restored.yaw.cos(), stored_boxes.yaw.cos(), atol=1e-4, rtol=0)
    assert num_pasted > 0


def test_draws_are_functions_of_seed_epoch_and_position(index, database) -> None:
    def rows(frames: FrameSource, epoch: int) -> list:
        pasted = [frames.frame(epoch, position).pasted for position in (0, 1)]
        return [None if p is None else p.rows for p in pasted]

    wide = Augment(bev_translate_std_m=(0, 0, 0))
    frames = source(index, database, augment=wide)
    drawn = [rows(frames, epoch) for epoch in range(5)]
    again = pickle.loads(pickle.dumps(source(index, database, augment=wide)))
    assert [rows(again, epoch) for epoch in range(5)] == drawn
    assert len({str(d) for d in drawn}) > 1
    # Pasting leaves the augmentation as it is.
    plain = FrameSource(index, frames.tokens, INPUTS, CLASSES, augment=wide, seed=7)
    one, two = frames.frame(2, 1), plain.frame(2, 1)
    np.testing.assert_array_equal(one.lidar[0].lidar_from_sweep, two.lidar[0].lidar_from_sweep)


def test_stop_epoch_ends_pasting(index, database) -> None:
    paste = GTSampling(PASTE.per_class, min_points=1, stop_epoch=3)
    frames = source(index, database, paste)
    assert any(frames.frame(epoch, 0).pasted for epoch in range(3))
    assert not any(frames.frame(epoch, 0).pasted for epoch in range(3, 6))


def test_an_absent_class_and_an_empty_database(index, database) -> None:
    assert GTSampler(PASTE, database, CLASSES, 0).absent == ("truck",)
    assert GTSampler(PASTE, database, ("pedestrian",), 0).absent == ()
    nothing = GTSampling(PASTE.per_class, min_points=1000)
    gt_sampler = GTSampler(nothing, database, CLASSES, 0)
    assert gt_sampler.absent == CLASSES
    assert gt_sampler.sample(0, 0, Boxes3D.empty(0), np.eye(4)) is None


def test_objects_of_own_classes_are_stored_and_pasted(index, make_tree) -> None:
    """One class of cars and pedestrians holds the objects of both."""
    mapping = {"vehicle.car": "mover", "human.pedestrian.adult": "mover"}
    own = open_index(index.root, VERSION, index.path.parent, class_of_category=mapping)
    standard = build_gt_database(index, "mini_train", LIDAR)
    counts = standard.counts(("car", "pedestrian"), 1)
    database = build_gt_database(own, "mini_train", LIDAR, ("mover",))
    assert database.path == standard.path and database.stamp != standard.stamp
    assert database.counts(("mover", "car"), 1) == {"mover": sum(counts.values()), "car": 0}
    assert sum(counts.values()) > 0
    boxes = database.boxes(database.rows("mover", 1), ("box", "mover"))
    assert set(boxes.label.tolist()) == {1}


def test_both_loaders_paste_the_same(index, database) -> None:
    pytest.importorskip("nvidia.dali")
    from bev_lightning.data.loaders.dali import DaliLoader

    frames = source(index, database, augment=Augment())
    sampler = TrainSampler(len(frames), 2, seed=7)
    loaders = TorchLoader(), DaliLoader(num_workers=0)
    for one, two in zip(*(loader.open(frames, sampler, 0, 2) for loader in loaders), strict=True):
        torch.testing.assert_close(one.points.features, two.points.features, atol=1e-4, rtol=1e-5)
        assert torch.equal(one.targets.centre, two.targets.centre)


def test_a_database_of_own_classes_holds_these_alone(index) -> None:
    database = build_gt_database(index, "mini_train", LIDAR, ("kiosk", "pedestrian"))
    assert database.classes == ("kiosk", "pedestrian")
    assert database.counts(("pedestrian", "kiosk", "car"), 1) == {
        "pedestrian": 3,
        "kiosk": 0,
        "car": 0,
    }
    assert database.boxes(database.rows("pedestrian", 1), ("pedestrian",)).label.tolist() == [0] * 3
    subset = build_gt_database(index, "mini_train", LIDAR, ("pedestrian",))
    assert subset.classes == DETECTION_CLASSES and subset.counts(("car",), 1) == {"car": 3}


def test_only_lidar_models_may_paste() -> None:
    assert PASTE.check(INPUTS, CLASSES) is LIDAR
    with pytest.raises(InputError, match=r"this model reads camera.*data.gt_sampling=null"):
        PASTE.check(Inputs(camera=CameraInput((32, 64)), lidar=LIDAR), CLASSES)
    with pytest.raises(InputError, match="reads 2 earlier key frames"):
        PASTE.check(Inputs(lidar=LIDAR, history=2), CLASSES)
    with pytest.raises(InputError, match="has unknown classes unicorn: choose from car"):
        GTSampling({"unicorn": 1}).check(INPUTS, CLASSES)
    GTSampling({"unicorn": 1, "bus": 1}).check(INPUTS, ["unicorn"])
    with pytest.raises(InputError, match="min_points=0"):
        GTSampling({"car": 1}, min_points=0)
