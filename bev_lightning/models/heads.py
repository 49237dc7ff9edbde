"""Detection heads on a BEV map: forward gives predictions, decode gives boxes (model frame)."""

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bev_lightning.errors import InputError
from bev_lightning.models.attention import QueryAttention
from bev_lightning.models.object_queries import PRIOR_BIAS
from bev_lightning.models.selection import BoxSelection
from bev_lightning.structures import BevGrid, Boxes3D
from bev_lightning.structures.predictions import (
    BoxCodec,
    HeatmapPredictions,
    TransFusionPredictions,
)


class TransFusionHead(nn.Module):
    """TransFusion's decoder (Bai et al., CVPR 2022) as BEVFusion uses it.

    The strongest local maxima of a class heatmap become queries: the BEV feature at the cell plus
    an encoding of the class. Each decoder layer lets them attend to one another and to the whole
    map, and predicts a box relative to the query's position, which the next layer starts from.

    Two traits of the published code are kept because its weights give other numbers without them:
    the outermost ring of cells never becomes a query (except of ``point_classes``), and if there
    are fewer peaks than queries the rest are other cells with a score of 0. Unlike there, maps need
    not be square, and every sample of a batch is decoded.

    Args:
        grid: the head's map.
        in_channels: of the BEV map.
        channels: width C of queries, keys and attention.
        num_queries: Q, at most classes x cells.
        num_layers: L decoder layers.
        branch_channels: width of the hidden layer of each prediction.
        point_classes: classes of small objects, of which every cell counts as a peak (pedestrian
            and traffic_cone in the published code).
        height_shift: see :class:`BoxCodec`.
        selection: which boxes decode keeps; None keeps all.

    Raises:
        InputError: ``num_queries`` exceeds classes x cells, or a BEV map does not fit the grid.
    """

    is_point_class: Tensor
    positions: Tensor

    def __init__(
        self,
        grid: BevGrid,
        in_channels: int,
        num_classes: int = 10,
        channels: int = 128,
        num_queries: int = 200,
        num_layers: int = 1,
        num_heads: int = 8,
        ffn_channels: int = 256,
        branch_channels: int = 64,
        dropout: float = 0.1,
        point_classes: Sequence[int] = (8, 9),
        height_shift: float = 0.5,
        selection: BoxSelection | None = None,
    ) -> None:
        super().__init__()
        _check_count("TransFusionHead", "num_queries", num_queries, num_classes, grid)
        self.codec = BoxCodec(grid, height_shift)
        self.num_classes, self.num_queries = num_classes, num_queries
        self.selection = BoxSelection() if selection is None else selection
        is_point_class = torch.zeros(num_classes, dtype=torch.bool)
        if not all(0 <= index < num_classes for index in point_classes):
            raise InputError(
                f"TransFusionHead has {num_classes} classes but point_classes="
                f"{list(point_classes)}; set "
                "model.network.head.point_classes to the indices of the small classes, or to []"
            )
        is_point_class[list(point_classes)] = True
        self.register_buffer("is_point_class", is_point_class, persistent=False)
        self.register_buffer("positions", _cell_positions(grid), persistent=False)

        self.shared_conv = nn.Conv2d(in_channels, channels, 3, padding=1)
        self.heatmap_head = nn.Sequential(
            _hidden(nn.Conv2d, nn.BatchNorm2d, channels, channels, 3),
            nn.Conv2d(channels, num_classes, 3, padding=1),
        )
        self.class_encoding = nn.Conv1d(num_classes, channels, 1)
        self.decoder = nn.ModuleList(
            DecoderLayer(channels, num_heads, ffn_channels, dropout) for _ in range(num_layers)
        )
        widths = {
            "centre": 2,
            "height": 1,
            "size": 3,
            "rotation": 2,
            "velocity": 2,
            "logits": num_classes,
        }
        self.branches = nn.ModuleList(
            nn.ModuleDict(
                {
                    name: nn.Sequential(
                        _hidden(nn.Conv1d, nn.BatchNorm1d, channels, branch_channels, 1),
                        nn.Conv1d(branch_channels, width, 1),
                    )
                    for name, width in widths.items()
                }
            )
            for _ in range(num_layers)
        )
        for parameter in self.decoder.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
        for name, parameter in self.named_parameters():
            if name == "heatmap_head.1.bias" or name.endswith("logits.1.bias"):
                nn.init.constant_(parameter, PRIOR_BIAS)

    def forward(self, bev: Tensor) -> TransFusionPredictions:
        """Detect on a BEV map ``(B, C_in, Y, X)``."""
        _check_map(bev, self.codec.grid)
        features = self.shared_conv(bev)
        heatmap = self.heatmap_head(features).float()
        peaks = self.find_peaks(heatmap.detach().sigmoid()).flatten(2)
        _, best = peaks.flatten(1).topk(self.num_queries, dim=-1)
        label, cell = best // peaks.shape[-1], best % peaks.shape[-1]

        features = features.flatten(2)
        query = features.gather(2, cell.unsqueeze(1).expand(-1, features.shape[1], -1))
        one_hot = F.one_hot(label, self.num_classes).transpose(1, 2)
        query = query + self.class_encoding(one_hot.to(query.dtype))
        position = self.positions[0][cell]  # (B, Q, 2)
        logits, code = [], []
        for layer, branches in zip(self.decoder, self.branches, strict=True):
            query = layer(query, features, position, self.positions)
            # The cells of a large map do not fit half precision: add and keep them in float32.
            outputs = {
                name: branch(query).transpose(1, 2).float()
                for name, branch in branches.items()  # type: ignore[operator]
            }
            outputs["centre"] = outputs["centre"] + position
            logits.append(outputs.pop("logits"))
            code.append(torch.cat(list(outputs.values()), dim=-1))
            position = outputs["centre"].detach()
        return TransFusionPredictions(
            heatmap=heatmap,
            query_label=label,
            query_score=peaks.gather(2, cell.unsqueeze(1).expand(-1, self.num_classes, -1)),
            logits=torch.stack(logits),
            code=torch.stack(code),
            codec=self.codec,
        )

    def find_peaks(self, probability: Tensor) -> Tensor:
        """``(B, K, Y, X)`` with zeros except at local maxima of 3x3 cells inside the border, and
        unchanged for ``point_classes``."""
        is_peak = _is_local_maximum(probability)
        inside = torch.zeros_like(is_peak)
        inside[..., 1:-1, 1:-1] = True
        is_peak = is_peak & inside
        return probability * (is_peak | self.is_point_class.view(1, -1, 1, 1))

    def decode(self, predictions: TransFusionPredictions) -> Boxes3D:
        """Boxes ``(B, Q)`` of the last layer in the order of the queries, not sorted by score. The
        score is the product of the last layer's and the heatmap's probability of the query's
        class."""
        label, codec = predictions.query_label, predictions.codec
        probability = predictions.logits[-1].float().sigmoid()
        score = probability.gather(-1, label.unsqueeze(-1)).squeeze(-1)
        score = score * predictions.query_score.gather(1, label.unsqueeze(1)).squeeze(1)
        code = predictions.code[-1]
        boxes = codec.decode(code, label, score, torch.isfinite(code).all(-1))
        return self.selection(boxes)


