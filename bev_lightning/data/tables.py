"""The nuScenes tables, read through the devkit, as one :class:`Sample` per key frame.

Importing this is slow (the devkit imports matplotlib and scikit-learn), so it happens only where an
index is made.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from nuscenes.eval.detection.utils import category_to_detection_name
from nuscenes.nuscenes import NuScenes
from nuscenes.utils.splits import create_splits_scenes

from bev_lightning.data.sample import (
    LIDAR,
    MAX_SWEEPS,
    Annotations,
    Readings,
    Sample,
    pose_to_transform,
)
from bev_lightning.errors import InputError

_TABLES = (
    "category",
    "attribute",
    "visibility",
    "instance",
    "sensor",
    "calibrated_sensor",
    "ego_pose",
    "log",
    "scene",
    "sample",
    "sample_data",
    "sample_annotation",
    "map",
)
_CAN_READINGS = ("accel", "rotation_rate", "vel")
_GRAVITY = 9.81


class Tables(NuScenes):
    """The devkit's tables and reverse indexes, without its map masks: those would need files that
    detection does not, and a partial download lacks."""

    def __init__(self, root: Path, version: str) -> None:
        self.version = version
        self.dataroot = str(root)
        self.verbose = False
        self.table_names = list(_TABLES)
        for name in _TABLES:
            path = root / version / f"{name}.json"
            try:
                setattr(self, name, self.__load_table__(name))
            except FileNotFoundError:
                raise InputError(
                    f"the table {path} is missing: download the metadata of {version} again"
                ) from None
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise InputError(
                    f"the table {path} ({path.stat().st_size} bytes) is not JSON ({error}): "
                    f"download the metadata of {version} again"
                ) from None
            if not isinstance(getattr(self, name), list):
                raise InputError(
                    f"the table {path} holds no list of records: download the metadata of "
                    f"{version} again"
                )
        if not self.map:
            raise InputError(
                f"the table {root / version / 'map.json'} is empty: download the metadata again"
            )
        try:
            self.__make_reverse_index__(False)
        except KeyError as error:
            raise InputError(
                f"the tables in {root / version} do not fit together: token {error} is referred "
                f"to and is "
                f"in none of them; download the metadata again"
            ) from None


def read_splits(tables: Tables) -> dict[str, tuple[str, ...]]:
    """Scene names of every split that has scenes here: the official ones, then the version folder's
    splits.json.

    Raises:
        InputError: splits.json is not an object of lists of scene names.
    """
    names = {scene["name"] for scene in tables.scene}
    splits = dict(create_splits_scenes())
    custom = Path(tables.dataroot) / tables.version / "splits.json"
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
        splits = {**extra, **splits}
    present = {name: tuple(s for s in scenes if s in names) for name, scenes in splits.items()}
    return {name: scenes for name, scenes in present.items() if scenes}


def read_samples(tables: Tables, can_bus: Path) -> Iterator[Sample]:
    """Every key frame, scene by scene in the tables' order and forward in time.

    Args:
        can_bus: the folder of CAN bus files; may be absent, wholly or for some scenes.

    Raises:
        InputError: a foreign key leads nowhere, a path leaves the root, or a sample has no
        LIDAR_TOP record.
    """
    for scene in tables.scene:
        messages = read_can_bus(can_bus / f"{scene['name']}_pose.json")
        try:
            tokens, token = [], scene["first_sample_token"]
            while token:
                tokens.append(token)
                token = tables.get("sample", token)["next"]
            yield from _read_scene(tables, scene, tokens, messages)
        except KeyError as error:
            raise InputError(
                f"{scene['name']}: token {error} is referred to and is in no table of "
                f"{tables.table_root}; download the metadata again"
            ) from None


def read_can_bus(path: Path) -> list[dict[str, Any]]:
    """The pose messages of a scene, empty where there is no file. Raises InputError on a broken
    one."""
    if not path.is_file():
        return []
    try:
        messages: list[dict[str, Any]] = json.loads(path.read_text())
        for message in messages:
            message["utime"], *(message[key] for key in _CAN_READINGS)
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"the CAN bus file {path} ({path.stat().st_size} bytes) cannot be read ({error!r}): "
            f"download it again, or remove it to derive the motion from the ego poses"
        ) from None
    return messages


def _read_scene(
    tables: Tables, scene: dict[str, Any], tokens: list[str], messages: list[dict[str, Any]]
) -> Iterator[Sample]:
    records = [tables.get("sample", token) for token in tokens]
    poses, times = [], []
    for record in records:
        if LIDAR not in record["data"]:
            raise InputError(
                f"sample {record['token']} of {scene['name']} has no {LIDAR} record in "
                f"sample_data.json, "
                f"which gives the reference frame: add the record with its pose and calibration "
                f"(its file "
                f"may be absent for a model without lidar)"
            )
        reading = tables.get("sample_data", record["data"][LIDAR])
        pose = tables.get("ego_pose", reading["ego_pose_token"])
        poses.append(_pose("ego_pose", pose))
        times.append(reading["timestamp"] * 1e-6)
    derived = None if messages else derive_motion(np.stack(poses), np.array(times))
    for number, record in enumerate(records):
        motion = (
            derived[number] if derived is not None else _measured(messages, record["timestamp"])
        )
        yield Sample(
            token=record["token"],
            scene_token=scene["token"],
            scene_name=scene["name"],
            timestamp=record["timestamp"],
            previous=record["prev"],
            next=record["next"],
            readings=_readings(tables, record),
            annotations=_annotations(tables, record["anns"]),
            can_bus=_can_bus(poses[number], motion),
            from_can_bus=bool(messages),
        )


def _readings(tables: Tables, record: dict[str, Any]) -> Readings:
    rows: list[tuple[str, int, dict[str, Any]]] = []
    for channel in sorted(record["data"]):
        reading = tables.get("sample_data", record["data"][channel])
        rows.append((channel, 0, reading))
        for depth in range(1, MAX_SWEEPS + 1):
            if channel.startswith("CAM") or not reading["prev"]:
                break
            reading = tables.get("sample_data", reading["prev"])
            rows.append((channel, depth, reading))
    calibrations = [tables.get("calibrated_sensor", r["calibrated_sensor_token"]) for *_, r in rows]
    poses = [tables.get("ego_pose", r["ego_pose_token"]) for *_, r in rows]
    return Readings(
        channel=tuple(channel for channel, *_ in rows),
        depth=np.array([depth for _, depth, _ in rows], dtype=np.int64),
        token=tuple(r["token"] for *_, r in rows),
        path=tuple(_relative(r["filename"], r["token"]) for *_, r in rows),
        timestamp=np.array([r["timestamp"] for *_, r in rows], dtype=np.int64),
        ego_from_sensor=np.stack([_pose("calibrated_sensor", c) for c in calibrations]),
        global_from_ego=np.stack([_pose("ego_pose", p) for p in poses]),
        intrinsic=np.stack(
            [
                _intrinsic(c) if channel.startswith("CAM") else np.zeros((3, 3))
                for c, (channel, *_) in zip(calibrations, rows, strict=True)
            ]
        ),
        size=np.array([[r["height"] or 0, r["width"] or 0] for *_, r in rows], dtype=np.int64),
    )


def _numbers(table: str, record: dict[str, Any], field: str, shape: tuple[int, ...]) -> np.ndarray:
    """The finite float64 numbers of a record's field; raises InputError where it holds others."""
    try:
        numbers = np.array(record[field], dtype=np.float64)
    except (TypeError, ValueError):
        numbers = np.empty(0)
    if numbers.shape != shape or not np.isfinite(numbers).all():
        size = " x ".join(str(length) for length in shape)
        raise InputError(
            f"the record {record['token']} of {table}.json has {field} = {record[field]!r} where "
            f"{size} finite numbers belong; download the metadata again"
        )
    return numbers


