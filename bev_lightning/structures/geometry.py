"""Rigid and projective transforms.

A transform is named ``dst_from_src``: a ``(..., 4, 4)`` matrix that maps homogeneous column vectors
of the frame ``src`` to the frame ``dst``, so that adjacent names cancel in a product:
``image_from_global = image_from_lidar @ lidar_from_global``.

An *image* frame holds ``(u * d, v * d, d, 1)`` for the pixel ``(u, v)`` at depth ``d`` metres;
pixel ``(0, 0)`` is the CENTRE of the top-left pixel, as in the nuScenes intrinsics and OpenCV.
"""

import math

import torch
from torch import Tensor

from bev_lightning.structures.constants import constant


def make_transform(rotation: Tensor, translation: Tensor) -> Tensor:
    """Assemble ``dst_from_src`` ``(..., 4, 4)`` from rotation ``(..., 3, 3)`` and translation
    ``(..., 3)`` [m], the origin of ``src`` seen from ``dst``."""
    top = torch.cat([rotation, translation.unsqueeze(-1)], dim=-1)
    bottom = constant((0.0, 0.0, 0.0, 1.0), top).expand(*top.shape[:-2], 1, 4)
    return torch.cat([top, bottom], dim=-2)


def apply_transform(dst_from_src: Tensor, points: Tensor) -> Tensor:
    """Transform points ``(..., P, 3)`` [m] from ``src`` to ``dst``; leading dimensions broadcast.

    Computed in the higher of the two precisions: at 50 m bfloat16 rounds by decimetres, TF32 by
    centimetres. Written as a sum of scaled columns, because autocast and TF32 would round a matrix
    product.
    """
    dtype = torch.promote_types(dst_from_src.dtype, points.dtype)
    x, y, z = points.to(dtype).unsqueeze(-1).unbind(-2)  # (..., P, 1)
    columns = dst_from_src.to(dtype)[..., None, :3, :].unbind(-1)  # (..., 1, 3)
    moved: Tensor = x * columns[0] + y * columns[1] + z * columns[2] + columns[3]
    return moved


def project(image_from_src: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
    """Project points ``(..., P, 3)`` [m] into images.

    Returns:
        pixels ``(..., P, 2)`` as u (right), v (down), and depth ``(..., P)`` [m] along the optical
        axis. Pixels with a depth of 0 or less are meaningless (divided by 1e-5 m).
    """
    image = apply_transform(image_from_src, points)
    depth = image[..., 2]
    return image[..., :2] / depth.clamp(min=1e-5).unsqueeze(-1), depth


def yaw_of(dst_from_src: Tensor) -> Tensor:
    """Yaw ``(...)`` [rad] of the x axis of ``src`` in the x-y plane of ``dst``, CCW."""
    return torch.atan2(dst_from_src[..., 1, 0], dst_from_src[..., 0, 0])


def wrap_angle(angle: Tensor) -> Tensor:
    """The same angle [rad] in (-pi, pi]."""
    return math.pi - torch.remainder(math.pi - angle, 2 * math.pi)
