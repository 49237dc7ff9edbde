"""Plain PyTorch implementation of BEV pooling."""

import torch
from torch import Tensor

from bev_lightning.ops.backend import accumulation_dtype


def pool_reference(depth: Tensor, rows: Tensor, cells: Tensor, num_cells: int) -> Tensor:
    """Sum pixel features ``(B * N * h * w, C)`` into cells ``(B * Y * X, C)``.

    Materialises the outer product; points outside the grid are summed in an extra row.
    """
    batch, num_cameras, _, height, width = depth.shape
    sample = torch.arange(batch, device=depth.device).view(-1, 1, 1, 1, 1)
    target = torch.where(cells < 0, batch * num_cells, cells + sample * num_cells)
    dtype = accumulation_dtype(depth, rows)
    pixels = rows.to(dtype).view(batch, num_cameras, 1, height, width, rows.shape[1])
    lifted = (depth.to(dtype).unsqueeze(-1) * pixels).flatten(0, -2)
    pooled = lifted.new_zeros(batch * num_cells + 1, rows.shape[1])
    return pooled.index_add(0, target.flatten(), lifted)[:-1].to(rows.dtype)


def sort_points_reference(cells: Tensor, num_cells: int) -> tuple[Tensor, Tensor, Tensor]:
    """``points``, ``pixels`` and ``starts`` of a PoolIndex, by sorting."""
    batch, _, num_depths, height, width = cells.shape
    sample = torch.arange(batch, device=cells.device, dtype=torch.int32).view(-1, 1, 1, 1, 1)
    key = torch.where(cells < 0, batch * num_cells, cells + sample * num_cells).flatten()
    # A stable sort: the order of summation, and so the last bit, is the same at every run.
    key, points = key.sort(stable=True)
    boundaries = torch.arange(batch * num_cells + 1, device=cells.device, dtype=torch.int32)
    starts = torch.searchsorted(key, boundaries, out_int32=True)
    area = height * width
    pixels = points // (num_depths * area) * area + points % area if area else points
    return points.int(), pixels.int(), starts
