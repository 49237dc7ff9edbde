"""Builds the ground-truth database: the lidar points inside each annotated box of a split."""

import hashlib
import json
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import torch

from bev_lightning.atomic_files import lock
from bev_lightning.classes import DETECTION_CLASSES
from bev_lightning.data.loaders.clouds import read_points
from bev_lightning.data.nuscenes.sample import SampleIndex
from bev_lightning.data.resumable_jobs import close_parts, make_parts, open_parts, read_part
from bev_lightning.data.samples.frame import FrameSource
from bev_lightning.data.transforms.gt_database import SCHEMA, SCHEMA_VERSION, GroundTruthDatabase
from bev_lightning.data.transforms.gt_sampling import points_inside
from bev_lightning.errors import InputError
from bev_lightning.structures import Inputs, LidarInput

_SAMPLES_PER_PART = 32
# Beyond the reach of any lidar: the model's range is applied when objects are sampled.
_EVERYWHERE = (-1000.0, -1000.0, -100.0, 1000.0, 1000.0, 100.0)


def build_gt_database(
    index: SampleIndex,
    split: str,
    lidar: LidarInput,
    classes: Sequence[str] = DETECTION_CLASSES,
    on_missing: Literal["error", "skip"] = "error",
    num_workers: int = 0,
) -> GroundTruthDatabase:
    """Open the database of a split; build it first where it is absent or out of date.

    It is stored beside the index, one file for each split and number of sweeps. Several processes
    may call this at once: one builds, the others wait. After a kill, the finished parts are reused.

    Args:
        index: the data set.
        split: the training split; it must share no sample with the evaluation.
        lidar: sweeps and minimum distance of the model's points.
        classes: names of the model's classes. Where all are nuScenes classes, the database holds
            every nuScenes class and serves any choice of them.
        on_missing: refuse samples with missing or unreadable files ("error"), or leave them out
            ("skip").
        num_workers: processes that read files.

    Raises:
        InputError: a file is missing or broken and on_missing is "error", or the database was
            built for another number of sweeps.
    """
    if set(classes) <= set(DETECTION_CLASSES):
        classes = DETECTION_CLASSES
    path = gt_database_path(index, split, lidar)
    tokens = index.split(split)
    stamp = _stamp(index, tokens, lidar, classes)
    database = _open_current(path, stamp, lidar)
    if database is not None:
        return database
    with lock(path.with_suffix(".lock")) as holds_lock:
        # Another process may have built it meanwhile.
        database = _open_current(path, stamp, lidar)
        if database is None:
            _write(path, stamp, index, tokens, lidar, classes, on_missing, num_workers, holds_lock)
            database = GroundTruthDatabase(path)
    return database


def gt_database_path(index: SampleIndex, split: str, lidar: LidarInput) -> Path:
    """Path of the database of a split."""
    name = index.path.stem.removesuffix("-index")
    return index.path.with_name(f"{name}-ground-truth-{split}-{lidar.sweeps}sweeps.arrow")


def _stamp(
    index: SampleIndex, tokens: Sequence[str], lidar: LidarInput, classes: Sequence[str]
) -> str:
    parts = [index.stamp, str(lidar.sweeps), str(lidar.min_distance), *tokens]
    if classes != DETECTION_CLASSES:  # else the hash of databases built before classes were free
        parts += classes
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _open_current(path: Path, stamp: str, lidar: LidarInput) -> GroundTruthDatabase | None:
    try:
        database = GroundTruthDatabase(path)
    except (FileNotFoundError, pa.ArrowInvalid, KeyError, TypeError, InputError):
        return None  # absent, damaged, or of another schema
    database.check(lidar)
    return database if database.stamp == stamp else None


def _write(
    path: Path,
    stamp: str,
    index: SampleIndex,
    tokens: Sequence[str],
    lidar: LidarInput,
    classes: Sequence[str],
    on_missing: Literal["error", "skip"],
    num_workers: int,
    holds_lock: bool,
) -> None:
    source = FrameSource(
        index,
        tokens,
        Inputs(lidar=LidarInput(_EVERYWHERE, lidar.sweeps, 1 << 40, lidar.min_distance)),
        classes,
        on_missing=on_missing,
    )
    # The samples of a part depend on the files that are present.
    present = hashlib.sha256("\n".join([stamp, *source.tokens]).encode()).hexdigest()
    folder = open_parts(path, present, holds_lock)
    jobs = {
        folder / f"{start}.arrow": source.tokens[start : start + _SAMPLES_PER_PART]
        for start in range(0, len(source), _SAMPLES_PER_PART)
    }
    make_parts(partial(_extract_objects, source), jobs, num_workers, "ground-truth database")
    notes = {
        "schema": SCHEMA_VERSION,
        "stamp": stamp,
        "classes": list(classes),
        "sweeps": lidar.sweeps,
        "min_distance": lidar.min_distance,
    }
    schema = SCHEMA.with_metadata({"bev_lightning": json.dumps(notes)})
    skipped = dict(source.dropped)
    for part in jobs:
        skipped.update(json.loads(read_part(part)[0].schema.metadata[b"skipped"]))
    close_parts(list(jobs), schema, folder / "whole.arrow", path)
    if skipped:
        warnings.warn(
            f"the ground-truth database lacks {len(skipped)} samples with missing or unreadable "
            f"files (data.on_missing=skip), first: {next(iter(skipped.values()))}",
            stacklevel=2,
        )


def _extract_objects(whole: FrameSource, tokens: Sequence[str]) -> pa.RecordBatch:
    """Objects of some samples; the metadata ``skipped`` has the error of each unreadable sample."""
    source = whole.with_tokens(tokens)
    columns: dict[str, list[Any]] = {name: [] for name in SCHEMA.names}
    skipped: dict[str, str] = {}
    lidar = source.inputs.lidar
    assert lidar is not None
    for position, token in enumerate(source.tokens):
        frame = source.frame(0, position)
        try:
            points = read_points(frame.lidar, lidar)
        except InputError as error:
            if source.on_missing == "error":
                raise InputError(f"sample {token}: {error}") from None
            skipped[token] = str(error)
            continue
        assert frame.batch.targets is not None
        boxes = frame.batch.targets[0]
        rows = torch.cat([boxes.centre, boxes.size, boxes.yaw[:, None], boxes.velocity], dim=1)
        for box in range(boxes.num):
            inside = points_inside(points, boxes, box)
            if not len(inside):
                continue
            columns["sample"].append(token)
            columns["label"].append(int(boxes.label[box]))
            columns["box"].append(rows[box].numpy())
            columns["num_points"].append(len(inside))
            columns["points"].append(points[inside].reshape(-1))
    schema = SCHEMA.with_metadata({"skipped": json.dumps(skipped)})
    return pa.RecordBatch.from_pydict(columns, schema=schema)
