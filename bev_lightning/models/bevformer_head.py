"""BEVFormer's detection head: object queries attend to the BEV map and refine their boxes."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from bev_lightning.errors import InputError
from bev_lightning.models.attention import MapAttention, QueryAttention
from bev_lightning.models.bev_encoder import FeedForward
from bev_lightning.models.object_queries import (
    HeatmapQueries,
    InitialQueries,
    LearnedQueries,
    in_float32,
)
from bev_lightning.structures import BevGrid, Boxes3D
from bev_lightning.structures.constants import constant
from bev_lightning.structures.predictions import (
    BEVFormerPredictions,
    DenoisingPredictions,
    MetricBoxCodec,
    QueryPredictions,
)

# The bias of a classifier that starts at a probability of 0.01 (RetinaNet, section 4.1).
RARE_BIAS = -4.59512
# Noise of the denoising queries: largest shift of a centre in half sizes of its box, and
# probability of a wrong class.
DENOISING_SHIFT, DENOISING_FLIP = 1.0, 0.2


class BEVFormerHead(nn.Module):
    """Deformable DETR's decoder with iterative box refinement on a BEV map (BEVFormer, section
    3.5).

    Each layer predicts class and box of every query; the box's centre relative to the query's
    reference point, which the next layer takes from there without gradient.

    The defaults are the published head. Two options make it learn in minutes on a CPU, where the
    published one, which needs hundreds of thousands of steps, learns nothing:

    * ``heatmap_start``: queries start from the peaks of a class heatmap, as TransFusion's do, with
      the feature, the class and the class logits of the peak's cell.
    * ``num_denoising``: in training further queries start from noisy annotations and learn to
      restore them, which needs no matching (DN-DETR, Li et al., CVPR 2022).

    Args:
        grid: of the BEV map; centres are predicted within its range.
        channels: width C of map and queries.
        num_queries: Q.
        num_points: points per head of the attention to the map.
        max_boxes: (query, class) pairs with the highest probability that decode returns.
        score_threshold: of decode: pairs with a probability above it; if a sample has none, the
            threshold is lowered by a tenth until one passes. None keeps all.
        range_m: of decode: boxes with ``low <= x, y, z <= high`` of x_min, y_min, z_min, x_max,
            y_max, z_max.
        heatmap_start: see above.
        num_denoising: see above: queries per annotation, 0 for none.

    Raises:
        InputError: more queries than peaks, or a BEV map that does not fit the grid.
    """

    def __init__(
        self,
        grid: BevGrid,
        channels: int = 256,
        num_classes: int = 10,
        num_queries: int = 900,
        num_layers: int = 6,
        num_heads: int = 8,
        num_points: int = 4,
        ffn_channels: int = 512,
        dropout: float = 0.1,
        max_boxes: int = 300,
        score_threshold: float | None = None,
        range_m: Sequence[float] | None = None,
        heatmap_start: bool = False,
        num_denoising: int = 0,
    ) -> None:
        super().__init__()
        if heatmap_start and num_queries > num_classes * grid.shape[0] * grid.shape[1]:
            raise InputError(
                f"model.network.head.num_queries={num_queries} exceeds the cells of the heatmap, "
                f"{num_classes} x {grid.shape}; lower it"
            )
        self.codec = MetricBoxCodec(grid)
        self.num_classes, self.num_queries, self.max_boxes = num_classes, num_queries, max_boxes
        self.score_threshold = score_threshold
        self.range_m = None if range_m is None else tuple(map(float, range_m))
        self.heatmap_start, self.num_denoising = heatmap_start, num_denoising
        self.learned = None if heatmap_start else LearnedQueries(channels, num_queries)
        seeded = heatmap_start or num_denoising > 0
        self.seeded = HeatmapQueries(grid, channels, num_classes, heatmap_start) if seeded else None
        self.layers = nn.ModuleList(
            DecoderLayer(channels, num_heads, num_points, ffn_channels, dropout)
            for _ in range(num_layers)
        )
        self.class_branches = nn.ModuleList(
            nn.Sequential(
                nn.Linear(channels, channels),
                nn.LayerNorm(channels),
                nn.ReLU(),
                nn.Linear(channels, channels),
                nn.LayerNorm(channels),
                nn.ReLU(),
                nn.Linear(channels, num_classes),
            )
            for _ in range(num_layers)
        )
        self.box_branches = nn.ModuleList(
            nn.Sequential(
                nn.Linear(channels, channels),
                nn.ReLU(),
                nn.Linear(channels, channels),
                nn.ReLU(),
                nn.Linear(channels, 10),
            )
            for _ in range(num_layers)
        )
        for branch in self.class_branches:
            # Logits from the heatmap include the prior already.
            nn.init.constant_(branch[-1].bias, 0.0 if heatmap_start else RARE_BIAS)  # type: ignore[index]

    def forward(self, bev: Tensor, targets: Boxes3D | None = None) -> BEVFormerPredictions:
        """Detect on a BEV map ``(B, C, Y, X)``.

        Args:
            targets: ``(B, M)`` annotations for denoising; None: no denoising.
        """
        if tuple(bev.shape[-2:]) != self.codec.grid.shape:
            raise InputError(
                f"the head's grid has {self.codec.grid.shape} cells (Y, X) but its BEV map has "
                f"{tuple(bev.shape[-2:])}; give model.network.head.grid the encoder's"
            )
        heatmap = None
        if self.learned is not None:
            start = self.learned(bev.shape[0])
        else:
            assert self.seeded is not None
            heatmap, start = self.seeded.from_heatmap(bev, self.num_queries)
        hidden = box = valid = None
        count = start.query.shape[1]
        if targets is not None and self.num_denoising and targets.num:
            assert self.seeded is not None
            noisy, box, valid = self._add_noise(bev, heatmap, targets)
            start = start.join(noisy)
            unused = torch.cat([valid.new_zeros(valid.shape[0], count), ~valid], dim=1)
            hidden = unused[:, None, None] | _denoising_mask(
                count, targets.num, self.num_denoising, bev.device
            )
        logits, code = self._decode_layers(bev, start, hidden)
        queries = QueryPredictions(logits[:, :, :count], code[:, :, :count])
        denoising = None
        if box is not None and valid is not None:
            denoising = DenoisingPredictions(logits[:, :, count:], code[:, :, count:], box, valid)
        return BEVFormerPredictions(bev, queries, self.codec, heatmap, denoising)

    def decode(self, predictions: BEVFormerPredictions) -> Boxes3D:
        """Boxes ``(B, max_boxes)`` of the last layer by descending score; a query may appear with
        several classes. Boxes outside range and threshold are marked invalid."""
        queries = predictions.queries
        probability = queries.logits[-1].float().sigmoid()
        num_classes = probability.shape[-1]
        pairs = probability.flatten(1)
        score, best = pairs.topk(min(self.max_boxes, pairs.shape[1]), dim=-1)
        row = (best // num_classes).unsqueeze(-1).expand(-1, -1, 10)
        code = queries.code[-1].gather(1, row)
        boxes = predictions.codec.decode(
            code, best % num_classes, score, torch.isfinite(code).all(-1)
        )
        valid = boxes.valid
        if self.range_m is not None:
            low, high = constant(self.range_m, boxes.centre).view(2, 3)
            valid = valid & ((boxes.centre >= low) & (boxes.centre <= high)).all(-1)
        if self.score_threshold is not None:
            valid = valid & _passes(score, self.score_threshold)
        return replace(boxes, valid=valid)

    def _decode_layers(
        self, bev: Tensor, start: InitialQueries, hidden: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Logits ``(L, B, Q, K)`` and code ``(L, B, Q, 10)``, float32."""
        shape = (int(bev.shape[-2]), int(bev.shape[-1]))
        cells = bev.flatten(2).transpose(1, 2)
        low, high = constant(self.codec.grid.range, start.reference).view(2, 3)
        query, reference = start.query, start.reference
        all_logits, all_code = [], []
        for layer, class_branch, box_branch in zip(
            self.layers, self.class_branches, self.box_branches, strict=True
        ):
            query = layer(query, start.position, cells, shape, reference[..., :2], hidden)
            logits = class_branch(query).float()
            box = in_float32(box_branch[-1], box_branch[:-1](query))  # type: ignore[index]
            offset = torch.cat([box[..., :2], box[..., 4:5]], dim=-1)
            fraction = (offset + inverse_sigmoid(reference)).sigmoid()
            centre = fraction * (high - low) + low
            all_logits.append(logits if start.logits is None else logits + start.logits)
            all_code.append(
                torch.cat([centre[..., :2], box[..., 2:4], centre[..., 2:], box[..., 5:]], dim=-1)
            )
            reference = fraction.detach()
        return torch.stack(all_logits), torch.stack(all_code)

    def _add_noise(
        self, bev: Tensor, heatmap: Tensor | None, targets: Boxes3D
    ) -> tuple[InitialQueries, Tensor, Tensor]:
        """Denoising queries, G = ``num_denoising`` groups of M, from annotations with shifted
        centres and flipped classes; the annotation index ``(B, G * M)`` of each, and whether it is
        valid."""
        assert self.seeded is not None
        groups, grid = self.num_denoising, self.codec.grid
        centre = targets.centre[..., :2].float().nan_to_num().repeat(1, groups, 1)
        half = 0.5 * targets.size[..., :2].float().amin(-1, keepdim=True).repeat(1, groups, 1)
        centre = centre + (2 * torch.rand_like(centre) - 1) * half * DENOISING_SHIFT
        label = targets.label.clamp(0, self.num_classes - 1).repeat(1, groups)
        flip = torch.rand(label.shape, device=label.device) < DENOISING_FLIP
        label = torch.where(flip, torch.randint_like(label, self.num_classes), label)
        start = self.seeded.at(bev, heatmap, grid.to_cells(centre), label)
        box = torch.arange(targets.num, device=label.device).repeat(groups)
        inside = grid.contains(targets.centre) & targets.valid
        return start, box.expand(label.shape[0], -1), inside.repeat(1, groups)


