"""Plain PyTorch implementation of non-maximum suppression and of the overlap of rotated boxes."""

import torch
from torch import Tensor


def keep_circles_reference(boxes: Tensor, group: Tensor, valid: Tensor) -> Tensor:
    """The boxes kept ``(..., N)``, of ``(..., N, 3)`` x, y, radius sorted by score."""
    xy, radius = boxes[..., :2], boxes[..., 2].unsqueeze(-1)
    offset = xy.unsqueeze(-2) - xy.unsqueeze(-3)
    near = (offset.square().sum(-1) <= radius.square()) & (radius > 0)
    return _keep_greedily(near, group, valid)


def keep_rotated_reference(
    boxes: Tensor, group: Tensor, valid: Tensor, most_overlap: float
) -> Tensor:
    """The boxes kept ``(..., N)``, of ``(..., N, 5)`` boxes sorted by score."""
    near = rotated_iou(boxes.unsqueeze(-2), boxes.unsqueeze(-3)) > most_overlap
    return _keep_greedily(near, group, valid)


def rotated_iou(one: Tensor, other: Tensor) -> Tensor:
    """Intersection over union of rotated rectangles.

    Clamping every point of the plane to one rectangle leaves the area inside as it is and flattens
    everything outside. So the intersection is the area enclosed by the clamped outline of the other
    rectangle, and parallel or touching edges need no special case.

    Args:
        one, other: ``(..., 5)`` x, y of the centre, length, width [m], yaw [rad]; broadcastable.
    """
    one, other = torch.broadcast_tensors(one, other)  # type: ignore[no-untyped-call]
    half = other[..., 2:4, None] / 2
    turn = one[..., 4] - other[..., 4]
    from_x, from_y = (one[..., :2] - other[..., :2]).unbind(-1)
    cos, sin = other[..., 4].cos(), other[..., 4].sin()
    middle_x, middle_y = from_x * cos + from_y * sin, from_y * cos - from_x * sin
    cos, sin = turn.cos().unsqueeze(-1), turn.sin().unsqueeze(-1)
    # The corners counter-clockwise, in the frame of the other rectangle.
    along = one[..., 2:3] / 2 * one.new_tensor([-1.0, 1.0, 1.0, -1.0])
    across = one[..., 3:4] / 2 * one.new_tensor([-1.0, -1.0, 1.0, 1.0])
    x = along * cos - across * sin + middle_x.unsqueeze(-1)
    y = along * sin + across * cos + middle_y.unsqueeze(-1)
    step_x, step_y = x.roll(-1, -1) - x, y.roll(-1, -1) - y
    # The integral of x dy: an edge contributes where its y is inside, with its x clamped.
    begin, end = _inside_interval(y, step_y, half[..., 1, :])
    enter, leave = _inside_interval(x, step_x, half[..., 0, :])
    times = [begin, enter.clamp(begin, end), leave.clamp(begin, end), end]
    limit = half[..., 0, :]
    clamped = [(x + time * step_x).clamp(-limit, limit) for time in times]
    integral = torch.zeros_like(x)
    for k in (0, 1, 2):
        integral = integral + (times[k + 1] - times[k]) * (clamped[k] + clamped[k + 1]) / 2
    area = (integral * step_y).sum(-1)
    both = one[..., 2:4].prod(-1) + other[..., 2:4].prod(-1)
    # Areas below the rounding error of the sum count as zero: boxes that touch do not overlap.
    return torch.where(area > 1e-6 * both, area / (both - area), 0.0)


def _inside_interval(begin: Tensor, step: Tensor, limit: Tensor) -> tuple[Tensor, Tensor]:
    """The interval of t in 0..1 in which ``begin + t * step`` lies within ``+-limit``; arbitrary
    for a zero step."""
    step = torch.where(step == 0, 1.0, step)
    first, second = (-limit - begin) / step, (limit - begin) / step
    return torch.minimum(first, second).clamp(0, 1), torch.maximum(first, second).clamp(0, 1)


def _keep_greedily(near: Tensor, group: Tensor, valid: Tensor) -> Tensor:
    """Greedy suppression, iterated from "all kept" until nothing changes.

    After k rounds every box at the end of a chain of k suppressions is decided: usually a few
    rounds suffice, N at most. Each round synchronises with the device once, to see whether anything
    changed.
    """
    # [i, j]: i comes before j and would suppress it.
    near = (near & (group.unsqueeze(-1) == group.unsqueeze(-2))).triu(diagonal=1)
    keep = valid
    while True:
        suppressed = (near & keep.unsqueeze(-1)).any(dim=-2)
        decided = valid & ~suppressed
        if torch.equal(decided, keep):
            return keep
        keep = decided
