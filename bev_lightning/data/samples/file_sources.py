"""The sensor files of one sample, each with the transform into the network's input."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bev_lightning.data.camera_models import CameraModel


@dataclass(frozen=True)
class ImageSource:
    """One image file to read.

    Attributes:
        path: the JPEG.
        original_size: height, width of the file [pixels]; a loader raises on any other.
        size: height, width of the network's image [pixels].
        network_from_original: ``(3, 3)`` float64 affine map of pixels: resize, crop, flip and
            rotation in one. Pixel CENTRES are at integers (OpenCV's convention; DALI has them at
            +0.5). With a camera model it starts at its pinhole view instead, which is as large.
        camera_model: of the file, where it has to be undistorted; None for a plain pinhole.
    """

    path: Path
    original_size: tuple[int, int]
    size: tuple[int, int]
    network_from_original: np.ndarray
    camera_model: CameraModel | None = None

    @property
    def scale(self) -> float:
        """Size of the network's image relative to the file's: the larger of the two axes' scales,
        at the centre of a distorted image."""
        scale = float(np.linalg.norm(self.network_from_original[:2, :2], axis=0).max())
        return scale if self.camera_model is None else scale * self.camera_model.zoom

    @property
    def reduction(self) -> int:
        """Factor by which the file can be reduced while decoding, see :func:`choose_reduction`."""
        return choose_reduction(self.scale)


@dataclass(frozen=True)
class LidarSource:
    """One lidar file to read; a sample has the key frame's first, then sweeps back in time.

    Attributes:
        path: binary float32 x, y, z [m], intensity, ring.
        lidar_from_sweep: ``(4, 4)`` float64, ego motion and BEV augmentation included.
        age: seconds before the key frame, 0 for the key frame itself.
    """

    path: Path
    lidar_from_sweep: np.ndarray
    age: float


@dataclass(frozen=True)
class RadarSource:
    """One radar file to read; a sample has all key frames first, then sweeps back in time.

    Attributes:
        path: nuScenes' binary .pcd.
        lidar_from_radar: ``(4, 4)`` float64, ego motion and BEV augmentation included.
        age: seconds before the rig's reference key frame; may be slightly negative.
        sensor: index of the radar in ``RadarInput.channels``.
    """

    path: Path
    lidar_from_radar: np.ndarray
    age: float
    sensor: int


def choose_reduction(scale: float) -> int:
    """Factor 1, 2, 4 or 8 by which a JPEG can be reduced while decoding, for the network's image.

    Decoding at reduced resolution saves most of the time. A decoded pixel may be up to 1.15 network
    pixels wide: otherwise the scales from 0.5 to 0.57, which published augmentation draws, would
    need the full decode at twice the time.

    Args:
        scale: of the network's image relative to the file's.
    """
    return next((r for r in (8, 4, 2) if scale * r <= 1.15), 1)