class DecoderLayer(nn.Module):
    """Self-attention among queries (keys with position, values without), attention to the map,
    feed-forward; each with its residual before the norm."""

    def __init__(
        self, channels: int, num_heads: int, num_points: int, ffn_channels: int, dropout: float
    ) -> None:
        super().__init__()
        self.self_attention = QueryAttention(channels, num_heads, dropout)
        self.map_attention = MapAttention(channels, num_heads, num_points, dropout)
        self.feed_forward = FeedForward(channels, ffn_channels, dropout)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(channels) for _ in range(3))
        self.dropout = nn.Dropout(dropout)
        nn.init.xavier_uniform_(self.self_attention.out_proj.weight)

    def forward(
        self,
        query: Tensor,
        position: Tensor,
        cells: Tensor,
        shape: tuple[int, int],
        references: Tensor,
        hidden: Tensor | None,
    ) -> Tensor:
        """
        Args:
            query, position: ``(B, Q, C)``.
            cells: ``(B, Y * X, C)``.
            references: ``(B, Q, 2)`` x, y, fractions of the map.
            hidden: ``(B, 1, Q, Q)`` bool, True where the row's query must not see the column's.
        """
        positioned = query + position
        attended = self.self_attention(positioned, positioned, query, hidden)
        query = self.norm1(query + self.dropout(attended))
        query = self.norm2(self.map_attention(query, position, cells, shape, references))
        return self.norm3(self.feed_forward(query))


