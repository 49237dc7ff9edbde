"""Numba CPU kernels of deformable attention, compiled on first use.

One thread processes a head of a sample with all its views, so that no two threads write to the same
element.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numba import njit
from torch import Tensor

from bev_lightning.ops.parallel_for import parallel_for

_FAST = {"contract", "reassoc", "nsz"}


def attend(sizes: Sequence[int], *inputs: Tensor) -> Tensor:
    """``(B, Q, H * D)``; the inputs are contiguous value, locations, weights, anchors and seen."""
    value, locations, weights, anchors, seen = inputs
    batch, queries, heads = weights.shape[:3]
    out = weights.new_zeros(batch, queries, heads, value.shape[3])
    tensors = value.to(weights.dtype), locations, weights, anchors, seen, out
    parallel_for(_attend, batch * heads, np.array(sizes, np.int64), *tensors)
    return out.flatten(2)


def attend_backward(
    sizes: Sequence[int], grad: Tensor, *inputs: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of value, locations and weights from ``grad`` ``(B, Q, H, D)``."""
    value, locations, weights, anchors, seen = inputs
    grad, value = grad.to(weights.dtype), value.to(weights.dtype)
    grads = torch.zeros_like(value), torch.zeros_like(locations), torch.zeros_like(weights)
    tensors = grad, value, locations, weights, anchors, seen, *grads
    num_heads = weights.shape[0] * weights.shape[2]
    parallel_for(_attend_backward, num_heads, np.array(sizes, np.int64), *tensors)
    return grads


@njit(cache=True, nogil=True, fastmath=_FAST)
def _attend(first, last, sizes, value, locations, weights, anchors, seen, out):  # type: ignore[no-untyped-def]
    _, num_queries, num_heads, num_levels, num_points = weights.shape
    num_views, num_anchors, channels = seen.shape[1], anchors.shape[3], value.shape[3]
    # The cells of one head are H * D elements apart, which wastes cache lines. Each is read many
    # times, so the head is copied to a contiguous buffer first.
    maps = np.empty((num_views, value.shape[1], channels), value.dtype)
    total = np.empty(channels, value.dtype)
    for item in range(first, last):
        b, h = item // num_heads, item % num_heads
        _copy_head(value, b * num_views, h, maps)
        for q in range(num_queries):
            total[:] = 0
            for n in range(num_views):
                if not seen[b, n, q]:
                    continue
                start = 0
                for level in range(num_levels):
                    height, width = sizes[2 * level], sizes[2 * level + 1]
                    for p in range(num_points):
                        x = locations[b, q, h, level, p, 0] + anchors[b, n, q, p % num_anchors, 0]
                        y = locations[b, q, h, level, p, 1] + anchors[b, n, q, p % num_anchors, 1]
                        upper, lower, up, down, _, _ = _neighbours(y, height)
                        left, right, west, east, _, _ = _neighbours(x, width)
                        if upper < 0 or left < 0:
                            continue
                        upper, lower = start + upper * width, start + lower * width
                        weight = weights[b, q, h, level, p]
                        up, down = weight * up, weight * down
                        for c in range(channels):
                            total[c] += (
                                up * west * maps[n, upper + left, c]
                                + up * east * maps[n, upper + right, c]
                                + down * west * maps[n, lower + left, c]
                                + down * east * maps[n, lower + right, c]
                            )
                    start += height * width
            for c in range(channels):
                out[b, q, h, c] = total[c]


