"""Ray-cast point clouds of the synthetic lidar."""

import numpy as np
from numpy.typing import NDArray

from bev_lightning.data.synthetic.rays import cast_fan
from bev_lightning.data.synthetic.rig import Array
from bev_lightning.data.synthetic.scene import Scene

_GROUND_ECHO = np.array([16.0, 7.0, 42.0, 13.0, 10.0])  # intensity of GRASS .. LOT
_RANGE_NOISE_M = 0.02
_REACH_M = 75.0


def scan_lidar(
    scene: Scene,
    pose: Array,
    time_s: float,
    num_beams: int,
    num_azimuths: int,
    rng: np.random.Generator,
) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """Scan one turn of the lidar, without motion during the turn.

    Args:
        pose: ``global_from_lidar`` ``(4, 4)`` at ``time_s``.
        num_beams: from -25 to +5 degrees. num_azimuths: columns a turn.

    Returns:
        points ``(P, 5)`` x, y, z [m] in the lidar frame, intensity 0..255, ring; and the object
        that each one is on (-1 for ground).
    """
    elevations = np.deg2rad(np.linspace(-25.0, 5.0, num_beams))
    step = 2 * np.pi / num_azimuths
    azimuth = np.array([rng.uniform(0, step), step, num_azimuths])
    distance, echo, lost, hit = cast_fan(
        pose, elevations, azimuth, True, *scene.geometry(time_s), _GROUND_ECHO, _REACH_M
    )
    shape = distance.shape
    draw = rng.random(shape)
    # Weak distant echoes fall below the detection threshold.
    faint = np.clip(0.5 * (distance / _REACH_M) ** 2 * (1 - echo / 60.0), 0.02, 0.9)
    seen = (hit > -2) & (draw > lost) & (rng.random(shape) > faint)
    distance = distance + rng.normal(0, _RANGE_NOISE_M, shape)
    echo = np.clip(echo * rng.normal(1, 0.12, shape) + rng.normal(0, 1.0, shape), 0, 255)
    angles = (azimuth[0] + step * np.arange(num_azimuths))[:, None]
    flat = distance * np.cos(elevations)
    x, y, z = flat * np.cos(angles), flat * np.sin(angles), distance * np.sin(elevations)
    ring = np.broadcast_to(np.arange(num_beams, dtype=np.float64), shape)
    points = np.stack([x, y, z, np.floor(echo), ring], axis=-1)[seen]
    return points.astype(np.float32), hit[seen]
