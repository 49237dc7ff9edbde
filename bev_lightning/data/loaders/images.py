"""Reads images: the reference with PIL, and a faster way with OpenCV that falls back to it.

The reference does one obvious step after the other, in the manner of mmdetection3d; the faster
loaders are compared with it. The faster way decodes an image at the lowest resolution that the
network needs and resamples it once. Files that it cannot use are read again by the reference, so
that both raise the same errors, which name the file.
"""

import functools
import io
import math

import cv2
import numpy as np
import torch
from numba import njit
from PIL import Image, UnidentifiedImageError

from bev_lightning.data.camera_models import CameraModel, undistortion_map
from bev_lightning.data.loaders.image_cache import ImageCache
from bev_lightning.data.nuscenes.sensor_files import (
    check_holes,
    describe,
    is_whole_jpeg,
    read_bytes,
)
from bev_lightning.data.samples.file_sources import ImageSource
from bev_lightning.data.transforms.augment import image_rotation
from bev_lightning.data.transforms.photometric import ColourChange
from bev_lightning.errors import InputError
from bev_lightning.structures import CameraInput

# As in PIL and in the calibrations, the EXIF orientation is ignored.
_RGB = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
_DECODE = {
    1: _RGB | cv2.IMREAD_COLOR,
    2: _RGB | cv2.IMREAD_REDUCED_COLOR_2,
    4: _RGB | cv2.IMREAD_REDUCED_COLOR_4,
    8: _RGB | cv2.IMREAD_REDUCED_COLOR_8,
}


def read_image(source: ImageSource) -> np.ndarray:
    """Decode, resize (bicubic with antialiasing), crop, flip and rotate (bilinear) with PIL. An
    image of a camera that is no pinhole is reduced and then undistorted in one remap.

    Returns:
        ``(H, W, 3)`` uint8 RGB; black where the network's image reaches beyond the file's.

    Raises:
        InputError: the file is absent, cut, no image or not of the size in the tables.
    """
    content = read_bytes(source.path, "image")
    check_holes(source.path, content)
    try:
        # Only formats data sets use: for what is no image PIL would else import all its plugins.
        image = Image.open(io.BytesIO(content), formats=("JPEG", "PNG")).convert("RGB")
    except (OSError, UnidentifiedImageError, ValueError, SyntaxError) as error:
        raise InputError(
            f"the image {source.path} ({len(content)} bytes) cannot be decoded "
            f"({describe(error)}): replace it, or skip such samples with data.on_missing=skip"
        ) from None
    if (image.height, image.width) != source.original_size:
        raise InputError(
            f"the image {source.path} is {image.width}x{image.height} pixels and "
            f"sample_data has {source.original_size[1]}x{source.original_size[0]}, to which the "
            f"calibration belongs: restore the file"
        )
    if source.camera_model is not None:
        reduction = source.reduction
        return undistort(source, np.asarray(image.reduce(reduction)), reduction)
    resized, corner, flip, angle = _decompose(source)
    image = image.resize(resized[::-1], Image.Resampling.BICUBIC)
    (top, left), (height, width) = corner, source.size
    # A rotated image needs the margin around the crop: its corners would be black without it.
    cos, sin = math.cos(angle), abs(math.sin(angle))
    down = math.ceil((height * cos + width * sin - height) / 2) if angle else 0
    across = math.ceil((width * cos + height * sin - width) / 2) if angle else 0
    down, across = max(0, down), max(0, across)
    image = image.crop((left - across, top - down, left + width + across, top + height + down))
    if flip:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    if angle:
        image = image.rotate(math.degrees(angle), Image.Resampling.BILINEAR)
        image = image.crop((across, down, across + width, down + height))
    return np.asarray(image)


def normalise_images(images: np.ndarray, camera: CameraInput) -> torch.Tensor:
    """Normalise images ``(N, H, W, 3)`` uint8 to ``(N, 3, H, W)`` float32."""
    mean, std = np.array(camera.mean, np.float32), np.array(camera.std, np.float32)
    scaled = (images.astype(np.float32) - mean) / std
    return torch.from_numpy(np.ascontiguousarray(scaled.transpose(0, 3, 1, 2)))


def read_encoded(source: ImageSource) -> np.ndarray:
    """Read the bytes ``(n,)`` uint8 of an image file that decodes to the size in the tables.

    The markers of a JPEG are checked up to its end, which finds truncated files without decoding
    them.

    Raises:
        InputError: missing, empty, truncated, no image or of another size.
    """
    try:
        content = source.path.read_bytes()
    except OSError:
        content = b""
    if not is_whole_jpeg(content, source.original_size):
        read_image(source)  # raises the error, unless PIL can read it
    return np.frombuffer(content, np.uint8)


