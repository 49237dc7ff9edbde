"""Multi-scale deformable attention: each query reads a few points of feature maps, bilinearly.

The reference, in plain PyTorch operations (Deformable DETR, Zhu et al. 2021, equation 3). It is
what other implementations are compared with, and what is exported.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


def multi_scale_deformable_attention(
    value: Tensor, shapes: Sequence[tuple[int, int]], locations: Tensor, weights: Tensor
) -> Tensor:
    """Weighted sums of bilinear samples.

    ``out[b, q, head] = sum over level, point of weights[b, q, head, level, point] *
    map[b, level, head](locations[b, q, head, level, point])``. A map is zero outside its borders
    (a sample within half a cell of the border fades out). Sums are taken in float32 (float64 for
    float64 inputs), whatever the precision around; gradients flow to all three tensors.

    Args:
        value: ``(B, S, H, D)``, the cells of all maps row by row, level after level; H heads.
        shapes: height, width of each level's map [cells]; S is the sum of their products.
        locations: ``(B, Q, H, L, P, 2)`` as x, y; (0, 0) is the outer corner of the first cell and
            (1, 1) that of the last.
        weights: ``(B, Q, H, L, P)``.

    Returns:
        ``(B, Q, H * D)`` in the type of ``value``.

    Raises:
        ValueError: the shapes do not fit one another.
    """
    batch, num_values, heads, width = value.shape
    queries, levels, points = locations.shape[1], locations.shape[3], locations.shape[4]
    if (
        num_values != sum(height * width for height, width in shapes)
        or len(shapes) != levels
        or tuple(locations.shape) != (batch, queries, heads, levels, points, 2)
        or tuple(weights.shape) != (batch, queries, heads, levels, points)
    ):
        raise ValueError(
            f"deformable attention got value {tuple(value.shape)} for maps {list(shapes)}, "
            f"locations {tuple(locations.shape)} and weights {tuple(weights.shape)}"
        )
    accumulate = torch.promote_types(value.dtype, torch.float32)
    shape = (batch, heads * width, queries)
    start = 0
    total: Tensor | None = None
    with torch.autocast(value.device.type, enabled=False):
        grid = 2.0 * locations.to(accumulate) - 1.0
        for level, (height, columns) in enumerate(shapes):
            cells = value[:, start : start + height * columns].to(accumulate)
            start += height * columns
            if 0 in (cells.shape[1], batch * heads, queries, points):
                continue
            level_map = cells.permute(0, 2, 3, 1).reshape(batch * heads, width, height, columns)
            samples = F.grid_sample(
                level_map,
                grid[:, :, :, level].transpose(1, 2).flatten(0, 1),  # (B * H, Q, P, 2)
                mode="bilinear",
                padding_mode="zeros",
                align_corners=False,
            )
            weight = weights[:, :, :, level].transpose(1, 2).flatten(0, 1).to(accumulate)
            summed = (samples * weight.unsqueeze(1)).sum(-1)
            total = summed if total is None else total + summed
    if total is not None:
        return total.reshape(shape).transpose(1, 2).to(value.dtype)
    # Tied to all inputs, so that without a query, a point or a cell gradients are zeros, not none.
    nothing = sum(tensor.flatten()[:0].sum() for tensor in (value, locations, weights))
    return torch.as_tensor(nothing, dtype=value.dtype).expand(shape).transpose(1, 2)