@njit(cache=True, nogil=True, fastmath=_FAST)
def _attend_backward(  # type: ignore[no-untyped-def]
    first, last, sizes, grad, value, locations, weights, anchors, seen,
    grad_value, grad_locations, grad_weights,
):  # fmt: skip
    _, num_queries, num_heads, num_levels, num_points = weights.shape
    num_views, num_anchors, channels = seen.shape[1], anchors.shape[3], value.shape[3]
    maps = np.empty((num_views, value.shape[1], channels), value.dtype)
    grad_maps = np.empty_like(maps)
    for item in range(first, last):
        b, h = item // num_heads, item % num_heads
        _copy_head(value, b * num_views, h, maps)
        grad_maps[:] = 0
        for q in range(num_queries):
            for n in range(num_views):
                if not seen[b, n, q]:
                    continue
                start = 0
                for level in range(num_levels):
                    height, width = sizes[2 * level], sizes[2 * level + 1]
                    for p in range(num_points):
                        x = locations[b, q, h, level, p, 0] + anchors[b, n, q, p % num_anchors, 0]
                        y = locations[b, q, h, level, p, 1] + anchors[b, n, q, p % num_anchors, 1]
                        upper, lower, up, down, up_slope, down_slope = _neighbours(y, height)
                        left, right, west, east, west_slope, east_slope = _neighbours(x, width)
                        if upper < 0 or left < 0:
                            continue
                        upper, lower = start + upper * width, start + lower * width
                        # Dot product of the output gradient with each corner.
                        nw, ne, sw, se = up * 0, up * 0, up * 0, up * 0
                        for c in range(channels):
                            upstream = grad[b, q, h, c]
                            nw += upstream * maps[n, upper + left, c]
                            ne += upstream * maps[n, upper + right, c]
                            sw += upstream * maps[n, lower + left, c]
                            se += upstream * maps[n, lower + right, c]
                        weight = weights[b, q, h, level, p]
                        grad_weights[b, q, h, level, p] += up * (west * nw + east * ne) + down * (
                            west * sw + east * se
                        )
                        grad_locations[b, q, h, level, p, 0] += (weight * width) * (
                            up * (west_slope * nw + east_slope * ne)
                            + down * (west_slope * sw + east_slope * se)
                        )
                        grad_locations[b, q, h, level, p, 1] += (weight * height) * (
                            up_slope * (west * nw + east * ne)
                            + down_slope * (west * sw + east * se)
                        )
                        up, down = weight * up, weight * down
                        for c in range(channels):
                            grad_maps[n, upper + left, c] += up * west * grad[b, q, h, c]
                        for c in range(channels):
                            grad_maps[n, upper + right, c] += up * east * grad[b, q, h, c]
                        for c in range(channels):
                            grad_maps[n, lower + left, c] += down * west * grad[b, q, h, c]
                        for c in range(channels):
                            grad_maps[n, lower + right, c] += down * east * grad[b, q, h, c]
                    start += height * width
        for n in range(num_views):
            for cell in range(maps.shape[1]):
                for c in range(channels):
                    grad_value[b * num_views + n, cell, h, c] = grad_maps[n, cell, c]


@njit(cache=True, nogil=True)
def _copy_head(value, first, head, maps):  # type: ignore[no-untyped-def]
    for n in range(maps.shape[0]):
        for cell in range(maps.shape[1]):
            for c in range(maps.shape[2]):
                maps[n, cell, c] = value[first + n, cell, head, c]


@njit(cache=True, nogil=True, inline="always")
def _neighbours(x, size):  # type: ignore[no-untyped-def]
    """Linear interpolation along an axis of ``size`` cells at coordinate ``x`` in 0..1.

    Returns the lower and the upper cell, their weights, and the derivatives of the weights with
    respect to the coordinate in cells. A cell beyond the border has weight and derivative 0 and the
    index of its neighbour, which is safe to read. Both indices are -1 outside the map.
    """
    one = type(x)(1)
    zero = type(x)(0)
    x = x * type(x)(size) - type(x)(0.5)
    if not (size > 0 and x > -1 and x < size):  # also for NaN
        return -1, -1, zero, zero, zero, zero
    low = np.floor(x)
    cell = int(low)
    weight = x - low
    if cell < 0:
        return 0, 0, zero, weight, zero, one
    if cell + 1 >= size:
        return cell, cell, one - weight, zero, -one, zero
    return cell, cell + 1, one - weight, weight, -one, one
