"""CPU kernel of :mod:`bev_lightning.ops.voxelize`, compiled on first use; GPUs do without."""

import numpy as np
from numba import njit
from numpy.typing import NDArray

Integers = NDArray[np.int64]


def number_voxels(
    cells: Integers, max_points: int, max_voxels: int
) -> tuple[Integers, Integers, Integers]:
    """One pass over the points with a hash table of the cells seen; see
    ``voxelize._number_voxels``."""
    num_points = cells.size
    voxel = np.full(num_points, -1, np.int64)
    slot = np.full(num_points, -1, np.int64)
    first = np.empty(num_points, np.int64)
    # At most half full, so that probing stays short; a power of two, so that a mask wraps round.
    table = np.full(1 << max(4, (2 * cells.shape[1]).bit_length()), -1, np.int64)
    num_voxels = _number_voxels(cells, max_points, max_voxels, voxel, slot, first, table)
    return voxel, slot, first[:num_voxels]


@njit(cache=True, nogil=True)
def _number_voxels(  # type: ignore[no-untyped-def]
    cells, max_points, max_voxels, voxel, slot, first, table
):
    mask = np.uint64(len(table) - 1)
    filled = np.zeros(len(first), np.int64)
    flat = cells.ravel()
    num_rows = cells.shape[1]
    num_voxels = 0
    for sample in range(cells.shape[0]):
        table[:] = -1
        start = num_voxels
        for row in range(sample * num_rows, (sample + 1) * num_rows):
            cell = flat[row]
            if cell < 0:
                continue
            place = (np.uint64(cell) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(32)) & mask
            while table[place] >= 0 and flat[first[table[place]]] != cell:
                place = (place + np.uint64(1)) & mask
            number = table[place]
            if number < 0:
                if num_voxels - start >= max_voxels:
                    continue
                number = num_voxels
                table[place] = number
                first[number] = row
                num_voxels += 1
            voxel[row] = number
            if filled[number] < max_points:
                slot[row] = filled[number]
                filled[number] += 1
    return num_voxels
