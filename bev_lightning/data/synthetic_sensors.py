"""Ray casting: the lidar, the radar's fan and the cameras look at the same parts.

A ray meets an object in the object's own frame, where each part is an axis-aligned box; ground is the
plane z = 0. Kernels are plain loops compiled by numba, without fast-math so that a seed gives the same
bytes everywhere the same compiler runs.
"""

import math

import numba
import numpy as np
from numpy.typing import NDArray

from bev_lightning.data.synthetic_rig import Array
from bev_lightning.data.synthetic_scene import GROUND_CELL_M, Scene

# Lidar intensity and colour of grass, asphalt, marking, pavement, lot.
_GROUND_ECHO = np.array([16.0, 7.0, 42.0, 13.0, 10.0])
_GROUND_COLOUR = np.array(
    [[88.0, 104, 62], [92, 92, 94], [212, 210, 200], [142, 138, 132], [116, 112, 106]]
)
_RANGE_NOISE_M = 0.02


@numba.njit(cache=True, inline="always")
def _inverse(x: float) -> float:
    return 1.0 / x if abs(x) > 1e-12 else 1e12


@numba.njit(cache=True, inline="always")
def _enter(o: Array, inv: Array, box: Array, nearest: float) -> tuple[float, int]:
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
def _first_part(
    o: Array, inv: Array, hull: Array, parts: Array, begin: int, end: int, nearest: float
) -> tuple[float, int, int]:
    """The first part that a ray enters: distance (else -1), part, face."""
    best, best_part, best_face = -1.0, -1, -1
    if _enter(o, inv, hull, nearest)[0] > 0:
        limit = nearest
        for p in range(begin, end):
            t, face = _enter(o, inv, parts[p], limit)
            if t > 0:
                limit, best, best_part, best_face = t, t, p, face
    return best, best_part, best_face


@numba.njit(cache=True, inline="always")
def _ground(ground: NDArray[np.uint8], corner: Array, x: float, y: float) -> int:
    column, row = int((x - corner[0]) / GROUND_CELL_M), int((y - corner[1]) / GROUND_CELL_M)
    if 0 <= row < ground.shape[0] and 0 <= column < ground.shape[1]:
        return int(ground[row, column])
    return 0


