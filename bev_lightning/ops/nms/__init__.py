"""Non-maximum suppression of boxes seen from above.

All samples at once. The rule is greedy: a box is kept unless a kept box of its group that comes
before it, by score, is near. Decoding is not on the training path and has no gradient.
"""

import torch
from torch import Tensor

from bev_lightning.ops.backend import choose


@torch.no_grad()
def circle_nms(
    centre: Tensor,
    score: Tensor,
    radius_m: float | Tensor,
    group: Tensor | None = None,
    valid: Tensor | None = None,
) -> Tensor:
    """Suppress every box whose centre lies within a radius of a kept box with a higher score.

    The published code compares the SQUARED distance with its radius; ours is a radius, so give
    ``sqrt(r)`` to get what that code does with ``r``.

    Args:
        centre: ``(..., N, 2)`` x, y [m].
        score: ``(..., N)``; between equal scores the lower index comes first.
        radius_m: one radius, or ``(..., N)`` that of each box as the suppressor; a distance equal
            to it suppresses, zero or less suppresses nothing.
        group: ``(..., N)`` boxes suppress only those of their own group (class). None: one group.
        valid: ``(..., N)`` bool boxes that take part. None: all.

    Returns:
        ``(..., N)`` bool, the boxes kept; never one that is not valid.
    """
    radius = torch.as_tensor(radius_m, dtype=torch.float32, device=centre.device)
    boxes = torch.cat([centre.float(), radius.expand(score.shape).unsqueeze(-1)], dim=-1)
    boxes, group, start, order = _sort(boxes, score, group, valid)
    if choose(boxes.device) == "numba":
        from bev_lightning.ops.nms.cpu import keep_circles

        keep = keep_circles(boxes, group, start)
    else:
        xy, reach = boxes[..., :2], boxes[..., 2].unsqueeze(-1)
        offset = xy.unsqueeze(-2) - xy.unsqueeze(-3)
        near = (offset.square().sum(-1) <= reach.square()) & (reach > 0)
        keep = _keep_plainly(near, group, start)
    return torch.zeros_like(keep).scatter(-1, order, keep)


@torch.no_grad()
def rotated_nms(
    boxes: Tensor,
    score: Tensor,
    most_overlap: float,
    group: Tensor | None = None,
    valid: Tensor | None = None,
) -> Tensor:
    """Suppress every box that overlaps a kept box with a higher score.

    Args:
        boxes: ``(..., N, 5)`` x, y of the centre, length, width [m], yaw [rad].
        score: ``(..., N)``; between equal scores the lower index comes first.
        most_overlap: an intersection over union above it suppresses.
        group: ``(..., N)`` boxes suppress only those of their own group (class). None: one group.
        valid: ``(..., N)`` bool boxes that take part. None: all.

    Returns:
        ``(..., N)`` bool, the boxes kept; never one that is not valid.
    """
    boxes, group, start, order = _sort(boxes.float(), score, group, valid)
    if choose(boxes.device) == "numba":
        from bev_lightning.ops.nms.cpu import keep_rotated

        keep = keep_rotated(boxes, group, start, most_overlap)
    else:
        near = rotated_iou(boxes.unsqueeze(-2), boxes.unsqueeze(-3)) > most_overlap
        keep = _keep_plainly(near, group, start)
    return torch.zeros_like(keep).scatter(-1, order, keep)


def rotated_iou(one: Tensor, other: Tensor) -> Tensor:
    """Intersection over union of rectangles.

    Moving every point of the plane to the nearest one of a rectangle leaves the area inside as it
    is and flattens all outside; so the intersection's area is that which the other rectangle's
    outline encloses after it was moved so. No case of parallel or touching edges is special.

    Args:
        one, other: ``(..., 5)`` x, y of the centre, length, width [m], yaw [rad]; they broadcast.
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
    # The integral of x dy: an edge contributes where its y is inside, with its x moved inside.
    begin, end = _when_inside(y, step_y, half[..., 1, :])
    enter, leave = _when_inside(x, step_x, half[..., 0, :])
    times = [begin, enter.clamp(begin, end), leave.clamp(begin, end), end]
    limit = half[..., 0, :]
    moved = [(x + time * step_x).clamp(-limit, limit) for time in times]
    integral = torch.zeros_like(x)
    for k in (0, 1, 2):
        integral = integral + (times[k + 1] - times[k]) * (moved[k] + moved[k + 1]) / 2
    area = (integral * step_y).sum(-1)
    both = one[..., 2:4].prod(-1) + other[..., 2:4].prod(-1)
    # What is below the rounding of the sum is nothing: boxes that touch do not overlap.
    return torch.where(area > 1e-6 * both, area / (both - area), 0.0)


def _when_inside(begin: Tensor, step: Tensor, limit: Tensor) -> tuple[Tensor, Tensor]:
    """From and until which time in 0..1 ``begin + time * step`` lies within ``+-limit``; without a
    step the answer does not matter."""
    step = torch.where(step == 0, 1.0, step)
    first, second = (-limit - begin) / step, (limit - begin) / step
    return torch.minimum(first, second).clamp(0, 1), torch.maximum(first, second).clamp(0, 1)


def _sort(
    boxes: Tensor, score: Tensor, group: Tensor | None, valid: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Boxes, groups and who takes part by falling score, and the order."""
    valid = torch.ones_like(score, dtype=torch.bool) if valid is None else valid
    group = torch.zeros_like(score, dtype=torch.int64) if group is None else group
    order = (
        score.float().masked_fill(~valid, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    )
    index = order.unsqueeze(-1).expand(*order.shape, boxes.shape[-1])
    return boxes.gather(-2, index), group.gather(-1, order), valid.gather(-1, order), order


def _keep_plainly(near: Tensor, group: Tensor, start: Tensor) -> Tensor:
    """The greedy rule, iterated from "all kept" until nothing changes, for any device.

    After k rounds every box at the end of a chain of k suppressions is decided, so that a few
    rounds do in practice and as many as boxes always. Each round asks the device once whether it
    changed anything.
    """
    # [i, j]: i comes before j and would suppress it.
    near = (near & (group.unsqueeze(-1) == group.unsqueeze(-2))).triu(diagonal=1)
    keep = start
    while True:
        suppressed = (near & keep.unsqueeze(-1)).any(dim=-2)
        decided = start & ~suppressed
        if torch.equal(decided, keep):
            return keep
        keep = decided
