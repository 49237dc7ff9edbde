"""Sensor rigs of the synthetic vehicles: cameras, one lidar and five radars, as in nuScenes.

Frames: ego x ahead, y left, z up, on the ground below the rear axle; camera x right, y down, z
along the optical axis; LIDAR_TOP x right, y ahead, z up; radar x ahead of the sensor, y left, z up.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from bev_lightning.data.camera_models import CameraModel

Array = NDArray[np.float64]

# yaw [deg], x, y, z in the ego frame [m], focal length and principal point [px of 1600 x 900],
# trigger time relative to the lidar [s]: a camera fires when the turning lidar looks along it.
_CAMERAS = {
    "CAM_FRONT": (0.0, 1.71, 0.01, 1.50, 1262.0, 818.0, 486.0, -0.0355),
    "CAM_FRONT_RIGHT": (-55.6, 1.56, -0.49, 1.50, 1258.0, 812.0, 478.0, -0.0276),
    "CAM_BACK_RIGHT": (-110.4, 1.03, -0.47, 1.56, 1256.0, 814.0, 484.0, -0.0200),
    "CAM_BACK": (180.2, 0.04, 0.01, 1.57, 804.0, 838.0, 478.0, -0.0101),
    "CAM_BACK_LEFT": (109.0, 1.04, 0.48, 1.58, 1255.0, 806.0, 482.0, -0.0004),
    "CAM_FRONT_LEFT": (55.2, 1.55, 0.50, 1.51, 1266.0, 822.0, 472.0, -0.0432),
}
_RADARS = {
    "RADAR_FRONT": (0.0, 3.41, 0.0, 0.50, -0.013),
    "RADAR_FRONT_LEFT": (90.4, 2.42, 0.80, 0.78, 0.017),
    "RADAR_FRONT_RIGHT": (-90.2, 2.42, -0.80, 0.77, -0.027),
    "RADAR_BACK_LEFT": (174.6, -0.56, 0.63, 0.53, 0.008),
    "RADAR_BACK_RIGHT": (-176.2, -0.56, -0.62, 0.53, 0.024),
}
# Eight cameras of three kinds and sizes. As above, but the calibration is for an image of its own
# height and width; then pitch [deg, down] and the camera model.
_FISHEYE = ("kannala_brandt", (0.032, -0.011, 0.003, -0.0004))
_WIDE = ("brown_conrady", (-0.19, 0.041, 0.0006, -0.0004, -0.004))
_BENT_CAMERAS = {
    "CAM_FRONT_FISHEYE": (0.0, 3.70, 0.02, 0.72, 378.0, 643.0, 479.0, -0.0355, 12.0, _FISHEYE),
    "CAM_LEFT_FISHEYE": (90.0, 2.05, 0.98, 1.02, 381.0, 636.0, 486.0, -0.0100, 15.0, _FISHEYE),
    "CAM_BACK_FISHEYE": (180.0, -0.92, 0.01, 0.94, 379.0, 645.0, 482.0, -0.0101, 12.0, _FISHEYE),
    "CAM_RIGHT_FISHEYE": (-90.0, 2.05, -0.98, 1.02, 376.0, 638.0, 480.0, -0.0276, 15.0, _FISHEYE),
    "CAM_FRONT": (0.0, 1.71, 0.01, 1.50, 1020.0, 806.0, 455.0, -0.0355, 0.0, _WIDE),
    "CAM_FRONT_TELE": (0.0, 1.71, -0.12, 1.50, 2540.0, 795.0, 452.0, -0.0355, 0.0, None),
    "CAM_BACK_LEFT": (135.0, 1.04, 0.48, 1.58, 1015.0, 803.0, 447.0, -0.0004, 0.0, _WIDE),
    "CAM_BACK_RIGHT": (-135.0, 1.03, -0.47, 1.56, 1017.0, 797.0, 451.0, -0.0200, 0.0, _WIDE),
}
_FULL_SIZE, _FISHEYE_SIZE = (900, 1600), (966, 1280)  # height, width [px] of the figures above
CAMERAS = {"nuscenes": tuple(_CAMERAS), "fisheye": tuple(_BENT_CAMERAS)}
LIDAR, RADARS = "LIDAR_TOP", tuple(_RADARS)
VEHICLES = ("s001", "s002")


@dataclass(frozen=True)
class Mount:
    """One sensor on one vehicle.

    Attributes:
        ego_from_sensor: ``(4, 4)``.
        intrinsic: ``(3, 3)`` [px], or None where it is no camera; pixel centres at integers.
        delay_s: trigger time relative to the lidar's timestamp [s].
        image_size: height, width [px]; zero where it is no camera.
        camera_model: None for a plain pinhole.
    """

    ego_from_sensor: Array
    intrinsic: Array | None
    delay_s: float
    image_size: tuple[int, int] = (0, 0)
    camera_model: "CameraModel | None" = None


def list_channels(rig: str) -> tuple[str, ...]:
    """All sensors of a rig."""
    return (*CAMERAS[rig], LIDAR, *RADARS)


def modality_of(channel: str) -> str:
    return {"CAM": "camera", "LID": "lidar", "RAD": "radar"}[channel[:3]]


def rotation_from_euler(roll: float, pitch: float, yaw: float) -> Array:
    """Rotation ``(3, 3)`` about x, then y, then z [rad]."""
    cr, sr, cp, sp, cy, sy = (f(a) for a in (roll, pitch, yaw) for f in (np.cos, np.sin))
    about_x = np.array([[1, 0, 0], [0, cr, -sr], [0, sr, cr]])
    about_y = np.array([[cp, 0, sp], [0, 1, 0], [-sp, 0, cp]])
    about_z = np.array([[cy, -sy, 0], [sy, cy, 0], [0, 0, 1]])
    return np.asarray(about_z @ about_y @ about_x)


def transform(rotation: Array, translation: Array) -> Array:
    """Assemble ``dst_from_src`` ``(4, 4)``."""
    result = np.eye(4)
    result[:3, :3], result[:3, 3] = rotation, translation
    return result


def quaternion_from_rotation(rotation: Array) -> list[float]:
    """Unit quaternion w, x, y, z (w >= 0) of a rotation ``(3, 3)``.

    Computed from its largest component (Shepperd 1978). scipy's Rotation takes eight times as long
    for one matrix.
    """
    m = rotation
    squares = np.array(
        [
            1 + m[0, 0] + m[1, 1] + m[2, 2],
            1 + m[0, 0] - m[1, 1] - m[2, 2],
            1 - m[0, 0] + m[1, 1] - m[2, 2],
            1 - m[0, 0] - m[1, 1] + m[2, 2],
        ]
    )
    largest = int(squares.argmax())
    q = {
        0: [squares[0], m[2, 1] - m[1, 2], m[0, 2] - m[2, 0], m[1, 0] - m[0, 1]],
        1: [m[2, 1] - m[1, 2], squares[1], m[1, 0] + m[0, 1], m[0, 2] + m[2, 0]],
        2: [m[0, 2] - m[2, 0], m[1, 0] + m[0, 1], squares[2], m[2, 1] + m[1, 2]],
        3: [m[1, 0] - m[0, 1], m[0, 2] + m[2, 0], m[2, 1] + m[1, 2], squares[3]],
    }[largest]
    result = np.array(q) / (2 * np.sqrt(squares[largest]))
    return [float(x) for x in (result if result[0] >= 0 else -result)]


def build_rig(
    vehicle: str, image_size: tuple[int, int], seed: int, rig: str = "nuscenes"
) -> dict[str, Mount]:
    """Mounts of all sensors of one vehicle, by channel.

    Args:
        vehicle: one of VEHICLES; each has its own small mounting errors.
        image_size: height, width [pixels] of the images that have 1600 x 900 on a real car; other
            sizes and all intrinsics are scaled with it.
        seed: seed of the data set.
        rig: ``nuscenes``: six pinholes; ``fisheye``: four fisheyes, three wide-angle cameras and a
            telephoto pinhole.
    """
    rng = np.random.default_rng([seed, VEHICLES.index(vehicle), 77])
    cameras = (
        {channel: (*row, 0.0, None) for channel, row in _CAMERAS.items()}
        if rig == "nuscenes"
        else _BENT_CAMERAS
    )
    mounts = {channel: _mount_camera(row, image_size, rng) for channel, row in cameras.items()}
    roll, pitch, turn = rng.normal(0, np.deg2rad(0.5), 3)
    rotation = rotation_from_euler(roll, pitch, turn) @ rotation_from_euler(0, 0, -np.pi / 2)
    mounts[LIDAR] = Mount(transform(rotation, np.array([0.96, 0.0, 1.84])), None, 0.0)
    for channel, (yaw, x, y, z, delay) in _RADARS.items():
        rotation = rotation_from_euler(0, 0, np.deg2rad(yaw + rng.normal(0, 0.3)))
        mounts[channel] = Mount(transform(rotation, np.array([x, y, z])), None, delay)
    return mounts


def _mount_camera(
    row: tuple[Any, ...], image_size: tuple[int, int], rng: np.random.Generator
) -> Mount:
    yaw, x, y, z, focal, cx, cy, delay, down, distortion = row
    camera_axes = np.array([[0.0, 0.0, 1.0], [-1.0, 0.0, 0.0], [0.0, -1.0, 0.0]])
    roll, pitch, turn = rng.normal(0, np.deg2rad(0.4), 3)
    pitch += np.deg2rad(down)
    rotation = rotation_from_euler(roll, pitch, np.deg2rad(yaw) + turn) @ camera_axes
    full = _FISHEYE_SIZE if distortion is _FISHEYE else _FULL_SIZE
    height, width = (
        round(part * size / whole)
        for part, size, whole in zip(full, image_size, _FULL_SIZE, strict=True)
    )
    sx, sy = width / full[1], height / full[0]
    focal *= 1 + rng.normal(0, 0.004)
    cx, cy = cx + rng.normal(0, 4), cy + rng.normal(0, 4)
    intrinsic = np.array(
        [
            [focal * sx, 0.0, (cx + 0.5) * sx - 0.5],
            [0.0, focal * sy, (cy + 0.5) * sy - 0.5],
            [0.0, 0.0, 1.0],
        ]
    )
    position = np.array([x, y, z]) + rng.normal(0, 0.01, 3)
    mount = Mount(transform(rotation, position), intrinsic, delay, (height, width))
    if distortion is None:
        return mount
    from bev_lightning.data.camera_models import CameraModel  # late: it imports torch

    name, coefficients = distortion
    camera_model = CameraModel(name, tuple(intrinsic.ravel().tolist()), coefficients)
    return replace(mount, camera_model=camera_model)
