"""A synthetic scene: the road, the ego's trajectory, and moving objects.

All in the global frame (x, y, z up, flat ground at z = 0) and in seconds since the first key frame.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import ImageDraw

from bev_lightning.data.synthetic.rig import Array, rotation_from_euler, transform
from bev_lightning.data.synthetic.shapes import Kind

STEP_S = 0.05  # motion is tabulated at this step and interpolated linearly
LEAD_IN_S = 1.0  # time before the first key frame and after the last one, for the sweeps
GROUND_CELL_M = 0.25
Geometry = tuple[Array, Array, Array, NDArray[np.int64], NDArray[np.uint8], Array]
GRASS, ASPHALT, MARKING, PAVEMENT, LOT = range(5)


@dataclass(frozen=True)
class Road:
    """The ego's path, extended at both ends: tables over arc length ``(S,)`` [m]."""

    arc: Array
    xy: Array
    yaw: Array

    def poses_at(self, arc: Array, offset: float) -> Array:
        """Poses ``(..., 3)`` x, y, yaw at arc lengths, ``offset`` metres to the left.

        Beyond its ends the road continues straight.
        """
        x, y = (np.interp(arc, self.arc, self.xy[:, i]) for i in (0, 1))
        yaw = np.interp(arc, self.arc, self.yaw)
        beyond = arc - np.clip(arc, self.arc[0], self.arc[-1])
        x, y = x + beyond * np.cos(yaw), y + beyond * np.sin(yaw)
        return np.stack([x - offset * np.sin(yaw), y + offset * np.cos(yaw), yaw], axis=-1)

    def line(self, offset: float) -> Array:
        return np.asarray(self.poses_at(self.arc, offset)[:, :2])

    def clearance(self, xy: Array) -> float:
        """Distance [m] of a point from the path."""
        return float(np.hypot(*(self.xy[::4] - xy).T).min())


@dataclass(frozen=True)
class Appearance:
    """Weather and ground of a scene: direction to the sun ``(3,)``, exposure, haze (extinction,
    1/m), sky colours ``(2, 3)`` at the horizon and above, and the ground map ``(Y, X)`` of GRASS ..
    LOT with its lower corner ``(2,)`` [m]."""

    sun: Array
    exposure: float
    haze: float
    sky: Array
    ground: NDArray[np.uint8]
    corner: Array


@dataclass(frozen=True)
class Scene:
    """Everything that the sensors measure.

    Attributes:
        times: ``(K,)`` [s]. ego: ``(K, 3)`` x, y, yaw (not wrapped).
        tracks: ``(K, O, 3)`` x, y, yaw of the objects.
        kinds: class of each object; bystanders come last. sizes: ``(O, 3)`` length, width, height
            [m].
        categories, attributes: their nuScenes names ("" where there is none).
        parts, first_part: all part tables, and ``(O + 1,)`` where each object's begins.
        hulls: ``(O, 6)`` centre and half size [m] of the box around all parts of an object, in its
            own frame.
        sway: phases of the body's pitch and roll.
    """

    times: Array
    ego: Array
    road: Road
    tracks: Array
    kinds: tuple[Kind, ...]
    sizes: Array
    categories: tuple[str, ...]
    attributes: tuple[str, ...]
    parts: Array
    first_part: NDArray[np.int64]
    hulls: Array
    appearance: Appearance
    sway: Array

    def geometry(self, time_s: float) -> Geometry:
        """What the ray casters read of objects and ground, in the order of their arguments."""
        poses, appearance = self.object_poses(time_s), self.appearance
        return poses, self.hulls, self.parts, self.first_part, appearance.ground, appearance.corner

    def _at(self, table: Array, time_s: float) -> Array:
        step = (time_s - self.times[0]) / STEP_S
        low = int(np.clip(np.floor(step), 0, len(self.times) - 2))
        return np.asarray(table[low] + (step - low) * (table[low + 1] - table[low]))

    def _rate(self, table: Array, time_s: float) -> Array:
        ahead, back = self._at(table, time_s + STEP_S), self._at(table, time_s - STEP_S)
        return (ahead - back) / (2 * STEP_S)

    def ego_pose(self, time_s: float) -> Array:
        """``global_from_ego`` ``(4, 4)``, with a slight sway of the body."""
        x, y, yaw = self._at(self.ego, time_s)
        pitch = 0.006 * np.sin(2.3 * time_s + self.sway[0])
        roll = 0.005 * np.sin(1.7 * time_s + self.sway[1])
        return transform(rotation_from_euler(roll, pitch, yaw), np.array([x, y, 0.0]))

    def ego_motion(self, time_s: float) -> Array:
        """``(3,)``: global velocity [m/s] and yaw rate [rad/s]."""
        return self._rate(self.ego, time_s)

    def object_poses(self, time_s: float) -> Array:
        """``(O, 3)`` x, y [m], yaw [rad]."""
        return self._at(self.tracks, time_s)

    def object_motion(self, time_s: float) -> Array:
        """``(O, 3)`` velocity [m/s] and yaw rate [rad/s]."""
        return self._rate(self.tracks, time_s)


def draw_strip(
    draw: ImageDraw.ImageDraw, edges: Sequence[Array], fill: int, every: int = 1
) -> None:
    """Fill ``every`` n-th quad between the left and the right edge ``(S, 2)`` [pixels]."""
    left, right = edges
    for i in range(0, len(left) - 1, every):
        quad = [left[i], left[i + 1], right[i + 1], right[i]]
        draw.polygon([tuple(point) for point in quad], fill=fill)
