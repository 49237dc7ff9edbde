"""BEVFusion's loss: the head's loss and the depth loss of the camera branch."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from bev_lightning.losses.functional import depth_loss
from bev_lightning.losses.protocol import DetectionLoss
from bev_lightning.structures import Batch, Boxes3D
from bev_lightning.structures.predictions import BEVFusionPredictions


class BEVFusionLoss:
    """The head's loss and, if the network supervises depth, the depth loss.

    Args:
        detection: the loss of the head: TransFusionLoss or CentreLoss.
        depth_weight: of the term ``depth``.
    """

    def __init__(self, detection: DetectionLoss, depth_weight: float = 0.3) -> None:
        self.detection, self.depth_weight = detection, depth_weight

    def __call__(
        self,
        predictions: BEVFusionPredictions,
        targets: Boxes3D,
        normalizers: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        terms = self.detection(predictions.detections, targets, normalizers)
        if predictions.depth_logits is not None and predictions.depth_target is not None:
            terms["depth"] = self.depth_weight * depth_loss(
                predictions.depth_logits,
                predictions.depth_target,
                None if normalizers is None else normalizers["depth"],
            )
        return terms

    def normalizers(self, network: Any, batch: Batch) -> dict[str, Tensor]:
        """The normalizers of the head's loss, and the number of pixels with a lidar depth."""
        normalizers = self.detection.normalizers(network, batch)
        if network.supervise_depth:
            target = network.camera.depth_targets(batch.cameras, batch.points)
            normalizers["depth"] = (target >= 0).sum()
        return normalizers
