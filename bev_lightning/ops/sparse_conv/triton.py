"""Triton GPU kernels of sparse convolution, without atomic additions.

A program computes a tile of outputs: offset by offset it gathers the inputs and multiplies them on
the matrix units. Nothing is written to memory in between.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 64
# The weight gradient sums over voxels in at most so many parts, which are added in a fixed order.
_MAX_PARTS = 16
_ROWS_PER_PART = 1024


def convolve(features: Tensor, weight: Tensor, bias: Tensor | None, sources: Tensor) -> Tensor:
    """``(num_outputs, Cout)``; see ``custom_op.convolve``."""
    num_offsets, num_outputs = sources.shape
    in_channels, out_channels = weight.shape[1:]
    out = features.new_empty(num_outputs, out_channels)
    if not out.numel():
        return out
    block_in, block_out = _block(in_channels), _block(out_channels)
    grid = (triton.cdiv(num_outputs, _ROWS), triton.cdiv(out_channels, block_out))
    with torch.cuda.device_of(features):  # type: ignore[no-untyped-call]
        _convolve[grid](
            features, weight, features if bias is None else bias, sources, out,
            num_offsets, num_outputs, in_channels, out_channels,
            HAS_BIAS=bias is not None, PRECISION=_precision(),
            ROWS=_ROWS, IN=block_in, OUT=block_out, num_warps=4,
        )  # fmt: skip
    return out


def weight_gradient(features: Tensor, grad: Tensor, sources: Tensor) -> Tensor:
    """``(K, Cin, Cout)``; see ``custom_op._weight_gradient``."""
    num_offsets, num_outputs = sources.shape
    in_channels, out_channels = features.shape[1], grad.shape[1]
    num_parts = min(_MAX_PARTS, max(1, triton.cdiv(num_outputs, _ROWS_PER_PART)))
    size = (num_parts, num_offsets, in_channels, out_channels)
    parts = torch.empty(size, dtype=torch.float32, device=features.device)
    block_in, block_out = _block(in_channels), _block(out_channels)
    tiles = triton.cdiv(in_channels, block_in) * triton.cdiv(out_channels, block_out)
    if parts.numel():
        with torch.cuda.device_of(features):  # type: ignore[no-untyped-call]
            _add_products[(num_offsets, num_parts, tiles)](
                features, grad, sources, parts,
                num_outputs, triton.cdiv(num_outputs, num_parts), in_channels, out_channels,
                PRECISION=_precision(), ROWS=32, IN=block_in, OUT=block_out, num_warps=4,
            )  # fmt: skip
    return parts.sum(0).to(features.dtype)


def _block(channels: int) -> int:
    """Block size for so many channels; a matrix unit takes at least 16."""
    return min(64, max(16, int(triton.next_power_of_2(channels))))


def _precision() -> str:
    """The float32 precision that PyTorch allows for its own matrix products."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


@triton.jit
def _convolve(  # type: ignore[no-untyped-def]
    features, weight, bias, sources, out, num_offsets, num_outputs, in_channels, out_channels,
    HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * OUT + tl.arange(0, OUT)
    in_rows, in_columns = row < num_outputs, column < out_channels
    total = tl.zeros([ROWS, OUT], tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + column, mask=in_columns, other=0.0)[None, :]
    for k in range(num_offsets):
        source = tl.load(sources + k * num_outputs + row, mask=in_rows, other=-1).to(tl.int64)
        # Often empty for the whole tile: nearby voxels tend to lack the same neighbours.
        if tl.max(source, axis=0) >= 0:
            for begin in range(0, in_channels, IN):
                channel = begin + tl.arange(0, IN)
                in_channel = channel < in_channels
                gathered = tl.load(
                    features + source[:, None] * in_channels + channel[None, :],
                    mask=(source >= 0)[:, None] & in_channel[None, :],
                    other=0.0,
                )
                matrix = tl.load(
                    weight + (k * in_channels + channel)[:, None] * out_channels + column[None, :],
                    mask=in_channel[:, None] & in_columns[None, :],
                    other=0.0,
                )
                total = tl.dot(gathered, matrix, total, input_precision=PRECISION)
    tl.store(
        out + row[:, None] * out_channels + column[None, :],
        total.to(out.dtype.element_ty),
        mask=in_rows[:, None] & in_columns[None, :],
    )


@triton.jit
def _add_products(  # type: ignore[no-untyped-def]
    features, grad, sources, parts, num_outputs, part_rows, in_channels, out_channels,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    k, part = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    num_columns = tl.cdiv(out_channels, OUT)
    channel = tl.program_id(2) // num_columns * IN + tl.arange(0, IN)
    column = tl.program_id(2) % num_columns * OUT + tl.arange(0, OUT)
    in_channel, in_columns = channel < in_channels, column < out_channels
    end = tl.minimum((part + 1) * part_rows, num_outputs)
    total = tl.zeros([IN, OUT], tl.float32)
    for begin in range(part * part_rows, end, ROWS):
        row = begin + tl.arange(0, ROWS)
        source = tl.load(sources + k * num_outputs + row, mask=row < end, other=-1).to(tl.int64)
        if tl.max(source, axis=0) >= 0:
            gathered = tl.load(
                features + source[None, :] * in_channels + channel[:, None],
                mask=(source >= 0)[None, :] & in_channel[:, None],
                other=0.0,
            )
            upstream = tl.load(
                grad + row[:, None] * out_channels + column[None, :],
                mask=(source >= 0)[:, None] & in_columns[None, :],
                other=0.0,
            )
            total = tl.dot(gathered, upstream, total, input_precision=PRECISION)
    num_offsets = tl.num_programs(0)
    start = (part * num_offsets + k) * in_channels * out_channels
    tl.store(
        parts + start + channel[:, None] * out_channels + column[None, :],
        total,
        mask=in_channel[:, None] & in_columns[None, :],
    )
