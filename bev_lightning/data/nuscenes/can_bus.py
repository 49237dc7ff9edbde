"""Ego motion: read from CAN bus files, or derived from the ego poses."""

from pathlib import Path

import numpy as np
import orjson
from scipy.spatial.transform import Rotation

from bev_lightning.errors import InputError

_READINGS = ("accel", "rotation_rate", "vel")
_GRAVITY = 9.81


def measure_motion(path: Path, timestamps: np.ndarray) -> np.ndarray | None:
    """Measured motion ``(T, 9)`` at ``timestamps`` ``(T,)`` [microseconds], from a CAN bus pose
    file; None if it is absent or empty.

    As in the published BEVFormer, it is that of the first message AFTER the key frame (of the last
    message where there is none).

    Returns:
        acceleration [m/s^2], rotation rate [rad/s], velocity [m/s].

    Raises:
        InputError: the file is broken.
    """
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        messages = orjson.loads(content)
        if not messages:
            return None
        rows = [[value for key in _READINGS for value in message[key]] for message in messages]
        motion = np.array(rows, np.float64).reshape(len(rows), 9)
        times = np.array([message["utime"] for message in messages], np.int64)
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"the CAN bus file {path} ({len(content)} bytes) cannot be read ({error!r}): "
            f"download it again, or remove it to derive the motion from the ego poses"
        ) from None
    later = times > timestamps[:, None]
    return motion[np.where(later.any(axis=1), later.argmax(axis=1), len(times) - 1)]


def derive_motion(poses: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Derive CAN bus motion from ego poses ``(T, 7)`` at ``times`` ``(T,)`` [s].

    Returns:
        ``(T, 9)`` acceleration with gravity [m/s^2], rotation rate [rad/s] and velocity [m/s] in
        the ego frame (central differences; zero motion for a single frame).
    """
    motion = np.zeros((len(poses), 9))
    motion[:, 2] = _GRAVITY
    if len(poses) < 2 or (np.diff(times) <= 0).any():
        return motion
    rotation = _rotations(poses)
    yaw = np.unwrap(np.arctan2(rotation[:, 1, 0], rotation[:, 0, 0]))
    velocity = np.gradient(poses[:, :3], times, axis=0)
    acceleration = np.gradient(velocity, times, axis=0) + (0, 0, _GRAVITY)
    ego_from_global = rotation.transpose(0, 2, 1)
    motion[:, 0:3] = (ego_from_global @ acceleration[..., None])[..., 0]
    motion[:, 5] = np.gradient(yaw, times)
    motion[:, 6:9] = (ego_from_global @ velocity[..., None])[..., 0]
    return motion


def can_bus_vectors(poses: np.ndarray, motion: np.ndarray) -> np.ndarray:
    """CAN bus vectors ``(T, 18)`` of poses ``(T, 7)`` and motion ``(T, 9)``.

    Layout: :attr:`bev_lightning.data.nuscenes.sample.Sample.can_bus`.
    """
    rotation = _rotations(poses)
    yaw = np.arctan2(rotation[:, 1, 0], rotation[:, 0, 0]) % (2 * np.pi)
    columns = [poses[:, :3], np.repeat(poses[:, 3:4], 4, axis=1), motion]
    return np.concatenate([*columns, np.stack([yaw, np.degrees(yaw)], axis=1)], axis=1)


def _rotations(poses: np.ndarray) -> np.ndarray:
    # Not by structures.geometry: importing torch takes seconds in each process that reads tables.
    return Rotation.from_quat(poses[:, [4, 5, 6, 3]]).as_matrix()
