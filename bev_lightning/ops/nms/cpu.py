"""Numba CPU kernels of non-maximum suppression, compiled on first use.

A box is compared only with kept boxes, until one suppresses it.
"""

import math
from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor


def keep_circles(boxes: Tensor, group: Tensor, valid: Tensor) -> Tensor:
    """The boxes kept ``(..., N)``, of ``(..., N, 3)`` x, y, radius sorted by score."""
    keep = torch.zeros_like(valid)
    if valid.numel():
        _keep_circles(*_rows(boxes, group, valid, keep))
    return keep


def keep_rotated(boxes: Tensor, group: Tensor, valid: Tensor, most_overlap: float) -> Tensor:
    """The boxes kept ``(..., N)``, of ``(..., N, 5)`` boxes sorted by score."""
    keep = torch.zeros_like(valid)
    if valid.numel():
        _keep_rotated(most_overlap, *_rows(boxes, group, valid, keep))
    return keep


def _rows(boxes: Tensor, *others: Tensor) -> list[NDArray[Any]]:
    """Views of contiguous tensors with a single leading dimension, as arrays."""
    num_boxes, columns = boxes.shape[-2:]
    rows = [boxes.view(-1, num_boxes, columns), *(other.view(-1, num_boxes) for other in others)]
    return [row.numpy() for row in rows]


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


@njit(cache=True, nogil=True)
def _keep_rotated(most_overlap, boxes, group, valid, keep):  # type: ignore[no-untyped-def]
    num_boxes = valid.shape[1]
    kept = np.empty(num_boxes, np.int64)
    for sample in range(len(valid)):
        num_kept = 0
        for j in range(num_boxes):
            if not valid[sample, j]:
                continue
            is_kept = True
            for k in range(num_kept):
                i = kept[k]
                if (
                    group[sample, i] == group[sample, j]
                    and _iou(boxes[sample, i], boxes[sample, j]) > most_overlap
                ):
                    is_kept = False
                    break
            if is_kept:
                keep[sample, j] = True
                kept[num_kept] = j
                num_kept += 1


@njit(cache=True, nogil=True)
def _iou(one, other):  # type: ignore[no-untyped-def]
    """Intersection over union of two boxes, see ``reference.rotated_iou``."""
    from_x, from_y = one[0] - other[0], one[1] - other[1]
    reach = math.hypot(one[2], one[3]) + math.hypot(other[2], other[3])
    if 4 * (from_x * from_x + from_y * from_y) > reach * reach:
        return 0.0
    cos, sin = math.cos(other[4]), math.sin(other[4])
    middle_x, middle_y = from_x * cos + from_y * sin, from_y * cos - from_x * sin
    cos, sin = math.cos(one[4] - other[4]), math.sin(one[4] - other[4])
    # Half of the length and of the width, rotated.
    ax, ay = one[2] / 2 * cos, one[2] / 2 * sin
    bx, by = -one[3] / 2 * sin, one[3] / 2 * cos
    limit_x, limit_y = other[2] / 2, other[3] / 2
    area = 0.0
    for k in range(4):
        # The corners -- +- ++ -+ of both halves, and the step to the next one.
        i, j = (-1, 1, 1, -1)[k], (-1, -1, 1, 1)[k]
        x, y = middle_x + i * ax + j * bx, middle_y + i * ay + j * by
        if k % 2 == 0:
            step_x, step_y = -2 * i * ax, -2 * i * ay
        else:
            step_x, step_y = -2 * j * bx, -2 * j * by
        if step_y == 0:
            continue
        begin, end = _inside_interval(y, step_y, limit_y)
        if begin >= end:
            continue
        enter, leave = begin, end
        if step_x != 0:
            enter, leave = _inside_interval(x, step_x, limit_x)
        time = begin
        clamped = min(max(x + time * step_x, -limit_x), limit_x)
        for until in (min(max(enter, begin), end), min(max(leave, begin), end), end):
            clamped_end = min(max(x + until * step_x, -limit_x), limit_x)
            area += (until - time) * (clamped + clamped_end) / 2 * step_y
            time, clamped = until, clamped_end
    both = one[2] * one[3] + other[2] * other[3]
    return area / (both - area) if area > 1e-6 * both else 0.0


@njit(cache=True, nogil=True)
def _inside_interval(begin, step, limit):  # type: ignore[no-untyped-def]
    first, second = (-limit - begin) / step, (limit - begin) / step
    return min(max(min(first, second), 0.0), 1.0), min(max(max(first, second), 0.0), 1.0)
