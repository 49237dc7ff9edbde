"""Sparse 3-D convolution (SECOND, Yan et al. 2018, section 3.1.2).

A rulebook says for each offset of the kernel which input voxel reaches which output voxel. It
depends on the coordinates alone, so that it is built once and used by every layer on them. It is a
table with a column per voxel and not a list of pairs: no length depends on how voxels lie to one
another, so that a GPU need not tell the host how many pairs there are, and each output has one
owner, which adds in the order of the offsets, without atomics.

Coordinates are ``(V, 4)`` int64 rows sample, z, y, x without duplicates; weights are
``(kz, ky, kx, Cin, Cout)``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bev_lightning.ops.backend import choose
from bev_lightning.ops.sparse_conv import spconv as spconv_backend

Size3 = tuple[int, int, int]


@dataclass(frozen=True)
class Rulebook:
    """Who meets whom, int32; offsets with z slowest, x fastest, K of them.

    Attributes:
        sources: ``(K, num_outputs)`` row of the input that reaches an output by an offset, -1 where
            there is none.
        targets: ``(K, num_inputs)`` row of the output that an input reaches by an offset, -1 where
            there is none: the same pairs as the gradient goes. None where the mirror image of
            ``sources`` says it, of a submanifold convolution.
        spconv: leave the multiplication to spconv (:mod:`bev_lightning.ops.sparse_conv.spconv`).
    """

    sources: Tensor
    targets: Tensor | None = None
    spconv: bool = False


@torch.no_grad()
def build_submanifold_rulebook(coords: Tensor, shape: Size3, kernel: Size3) -> Rulebook:
    """Rulebook of a submanifold convolution, whose outputs stand at its inputs' coordinates. A GPU
    builds it without a word to the host.

    Args:
        coords: ``(V, 4)`` sample, z, y, x.
        shape: extent of the grid along z, y, x.
        kernel: odd extents along z, y, x; the padding is half of each.

    Raises:
        ValueError: an extent of the kernel is even.
    """
    if any(extent % 2 == 0 for extent in kernel):
        raise ValueError(f"a submanifold convolution takes an odd kernel, got {kernel}")
    return Rulebook(_pair_neighbours(coords, shape, kernel))


@torch.no_grad()
def build_strided_rulebook(
    coords: Tensor, shape: Size3, kernel: Size3, stride: Size3, padding: Size3
) -> tuple[Rulebook, Tensor, Size3]:
    """Rulebook of a strided convolution, which has an output wherever the kernel meets an input.

    Args:
        coords: ``(V, 4)`` sample, z, y, x.
        shape: extent of the grid along z, y, x.
        kernel, stride, padding: along z, y, x.

    Returns:
        The rulebook, the outputs' coordinates ``(V', 4)`` sorted by sample, z, y, x, and the extent
        of their grid.
    """
    z, y, x = (
        (shape[axis] + 2 * padding[axis] - kernel[axis]) // stride[axis] + 1 for axis in (0, 1, 2)
    )
    sources, targets, keys = _pair_strided(coords, (z, y, x), kernel, stride, padding)
    rows = [keys // (z * y * x), keys // (y * x) % z, keys // x % y, keys % x]
    return Rulebook(sources, targets), torch.stack(rows, dim=1), (z, y, x)


def sparse_conv(
    features: Tensor, weight: Tensor, rulebook: Rulebook, bias: Tensor | None = None
) -> Tensor:
    """``out[o] = bias + sum over offset k that reaches o: features[sources[k, o]] @ weight[k]``.

    Under autocast the factors are rounded to its type; sums are float32 in any case (float64 for
    float64). The same bit by bit at every run and with any number of threads; gradients too.

    Args:
        features: ``(V, Cin)``.
        weight: ``(kz, ky, kx, Cin, Cout)``.
        rulebook: of the same coordinates and kernel.
        bias: ``(Cout,)`` in the type of the sums.

    Returns:
        ``(num_outputs, Cout)``.
    """
    device = features.device
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
        features, weight = features.to(dtype), weight.to(dtype)
    weight = weight.flatten(0, 2)
    chosen = choose(device)
    if rulebook.spconv and chosen != "reference" and features.dtype != torch.float64:
        return spconv_backend.convolve(features, weight, bias, rulebook.sources)
    if chosen == "reference" or (chosen == "triton" and features.dtype == torch.float64):
        return _convolve_reference(features, weight, bias, rulebook.sources)
    result: Tensor = _convolve(features, weight, bias, rulebook.sources, rulebook.targets)
    return result


def _convolve_reference(
    features: Tensor, weight: Tensor, bias: Tensor | None, sources: Tensor
) -> Tensor:
    wide = _wide(features.dtype)
    # Row -1 is the last one: zeros, which is what absent voxels are.
    padded = torch.cat([features, features.new_zeros(1, features.shape[1])]).to(wide)
    total = features.new_zeros(sources.shape[1], weight.shape[2], dtype=wide)
    if bias is not None:
        total = total + bias.to(wide)
    with torch.autocast(features.device.type, enabled=False):
        for rows, matrix in zip(sources.long(), weight.to(wide), strict=True):
            total = total + padded[rows] @ matrix
    return total.to(features.dtype)


@torch.library.custom_op("bev_lightning::sparse_conv", mutates_args=())
def _convolve(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    sources: Tensor,
    targets: Tensor | None,
) -> Tensor:
    features, weight = features.contiguous(), weight.contiguous()
    sources = sources.contiguous()
    wide = _wide(features.dtype)
    bias = None if bias is None else bias.to(wide).contiguous()
    if choose(features.device) == "triton":
        from bev_lightning.ops.sparse_conv.triton import convolve

        return convolve(features, weight, bias, sources)
    from bev_lightning.ops.sparse_conv.cpu import convolve as convolve_cpu

    return convolve_cpu(features.to(wide), weight.to(wide), bias, sources).to(features.dtype)


@_convolve.register_fake
def _(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    sources: Tensor,
    targets: Tensor | None,
) -> Tensor:
    return features.new_empty(sources.shape[1], weight.shape[2])


@torch.library.custom_op("bev_lightning::sparse_conv_weight", mutates_args=())
def _weight_gradient(features: Tensor, grad: Tensor, sources: Tensor) -> Tensor:
    """``out[k] = sum over o: features[sources[k, o]].T @ grad[o]``, ``(K, Cin, Cout)``."""
    features, grad, sources = features.contiguous(), grad.contiguous(), sources.contiguous()
    if choose(features.device) == "triton":
        from bev_lightning.ops.sparse_conv.triton import weight_gradient

        return weight_gradient(features, grad, sources)
    from bev_lightning.ops.sparse_conv.cpu import weight_gradient as gradient_cpu

    wide = _wide(features.dtype)
    return gradient_cpu(features.to(wide), grad.to(wide), sources).to(features.dtype)


@_weight_gradient.register_fake
def _(features: Tensor, grad: Tensor, sources: Tensor) -> Tensor:
    return features.new_empty(sources.shape[0], features.shape[1], grad.shape[1])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    features, weight, bias, sources, targets = inputs
    ctx.bias_type = None if bias is None else bias.dtype
    ctx.save_for_backward(features, weight, sources, targets)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    features, weight, sources, targets = ctx.saved_tensors
    to_features, to_weight, to_bias, _, _ = ctx.needs_input_grad
    grad_features = None
    if to_features and targets is None:
        # What reaches me by an offset, I reach by its mirror image.
        grad_features = _convolve(grad, weight.flip(0).transpose(1, 2), None, sources, None)
    elif to_features:
        grad_features = _convolve(grad, weight.transpose(1, 2), None, targets, sources)
    return (
        grad_features,
        _weight_gradient(features, grad, sources) if to_weight else None,
        grad.sum(0, dtype=_wide(grad.dtype)).to(ctx.bias_type) if to_bias else None,
        None,
        None,
    )


_convolve.register_autograd(_backward, setup_context=_setup_context)


@torch.library.custom_op("bev_lightning::pair_neighbours", mutates_args=())
def _pair_neighbours(coords: Tensor, shape: Sequence[int], kernel: Sequence[int]) -> Tensor:
    """``sources`` of a submanifold rulebook."""
    if choose(coords.device) == "numba":
        from bev_lightning.ops.sparse_conv.cpu import pair_neighbours

        return pair_neighbours(coords, _size(shape), _size(kernel))
    return _pair_neighbours_torch(coords, _size(shape), _size(kernel))


@_pair_neighbours.register_fake
def _(coords: Tensor, shape: Sequence[int], kernel: Sequence[int]) -> Tensor:
    num_offsets = kernel[0] * kernel[1] * kernel[2]
    return coords.new_empty((num_offsets, coords.shape[0]), dtype=torch.int32)


def _pair_neighbours_torch(coords: Tensor, shape: Size3, kernel: Size3) -> Tensor:
    """By binary search, for any device."""
    kz, ky, kx = _kernel_offsets(kernel, coords.device)
    if not len(coords):
        return coords.new_empty((len(kz), 0), dtype=torch.int32)
    sample, own_z, own_y, own_x = coords.unbind(1)
    z, y, x = own_z + kz - kernel[0] // 2, own_y + ky - kernel[1] // 2, own_x + kx - kernel[2] // 2
    inside = (z >= 0) & (z < shape[0]) & (y >= 0) & (y < shape[1]) & (x >= 0) & (x < shape[2])
    wanted = _flatten(sample, z, y, x, shape)
    keys, order = torch.sort(_flatten(sample, own_z, own_y, own_x, shape))
    place = torch.searchsorted(keys, wanted).clamp_(max=len(keys) - 1)
    found = inside & (keys[place] == wanted)
    return torch.where(found, order[place], -1).int()


@torch.library.custom_op("bev_lightning::pair_strided", mutates_args=())
def _pair_strided(
    coords: Tensor,
    out_shape: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """``sources`` and ``targets`` of a strided rulebook and the outputs' flat coordinates."""
    sizes = _size(out_shape), _size(kernel), _size(stride), _size(padding)
    if choose(coords.device) == "numba":
        from bev_lightning.ops.sparse_conv.cpu import pair_strided

        return pair_strided(coords, *sizes)
    return _pair_strided_torch(coords, *sizes)


