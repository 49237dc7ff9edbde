"""Geometric augmentation as random matrices; every loader applies the same ones."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bev_lightning.errors import InputError

_QUEUE_STREAM = 5  # separate random stream: it does not change the other augmentation


@dataclass(frozen=True)
class Augment:
    """Settings of the training augmentation: uniform ranges, by default those of BEVFusion.

    Attributes:
        image_scale: relative to the smallest scale at which the image covers the network's input.
        image_crop_bottom: share of the scaled height cut off at the bottom before the crop.
        image_flip: probability of mirroring an image left to right.
        image_rotate_deg: counter-clockwise as seen [degrees].
        image_brightness: largest change of an image's brightness, on the 0..255 scale
            (:mod:`bev_lightning.data.transforms.photometric`). The published BEVFormer has 32,
            contrast and saturation 0.5 to 1.5, hue 18 degrees, and swapped channels.
        image_contrast, image_saturation: factors.
        image_hue_deg: largest shift of the hue [degrees].
        image_swap_channels: permute red, green and blue.
        grid_mask: probability of hiding a grid of squares in a sample's images
            (:mod:`bev_lightning.data.transforms.grid_mask`); 0.7 in the published BEVFormer.
        grid_mask_ratio: width of the stripes that stay visible between the squares, as a share of
            the grid's period.
        history_drop: drop one random frame of a temporal queue and add an earlier one, so that
            time steps vary, as in the published BEVFormer.
        bev_rotate_deg: of the scene about z, counter-clockwise [degrees].
        bev_scale: of the scene; velocities and box sizes scale with it.
        bev_flip_x, bev_flip_y: probability of negating x, y.
        bev_translate_std_m: standard deviation of a normal shift along x, y, z [m].
    """

    image_scale: tuple[float, float] = (0.864, 1.25)
    image_crop_bottom: tuple[float, float] = (0.0, 0.0)
    image_flip: float = 0.5
    image_rotate_deg: tuple[float, float] = (-5.4, 5.4)
    image_brightness: float = 0.0
    image_contrast: tuple[float, float] = (1.0, 1.0)
    image_saturation: tuple[float, float] = (1.0, 1.0)
    image_hue_deg: float = 0.0
    image_swap_channels: bool = False
    grid_mask: float = 0.0
    grid_mask_ratio: float = 0.5
    history_drop: bool = False
    bev_rotate_deg: tuple[float, float] = (-45.0, 45.0)
    bev_scale: tuple[float, float] = (0.9, 1.1)
    bev_flip_x: float = 0.5
    bev_flip_y: float = 0.5
    bev_translate_std_m: tuple[float, float, float] = (0.5, 0.5, 0.5)

    def __post_init__(self) -> None:
        ranges = ("image_scale", "image_crop_bottom", "image_rotate_deg", "image_contrast")
        for name in (*ranges, "image_saturation", "bev_rotate_deg", "bev_scale"):
            low, high = (float(v) for v in getattr(self, name))
            if low > high:
                raise InputError(
                    f"data.augment.{name}=[{low}, {high}] is no range: put the smaller number first"
                )
            object.__setattr__(self, name, (low, high))
        for name in ("image_scale", "bev_scale"):
            if getattr(self, name)[0] <= 0:
                raise InputError(f"data.augment.{name}={getattr(self, name)} must be positive")
        for name in ("image_brightness", "image_contrast", "image_saturation", "image_hue_deg"):
            if np.min(getattr(self, name)) < 0:
                raise InputError(f"data.augment.{name}={getattr(self, name)} must not be negative")
        if not (0 <= self.grid_mask <= 1 and 0 < self.grid_mask_ratio < 1):
            raise InputError(
                f"data.augment.grid_mask={self.grid_mask} must be a probability, and "
                f"grid_mask_ratio={self.grid_mask_ratio} between 0 and 1"
            )
        shift = tuple(float(v) for v in self.bev_translate_std_m)
        object.__setattr__(self, "bev_translate_std_m", shift)

    @property
    def changes_colours(self) -> bool:
        """Whether images are distorted photometrically."""
        return (
            self.image_brightness > 0
            or self.image_contrast != (1.0, 1.0)
            or self.image_saturation != (1.0, 1.0)
            or self.image_hue_deg > 0
            or self.image_swap_channels
        )


def random_bev_transform(augment: Augment, rng: np.random.Generator) -> np.ndarray:
    """Random ``augmented_from_lidar`` ``(4, 4)`` float64: rotation, scale, shift, then flips.

    The number of draws is constant, so that one setting does not change the values of another.
    """
    angle = math.radians(rng.uniform(*augment.bev_rotate_deg))
    scale = rng.uniform(*augment.bev_scale)
    shift = rng.standard_normal(3) * augment.bev_translate_std_m
    flips = rng.uniform(size=2) < (augment.bev_flip_x, augment.bev_flip_y)
    cos, sin = math.cos(angle), math.sin(angle)
    matrix = np.eye(4)
    matrix[:3, :3] = scale * np.array([[cos, -sin, 0], [sin, cos, 0], [0, 0, 1]])
    matrix[:3, 3] = shift
    mirror = np.diag([-1.0 if flips[0] else 1.0, -1.0 if flips[1] else 1.0, 1.0, 1.0])
    return mirror @ matrix


def random_history_steps(augment: Augment | None, length: int, seed: Sequence[int]) -> set[int]:
    """How many key frames back each frame of a temporal queue is.

    1 to ``length``; with ``history_drop`` all but one of 1 to ``length + 1``.

    Args:
        seed: (seed, epoch, position).
    """
    steps = set(range(1, length + 1))
    if length and augment is not None and augment.history_drop:
        dropped = int(np.random.default_rng([*seed, _QUEUE_STREAM]).integers(1, length + 2))
        steps = (steps | {length + 1}) - {dropped}
    return steps


def random_image_transform(
    augment: Augment,
    rng: np.random.Generator,
    original_size: tuple[int, int],
    size: tuple[int, int],
) -> np.ndarray:
    """Random ``network_from_original`` ``(3, 3)`` float64: resize, crop, flip and rotation.

    Args:
        original_size, size: height, width [pixels] of the file and of the network's input.
    """
    scale = _cover(original_size, size) * rng.uniform(*augment.image_scale)
    horizontal = rng.uniform()
    bottom = rng.uniform(*augment.image_crop_bottom)
    flip = rng.uniform() < augment.image_flip
    angle = math.radians(rng.uniform(*augment.image_rotate_deg))
    height, width = _scaled(original_size, scale)
    left = int(horizontal * max(0, width - size[1]))
    top = int((1 - bottom) * height) - size[0]
    return image_transform(original_size, (height, width), (top, left), size, flip, angle)


def eval_image_transform(
    original_size: tuple[int, int], size: tuple[int, int], scale: float = 1.0
) -> np.ndarray:
    """``network_from_original`` ``(3, 3)`` of evaluation: resize and crop, as in BEVFusion.

    The image is resized to ``scale`` times the smallest scale at which it covers the input, and
    cropped to the middle of its width and the bottom of its height (the top is sky).
    """
    height, width = _scaled(original_size, scale * _cover(original_size, size))
    return image_transform(
        original_size, (height, width), (height - size[0], (width - size[1]) // 2), size
    )


def image_transform(
    original_size: tuple[int, int],
    resized: tuple[int, int],
    corner: tuple[int, int],
    size: tuple[int, int],
    flip: bool = False,
    angle: float = 0.0,
) -> np.ndarray:
    """Affine pixel map ``(3, 3)`` of resize, crop, left-right flip and rotation, in this order.

    Args:
        original_size, resized, size: height, width [pixels] of the file, after the resize, and
            after the crop.
        corner: top, left of the crop; parts outside the image stay black.
        angle: of the rotation about the centre, counter-clockwise as seen [rad].
    """
    sx, sy = resized[1] / original_size[1], resized[0] / original_size[0]
    # Pixel CENTRES at integers: scaling acts on u + 0.5.
    crop = np.diag([sx, sy, 1.0])
    crop[:2, 2] = 0.5 * sx - 0.5 - corner[1], 0.5 * sy - 0.5 - corner[0]
    mirror = np.eye(3)
    if flip:
        mirror[0] = -1.0, 0.0, size[1] - 1.0
    return image_rotation(size, angle) @ mirror @ crop


def image_rotation(size: tuple[int, int], angle: float) -> np.ndarray:
    """Pixel map ``(3, 3)`` of a rotation by ``angle`` [rad], counter-clockwise as seen, about the
    centre of an image of ``size``."""
    cos, sin = math.cos(angle), math.sin(angle)
    centre = np.array([(size[1] - 1) / 2, (size[0] - 1) / 2])
    matrix = np.eye(3)
    matrix[:2, :2] = [[cos, sin], [-sin, cos]]  # v points down
    matrix[:2, 2] = centre - matrix[:2, :2] @ centre
    return matrix


def _cover(original_size: tuple[int, int], size: tuple[int, int]) -> float:
    return max(size[0] / original_size[0], size[1] / original_size[1])


def _scaled(original_size: tuple[int, int], scale: float) -> tuple[int, int]:
    return max(1, round(original_size[0] * scale)), max(1, round(original_size[1] * scale))
