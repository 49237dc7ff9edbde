"""Triton GPU kernels of deformable attention.

One launch per level; a program processes one head of a block of queries and skips the views that
see none of them.
"""

import warnings
from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_TYPES = {torch.float32: tl.float32, torch.float64: tl.float64}
# Queries x channels of a program.
_TILE = 1024


def attend(sizes: Sequence[int], *inputs: Tensor) -> Tensor:
    """``(B, Q, H * D)``; the inputs are contiguous value, locations, weights, anchors and seen."""
    value, locations, weights, anchors, seen = inputs
    batch, queries, heads = weights.shape[:3]
    out = weights.new_zeros(batch, queries, heads, value.shape[3])
    for grid, numbers, blocks in _launches(value, sizes, weights, anchors):
        _attend[grid](
            value, locations, weights, anchors, seen.view(torch.uint8), out, *numbers,
            ACCUMULATE=_TYPES[weights.dtype], **blocks,
        )  # fmt: skip
    return out.flatten(2)


def attend_backward(
    sizes: Sequence[int], grad: Tensor, *inputs: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of value, locations and weights from ``grad`` ``(B, Q, H, D)``."""
    value, locations, weights, anchors, seen = inputs
    if value.is_cuda and torch.are_deterministic_algorithms_enabled():
        text = "the backward of deformable attention adds atomically, which is not deterministic"
        if not torch.is_deterministic_algorithms_warn_only_enabled():
            raise RuntimeError(f"{text}; set trainer.deterministic=warn or false")
        warnings.warn(text, stacklevel=2)
    grad_value = torch.zeros_like(value, dtype=weights.dtype)
    grad_locations, grad_weights = torch.zeros_like(locations), torch.zeros_like(weights)
    for grid, numbers, blocks in _launches(value, sizes, weights, anchors):
        _attend_backward[grid](
            grad, value, locations, weights, anchors, seen.view(torch.uint8),
            grad_value, grad_locations, grad_weights, *numbers,
            ACCUMULATE=_TYPES[weights.dtype], **blocks,
        )  # fmt: skip
    return grad_value, grad_locations, grad_weights


def _launches(
    value: Tensor, sizes: Sequence[int], weights: Tensor, anchors: Tensor
) -> Iterator[tuple[tuple[int, int, int], tuple[int, ...], dict[str, int]]]:
    """Grid, integer arguments and block sizes of each non-empty level."""
    batch, queries, heads, levels, points = weights.shape
    num_views, num_anchors = anchors.shape[1], anchors.shape[3]
    cells, channels = value.shape[1], value.shape[3]
    if 0 in (batch, queries, heads, points, num_views, channels):
        return
    block = triton.next_power_of_2(channels)
    rows = max(1, min(_TILE // block, triton.next_power_of_2(queries)))
    grid = (triton.cdiv(queries, rows), heads, batch)
    start = 0
    with torch.cuda.device_of(value):  # type: ignore[no-untyped-call]
        for level, (height, width) in enumerate(zip(sizes[::2], sizes[1::2], strict=True)):
            if height * width:
                numbers = (
                    height, width, start, level, cells, queries, heads, levels, points,
                    num_views, num_anchors, channels,
                )  # fmt: skip
                yield grid, numbers, {"QUERIES": rows, "CHANNELS": block, "num_warps": 4}
            start += height * width


@triton.jit
def _sample_position(  # type: ignore[no-untyped-def]
    locations, anchors, seen, at, row, point, valid, height, width, num_anchors,
    ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """Position of a point of each query in a view.

    Returns column and row of the upper left cell, the fractions to its right and below it, and
    whether the view sees the query and the point is inside the map.
    """
    anchor = row * num_anchors + point % num_anchors
    is_seen = tl.load(seen + row, mask=valid, other=0) != 0
    x = tl.load(locations + 2 * at, mask=is_seen, other=0.0)
    y = tl.load(locations + 2 * at + 1, mask=is_seen, other=0.0)
    x = (x + tl.load(anchors + 2 * anchor, mask=is_seen, other=0.0)) * width - 0.5
    y = (y + tl.load(anchors + 2 * anchor + 1, mask=is_seen, other=0.0)) * height - 0.5
    # Also False for NaN.
    inside = is_seen & (x > -1) & (y > -1) & (x < width) & (y < height)
    x, y = tl.where(inside, x, 0.0).to(ACCUMULATE), tl.where(inside, y, 0.0).to(ACCUMULATE)
    column, line = tl.floor(x), tl.floor(y)
    return column.to(tl.int32), line.to(tl.int32), x - column, y - line, inside


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    value, locations, weights, anchors, seen, out,
    height, width, start, level, num_cells, num_queries, num_heads, num_levels, num_points,
    num_views, num_anchors, channels,
    ACCUMULATE: tl.constexpr, QUERIES: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    query = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    head, sample = tl.program_id(1), tl.program_id(2).to(tl.int64)
    channel = tl.arange(0, CHANNELS)
    valid, inner = query < num_queries, channel < channels
    owner = (sample * num_queries + query) * num_heads + head
    total = tl.zeros([QUERIES, CHANNELS], ACCUMULATE)
    for view in range(num_views):
        image = sample * num_views + view
        row = image * num_queries + query
        if tl.max(tl.load(seen + row, mask=valid, other=0).to(tl.int32), axis=0) > 0:
            for point in range(num_points):
                at = (owner * num_levels + level) * num_points + point
                column, line, right, down, inside = _sample_position(
                    locations, anchors, seen, at, row, point, valid, height, width, num_anchors,
                    ACCUMULATE,
                )  # fmt: skip
                weight = tl.load(weights + at, mask=inside, other=0.0)
                for j in tl.static_range(2):
                    for i in tl.static_range(2):
                        y, x = line + j, column + i
                        ok = inside & (y >= 0) & (y < height) & (x >= 0) & (x < width)
                        corner = weight * (down if j else 1 - down) * (right if i else 1 - right)
                        cell = image * num_cells + start + y * width + x
                        got = tl.load(
                            value
                            + (cell * num_heads + head)[:, None] * channels
                            + channel[None, :],
                            mask=ok[:, None] & inner[None, :],
                            other=0.0,
                        ).to(ACCUMULATE)
                        total += corner[:, None] * got
    # Add to the levels before: the launches run one after the other.
    target = out + owner[:, None] * channels + channel[None, :]
    mask = valid[:, None] & inner[None, :]
    tl.store(target, tl.load(target, mask=mask, other=0.0) + total, mask=mask)


@triton.jit
def _attend_backward(  # type: ignore[no-untyped-def]
    grad, value, locations, weights, anchors, seen, grad_value, grad_locations, grad_weights,
    height, width, start, level, num_cells, num_queries, num_heads, num_levels, num_points,
    num_views, num_anchors, channels,
    ACCUMULATE: tl.constexpr, QUERIES: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    query = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    head, sample = tl.program_id(1), tl.program_id(2).to(tl.int64)
    channel = tl.arange(0, CHANNELS)
    valid, inner = query < num_queries, channel < channels
    owner = (sample * num_queries + query) * num_heads + head
    upstream = tl.load(
        grad + owner[:, None] * channels + channel[None, :],
        mask=valid[:, None] & inner[None, :],
        other=0.0,
    ).to(ACCUMULATE)
    for point in range(num_points):
        at = (owner * num_levels + level) * num_points + point
        weight = tl.load(weights + at, mask=valid, other=0.0)
        by_weight = tl.zeros([QUERIES], ACCUMULATE)
        by_x = tl.zeros([QUERIES], ACCUMULATE)
        by_y = tl.zeros([QUERIES], ACCUMULATE)
        for view in range(num_views):
            image = sample * num_views + view
            row = image * num_queries + query
            if tl.max(tl.load(seen + row, mask=valid, other=0).to(tl.int32), axis=0) > 0:
                column, line, right, down, inside = _sample_position(
                    locations, anchors, seen, at, row, point, valid, height, width, num_anchors,
                    ACCUMULATE,
                )  # fmt: skip
                for j in tl.static_range(2):
                    for i in tl.static_range(2):
                        y, x = line + j, column + i
                        ok = inside & (y >= 0) & (y < height) & (x >= 0) & (x < width)
                        across = down if j else 1 - down
                        along = right if i else 1 - right
                        cell = image * num_cells + start + y * width + x
                        offset = (cell * num_heads + head)[:, None] * channels + channel[None, :]
                        mask = ok[:, None] & inner[None, :]
                        got = tl.load(value + offset, mask=mask, other=0.0).to(ACCUMULATE)
                        # Dot product of the output gradient with this corner.
                        dot = tl.sum(got * upstream, axis=1)
                        by_weight += across * along * dot
                        by_x += across * dot * (1 if i else -1)
                        by_y += along * dot * (1 if j else -1)
                        tl.atomic_add(
                            grad_value + offset,
                            (weight * across * along)[:, None] * upstream,
                            mask=mask,
                            sem="relaxed",
                        )
        tl.store(grad_weights + at, by_weight, mask=valid)
        tl.store(grad_locations + 2 * at, by_x * weight * width, mask=valid)
        tl.store(grad_locations + 2 * at + 1, by_y * weight * height, mask=valid)
