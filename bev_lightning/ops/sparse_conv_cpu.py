"""CPU kernels of :mod:`bev_lightning.ops.sparse_conv`, compiled on first use; a GPU never imports
them. Hash tables instead of sorting and binary search; the same pairs in the same order."""

import numpy as np
from numba import njit
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Size3 = tuple[int, int, int]


def pair_neighbours(
    coords: Integers, shape: Size3, kernel: Size3
) -> tuple[Integers, Integers, Integers]:
    """See ``sparse_conv._pair_neighbours``."""
    half = kernel[0] * kernel[1] * kernel[2] // 2
    pairs = np.empty((2, half * len(coords)), np.int64)
    counts = np.zeros(half, np.int64)
    _pair_neighbours(
        np.ascontiguousarray(coords), shape, kernel, _table(len(coords)), pairs, counts
    )
    total = int(counts.sum())
    return pairs[0, :total].copy(), pairs[1, :total].copy(), counts


def pair_strided(
    coords: Integers, out_shape: Size3, kernel: Size3, stride: Size3, padding: Size3
) -> tuple[Integers, Integers, Integers, Integers]:
    """See ``sparse_conv._pair_strided``."""
    num_offsets = kernel[0] * kernel[1] * kernel[2]
    # Of the offsets along one axis at most ceil(kernel / stride) meet the stride.
    most = 1
    for axis in (0, 1, 2):
        most *= -(-kernel[axis] // stride[axis])
    pairs = np.empty((2, most * len(coords)), np.int64)
    keys = np.empty(most * len(coords), np.int64)
    counts = np.zeros(num_offsets, np.int64)
    table = _table(most * len(coords))
    num_keys = _pair_strided(
        np.ascontiguousarray(coords),
        out_shape,
        kernel,
        stride,
        padding,
        table,
        pairs,
        keys,
        counts,
    )
    total = int(counts.sum())
    keys = keys[:num_keys]
    order = np.argsort(keys)
    rank = np.empty(num_keys, np.int64)
    rank[order] = np.arange(num_keys)
    return pairs[0, :total].copy(), rank[pairs[1, :total]], counts, keys[order]


def _table(num_keys: int) -> Integers:
    """At most half full, so that probing stays short; a power of two, so that a mask wraps
    round."""
    return np.full((1 << max(4, (2 * num_keys).bit_length()), 2), -1, np.int64)


@njit(cache=True, nogil=True, inline="always")
def _place(key, table):  # type: ignore[no-untyped-def]
    """Slot of the key in the table of (key, value), or the empty slot where it belongs."""
    mask = np.uint64(len(table) - 1)
    place = (np.uint64(key) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(32)) & mask
    while table[place, 0] >= 0 and table[place, 0] != key:
        place = (place + np.uint64(1)) & mask
    return place


@njit(cache=True, nogil=True)
def _pair_neighbours(coords, shape, kernel, table, pairs, counts):  # type: ignore[no-untyped-def]
    depth, height, width = shape
    keys = np.empty(len(coords), np.int64)
    for row in range(len(coords)):
        sample, z, y, x = coords[row]
        keys[row] = ((sample * depth + z) * height + y) * width + x
        place = _place(keys[row], table)
        table[place, 0] = keys[row]
        table[place, 1] = row
    total = 0
    for offset in range(len(counts)):
        dz = offset // (kernel[1] * kernel[2]) - kernel[0] // 2
        dy = offset // kernel[2] % kernel[1] - kernel[1] // 2
        dx = offset % kernel[2] - kernel[2] // 2
        shift = (dz * height + dy) * width + dx
        start = total
        for row in range(len(coords)):
            z, y, x = coords[row, 1] + dz, coords[row, 2] + dy, coords[row, 3] + dx
            if z < 0 or z >= depth or y < 0 or y >= height or x < 0 or x >= width:
                continue
            place = _place(keys[row] + shift, table)
            if table[place, 0] >= 0:
                pairs[0, total] = table[place, 1]
                pairs[1, total] = row
                total += 1
        counts[offset] = total - start


@njit(cache=True, nogil=True)
def _pair_strided(  # type: ignore[no-untyped-def]
    coords, out_shape, kernel, stride, padding, table, pairs, keys, counts
):
    depth, height, width = out_shape
    total, num_keys = 0, 0
    for offset in range(len(counts)):
        kz = offset // (kernel[1] * kernel[2])
        ky = offset // kernel[2] % kernel[1]
        kx = offset % kernel[2]
        start = total
        for row in range(len(coords)):
            z = coords[row, 1] + padding[0] - kz
            y = coords[row, 2] + padding[1] - ky
            x = coords[row, 3] + padding[2] - kx
            if z < 0 or y < 0 or x < 0 or z % stride[0] or y % stride[1] or x % stride[2]:
                continue
            z, y, x = z // stride[0], y // stride[1], x // stride[2]
            if z >= depth or y >= height or x >= width:
                continue
            key = ((coords[row, 0] * depth + z) * height + y) * width + x
            place = _place(key, table)
            if table[place, 0] < 0:
                table[place, 0] = key
                table[place, 1] = num_keys
                keys[num_keys] = key
                num_keys += 1
            pairs[0, total] = row
            pairs[1, total] = table[place, 1]
            total += 1
        counts[offset] = total - start
    return num_keys
