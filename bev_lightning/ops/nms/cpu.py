"""Numba CPU kernel of non-maximum suppression, compiled on first use.

A box is compared only with kept boxes, until one suppresses it.
"""

import numpy as np
import torch
from numba import njit
from torch import Tensor


def keep_circles(boxes: Tensor, group: Tensor, valid: Tensor) -> Tensor:
    """The boxes kept ``(..., N)``, of ``(..., N, 3)`` x, y, radius sorted by score."""
    keep = torch.zeros_like(valid)
    if valid.numel():
        rows = [one.view(-1, valid.shape[-1]).numpy() for one in (group, valid, keep)]
        _keep_circles(boxes.view(-1, *boxes.shape[-2:]).numpy(), *rows)
    return keep


@njit(cache=True, nogil=True)
def _keep_circles(boxes, group, valid, keep):  # type: ignore[no-untyped-def]
    num_boxes = valid.shape[1]
    kept = np.empty(num_boxes, np.int64)
    for sample in range(len(valid)):
        num_kept = 0
        for j in range(num_boxes):
            if not valid[sample, j]:
                continue
            x, y = boxes[sample, j, 0], boxes[sample, j, 1]
            is_kept = True
            for k in range(num_kept):
                i = kept[k]
                radius = boxes[sample, i, 2]
                dx, dy = boxes[sample, i, 0] - x, boxes[sample, i, 1] - y
                if (
                    radius > 0
                    and dx * dx + dy * dy <= radius * radius
                    and group[sample, i] == group[sample, j]
                ):
                    is_kept = False
                    break
            if is_kept:
                keep[sample, j] = True
                kept[num_kept] = j
                num_kept += 1