def read_image_into(
    source: ImageSource,
    out: np.ndarray,
    full_decode: bool = False,
    cache: ImageCache | None = None,
) -> None:
    """Decode an image and resample it once, bilinear.

    Args:
        out: ``(H, W, 3)`` uint8 RGB, contiguous; black where the network's image reaches beyond
            the file's.
        full_decode: decode at full resolution, even where the network's image is smaller.
        cache: of decoded images.

    Raises:
        InputError: the file is absent, truncated, no image or not of the size in the tables.
    """
    reduction = 1 if full_decode else source.reduction
    pixels = None if cache is None else cache.find(source.path, reduction)
    if pixels is None:
        stamp = None if cache is None else cache.stamp(source.path)
        content = read_encoded(source)
        pixels = cv2.imdecode(content, _DECODE[reduction])
        shape = tuple(-(-length // reduction) for length in source.original_size)
        if pixels is None or pixels.shape[:2] != shape:  # another format, which PIL can read
            out[:] = read_image(source)
            return
        if cache is not None and stamp is not None:
            cache.store(source.path, reduction, stamp, pixels)
    if source.camera_model is not None:
        undistort(source, pixels, reduction, out)
        return
    # Pixel centres are at integers, so a reduction scales u + 0.5.
    reduced_from_original = np.diag([1 / reduction, 1 / reduction, 1.0])
    reduced_from_original[:2, 2] = 0.5 / reduction - 0.5
    matrix: np.ndarray = reduced_from_original @ np.linalg.inv(source.network_from_original)
    cv2.warpAffine(
        pixels,
        matrix[:2].astype(np.float64),
        (out.shape[1], out.shape[0]),
        dst=out,
        flags=cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP,
    )


def undistort(
    source: ImageSource, pixels: np.ndarray, reduction: int = 1, out: np.ndarray | None = None
) -> np.ndarray:
    """Undistort and augment an image in one remap, bilinear.

    Args:
        pixels: ``(h, w, 3)`` uint8, the decoded file.
        reduction: by which it was reduced while decoding, its size rounded up.
        out: memory for the result.

    Returns:
        ``(H, W, 3)`` uint8; black where the camera sees nothing.
    """
    matrix = np.ascontiguousarray(source.network_from_original, np.float64).tobytes()
    where = _cached_map(source.camera_model, matrix, source.size, 1 / reduction)
    mapped: np.ndarray = cv2.remap(pixels, where, np.empty(0), cv2.INTER_LINEAR, dst=out)
    return mapped


def change_colours(change: ColourChange, image: np.ndarray) -> np.ndarray:
    """:meth:`ColourChange.apply` of an image ``(H, W, 3)`` uint8 or float32 of the 0..255 scale,
    as float32, in one pass."""
    out = np.empty(image.shape, np.float32)
    apply_change(
        image,
        np.float32(change.brightness),
        np.float32(change.contrast),
        change.contrast_first,
        np.float32(change.saturation),
        np.float32(change.hue_deg / 60.0 % 6.0),
        *change.channels,
        out,
    )
    return out


@njit(cache=True, nogil=True)
def wrap(sixths):  # type: ignore[no-untyped-def]
    """Wrap to 0 .. 6, ten times as fast as a remainder."""
    return sixths - np.float32(6) * np.floor(sixths * np.float32(1 / 6))


@njit(cache=True, nogil=True)
def apply_change(  # type: ignore[no-untyped-def]
    image, brightness, contrast, contrast_first, saturation, sixths, first, second, third, out
):
    """Kernel of :func:`change_colours`; the hue is rotated by ``sixths`` of the circle, 0 .. 6."""
    zero, one = np.float32(0), np.float32(1)
    before = contrast if contrast_first else one
    after = one if contrast_first else contrast
    for v in range(image.shape[0]):
        for u in range(image.shape[1]):
            red = (np.float32(image[v, u, 0]) + brightness) * before
            green = (np.float32(image[v, u, 1]) + brightness) * before
            blue = (np.float32(image[v, u, 2]) + brightness) * before
            value = max(red, green, blue)
            red = value - saturation * (value - red)
            green = value - saturation * (value - green)
            blue = value - saturation * (value - blue)
            if sixths != zero:
                value = max(red, green, blue)
                chroma = value - min(red, green, blue)
                share = max(chroma, np.float32(1e-6))
                if value == red:
                    hue = (green - blue) / share
                elif value == green:
                    hue = (blue - red) / share + np.float32(2)
                else:
                    hue = (red - green) / share + np.float32(4)
                hue += sixths
                ramp = wrap(np.float32(5) + hue)
                red = value - chroma * min(max(min(ramp, np.float32(4) - ramp), zero), one)
                ramp = wrap(np.float32(3) + hue)
                green = value - chroma * min(max(min(ramp, np.float32(4) - ramp), zero), one)
                ramp = wrap(one + hue)
                blue = value - chroma * min(max(min(ramp, np.float32(4) - ramp), zero), one)
            colours = (red * after, green * after, blue * after)
            out[v, u, 0] = colours[first]
            out[v, u, 1] = colours[second]
            out[v, u, 2] = colours[third]


def _decompose(source: ImageSource) -> tuple[tuple[int, int], tuple[int, int], bool, float]:
    """Split the affine map of an image into resized (height, width), crop corner (top, left), flip
    and rotation angle [rad]."""
    matrix = source.network_from_original
    scale_x, scale_y = np.linalg.norm(matrix[:2, :2], axis=0)
    flip = bool(np.linalg.det(matrix[:2, :2]) < 0)
    angle = math.atan2(matrix[0, 1], matrix[1, 1])
    angle = 0.0 if abs(angle) < 1e-9 else angle
    upright = image_rotation(source.size, -angle) @ matrix
    shift_x, shift_y = upright[:2, 2]
    if flip:
        shift_x = source.size[1] - 1 - shift_x
    left, top = 0.5 * scale_x - 0.5 - shift_x, 0.5 * scale_y - 0.5 - shift_y
    resized = round(source.original_size[0] * scale_y), round(source.original_size[1] * scale_x)
    return resized, (round(top), round(left)), flip, angle


@functools.lru_cache(maxsize=16)  # without augmentation the maps repeat
def _cached_map(
    camera_model: CameraModel | None, matrix: bytes, size: tuple[int, int], scale: float
) -> np.ndarray:
    network_from_view = np.frombuffer(matrix, np.float64).reshape(3, 3)
    return undistortion_map(camera_model, network_from_view, size, (scale, scale)).numpy()
