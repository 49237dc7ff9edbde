"""Sparse 3-D convolution: rulebooks and gather-GEMM-scatter (SECOND, Yan et al. 2018, section
3.1.2).

A rulebook lists, for each offset of the kernel, which input voxel reaches which output voxel. It
depends on the coordinates alone, so that it is built once and used by every layer on them.

Coordinates are ``(V, 4)`` int64 rows sample, z, y, x without duplicates; weights are
``(kz, ky, kx, Cin, Cout)``.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Size3 = tuple[int, int, int]


@dataclass(frozen=True)
class Rulebook:
    """Pairs of input and output voxels, grouped by the offset of the kernel.

    Within one offset no input and no output occurs twice, hence sums have a fixed order.

    Attributes:
        inputs, outputs: ``(M,)`` int64 rows, offset by offset (z slowest, x fastest).
        counts: ``(kz * ky * kx,)`` int64 pairs of each offset, on the CPU on any device.
        num_outputs: number of output voxels.
        centre: the offset that takes every voxel to itself and is not listed; -1 without one.
    """

    inputs: Tensor
    outputs: Tensor
    counts: Tensor
    num_outputs: int
    centre: int = -1


@torch.no_grad()
def build_submanifold_rulebook(coords: Tensor, shape: Size3, kernel: Size3) -> Rulebook:
    """Rulebook of a submanifold convolution, whose outputs stand at its inputs' coordinates.

    Args:
        coords: ``(V, 4)`` sample, z, y, x.
        shape: extent of the grid along z, y, x.
        kernel: odd extents along z, y, x; the padding is half of each.

    Raises:
        ValueError: an extent of the kernel is even.
    """
    if any(extent % 2 == 0 for extent in kernel):
        raise ValueError(f"a submanifold convolution takes an odd kernel, got {kernel}")
    if coords.device.type == "cpu":
        from bev_lightning.ops.sparse_conv_cpu import pair_neighbours

        sources, targets, counts = (
            torch.from_numpy(array) for array in pair_neighbours(coords.numpy(), shape, kernel)
        )
    else:
        sources, targets, counts = _pair_neighbours(coords, shape, kernel)
    # The second half of the kernel mirrors the first: what reaches me by d, I reach by -d.
    zero = counts.new_zeros(1)
    return Rulebook(
        inputs=torch.cat([sources, targets.flip(0)]),
        outputs=torch.cat([targets, sources.flip(0)]),
        counts=torch.cat([counts, zero, counts.flip(0)]),
        num_outputs=coords.shape[0],
        centre=counts.shape[0],
    )


def _pair_neighbours(coords: Tensor, shape: Size3, kernel: Size3) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, outputs and counts of the first half of the offsets, by binary search: for any
    device.

    The number of pairs is known to the device alone: the host waits for it twice.
    """
    extent = coords.new_tensor(shape)
    offsets = _kernel_offsets(kernel, coords.device)
    offsets = offsets[: len(offsets) // 2] - coords.new_tensor(kernel) // 2
    neighbour = coords[:, 1:] + offsets.unsqueeze(1)
    inside = ((neighbour >= 0) & (neighbour < extent)).all(dim=-1)
    wanted = _flatten(coords[:, 0], neighbour, shape)
    keys, order = torch.sort(_flatten(coords[:, 0], coords[:, 1:], shape))
    place = torch.searchsorted(keys, wanted).clamp_(max=max(len(keys) - 1, 0))
    found = inside & (keys[place] == wanted) if len(keys) else inside
    offset, target = found.nonzero(as_tuple=True)
    return order[place[offset, target]], target, found.sum(dim=1).cpu()


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
    if coords.device.type == "cpu":
        from bev_lightning.ops.sparse_conv_cpu import pair_strided

        sources, targets, counts, keys = (
            torch.from_numpy(array)
            for array in pair_strided(coords.numpy(), (z, y, x), kernel, stride, padding)
        )
    else:
        sources, targets, counts, keys = _pair_strided(coords, (z, y, x), kernel, stride, padding)
    rows = [keys // (z * y * x), keys // (y * x) % z, keys // x % y, keys % x]
    return Rulebook(sources, targets, counts, len(keys)), torch.stack(rows, dim=1), (z, y, x)


def _pair_strided(
    coords: Tensor, out_shape: Size3, kernel: Size3, stride: Size3, padding: Size3
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inputs, outputs, counts and the outputs' flat coordinates, by sorting: for any device.

    The numbers of pairs and of outputs are known to the device alone: the host waits three times.
    """
    reach = coords[:, 1:] + coords.new_tensor(padding)
    reach = reach - _kernel_offsets(kernel, coords.device).unsqueeze(1)
    step = coords.new_tensor(stride)
    cell = torch.div(reach, step, rounding_mode="floor")
    hit = (reach >= 0) & (cell * step == reach) & (cell < coords.new_tensor(out_shape))
    hit = hit.all(dim=-1)
    offset, source = hit.nonzero(as_tuple=True)
    flat = _flatten(coords[source, 0], cell[offset, source], out_shape)
    keys, target = torch.unique(flat, return_inverse=True)
    return source, target, hit.sum(dim=1).cpu(), keys


def sparse_conv(features: Tensor, weight: Tensor, rulebook: Rulebook) -> Tensor:
    """``out[o] = sum over pairs (i, o) of offset k: features[i] @ weight[k]``.

    Under autocast the products are taken in its type; sums are float32 in any case (float64 for
    float64). On the CPU the result is the same bit by bit with any number of threads.

    Args:
        features: ``(V, Cin)``.
        weight: ``(kz, ky, kx, Cin, Cout)``.
        rulebook: of the same coordinates and kernel.

    Returns:
        ``(num_outputs, Cout)``.
    """
    device = features.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        features, weight = features.to(dtype), weight.to(dtype)
    result: Tensor = _sparse_conv(
        features,
        weight.flatten(0, 2),
        rulebook.inputs,
        rulebook.outputs,
        rulebook.counts,
        rulebook.num_outputs,
        rulebook.centre,
    )
    return result


@torch.library.custom_op("bev_lightning::sparse_conv", mutates_args=())
def _sparse_conv(
    features: Tensor,
    weight: Tensor,
    inputs: Tensor,
    outputs: Tensor,
    counts: Tensor,
    num_outputs: int,
    centre: int,
) -> Tensor:
    wide = _wide(features.dtype)
    with _one_thread(features):
        total = features.new_zeros(num_outputs, weight.shape[2], dtype=wide)
        if centre >= 0:
            total += features @ weight[centre]
        for offset, source, target in _groups(inputs, outputs, counts):
            total.index_add_(0, target, (features[source] @ weight[offset]).to(wide))
    return total.to(features.dtype)


@_sparse_conv.register_fake
def _(
    features: Tensor,
    weight: Tensor,
    inputs: Tensor,
    outputs: Tensor,
    counts: Tensor,
    num_outputs: int,
    centre: int,
) -> Tensor:
    return features.new_empty(num_outputs, weight.shape[2])


@torch.library.custom_op("bev_lightning::sparse_conv_backward", mutates_args=())
def _sparse_conv_backward(
    grad: Tensor,
    features: Tensor,
    weight: Tensor,
    inputs: Tensor,
    outputs: Tensor,
    counts: Tensor,
    centre: int,
    need_features: bool,
) -> tuple[Tensor, Tensor]:
    wide = _wide(features.dtype)
    grad_features = torch.zeros_like(features, dtype=wide)
    grad_weight = torch.zeros_like(weight)
    with _one_thread(features):
        if centre >= 0:
            grad_weight[centre] = features.T @ grad
            if need_features:
                grad_features += grad @ weight[centre].T
        for offset, source, target in _groups(inputs, outputs, counts):
            reached = grad[target]
            grad_weight[offset] = features[source].T @ reached
            if need_features:
                grad_features.index_add_(0, source, (reached @ weight[offset].T).to(wide))
    return grad_features.to(features.dtype), grad_weight


@_sparse_conv_backward.register_fake
def _(
    grad: Tensor,
    features: Tensor,
    weight: Tensor,
    inputs: Tensor,
    outputs: Tensor,
    counts: Tensor,
    centre: int,
    need_features: bool,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(features), torch.empty_like(weight)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, _, ctx.centre = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    need_features, need_weight = ctx.needs_input_grad[:2]
    grad_features, grad_weight = _sparse_conv_backward(
        grad.contiguous(), *ctx.saved_tensors, ctx.centre, need_features
    )
    return (
        grad_features if need_features else None,
        grad_weight if need_weight else None,
        *(None,) * 5,
    )


_sparse_conv.register_autograd(_backward, setup_context=_save)


def _groups(
    inputs: Tensor, outputs: Tensor, counts: Tensor
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """The kernel's offsets that have pairs, with their inputs and outputs."""
    start = 0
    for offset, count in enumerate(counts.tolist()):
        if count:
            yield offset, inputs[start : start + count], outputs[start : start + count]
        start += count


@contextmanager
def _one_thread(tensor: Tensor) -> Iterator[None]:
    """BLAS splits a product otherwise with each number of threads, and so rounds otherwise. These
    products are small and bound by the gather around them: one thread costs little and is exact."""
    before = torch.get_num_threads()
    if tensor.device.type != "cpu" or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _kernel_offsets(kernel: Size3, device: torch.device) -> Tensor:
    """``(kz * ky * kx, 3)`` z, y, x from 0."""
    axes = [torch.arange(extent, device=device) for extent in kernel]
    return torch.cartesian_prod(*axes)


def _flatten(sample: Tensor, zyx: Tensor, shape: Size3) -> Tensor:
    """Flat coordinate ``((sample * Z + z) * Y + y) * X + x``."""
    z, y, x = zyx.unbind(-1)
    return ((sample * shape[0] + z) * shape[1] + y) * shape[2] + x


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Accumulate half precision in float32."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
