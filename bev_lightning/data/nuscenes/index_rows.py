"""Joins the tables into the index's rows, some scenes at a time."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bev_lightning.data.nuscenes.can_bus import (
    can_bus_vectors,
    derive_motion,
    measure_motion,
    read_can_bus,
)
from bev_lightning.data.nuscenes.json_tables import refuse_lookup
from bev_lightning.data.nuscenes.large_tables import find_rows, fixed_lists
from bev_lightning.data.nuscenes.metadata import Catalogue, Scene
from bev_lightning.data.nuscenes.schema import EGO, MAX_SWEEPS, PARTS, SCHEMA
from bev_lightning.data.resumable_jobs import read_part, write_part
from bev_lightning.errors import InputError

_MAX_SECONDS_APART = 1.5  # of the boxes that a velocity is taken from, as the devkit has it
_Lists = dict[str, pa.Array]


@dataclass(frozen=True)
class Joined:
    """What the join reads.

    Attributes:
        catalogue: the small tables.
        readings, boxes: files of the pieces of sample_data and sample_annotation, in order.
        poses: the file that :func:`join_poses` wrote.
        can_bus: the folder of CAN bus files; may be absent, wholly or for some scenes.
        reference: the channel that gives the model frame, or ``ego``.
    """

    catalogue: Catalogue
    readings: tuple[Path, ...]
    boxes: tuple[Path, ...]
    poses: Path
    can_bus: Path
    reference: str


def join_poses(path: Path, ego_poses: list[Path], readings: list[Path]) -> None:
    """Write the ego pose of each reading: a batch for each piece of readings, row by row.

    Raises:
        InputError: a reading's pose is not in the table.
    """
    pieces = [read_part(part)[0] for part in readings]
    wanted = pa.chunked_array([piece.column("ego_pose") for piece in pieces], pa.string())
    values = np.full((len(wanted), 7), np.nan)
    # One piece of poses after the other: a hash of all their tokens would be the peak of memory.
    for part in ego_poses:
        poses = read_part(part)[0]
        found = pc.index_in(wanted, value_set=poses.column("token"))
        rows = np.flatnonzero(found.is_valid().to_numpy())
        places = found.drop_null().to_numpy()
        values[rows] = _numbers(poses.column("pose")).reshape(-1, 7)[places]
    for row in np.flatnonzero(np.isnan(values[:, 0])):
        raise refuse_lookup("sample_data", wanted[int(row)].as_py())
    stops = np.cumsum([piece.num_rows for piece in pieces])[:-1]
    batches = [
        pa.RecordBatch.from_pydict({"pose": fixed_lists(part, pa.float64())})
        for part in np.split(values, stops)
    ]
    write_part(path, batches)


def join_scenes(joined: Joined, scenes: tuple[int, int]) -> pa.RecordBatch:
    """The index's rows of scenes ``scenes[0]`` .. ``scenes[1] - 1``.

    Raises:
        InputError: a token leads nowhere or into another scene, or a sample has no record of
        the reference.
    """
    catalogue = joined.catalogue
    here = catalogue.scenes[slice(*scenes)]
    first, stop = here[0].start, here[-1].stop
    records = catalogue.samples[first:stop]
    readings, ego_poses, ego_times = _join_readings(joined, first, stop)
    can_bus, measured = _read_motion(joined, here, ego_poses, ego_times)
    texts = {
        "token": [record["token"] for record in records],
        "scene_token": [scene.token for scene in here for _ in range(scene.start, scene.stop)],
        "scene_name": [scene.name for scene in here for _ in range(scene.start, scene.stop)],
        "previous": [record["prev"] or "" for record in records],
        "next": [record["next"] or "" for record in records],
    }
    columns = {
        **{name: pa.array(values, pa.string()) for name, values in texts.items()},
        "timestamp": pa.array(catalogue.timestamps[first:stop]),
        "from_can_bus": pa.array(measured),
        "can_bus": fixed_lists(can_bus, pa.float64()),
        **readings,
        **_join_boxes(joined, first, stop),
    }
    return pa.RecordBatch.from_pydict(columns, schema=SCHEMA)


def _join_readings(joined: Joined, first: int, stop: int) -> tuple[_Lists, np.ndarray, np.ndarray]:
    """The readings and calibrations of the samples, the ego's pose ``(S, 7)`` at each sample's
    reference, and that one's time ``(S,)`` [s]."""
    catalogue, num = joined.catalogue, stop - first
    table = _slice(joined.readings, first, stop, joined.poses)
    sample = _numbers(table["sample"]) - first
    calibration = _numbers(table["calibration"])
    channel = catalogue.channel[calibration]
    previous = find_rows(table["previous"], table["token"], "sample_data")

    # chain[s, c, d]: the row of sample s's reading d steps before the key frame's; -1 for none.
    chain = np.full((num, len(catalogue.channels), MAX_SWEEPS + 1), -1)
    keys = np.flatnonzero(_numbers(table["key"]))
    chain[sample[keys], channel[keys], 0] = keys  # of several the last counts
    for depth in range(1, MAX_SWEEPS + 1):
        before = chain[..., depth - 1]
        chain[..., depth] = np.where(before >= 0, previous[before], -1)
    owner, lane, steps = np.nonzero(chain >= 0)
    rows = chain[owner, lane, steps]
    poses, times = _numbers(table["pose"]).reshape(-1, 7), _numbers(table["timestamp"])
    reference = _find_reference(joined, chain[..., 0], times, first)

    # Calibrations that a sample's readings share are kept once.
    num_calibrations = len(catalogue.channel)
    pairs, which = np.unique(owner * num_calibrations + calibration[rows], return_inverse=True)
    owners, used = np.divmod(pairs, max(1, num_calibrations))
    starts = _offsets(owners, num)
    taken = table.take(pa.array(rows))
    lists = _to_lists(
        "readings",
        _offsets(owner, num),
        {
            "channel": pa.array(lane, pa.int8()),
            "depth": pa.array(steps, pa.int8()),
            "token": taken["token"],
            "path": taken["path"],
            "timestamp": taken["timestamp"],
            "calibration": pa.array(which - starts[owner], pa.int16()),
            "global_from_ego": taken["pose"],
            "size": taken["size"],
        },
    )
    lists |= _to_lists(
        "calibrations",
        starts,
        {
            "ego_from_sensor": fixed_lists(catalogue.ego_from_sensor[used], pa.float64()),
            "intrinsic": fixed_lists(catalogue.intrinsic[used], pa.float64()),
            "lens": pa.array(catalogue.lens[used], pa.int8()),
            "distortion": fixed_lists(catalogue.distortion[used], pa.float64()),
        },
    )
    return lists, poses[reference], times[reference] * 1e-6


