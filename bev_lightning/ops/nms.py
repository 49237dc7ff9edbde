"""Non-maximum suppression of boxes seen from above."""

import torch
from torch import Tensor


def circle_nms(
    centre: Tensor,
    score: Tensor,
    radius_m: float | Tensor,
    group: Tensor | None = None,
    valid: Tensor | None = None,
) -> Tensor:
    """Suppress every box whose centre lies within a radius of a kept box with a higher score.

    All samples at once. The greedy rule "kept unless a kept box before it is near" is iterated from
    "all kept" until nothing changes; after k rounds every box at the end of a chain of k
    suppressions is decided, so that a few rounds do in practice and as many as boxes always. Each
    round asks the device once whether it changed anything: decoding is not on the training path.

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
    valid = torch.ones_like(score, dtype=torch.bool) if valid is None else valid
    radius = torch.as_tensor(radius_m, dtype=torch.float32, device=centre.device).expand(
        score.shape
    )
    order = (
        score.float().masked_fill(~valid, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    )
    xy = centre.float().gather(-2, order.unsqueeze(-1).expand(*order.shape, 2))
    offset = xy.unsqueeze(-2) - xy.unsqueeze(-3)
    radius = radius.gather(-1, order).unsqueeze(-1)
    near = (offset.square().sum(-1) <= radius.square()) & (radius > 0)
    if group is not None:
        group = group.gather(-1, order)
        near &= group.unsqueeze(-1) == group.unsqueeze(-2)
    near = near.triu(diagonal=1)  # [i, j]: i comes before j and would suppress it

    start = valid.gather(-1, order)
    keep = start
    while True:
        suppressed = (near & keep.unsqueeze(-1)).any(dim=-2)
        decided = start & ~suppressed
        if torch.equal(decided, keep):
            break
        keep = decided
    return torch.zeros_like(keep).scatter(-1, order, keep)
