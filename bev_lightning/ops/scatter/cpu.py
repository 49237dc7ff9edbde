"""Numba CPU kernel of maximum pooling, compiled on first use."""

import torch
from numba import njit
from torch import Tensor


def scatter_max(values: Tensor, index: Tensor, num_cells: int) -> tuple[Tensor, Tensor]:
    """Maximum of the rows ``(M, C)`` in each cell and the row that holds it.

    Both are ``(num_cells, C)``, with 0 and -1 in cells without rows.

    Raises:
        IndexError: an index is outside 0..num_cells-1.
    """
    pooled = values.new_zeros(num_cells, values.shape[1])
    winner = torch.full(pooled.shape, -1)
    if len(index) and (index.min() < 0 or index.max() >= num_cells):
        raise IndexError(f"scatter_max: index outside 0..{num_cells - 1}")
    _max_rows(*(tensor.numpy() for tensor in (values, index, pooled, winner)))
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
