"""Sparse 3-D convolution (SECOND, Yan et al. 2018, section 3.1.2).

A rulebook lists, for each offset of the kernel, which input voxel contributes to which output
voxel. It depends only on the coordinates, so that it is built once and shared by all layers on
them. It is a table with a column per voxel, not a list of pairs: no shape depends on the layout of
the voxels, so that a GPU need not report the number of pairs to the host, and one thread computes
each output in the order of the offsets, without atomics.

Coordinates are ``(V, 4)`` int64 rows sample, z, y, x without duplicates; weights are
``(kz, ky, kx, Cin, Cout)``.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from bev_lightning.ops.backend import choose_backend
from bev_lightning.ops.sparse_conv import custom_op, spconv
from bev_lightning.ops.sparse_conv.reference import Size3, convolve_reference

__all__ = [
    "Rulebook",
    "Size3",
    "build_strided_rulebook",
    "build_submanifold_rulebook",
    "sparse_conv",
]


@dataclass(frozen=True)
class Rulebook:
    """Pairs of input and output voxels per kernel offset, int32.

    The K offsets are numbered with z slowest and x fastest.

    Attributes:
        sources: ``(K, num_outputs)`` input row that contributes to an output at an offset, -1 for
            none.
        targets: ``(K, num_inputs)`` output row that an input contributes to at an offset, -1 for
            none: the same pairs, for the gradient. None for a submanifold convolution, where it is
            ``sources`` with the offsets reversed.
        spconv: multiply with the spconv library (:mod:`bev_lightning.ops.sparse_conv.spconv`).
    """

    sources: Tensor
    targets: Tensor | None = None
    spconv: bool = False


@torch.no_grad()
def build_submanifold_rulebook(coords: Tensor, shape: Size3, kernel: Size3) -> Rulebook:
    """Rulebook of a submanifold convolution, which has outputs exactly at its inputs' coordinates.

    Needs no synchronisation between GPU and host.

    Args:
        coords: ``(V, 4)`` sample, z, y, x.
        shape: extent of the grid along z, y, x.
        kernel: odd extents along z, y, x; the padding is half of each.

    Raises:
        ValueError: an extent of the kernel is even.
    """
    if any(extent % 2 == 0 for extent in kernel):
        raise ValueError(f"a submanifold convolution takes an odd kernel, got {kernel}")
    return Rulebook(custom_op.pair_neighbours(coords, shape, kernel))


@torch.no_grad()
def build_strided_rulebook(
    coords: Tensor, shape: Size3, kernel: Size3, stride: Size3, padding: Size3
) -> tuple[Rulebook, Tensor, Size3]:
    """Rulebook of a strided convolution, which has an output wherever its kernel covers an input.

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
    sources, targets, keys = custom_op.pair_strided(coords, (z, y, x), kernel, stride, padding)
    rows = [keys // (z * y * x), keys // (y * x) % z, keys // x % y, keys % x]
    return Rulebook(sources, targets), torch.stack(rows, dim=1), (z, y, x)


def sparse_conv(
    features: Tensor, weight: Tensor, rulebook: Rulebook, bias: Tensor | None = None
) -> Tensor:
    """Sparse convolution of voxel features.

    ``out[o] = bias + sum over offset k with an input at o: features[sources[k, o]] @ weight[k]``.
    Under autocast the factors are rounded to its dtype; sums are always float32 (float64 for
    float64). Results and gradients are bit-identical at every run and thread count.

    Args:
        features: ``(V, Cin)``.
        weight: ``(kz, ky, kx, Cin, Cout)``.
        rulebook: of the same coordinates and kernel.
        bias: ``(Cout,)`` in the dtype of the sums.

    Returns:
        ``(num_outputs, Cout)``.
    """
    device = features.device
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
        features, weight = features.to(dtype), weight.to(dtype)
    weight = weight.flatten(0, 2)
    backend = choose_backend(device)
    if rulebook.spconv and backend != "reference" and features.dtype != torch.float64:
        return spconv.convolve(features, weight, bias, rulebook.sources)
    if backend == "reference" or (backend == "triton" and features.dtype == torch.float64):
        return convolve_reference(features, weight, bias, rulebook.sources)
    result: Tensor = custom_op.convolve(features, weight, bias, rulebook.sources, rulebook.targets)
    return result
