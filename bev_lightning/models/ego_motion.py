"""Aligns the previous BEV map with the current frame (BEVFormer, section 3.4)."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from bev_lightning.structures import BevGrid
from bev_lightning.structures.geometry import yaw_of


@dataclass(frozen=True)
class EgoMotion:
    """Motion of the model frame since the previous frame.

    Attributes:
        shift: ``(B, 2)`` x, y [m]: a point at p now is at p + shift in the rotated previous map.
        rotation: ``(B,)`` [rad], counter-clockwise.
    """

    shift: Tensor
    rotation: Tensor


def motion_from_can_bus(can_bus: Tensor) -> EgoMotion:
    """Motion as the published code reads it from ``(B, 18)``, with the change of the ego's position
    0:2 [m] and yaw 17 [degrees], and its yaw 16 [rad].

    It assumes the lidar at the ego's position with its y axis in the direction of travel, which is
    right to some centimetres, and ignores BEV augmentation.
    """
    can_bus = can_bus.float()
    length = can_bus[:, :2].norm(dim=-1)
    angle = can_bus[:, 16] - torch.atan2(can_bus[:, 1], can_bus[:, 0])
    shift = torch.stack([length * angle.sin(), length * angle.cos()], dim=-1)
    return EgoMotion(shift, can_bus[:, 17] * (math.pi / 180.0))


def motion_from_pose(lidar_from_previous_lidar: Tensor) -> EgoMotion:
    """Motion of the model frame itself from ``(B, 4, 4)``; right for any sensor, and under BEV
    augmentation if both frames have the same."""
    pose = lidar_from_previous_lidar.float()
    return EgoMotion(-pose[:, :2, 3], -yaw_of(pose))


def rotate_map(bev: Tensor, rotation: Tensor, centre: tuple[float, float]) -> Tensor:
    """Rotate a map: nearest cells, zero outside of it.

    Args:
        bev: ``(B, C, Y, X)``.
        rotation: ``(B,)`` [rad], counter-clockwise about ``centre``.
        centre: x, y in cells; the first cell's centre is 0.5.
    """
    height, width = bev.shape[-2:]
    with torch.autocast(bev.device.type, enabled=False):
        rotation = rotation.float()
        x = torch.arange(width, device=bev.device) + 0.5 - centre[0]
        y = (torch.arange(height, device=bev.device) + 0.5 - centre[1]).unsqueeze(-1)
        cos, sin = rotation.cos().view(-1, 1, 1), rotation.sin().view(-1, 1, 1)
        source_x = (cos * x - sin * y + centre[0]) / (0.5 * width) - 1.0
        source_y = (sin * x + cos * y + centre[1]) / (0.5 * height) - 1.0
        source = torch.stack([source_x, source_y], dim=-1)
        rotated = F.grid_sample(
            bev.float(), source, mode="nearest", padding_mode="zeros", align_corners=False
        )
    return rotated.to(bev.dtype)


def origin_cell(grid: BevGrid) -> tuple[float, float]:
    """Position x, y of the model frame's origin in cells."""
    return -grid.range[0] / grid.cell[0], -grid.range[1] / grid.cell[1]
