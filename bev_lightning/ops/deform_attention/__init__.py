"""Multi-scale deformable attention: each query reads a few points of feature maps, bilinearly
(Deformable DETR, Zhu et al. 2021, equation 3), of one view or of the views that see it.

Nothing grows with queries x points x channels: the samples are summed as they are read.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bev_lightning.ops.backend import choose


def multi_scale_deformable_attention(
    value: Tensor,
    shapes: Sequence[tuple[int, int]],
    locations: Tensor,
    weights: Tensor,
    anchors: Tensor | None = None,
    seen: Tensor | None = None,
) -> Tensor:
    """Weighted sums of bilinear samples.

    ``out[b, q, head] = sum over level, point of weights[b, q, head, level, point] *
    map[b, level, head](locations[b, q, head, level, point])``. A map is zero outside its borders
    (a sample within half a cell of the border fades out). Sums are taken in float32 (float64 for
    float64 inputs), whatever the precision around.

    With N views of a sample (the images of its cameras) the sum runs over the views that see the
    query too, and locations are relative to the query's anchors in each view. What no view sees
    costs nothing: a kernel that reads ``seen`` and skips is exact, needs no list whose length only
    the device knows, and predicts offsets and weights once a query, not once a view.

    The gradient of ``value`` is added atomically on a GPU, in any order, as in other
    implementations.

    Args:
        value: ``(B * N, S, H, D)``, the cells of all maps row by row, level after level; H heads.
        shapes: height, width of each level's map [cells]; S is the sum of their products.
        locations: ``(B, Q, H, L, P, 2)`` as x, y; (0, 0) is the outer corner of the first cell and
            (1, 1) that of the last.
        weights: ``(B, Q, H, L, P)``.
        anchors: ``(B, N, Q, A, 2)``, without gradient; point k belongs to anchor k modulo A. None:
            one view, seen by all queries, anchored in the origin.
        seen: ``(B, N, Q)`` bool, the view sees the query; given with ``anchors``.

    Returns:
        ``(B, Q, H * D)`` in the type of ``value``.

    Raises:
        ValueError: the shapes do not fit one another, or anchors with a gradient.
    """
    batch, queries, heads, levels, points = weights.shape
    if anchors is None or seen is None:
        anchors = locations.new_zeros(batch, 1, queries, 1, 2)
        seen = torch.ones(batch, 1, queries, dtype=torch.bool, device=value.device)
    num_views = anchors.shape[1]
    if (
        value.shape[0] != batch * num_views
        or value.shape[1] != sum(height * width for height, width in shapes)
        or value.shape[2] != heads
        or len(shapes) != levels
        or tuple(locations.shape) != (*weights.shape, 2)
        or tuple(anchors.shape) != (batch, num_views, queries, anchors.shape[3], 2)
        or points % anchors.shape[3]
        or tuple(seen.shape) != (batch, num_views, queries)
    ):
        raise ValueError(
            f"deformable attention got value {tuple(value.shape)} for maps {list(shapes)}, "
            f"locations {tuple(locations.shape)}, weights {tuple(weights.shape)}, anchors "
            f"{tuple(anchors.shape)} and seen {tuple(seen.shape)}"
        )
    if anchors.requires_grad:
        raise ValueError("deformable attention has no gradient for anchors; detach them")
    if choose(value.device) == "reference":
        return _attend_reference(value, shapes, locations, weights, anchors, seen)
    sizes = [int(side) for shape in shapes for side in shape]
    attended: Tensor = _attend(value, sizes, locations, weights, anchors, seen)
    return attended


def _attend_reference(
    value: Tensor,
    shapes: Sequence[tuple[int, int]],
    locations: Tensor,
    weights: Tensor,
    anchors: Tensor,
    seen: Tensor,
) -> Tensor:
    """All pairs of view and query, by grid_sample; those that do not see each other are masked."""
    accumulate = _accumulate_type(value)
    batch, num_views, queries = seen.shape
    # Tied to all inputs, so that without a query, a point or a cell gradients are zeros, not none.
    total = sum(tensor.flatten()[:0].sum() for tensor in (value, locations, weights))
    total = torch.as_tensor(total, dtype=accumulate)
    total = total.expand(batch, queries, value.shape[2] * value.shape[3])
    repeats = weights.shape[4] // anchors.shape[3]
    # No operation below is one that autocast would lower.
    maps = value.to(accumulate).reshape(batch, num_views, *value.shape[1:])
    for view in range(num_views):
        # What lies behind a camera may be infinitely far to its side.
        anchor = anchors[:, view].to(accumulate).nan_to_num().clamp(-1e4, 1e4)
        anchor = anchor.repeat(1, 1, repeats, 1)
        places = locations.to(accumulate) + anchor[:, :, None, None]
        summed = _sample(maps[:, view], shapes, places, weights.to(accumulate))
        if summed is not None:
            total = total + torch.where(seen[:, view, :, None], summed, 0.0)
    return total.to(value.dtype)


def _sample(
    value: Tensor, shapes: Sequence[tuple[int, int]], locations: Tensor, weights: Tensor
) -> Tensor | None:
    """``(B, Q, H * D)`` of one view; None where there is nothing to sample."""
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


@torch.library.custom_op("bev_lightning::deform_attention", mutates_args=())
def _attend(
    value: Tensor,
    sizes: Sequence[int],
    locations: Tensor,
    weights: Tensor,
    anchors: Tensor,
    seen: Tensor,
) -> Tensor:
    inputs = _widen(value, locations, weights, anchors)
    if choose(value.device) == "triton":
        from bev_lightning.ops.deform_attention.triton import attend

        return attend(value.contiguous(), sizes, *inputs[1:], seen.contiguous())
    from bev_lightning.ops.deform_attention.cpu import attend as attend_cpu

    return attend_cpu(inputs[0], sizes, *inputs[1:], seen.contiguous()).to(value.dtype)


@_attend.register_fake
def _(
    value: Tensor,
    sizes: Sequence[int],
    locations: Tensor,
    weights: Tensor,
    anchors: Tensor,
    seen: Tensor,
) -> Tensor:
    return value.new_empty(weights.shape[0], weights.shape[1], value.shape[2] * value.shape[3])


@torch.library.custom_op("bev_lightning::deform_attention_backward", mutates_args=())
def _attend_backward(
    grad: Tensor,
    value: Tensor,
    sizes: Sequence[int],
    locations: Tensor,
    weights: Tensor,
    anchors: Tensor,
    seen: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    inputs = _widen(value, locations, weights, anchors)
    grad = grad.reshape(*grad.shape[:2], *value.shape[2:]).contiguous()
    if choose(value.device) == "triton":
        from bev_lightning.ops.deform_attention.triton import attend_backward

        results = attend_backward(grad, value.contiguous(), sizes, *inputs[1:], seen.contiguous())
    else:
        from bev_lightning.ops.deform_attention.cpu import attend_backward as backward_cpu

        grad = grad.to(inputs[0].dtype)
        results = backward_cpu(grad, inputs[0], sizes, *inputs[1:], seen.contiguous())
    grad_value, grad_locations, grad_weights = results
    return (
        grad_value.to(value.dtype),
        grad_locations.to(locations.dtype),
        grad_weights.to(weights.dtype),
    )


@_attend_backward.register_fake
def _(
    grad: Tensor,
    value: Tensor,
    sizes: Sequence[int],
    locations: Tensor,
    weights: Tensor,
    anchors: Tensor,
    seen: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        value.new_empty(value.shape),
        locations.new_empty(locations.shape),
        weights.new_empty(weights.shape),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.sizes = inputs[1]
    ctx.save_for_backward(inputs[0], *inputs[2:])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    value, *others = ctx.saved_tensors
    grads = _attend_backward(grad, value, ctx.sizes, *others)
    return grads[0], None, grads[1], grads[2], None, None


_attend.register_autograd(_backward, setup_context=_setup_context)


def _widen(
    value: Tensor, locations: Tensor, weights: Tensor, anchors: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The inputs as they are accumulated, contiguous. A GPU kernel reads ``value`` as it is."""
    accumulate = _accumulate_type(value)
    wide = value if choose(value.device) == "triton" else value.to(accumulate).contiguous()
    return (
        wide,
        locations.to(accumulate).contiguous(),
        weights.to(accumulate).contiguous(),
        anchors.to(accumulate).contiguous(),
    )


def _accumulate_type(value: Tensor) -> torch.dtype:
    return torch.promote_types(value.dtype, torch.float32)
