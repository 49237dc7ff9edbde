"""A loss of your own: another one's terms, with a weight for each by name."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from bev_lightning.losses.protocol import DetectionLoss
from bev_lightning.structures import Batch, Boxes3D


class Reweighted:
    """Multiplies the terms of a loss; a DetectionLoss itself."""

    def __init__(self, loss: DetectionLoss, weights: Mapping[str, float]) -> None:
        self.loss, self.weights = loss, dict(weights)

    def __call__(
        self, predictions: Any, targets: Boxes3D, normalizers: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Weighted terms by name."""
        terms = self.loss(predictions, targets, normalizers)
        return {name: self.weights.get(name, 1.0) * value for name, value in terms.items()}

    def normalizers(self, network: Any, batch: Batch) -> dict[str, Tensor]:
        """Those of the loss."""
        return self.loss.normalizers(network, batch)
