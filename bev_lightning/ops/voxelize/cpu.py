"""Numba CPU kernels of hard voxelisation, compiled on first use."""

from collections.abc import Sequence

import torch
from numba import njit
from torch import Tensor

from bev_lightning.ops.voxelize.reference import grid_shape


def voxelize_hard(
    features: Tensor,
    count: Tensor,
    range_m: Sequence[float],
    cell_m: Sequence[float],
    max_points: int,
    max_voxels: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`bev_lightning.ops.voxelize.voxelize_hard`.

    One pass finds each point's cell and numbers the cells with a hash table, a second one copies
    the points that are kept.
    """
    samples, rows, width = features.shape
    features, count = features.contiguous(), count.long().contiguous()
    low = torch.tensor(range_m[:3], dtype=torch.float32)
    cell = torch.tensor(cell_m, dtype=torch.float32)
    # At most half full, so that probing is short; a power of two, so that a mask replaces modulo.
    table = torch.empty(1 << max(4, (2 * min(rows, max_voxels)).bit_length()), dtype=torch.int32)
    limit = samples * min(rows, max_voxels)
    keys, coords = torch.empty(limit, dtype=torch.int64), torch.empty(limit, 4, dtype=torch.int64)
    num_points = torch.zeros(limit, dtype=torch.int64)
    target = torch.full((samples * rows,), -1, dtype=torch.int64)
    xyz = features[..., :3].to(torch.float32)
    numbered = (xyz, count, low, cell, table, keys, coords, num_points, target)
    num_voxels = _number_voxels(
        grid_shape(range_m, cell_m), max_points, max_voxels, *(one.numpy() for one in numbered)
    )
    voxels = features.new_zeros(num_voxels, max_points, width)
    # As bytes, because NumPy has no bfloat16.
    copied = (features.view(torch.uint8).flatten(0, 1), target, voxels.view(torch.uint8))
    if features.numel() and voxels.numel():
        _copy_points(*(tensor.numpy() for tensor in copied))
    return voxels, coords[:num_voxels].clone(), num_points[:num_voxels].clone()


@njit(cache=True, nogil=True)
def _number_voxels(  # type: ignore[no-untyped-def]
    shape, max_points, max_voxels, xyz, count, low, cell, table, keys, coords, num_points, target
):
    depth, height, width = shape
    mask = len(table) - 1
    num_rows = xyz.shape[1]
    num_voxels = 0
    for sample in range(len(xyz)):
        table[:] = -1
        start = num_voxels
        for row in range(min(count[sample], num_rows)):
            # All in float32, as in the reference; comparisons with NaN are false.
            fx = (xyz[sample, row, 0] - low[0]) / cell[0]
            fy = (xyz[sample, row, 1] - low[1]) / cell[1]
            fz = (xyz[sample, row, 2] - low[2]) / cell[2]
            if not (fx >= 0 and fy >= 0 and fz >= 0 and fx < width and fy < height and fz < depth):
                continue
            x, y, z = int(fx), int(fy), int(fz)
            key = (z * height + y) * width + x
            slot = ((key * 0x9E3779B1) >> 7) & mask
            while table[slot] >= 0 and keys[table[slot]] != key:
                slot = (slot + 1) & mask
            number = table[slot]
            if number < 0:
                if num_voxels - start >= max_voxels:
                    continue
                number = num_voxels
                table[slot] = number
                keys[number] = key
                coords[number, 0], coords[number, 1] = sample, z
                coords[number, 2], coords[number, 3] = y, x
                num_voxels += 1
            if num_points[number] < max_points:
                target[sample * num_rows + row] = number * max_points + num_points[number]
                num_points[number] += 1
    return num_voxels


@njit(cache=True, nogil=True)
def _copy_points(rows, target, voxels):  # type: ignore[no-untyped-def]
    max_points = voxels.shape[1]
    for row in range(len(target)):
        if target[row] >= 0:
            voxel, slot = target[row] // max_points, target[row] % max_points
            for byte in range(rows.shape[1]):
                voxels[voxel, slot, byte] = rows[row, byte]
