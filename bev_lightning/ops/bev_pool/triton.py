"""Triton GPU kernels of BEV pooling, without atomic additions.

A program per cell sums the points of the cell; a program per pixel computes the pixel's gradients.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_TYPES = {torch.float32: tl.float32, torch.float64: tl.float64}
# Number of points that a program reads at a time.
_POINTS = 16


def pool(
    depth: Tensor, rows: Tensor, points: Tensor, pixels: Tensor, starts: Tensor, dtype: torch.dtype
) -> Tensor:
    """Sum pixel features ``(B * N * h * w, C)`` into cells ``(B * Y * X, C)``."""
    num_cells, channels = len(starts) - 1, rows.shape[1]
    out = rows.new_empty(num_cells, channels)
    if not out.numel():
        return out
    block = min(triton.next_power_of_2(channels), 128)
    with torch.cuda.device_of(rows):  # type: ignore[no-untyped-call]
        _sum_points[(num_cells, triton.cdiv(channels, block))](
            depth, rows, points, pixels, starts, out, channels,
            ACCUMULATE=_TYPES[dtype], POINTS=_POINTS, CHANNELS=block, num_warps=2,
        )  # fmt: skip
    return out


def pool_backward(
    grad: Tensor, depth: Tensor, rows: Tensor, cells: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Gradients of depth and pixel features from that of the cells ``(B * Y * X, C)``."""
    batch, num_cameras, num_depths, height, width = depth.shape
    channels = rows.shape[1]
    grad_depth, grad_rows = torch.zeros_like(depth), torch.zeros_like(rows)
    if rows.numel() and num_depths:
        with torch.cuda.device_of(rows):  # type: ignore[no-untyped-call]
            _backward[(len(rows),)](
                grad, depth, rows, cells, grad_depth, grad_rows,
                num_cameras, num_depths, height * width, len(grad) // batch, channels,
                ACCUMULATE=_TYPES[dtype], POINTS=_POINTS,
                CHANNELS=triton.next_power_of_2(channels), num_warps=4,
            )  # fmt: skip
    return grad_depth, grad_rows


@triton.jit
def _sum_points(  # type: ignore[no-untyped-def]
    depth, rows, points, pixels, starts, out, channels,
    ACCUMULATE: tl.constexpr, POINTS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    cell = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    first, last = tl.load(starts + cell), tl.load(starts + cell + 1)
    total = tl.zeros([CHANNELS], ACCUMULATE)
    for begin in range(first, last, POINTS):
        row = begin + tl.arange(0, POINTS)
        valid = row < last
        point = tl.load(points + row, mask=valid, other=0)
        pixel = tl.load(pixels + row, mask=valid, other=0).to(tl.int64)
        weight = tl.load(depth + point, mask=valid, other=0.0).to(ACCUMULATE)
        values = tl.load(
            rows + pixel[:, None] * channels + channel[None, :],
            mask=valid[:, None] & (channel < channels)[None, :],
            other=0.0,
        ).to(ACCUMULATE)
        total += tl.sum(weight[:, None] * values, axis=0)
    tl.store(out + cell * channels + channel, total, mask=channel < channels)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    grad, depth, rows, cells, grad_depth, grad_rows,
    num_cameras, num_depths, area, num_cells, channels,
    ACCUMULATE: tl.constexpr, POINTS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    pixel = tl.program_id(0).to(tl.int64)
    image, offset = pixel // area, pixel % area
    sample = image // num_cameras
    channel = tl.arange(0, CHANNELS)
    inside = channel < channels
    values = tl.load(rows + pixel * channels + channel, mask=inside, other=0.0).to(ACCUMULATE)
    total = tl.zeros([CHANNELS], ACCUMULATE)
    for begin in range(0, num_depths, POINTS):
        d = begin + tl.arange(0, POINTS)
        valid = d < num_depths
        point = (image * num_depths + d) * area + offset
        cell = tl.load(cells + point, mask=valid, other=-1)
        seen = cell >= 0
        weight = tl.load(depth + point, mask=seen, other=0.0).to(ACCUMULATE)
        got = tl.load(
            grad + (sample * num_cells + cell)[:, None] * channels + channel[None, :],
            mask=seen[:, None] & inside[None, :],
            other=0.0,
        ).to(ACCUMULATE)
        tl.store(grad_depth + point, tl.sum(got * values[None, :], axis=1), mask=valid)
        total += tl.sum(weight[:, None] * got, axis=0)
    tl.store(grad_rows + pixel * channels + channel, total, mask=inside)
