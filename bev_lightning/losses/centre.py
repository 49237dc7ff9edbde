"""CenterPoint's loss (Yin et al., CVPR 2021)."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bev_lightning.losses.functional import CODE_WEIGHTS, masked_l1_loss, normalizer
from bev_lightning.losses.heatmap import count_peaks, heatmap_loss
from bev_lightning.structures import Batch, Boxes3D
from bev_lightning.structures.constants import constant
from bev_lightning.structures.predictions import BoxCodec, HeatmapPredictions


class CentreLoss:
    """Gaussian focal loss on the class heatmap, L1 loss on the box predicted at its centre's cell.

    Boxes outside the grid are ignored, and so are unknown velocities.

    Args:
        box_weight, heatmap_weight: of the two terms.
        code_weights: of the ten numbers of a box in the L1 term.
        min_radius_cells: see :func:`bev_lightning.losses.heatmap.gaussian_heatmap`.
    """

    def __init__(
        self,
        box_weight: float = 0.25,
        heatmap_weight: float = 1.0,
        code_weights: Sequence[float] = CODE_WEIGHTS,
        min_radius_cells: int = 2,
    ) -> None:
        self.box_weight, self.heatmap_weight = box_weight, heatmap_weight
        self.code_weights = tuple(map(float, code_weights))
        self.min_radius_cells = min_radius_cells

    def __call__(
        self,
        predictions: HeatmapPredictions,
        targets: Boxes3D,
        normalizers: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Weighted scalars ``heatmap`` and ``box``."""
        codec, logits = predictions.codec, predictions.heatmap
        with torch.autocast(logits.device.type, enabled=False):
            by_heatmap = heatmap_loss(
                logits, targets, codec.grid, self.min_radius_cells, normalizers
            )
            target = codec.encode(targets)  # (B, M, 10)
            cell, inside = self._find_cells(codec, target, targets.valid)
            predicted = predictions.code.flatten(2).transpose(1, 2)  # (B, Y * X, 10)
            predicted = predicted.gather(1, cell.unsqueeze(-1).expand_as(target))
            weight = inside.unsqueeze(-1) * constant(self.code_weights, predicted)
            by_box = masked_l1_loss(predicted, target, weight).sum()
            return {
                "heatmap": self.heatmap_weight * by_heatmap,
                "box": self.box_weight * by_box / normalizer(inside.sum(), normalizers, "box"),
            }

    def normalizers(self, network: Any, batch: Batch) -> dict[str, Tensor]:
        """Numbers of heatmap peaks and of boxes in the grid."""
        head, targets = network.head, batch.targets
        assert targets is not None
        codec = head.codec
        peaks = count_peaks(targets, codec.grid, head.num_classes, self.min_radius_cells)
        _, inside = self._find_cells(codec, codec.encode(targets), targets.valid)
        return {"heatmap": peaks, "box": inside.sum()}

    @staticmethod
    def _find_cells(codec: BoxCodec, code: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """The cell ``(B, M)`` of each box's centre, and whether it is in the grid."""
        height, width = codec.grid.shape
        i, j = code[..., 0].nan_to_num().floor(), code[..., 1].nan_to_num().floor()
        inside = valid & (i >= 0) & (i < width) & (j >= 0) & (j < height)
        return (j * width + i).long() * inside, inside
