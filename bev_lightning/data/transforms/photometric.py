"""Photometric distortion: random brightness, contrast, saturation and hue of training images.

As in the published BEVFormer, every camera and every frame of a temporal queue is drawn
independently, each step has a probability of one half, and values are not clipped to 0..255. The
published code distorts the original images, this the network's, which differ by resampling alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bev_lightning.data.transforms.augment import Augment
from bev_lightning.structures import CameraInput

_STREAM = 4  # separate random stream: it does not change the other augmentation


@dataclass(frozen=True)
class ColourChange:
    """Photometric distortion of one image, on the 0..255 scale.

    Attributes:
        brightness: added to every channel.
        contrast: factor.
        contrast_first: apply the contrast before saturation and hue, not after.
        saturation: factor.
        hue_deg: shift of the hue [degrees].
        channels: permutation of red, green, blue.
    """

    brightness: float = 0.0
    contrast: float = 1.0
    contrast_first: bool = True
    saturation: float = 1.0
    hue_deg: float = 0.0
    channels: tuple[int, int, int] = (0, 1, 2)

    def apply(self, image: Tensor) -> Tensor:
        """Distort an image ``(3, H, W)`` on the 0..255 scale."""
        image = image + self.brightness
        if self.contrast_first:
            image = image * self.contrast
        if self.saturation != 1.0:
            value = image.amax(0)
            image = value - self.saturation * (value - image)
        if self.hue_deg:
            image = shift_hue(image, self.hue_deg)
        if not self.contrast_first:
            image = image * self.contrast
        return image[list(self.channels)]


def apply_colour_changes(
    changes: Sequence[ColourChange], images: Tensor, camera: CameraInput
) -> None:
    """Distort normalised images ``(N, 3, H, W)`` in place."""
    mean = images.new_tensor(camera.mean).view(3, 1, 1)
    std = images.new_tensor(camera.std).view(3, 1, 1)
    for image, change in zip(images, changes, strict=True):
        if change != ColourChange():
            image.copy_((change.apply(image * std + mean) - mean) / std)


def shift_hue(image: Tensor, degrees: float) -> Tensor:
    """Shift the hue of an RGB image ``(3, H, W)``; HSV value and saturation stay."""
    red, green, blue = image
    value = image.amax(0)
    chroma = value - image.amin(0)
    share = chroma.clamp(min=1e-6)
    # In sixths of the circle, red at 0.
    hue = torch.where(
        value == red,
        (green - blue) / share,
        torch.where(value == green, (blue - red) / share + 2.0, (red - green) / share + 4.0),
    )
    offset = image.new_tensor([5.0, 3.0, 1.0]).view(3, 1, 1)
    sixth = (offset + hue + degrees / 60.0) % 6.0
    return value - chroma * torch.minimum(sixth, 4.0 - sixth).clamp(0.0, 1.0)


def random_colour_changes(
    augment: Augment, num_frames: int, num_images: int, seed: Sequence[int]
) -> list[tuple[ColourChange, ...]]:
    """Random distortion of each image of each frame of a queue, the current frame first.

    Args:
        seed: (seed, epoch, position).
    """
    if not augment.changes_colours:
        return [()] * num_frames
    rng = np.random.default_rng([*seed, _STREAM])
    return [tuple(_draw(augment, rng) for _ in range(num_images)) for _ in range(num_frames)]


def _draw(augment: Augment, rng: np.random.Generator) -> ColourChange:
    """The number of draws is constant, so that one setting does not change another's values."""
    taken = rng.uniform(size=5) < 0.5
    first = rng.uniform() < 0.5
    brightness = rng.uniform(-augment.image_brightness, augment.image_brightness)
    contrast = rng.uniform(*augment.image_contrast)
    saturation = rng.uniform(*augment.image_saturation)
    hue_deg = rng.uniform(-augment.image_hue_deg, augment.image_hue_deg)
    red, green, blue = rng.permutation(3).tolist()
    swap = taken[4] and augment.image_swap_channels
    return ColourChange(
        brightness if taken[0] else 0.0,
        contrast if taken[1] else 1.0,
        bool(first),
        saturation if taken[2] else 1.0,
        hue_deg if taken[3] else 0.0,
        (red, green, blue) if swap else (0, 1, 2),
    )
