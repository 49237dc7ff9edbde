"""Plain PyTorch implementation of deformable attention, by grid_sample."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from bev_lightning.ops.backend import accumulation_dtype


def attend_reference(
    value: Tensor,
    shapes: Sequence[tuple[int, int]],
    locations: Tensor,
    weights: Tensor,
    anchors: Tensor,
    seen: Tensor,
) -> Tensor:
    """Attention of all queries to all views; pairs that do not see each other are masked."""
    dtype = accumulation_dtype(value)
    batch, num_views, queries = seen.shape
    # Depends on all inputs, so that gradients of empty inputs are zeros, not None.
    total = sum(tensor.flatten()[:0].sum() for tensor in (value, locations, weights))
    total = torch.as_tensor(total, dtype=dtype)
    total = total.expand(batch, queries, value.shape[2] * value.shape[3])
    repeats = weights.shape[4] // anchors.shape[3]
    # Autocast lowers none of the operations below.
    maps = value.to(dtype).reshape(batch, num_views, *value.shape[1:])
    for view in range(num_views):
        # The projection of a point behind a camera may be infinitely far outside the image.
        anchor = anchors[:, view].to(dtype).nan_to_num().clamp(-1e4, 1e4)
        anchor = anchor.repeat(1, 1, repeats, 1)
        positions = locations.to(dtype) + anchor[:, :, None, None]
        summed = _attend_one_view(maps[:, view], shapes, positions, weights.to(dtype))
        if summed is not None:
            total = total + torch.where(seen[:, view, :, None], summed, 0.0)
    return total.to(value.dtype)


def _attend_one_view(
    value: Tensor, shapes: Sequence[tuple[int, int]], locations: Tensor, weights: Tensor
) -> Tensor | None:
    """``(B, Q, H * D)`` of one view; None if there is nothing to sample."""
    batch, _, heads, width = value.shape
    queries, points = locations.shape[1], locations.shape[4]
    total: Tensor | None = None
    start = 0
    for level, (height, columns) in enumerate(shapes):
        cells = value[:, start : start + height * columns]
        start += height * columns
        if 0 in (cells.shape[1], batch * heads, queries, points):
            continue
        level_map = cells.permute(0, 2, 3, 1).reshape(batch * heads, width, height, columns)
        samples = F.grid_sample(
            level_map,
            2.0 * locations[:, :, :, level].transpose(1, 2).flatten(0, 1) - 1.0,  # (B * H, Q, P, 2)
            mode="bilinear",
            padding_mode="zeros",
            align_corners=False,
        )
        weight = weights[:, :, :, level].transpose(1, 2).flatten(0, 1)
        summed = (samples * weight.unsqueeze(1)).sum(-1)
        total = summed if total is None else total + summed
    if total is None:
        return None
    return total.reshape(batch, heads * width, queries).transpose(1, 2)
