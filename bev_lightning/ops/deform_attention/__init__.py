"""Multi-scale deformable attention (Deformable DETR, Zhu et al. 2021, equation 3).

Each query takes a weighted sum of a few bilinear samples of feature maps, of one view or of all
views that see it. Samples are summed as they are read: no buffer grows with queries x points x
channels.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from bev_lightning.ops.backend import choose_backend
from bev_lightning.ops.deform_attention.custom_op import attend
from bev_lightning.ops.deform_attention.reference import attend_reference


def multi_scale_deformable_attention(
    value: Tensor,
    shapes: Sequence[tuple[int, int]],
    locations: Tensor,
    weights: Tensor,
    anchors: Tensor | None = None,
    seen: Tensor | None = None,
) -> Tensor:
    """Weighted sums of bilinear samples of feature maps.

    ``out[b, q, head] = sum over level, point of weights[b, q, head, level, point] *
    map[b, level, head](locations[b, q, head, level, point])``. A map is zero outside its borders
    (a sample within half a cell of the border fades out). Sums are taken in float32 (float64 for
    float64 inputs), also under autocast.

    With N views per sample (camera images) the sum also runs over the views that see the query, and
    locations are offsets from the query's anchors (reference points) in each view. The kernels read
    ``seen`` and skip the other views. That is exact, needs no list of visible queries (whose length
    only the device knows), and offsets and weights are predicted once per query, not per view.

    On a GPU the gradient of ``value`` is added atomically, in no fixed order.

    Args:
        value: ``(B * N, S, H, D)``, the cells of all maps row by row, level after level; H heads.
        shapes: height, width of each level's map [cells]; S is the sum of their products.
        locations: ``(B, Q, H, L, P, 2)`` as x, y; (0, 0) is the outer corner of the first cell and
            (1, 1) that of the last.
        weights: ``(B, Q, H, L, P)``.
        anchors: ``(B, N, Q, A, 2)``, without gradient; point k belongs to anchor k modulo A. None:
            one view, seen by all queries, anchored at the origin.
        seen: ``(B, N, Q)`` bool, the view sees the query; required with ``anchors``.

    Returns:
        ``(B, Q, H * D)`` in the dtype of ``value``.

    Raises:
        ValueError: the shapes do not match, or anchors require a gradient.
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
    if choose_backend(value.device) == "reference":
        return attend_reference(value, shapes, locations, weights, anchors, seen)
    sizes = [int(side) for shape in shapes for side in shape]
    attended: Tensor = attend(value, sizes, locations, weights, anchors, seen)
    return attended