def _rotation(table: str, record: dict[str, Any]) -> np.ndarray:
    quaternion = _numbers(table, record, "rotation", (4,))
    if not np.any(quaternion):
        raise InputError(
            f"the record {record['token']} of {table}.json has a rotation of four zeros, which "
            f"turns nothing; download the metadata again"
        )
    return quaternion


def _pose(table: str, record: dict[str, Any]) -> np.ndarray:
    translation = _numbers(table, record, "translation", (3,))
    return np.concatenate([translation, _rotation(table, record)])


def _intrinsic(calibration: dict[str, Any]) -> np.ndarray:
    matrix = _numbers("calibrated_sensor", calibration, "camera_intrinsic", (3, 3))
    if np.linalg.det(matrix) == 0:
        raise InputError(
            f"the record {calibration['token']} of calibrated_sensor.json has a camera_intrinsic "
            f"that no image can come from: {matrix.tolist()}; download the metadata again"
        )
    return matrix


def _box_size(record: dict[str, Any]) -> np.ndarray:
    size = _numbers("sample_annotation", record, "size", (3,))
    if not (size > 0).all():
        raise InputError(
            f"the record {record['token']} of sample_annotation.json has the size {size.tolist()}, "
            f"which must be positive; download the metadata again"
        )
    return size


