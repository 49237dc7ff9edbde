"""Radar returns of the synthetic rig: a horizontal fan of rays, with radial (Doppler) velocity.

The files are those of nuScenes: an ASCII PCD header, then a packed record of 18 fields a return.
"""

import numpy as np
from numpy.typing import NDArray

from bev_lightning.data.synthetic.rays import cast_fan
from bev_lightning.data.synthetic.rig import Array
from bev_lightning.data.synthetic.scene import Scene

RETURN = np.dtype(
    [
        ("x", "<f4"),
        ("y", "<f4"),
        ("z", "<f4"),
        ("dyn_prop", "i1"),
        ("id", "<i2"),
        ("rcs", "<f4"),
        ("vx", "<f4"),
        ("vy", "<f4"),
        ("vx_comp", "<f4"),
        ("vy_comp", "<f4"),
        ("is_quality_valid", "i1"),
        ("ambig_state", "i1"),
        ("x_rms", "i1"),
        ("y_rms", "i1"),
        ("invalid_state", "i1"),
        ("pdh0", "i1"),
        ("vx_rms", "i1"),
        ("vy_rms", "i1"),
    ]
)
_HALF_FAN = np.deg2rad(60.0)
_FAN_STEP = np.deg2rad(0.5)
_REACH_M = 100.0
_MOVING, _STATIONARY, _ONCOMING, _CANDIDATE, _CROSSING = 0, 1, 2, 3, 6


def scan_radar(
    scene: Scene, ego_from_radar: Array, time_s: float, rng: np.random.Generator
) -> NDArray[np.void]:
    """Simulate one cycle of a radar.

    Args:
        ego_from_radar: ``(4, 4)``.

    Returns:
        ``(P,)`` records of RETURN in the radar frame: x ahead, y left, z = 0 (it measures no
        elevation) [m]; ``vx, vy`` the radial velocity relative to the sensor and ``vx_comp,
        vy_comp`` the radial velocity over ground [m/s], both as vectors along the ray.
    """
    pose = scene.ego_pose(time_s) @ ego_from_radar
    num = int(round(2 * _HALF_FAN / _FAN_STEP)) + 1
    azimuth = np.array([-_HALF_FAN, _FAN_STEP, num])
    distance, _, _, hit = cast_fan(
        pose, np.zeros(1), azimuth, False, *scene.geometry(time_s), np.zeros(5), _REACH_M
    )
    distance, hit = distance[:, 0], hit[:, 0]
    angles = -_HALF_FAN + _FAN_STEP * np.arange(num)
    # The number of returns of a target does not depend on the number of rays that hit it.
    wanted = np.array([kind.returns for kind in scene.kinds])
    rays_on = np.bincount(hit[hit >= 0], minlength=len(wanted))
    met = np.maximum(hit, 0)
    share = np.where(hit >= 0, wanted[met] / np.maximum(rays_on[met], 1), 0.0)
    keep = rng.random(num) < share
    target, distance, angles = hit[keep], distance[keep], angles[keep]
    # Clutter: stray returns off the ground and the kerb.
    clutter = int(rng.poisson(9))
    target = np.concatenate([target, np.full(clutter, -1)])
    distance = np.concatenate([distance, rng.uniform(3, 80, clutter)])
    angles = np.concatenate([angles, rng.uniform(-_HALF_FAN, _HALF_FAN, clutter)])

    # What is measured of each.
    num = len(target)
    heading = np.arctan2(pose[1, 0], pose[0, 0])
    ray = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    turn = np.array([[np.cos(heading), -np.sin(heading)], [np.sin(heading), np.cos(heading)]])
    ray_global = ray @ turn.T
    point = pose[:2, 3] + distance[:, None] * ray_global
    # Velocity of the surface point: that of the centre plus the rotation.
    poses, motion = scene.object_poses(time_s), scene.object_motion(time_s)
    lever = point - poses[target, :2]
    spin = motion[target, 2:3] * np.stack([-lever[:, 1], lever[:, 0]], axis=1)
    velocity = np.where(target[:, None] >= 0, motion[target, :2] + spin, 0.0)
    ego_velocity = scene.ego_motion(time_s)
    arm = pose[:2, 3] - scene.ego_pose(time_s)[:2, 3]
    sensor_velocity = ego_velocity[:2] + ego_velocity[2] * np.array([-arm[1], arm[0]])
    radial = (velocity * ray_global).sum(axis=1) + rng.normal(0, 0.08, num)
    relative = radial - ray_global @ sensor_velocity

    measured = np.maximum(distance + rng.normal(0, 0.12, num), 0.2)
    bearing = angles + rng.normal(0, np.deg2rad(0.4), num)
    cos, sin = np.cos(bearing), np.sin(bearing)
    points = np.zeros(num, RETURN)
    points["x"], points["y"] = measured * cos, measured * sin
    points["vx"], points["vy"] = relative * cos, relative * sin
    points["vx_comp"], points["vy_comp"] = radial * cos, radial * sin
    rcs = np.array([kind.rcs for kind in scene.kinds])
    echo = np.where(target >= 0, rcs[target], -4.0) + rng.normal(0, 3.5, num)
    points["rcs"] = np.round(2 * echo) / 2
    speed = np.hypot(velocity[:, 0], velocity[:, 1])
    crossing = (speed > 0.5) & (np.abs(radial) < 0.5 * speed)
    still = np.where(rng.random(num) < 0.8, _STATIONARY, _CANDIDATE)
    moving = np.where(crossing, _CROSSING, np.where(radial < 0, _ONCOMING, _MOVING))
    points["dyn_prop"] = np.where(speed > 0.5, moving, still)
    points["id"] = np.arange(num)
    points["is_quality_valid"] = 1
    points["ambig_state"] = np.where(rng.random(num) < 0.95, 3, 4)
    states = np.array([0, 4, 8, 11, 1, 17], np.int8)  # 1: too weak an echo, which readers drop
    points["invalid_state"] = np.where(
        target >= 0,
        rng.choice(states, num, p=[0.88, 0.04, 0.03, 0.02, 0.01, 0.02]),
        rng.choice(states, num, p=[0.6, 0.1, 0.05, 0.05, 0.1, 0.1]),
    )
    points["pdh0"] = np.where(target >= 0, 1, rng.integers(1, 4, num))
    points["x_rms"], points["y_rms"] = 19, 20
    points["vx_rms"], points["vy_rms"] = 3, 3
    return points[np.argsort(measured, kind="stable")]


def pack_returns(points: NDArray[np.void]) -> bytes:
    """Pack returns into the bytes of a nuScenes radar file.

    A file without returns holds one NaN record, as in nuScenes; one extra byte ends the file
    because the devkit's reader requires it.
    """
    if len(points) == 0:
        points = np.zeros(1, RETURN)
        points["x"] = points["y"] = points["z"] = np.nan
    types = [RETURN[name] for name in RETURN.names or ()]
    header = [
        "# .PCD v0.7 - Point Cloud Data file format",
        "VERSION 0.7",
        "FIELDS " + " ".join(RETURN.names or ()),
        "SIZE " + " ".join(str(kind.itemsize) for kind in types),
        "TYPE " + " ".join("F" if kind.kind == "f" else "I" for kind in types),
        "COUNT " + " ".join("1" * len(types)),
        f"WIDTH {len(points)}",
        "HEIGHT 1",
        "VIEWPOINT 0 0 0 1 0 0 0",
        f"POINTS {len(points)}",
        "DATA binary",
    ]
    return ("\n".join(header) + "\n").encode() + points.tobytes() + b"\n"
