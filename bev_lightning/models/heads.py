"""Detection heads on a BEV map: forward gives predictions, decode gives boxes in the model frame."""

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bev_lightning.errors import InputError
from bev_lightning.ops.nms import circle_nms
from bev_lightning.structures import BevGrid, Boxes3D
from bev_lightning.structures.predictions import BoxCodec, TransFusionPredictions

# The bias of a classifier that starts at a probability of 0.1 (RetinaNet, section 4.1).
PRIOR_BIAS = -math.log(9.0)


class TransFusionHead(nn.Module):
    """TransFusion's decoder (Bai et al., CVPR 2022) as BEVFusion uses it.

    The strongest local maxima of a class heatmap become queries: the BEV feature at the cell plus an
    encoding of the class. Each decoder layer lets them attend to one another and to the whole map and
    predicts a box relative to the query's position, which the next layer starts from.

    Two traits of the published code are kept because its weights give other numbers without them: the
    outermost ring of cells never becomes a query (except of ``point_classes``), and queries fewer
    than the peaks' number are filled up with cells that are no peak, whose score is 0. Not kept: maps
    that are not square are right, and every sample of a batch is decoded.

    Args:
        grid: the head's map.
        in_channels: of the BEV map.
        channels: width C of queries, keys and attention.
        num_queries: Q, at most classes x cells.
        num_layers: L decoder layers.
        point_classes: classes of small objects, whose every cell counts as a peak (the published code
            does so for pedestrian and traffic_cone).
        peak_kernel: odd side of the window of the local maximum in cells.
        height_shift: see :class:`BoxCodec`.
        score_threshold: decode keeps boxes with a score above it; None keeps all.
        decode_range_m: decode keeps boxes with ``low <= x, y, z <= high`` (x_min, y_min, z_min, x_max,
            y_max, z_max), where z is that of the code less half a height; None keeps all.
        circle_radius_m: decode suppresses boxes of ``circle_classes`` within this distance of a better
            one of the same class; None suppresses nothing.
        circle_classes: None takes ``point_classes``.

    Raises:
        InputError: where ``num_queries`` exceeds classes x cells, or a BEV map does not fit the grid.
    """

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
        peak_kernel: int = 3,
        height_shift: float = 0.5,
        score_threshold: float | None = None,
        decode_range_m: Sequence[float] | None = None,
        circle_radius_m: float | None = None,
        circle_classes: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        cells = grid.shape[0] * grid.shape[1]
        if not 0 < num_queries <= num_classes * cells:
            raise InputError(
                f"TransFusionHead takes 1 to {num_classes * cells} queries on {cells} cells x "
                f"{num_classes} classes, got num_queries={num_queries}"
            )
        self.codec = BoxCodec(grid, height_shift)
        self.num_classes, self.num_queries = num_classes, num_queries
        self.score_threshold = score_threshold
        self.decode_range_m = None if decode_range_m is None else tuple(map(float, decode_range_m))
        self.circle_radius_m = circle_radius_m
        self.peak_kernel = peak_kernel
        circle_classes = point_classes if circle_classes is None else circle_classes
        for name, classes in (("is_point_class", point_classes), ("is_circle_class", circle_classes)):
            mask = torch.zeros(num_classes, dtype=torch.bool)
            mask[list(classes)] = True
            self.register_buffer(name, mask, persistent=False)
        height, width = grid.shape
        j, i = torch.meshgrid(torch.arange(height) + 0.5, torch.arange(width) + 0.5, indexing="ij")
        positions = torch.stack([i, j], dim=-1).flatten(0, 1).unsqueeze(0)
        self.register_buffer("positions", positions, persistent=False)  # (1, Y * X, 2) cells, x then y

        self.shared_conv = nn.Conv2d(in_channels, channels, 3, padding=1)
        self.heatmap_head = nn.Sequential(
            nn.Sequential(
                OrderedDict(
                    conv=nn.Conv2d(channels, channels, 3, padding=1, bias=False),
                    bn=nn.BatchNorm2d(channels),
                    relu=nn.ReLU(inplace=True),
                )
            ),
            nn.Conv2d(channels, num_classes, 3, padding=1),
        )
        self.class_encoding = nn.Conv1d(num_classes, channels, 1)
        self.decoder = nn.ModuleList(
            DecoderLayer(channels, num_heads, ffn_channels, dropout) for _ in range(num_layers)
        )
        outputs = {"centre": 2, "height": 1, "size": 3, "rotation": 2, "velocity": 2, "logits": num_classes}
        self.branches = nn.ModuleList(
            nn.ModuleDict({name: _branch(channels, branch_channels, num) for name, num in outputs.items()})
            for _ in range(num_layers)
        )
        self._initialise()

    def _initialise(self) -> None:
        for parameter in self.decoder.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
        for classifier in (self.heatmap_head[-1], *(branch["logits"][-1] for branch in self.branches)):
            nn.init.constant_(classifier.bias, PRIOR_BIAS)

    def forward(self, bev: Tensor) -> TransFusionPredictions:
        """Detect on a BEV map ``(B, C_in, Y, X)``."""
        if tuple(bev.shape[-2:]) != self.codec.grid.shape:
            raise InputError(
                f"the head's grid has {self.codec.grid.shape} cells (Y, X) but its BEV map has "
                f"{tuple(bev.shape[-2:])}; make model.network.head.grid match the strides before it"
            )
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
            # Cells of a large map and metres do not fit half precision: add and keep them in float32.
            outputs = {name: branch(query).transpose(1, 2).float() for name, branch in branches.items()}
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
        """Zero what is no local maximum in ``(B, K, Y, X)``; the border as the class says."""
        reach = self.peak_kernel // 2
        pooled = F.max_pool2d(probability, self.peak_kernel, stride=1, padding=reach)
        inner = F.pad(
            torch.ones_like(probability[:1, :1, reach:-reach, reach:-reach]), (reach,) * 4
        ) if reach else torch.ones_like(probability[:1, :1])
        is_peak = (probability == pooled) & inner.bool()
        return probability * (is_peak | self.is_point_class.view(1, -1, 1, 1))

    def decode(self, predictions: TransFusionPredictions) -> Boxes3D:
        """Boxes ``(B, Q)`` of the last layer in the order of the queries, not sorted by score. The score is
        the product of the last layer's and the heatmap's probability of the query's class."""
        label, codec = predictions.query_label, predictions.codec
        probability = predictions.logits[-1].float().sigmoid()
        score = probability.gather(-1, label.unsqueeze(-1)).squeeze(-1)
        score = score * predictions.query_score.gather(1, label.unsqueeze(1)).squeeze(1)
        code = predictions.code[-1]
        boxes = codec.decode(code, label, score, torch.isfinite(code).all(-1))
        valid = boxes.valid
        if self.score_threshold is not None:
            valid = valid & (score > self.score_threshold)
        if self.decode_range_m is not None:
            low, high = code.new_tensor(self.decode_range_m).view(2, 3)
            bottom = code[..., 2] - 0.5 * boxes.size[..., 2]
            point = torch.cat([boxes.centre[..., :2], bottom.unsqueeze(-1)], dim=-1)
            valid = valid & ((point >= low) & (point <= high)).all(-1)
        if self.circle_radius_m is not None:
            radius = self.is_circle_class[label] * self.circle_radius_m
            valid = circle_nms(boxes.centre[..., :2], score, radius, group=label, valid=valid)
        return replace(boxes, valid=valid)