def _find_reference(joined: Joined, keys: np.ndarray, times: np.ndarray, first: int) -> np.ndarray:
    """Rows ``(S,)`` of the readings that give the model frame, among those ``(S, C)`` of all
    channels' key frames; ``times`` [microseconds] by row."""
    catalogue, name = joined.catalogue, joined.reference
    rows = np.full(len(keys), -1)
    if name in catalogue.channels:
        rows = keys[:, catalogue.channels.index(name)]
    elif name == EGO and keys.shape[1]:
        apart = np.abs(times[keys] - catalogue.timestamps[first : first + len(keys), None])
        nearest = np.where(keys >= 0, apart, np.inf).argmin(axis=1)
        rows = keys[np.arange(len(keys)), nearest]
    for lost in np.flatnonzero(rows < 0):
        number = first + int(lost)
        scene = next(scene.name for scene in catalogue.scenes if number < scene.stop)
        raise InputError(
            f"sample {catalogue.samples[number]['token']} of {scene} has no {name} record in "
            f"sample_data.json, which gives the reference frame: add the record with its pose and "
            f"calibration (its file may be absent for a model without that sensor), or set "
            f"data.sensors.reference to another channel or to {EGO}"
        )
    return rows


def _read_motion(
    joined: Joined, scenes: tuple[Scene, ...], poses: np.ndarray, times: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """CAN bus vectors ``(S, 18)``, and which of them were measured ``(S,)``."""
    motion, measured = np.zeros((len(poses), 9)), np.zeros(len(poses), bool)
    for scene in scenes:
        rows = slice(scene.start - scenes[0].start, scene.stop - scenes[0].start)
        messages = read_can_bus(joined.can_bus / f"{scene.name}_pose.json")
        if messages is None:
            motion[rows] = derive_motion(poses[rows], times[rows])
        else:
            timestamps = joined.catalogue.timestamps[scene.start : scene.stop]
            motion[rows] = measure_motion(messages, timestamps)
        measured[rows] = messages is not None
    return can_bus_vectors(poses, motion), measured


def _join_boxes(joined: Joined, first: int, stop: int) -> _Lists:
    if not joined.boxes:
        zero = np.zeros(stop - first + 1, np.int64)
        empty = {name: pa.array([], kind) for name, kind in PARTS["annotations"].items()}
        return _to_lists("annotations", zero, empty)
    table = _slice(joined.boxes, first, stop)
    sample = _numbers(table["sample"])
    own = np.arange(len(sample))
    before = find_rows(table["previous"], table["token"], "sample_annotation")
    after = find_rows(table["next"], table["token"], "sample_annotation")
    centre = _numbers(table["centre"]).reshape(-1, 3)
    seconds = 1e-6 * joined.catalogue.timestamps[sample]

    # As the devkit has it: from the box before to the box after, where there are such.
    start, end = np.where(before >= 0, before, own), np.where(after >= 0, after, own)
    apart = seconds[end] - seconds[start]
    num_around = (before >= 0).astype(int) + (after >= 0)
    with np.errstate(divide="ignore", invalid="ignore"):  # two boxes at one time
        velocity = (centre[end] - centre[start]) / apart[:, None]
    known = (num_around > 0) & (apart <= _MAX_SECONDS_APART * num_around)
    velocity[~known | ~np.isfinite(velocity).all(axis=1)] = np.nan

    values = {name: table[name] for name in PARTS["annotations"] if name != "velocity"}
    values["velocity"] = fixed_lists(velocity, pa.float64())
    return _to_lists("annotations", _offsets(sample - first, stop - first), values)


def _slice(parts: tuple[Path, ...], first: int, stop: int, poses: Path | None = None) -> pa.Table:
    """Rows of the samples ``first`` .. ``stop - 1``, sample by sample, each in the table's
    order."""
    beside = read_part(poses) if poses is not None else None
    slices = []
    for number, part in enumerate(parts):
        batch = read_part(part)[0]
        if beside is not None:
            batch = batch.append_column("pose", beside[number].column("pose"))
        low, high = np.searchsorted(_numbers(batch.column("sample")), [first, stop])
        slices.append(batch.slice(low, high - low))
    table = pa.Table.from_batches(slices).combine_chunks()
    sample = _numbers(table["sample"])
    if (np.diff(sample) >= 0).all():
        return table
    return table.take(pa.array(np.argsort(sample, kind="stable")))


def _numbers(column: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """A column of numbers, or of fixed-size lists of them one after the other."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if pa.types.is_fixed_size_list(column.type):
        column = column.flatten()
    return column.to_numpy(zero_copy_only=False)


def _offsets(owner: np.ndarray, num: int) -> np.ndarray:
    """``(num + 1,)`` where each owner's rows begin; ``owner`` is sorted."""
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
