"""Reads and validates the JSON tables of nuScenes.

A table is one JSON list. Small tables become :class:`SmallTables`. The three large ones, with
millions of records, are split between records into chunks; several processes parse a chunk each
into Arrow columns, so that no process ever holds a whole table.

All functions raise InputError, which names file, record and field, where a table is missing or
broken or a token is in no table.
"""

import json
import mmap
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from bev_lightning.data.distortion import CAMERA_MODELS, MAX_COEFFICIENTS, check_camera_model
from bev_lightning.errors import InputError

_Value = TypeVar("_Value")
_Records = Sequence[dict[str, Any]]
# Where one record ends and the next begins. The large tables nest no objects, and their strings are
# tokens and file names; a chunk that is cut elsewhere does not parse, so that it would be noticed.
_BETWEEN_RECORDS = re.compile(rb"\}\s*,\s*\{")
_HEAD, _TAIL, _BLANK = re.compile(rb"\s*\["), re.compile(rb"\]\s*\Z"), re.compile(rb"\s*")
_UNUSUAL_PATH = r"^/|(^|/)\.\.?(/|$)|//|^[^/]*:|/$|^$"
_ANNOTATION_TABLES = ("instance", "sample_annotation")
# What becomes part of a file's name: no separators, no way up.
_PLAIN_NAME = re.compile(r"[^/\\:\0]+")

