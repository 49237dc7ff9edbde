"""Ray-cast images of the synthetic cameras: one ray a pixel, coloured by the nearest part."""

import functools
import math
from typing import TYPE_CHECKING

import numba
import numpy as np
from numpy.typing import NDArray

from bev_lightning.data.synthetic.rays import find_part, ground_at, inverse
from bev_lightning.data.synthetic.rig import Array, Mount
from bev_lightning.data.synthetic.scene import Scene

if TYPE_CHECKING:
    from bev_lightning.data.camera_models import CameraModel

_GROUND_COLOUR = np.array(  # of GRASS .. LOT
    [[88.0, 104, 62], [92, 92, 94], [212, 210, 200], [142, 138, 132], [116, 112, 106]]
)


@numba.njit(cache=True, inline="always")
def _noise(x: int, y: int, seed: int) -> float:
    """Hash noise in -1..1 of a cell, for texture."""
    h = (x * 73856093) ^ (y * 19349663) ^ (seed * 83492791)
    h = ((h ^ (h >> 13)) * 1274126177) & 0x7FFFFFFF
    return ((h ^ (h >> 16)) & 0xFFFF) / 32767.5 - 1.0


@numba.njit(cache=True)
def _footprint(
    corners: Array,
    hull: Array,
    o: Array,
    c: float,
    s: float,
    pose: Array,
    intrinsic: Array,
    height: int,
    width: int,
) -> tuple[int, int, int, int]:
    """Bounding pixels of a hull: first and last column, first and last row (last < first: none).

    Edges are clipped at a plane just before the camera, so that an object beside it stays small.
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
                x += part * (corners[other, 0] - x)
                y += part * (corners[other, 1] - y)
                z = front
            elif z < front:
                continue
            u = intrinsic[0, 0] * x / z + intrinsic[0, 2]
            v = intrinsic[1, 1] * y / z + intrinsic[1, 2]
            left, right, top, bottom = min(left, u), max(right, u), min(top, v), max(bottom, v)
    if right < left:
        return 0, -1, 0, -1
    last_column = max(-1.0, min(width - 1.0, right + 1))
    last_row = max(-1.0, min(height - 1.0, bottom + 1))
    return int(max(0.0, left)), int(last_column), int(max(0.0, top)), int(last_row)


@numba.njit(cache=True)
def _render(
    pose: Array,
    rays: Array,
    intrinsic: Array,
    is_pinhole: bool,
    poses: Array,
    hulls: Array,
    parts: Array,
    first_part: NDArray[np.int64],
    ground: NDArray[np.uint8],
    corner: Array,
    sun: Array,
    exposure: float,
    haze: float,
    sky: Array,
) -> tuple[NDArray[np.uint8], NDArray[np.int32], NDArray[np.int64]]:
    """What :func:`render_camera` returns.

    The rays of the pixels are in the camera's frame; where they are NaN, the pixel is black.
    """
    height, width = rays.shape[:2]
    image = np.empty((height, width, 3), np.uint8)
    owner = np.full((height, width), -1, np.int32)
    totals = np.zeros(len(poses), np.int64)
    origin = pose[:3, 3]
    depth = np.full((height, width), 1e9)
    colour = np.empty(3)
    for v in range(height):
        for u in range(width):
            x, y, z = rays[v, u, 0], rays[v, u, 1], rays[v, u, 2]
            gx = pose[0, 0] * x + pose[0, 1] * y + pose[0, 2] * z
            gy = pose[1, 0] * x + pose[1, 1] * y + pose[1, 2] * z
            gz = pose[2, 0] * x + pose[2, 1] * y + pose[2, 2] * z
            if math.isnan(x):
                image[v, u] = 0
                continue
            up = gz / math.sqrt(gx * gx + gy * gy + gz * gz)
            if gz < -1e-6 and -origin[2] / gz < 400.0:
                t = -origin[2] / gz
                wx, wy = origin[0] + t * gx, origin[1] + t * gy
                kind = ground_at(ground, corner, wx, wy)
                # Coarser grain far away, where single cells would only flicker.
                cell = 0.2 if t < 15 else 0.8 if t < 40 else 3.2
                grain = _noise(int(math.floor(wx / cell)), int(math.floor(wy / cell)), kind)
                light = (
                    exposure * (0.82 + 0.2 * sun[2]) * (1.0 + (0.13 if kind == 0 else 0.05) * grain)
                )
                mist = 1.0 - math.exp(-t * haze)
                for i in range(3):
                    colour[i] = (
                        _GROUND_COLOUR[kind, i] * light * (1 - mist) + sky[0, i] * exposure * mist
                    )
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
        u0, u1, v0, v1 = 0, width - 1, 0, height - 1
        if is_pinhole:
            u0, u1, v0, v1 = _footprint(corners, hulls[n], o, c, s, pose, intrinsic, height, width)
        for v in range(v0, v1 + 1):
            for u in range(u0, u1 + 1):
                x, y, z = rays[v, u, 0], rays[v, u, 1], rays[v, u, 2]
                if math.isnan(x):
                    continue
                gx = pose[0, 0] * x + pose[0, 1] * y + pose[0, 2] * z
                gy = pose[1, 0] * x + pose[1, 1] * y + pose[1, 2] * z
                d[0], d[1] = gx * c + gy * s, -gx * s + gy * c
                d[2] = pose[2, 0] * x + pose[2, 1] * y + pose[2, 2] * z
                for i in range(3):
                    inv[i] = inverse(d[i])
                best, best_part, best_face = find_part(
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
                light *= 1.0 + 0.04 * _noise(int(lx * 9), int(ly * 9) + 31 * int(lz * 9), n)
                mist = 1.0 - math.exp(-best * haze)
                for i in range(3):
                    value = colour[i] * light * (1 - mist) + sky[0, i] * exposure * mist
                    image[v, u, i] = int(min(255.0, max(0.0, value)))
    return image, owner, totals


def render_camera(
    scene: Scene, pose: Array, mount: Mount, time_s: float
) -> tuple[NDArray[np.uint8], NDArray[np.int32], NDArray[np.int64]]:
    """Render one image.

    Args:
        pose: ``global_from_camera`` ``(4, 4)`` at ``time_s``.
        mount: of the camera: size, intrinsic and camera model.

    Returns:
        RGB ``(H, W, 3)``; the object seen at each pixel ``(H, W)``, -1 for none; and the number of
        pixels ``(O,)`` that each object would cover without occlusion.
    """
    assert mount.intrinsic is not None
    appearance = scene.appearance
    return _render(
        pose,
        _find_rays(mount),
        mount.intrinsic,
        mount.camera_model is None,
        *scene.geometry(time_s),
        appearance.sun,
        appearance.exposure,
        appearance.haze,
        appearance.sky,
    )


def _find_rays(mount: Mount) -> Array:
    """Ray of each pixel ``(H, W, 3)`` in the camera's frame, as :meth:`CameraModel.unproject`."""
    if mount.camera_model is not None:
        return _unproject_all(mount.camera_model, mount.image_size)
    assert mount.intrinsic is not None
    height, width = mount.image_size
    rays = np.ones((height, width, 3))
    rays[..., 0] = (np.arange(width) - mount.intrinsic[0, 2]) / mount.intrinsic[0, 0]
    rays[..., 1] = ((np.arange(height) - mount.intrinsic[1, 2]) / mount.intrinsic[1, 1])[:, None]
    return rays


@functools.lru_cache(maxsize=16)
def _unproject_all(camera_model: "CameraModel", image_size: tuple[int, int]) -> Array:
    import torch  # late: pinhole rigs need no torch

    v, u = (torch.arange(length, dtype=torch.float64) for length in image_size)
    pixels = torch.stack(torch.meshgrid(u, v, indexing="xy"), dim=-1)
    return np.asarray(camera_model.unproject(pixels).numpy())