@numba.njit(cache=True)
def cast_fan(
    pose: Array, elevations: Array, azimuth: Array, full_circle: bool, poses: Array, hulls: Array,
    parts: Array, first_part: NDArray[np.int64], ground: NDArray[np.uint8], corner: Array,
    ground_echo: Array, reach: float,
) -> tuple[Array, Array, Array, NDArray[np.int32]]:
    """Cast a fan of rays from a sensor and return the first surface of each.

    Args:
        pose: ``global_from_sensor`` ``(4, 4)``.
        elevations: ``(E,)`` [rad]. azimuth: first, step [rad] and number, counter-clockwise from +x.
        full_circle: whether the fan closes.
        poses: ``(O, 3)``. hulls: ``(O, 6)``. parts, first_part: as in Scene.
        reach: greatest range [m].

    Returns:
        range ``(A, E)`` [m] (0: nothing), intensity, share of pulses lost, object (-1 ground, -2 none).
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
                    kind = _ground(ground, corner, gx, gy)
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
                inv[0], inv[1] = _inverse(gx * c + gy * s), _inverse(-gx * s + gy * c)
                inv[2] = _inverse(rays[a, e, 2])
                t, p, face = _first_part(
                    o, inv, hulls[n], parts, first_part[n], first_part[n + 1], distance[a, e]
                )
                if p >= 0:
                    distance[a, e], hit[a, e], lost[a, e] = t, n, parts[p, 19]
                    value = parts[p, 16 if face == 1 else 17 if face == 0 else 15]
                    echo[a, e] = value * (0.4 + 0.6 / abs(inv[face // 2]))
    return distance, echo, lost, hit


def scan_lidar(
    scene: Scene, pose: Array, time_s: float, num_beams: int, num_azimuths: int, rng: np.random.Generator
) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """One turn of the lidar, taken at one instant.

    Args:
        pose: ``global_from_lidar`` ``(4, 4)`` at ``time_s``.
        num_beams: from -25 to +5 degrees. num_azimuths: columns a turn.

    Returns:
        points ``(P, 5)`` x, y, z [m] in the lidar frame, intensity 0..255, ring; and which object each
        one is from (-1 for ground).
    """
    elevations = np.deg2rad(np.linspace(-25.0, 5.0, num_beams))
    step = 2 * np.pi / num_azimuths
    azimuth = np.array([rng.uniform(0, step), step, num_azimuths])
    look = scene.look
    distance, echo, lost, hit = cast_fan(
        pose, elevations, azimuth, True, scene.object_poses(time_s), scene.hulls, scene.parts,
        scene.first_part, look.ground, look.corner, _GROUND_ECHO, 75.0,
    )
    shape = distance.shape
    draw = rng.random(shape)
    # A weak echo from afar falls below the threshold, whatever it comes from.
    faint = np.clip(0.5 * (distance / 75.0) ** 2 * (1 - echo / 60.0), 0.02, 0.9)
    seen = (hit > -2) & (draw > lost) & (rng.random(shape) > faint)
    distance = distance + rng.normal(0, _RANGE_NOISE_M, shape)
    echo = np.clip(echo * rng.normal(1, 0.12, shape) + rng.normal(0, 1.0, shape), 0, 255)
    angles = (azimuth[0] + step * np.arange(num_azimuths))[:, None]
    flat = distance * np.cos(elevations)
    columns = [flat * np.cos(angles), flat * np.sin(angles), distance * np.sin(elevations), np.floor(echo)]
    ring = np.broadcast_to(np.arange(num_beams, dtype=np.float64), shape)
    points = np.stack([*columns, ring], axis=-1)[seen]
    return points.astype(np.float32), hit[seen]


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


@numba.njit(cache=True, inline="always")
def _grain(x: int, y: int, seed: int) -> float:
    """A fixed pseudo-random number in -1..1 for a cell: texture without a table."""
    h = (x * 73856093) ^ (y * 19349663) ^ (seed * 83492791)
    h = ((h ^ (h >> 13)) * 1274126177) & 0x7FFFFFFF
    return ((h ^ (h >> 16)) & 0xFFFF) / 32767.5 - 1.0


@numba.njit(cache=True)
def _footprint(
    corners: Array, hull: Array, o: Array, c: float, s: float, pose: Array, intrinsic: Array, height: int, width: int
) -> tuple[int, int, int, int]:
    """The pixels that may show a hull: first and last column, first and last row (last < first: none).

    Edges are cut at a plane just before the camera, so that what stands beside it stays small.
    """
    front = 0.1
    for k in range(8):
        lx = hull[0] + hull[3] * (1 - 2 * (k & 1)) - o[0]
        ly = hull[1] + hull[4] * (1 - (k & 2)) - o[1]
        gz = hull[2] + hull[5] * (1 - (k & 4) // 2) - o[2]
        gx, gy = lx * c - ly * s, lx * s + ly * c
        for i in range(3):
            corners[k, i] = pose[0, i] * gx + pose[1, i] * gy + pose[2, i] * gz
    left, right, top, bottom = 1e9, -1e9, 1e9, -1e9
    for k in range(8):
        for bit in (0, 1, 2, 4):
            other = k | bit
            if bit and other == k:
                continue
            x, y, z = corners[k, 0], corners[k, 1], corners[k, 2]
            if bit:
                z1 = corners[other, 2]
                if (z < front) == (z1 < front):
                    continue
                part = (front - z) / (z1 - z)
                x, y, z = x + part * (corners[other, 0] - x), y + part * (corners[other, 1] - y), front
            elif z < front:
                continue
            u = intrinsic[0, 0] * x / z + intrinsic[0, 2]
            v = intrinsic[1, 1] * y / z + intrinsic[1, 2]
            left, right, top, bottom = min(left, u), max(right, u), min(top, v), max(bottom, v)
    if right < left:
        return 0, -1, 0, -1
    last_column, last_row = min(width - 1.0, right + 1), min(height - 1.0, bottom + 1)
    return int(max(0.0, left)), int(max(last_column, -1.0)), int(max(0.0, top)), int(max(last_row, -1.0))


@numba.njit(cache=True)
def _render(
    image: NDArray[np.uint8], owner: NDArray[np.int32], totals: NDArray[np.int64], pose: Array, intrinsic: Array,
    poses: Array, hulls: Array, parts: Array, first_part: NDArray[np.int64], ground: NDArray[np.uint8],
    corner: Array, ground_colour: Array, sun: Array, exposure: float, haze: float, sky: Array,
) -> None:
    """Fill an image ``(H, W, 3)`` and the object that owns each pixel; add to ``totals`` ``(O,)`` the
    pixels that an object would cover if nothing stood before it."""
    height, width = owner.shape
    fx, fy, cx, cy = intrinsic[0, 0], intrinsic[1, 1], intrinsic[0, 2], intrinsic[1, 2]
    origin = pose[:3, 3]
    depth = np.full((height, width), 1e9)
    colour = np.empty(3)
    for v in range(height):
        for u in range(width):
            x, y = (u - cx) / fx, (v - cy) / fy
            gx = pose[0, 0] * x + pose[0, 1] * y + pose[0, 2]
            gy = pose[1, 0] * x + pose[1, 1] * y + pose[1, 2]
            gz = pose[2, 0] * x + pose[2, 1] * y + pose[2, 2]
            owner[v, u] = -1
            up = gz / math.sqrt(gx * gx + gy * gy + gz * gz)
            if gz < -1e-6 and -origin[2] / gz < 400.0:
                t = -origin[2] / gz
                wx, wy = origin[0] + t * gx, origin[1] + t * gy
                kind = _ground(ground, corner, wx, wy)
                # Coarser grain far away, where single cells would only flicker.
                cell = 0.2 if t < 15 else 0.8 if t < 40 else 3.2
                grain = _grain(int(math.floor(wx / cell)), int(math.floor(wy / cell)), kind)
                light = exposure * (0.82 + 0.2 * sun[2]) * (1.0 + (0.13 if kind == 0 else 0.05) * grain)
                mist = 1.0 - math.exp(-t * haze)
                for i in range(3):
                    colour[i] = ground_colour[kind, i] * light * (1 - mist) + sky[0, i] * exposure * mist
            else:
                high = min(1.0, max(0.0, 3.0 * up))
                for i in range(3):
                    colour[i] = exposure * (sky[0, i] * (1 - high) + sky[1, i] * high)
            for i in range(3):
                image[v, u, i] = int(min(255.0, max(0.0, colour[i])))
    o, d, inv = np.empty(3), np.empty(3), np.empty(3)
    corners = np.empty((8, 3))
    for n in range(len(poses)):
        c, s = math.cos(poses[n, 2]), math.sin(poses[n, 2])
        dx, dy = origin[0] - poses[n, 0], origin[1] - poses[n, 1]
        o[0], o[1], o[2] = dx * c + dy * s, -dx * s + dy * c, origin[2]
        u0, u1, v0, v1 = _footprint(corners, hulls[n], o, c, s, pose, intrinsic, height, width)
        for v in range(v0, v1 + 1):
            for u in range(u0, u1 + 1):
                x, y = (u - cx) / fx, (v - cy) / fy
                gx = pose[0, 0] * x + pose[0, 1] * y + pose[0, 2]
                gy = pose[1, 0] * x + pose[1, 1] * y + pose[1, 2]
                d[0], d[1] = gx * c + gy * s, -gx * s + gy * c
                d[2] = pose[2, 0] * x + pose[2, 1] * y + pose[2, 2]
                for i in range(3):
                    inv[i] = _inverse(d[i])
                best, best_part, best_face = _first_part(
                    o, inv, hulls[n], parts, first_part[n], first_part[n + 1], 300.0
                )
                if best_part < 0:
                    continue
                totals[n] += 1
                if best >= depth[v, u]:
                    continue
                depth[v, u] = best
                owner[v, u] = n
                part = parts[best_part]
                axis, positive = best_face // 2, best_face % 2
                lx = (o[0] + best * d[0] - part[0]) / part[3]
                ly = (o[1] + best * d[1] - part[1]) / part[4]
                lz = (o[2] + best * d[2] - part[2]) / part[5]
                start = 9 if best_face == 1 else 12 if best_face == 0 else 6
                for i in range(3):
                    colour[i] = part[start + i]
                pattern = part[18]
                glow = False
                lamps = pattern == 1 or (pattern == 4 and not positive)
                if lamps and axis == 0 and abs(ly) > 0.56 and abs(lz) < 0.75:
                    glow = True
                    colour[0], colour[1], colour[2] = (255, 250, 215) if positive else (235, 16, 20)
                elif pattern == 2 and axis != 2:
                    across = (ly if axis == 0 else lx) + 0.35 * lz
                    if int(math.floor(across * 3.0)) % 2 == 0:
                        colour[0], colour[1], colour[2] = 196, 34, 30
                elif pattern == 3 and axis != 2:
                    along = (ly * part[4] if axis == 0 else lx * part[3]) / 1.6
                    rise = lz * part[5] / 1.5
                    if along - math.floor(along) > 0.45 and rise - math.floor(rise) > 0.4:
                        colour[0], colour[1], colour[2] = 66, 76, 92
                sign = 1.0 if positive else -1.0
                if axis == 0:
                    facing = sign * (c * sun[0] + s * sun[1])
                elif axis == 1:
                    facing = sign * (-s * sun[0] + c * sun[1])
                else:
                    facing = sign * sun[2]
                light = exposure * (0.62 + 0.45 * max(0.0, facing))
                if glow:
                    light = max(light, 0.95)
                light *= 1.0 + 0.04 * _grain(int(lx * 9), int(ly * 9) + 31 * int(lz * 9), n)
                mist = 1.0 - math.exp(-best * haze)
                for i in range(3):
                    value = colour[i] * light * (1 - mist) + sky[0, i] * exposure * mist
                    image[v, u, i] = int(min(255.0, max(0.0, value)))


def render_camera(
    scene: Scene, pose: Array, intrinsic: Array, time_s: float, image_size: tuple[int, int]
) -> tuple[NDArray[np.uint8], NDArray[np.int32], NDArray[np.int64]]:
    """One picture.

    Args:
        pose: ``global_from_camera`` ``(4, 4)`` at ``time_s``. intrinsic: ``(3, 3)`` [px].
        image_size: height, width [px].

    Returns:
        RGB ``(H, W, 3)``; the object seen at each pixel ``(H, W)``, -1 for none; and the number of
        pixels ``(O,)`` that each object would cover if nothing stood before it.
    """
    image = np.empty((*image_size, 3), np.uint8)
    owner = np.empty(image_size, np.int32)
    totals = np.zeros(len(scene.sizes), np.int64)
    look = scene.look
    _render(
        image, owner, totals, pose, intrinsic, scene.object_poses(time_s), scene.hulls, scene.parts,
        scene.first_part, look.ground, look.corner, _GROUND_COLOUR, look.sun, look.exposure, look.haze, look.sky,
    )
    return image, owner, totals
