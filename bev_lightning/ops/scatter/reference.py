"""Plain PyTorch implementation of maximum and sum pooling."""

import torch
from torch import Tensor

from bev_lightning.ops.backend import accumulation_dtype


def scatter_max_reference(values: Tensor, index: Tensor, num_cells: int) -> tuple[Tensor, Tensor]:
    """Maximum of each cell and the lowest row that holds it, -1 in cells without rows."""
    num_rows, channels = values.shape
    cell = index.unsqueeze(1).expand(-1, channels)
    pooled = values.new_zeros(num_cells, channels)
    pooled.scatter_reduce_(0, cell, values, "amax", include_self=False)
    rows = torch.arange(num_rows, device=values.device).unsqueeze(1).expand(-1, channels)
    rows = torch.where(values == pooled[index], rows, num_rows)
    winner = index.new_full((num_cells, channels), num_rows)
    winner.scatter_reduce_(0, cell, rows, "amin")
    return pooled, torch.where(winner == num_rows, -1, winner)


def scatter_sum_reference(values: Tensor, index: Tensor, num_cells: int) -> Tensor:
    """Sum of each cell by index_add, which adds in no fixed order on a GPU."""
    wide = values.to(accumulation_dtype(values))
    total = wide.new_zeros(num_cells, values.shape[1]).index_add_(0, index, wide)
    return total.to(values.dtype)


def scatter_sum_sorted(values: Tensor, index: Tensor, num_cells: int) -> Tensor:
    """Sum of each cell in the order of the rows on any device: sorts the rows by cell first."""
    wide = values.to(accumulation_dtype(values))
    total = wide.new_zeros(num_cells, values.shape[1])
    if len(index):
        cells, order = torch.sort(index, stable=True)
        cells, lengths = torch.unique_consecutive(cells, return_counts=True)
        sums = torch.segment_reduce(wide[order], "sum", lengths=lengths, axis=0, unsafe=True)
        total.index_copy_(0, cells, sums)
    return total.to(values.dtype)
