"""An image backbone from timm: pip install timm."""

from typing import Any

import timm
from torch import Tensor, nn


class TimmBackbone(nn.Module):
    """Feature maps of some stages of a timm model, for a neck.

    Args:
        name: of the model, as of ``timm.list_models()``.
        out_stages: stages to return, counted from 0 behind the stem.
        timm_weights: download the weights that timm publishes.
        replaced: keys of the backbone that the configuration replaces; not used.
    """

    pretrained = None  # the package looks for a file name here

    def __init__(
        self, name: str, out_stages: list[int], timm_weights: bool = False, **replaced: Any
    ) -> None:
        super().__init__()
        self.model = timm.create_model(
            name,
            features_only=True,
            out_indices=[stage + 1 for stage in out_stages],
            pretrained=timm_weights,
        )

    def forward(self, images: Tensor) -> list[Tensor]:
        """Maps ``(B, C, H, W)`` of images ``(B, 3, H, W)``."""
        return list(self.model(images))
