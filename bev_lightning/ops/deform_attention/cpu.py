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
    # One head's cells lie H * D numbers apart, which wastes the cache: they are read many times, so
    # they are copied together first.
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
                        upper, lower, up, down, _, _ = _split(y, height)
                        left, right, west, east, _, _ = _split(x, width)
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
                        upper, lower, up, down, up_slope, down_slope = _split(y, height)
                        left, right, west, east, west_slope, east_slope = _split(x, width)
                        if upper < 0 or left < 0:
                            continue
                        upper, lower = start + upper * width, start + lower * width
                        # <gradient, cell> of the corners: what one more unit of each is worth.
                        nw, ne, sw, se = up * 0, up * 0, up * 0, up * 0
                        for c in range(channels):
                            wanted = grad[b, q, h, c]
                            nw += wanted * maps[n, upper + left, c]
                            ne += wanted * maps[n, upper + right, c]
                            sw += wanted * maps[n, lower + left, c]
                            se += wanted * maps[n, lower + right, c]
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
def _split(place, size):  # type: ignore[no-untyped-def]
    """The two cells that a place along an axis (0..1) falls between, the share of each and the
    share's slope per cell. A cell beyond the border has share and slope 0 (and its neighbour's
    number, which may be read); both are -1 where nothing is shared."""
    one = type(place)(1)
    zero = type(place)(0)
    place = place * type(place)(size) - type(place)(0.5)
    # False for what is not a number, too.
    if not (size > 0 and place > -1 and place < size):
        return -1, -1, zero, zero, zero, zero
    low = np.floor(place)
    cell = int(low)
    share = place - low
    if cell < 0:
        return 0, 0, zero, share, zero, one
    if cell + 1 >= size:
        return cell, cell, one - share, zero, -one, zero
    return cell, cell + 1, one - share, share, -one, one
