"""Reads lidar and radar: the reference with numpy, and lidar in one pass with numba.

Files that the fast pass cannot use are read again by the reference, so that both raise the same
errors, which name the file.
"""

from collections.abc import Sequence

import numpy as np
from numba import njit

from bev_lightning.data.nuscenes.sensor_files import (
    load_lidar_file,
    read_lidar_file,
    read_radar_file,
)
from bev_lightning.data.samples.file_sources import LidarSource, RadarSource
from bev_lightning.structures import LidarInput, RadarInput


def read_points(sources: tuple[LidarSource, ...], lidar: LidarInput) -> np.ndarray:
    """Read lidar sweeps into the model frame and crop them to the range, the key frame first.

    Returns:
        ``(P, 5)`` float32 x, y, z [m], intensity, age [s], P <= ``lidar.max_points``.

    Raises:
        InputError: a file is absent, empty, cut or holds NaN or infinity.
    """
    low, high = np.array(lidar.range, np.float32).reshape(2, 3)
    parts, capacity = [], lidar.max_points
    for source in sources:
        raw = read_lidar_file(source.path)
        # Without returns of the ego vehicle, in the sweep's frame as in the devkit.
        points = raw[(np.abs(raw[:, :2]) >= lidar.min_distance).any(axis=1)]
        matrix = source.lidar_from_sweep.astype(np.float32)
        xyz = points[:, :3] @ matrix[:3, :3].T + matrix[:3, 3]
        inside = ((xyz >= low) & (xyz < high)).all(axis=1)
        age = np.full((int(inside.sum()), 1), source.age, np.float32)
        parts.append(np.concatenate([xyz[inside], points[inside, 3:4], age], axis=1)[:capacity])
        capacity -= len(parts[-1])
        if capacity <= 0:
            break
    return np.concatenate(parts) if parts else np.zeros((0, 5), np.float32)


def read_radar(sources: tuple[RadarSource, ...], radar: RadarInput) -> np.ndarray:
    """Read the returns of all radars into the model frame and crop them to the range.

    As by default in the devkit, only valid returns of a known dynamic property and with an
    unambiguous Doppler velocity are kept. Key frames come first.

    Returns:
        ``(P, 8)`` float32 as :class:`Radar` lays them out, P <= ``radar.max_points``.

    Raises:
        InputError: a file is absent or no nuScenes radar file.
    """
    low, high = np.array(radar.range, np.float32).reshape(2, 3)
    parts = [np.zeros((0, 8), np.float32)]
    for source in sources:
        raw = read_radar_file(source.path)
        keep = (raw["invalid_state"] == 0) & (raw["dyn_prop"] <= 6) & (raw["ambig_state"] == 3)
        raw = raw[keep & (raw["dyn_prop"] >= 0)]
        matrix = source.lidar_from_radar.astype(np.float32)
        position = np.stack([raw["x"], raw["y"], raw["z"]], axis=1).astype(np.float32)
        velocity = np.stack([raw["vx_comp"], raw["vy_comp"], np.zeros(len(raw))], axis=1).astype(
            np.float32
        )
        features = np.empty((len(raw), 8), np.float32)
        features[:, :3] = position @ matrix[:3, :3].T + matrix[:3, 3]
        features[:, 3] = raw["rcs"]
        features[:, 4:6] = (velocity @ matrix[:3, :3].T)[:, :2]
        features[:, 6] = source.age
        features[:, 7] = source.sensor
        parts.append(features[((features[:, :3] >= low) & (features[:, :3] < high)).all(axis=1)])
    return np.concatenate(parts)[: radar.max_points]


def read_points_into(sources: Sequence[LidarSource], lidar: LidarInput, out: np.ndarray) -> int:
    """:func:`read_points` in one pass over each file, into ``out``; returns the number of rows.

    Args:
        out: ``(max_points, 5)`` float32 as in ``Points.features``.
    """
    low, high = np.array(lidar.range, np.float32).reshape(2, 3)
    nearest, count = np.float32(lidar.min_distance), 0
    for source in sources:
        raw = load_lidar_file(source.path)
        matrix = np.ascontiguousarray(source.lidar_from_sweep[:3], np.float32)
        age = np.float32(source.age)
        end = append_points(raw, matrix, age, low, high, nearest, out, count)
        if end < 0 or (end == count and not raw.any()):
            # Not finite, near the largest float, or all zero: the reference decides.
            points = read_points((source,), lidar)[: len(out) - count]
            end = count + len(points)
            out[count:end] = points
        count = end
        if count == len(out):
            break
    return count


@njit(cache=True, nogil=True)
def append_points(raw, matrix, age, low, high, nearest, out, count):  # type: ignore[no-untyped-def]
    """Transform, filter and append a file's points ``(P, 5)`` to the first ``count`` rows of
    ``out``. Returns the new count, or -1 if a value is not finite."""
    capacity = len(out)
    for row in range(len(raw)):
        x, y, z = raw[row, 0], raw[row, 1], raw[row, 2]
        if not np.isfinite(x + y + z + raw[row, 3] + raw[row, 4]):
            return -1
        # Without returns of the ego vehicle, in the sweep's frame as in the devkit.
        if count == capacity or (abs(x) < nearest and abs(y) < nearest):
            continue
        u = matrix[0, 0] * x + matrix[0, 1] * y + matrix[0, 2] * z + matrix[0, 3]
        v = matrix[1, 0] * x + matrix[1, 1] * y + matrix[1, 2] * z + matrix[1, 3]
        w = matrix[2, 0] * x + matrix[2, 1] * y + matrix[2, 2] * z + matrix[2, 3]
        if (
            low[0] <= u
            and u < high[0]
            and low[1] <= v
            and v < high[1]
            and low[2] <= w
            and w < high[2]
        ):
            out[count, 0] = u
            out[count, 1] = v
            out[count, 2] = w
            out[count, 3] = raw[row, 3]
            out[count, 4] = age
            count += 1
    return count