def inverse_sigmoid(value: Tensor, eps: float = 1e-5) -> Tensor:
    """Logit of ``value`` in 0..1, clamped to ``eps`` from both ends."""
    value = value.clamp(0.0, 1.0)
    return (value.clamp(min=eps) / (1.0 - value).clamp(min=eps)).log()


def _passes(score: Tensor, threshold: float) -> Tensor:
    """Which scores ``(B, M)`` exceed the threshold; if a sample has none, those that reach the
    first of threshold x 0.9, x 0.81 ... that any score reaches, and all of them below 0.01."""
    above = score > threshold
    best = score.amax(-1, keepdim=True)
    passed = torch.ones_like(above)
    lowered = []
    while threshold * 0.9 >= 0.01:
        threshold *= 0.9
        lowered.append(threshold)
    for level in reversed(lowered):
        passed = torch.where(best >= level, score >= level, passed)
    return torch.where(above.any(-1, keepdim=True), above, passed)


def _denoising_mask(
    num_queries: int, num_boxes: int, num_groups: int, device: torch.device
) -> Tensor:
    """``(Q, Q)``, True where a row does not see a column: detections see each other only, a
    denoising group sees itself and the detections."""
    group = torch.arange(1, num_groups + 1, device=device).repeat_interleave(num_boxes)
    group = torch.cat([group.new_zeros(num_queries), group])
    return (group.unsqueeze(1) != group) & (group != 0)
