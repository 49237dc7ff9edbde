"""Plain PyTorch implementation of sparse convolution and its rulebooks, for any device."""

from collections.abc import Sequence

import torch
from torch import Tensor

from bev_lightning.ops.backend import accumulation_dtype

Size3 = tuple[int, int, int]


def convolve_reference(
    features: Tensor, weight: Tensor, bias: Tensor | None, sources: Tensor
) -> Tensor:
    """Convolution ``(num_outputs, Cout)`` with ``weight`` ``(K, Cin, Cout)``."""
    dtype = accumulation_dtype(features)
    # A last row of zeros for absent voxels, whose index is -1.
    padded = torch.cat([features, features.new_zeros(1, features.shape[1])]).to(dtype)
    total = features.new_zeros(sources.shape[1], weight.shape[2], dtype=dtype)
    if bias is not None:
        total = total + bias.to(dtype)
    with torch.autocast(features.device.type, enabled=False):
        for rows, matrix in zip(sources.long(), weight.to(dtype), strict=True):
            total = total + padded[rows] @ matrix
    return total.to(features.dtype)


def pair_neighbours_reference(
    coords: Tensor, shape: Sequence[int], kernel: Sequence[int]
) -> Tensor:
    """``sources`` of a submanifold rulebook, by binary search."""
    kz, ky, kx = _kernel_offsets(kernel, coords.device)
    if not len(coords):
        return coords.new_empty((len(kz), 0), dtype=torch.int32)
    sample, own_z, own_y, own_x = coords.unbind(1)
    z, y, x = own_z + kz - kernel[0] // 2, own_y + ky - kernel[1] // 2, own_x + kx - kernel[2] // 2
    inside = (z >= 0) & (z < shape[0]) & (y >= 0) & (y < shape[1]) & (x >= 0) & (x < shape[2])
    neighbours = _flatten(sample, z, y, x, shape)
    keys, order = torch.sort(_flatten(sample, own_z, own_y, own_x, shape))
    position = torch.searchsorted(keys, neighbours).clamp_(max=len(keys) - 1)
    found = inside & (keys[position] == neighbours)
    return torch.where(found, order[position], -1).int()


def pair_strided_reference(coords: Tensor, *sizes: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """``sources``, ``targets`` and flat output coordinates of a strided rulebook, by sorting.

    Synchronises with the device once: the number of outputs is a shape of the results.
    """
    out_shape, kernel, stride, padding = sizes
    sample, *inputs = coords.unbind(1)
    cells, hit = [], torch.ones((), dtype=torch.bool, device=coords.device)
    for axis, offset in enumerate(_kernel_offsets(kernel, coords.device)):
        shifted = inputs[axis] + padding[axis] - offset
        cell = torch.div(shifted, stride[axis], rounding_mode="floor")
        hit = hit & (shifted >= 0) & (cell * stride[axis] == shifted) & (cell < out_shape[axis])
        cells.append(cell)
    z, y, x = cells
    # The largest key marks "no output": it sorts last and is always present.
    none = torch.iinfo(torch.int64).max
    flat = torch.where(hit, _flatten(sample, z, y, x, out_shape), none)
    keys, target = torch.unique(
        torch.cat([flat.flatten(), flat.new_full((1,), none)]), return_inverse=True
    )
    num_outputs = len(keys) - 1
    target = target[:-1].view(flat.shape)
    sources = coords.new_full((len(flat), num_outputs + 1), -1, dtype=torch.int32)
    rows = torch.arange(len(coords), device=coords.device, dtype=torch.int32).expand_as(flat)
    # Within an offset only the column "no output" occurs more than once, and it is cut off.
    sources = sources.scatter_(1, target, rows)[:, :num_outputs].contiguous()
    return sources, torch.where(hit, target, -1).int(), keys[:num_outputs]


def _kernel_offsets(kernel: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """``(kz * ky * kx, 1)`` z, y and x of each offset, starting at 0."""
    k = torch.arange(kernel[0] * kernel[1] * kernel[2], device=device).unsqueeze(1)
    return k // (kernel[1] * kernel[2]), k // kernel[2] % kernel[1], k % kernel[2]


def _flatten(sample: Tensor, z: Tensor, y: Tensor, x: Tensor, shape: Sequence[int]) -> Tensor:
    """Flat coordinate ``((sample * Z + z) * Y + y) * X + x``."""
    return ((sample * shape[0] + z) * shape[1] + y) * shape[2] + x
