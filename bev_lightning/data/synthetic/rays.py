"""Ray-casting kernels that the lidar, the radars and the cameras share.

A ray meets an object in the object's own frame, where each part is an axis-aligned box; the ground
is the plane z = 0. Kernels are plain loops compiled by numba, without fast-math, so that a seed
gives the same bytes on every run. (numba's cache sees changes of a kernel's own file only: after an
edit here remove the __pycache__ folders, or the camera's kernel keeps the old code.)
"""

import math

import numba
import numpy as np
from numpy.typing import NDArray

from bev_lightning.data.synthetic.rig import Array
from bev_lightning.data.synthetic.scene import GROUND_CELL_M


@numba.njit(cache=True, inline="always")
def inverse(x: float) -> float:
    return 1.0 / x if abs(x) > 1e-12 else 1e12


@numba.njit(cache=True, inline="always")
def enter_box(o: Array, inv: Array, box: Array, nearest: float) -> tuple[float, int]:
    """Where a ray enters a box (first six columns: centre, half size), if before ``nearest``.

    Args:
        o: origin. inv: one over each component of the direction.

    Returns:
        distance (else -1) and face: 2 * axis, + 1 if it is the positive face.
    """
    low, high, face = 1e-3, nearest, -1
    for axis in range(3):
        middle, reach = (box[axis] - o[axis]) * inv[axis], box[3 + axis] * abs(inv[axis])
        near, far = middle - reach, middle + reach
        if near > low:
            low, face = near, 2 * axis + (1 if inv[axis] < 0 else 0)
        if far < high:
            high = far
        if low >= high:
            return -1.0, -1
    return (low, face) if face >= 0 else (-1.0, -1)


@numba.njit(cache=True, inline="always")
def find_part(
    o: Array, inv: Array, hull: Array, parts: Array, begin: int, end: int, nearest: float
) -> tuple[float, int, int]:
    """The first part that a ray enters: distance (else -1), part, face."""
    best, best_part, best_face = -1.0, -1, -1
    if enter_box(o, inv, hull, nearest)[0] > 0:
        limit = nearest
        for p in range(begin, end):
            t, face = enter_box(o, inv, parts[p], limit)
            if t > 0:
                limit, best, best_part, best_face = t, t, p, face
    return best, best_part, best_face


@numba.njit(cache=True, inline="always")
def ground_at(ground: NDArray[np.uint8], corner: Array, x: float, y: float) -> int:
    column, row = int((x - corner[0]) / GROUND_CELL_M), int((y - corner[1]) / GROUND_CELL_M)
    if 0 <= row < ground.shape[0] and 0 <= column < ground.shape[1]:
        return int(ground[row, column])
    return 0


