"""Numba CPU kernels of sparse convolution, compiled on first use.

One thread computes each output, adding in a fixed order.
"""

from collections.abc import Sequence

import torch
from numba import njit
from torch import Tensor

from bev_lightning.ops.backend import accumulation_dtype
from bev_lightning.ops.parallel_for import parallel_for

# Output rows processed together, so that they and the weights of one offset stay in the cache.
_ROWS = 64


def convolve(features: Tensor, weight: Tensor, bias: Tensor | None, sources: Tensor) -> Tensor:
    """``(num_outputs, Cout)``; see ``custom_op.convolve``."""
    dtype = accumulation_dtype(features)
    out = features.new_zeros(sources.shape[1], weight.shape[2], dtype=dtype)
    if bias is not None:
        out += bias
    parallel_for(_convolve, len(out), features.to(dtype), weight.to(dtype), sources, out)
    return out.to(features.dtype)


def weight_gradient(features: Tensor, grad: Tensor, sources: Tensor) -> Tensor:
    """``(K, Cin, Cout)``; see ``custom_op._weight_gradient``."""
    dtype = accumulation_dtype(features)
    out = features.new_zeros(len(sources), features.shape[1], grad.shape[1], dtype=dtype)
    parallel_for(_add_products, len(out), features.to(dtype), grad.to(dtype), sources, out)
    return out.to(features.dtype)


def pair_neighbours(coords: Tensor, shape: Sequence[int], kernel: Sequence[int]) -> Tensor:
    """See ``custom_op.pair_neighbours``; merges the sorted keys with their neighbours' keys."""
    z, y, x = coords[:, 1:].unbind(1)
    keys = ((coords[:, 0] * shape[0] + z) * shape[1] + y) * shape[2] + x
    # The outputs of a strided convolution are sorted already.
    order = torch.arange(len(keys))
    if not bool((keys[1:] > keys[:-1]).all()):
        keys, order = keys.sort()
    sources = torch.full((kernel[0] * kernel[1] * kernel[2], len(coords)), -1, dtype=torch.int32)
    tensors = (coords[order], keys, order, sources)
    _pair_neighbours(tuple(shape), tuple(kernel), *(tensor.numpy() for tensor in tensors))
    return sources


