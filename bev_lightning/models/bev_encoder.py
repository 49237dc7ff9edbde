"""BEVFormer's encoder: learned BEV queries attend to the previous map and to the images."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bev_lightning.errors import InputError
from bev_lightning.models.attention import (
    SpatialCrossAttention,
    TemporalSelfAttention,
    VisibleQueries,
)
from bev_lightning.models.ego_motion import (
    EgoMotion,
    motion_from_can_bus,
    motion_from_pose,
    origin_cell,
    rotate_map,
)
from bev_lightning.models.protocol import RowParallel
from bev_lightning.structures import BevGrid
from bev_lightning.structures.constants import constant
from bev_lightning.structures.geometry import project


@dataclass(frozen=True)
class PreviousBev:
    """The BEV map of the previous frame, an input of temporal self-attention.

    Attributes:
        bev: ``(B, C, Y, X)`` the encoder's map of the previous frame, in the previous model frame.
        valid: ``(B,)`` bool, False for samples without a previous frame.
    """

    bev: Tensor
    valid: Tensor


@dataclass(frozen=True)
class EncoderScene:
    """Inputs shared by the encoder's layers, for the Q queries of ``rows``.

    Attributes:
        first: ``(B, Y * X, C)`` all queries before the first layer.
        past: ``(B, Y * X, C)`` the previous map, rotated.
        keep: ``(B, 1, 1)`` bool, False where there is no previous map.
        position: ``(B, Q, C)`` positional encoding of the cells.
        references: ``(B, 2, Q, 2)`` positions in the previous and the current map, fractions.
        features: ``(B * N, S, C)`` cells of all levels of the images.
        shapes: height, width of each level.
        visible: the queries that each camera sees.
        rows: the cells of the Q queries.
    """

    first: Tensor
    past: Tensor
    keep: Tensor
    position: Tensor
    references: Tensor
    features: Tensor
    shapes: list[tuple[int, int]]
    visible: VisibleQueries
    rows: slice


class BEVEncoder(nn.Module):
    """Learned queries, one for each BEV cell, that attend to the previous map and to the images.

    Kept from the published code because its weights depend on it: a pixel's position in the image
    is u / W, though pixel centres are at integers.

    Args:
        grid: of the BEV map.
        channels: width C.
        num_levels: L feature maps per image.
        num_cameras: N.
        num_anchors: D heights at which a cell is projected into the images, evenly spaced from half
            a metre above the bottom of the grid's z range to half a metre below its top.
        num_points: points per head and level in the images, a multiple of D.
        num_temporal_points: points per head in each of the two BEV maps.
        motion: ``can_bus`` reads the ego motion as published; ``pose`` takes it from
            ``lidar_from_previous_lidar`` and is right under BEV augmentation too.
        use_can_bus: add an embedding of the CAN bus vector to the queries. It holds the absolute
            heading, which the published weights were trained with.
        rotation_centre: cell x, y about which the previous map is rotated; None: the origin of the
            model frame. The published tiny and small models rotate about (100, 100), outside the
            middle of their maps.
        gradient_checkpointing: recompute each layer in the backward pass instead of storing it.
    """

    cell_centres: Tensor
    anchors: Tensor

    def __init__(
        self,
        grid: BevGrid,
        channels: int = 256,
        num_layers: int = 6,
        num_heads: int = 8,
        num_levels: int = 4,
        num_cameras: int = 6,
        num_anchors: int = 4,
        num_points: int = 8,
        num_temporal_points: int = 4,
        ffn_channels: int = 512,
        dropout: float = 0.1,
        motion: Literal["can_bus", "pose"] = "can_bus",
        use_can_bus: bool = True,
        rotation_centre: tuple[float, float] | None = None,
        gradient_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        if motion not in ("can_bus", "pose"):
            raise InputError(
                f"model.network.encoder.motion={motion} is unknown; use can_bus or pose"
            )
        if channels % 2:
            raise InputError(f"model.network.encoder.channels={channels} must be even")
        self.grid, self.channels, self.motion = grid, channels, motion
        self.rotation_centre = origin_cell(grid)
        if rotation_centre is not None:
            self.rotation_centre = (float(rotation_centre[0]), float(rotation_centre[1]))
        self.gradient_checkpointing = gradient_checkpointing
        height, width = grid.shape
        self.queries = nn.Parameter(torch.randn(height * width, channels))
        self.column_embedding = nn.Parameter(torch.rand(width, channels // 2))
        self.row_embedding = nn.Parameter(torch.rand(height, channels // 2))
        self.level_embedding = nn.Parameter(torch.randn(num_levels, channels))
        self.camera_embedding = nn.Parameter(torch.randn(num_cameras, channels))
        self.can_bus_mlp = _can_bus_mlp(channels) if use_can_bus else None
        self.layers = nn.ModuleList(
            EncoderLayer(
                TemporalSelfAttention(channels, num_heads, num_temporal_points, dropout),
                SpatialCrossAttention(
                    channels, num_heads, num_levels, num_points, num_anchors, dropout
                ),
                FeedForward(channels, ffn_channels, dropout),
                channels,
            )
            for _ in range(num_layers)
        )
        # Fractions of the grid first, then metres: the published code rounds in this order.
        low, high = torch.tensor(grid.range).view(2, 3)
        x = torch.linspace(0.5, width - 0.5, width) / width
        y = torch.linspace(0.5, height - 0.5, height) / height
        depth = grid.range[5] - grid.range[2]
        z = torch.linspace(0.5, depth - 0.5, num_anchors) / depth
        y, x, z = torch.meshgrid(y, x, z, indexing="ij")
        fractions = torch.stack([x, y, z], dim=-1).flatten(0, 1)
        anchors = fractions * (high - low) + low  # (Y * X, D, 3)
        self.register_buffer("cell_centres", fractions[:, 0, :2].clone(), persistent=False)
        self.register_buffer("anchors", anchors, persistent=False)

    def forward(
        self,
        maps: Sequence[Tensor],
        image_from_lidar: Tensor,
        image_size: tuple[int, int],
        can_bus: Tensor | None,
        lidar_from_previous_lidar: Tensor,
        previous: PreviousBev | None = None,
        row_parallel: RowParallel | None = None,
    ) -> Tensor:
        """
        Args:
            maps: L feature maps ``(B, N, C, h, w)``.
            image_from_lidar: ``(B, N, 4, 4)``.
            image_size: height, width that u and v are divided by, padding included [pixels].
            can_bus: ``(B, 18)``, or None if neither ``motion`` nor ``use_can_bus`` needs it.
            lidar_from_previous_lidar: ``(B, 4, 4)``.
            previous: the previous frame's map; None: no sample has one.
            row_parallel: processes that share the queries of all their samples, each with a strip
                of rows; they gather them after each layer, since the next layer's temporal
                attention may look anywhere.

        Returns:
            ``(B, C, Y, X)``.

        Raises:
            InputError: number of cameras or levels, or a missing CAN bus vector.
        """
        rows, shared = slice(None), None
        if row_parallel is not None and row_parallel.size > 1:
            shared, gather = row_parallel, row_parallel.gather_samples
            num = self.grid.shape[0] // shared.size * self.grid.shape[1]
            rows = slice(shared.rank * num, (shared.rank + 1) * num)
            maps = [gather(features) for features in maps]
            image_from_lidar = gather(image_from_lidar)
            can_bus = None if can_bus is None else gather(can_bus)
            lidar_from_previous_lidar = gather(lidar_from_previous_lidar)
            if previous is not None:
                previous = PreviousBev(gather(previous.bev), gather(previous.valid))
        scene = self.prepare(
            maps, image_from_lidar, image_size, can_bus, lidar_from_previous_lidar, previous, rows
        )
        query = scene.first
        for number in range(len(self.layers)):
            if shared is not None and number:
                query = shared.gather_rows(query)
            query = self.attend(number, scene, query)
        if shared is not None:
            query = shared.rows_to_samples(query, dim=1)
        return query.transpose(1, 2).unflatten(2, self.grid.shape)

    def prepare(
        self,
        maps: Sequence[Tensor],
        image_from_lidar: Tensor,
        image_size: tuple[int, int],
        can_bus: Tensor | None,
        lidar_from_previous_lidar: Tensor,
        previous: PreviousBev | None = None,
        rows: slice = slice(None),
    ) -> EncoderScene:
        """Inputs of the layers for the queries of some cells; see :meth:`forward`."""
        self._check(maps, can_bus)
        batch = image_from_lidar.shape[0]
        query = self.queries.unsqueeze(0).expand(batch, -1, -1)
        if self.can_bus_mlp is not None:
            assert can_bus is not None
            query = query + self.can_bus_mlp(can_bus.to(query.dtype)).unsqueeze(1)
        centres = self.cell_centres[rows]
        references = centres.expand(batch, 2, -1, -1)
        past, keep = query, query.new_zeros(batch, 1, 1, dtype=torch.bool)
        if previous is not None:
            motion = self.ego_motion(can_bus, lidar_from_previous_lidar)
            rotated = rotate_map(previous.bev.detach(), motion.rotation, self.rotation_centre)
            past, keep = rotated.flatten(2).transpose(1, 2), previous.valid.view(-1, 1, 1)
            shifted = centres + self.shift(motion).unsqueeze(1) * keep
            references = torch.stack([shifted, centres.expand(batch, -1, -1)], dim=1)
        return EncoderScene(
            first=query,
            past=past,
            keep=keep,
            position=self.positions()[rows].expand(batch, -1, -1),
            references=references,
            features=self._embed_features(maps),
            shapes=[(int(m.shape[-2]), int(m.shape[-1])) for m in maps],
            visible=self.find_visible(image_from_lidar, image_size, rows),
            rows=rows,
        )

    def attend(self, number: int, scene: EncoderScene, query: Tensor) -> Tensor:
        """One layer: all queries ``(B, Y * X, C)`` to those of the scene's rows ``(B, Q, C)``."""
        # A sample without a previous map attends to the layer's own query twice.
        arguments = (
            query[:, scene.rows],
            scene.position,
            torch.where(scene.keep, scene.past.to(query.dtype), query),
            torch.where(scene.keep, scene.first.to(query.dtype), query),
            scene.references,
            self.grid.shape,
            scene.features,
            scene.shapes,
            scene.visible,
            scene.rows,
        )
        layer = self.layers[number]
        if self.gradient_checkpointing and torch.is_grad_enabled():
            attended: Tensor = checkpoint(layer, *arguments, use_reentrant=False)
        else:
            attended = layer(*arguments)
        return attended

    def positions(self) -> Tensor:
        """Learned encoding of the cells ``(Y * X, C)``: of the column, then of the row."""
        height, width = self.grid.shape
        columns = self.column_embedding.unsqueeze(0).expand(height, -1, -1)
        rows = self.row_embedding.unsqueeze(1).expand(-1, width, -1)
        return torch.cat([columns, rows], dim=-1).flatten(0, 1)

    def ego_motion(self, can_bus: Tensor | None, lidar_from_previous_lidar: Tensor) -> EgoMotion:
        if self.motion == "can_bus":
            assert can_bus is not None
            return motion_from_can_bus(can_bus)
        return motion_from_pose(lidar_from_previous_lidar)

    def shift(self, motion: EgoMotion) -> Tensor:
        """``(B, 2)`` the motion's shift x, y as fractions of the map."""
        x_min, y_min, _, x_max, y_max, _ = self.grid.range
        return motion.shift / constant((x_max - x_min, y_max - y_min), motion.shift)

    def project_anchors(
        self, image_from_lidar: Tensor, image_size: tuple[int, int], rows: slice = slice(None)
    ) -> tuple[Tensor, Tensor]:
        """Projections of the anchors of the Q cells of ``rows`` into the images: fractions
        ``(B, N, Q, D, 2)``, and ``(B, N, Q, D)`` bool where they are visible and so valid."""
        anchors = self.anchors[rows]
        with torch.autocast(image_from_lidar.device.type, enabled=False):
            flat = anchors.float().flatten(0, 1)
            pixels, depth = project(image_from_lidar.float(), flat)
            fractions = pixels / constant((image_size[1], image_size[0]), pixels)
            seen = (depth > 1e-5) & ((fractions > 0) & (fractions < 1)).all(-1)
        layout = anchors.shape[:2]
        return fractions.unflatten(2, layout), seen.unflatten(2, layout)

    def find_visible(
        self, image_from_lidar: Tensor, image_size: tuple[int, int], rows: slice = slice(None)
    ) -> VisibleQueries:
        """The queries that each camera sees: those with at least one visible anchor."""
        with torch.no_grad():
            fractions, is_seen = self.project_anchors(image_from_lidar, image_size, rows)
            seen = is_seen.any(-1)
            return VisibleQueries(seen, fractions, seen.sum(1).clamp(min=1))

    def _embed_features(self, maps: Sequence[Tensor]) -> Tensor:
        """``(B * N, S, C)`` cells of all levels, with embeddings of camera and level."""
        levels = []
        for level, features in enumerate(maps):
            embedding = self.camera_embedding + self.level_embedding[level]
            cells = features.flatten(3).transpose(2, 3) + embedding.unsqueeze(1)
            levels.append(cells.flatten(0, 1))
        return torch.cat(levels, dim=1)

    def _check(self, maps: Sequence[Tensor], can_bus: Tensor | None) -> None:
        if len(maps) != len(self.level_embedding):
            raise InputError(
                f"the encoder takes {len(self.level_embedding)} feature maps and the neck returns "
                f"{len(maps)}; set model.network.encoder.num_levels"
            )
        if maps[0].shape[1] != len(self.camera_embedding):
            raise InputError(
                f"the encoder has {len(self.camera_embedding)} cameras and the batch "
                f"{maps[0].shape[1]}; set model.network.encoder.num_cameras"
            )
        if can_bus is None and (self.motion == "can_bus" or self.can_bus_mlp is not None):
            raise InputError(
                "the batch has no can_bus, which this model reads; set "
                "model.network.encoder.motion=pose and use_can_bus=false"
            )