@numba.njit(cache=True)
def cast_fan(
    pose: Array,
    elevations: Array,
    azimuth: Array,
    full_circle: bool,
    poses: Array,
    hulls: Array,
    parts: Array,
    first_part: NDArray[np.int64],
    ground: NDArray[np.uint8],
    corner: Array,
    ground_echo: Array,
    reach: float,
) -> tuple[Array, Array, Array, NDArray[np.int32]]:
    """Cast a fan of rays from a sensor and return the first surface of each.

    Args:
        pose: ``global_from_sensor`` ``(4, 4)``.
        elevations: ``(E,)`` [rad]. azimuth: first, step [rad] and number, counter-clockwise from
            +x.
        full_circle: whether the fan closes.
        poses: ``(O, 3)``. hulls: ``(O, 6)``. parts, first_part: as in Scene.
        reach: greatest range [m].

    Returns:
        range ``(A, E)`` [m] (0: nothing), intensity, share of pulses lost, object (-1 ground, -2
        none).
    """
    first, step, num = azimuth[0], azimuth[1], int(azimuth[2])
    num_beams = len(elevations)
    distance = np.full((num, num_beams), reach)
    echo, lost = np.zeros((num, num_beams)), np.zeros((num, num_beams))
    hit = np.full((num, num_beams), -2, np.int32)
    rays = np.empty((num, num_beams, 3))
    origin = pose[:3, 3]
    for a in range(num):
        angle = first + a * step
        for e in range(num_beams):
            flat = math.cos(elevations[e])
            x, y, z = flat * math.cos(angle), flat * math.sin(angle), math.sin(elevations[e])
            for i in range(3):
                rays[a, e, i] = pose[i, 0] * x + pose[i, 1] * y + pose[i, 2] * z
            if rays[a, e, 2] < -1e-6:
                t = -origin[2] / rays[a, e, 2]
                # Mild unevenness; it must not depend on the viewpoint, so that sweeps agree.
                gx, gy = origin[0] + t * rays[a, e, 0], origin[1] + t * rays[a, e, 1]
                bump = 0.02 * math.sin(0.45 * gx) * math.sin(0.37 * gy)
                t += bump / rays[a, e, 2]
                if t < reach:
                    distance[a, e], hit[a, e] = t, -1
                    kind = ground_at(ground, corner, gx, gy)
                    echo[a, e] = ground_echo[kind] * (0.5 - 0.5 * rays[a, e, 2])
                    # Grazing pulses are reflected away.
                    lost[a, e] = min(0.95, (t / 52.0) ** 2)
    o, inv = np.empty(3), np.empty(3)
    for n in range(len(poses)):
        radius = math.hypot(hulls[n, 0] + hulls[n, 3], hulls[n, 1] + hulls[n, 4])
        dx, dy, dz = poses[n, 0] - origin[0], poses[n, 1] - origin[1], -origin[2]
        far = math.hypot(dx, dy)
        if far > reach + radius:
            continue
        lx = pose[0, 0] * dx + pose[1, 0] * dy + pose[2, 0] * dz
        ly = pose[0, 1] * dx + pose[1, 1] * dy + pose[2, 1] * dz
        begin, end = 0, num
        if far > 1.05 * radius + 0.3:
            half = math.asin(min(1.0, radius / far)) + 0.03 + step
            centre = math.atan2(ly, lx) - first
            if not full_circle:
                middle = 0.5 * num * step
                turn = centre - middle
                centre = middle + math.atan2(math.sin(turn), math.cos(turn))
            begin, end = math.floor((centre - half) / step), math.ceil((centre + half) / step)
            if full_circle:
                end = min(end, begin + num)
            else:
                begin, end = max(begin, 0), min(end, num)
        c, s = math.cos(poses[n, 2]), math.sin(poses[n, 2])
        o[0], o[1], o[2] = -dx * c - dy * s, dx * s - dy * c, origin[2]
        for column in range(begin, end):
            a = column % num
            for e in range(num_beams):
                gx, gy = rays[a, e, 0], rays[a, e, 1]
                inv[0], inv[1] = inverse(gx * c + gy * s), inverse(-gx * s + gy * c)
                inv[2] = inverse(rays[a, e, 2])
                t, p, face = find_part(
                    o, inv, hulls[n], parts, first_part[n], first_part[n + 1], distance[a, e]
                )
                if p >= 0:
                    distance[a, e], hit[a, e], lost[a, e] = t, n, parts[p, 19]
                    value = parts[p, 16 if face == 1 else 17 if face == 0 else 15]
                    echo[a, e] = value * (0.4 + 0.6 / abs(inv[face // 2]))
    return distance, echo, lost, hit


@numba.njit(cache=True)
def count_inside(points: Array, poses: Array, sizes: Array) -> NDArray[np.int64]:
    """Number ``(O,)`` of points ``(P, 3)`` within each box that stands on the ground, all in the
    global frame; poses ``(O, 3)`` x, y, yaw and sizes ``(O, 3)`` length, width, height [m]."""
    counts = np.zeros(len(poses), np.int64)
    for n in range(len(poses)):
        c, s = math.cos(poses[n, 2]), math.sin(poses[n, 2])
        length, width, height = sizes[n, 0] / 2, sizes[n, 1] / 2, sizes[n, 2]
        reach = length + width
        for p in range(len(points)):
            dx, dy, z = points[p, 0] - poses[n, 0], points[p, 1] - poses[n, 1], points[p, 2]
            if abs(dx) > reach or abs(dy) > reach or z < 0 or z > height:
                continue
            if abs(dx * c + dy * s) <= length and abs(-dx * s + dy * c) <= width:
                counts[n] += 1
    return counts
