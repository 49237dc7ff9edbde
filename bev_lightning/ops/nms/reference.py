"""Plain PyTorch implementation of non-maximum suppression."""

import torch
from torch import Tensor


def keep_circles_reference(boxes: Tensor, group: Tensor, valid: Tensor) -> Tensor:
    """The boxes kept ``(..., N)``, of ``(..., N, 3)`` x, y, radius sorted by score.

    Iterates from "all kept" until nothing changes. After k rounds every box at the end of a chain
    of k suppressions is decided: usually a few rounds suffice, N at most. Each round synchronises
    with the device once, to see whether anything changed.
    """
    xy, radius = boxes[..., :2], boxes[..., 2].unsqueeze(-1)
    offset = xy.unsqueeze(-2) - xy.unsqueeze(-3)
    near = (offset.square().sum(-1) <= radius.square()) & (radius > 0)
    # [i, j]: i comes before j and would suppress it.
    near = (near & (group.unsqueeze(-1) == group.unsqueeze(-2))).triu(diagonal=1)
    keep = valid
    while True:
        suppressed = (near & keep.unsqueeze(-1)).any(dim=-2)
        decided = valid & ~suppressed
        if torch.equal(decided, keep):
            return keep
        keep = decided
