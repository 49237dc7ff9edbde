"""Auxiliary head that supervises the image branch in training."""

from torch import Tensor, nn

from bev_lightning.models.object_queries import PRIOR_BIAS
from bev_lightning.structures.predictions import PerspectivePredictions


class PerspectiveHead(nn.Module):
    """Classes and depths of the objects' centres in each image, in training only.

    Through the bird's-eye view alone, the image branch of a camera model gets a weak gradient;
    supervision in the image is direct (BEVFormer v2, Yang et al., CVPR 2023, section 3.2). This
    head is smaller than theirs: a heatmap of the centres and their depth.
    """

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, num_classes + 1, 1),
        )
        bias = self.layers[-1].bias
        assert isinstance(bias, nn.Parameter)
        nn.init.constant_(bias[:-1], PRIOR_BIAS)  # type: ignore[arg-type]
        nn.init.constant_(bias[-1:], 3.0)  # type: ignore[arg-type]

    def forward(
        self, features: Tensor, image_from_lidar: Tensor, image_size: tuple[int, int]
    ) -> PerspectivePredictions:
        """
        Args:
            features: ``(B, N, C, h, w)``.
            image_from_lidar: ``(B, N, 4, 4)``.
            image_size: height, width that the map covers [pixels].
        """
        out = self.layers(features.flatten(0, 1)).unflatten(0, features.shape[:2])
        scale = (features.shape[-1] / image_size[1], features.shape[-2] / image_size[0])
        return PerspectivePredictions(out[:, :, :-1], out[:, :, -1], image_from_lidar, scale)