class DecoderLayer(nn.Module):
    """Self-attention among queries, cross-attention to the map, feed-forward; each with its residual
    before the norm. Every attention gets feature plus position as query, key AND value.

    One embedding of positions serves the queries in both attentions, another the keys.
    """

    def __init__(self, channels: int, num_heads: int, ffn_channels: int, dropout: float) -> None:
        super().__init__()
        self.self_attention = nn.MultiheadAttention(channels, num_heads, dropout, batch_first=True)
        self.cross_attention = nn.MultiheadAttention(channels, num_heads, dropout, batch_first=True)
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
        attended = self.self_attention(value, value, value, need_weights=False)[0]
        query = self.norm1(query + self.dropout(attended))
        attended = self.cross_attention(query + query_position, key, key, need_weights=False)[0]
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
    """Embed cells ``(B, P, 2)`` to ``(B, P, C)``; in float32, for bfloat16 cannot count beyond 256."""
    with torch.autocast(cells.device.type, enabled=False):
        embedded: Tensor = embedding(cells.transpose(1, 2))
    return embedded.transpose(1, 2)


def _branch(channels: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Sequential(
            OrderedDict(
                conv=nn.Conv1d(channels, hidden, 1, bias=False),
                bn=nn.BatchNorm1d(hidden),
                relu=nn.ReLU(inplace=True),
            )
        ),
        nn.Conv1d(hidden, outputs, 1),
    )