class CentreHead(nn.Module):
    """CenterPoint's first stage (Yin et al., CVPR 2021): a class heatmap, and at each of its peaks
    the box that its cell predicts. It learns in fewer steps than a transformer decoder.

    Args:
        grid: the head's map.
        in_channels: of the BEV map.
        channels: width of the hidden layers.
        num_boxes: peaks per sample, at most classes x cells.
        selection: which boxes decode keeps; None keeps all.

    Raises:
        InputError: ``num_boxes`` exceeds classes x cells, or a BEV map does not fit the grid.
    """

    positions: Tensor

    def __init__(
        self,
        grid: BevGrid,
        in_channels: int,
        num_classes: int = 10,
        channels: int = 64,
        num_boxes: int = 200,
        selection: BoxSelection | None = None,
    ) -> None:
        super().__init__()
        _check_count("CentreHead", "num_boxes", num_boxes, num_classes, grid)
        self.codec = BoxCodec(grid, height_shift=0.0)
        self.num_classes, self.num_boxes = num_classes, num_boxes
        self.selection = BoxSelection() if selection is None else selection
        self.register_buffer("positions", _cell_positions(grid), persistent=False)
        self.shared = _hidden(nn.Conv2d, nn.BatchNorm2d, in_channels, channels, 3)
        self.heatmap = nn.Sequential(
            _hidden(nn.Conv2d, nn.BatchNorm2d, channels, channels, 3),
            nn.Conv2d(channels, num_classes, 3, padding=1),
        )
        self.box = nn.Sequential(
            _hidden(nn.Conv2d, nn.BatchNorm2d, channels, channels, 3),
            nn.Conv2d(channels, 10, 3, padding=1),
        )
        for name, parameter in self.heatmap.named_parameters():
            if name == "1.bias":
                nn.init.constant_(parameter, PRIOR_BIAS)

    def forward(self, bev: Tensor) -> HeatmapPredictions:
        """Detect on a BEV map ``(B, C_in, Y, X)``."""
        _check_map(bev, self.codec.grid)
        features = self.shared(bev)
        code = self.box(features).float()
        at_cell = self.positions.transpose(1, 2).view(1, 2, *self.codec.grid.shape)
        code = torch.cat([code[:, :2] + at_cell, code[:, 2:]], dim=1)
        return HeatmapPredictions(self.heatmap(features).float(), code, self.codec)

    def decode(self, predictions: HeatmapPredictions) -> Boxes3D:
        """The ``num_boxes`` highest peaks as boxes ``(B, num_boxes)``, by descending score."""
        probability = predictions.heatmap.float().sigmoid()
        peaks = (probability * _is_local_maximum(probability)).flatten(2)
        score, best = peaks.flatten(1).topk(self.num_boxes, dim=-1)
        label, cell = best // peaks.shape[-1], best % peaks.shape[-1]
        code = predictions.code.flatten(2)
        code = code.gather(2, cell.unsqueeze(1).expand(-1, 10, -1)).transpose(1, 2)
        valid = torch.isfinite(code).all(-1) & (score > 0)
        return self.selection(predictions.codec.decode(code, label, score, valid))


