"""Dense attention, and the three deformable attentions of BEVFormer (Li et al., ECCV 2022, sections
3.3 and 3.4).

In deformable attention a query samples a few points of a feature map; offsets and weights are
linear functions of the query. Positions are fractions of the map with (0, 0) at its outer corner;
offsets are predicted in cells. Softmax and positions are float32 under autocast.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bev_lightning.errors import InputError
from bev_lightning.ops.attention import attention
from bev_lightning.ops.deform_attention import multi_scale_deformable_attention
from bev_lightning.structures.constants import constant


class QueryAttention(nn.MultiheadAttention):
    """Dense attention: :class:`torch.nn.MultiheadAttention` with the same parameters, on the
    package's operator."""

    def __init__(self, channels: int, num_heads: int, dropout: float) -> None:
        super().__init__(channels, num_heads, dropout, batch_first=True)

    def forward(  # type: ignore[override]
        self, query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None = None
    ) -> Tensor:
        """
        Args:
            query: ``(B, Q, C)``.
            key, value: ``(B, K, C)``.
            hidden: bool, of a shape that expands to ``(B, H, Q, K)``: True where a query does
                not see a key.

        Returns:
            ``(B, Q, C)``.
        """
        weights, biases = self.in_proj_weight.chunk(3), self.in_proj_bias.chunk(3)
        heads = [
            nn.functional.linear(tensor, weight, bias)
            .unflatten(-1, (self.num_heads, -1))
            .transpose(1, 2)
            for tensor, weight, bias in zip((query, key, value), weights, biases, strict=True)
        ]
        dropout = self.dropout if self.training else 0.0
        attended = attention(*heads, hidden=hidden, dropout=dropout)
        projected: Tensor = self.out_proj(attended.transpose(1, 2).flatten(2))
        return projected


class TemporalSelfAttention(nn.Module):
    """Each BEV query attends around its cell in the previous and in the current BEV map; the result
    is the mean of the two.

    As published, offsets and weights depend on the previous map's feature at the query's own cell
    (before ``value_proj``) and on the query. The current map is the FIRST layer's query in every
    layer; without a previous map both are the layer's own query.

    Args:
        channels: width C.
        num_points: P points per head in each of the two maps.
    """

    def __init__(
        self, channels: int, num_heads: int = 8, num_points: int = 4, dropout: float = 0.1
    ) -> None:
        super().__init__()
        _check_heads(channels, num_heads)
        self.num_heads, self.num_points = num_heads, num_points
        self.sampling_offsets = nn.Linear(2 * channels, 2 * num_heads * num_points * 2)
        self.attention_weights = nn.Linear(2 * channels, 2 * num_heads * num_points)
        self.value_proj = nn.Linear(channels, channels)
        self.output_proj = nn.Linear(channels, channels)
        self.dropout = nn.Dropout(dropout)
        _initialise(self, num_heads, 2, num_points)

    def forward(
        self,
        query: Tensor,
        position: Tensor,
        previous: Tensor,
        current: Tensor,
        references: Tensor,
        shape: tuple[int, int],
        rows: slice = slice(None),
    ) -> Tensor:
        """
        Args:
            query, position: ``(B, Q, C)``, features and their positional encoding.
            previous, current: ``(B, Y * X, C)``, the two maps.
            references: ``(B, 2, Q, 2)`` position x, y of each query in the previous and the current
                map, fractions.
            shape: Y, X.
            rows: the cells of the Q queries; all by default.

        Returns:
            ``(B, Q, C)``, residual included.
        """
        batch, queries, _ = query.shape
        context = torch.cat([previous[:, rows], query + position], dim=-1)
        # The two maps are two levels of one value.
        value = self.value_proj(torch.cat([previous, current], dim=1))
        value = value.view(batch, value.shape[1], self.num_heads, -1)
        layout = (batch, queries, self.num_heads, 2, self.num_points)
        offsets = self.sampling_offsets(context).view(*layout, 2).float()
        weights = self.attention_weights(context).view(layout).float().softmax(-1)
        points = references.transpose(1, 2)[:, :, None, :, None] + offsets / _cells(offsets, shape)
        mean = multi_scale_deformable_attention(value, [shape, shape], points, 0.5 * weights)
        return query + self.dropout(self.output_proj(mean))


