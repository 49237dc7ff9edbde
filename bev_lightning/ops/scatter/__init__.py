"""Pools rows into cells: maximum, sum or mean of the points of each pillar.

One thread computes each output, in a fixed order of addition, so that the result depends neither on
the number of threads nor on the order in which a GPU schedules its blocks. (The reference on a GPU
does not guarantee that.)
"""

import torch
from torch import Tensor

from bev_lightning.ops.backend import choose_backend
from bev_lightning.ops.scatter import custom_op
from bev_lightning.ops.scatter.reference import scatter_max_reference, scatter_sum_reference


def scatter_max(values: Tensor, index: Tensor, num_cells: int) -> Tensor:
    """Channel-wise maximum of the rows in each cell; arguments and result as :func:`scatter_sum`.

    The gradient goes to the row that holds the maximum, to the first one among equals.
    """
    if choose_backend(values.device) == "reference":
        winner = scatter_max_reference(values.detach(), index, num_cells)[1]
        padded = torch.cat([values, values.new_zeros(1, values.shape[1])])
        return padded.gather(0, torch.where(winner < 0, len(values), winner))
    pooled: Tensor = custom_op.scatter_max(values, index, num_cells)[0]
    return pooled


def scatter_sum(values: Tensor, index: Tensor, num_cells: int) -> Tensor:
    """Sum of the rows in each cell, added in the order of the rows.

    Args:
        values: ``(M, C)`` floating point.
        index: ``(M,)`` int64 cell of each row, in 0..num_cells-1.
        num_cells: rows of the result.

    Returns:
        ``(num_cells, C)``, zero in cells without rows.
    """
    if choose_backend(values.device) == "reference":
        return scatter_sum_reference(values, index, num_cells)
    total: Tensor = custom_op.scatter_sum(values, index, num_cells)
    return total


def scatter_mean(values: Tensor, index: Tensor, num_cells: int) -> Tensor:
    """Mean of the rows in each cell; arguments and result as for :func:`scatter_sum`."""
    count = torch.bincount(index, minlength=num_cells).clamp(min=1)
    return scatter_sum(values, index, num_cells) / count.unsqueeze(1).to(values.dtype)