def pair_strided(coords: Tensor, *sizes: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """See ``custom_op.pair_strided``; a hash table numbers the outputs."""
    out_shape, kernel, stride, padding = map(tuple, sizes)
    # Along an axis, at most ceil(kernel / stride) offsets are multiples of the stride.
    limit = len(coords)
    for axis in (0, 1, 2):
        limit *= -(-kernel[axis] // stride[axis])
    targets = torch.full((kernel[0] * kernel[1] * kernel[2], len(coords)), -1, dtype=torch.int32)
    keys = torch.empty(limit, dtype=torch.int64)
    # At most half full, so that probing is short; a power of two, so that a mask replaces modulo.
    table = torch.full((1 << max(4, (2 * limit).bit_length()),), -1, dtype=torch.int32)
    tensors = (coords.contiguous(), table, keys, targets)
    num_keys = _number_outputs(
        out_shape, kernel, stride, padding, *(tensor.numpy() for tensor in tensors)
    )
    keys, order = keys[:num_keys].sort()
    rank = torch.empty(num_keys, dtype=torch.int32)
    rank[order] = torch.arange(num_keys, dtype=torch.int32)
    sources = torch.full((len(targets), num_keys), -1, dtype=torch.int32)
    _rank_outputs(rank.numpy(), targets.numpy(), sources.numpy())
    return sources, targets, keys


@njit(cache=True, nogil=True, fastmath={"contract"})
def _convolve(first, last, features, weight, sources, out):  # type: ignore[no-untyped-def]
    in_channels, out_channels = weight.shape[1:]
    for start in range(first, last, _ROWS):
        for k in range(len(sources)):
            for row in range(start, min(start + _ROWS, last)):
                source = sources[k, row]
                if source < 0:
                    continue
                # Four channels at a time: an output is loaded and stored once for four products.
                for c in range(0, in_channels - 3, 4):
                    a, b = features[source, c], features[source, c + 1]
                    d, e = features[source, c + 2], features[source, c + 3]
                    for j in range(out_channels):
                        total = out[row, j] + a * weight[k, c, j]
                        total = total + b * weight[k, c + 1, j]
                        total = total + d * weight[k, c + 2, j]
                        out[row, j] = total + e * weight[k, c + 3, j]
                for c in range(in_channels // 4 * 4, in_channels):
                    a = features[source, c]
                    for j in range(out_channels):
                        out[row, j] += a * weight[k, c, j]


@njit(cache=True, nogil=True, fastmath={"contract"})
def _add_products(first, last, features, grad, sources, out):  # type: ignore[no-untyped-def]
    in_channels, out_channels = out.shape[1:]
    num_outputs = sources.shape[1]
    for k in range(first, last):
        row = 0
        while row < num_outputs:
            # The next four pairs; the last ones, fewer than four, are added one by one.
            found, p, q, r, s = 0, 0, 0, 0, 0
            while row < num_outputs and found < 4:
                if sources[k, row] >= 0:
                    p, q, r, s = q, r, s, row
                    found += 1
                row += 1
            if found == 4:
                i, m, n, o = sources[k, p], sources[k, q], sources[k, r], sources[k, s]
                for c in range(in_channels):
                    a, b, d, e = features[i, c], features[m, c], features[n, c], features[o, c]
                    for j in range(out_channels):
                        total = out[k, c, j] + a * grad[p, j]
                        total = total + b * grad[q, j]
                        total = total + d * grad[r, j]
                        out[k, c, j] = total + e * grad[s, j]
                continue
            for rest in range(found):
                at = (q, r, s)[rest + 3 - found]
                for c in range(in_channels):
                    a = features[sources[k, at], c]
                    for j in range(out_channels):
                        out[k, c, j] += a * grad[at, j]


@njit(cache=True, nogil=True)
def _pair_neighbours(shape, kernel, coords, keys, order, sources):  # type: ignore[no-untyped-def]
    depth, height, width = shape
    num = len(keys)
    num_offsets = len(sources)
    for row in range(num):
        sources[num_offsets // 2, row] = row
    # The second half of the kernel mirrors the first: if o reads i at offset d, i reads o at -d.
    for offset in range(num_offsets // 2):
        dz = offset // (kernel[1] * kernel[2]) - kernel[0] // 2
        dy = offset // kernel[2] % kernel[1] - kernel[1] // 2
        dx = offset % kernel[2] - kernel[2] // 2
        shift = (dz * height + dy) * width + dx
        j = 0
        for i in range(num):
            neighbour = keys[i] + shift
            while keys[j] < neighbour:  # ends at i at the latest, because shift is negative
                j += 1
            if keys[j] != neighbour:
                continue
            z, y, x = coords[i, 1] + dz, coords[i, 2] + dy, coords[i, 3] + dx
            if z < 0 or z >= depth or y < 0 or y >= height or x < 0 or x >= width:
                continue
            sources[offset, order[i]] = order[j]
            sources[num_offsets - 1 - offset, order[j]] = order[i]


@njit(cache=True, nogil=True)
def _number_outputs(  # type: ignore[no-untyped-def]
    out_shape, kernel, stride, padding, coords, table, keys, targets
):
    depth, height, width = out_shape
    mask = len(table) - 1
    num_keys = 0
    for row in range(len(coords)):
        for offset in range(len(targets)):
            z = coords[row, 1] + padding[0] - offset // (kernel[1] * kernel[2])
            y = coords[row, 2] + padding[1] - offset // kernel[2] % kernel[1]
            x = coords[row, 3] + padding[2] - offset % kernel[2]
            if z < 0 or y < 0 or x < 0 or z % stride[0] or y % stride[1] or x % stride[2]:
                continue
            z, y, x = z // stride[0], y // stride[1], x // stride[2]
            if z >= depth or y >= height or x >= width:
                continue
            key = ((coords[row, 0] * depth + z) * height + y) * width + x
            # Neighbours in x share a cache line.
            slot = ((key >> 3) * 0x9E3779B1 & mask) ^ (key & 7)
            while table[slot] >= 0 and keys[table[slot]] != key:
                slot = (slot + 1) & mask
            if table[slot] < 0:
                table[slot] = num_keys
                keys[num_keys] = key
                num_keys += 1
            targets[offset, row] = table[slot]
    return num_keys


@njit(cache=True, nogil=True)
def _rank_outputs(rank, targets, sources):  # type: ignore[no-untyped-def]
    for offset in range(len(targets)):
        for row in range(targets.shape[1]):
            number = targets[offset, row]
            if number >= 0:
                targets[offset, row] = rank[number]
                sources[offset, rank[number]] = row
