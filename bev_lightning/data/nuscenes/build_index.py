"""Builds the index file by joining the nuScenes tables, in chunks of scenes.

No torch here: each of the processes that do the work imports this module.
"""

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bev_lightning.data.nuscenes.can_bus import can_bus_vectors, derive_motion, measure_motion
from bev_lightning.data.nuscenes.json_tables import (
    LARGE_TABLE_FIELDS,
    Scene,
    SmallTables,
    find_rows,
    fixed_size_lists,
    lookup_error,
    read_chunk,
    read_small_tables,
    read_splits,
    split_table,
)
from bev_lightning.data.nuscenes.schema import (
    EGO,
    LIDAR,
    MAX_SWEEPS,
    PARTS,
    SCHEMA,
    SCHEMA_VERSION,
)
from bev_lightning.data.resumable_jobs import (
    close_parts,
    make_parts,
    open_parts,
    read_part,
    write_part,
)
from bev_lightning.errors import InputError

_MAX_SECONDS_APART = 1.5  # between the boxes of a velocity; the devkit's limit
_CHUNK_BYTES = 16 << 20
_SCENES_PER_PART = 16
_SMALL = ("attribute", "calibrated_sensor", "category", "instance", "sample", "scene", "sensor")
_TABLES = sorted((*LARGE_TABLE_FIELDS, *_SMALL, "splits"))
_Lists = dict[str, pa.Array]