def _is_local_maximum(heatmap: Tensor) -> Tensor:
    """Bool ``(B, K, Y, X)``, True where no neighbour of the same class is higher."""
    return heatmap == F.max_pool2d(heatmap, 3, stride=1, padding=1)


def _cell_positions(grid: BevGrid) -> Tensor:
    """``(1, Y * X, 2)`` centres of the cells in cells, x then y."""
    height, width = grid.shape
    j, i = torch.meshgrid(torch.arange(height) + 0.5, torch.arange(width) + 0.5, indexing="ij")
    return torch.stack([i, j], dim=-1).flatten(0, 1).unsqueeze(0)


def _check_count(head: str, name: str, count: int, num_classes: int, grid: BevGrid) -> None:
    """Raise InputError if a head takes more peaks than its heatmap has cells."""
    most = num_classes * grid.shape[0] * grid.shape[1]
    if not 0 < count <= most:
        raise InputError(
            f"{head} takes {name} from 1 to {most} on a map of {grid.shape} cells with "
            f"{num_classes} classes, got {count}; lower model.network.head.{name}"
        )


def _check_map(bev: Tensor, grid: BevGrid) -> None:
    """Raise InputError if a BEV map has other cells than the head's grid."""
    if tuple(bev.shape[-2:]) != grid.shape:
        raise InputError(
            f"the head's grid has {grid.shape} cells (Y, X) but its BEV map has "
            f"{tuple(bev.shape[-2:])}; make model.network.head.grid match the strides before it"
        )


class DecoderLayer(nn.Module):
    """Self-attention among queries, cross-attention to the map, feed-forward; each with its
    residual before the norm. Every attention gets feature plus position as query, key AND value.

    One embedding of positions serves the queries in both attentions, another the keys.
    """

    def __init__(self, channels: int, num_heads: int, ffn_channels: int, dropout: float) -> None:
        super().__init__()
        self.self_attention = QueryAttention(channels, num_heads, dropout)
        self.cross_attention = QueryAttention(channels, num_heads, dropout)
        self.linear1 = nn.Linear(channels, ffn_channels)
        self.linear2 = nn.Linear(ffn_channels, channels)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(channels) for _ in range(3))
        self.dropout = nn.Dropout(dropout)
        self.query_position = _position_embedding(channels)
        self.key_position = _position_embedding(channels)

    def forward(self, query: Tensor, key: Tensor, query_cells: Tensor, key_cells: Tensor) -> Tensor:
        """
        Args:
            query: ``(B, C, Q)``.
            key: ``(B, C, P)`` features of the P cells.
            query_cells: ``(B, Q, 2)`` positions x, y in cells.
            key_cells: ``(1, P, 2)``, the same in all samples and so embedded once.

        Returns:
            ``(B, C, Q)``.
        """
        query_position = _embed(self.query_position, query_cells)
        key = key.transpose(1, 2) + _embed(self.key_position, key_cells)
        query = query.transpose(1, 2)
        value = query + query_position
        attended = self.self_attention(value, value, value)
        query = self.norm1(query + self.dropout(attended))
        attended = self.cross_attention(query + query_position, key, key)
        query = self.norm2(query + self.dropout(attended))
        hidden = self.linear2(self.dropout(F.relu(self.linear1(query))))
        return self.norm3(query + self.dropout(hidden)).transpose(1, 2)


def _position_embedding(channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv1d(2, channels, 1),
        nn.BatchNorm1d(channels),
        nn.ReLU(inplace=True),
        nn.Conv1d(channels, channels, 1),
    )


def _embed(embedding: nn.Module, cells: Tensor) -> Tensor:
    """Embed cells ``(B, P, 2)`` to ``(B, P, C)`` in float32: bfloat16 has no integers past 256."""
    with torch.autocast(cells.device.type, enabled=False):
        embedded: Tensor = embedding(cells.transpose(1, 2))
    return embedded.transpose(1, 2)


def _hidden(
    convolution: type[nn.Module], norm: type[nn.Module], inputs: int, outputs: int, kernel: int
) -> nn.Sequential:
    layers = OrderedDict(
        conv=convolution(inputs, outputs, kernel, padding=kernel // 2, bias=False),
        bn=norm(outputs),
        relu=nn.ReLU(inplace=True),
    )
    return nn.Sequential(layers)