@dataclass(frozen=True)
class VisibleQueries:
    """The BEV queries that each camera sees.

    Attributes:
        seen: ``(B, N, Q)`` bool, an anchor of the query is in front of the camera and in its image.
        anchors: ``(B, N, Q, D, 2)`` positions x, y of the query's D height anchors in the image,
            fractions; valid where ``seen``.
        num_cameras: ``(B, Q)`` cameras that see the query, at least 1.
    """

    seen: Tensor
    anchors: Tensor
    num_cameras: Tensor


class SpatialCrossAttention(nn.Module):
    """Each BEV query attends around its height anchors in the cameras that see it; the result is
    the mean over those cameras.

    Only visible (camera, query) pairs are computed, for each sample separately. A query that no
    camera sees gets the bias of ``output_proj``, as published.

    Args:
        channels: width C.
        num_levels: L feature maps per image.
        num_points: P points per head and level, divided evenly between the height anchors.
        num_anchors: D height anchors of a query.

    Raises:
        InputError: the anchors do not divide the points.
    """

    def __init__(
        self,
        channels: int,
        num_heads: int = 8,
        num_levels: int = 4,
        num_points: int = 8,
        num_anchors: int = 4,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        _check_heads(channels, num_heads)
        if num_points % num_anchors:
            raise InputError(
                f"{num_points} points cannot be divided between {num_anchors} height anchors; make "
                "model.network.encoder.num_points a multiple of num_anchors"
            )
        self.deformable_attention = ImageAttention(
            channels, num_heads, num_levels, num_points, num_anchors
        )
        self.output_proj = nn.Linear(channels, channels)
        self.dropout = nn.Dropout(dropout)
        _initialise_linear(self.output_proj)

    def forward(
        self,
        query: Tensor,
        features: Tensor,
        shapes: Sequence[tuple[int, int]],
        visible: VisibleQueries,
    ) -> Tensor:
        """
        Args:
            query: ``(B, Q, C)``.
            features: ``(B * N, S, C)`` cells of all levels of each image.
            shapes: height, width of each level.
            visible: see :class:`VisibleQueries`.

        Returns:
            ``(B, Q, C)``, residual included.
        """
        slots = self.deformable_attention(query, features, shapes, visible)
        slots = slots / visible.num_cameras.unsqueeze(-1)
        return query + self.dropout(self.output_proj(slots))


class ImageAttention(nn.Module):
    """The sum over the images within :class:`SpatialCrossAttention`; point k belongs to the height
    anchor k modulo D. Softmax over levels and points together.

    Offsets and weights depend on the query alone: all cameras that see it share them."""

    def __init__(
        self, channels: int, num_heads: int, num_levels: int, num_points: int, num_anchors: int
    ) -> None:
        super().__init__()
        self.num_heads, self.num_levels, self.num_points = num_heads, num_levels, num_points
        self.num_anchors = num_anchors
        self.sampling_offsets = nn.Linear(channels, num_heads * num_levels * num_points * 2)
        self.attention_weights = nn.Linear(channels, num_heads * num_levels * num_points)
        self.value_proj = nn.Linear(channels, channels)
        _initialise(self, num_heads, num_levels, num_points)

    def forward(
        self,
        query: Tensor,
        features: Tensor,
        shapes: Sequence[tuple[int, int]],
        visible: VisibleQueries,
    ) -> Tensor:
        """Queries ``(B, Q, C)`` and features ``(B * N, S, C)`` to ``(B, Q, C)``."""
        value = self.value_proj(features).unflatten(-1, (self.num_heads, -1))
        layout = (*query.shape[:2], self.num_heads, self.num_levels, self.num_points)
        offsets = self.sampling_offsets(query).view(*layout, 2).float()
        weights = self.attention_weights(query).view(*layout[:3], -1).float().softmax(-1)
        return multi_scale_deformable_attention(
            value,
            shapes,
            offsets / _cells(offsets, *shapes),
            weights.view(layout),
            visible.anchors,
            visible.seen,
        )


class MapAttention(nn.Module):
    """Object queries attend around their reference points in the BEV map (Deformable DETR's
    attention with one level).

    Args:
        channels: width C.
        num_points: P points per head.
    """

    def __init__(
        self, channels: int, num_heads: int = 8, num_points: int = 4, dropout: float = 0.1
    ) -> None:
        super().__init__()
        _check_heads(channels, num_heads)
        self.num_heads, self.num_points = num_heads, num_points
        self.sampling_offsets = nn.Linear(channels, num_heads * num_points * 2)
        self.attention_weights = nn.Linear(channels, num_heads * num_points)
        self.value_proj = nn.Linear(channels, channels)
        self.output_proj = nn.Linear(channels, channels)
        self.dropout = nn.Dropout(dropout)
        _initialise(self, num_heads, 1, num_points)

    def forward(
        self,
        query: Tensor,
        position: Tensor,
        cells: Tensor,
        shape: tuple[int, int],
        references: Tensor,
    ) -> Tensor:
        """
        Args:
            query, position: ``(B, Q, C)``.
            cells: ``(B, Y * X, C)`` the map.
            shape: Y, X.
            references: ``(B, Q, 2)`` x, y, fractions.

        Returns:
            ``(B, Q, C)``, residual included.
        """
        batch, queries, _ = query.shape
        value = self.value_proj(cells).view(batch, cells.shape[1], self.num_heads, -1)
        layout = (batch, queries, self.num_heads, self.num_points)
        positioned = query + position
        offsets = self.sampling_offsets(positioned).view(*layout, 2).float()
        weights = self.attention_weights(positioned).view(layout).float().softmax(-1)
        points = references[:, :, None, None].float() + offsets / _cells(offsets, shape)[0]
        seen = multi_scale_deformable_attention(
            value, [shape], points.unsqueeze(3), weights.unsqueeze(3)
        )
        return query + self.dropout(self.output_proj(seen))


def _cells(like: Tensor, *shapes: tuple[int, int]) -> Tensor:
    """``(L, 1, 2)`` width, height of L maps in cells, to convert offsets to fractions."""
    sides = [side for height, width in shapes for side in (width, height)]
    return constant(sides, like).view(-1, 1, 2)


def _check_heads(channels: int, num_heads: int) -> None:
    if channels % num_heads:
        raise InputError(
            f"{channels} channels cannot be divided between {num_heads} heads; make the channels "
            "of model.network a multiple of num_heads"
        )


def _initialise_linear(linear: nn.Linear) -> None:
    nn.init.xavier_uniform_(linear.weight)
    nn.init.zeros_(linear.bias)


def _initialise(module: nn.Module, num_heads: int, num_maps: int, num_points: int) -> None:
    """Initial offsets of head h point in the direction h / heads of a full turn, k + 1 cells for
    its k-th point (Deformable DETR, appendix A.4); initial weights are equal."""
    angles = torch.arange(num_heads, dtype=torch.float32) * (2.0 * math.pi / num_heads)
    directions = torch.stack([angles.cos(), angles.sin()], dim=-1)
    directions = directions / directions.abs().amax(-1, keepdim=True)
    steps = torch.arange(1, num_points + 1, dtype=torch.float32)
    bias = directions[:, None, None] * steps[:, None]  # (heads, 1, points, 2)
    offsets, weights = module.sampling_offsets, module.attention_weights
    assert isinstance(offsets, nn.Linear) and isinstance(weights, nn.Linear)
    with torch.no_grad():
        nn.init.zeros_(offsets.weight)
        offsets.bias.copy_(bias.expand(-1, num_maps, -1, -1).flatten())
        nn.init.zeros_(weights.weight)
        nn.init.zeros_(weights.bias)
    for name in ("value_proj", "output_proj"):
        linear = getattr(module, name, None)
        if linear is not None:
            _initialise_linear(linear)