def _relative(filename: Any, token: str) -> str:
    """The path with forward slashes. Raises InputError where it is none or leaves the root."""
    path = PurePosixPath(filename.replace("\\", "/")) if isinstance(filename, str) else None
    if path is None or not path.parts:
        raise InputError(
            f"sample_data {token} has filename = {filename!r} where the path of a file belongs; "
            f"download the metadata again"
        )
    if path.is_absolute() or ".." in path.parts or ":" in path.parts[0]:
        raise InputError(
            f"sample_data {token} names the file {filename!r}, which lies outside data.root: "
            f"tables may "
            f"name only files below it"
        )
    return str(path)


def _annotations(tables: Tables, tokens: list[str]) -> Annotations:
    records = [tables.get("sample_annotation", token) for token in tokens]
    num = len(records)
    table = "sample_annotation"
    sizes = np.array([_box_size(r) for r in records]).reshape(num, 3)
    return Annotations(
        token=tuple(tokens),
        instance=tuple(r["instance_token"] for r in records),
        category=tuple(r["category_name"] for r in records),
        detection=tuple(category_to_detection_name(r["category_name"]) or "" for r in records),
        attribute=tuple(
            tables.get("attribute", r["attribute_tokens"][0])["name"]
            if r["attribute_tokens"]
            else ""
            for r in records
        ),
        centre=np.array([_numbers(table, r, "translation", (3,)) for r in records]).reshape(num, 3),
        size=sizes[:, [1, 0, 2]],  # nuScenes stores width, length, height
        rotation=np.array([_rotation(table, r) for r in records]).reshape(num, 4),
        velocity=np.array([_velocity(tables, token) for token in tokens], np.float64).reshape(
            num, 3
        ),
        num_lidar_pts=np.array([r["num_lidar_pts"] for r in records], dtype=np.int64),
        num_radar_pts=np.array([r["num_radar_pts"] for r in records], dtype=np.int64),
        visibility=np.array([int(r["visibility_token"] or 0) for r in records], dtype=np.int64),
    )


def _velocity(tables: Tables, token: str) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):  # two annotations at one time
        velocity = tables.box_velocity(token)
    return velocity if np.isfinite(velocity).all() else np.full(3, np.nan)


def _measured(messages: list[dict[str, Any]], timestamp: int) -> np.ndarray:
    """Acceleration, rotation rate and velocity ``(9,)``, taken as the published BEVFormer takes
    them: from the first message AFTER the key frame (the last one where there is none)."""
    later = next((m for m in messages if m["utime"] > timestamp), messages[-1])
    return np.concatenate([np.asarray(later[key], dtype=np.float64) for key in _CAN_READINGS])


def derive_motion(poses: np.ndarray, times: np.ndarray) -> np.ndarray:
    """What a CAN bus would read, from ego poses ``(T, 7)`` at ``times`` ``(T,)`` [s].

    Returns:
        ``(T, 9)`` acceleration with gravity [m/s^2], rotation rate [rad/s] and velocity [m/s] in
        the ego frame (central differences; zero motion for a single frame).
    """
    motion = np.zeros((len(poses), 9))
    motion[:, 2] = _GRAVITY
    if len(poses) < 2 or (np.diff(times) <= 0).any():
        return motion
    global_from_ego = pose_to_transform(poses)
    yaw = np.unwrap(np.arctan2(global_from_ego[:, 1, 0], global_from_ego[:, 0, 0]))
    velocity = np.gradient(poses[:, :3], times, axis=0)
    acceleration = np.gradient(velocity, times, axis=0) + (0, 0, _GRAVITY)
    ego_from_global = global_from_ego[:, :3, :3].transpose(0, 2, 1)
    motion[:, 0:3] = (ego_from_global @ acceleration[..., None])[..., 0]
    motion[:, 5] = np.gradient(yaw, times)
    motion[:, 6:9] = (ego_from_global @ velocity[..., None])[..., 0]
    return motion


def _can_bus(pose: np.ndarray, motion: np.ndarray) -> np.ndarray:
    matrix = pose_to_transform(pose)
    yaw = math.atan2(matrix[1, 0], matrix[0, 0]) % (2 * math.pi)
    return np.concatenate([pose[:3], np.repeat(pose[3], 4), motion, [yaw, math.degrees(yaw)]])