def stamp_tables(root: Path, version: str, num_workers: int = 0, reference: str = LIDAR) -> str:
    """Hash of the reference and of name, size and modification time of each table and CAN bus file
    that the index is built from."""
    tables = (root / version / f"{name}.json" for name in _TABLES)
    paths = [path for path in tables if path.exists()]
    paths += sorted((root / "can_bus").glob("*_pose.json"))
    with ThreadPoolExecutor(max(1, num_workers)) as pool:
        stats = list(pool.map(os.stat, paths))
    lines = [reference] + [
        f"{path.relative_to(root)} {stat.st_size} {stat.st_mtime_ns}"
        for path, stat in zip(paths, stats, strict=True)
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def write_index(
    path: Path,
    root: Path,
    version: str,
    stamp: str,
    num_workers: int,
    reference: str,
    holds_lock: bool,
) -> None:
    """Build the index file; a killed build continues with the parts that are finished.

    Args:
        path: the Arrow file to write.
        stamp: :func:`stamp_tables` of the tables.
        root, version, num_workers, reference: as of :func:`open_index`.
        holds_lock: as of :func:`bev_lightning.data.resumable_jobs.open_parts`.

    Raises:
        InputError: a table is missing, empty or broken, or changed meanwhile.
    """
    folder, parts = root / version, open_parts(path, stamp, holds_lock)
    tables = read_small_tables(folder)
    if not tables.scenes:
        raise InputError(f"the tables in {folder} hold no sample: download the metadata again")
    splits = read_splits(folder, tables.scenes)
    chunks = {
        name: {
            parts / f"{name}-{number}.arrow": chunk
            for number, chunk in enumerate(split_table(folder, name, _CHUNK_BYTES))
        }
        for name in LARGE_TABLE_FIELDS
    }
    if not chunks["sample_data"]:
        raise InputError(f"{folder / 'sample_data.json'} is empty: download the metadata again")
    jobs = {part: chunk for parts_of in chunks.values() for part, chunk in parts_of.items()}
    make_parts(partial(read_chunk, tables), jobs, num_workers, "reading tables")
    poses = parts / "poses.arrow"
    if not poses.exists():
        join_poses(poses, list(chunks["ego_pose"]), list(chunks["sample_data"]))
    inputs = JoinInputs(
        tables,
        tuple(chunks["sample_data"]),
        tuple(chunks["sample_annotation"]),
        poses,
        root / "can_bus",
        reference,
    )
    starts = range(0, len(tables.scenes), _SCENES_PER_PART)
    scenes = {
        parts / f"scenes-{start}.arrow": (start, start + _SCENES_PER_PART) for start in starts
    }
    make_parts(partial(join_scenes, inputs), scenes, num_workers, "joining scenes")

    measured: dict[str, bool] = {}
    for part in scenes:  # one at a time: mapped pages count as memory too
        names, found = (read_part(part)[0].column(n) for n in ("scene_name", "from_can_bus"))
        measured.update(zip(names.to_pylist(), found.to_pylist(), strict=True))
    notes = {
        "schema": SCHEMA_VERSION,
        "stamp": stamp,
        "version": version,
        "reference": reference,
        "splits": splits,
        "scenes_without_can_bus": [name for name, found in measured.items() if not found],
        "has_distorted_images": bool(tables.camera_model.any()),
        "channels": tables.channels,
        "categories": tables.categories,
        "attributes": tables.attributes,
    }
    if stamp_tables(root, version, num_workers, reference) != stamp:
        raise InputError(f"the tables in {folder} changed while they were read: start again")
    schema = SCHEMA.with_metadata({"bev_lightning": json.dumps(notes)})
    close_parts(list(scenes), schema, parts / "index.arrow", path)


@dataclass(frozen=True)
class JoinInputs:
    """Inputs of the join.

    Attributes:
        tables: the small tables.
        readings, boxes: files of the chunks of sample_data and sample_annotation, in order.
        poses: the file that :func:`join_poses` wrote.
        can_bus: the folder of CAN bus files; may be absent, wholly or for some scenes.
        reference: the channel whose frame is the model's, or ``ego``.
    """

    tables: SmallTables
    readings: tuple[Path, ...]
    boxes: tuple[Path, ...]
    poses: Path
    can_bus: Path
    reference: str


def join_poses(path: Path, ego_poses: list[Path], readings: list[Path]) -> None:
    """Write the ego pose of each reading, one record batch per chunk of readings."""
    chunks = [read_part(part)[0] for part in readings]
    wanted = pa.chunked_array([chunk.column("ego_pose") for chunk in chunks], pa.string())
    values = np.full((len(wanted), 7), np.nan)
    # Chunk by chunk: a hash table of all pose tokens would be the memory peak.
    for part in ego_poses:
        poses = read_part(part)[0]
        found = pc.index_in(wanted, value_set=poses.column("token"))
        rows = np.flatnonzero(found.is_valid().to_numpy())
        matches = found.drop_null().to_numpy()
        values[rows] = _numbers(poses.column("pose")).reshape(-1, 7)[matches]
    for row in np.flatnonzero(np.isnan(values[:, 0])):
        raise lookup_error("sample_data", wanted[int(row)].as_py())
    stops = np.cumsum([chunk.num_rows for chunk in chunks])[:-1]
    batches = [
        pa.RecordBatch.from_pydict({"pose": fixed_size_lists(chunk, pa.float64())})
        for chunk in np.split(values, stops)
    ]
    write_part(path, batches)


def join_scenes(inputs: JoinInputs, scenes: tuple[int, int]) -> pa.RecordBatch:
    """Build the index rows of scenes ``scenes[0]`` .. ``scenes[1] - 1``.

    Raises:
        InputError: a token is in no table or belongs to another scene, or a sample has no
        reading of the reference.
    """
    tables = inputs.tables
    here = tables.scenes[slice(*scenes)]
    first, stop = here[0].start, here[-1].stop
    records = tables.samples[first:stop]
    readings, ego_poses, ego_times = _join_readings(inputs, first, stop)
    can_bus, measured = _read_motion(inputs, here, ego_poses, ego_times)
    columns = {
        "token": [record["token"] for record in records],
        "scene_token": [scene.token for scene in here for _ in range(scene.start, scene.stop)],
        "scene_name": [scene.name for scene in here for _ in range(scene.start, scene.stop)],
        "previous": [record["prev"] or "" for record in records],
        "next": [record["next"] or "" for record in records],
        "timestamp": tables.timestamps[first:stop],
        "from_can_bus": measured,
        "can_bus": fixed_size_lists(can_bus, pa.float64()),
        **readings,
        **_join_boxes(inputs, first, stop),
    }
    return pa.RecordBatch.from_pydict(columns, schema=SCHEMA)


def _join_readings(
    inputs: JoinInputs, first: int, stop: int
) -> tuple[_Lists, np.ndarray, np.ndarray]:
    """Join readings with poses and calibrations.

    Returns:
        the list columns of readings and calibrations; for each sample's reference reading the ego
        pose ``(S, 7)`` and the time ``(S,)`` [s].
    """
    tables, num = inputs.tables, stop - first
    table = _slice(inputs.readings, first, stop, inputs.poses)
    sample = _numbers(table["sample"]) - first
    calibration = _numbers(table["calibration"])
    channel = tables.channel[calibration]
    previous = find_rows(table["previous"], table["token"], "sample_data")

    # chain[s, c, n]: the row of sample s's reading n sweeps before the key frame's; -1 for none.
    chain = np.full((num, len(tables.channels), MAX_SWEEPS + 1), -1)
    keys = np.flatnonzero(_numbers(table["key"]))
    chain[sample[keys], channel[keys], 0] = keys  # of several the last counts
    for number in range(1, MAX_SWEEPS + 1):
        before = chain[..., number - 1]
        chain[..., number] = np.where(before >= 0, previous[before], -1)
    sample_of, channel_of, sweep = np.nonzero(chain >= 0)
    rows = chain[sample_of, channel_of, sweep]
    poses, times = _numbers(table["pose"]).reshape(-1, 7), _numbers(table["timestamp"])
    reference = _find_reference(inputs, chain[..., 0], times, first)

    # Calibrations that a sample's readings share are kept once.
    num_calibrations = len(tables.channel)
    pairs, which = np.unique(sample_of * num_calibrations + calibration[rows], return_inverse=True)
    owners, used = np.divmod(pairs, max(1, num_calibrations))
    starts = _offsets(owners, num)
    taken = table.take(pa.array(rows))
    lists = _to_lists(
        "readings",
        _offsets(sample_of, num),
        {
            "channel": pa.array(channel_of, pa.int8()),
            "sweep": pa.array(sweep, pa.int8()),
            "token": taken["token"],
            "path": taken["path"],
            "timestamp": taken["timestamp"],
            "calibration": pa.array(which - starts[sample_of], pa.int16()),
            "global_from_ego": taken["pose"],
            "size": taken["size"],
        },
    )
    lists |= _to_lists(
        "calibrations",
        starts,
        {
            "ego_from_sensor": fixed_size_lists(tables.ego_from_sensor[used], pa.float64()),
            "intrinsic": fixed_size_lists(tables.intrinsic[used], pa.float64()),
            "camera_model": pa.array(tables.camera_model[used], pa.int8()),
            "distortion": fixed_size_lists(tables.distortion[used], pa.float64()),
        },
    )
    return lists, poses[reference], times[reference] * 1e-6


def _find_reference(
    inputs: JoinInputs, keys: np.ndarray, times: np.ndarray, first: int
) -> np.ndarray:
    """Row ``(S,)`` of each sample's reference reading, given the rows ``(S, C)`` of all channels'
    key frames (-1: none) and the ``times`` [microseconds] of all rows."""
    tables, name = inputs.tables, inputs.reference
    rows = np.full(len(keys), -1)
    if name in tables.channels:
        rows = keys[:, tables.channels.index(name)]
    elif name == EGO and keys.shape[1]:
        apart = np.abs(times[keys] - tables.timestamps[first : first + len(keys), None])
        nearest = np.where(keys >= 0, apart, np.inf).argmin(axis=1)
        rows = keys[np.arange(len(keys)), nearest]
    for row in np.flatnonzero(rows < 0):
        number = first + int(row)
        scene = next(scene.name for scene in tables.scenes if number < scene.stop)
        raise InputError(
            f"sample {tables.samples[number]['token']} of {scene} has no {name} record in "
            f"sample_data.json, which defines the model frame: add the record, or set "
            f"data.sensors.reference to another channel or to {EGO}"
        )
    return rows


def _read_motion(
    inputs: JoinInputs, scenes: tuple[Scene, ...], poses: np.ndarray, times: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """CAN bus vectors ``(S, 18)``, and whether each was measured ``(S,)``."""
    motion, measured = np.zeros((len(poses), 9)), np.zeros(len(poses), bool)
    for scene in scenes:
        rows = slice(scene.start - scenes[0].start, scene.stop - scenes[0].start)
        timestamps = inputs.tables.timestamps[scene.start : scene.stop]
        found = measure_motion(inputs.can_bus / f"{scene.name}_pose.json", timestamps)
        measured[rows] = found is not None
        motion[rows] = derive_motion(poses[rows], times[rows]) if found is None else found
    return can_bus_vectors(poses, motion), measured


def _join_boxes(inputs: JoinInputs, first: int, stop: int) -> _Lists:
    """Join the boxes of the samples and derive their velocities."""
    if not inputs.boxes:
        zero = np.zeros(stop - first + 1, np.int64)
        empty = {name: pa.array([], kind) for name, kind in PARTS["annotations"].items()}
        return _to_lists("annotations", zero, empty)
    table = _slice(inputs.boxes, first, stop)
    sample = _numbers(table["sample"])
    before = find_rows(table["previous"], table["token"], "sample_annotation")
    after = find_rows(table["next"], table["token"], "sample_annotation")
    centre = _numbers(table["centre"]).reshape(-1, 3)
    seconds = 1e-6 * inputs.tables.timestamps[sample]

    # The devkit's rule: from the previous to the next box of the instance, as far as they exist.
    own = np.arange(len(sample))
    start, end = np.where(before >= 0, before, own), np.where(after >= 0, after, own)
    apart = seconds[end] - seconds[start]
    num_around = (before >= 0).astype(int) + (after >= 0)
    with np.errstate(divide="ignore", invalid="ignore"):  # two boxes at one time
        velocity = (centre[end] - centre[start]) / apart[:, None]
    known = (num_around > 0) & (apart <= _MAX_SECONDS_APART * num_around)
    velocity[~known | ~np.isfinite(velocity).all(axis=1)] = np.nan

    values = {name: table[name] for name in PARTS["annotations"] if name != "velocity"}
    values["velocity"] = fixed_size_lists(velocity, pa.float64())
    return _to_lists("annotations", _offsets(sample - first, stop - first), values)


def _slice(parts: tuple[Path, ...], first: int, stop: int, poses: Path | None = None) -> pa.Table:
    """Rows of samples ``first`` .. ``stop - 1`` from all chunks, sorted by sample; those of one
    sample stay in the table's order. ``poses`` adds the column ``pose``."""
    pose_batches = read_part(poses) if poses is not None else None
    slices = []
    for number, part in enumerate(parts):
        batch = read_part(part)[0]
        if pose_batches is not None:
            batch = batch.append_column("pose", pose_batches[number].column("pose"))
        low, high = np.searchsorted(_numbers(batch.column("sample")), [first, stop])
        slices.append(batch.slice(low, high - low))
    table = pa.Table.from_batches(slices).combine_chunks()
    sample = _numbers(table["sample"])
    if (np.diff(sample) >= 0).all():
        return table
    return table.take(pa.array(np.argsort(sample, kind="stable")))


def _numbers(column: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """A numeric column as an array; fixed-size lists are flattened."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if pa.types.is_fixed_size_list(column.type):
        column = column.flatten()
    return column.to_numpy(zero_copy_only=False)


def _offsets(owner: np.ndarray, num: int) -> np.ndarray:
    """List offsets ``(num + 1,)`` of rows sorted by ``owner``."""
    return np.searchsorted(owner, np.arange(num + 1))


def _to_lists(
    part: str, offsets: np.ndarray, columns: dict[str, pa.Array | pa.ChunkedArray]
) -> _Lists:
    lists = {}
    for name, kind in PARTS[part].items():
        values = columns[name]
        if isinstance(values, pa.ChunkedArray):
            values = values.combine_chunks()
        lists[f"{part}.{name}"] = pa.ListArray.from_arrays(
            pa.array(offsets, pa.int32()), values.cast(kind)
        )
    return lists
