"""Interface of a loss."""

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from bev_lightning.structures import Batch, Boxes3D


class DetectionLoss(Protocol):
    """A detection loss: named terms, whose sum is minimised."""

    def __call__(
        self, predictions: Any, targets: Boxes3D, normalizers: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Weighted scalars by name.

        Args:
            predictions: of the network.
            targets: ``(B, M)`` annotations in the model frame.
            normalizers: what each term is divided by; None for those of these samples alone.
        """

    def normalizers(self, network: Any, batch: Batch) -> dict[str, Tensor]:
        """The number of boxes, peaks or pixels that each term is divided by, from the annotations
        alone. ``loss_norm=effective`` sums them over the samples of an optimizer step."""