class EncoderLayer(nn.Module):
    """Temporal self-attention, spatial cross-attention, feed-forward; each followed by its norm."""

    def __init__(
        self,
        temporal: TemporalSelfAttention,
        spatial: SpatialCrossAttention,
        feed_forward: "FeedForward",
        channels: int,
    ) -> None:
        super().__init__()
        self.temporal, self.spatial, self.feed_forward = temporal, spatial, feed_forward
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(channels) for _ in range(3))

    def forward(
        self,
        query: Tensor,
        position: Tensor,
        previous: Tensor,
        current: Tensor,
        references: Tensor,
        shape: tuple[int, int],
        features: Tensor,
        shapes: Sequence[tuple[int, int]],
        visible: VisibleQueries,
        rows: slice,
    ) -> Tensor:
        """``(B, Q, C)`` to the same; see the attentions for the arguments."""
        query = self.norm1(
            self.temporal(query, position, previous, current, references, shape, rows)
        )
        query = self.norm2(self.spatial(query, features, shapes, visible))
        return self.norm3(self.feed_forward(query))


class FeedForward(nn.Module):
    """Two linear layers, residual included."""

    def __init__(self, channels: int, hidden_channels: int, dropout: float) -> None:
        super().__init__()
        self.linear1 = nn.Linear(channels, hidden_channels)
        self.linear2 = nn.Linear(hidden_channels, channels)
        self.dropout = nn.Dropout(dropout)
        for linear in (self.linear1, self.linear2):
            nn.init.xavier_uniform_(linear.weight)

    def forward(self, query: Tensor) -> Tensor:
        hidden = self.dropout(F.relu(self.linear1(query)))
        return query + self.dropout(self.linear2(hidden))


def _can_bus_mlp(channels: int) -> nn.Sequential:
    mlp = nn.Sequential(
        nn.Linear(18, channels // 2),
        nn.ReLU(),
        nn.Linear(channels // 2, channels),
        nn.ReLU(),
        nn.LayerNorm(channels),
    )
    for linear in (mlp[0], mlp[2]):
        assert isinstance(linear, nn.Linear)
        nn.init.xavier_uniform_(linear.weight)
        nn.init.zeros_(linear.bias)
    return mlp
