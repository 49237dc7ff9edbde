"""The three large tables as Arrow columns, piece by piece.

A piece keeps what the index needs, in the order of the samples' numbers, so that a reader of some
scenes takes one slice of each piece; records of one sample stay in the table's order.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bev_lightning.data.nuscenes.json_tables import (
    Piece,
    read_integers,
    read_numbers,
    read_paths,
    read_poses,
    read_records,
    read_rotations,
    read_texts,
    refuse_lookup,
)
from bev_lightning.data.nuscenes.metadata import Catalogue, Scene, check_name
from bev_lightning.errors import InputError

_Records = Sequence[dict[str, Any]]
FIELDS = {
    "ego_pose": ("token", "translation", "rotation"),
    "sample_data": (
        "token",
        "sample_token",
        "ego_pose_token",
        "calibrated_sensor_token",
        "timestamp",
        "is_key_frame",
        "height",
        "width",
        "filename",
        "prev",
    ),
    "sample_annotation": (
        "token",
        "sample_token",
        "instance_token",
        "visibility_token",
        "attribute_tokens",
        "translation",
        "size",
        "rotation",
        "prev",
        "next",
        "num_lidar_pts",
        "num_radar_pts",
    ),
}
"""The large tables, and what is read of their records."""


def read_piece(catalogue: Catalogue, piece: Piece) -> pa.RecordBatch:
    """The columns of a piece of one of the large tables.

    Raises:
        InputError: a record is broken, its token leads nowhere, or its path leaves the root.
    """
    table = piece.path.stem
    records = read_records(piece, FIELDS[table])
    return _READERS[table](catalogue, records)


def find_rows(wanted: pa.ChunkedArray, tokens: pa.ChunkedArray, table: str) -> np.ndarray:
    """BatchSampler of the wanted tokens among the tokens, ``(N,)`` int64; -1 for empty ones.

    Raises:
        InputError: a wanted token is not among them.
    """
    found = pc.fill_null(pc.index_in(wanted, value_set=tokens), -1)
    rows = np.asarray(found.to_numpy(), np.int64)
    lost = np.flatnonzero(rows < 0)
    if len(lost):
        lost = lost[pc.binary_length(wanted.take(pa.array(lost))).to_numpy() > 0]
    if len(lost):
        raise refuse_lookup(table, wanted[int(lost[0])].as_py())
    return rows


def read_splits(folder: Path, scenes: Sequence[Scene]) -> dict[str, tuple[str, ...]]:
    """Scene names of every split that has scenes here: the official ones, then the version folder's
    splits.json.

    Raises:
        InputError: splits.json is not an object of lists of scene names, or a name cannot be part
        of a file's.
    """
    from nuscenes.utils.splits import create_splits_scenes  # imports matplotlib

    names = {scene.name for scene in scenes}
    splits = dict(create_splits_scenes())
    custom = folder / "splits.json"
    if custom.is_file():
        try:
            extra = json.loads(custom.read_text())
        except ValueError as error:
            raise InputError(f"{custom} is not JSON ({error}): mend or remove it") from None
        if not isinstance(extra, dict) or not all(
            isinstance(scenes, list) and all(isinstance(s, str) for s in scenes)
            for scenes in extra.values()
        ):
            raise InputError(
                f'{custom} must read {{"split": ["scene-0001", ...], ...}}: mend or remove it'
            )
        for name in extra:
            check_name(name, f"{custom}: the split")
        splits = {**extra, **splits}
    present = {name: tuple(s for s in scenes if s in names) for name, scenes in splits.items()}
    return {name: scenes for name, scenes in present.items() if scenes}


def name_detections(categories: Sequence[str]) -> list[str]:
    """The detection class of each category, empty for those that detection leaves out."""
    from nuscenes.eval.detection.utils import category_to_detection_name  # imports matplotlib

    return [category_to_detection_name(name) or "" for name in categories]


def _read_ego_poses(catalogue: Catalogue, records: _Records) -> pa.RecordBatch:
    columns = {
        "token": read_texts("ego_pose", records, "token"),
        "pose": fixed_lists(read_poses("ego_pose", records), pa.float64()),
    }
    return pa.RecordBatch.from_pydict(columns)


def _read_readings(catalogue: Catalogue, records: _Records) -> pa.RecordBatch:
    table = "sample_data"
    calibration = _numbers_of(
        catalogue.calibration_of_token, records, "calibrated_sensor_token", table
    )
    camera = catalogue.is_camera[catalogue.channel[calibration]]
    key = np.array([bool(record["is_key_frame"]) for record in records], bool)
    sample = _numbers_of(catalogue.sample_of_token, records, "sample_token", table)
    # Nobody reads cameras between the key frames, which are a third of all records.
    rows = np.flatnonzero((key | ~camera) & (sample >= 0))
    rows = rows[np.argsort(sample[rows], kind="stable")]
    kept = [records[row] for row in rows]
    size = np.stack([read_integers(table, kept, name) for name in ("height", "width")], axis=1)
    previous = read_texts(table, kept, "prev")
    columns = {
        "sample": pa.array(sample[rows], pa.int32()),
        "calibration": pa.array(calibration[rows], pa.int32()),
        "key": pa.array(key[rows]),
        "token": read_texts(table, kept, "token"),
        "previous": pc.if_else(pa.array(camera[rows]), "", previous),
        "ego_pose": read_texts(table, kept, "ego_pose_token"),
        "path": read_paths(kept),
        "timestamp": pa.array(read_integers(table, kept, "timestamp")),
        "size": fixed_lists(size, pa.int32()),
    }
    return pa.RecordBatch.from_pydict(columns)


def _read_boxes(catalogue: Catalogue, records: _Records) -> pa.RecordBatch:
    table = "sample_annotation"
    sample = _numbers_of(catalogue.sample_of_token, records, "sample_token", table)
    rows = np.flatnonzero(sample >= 0)
    rows = rows[np.argsort(sample[rows], kind="stable")]
    kept = [records[row] for row in rows]
    size = read_numbers(table, kept, "size", (3,))
    for row in np.flatnonzero(~(size > 0).all(axis=1)):
        raise InputError(
            f"the record {kept[row]['token']} of {table}.json has the size {size[row].tolist()}, "
            f"which must be positive; download the metadata again"
        )
    attributes = [record["attribute_tokens"] for record in kept]
    try:
        attribute = [catalogue.attribute_of_token[a[0]] if a else -1 for a in attributes]
        visibility = [int(record["visibility_token"] or 0) for record in kept]
    except KeyError as error:
        raise refuse_lookup(table, error.args[0]) from None
    except (TypeError, ValueError) as error:
        raise InputError(
            f"a record of {table}.json has a broken attribute_tokens or visibility_token "
            f"({error}); download the metadata again"
        ) from None
    category = _numbers_of(catalogue.category_of_instance, kept, "instance_token", table)
    columns = {
        "sample": pa.array(sample[rows], pa.int32()),
        "token": read_texts(table, kept, "token"),
        "previous": read_texts(table, kept, "prev"),
        "next": read_texts(table, kept, "next"),
        "instance": read_texts(table, kept, "instance_token"),
        "category": pa.array(category, pa.int16()),
        "attribute": pa.array(attribute, pa.int16()),
        "centre": fixed_lists(read_numbers(table, kept, "translation", (3,)), pa.float64()),
        # nuScenes stores width, length, height
        "size": fixed_lists(size[:, [1, 0, 2]], pa.float64()),
        "rotation": fixed_lists(read_rotations(table, kept), pa.float64()),
        "num_lidar_pts": pa.array(read_integers(table, kept, "num_lidar_pts"), pa.int32()),
        "num_radar_pts": pa.array(read_integers(table, kept, "num_radar_pts"), pa.int32()),
        "visibility": pa.array(visibility, pa.int8()),
    }
    return pa.RecordBatch.from_pydict(columns)


_READERS: dict[str, Callable[[Catalogue, _Records], pa.RecordBatch]] = {
    "ego_pose": _read_ego_poses,
    "sample_data": _read_readings,
    "sample_annotation": _read_boxes,
}


def _numbers_of(
    numbers: Mapping[str, int], records: _Records, field: str, table: str
) -> np.ndarray:
    try:
        return np.array([numbers[record[field]] for record in records], np.int64)
    except (KeyError, TypeError):
        lost = next(r[field] for r in records if not _holds(numbers, r[field]))
        raise refuse_lookup(table, lost) from None


def _holds(numbers: Mapping[str, int], token: object) -> bool:
    return isinstance(token, str) and token in numbers


def fixed_lists(values: np.ndarray, kind: pa.DataType) -> pa.Array:
    """``(N, K)`` numbers as N lists of K."""
    flat = pa.array(np.ascontiguousarray(values).reshape(-1), kind)
    return pa.FixedSizeListArray.from_arrays(flat, values.shape[1])
