"""Intersection over union of upright boxes with a yaw."""

import torch
from torch import Tensor

from bev_lightning.losses.functional import widen


def overlap_area(first: Tensor, second: Tensor) -> Tensor:
    """Area [m2] that two rectangles share, ``(...)``; leading dimensions broadcast.

    Polygon clipping against an axis-aligned rectangle, by clamping, without branches: in the frame
    of the second rectangle, each edge of the first is split where it crosses the four border lines,
    and all points are clamped to ``|x| <= l / 2, |y| <= w / 2``. Parts outside collapse onto the
    border and enclose no area, so the shoelace formula on the clamped polygon gives the
    intersection. No tolerances: coinciding edges, equal and enclosed boxes are no special cases.

    Args:
        first, second: ``(..., 5) [x, y, l, w, yaw]`` metres and radians.
    """
    first, second = widen(first), widen(second)
    turn = first[..., 4] - second[..., 4]
    cos, sin = second[..., 4].cos(), second[..., 4].sin()
    offset = first[..., :2] - second[..., :2]
    origin_x = offset[..., 0] * cos + offset[..., 1] * sin
    origin_y = offset[..., 1] * cos - offset[..., 0] * sin
    along = 0.5 * first[..., 2, None] * torch.stack([turn.cos(), turn.sin()], dim=-1)
    across = 0.5 * first[..., 3, None] * torch.stack([-turn.sin(), turn.cos()], dim=-1)
    corners = torch.stack([along + across, across - along, -along - across, along - across], dim=-2)
    start = corners + torch.stack([origin_x, origin_y], dim=-1).unsqueeze(-2)  # (..., 4, 2), CCW
    edge = start.roll(-1, dims=-2) - start

    bound = 0.5 * second[..., None, 2:4]
    half = bound.expand_as(start)
    safe = torch.where(edge.abs() < 1e-9, torch.full_like(edge, 1e-9), edge)
    crossings = torch.stack([(-half - start) / safe, (half - start) / safe], dim=-1).clamp(0.0, 1.0)
    low, high = crossings.amin(-1), crossings.amax(-1)  # (..., 4, 2): for x and for y
    middle = torch.stack([low.amax(-1), high.amin(-1)], dim=-1)
    share = torch.stack([low.amin(-1), middle.amin(-1), middle.amax(-1), high.amax(-1)], dim=-1)
    outline = start.unsqueeze(-2) + share.unsqueeze(-1) * edge.unsqueeze(-2)
    outline = torch.cat([start.unsqueeze(-2), outline], dim=-2).flatten(-3, -2)  # (..., 20, 2)
    outline = torch.minimum(torch.maximum(outline, -bound), bound)
    following = outline.roll(-1, dims=-2)
    doubled = outline[..., 0] * following[..., 1] - outline[..., 1] * following[..., 0]
    return (0.5 * doubled.sum(-1)).clamp(min=0.0)


def pairwise_iou(first: Tensor, second: Tensor) -> Tensor:
    """Intersection over union of volumes ``(..., N, M)`` of ``(..., N, 7)`` and ``(..., M, 7)``.

    On a CPU the area is computed only of pairs whose circumscribed circles touch, which are few.
    On a GPU selecting them would synchronise, which costs more than computing all pairs.

    Args:
        first, second: ``[x, y, z, l, w, h, yaw]``, z of the centre; metres and radians.
    """
    first, second = widen(first), widen(second)
    shape = (*first.shape[:-1], second.shape[-2], 7)
    first = first.unsqueeze(-2).expand(shape)
    second = second.unsqueeze(-3).expand(shape)
    if first.is_cuda:
        area = overlap_area(_bev_boxes(first), _bev_boxes(second))
    else:
        reach = 0.5 * (first[..., 3:5].norm(dim=-1) + second[..., 3:5].norm(dim=-1))
        near = (first[..., :2] - second[..., :2]).norm(dim=-1) <= reach
        area = first.new_zeros(near.shape)
        area[near] = overlap_area(_bev_boxes(first[near]), _bev_boxes(second[near]))
    (z, half), (other_z, other_half) = ((b[..., 2], 0.5 * b[..., 5]) for b in (first, second))
    top = torch.minimum(z + half, other_z + other_half)
    bottom = torch.maximum(z - half, other_z - other_half)
    shared = area * (top - bottom).clamp(min=0.0)
    volumes = first[..., 3:6].prod(-1) + second[..., 3:6].prod(-1)
    return shared / (volumes - shared).clamp(min=1e-8)


def _bev_boxes(boxes: Tensor) -> Tensor:
    """``(..., 7)`` to ``(..., 5) [x, y, l, w, yaw]``. Slices, since indexing with a list copies the
    list to the GPU and synchronises."""
    return torch.cat([boxes[..., :2], boxes[..., 3:5], boxes[..., 6:]], dim=-1)
