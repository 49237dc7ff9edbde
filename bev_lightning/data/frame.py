"""What to read for one sample, and everything about it that needs no reading.

A loader turns a :class:`Frame` into a batch of one: it reads the files, maps them with the matrices that
are given here, and fills ``cameras``, ``points`` and ``radar`` of ``Frame.batch``. Geometry is decided
here once, so that every loader agrees on it.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from bev_lightning.structures import Batch


@dataclass(frozen=True)
class ImageSource:
    """One image to read.

    Attributes:
        path: the JPEG.
        original_size: height, width the file must have [pixels].
        size: height, width of the network's image [pixels].
        network_from_original: ``(3, 3)`` float64 affine map of pixels: resize, crop, flip and rotation in
            one. Pixel CENTRES lie at integers (OpenCV's convention; DALI puts them at +0.5).
    """

    path: Path
    original_size: tuple[int, int]
    size: tuple[int, int]
    network_from_original: np.ndarray


@dataclass(frozen=True)
class LidarSource:
    """One lidar file to read: the key frame's first, then younger to older sweeps.

    Attributes:
        path: float32 x, y, z [m], intensity, ring.
        lidar_from_sweep: ``(4, 4)`` float64, ego motion and BEV augmentation included.
        age: seconds before the key frame, 0 for the key frame itself.
    """

    path: Path
    lidar_from_sweep: np.ndarray
    age: float


@dataclass(frozen=True)
class RadarSource:
    """One radar file to read: all key frames first, then younger to older sweeps.

    Attributes:
        path: nuScenes' binary .pcd.
        lidar_from_radar: ``(4, 4)`` float64, ego motion and BEV augmentation included.
        age: seconds before the LIDAR_TOP key frame; may be slightly negative.
        sensor: index of the radar in ``RadarInput.channels``.
    """

    path: Path
    lidar_from_radar: np.ndarray
    age: float
    sensor: int


@dataclass(frozen=True)
class Frame:
    """One sample, before its files are read.

    Attributes:
        sample_token: nuScenes token.
        images: in the order of ``CameraInput.channels``; empty without cameras.
        lidar: key frame first; empty without lidar.
        radar: empty without radar.
        image_from_lidar: ``(1, N, 4, 4)`` float32, image and BEV augmentation included, or None.
        batch: of size 1 with all but ``cameras``, ``points``, ``radar`` and ``history`` filled.
        history: the previous key frames of the scene, oldest first, without targets, under the same
            augmentation.
    """

    sample_token: str
    images: tuple[ImageSource, ...]
    lidar: tuple[LidarSource, ...]
    radar: tuple[RadarSource, ...]
    image_from_lidar: Tensor | None
    batch: Batch
    history: tuple["Frame", ...] = ()
