"""Numba CPU kernel of maximum pooling, compiled on first use."""

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray


def scatter_max(
    values: NDArray[Any], index: NDArray[np.int64], num_cells: int
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Maximum of the rows ``(M, C)`` in each cell and the row that holds it.

    Both are ``(num_cells, C)``, with 0 and -1 in cells without rows.

    Raises:
        IndexError: an index is outside 0..num_cells-1.
    """
    shape = (num_cells, values.shape[1])
    pooled = np.zeros(shape, values.dtype)
    winner = np.full(shape, -1, np.int64)
    if len(index) and (index.min() < 0 or index.max() >= num_cells):
        raise IndexError(f"scatter_max: index outside 0..{num_cells - 1}")
    _max_rows(values, index, pooled, winner)
    return pooled, winner


@njit(cache=True, nogil=True)
def _max_rows(values, index, pooled, winner):  # type: ignore[no-untyped-def]
    for row in range(values.shape[0]):
        cell = index[row]
        for channel in range(values.shape[1]):
            value = values[row, channel]
            if winner[cell, channel] < 0 or value > pooled[cell, channel]:
                pooled[cell, channel] = value
                winner[cell, channel] = row
