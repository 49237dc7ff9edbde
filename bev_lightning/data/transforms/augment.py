"""Augmentation as matrices: drawn once a sample, applied by every loader alike."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_QUEUE_STREAM = 5  # of random numbers: the queue leaves the rest of the augmentation as it is


@dataclass(frozen=True)
class Augment:
    """What training varies. Everything is drawn uniformly, with the defaults of the published
    BEVFusion.

    Attributes:
        image_scale: relative to the scale at which the image just covers the network's input.
        image_crop_bottom: share of the scaled height cut off at the bottom before the crop.
        image_flip: probability of mirroring an image left to right.
        image_rotate_deg: counter-clockwise as seen [degrees].
        image_brightness: largest change of an image's brightness, on the 0..255 scale
            (:mod:`bev_lightning.data.transforms.photometric`); 32 in the published BEVFormer, where
            contrast and saturation are 0.5 to 1.5, the hue 18 degrees, and channels swapped.
        image_contrast, image_saturation: factors.
        image_hue_deg: largest turn of the hue [degrees].
        image_swap_channels: reorder red, green and blue.
        grid_mask: probability of hiding a grid of squares in a sample's images
            (:mod:`bev_lightning.data.transforms.grid_mask`); 0.7 in the published BEVFormer.
        grid_mask_ratio: width of the stripes that stay visible between the squares, as a share of
            the grid's period.
        history_drop: leave out one at random of the frames of a temporal queue and take one more
            from before it, so that time steps vary, as the published BEVFormer does.
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
        for name in (
            "image_scale",
            "image_crop_bottom",
            "image_rotate_deg",
            "image_contrast",
            "image_saturation",
            "bev_rotate_deg",
            "bev_scale",
        ):
            low, high = (float(v) for v in getattr(self, name))
            if low > high:
                raise ValueError(
                    f"Augment.{name} is {low}..{high}: the first number must be the smaller"
                )
            object.__setattr__(self, name, (low, high))
        if self.image_scale[0] <= 0 or self.bev_scale[0] <= 0:
            raise ValueError("Augment.image_scale and bev_scale must be positive")
        if (
            min(
                self.image_brightness,
                self.image_hue_deg,
                self.image_contrast[0],
                self.image_saturation[0],
            )
            < 0
        ):
            raise ValueError(
                "Augment.image_brightness, image_contrast, image_saturation and image_hue_deg must "
                "not be negative"
            )
        if not (0 <= self.grid_mask <= 1 and 0 < self.grid_mask_ratio < 1):
            raise ValueError(
                f"Augment.grid_mask={self.grid_mask} must be a probability and grid_mask_ratio="
                f"{self.grid_mask_ratio} lie between 0 and 1"
            )
        object.__setattr__(
            self, "bev_translate_std_m", tuple(float(v) for v in self.bev_translate_std_m)
        )

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
    """``augmented_from_lidar`` ``(4, 4)`` float64: rotation, then scale, then shift, then flips.

    Always consumes the same number of draws, so that one setting does not change another's values.
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
    """How many key frames back the frames of a temporal queue lie.

    1 to ``length``; under ``history_drop`` all but one of 1 to ``length + 1``.

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
    """``network_from_original`` ``(3, 3)`` float64 of one image: resize, crop, flip, rotation.

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
    """``network_from_original`` of evaluation, ``(3, 3)``: ``scale`` times the smallest scale at
    which the image covers the input, the middle of its width and the bottom of its height (the top
    is sky), as BEVFusion crops."""
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
    """The affine map ``(3, 3)`` of a resize to ``resized``, a crop of ``size`` at ``corner`` (top,
    left; may lie outside, which leaves black), a left-right flip and a rotation by ``angle`` [rad],
    counter-clockwise as seen, about the centre. All sizes are height, width."""
    sx, sy = resized[1] / original_size[1], resized[0] / original_size[0]
    # Pixel CENTRES at integers: scaling acts on u + 0.5.
    crop = np.array(
        [
            [sx, 0.0, 0.5 * sx - 0.5 - corner[1]],
            [0.0, sy, 0.5 * sy - 0.5 - corner[0]],
            [0.0, 0.0, 1.0],
        ]
    )
    mirror = (
        np.array([[-1.0, 0.0, size[1] - 1.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
        if flip
        else np.eye(3)
    )
    return image_rotation(size, angle) @ mirror @ crop


def image_rotation(size: tuple[int, int], angle: float) -> np.ndarray:
    """Pixel map ``(3, 3)`` of a rotation by ``angle`` [rad] about the centre of an image of
    ``size``."""
    cos, sin = math.cos(angle), math.sin(angle)
    centre = np.array([(size[1] - 1) / 2, (size[0] - 1) / 2])
    linear = np.array([[cos, sin], [-sin, cos]])  # v points down
    matrix = np.eye(3)
    matrix[:2, :2] = linear
    matrix[:2, 2] = centre - linear @ centre
    return matrix


def _cover(original_size: tuple[int, int], size: tuple[int, int]) -> float:
    return max(size[0] / original_size[0], size[1] / original_size[1])


def _scaled(original_size: tuple[int, int], scale: float) -> tuple[int, int]:
    return max(1, round(original_size[0] * scale)), max(1, round(original_size[1] * scale))