@_pair_strided.register_fake
def _(
    coords: Tensor,
    out_shape: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    num_outputs = torch.library.get_ctx().new_dynamic_size()
    num_offsets = kernel[0] * kernel[1] * kernel[2]
    return (
        coords.new_empty((num_offsets, num_outputs), dtype=torch.int32),
        coords.new_empty((num_offsets, coords.shape[0]), dtype=torch.int32),
        coords.new_empty(num_outputs),
    )


def _pair_strided_torch(
    coords: Tensor, out_shape: Size3, kernel: Size3, stride: Size3, padding: Size3
) -> tuple[Tensor, Tensor, Tensor]:
    """By sorting, for any device. The number of outputs is known to the device alone: the host
    waits for it once, for it is the length of what follows."""
    sample, *here = coords.unbind(1)
    cells, hit = [], torch.ones((), dtype=torch.bool, device=coords.device)
    for axis, offset in enumerate(_kernel_offsets(kernel, coords.device)):
        reach = here[axis] + padding[axis] - offset
        cell = torch.div(reach, stride[axis], rounding_mode="floor")
        hit = hit & (reach >= 0) & (cell * stride[axis] == reach) & (cell < out_shape[axis])
        cells.append(cell)
    z, y, x = cells
    # A key above all others stands for "none", so that it is the last one and exists in any case.
    none = torch.iinfo(torch.int64).max
    flat = torch.where(hit, _flatten(sample, z, y, x, out_shape), none)
    keys, target = torch.unique(
        torch.cat([flat.flatten(), flat.new_full((1,), none)]), return_inverse=True
    )
    num_outputs = len(keys) - 1
    target = target[:-1].view(flat.shape)
    sources = coords.new_full((len(flat), num_outputs + 1), -1, dtype=torch.int32)
    rows = torch.arange(len(coords), device=coords.device, dtype=torch.int32).expand_as(flat)
    # Within an offset no output occurs twice, but for the column "none", which is cut off.
    sources = sources.scatter_(1, target, rows)[:, :num_outputs].contiguous()
    return sources, torch.where(hit, target, -1).int(), keys[:num_outputs]


def _kernel_offsets(kernel: Size3, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """``(kz * ky * kx, 1)`` z, y and x, each from 0."""
    k = torch.arange(kernel[0] * kernel[1] * kernel[2], device=device).unsqueeze(1)
    return k // (kernel[1] * kernel[2]), k // kernel[2] % kernel[1], k % kernel[2]


def _flatten(sample: Tensor, z: Tensor, y: Tensor, x: Tensor, shape: Size3) -> Tensor:
    """Flat coordinate ``((sample * Z + z) * Y + y) * X + x``."""
    return ((sample * shape[0] + z) * shape[1] + y) * shape[2] + x


def _size(values: Sequence[int]) -> Size3:
    z, y, x = values
    return z, y, x


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Accumulate half precision in float32."""
    return torch.promote_types(dtype, torch.float32)