LARGE_TABLE_FIELDS = {
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
"""Fields that are read of each large table."""


@dataclass(frozen=True)
class TableChunk:
    """Bytes ``start`` .. ``stop - 1`` of a table's file: whole records, separated by commas."""

    path: Path
    start: int
    stop: int


def read_table(folder: Path, name: str, fields: Iterable[str]) -> list[dict[str, Any]]:
    """Read all records of a small table; none where a test set has no annotations."""
    chunks = split_table(folder, name, None)
    return read_records(chunks[0], fields) if chunks else []


def split_table(folder: Path, name: str, chunk_bytes: int | None) -> list[TableChunk]:
    """Split a table into chunks of about ``chunk_bytes`` bytes; None: one chunk."""
    path = folder / f"{name}.json"
    try:
        with open(path, "rb") as file:
            if path.stat().st_size == 0:
                raise _not_json(path, "it is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return _split(path, content, chunk_bytes)
    except FileNotFoundError:
        if folder.name.endswith("-test") and name in _ANNOTATION_TABLES:
            return []
        raise InputError(
            f"the table {path} is missing: download the metadata of {folder.name} again"
        ) from None


def read_records(chunk: TableChunk, fields: Iterable[str]) -> list[dict[str, Any]]:
    """Parse the records of a chunk."""
    with open(chunk.path, "rb") as file:
        file.seek(chunk.start)
        content = b"[" + file.read(chunk.stop - chunk.start) + b"]"
    try:
        records = orjson.loads(content)
    except orjson.JSONDecodeError:
        try:
            records = json.loads(content)  # accepts NaN, which read_numbers reports
        except ValueError as error:
            raise _not_json(chunk.path, f"{error}, counted from byte {chunk.start}") from None
    fields = frozenset(fields)
    for record in records:
        if not isinstance(record, dict) or not fields <= record.keys():
            raise InputError(
                f"the table {chunk.path} has a record that lacks one of {', '.join(fields)}: "
                f"{str(record)[:200]}; download the metadata of {chunk.path.parent.name} again"
            )
    return records


def read_numbers(
    table: str, records: Sequence[dict[str, Any]], field: str, shape: tuple[int, ...]
) -> np.ndarray:
    """A field as ``(N, *shape)`` finite float64."""

    def parse(values: list[Any]) -> np.ndarray | None:
        try:
            numbers = np.array(values, np.float64)
        except (TypeError, ValueError):
            return None
        is_valid = numbers.shape == (len(values), *shape) and np.isfinite(numbers).all()
        return numbers if is_valid else None

    if not records:
        return np.zeros((0, *shape))
    numbers = parse([record[field] for record in records])
    if numbers is None:
        record = next(record for record in records if parse([record[field]]) is None)
        size = " x ".join(map(str, shape))
        what = f"{field} = {record[field]!r} instead of {size} finite numbers"
        raise _invalid(table, record, what)
    return numbers


def read_rotations(table: str, records: Sequence[dict[str, Any]]) -> np.ndarray:
    """``(N, 4)`` quaternions w, x, y, z."""
    rotations = read_numbers(table, records, "rotation", (4,))
    for row in np.flatnonzero(~rotations.any(axis=1)):
        what = "a rotation of four zeros, which is no quaternion"
        raise _invalid(table, records[row], what)
    return rotations


def read_poses(table: str, records: Sequence[dict[str, Any]]) -> np.ndarray:
    """``(N, 7)`` translations [m] and quaternions."""
    translations = read_numbers(table, records, "translation", (3,))
    return np.concatenate([translations, read_rotations(table, records)], axis=1)


def read_integers(table: str, records: Sequence[dict[str, Any]], field: str) -> np.ndarray:
    """``(N,)`` int64, 0 for null."""
    values = [record[field] or 0 for record in records]
    if not set(map(type, values)) <= {int}:
        record = next(record for record in records if type(record[field] or 0) is not int)
        what = f"{field} = {record[field]!r} instead of a whole number"
        raise _invalid(table, record, what)
    return np.array(values, np.int64)


def read_strings(table: str, records: Sequence[dict[str, Any]], field: str) -> pa.Array:
    """``(N,)`` strings, empty for null."""
    try:
        return pa.array([record[field] or "" for record in records], pa.string())
    except (pa.ArrowTypeError, pa.ArrowInvalid):
        raise InputError(
            f"the table {table}.json has a {field} that is not a string; download the metadata "
            f"again"
        ) from None


def read_paths(records: Sequence[dict[str, Any]]) -> pa.Array:
    """``(N,)`` paths of sample_data with forward slashes; none may be empty or outside the root."""
    paths = pc.replace_substring(read_strings("sample_data", records, "filename"), "\\", "/")
    unusual = pc.match_substring_regex(paths, _UNUSUAL_PATH).to_numpy(zero_copy_only=False)
    if not unusual.any():
        return paths
    normalised = paths.to_pylist()
    for row in np.flatnonzero(unusual):
        normalised[row] = _normalise_path(
            normalised[row], records[row]["filename"], records[row]["token"]
        )
    return pa.array(normalised, pa.string())


def _invalid(table: str, record: Mapping[str, Any], what: str) -> InputError:
    return InputError(
        f"the record {record['token']} of {table}.json has {what}; download the metadata again"
    )


def lookup_error(table: str, token: Any) -> InputError:
    """The error for a token that is in no table."""
    return InputError(
        f"a record of {table}.json refers to the token {token!r}, which is in none of the tables; "
        f"download the metadata again"
    )


def check_name(name: str, what: str) -> None:
    """Refuse a name that cannot be part of a file's name."""
    if not _PLAIN_NAME.fullmatch(name) or name in (".", ".."):
        raise InputError(
            f"{what} {name!r} cannot be part of a file's name: remove slashes, colons and dots, or "
            f"download the metadata again"
        )


def fixed_size_lists(values: np.ndarray, kind: pa.DataType) -> pa.Array:
    """``(N, K)`` numbers as an Arrow array of N lists of K."""
    flat = pa.array(np.ascontiguousarray(values).reshape(-1), kind)
    return pa.FixedSizeListArray.from_arrays(flat, values.shape[1])


@dataclass(frozen=True)
class Scene:
    """Samples ``start`` .. ``stop - 1`` of the index."""

    token: str
    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class SmallTables:
    """All tables but sample_data, ego_pose and sample_annotation.

    A sample's number is its row in the index: scene by scene in the tables' order, forward in time.

    Attributes:
        scenes: in the tables' order, those with samples.
        samples: N records of sample.json.
        timestamps: ``(N,)`` int64 [microseconds].
        sample_of_token: numbers; -1 for samples of no scene.
        calibration_of_token: rows of the next five.
        channel: ``(C,)`` int8, number of each calibration's channel.
        ego_from_sensor: ``(C, 7)``.
        intrinsic: ``(C, 9)``, zero for other sensors than cameras.
        camera_model, distortion: ``(C,)`` int8 and ``(C, 8)``, as of :class:`Readings`.
        channels: names in alphabetical order.
        is_camera: ``(len(channels),)``.
        category_of_instance, attribute_of_token: numbers by token.
        categories, attributes: names.
    """

    scenes: tuple[Scene, ...]
    samples: tuple[dict[str, Any], ...]
    timestamps: np.ndarray
    sample_of_token: Mapping[str, int]
    calibration_of_token: Mapping[str, int]
    channel: np.ndarray
    ego_from_sensor: np.ndarray
    intrinsic: np.ndarray
    camera_model: np.ndarray
    distortion: np.ndarray
    channels: tuple[str, ...]
    is_camera: np.ndarray
    category_of_instance: Mapping[str, int]
    categories: tuple[str, ...]
    attribute_of_token: Mapping[str, int]
    attributes: tuple[str, ...]


def read_small_tables(folder: Path) -> SmallTables:
    """Read the small tables of a version's folder."""
    scenes, samples, numbers = _order_samples(folder)
    sensors = {row["token"]: row for row in read_table(folder, "sensor", ("token", "channel"))}
    channels = tuple(sorted({str(sensor["channel"]) for sensor in sensors.values()}))
    calibrations = read_table(
        folder,
        "calibrated_sensor",
        ("token", "sensor_token", "translation", "rotation", "camera_intrinsic"),
    )
    names = [
        _lookup(sensors, row["sensor_token"], "calibrated_sensor")["channel"]
        for row in calibrations
    ]
    is_camera = np.array([name.startswith("CAM") for name in channels])
    camera_model, distortion = _read_camera_models(calibrations)
    categories = read_table(folder, "category", ("token", "name"))
    category = {row["token"]: number for number, row in enumerate(categories)}
    attributes = read_table(folder, "attribute", ("token", "name"))
    return SmallTables(
        scenes=scenes,
        samples=samples,
        timestamps=np.array([sample["timestamp"] for sample in samples], np.int64),
        sample_of_token=numbers,
        calibration_of_token={row["token"]: number for number, row in enumerate(calibrations)},
        channel=np.array([channels.index(name) for name in names], np.int8),
        ego_from_sensor=read_poses("calibrated_sensor", calibrations),
        intrinsic=_read_intrinsics(calibrations, [name.startswith("CAM") for name in names]),
        camera_model=camera_model,
        distortion=distortion,
        channels=channels,
        is_camera=is_camera,
        category_of_instance={
            row["token"]: _lookup(category, row["category_token"], "instance")
            for row in read_table(folder, "instance", ("token", "category_token"))
        },
        categories=tuple(row["name"] for row in categories),
        attribute_of_token={row["token"]: number for number, row in enumerate(attributes)},
        attributes=tuple(row["name"] for row in attributes),
    )


def read_chunk(tables: SmallTables, chunk: TableChunk) -> pa.RecordBatch:
    """Parse a chunk of a large table into the columns that the index needs, sorted by sample.

    Records of one sample stay in the table's order.
    """
    table = chunk.path.stem
    records = read_records(chunk, LARGE_TABLE_FIELDS[table])
    return _COLUMN_READERS[table](tables, records)


def find_rows(wanted: pa.ChunkedArray, tokens: pa.ChunkedArray, table: str) -> np.ndarray:
    """Rows of the wanted tokens among ``tokens``, ``(N,)`` int64; -1 for empty ones."""
    found = pc.fill_null(pc.index_in(wanted, value_set=tokens), -1)
    rows = np.asarray(found.to_numpy(), np.int64)
    missing = np.flatnonzero(rows < 0)
    if len(missing):
        missing = missing[pc.binary_length(wanted.take(pa.array(missing))).to_numpy() > 0]
    if len(missing):
        raise lookup_error(table, wanted[int(missing[0])].as_py())
    return rows


def read_splits(folder: Path, scenes: Sequence[Scene]) -> dict[str, tuple[str, ...]]:
    """Scene names of each split that has scenes here: official splits and those of splits.json."""
    from nuscenes.utils.splits import create_splits_scenes  # imports matplotlib

    names = {scene.name for scene in scenes}
    splits = dict(create_splits_scenes())
    custom = folder / "splits.json"
    if custom.is_file():
        try:
            extra = json.loads(custom.read_text())
        except ValueError as error:
            raise InputError(f"{custom} is not JSON ({error}): fix or remove it") from None
        if not isinstance(extra, dict) or not all(
            isinstance(scenes, list) and all(isinstance(s, str) for s in scenes)
            for scenes in extra.values()
        ):
            raise InputError(
                f'{custom} must read {{"split": ["scene-0001", ...], ...}}: fix or remove it'
            )
        for name in extra:
            check_name(name, f"{custom}: the split")
        splits = {**extra, **splits}
    present = {name: tuple(s for s in scenes if s in names) for name, scenes in splits.items()}
    return {name: scenes for name, scenes in present.items() if scenes}


def _order_samples(
    folder: Path,
) -> tuple[tuple[Scene, ...], tuple[dict[str, Any], ...], dict[str, int]]:
    fields = ("token", "timestamp", "scene_token", "prev", "next")
    records = {row["token"]: row for row in read_table(folder, "sample", fields)}
    numbers = dict.fromkeys(records, -1)
    scenes: list[Scene] = []
    samples: list[dict[str, Any]] = []
    for row in read_table(folder, "scene", ("token", "name", "first_sample_token")):
        check_name(row["name"], "the scene")
        start, token = len(samples), row["first_sample_token"]
        while token:
            sample = _lookup(records, token, "sample")
            if numbers[token] >= 0:
                raise InputError(
                    f"the samples of {row['name']} in {folder / 'sample.json'} form a loop, or "
                    f"reach another scene, at {token}: download the metadata again"
                )
            numbers[token] = len(samples)
            samples.append(sample)
            token = sample["next"]
        if len(samples) > start:
            scenes.append(Scene(row["token"], row["name"], start, len(samples)))
    for sample in samples:
        if type(sample["timestamp"]) is not int:
            what = f"timestamp = {sample['timestamp']!r} instead of whole microseconds"
            raise _invalid("sample", sample, what)
    return tuple(scenes), tuple(samples), numbers


def _read_intrinsics(calibrations: list[dict[str, Any]], is_camera: list[bool]) -> np.ndarray:
    intrinsic = np.zeros((len(calibrations), 9))
    rows = np.flatnonzero(is_camera)
    cameras = [calibrations[row] for row in rows]
    matrices = read_numbers("calibrated_sensor", cameras, "camera_intrinsic", (3, 3))
    for record, matrix in zip(cameras, matrices, strict=True):
        if np.linalg.det(matrix) == 0:
            what = f"a camera_intrinsic that cannot be inverted: {matrix.tolist()}"
            raise _invalid("calibrated_sensor", record, what)
    intrinsic[rows] = matrices.reshape(-1, 9)
    return intrinsic


def _read_camera_models(calibrations: list[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """Camera model and distortion of each calibration, from the optional fields ``camera_model``
    and ``camera_distortion`` (nuImages' name). nuScenes has neither: its images are rectified."""
    camera_model = np.zeros(len(calibrations), np.int8)
    distortion = np.zeros((len(calibrations), MAX_COEFFICIENTS))
    for row, record in enumerate(calibrations):
        given = record.get("camera_distortion") or []
        if not given and not record.get("camera_model"):
            continue
        model = record.get("camera_model") or "brown_conrady"
        where = f"the record {record['token']} of calibrated_sensor.json"
        check_camera_model(model, len(given), where)
        camera_model[row] = list(CAMERA_MODELS).index(model)
        distortion[row, : len(given)] = read_numbers(
            "calibrated_sensor", [record], "camera_distortion", (len(given),)
        )
    return camera_model, distortion


def _lookup(rows: Mapping[str, _Value], token: str, table: str) -> _Value:
    try:
        return rows[token]
    except (KeyError, TypeError):
        raise lookup_error(table, token) from None


def _read_ego_poses(tables: SmallTables, records: _Records) -> pa.RecordBatch:
    columns = {
        "token": read_strings("ego_pose", records, "token"),
        "pose": fixed_size_lists(read_poses("ego_pose", records), pa.float64()),
    }
    return pa.RecordBatch.from_pydict(columns)


def _read_readings(tables: SmallTables, records: _Records) -> pa.RecordBatch:
    table = "sample_data"
    calibration = _lookup_numbers(
        tables.calibration_of_token, records, "calibrated_sensor_token", table
    )
    camera = tables.is_camera[tables.channel[calibration]]
    key = np.array([bool(record["is_key_frame"]) for record in records], bool)
    sample = _lookup_numbers(tables.sample_of_token, records, "sample_token", table)
    # Camera sweeps, a third of all records, are not read by any model.
    rows = np.flatnonzero((key | ~camera) & (sample >= 0))
    rows = rows[np.argsort(sample[rows], kind="stable")]
    kept = [records[row] for row in rows]
    size = np.stack([read_integers(table, kept, name) for name in ("height", "width")], axis=1)
    previous = read_strings(table, kept, "prev")
    columns = {
        "sample": pa.array(sample[rows], pa.int32()),
        "calibration": pa.array(calibration[rows], pa.int32()),
        "key": pa.array(key[rows]),
        "token": read_strings(table, kept, "token"),
        "previous": pc.if_else(pa.array(camera[rows]), "", previous),
        "ego_pose": read_strings(table, kept, "ego_pose_token"),
        "path": read_paths(kept),
        "timestamp": pa.array(read_integers(table, kept, "timestamp")),
        "size": fixed_size_lists(size, pa.int32()),
    }
    return pa.RecordBatch.from_pydict(columns)


def _read_boxes(tables: SmallTables, records: _Records) -> pa.RecordBatch:
    table = "sample_annotation"
    sample = _lookup_numbers(tables.sample_of_token, records, "sample_token", table)
    rows = np.flatnonzero(sample >= 0)
    rows = rows[np.argsort(sample[rows], kind="stable")]
    kept = [records[row] for row in rows]
    size = read_numbers(table, kept, "size", (3,))
    for row in np.flatnonzero(~(size > 0).all(axis=1)):
        what = f"the size {size[row].tolist()}, which must be positive"
        raise _invalid(table, kept[row], what)
    attributes = [record["attribute_tokens"] for record in kept]
    try:
        attribute = [_attribute_number(tables.attribute_of_token, tokens) for tokens in attributes]
        visibility = [int(record["visibility_token"] or 0) for record in kept]
    except KeyError as error:
        raise lookup_error(table, error.args[0]) from None
    except (TypeError, ValueError) as error:
        raise InputError(
            f"a record of {table}.json has a broken attribute_tokens or visibility_token "
            f"({error}); download the metadata again"
        ) from None
    category = _lookup_numbers(tables.category_of_instance, kept, "instance_token", table)
    columns = {
        "sample": pa.array(sample[rows], pa.int32()),
        "token": read_strings(table, kept, "token"),
        "previous": read_strings(table, kept, "prev"),
        "next": read_strings(table, kept, "next"),
        "instance": read_strings(table, kept, "instance_token"),
        "category": pa.array(category, pa.int16()),
        "attribute": pa.array(attribute, pa.int16()),
        "centre": fixed_size_lists(read_numbers(table, kept, "translation", (3,)), pa.float64()),
        # nuScenes stores width, length, height
        "size": fixed_size_lists(size[:, [1, 0, 2]], pa.float64()),
        "rotation": fixed_size_lists(read_rotations(table, kept), pa.float64()),
        "num_lidar_pts": pa.array(read_integers(table, kept, "num_lidar_pts"), pa.int32()),
        "num_radar_pts": pa.array(read_integers(table, kept, "num_radar_pts"), pa.int32()),
        "visibility": pa.array(visibility, pa.int8()),
    }
    return pa.RecordBatch.from_pydict(columns)


_COLUMN_READERS: dict[str, Callable[[SmallTables, _Records], pa.RecordBatch]] = {
    "ego_pose": _read_ego_poses,
    "sample_data": _read_readings,
    "sample_annotation": _read_boxes,
}


def _attribute_number(numbers: Mapping[str, int], tokens: Sequence[str]) -> int:
    """Number of a box's attribute; -1 for none and -2 for several, as in the index's schema."""
    known = [numbers[token] for token in tokens or ()]
    return -2 if len(known) > 1 else known[0] if known else -1


def _lookup_numbers(
    numbers: Mapping[str, int], records: _Records, field: str, table: str
) -> np.ndarray:
    try:
        return np.array([numbers[record[field]] for record in records], np.int64)
    except (KeyError, TypeError):
        tokens = (record[field] for record in records)
        missing = next(t for t in tokens if not isinstance(t, str) or t not in numbers)
        raise lookup_error(table, missing) from None


def _normalise_path(path: str, filename: Any, token: str) -> str:
    pure = PurePosixPath(path)
    if not pure.parts:
        raise InputError(
            f"sample_data {token} has filename = {filename!r} instead of the path of a file; "
            f"download the metadata again"
        )
    if pure.is_absolute() or ".." in pure.parts or ":" in pure.parts[0]:
        raise InputError(
            f"sample_data {token} has filename = {filename!r}, which lies outside data.root: use "
            f"paths below data.root"
        )
    return str(pure)


def _split(path: Path, content: mmap.mmap, chunk_bytes: int | None) -> list[TableChunk]:
    head = _HEAD.match(content)
    if head is None:
        try:
            json.loads(content[:])
        except ValueError as error:
            raise _not_json(path, error) from None
        raise InputError(
            f"the table {path} holds no list of records: download the metadata of "
            f"{path.parent.name} again"
        )
    tail = _TAIL.search(content, max(head.end(), len(content) - (1 << 16)))
    if tail is None:
        raise _not_json(path, "its end is missing")
    start, stop = head.end(), tail.start()
    if _BLANK.fullmatch(content, start, stop):
        return []
    chunks = []
    while chunk_bytes is not None and stop - start > chunk_bytes:
        between = _BETWEEN_RECORDS.search(content, start + chunk_bytes, stop)
        if between is None:
            break
        chunks.append(TableChunk(path, start, between.start() + 1))
        start = between.end() - 1
    return [*chunks, TableChunk(path, start, stop)]


def _not_json(path: Path, error: object) -> InputError:
    return InputError(
        f"the table {path} ({path.stat().st_size} bytes) is not JSON ({error}): download the "
        f"metadata of {path.parent.name} again"
    )
