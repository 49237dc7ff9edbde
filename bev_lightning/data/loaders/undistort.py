"""Undistorts and augments an image in one remap."""

import functools

import cv2
import numpy as np
import torch
from torch import Tensor

from bev_lightning.data.camera_models import CameraModel, undistortion_map
from bev_lightning.data.samples.file_sources import ImageSource


def undistort(source: ImageSource, pixels: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Undistort and augment an image on the CPU, bilinear.

    Args:
        pixels: ``(h, w, 3)`` uint8, the decoded file or a reduction of it.
        out: memory for the result.

    Returns:
        ``(H, W, 3)`` uint8; black where the camera sees nothing.
    """
    matrix = np.ascontiguousarray(source.network_from_original, np.float64).tobytes()
    where = _cached_map(source.camera_model, matrix, source.size, _scale(source, pixels.shape))
    mapped: np.ndarray = cv2.remap(pixels, where, np.empty(0), cv2.INTER_LINEAR, dst=out)
    return mapped


def undistort_on_device(source: ImageSource, pixels: Tensor) -> Tensor:
    """:func:`undistort` with torch, on the device of ``pixels``; equal to 1 of 255."""
    height, width, _ = pixels.shape
    scale = _scale(source, pixels.shape)
    where = undistortion_map(
        source.camera_model, source.network_from_original, source.size, scale, pixels.device
    )
    # grid_sample's -1 and 1 are the centres of the first and the last pixel.
    where = where * (2 / torch.tensor([max(width - 1, 1), max(height - 1, 1)])).to(where) - 1
    image = pixels.permute(2, 0, 1)[None].float()
    mapped = torch.nn.functional.grid_sample(image, where[None], align_corners=True)
    return mapped[0].permute(1, 2, 0).round().to(torch.uint8)


def _scale(source: ImageSource, shape: tuple[int, ...]) -> tuple[float, float]:
    """Scale (height, width) of a decoded image relative to the file's. Decoders that reduce by 2, 4
    or 8 round the size up."""
    reduction = round(source.original_size[0] / shape[0])
    exact = tuple(-(-length // reduction) for length in source.original_size)
    if exact == shape[:2]:
        return 1 / reduction, 1 / reduction
    return shape[0] / source.original_size[0], shape[1] / source.original_size[1]


@functools.lru_cache(maxsize=16)  # without augmentation the maps repeat
def _cached_map(
    camera_model: CameraModel | None,
    matrix: bytes,
    size: tuple[int, int],
    scale: tuple[float, float],
) -> np.ndarray:
    where: np.ndarray = undistortion_map(
        camera_model, np.frombuffer(matrix, np.float64).reshape(3, 3), size, scale
    ).numpy()
    return where
