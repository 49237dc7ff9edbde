"""Non-maximum suppression of boxes in the bird's-eye view, for all samples of a batch at once.

Greedy: in the order of falling score, a box is kept unless it is close to a kept box of its group.
There is no gradient.
"""

import torch
from torch import Tensor

from bev_lightning.ops.backend import choose_backend
from bev_lightning.ops.nms.reference import keep_circles_reference


@torch.no_grad()
def circle_nms(
    centre: Tensor,
    score: Tensor,
    radius_m: float | Tensor,
    group: Tensor | None = None,
    valid: Tensor | None = None,
) -> Tensor:
    """Suppress every box whose centre lies within a radius of a kept box with a higher score.

    The published code compares the SQUARED distance with its radius; here it is a true radius, so
    pass ``sqrt(r)`` to get what that code does with ``r``.

    Args:
        centre: ``(..., N, 2)`` x, y [m].
        score: ``(..., N)``; between equal scores the lower index comes first.
        radius_m: one radius, or ``(..., N)`` the radius within which each box suppresses others; a
            distance equal to it suppresses, zero or less suppresses nothing.
        group: ``(..., N)`` boxes suppress only boxes of the same group (class). None: one group.
        valid: ``(..., N)`` bool boxes that take part. None: all.

    Returns:
        ``(..., N)`` bool, the boxes kept; False for invalid boxes.
    """
    radius = torch.as_tensor(radius_m, dtype=torch.float32, device=centre.device)
    boxes = torch.cat([centre.float(), radius.expand(score.shape).unsqueeze(-1)], dim=-1)
    valid = torch.ones_like(score, dtype=torch.bool) if valid is None else valid
    group = torch.zeros_like(score, dtype=torch.int64) if group is None else group
    order = (
        score.float().masked_fill(~valid, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    )
    boxes = boxes.gather(-2, order.unsqueeze(-1).expand_as(boxes))
    group, valid = group.gather(-1, order), valid.gather(-1, order)
    if choose_backend(boxes.device) == "numba":
        from bev_lightning.ops.nms import cpu

        keep = cpu.keep_circles(boxes, group, valid)
    else:
        keep = keep_circles_reference(boxes, group, valid)
    return torch.zeros_like(keep).scatter(-1, order, keep)
