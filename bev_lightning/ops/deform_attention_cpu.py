"""CPU loops of :mod:`bev_lightning.ops.deform_attention`, compiled on first use; a GPU never
imports it.

One thread owns a head of a sample with all its views, so that no two write to one place.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numba import njit
from torch import Tensor

from bev_lightning.ops.backend import share_out

_FAST = {"contract", "reassoc", "nsz"}


def attend(
    value: Tensor,
    sizes: Sequence[int],
    locations: Tensor,
    weights: Tensor,
    anchors: Tensor,
    seen: Tensor,
) -> Tensor:
    """``(B, Q, H * D)``; all tensors contiguous and of one type."""
    batch, queries, heads = weights.shape[:3]
    out = value.new_zeros(batch, queries, heads, value.shape[3])
    tensors = (value, locations, weights, anchors, seen, out)
    share_out(
        _attend, batch * heads, np.array(sizes, np.int64), *(tensor.numpy() for tensor in tensors)
    )
    return out.flatten(2)


def attend_backward(
    grad: Tensor,
    value: Tensor,
    sizes: Sequence[int],
    locations: Tensor,
    weights: Tensor,
    anchors: Tensor,
    seen: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of value, locations and weights from ``grad`` ``(B, Q, H, D)``."""
    grads = (torch.zeros_like(value), torch.zeros_like(locations), torch.zeros_like(weights))
    tensors = (grad, value, locations, weights, anchors, seen, *grads)
    share_out(
        _attend_backward,
        weights.shape[0] * weights.shape[2],
        np.array(sizes, np.int64),
        *(tensor.detach().numpy() for tensor in tensors),
    )
    return grads


@njit(cache=True, nogil=True, fastmath=_FAST)
def _attend(first, last, sizes, value, locations, weights, anchors, seen, out):  # type: ignore[no-untyped-def]
    _, num_queries, num_heads, num_levels, num_points = weights.shape
    num_views, num_anchors, channels = seen.shape[1], anchors.shape[3], value.shape[3]
    half = locations.dtype.type(0.5)
    one = locations.dtype.type(1.0)
    for item in range(first, last):
        b, h = item // num_heads, item % num_heads
        for q in range(num_queries):
            for n in range(num_views):
                if not seen[b, n, q]:
                    continue
                image, start = b * num_views + n, 0
                for level in range(num_levels):
                    height, width = sizes[2 * level], sizes[2 * level + 1]
                    for p in range(num_points):
                        at = locations[b, q, h, level, p]
                        anchor = anchors[b, n, q, p % num_anchors]
                        x = (at[0] + anchor[0]) * locations.dtype.type(width) - half
                        y = (at[1] + anchor[1]) * locations.dtype.type(height) - half
                        # False for what is not a number, too.
                        if not (x > -1 and y > -1 and x < width and y < height):
                            continue
                        column, row = int(np.floor(x)), int(np.floor(y))
                        right, down = x - np.floor(x), y - np.floor(y)
                        weight = weights[b, q, h, level, p]
                        for j in range(max(row, 0), min(row + 2, height)):
                            across = weight * (down if j > row else one - down)
                            for i in range(max(column, 0), min(column + 2, width)):
                                corner = across * (right if i > column else one - right)
                                cell = start + j * width + i
                                for c in range(channels):
                                    out[b, q, h, c] += corner * value[image, cell, h, c]
                    start += height * width


@njit(cache=True, nogil=True, fastmath=_FAST)
def _attend_backward(  # type: ignore[no-untyped-def]
    first, last, sizes, grad, value, locations, weights, anchors, seen,
    grad_value, grad_locations, grad_weights,
):  # fmt: skip
    _, num_queries, num_heads, num_levels, num_points = weights.shape
    num_views, num_anchors, channels = seen.shape[1], anchors.shape[3], value.shape[3]
    half = locations.dtype.type(0.5)
    one = locations.dtype.type(1.0)
    for item in range(first, last):
        b, h = item // num_heads, item % num_heads
        for q in range(num_queries):
            for n in range(num_views):
                if not seen[b, n, q]:
                    continue
                image, start = b * num_views + n, 0
                for level in range(num_levels):
                    height, width = sizes[2 * level], sizes[2 * level + 1]
                    for p in range(num_points):
                        at = locations[b, q, h, level, p]
                        anchor = anchors[b, n, q, p % num_anchors]
                        x = (at[0] + anchor[0]) * locations.dtype.type(width) - half
                        y = (at[1] + anchor[1]) * locations.dtype.type(height) - half
                        if not (x > -1 and y > -1 and x < width and y < height):
                            continue
                        column, row = int(np.floor(x)), int(np.floor(y))
                        right, down = x - np.floor(x), y - np.floor(y)
                        weight = weights[b, q, h, level, p]
                        for j in range(max(row, 0), min(row + 2, height)):
                            across = down if j > row else one - down
                            for i in range(max(column, 0), min(column + 2, width)):
                                along = right if i > column else one - right
                                cell = start + j * width + i
                                corner = weight * across * along
                                # <gradient, cell>: what one more unit of this corner is worth.
                                worth = corner * 0
                                for c in range(channels):
                                    worth += grad[b, q, h, c] * value[image, cell, h, c]
                                    grad_value[image, cell, h, c] += corner * grad[b, q, h, c]
                                grad_weights[b, q, h, level, p] += across * along * worth
                                worth *= weight
                                dx = across * worth * locations.dtype.type(width)
                                dy = along * worth * locations.dtype.type(height)
                                grad_locations[b, q, h, level, p, 0] += dx if i > column else -dx
                                grad_locations[b, q, h, level, p, 1] += dy if j > row else -dy
                    start += height * width
