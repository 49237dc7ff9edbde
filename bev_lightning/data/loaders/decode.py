"""Fast reading of images and lidar with OpenCV and numba, into memory that the caller provides.

An image is decoded at the lowest resolution that the network needs and resampled once. Lidar sweeps
are transformed, filtered and written in one pass. Files that cannot be used are read again by
:mod:`bev_lightning.data.loaders.reference`, so that both raise the same errors.
"""

from collections.abc import Sequence

import cv2
import numpy as np
from numba import njit

from bev_lightning.data.loaders.image_cache import ImageCache, choose_reduction
from bev_lightning.data.loaders.reference import read_image, read_points
from bev_lightning.data.loaders.undistort import undistort
from bev_lightning.data.nuscenes.sensor_files import is_whole_jpeg, load_lidar_file
from bev_lightning.data.samples.file_sources import ImageSource, LidarSource
from bev_lightning.data.samples.frame import Frame
from bev_lightning.data.transforms.photometric import ColourChange
from bev_lightning.structures import LidarInput

# As in PIL and in the calibrations, the EXIF orientation is ignored.
_RGB = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
_DECODE = {
    1: _RGB | cv2.IMREAD_COLOR,
    2: _RGB | cv2.IMREAD_REDUCED_COLOR_2,
    4: _RGB | cv2.IMREAD_REDUCED_COLOR_4,
    8: _RGB | cv2.IMREAD_REDUCED_COLOR_8,
}


def compile_kernels() -> None:
    """Compile the numba kernels before worker processes are forked, which would each do so."""
    raw, out = np.frombuffer(bytes(20), np.float32).reshape(1, 5), np.empty((1, 5), np.float32)
    bound, zero = np.zeros(3, np.float32), np.float32(0)
    append_points(raw, np.zeros((3, 4), np.float32), zero, bound, bound, zero, out, 0)
    change_colours(ColourChange(), np.zeros((1, 1, 3), np.uint8))


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
    reduction = 1 if full_decode else choose_reduction(source.scale)
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
        undistort(source, pixels, out)
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


def read_cloud_into(frame: Frame, lidar: LidarInput, out: np.ndarray) -> int:
    """Read the lidar points of a frame, with the objects pasted into it.

    Args:
        out: ``(max_points, 5)`` float32 as in ``Points.features``.

    Returns:
        number of rows written.

    Raises:
        InputError: a file is absent, empty, truncated or holds NaN or infinity.
    """
    count = read_points_into(frame.lidar, lidar, out)
    if frame.pasted is not None:
        points = frame.pasted.add_points(out[:count].copy(), lidar)
        count = len(points)
        out[:count] = points
    return count


def read_points_into(sources: Sequence[LidarSource], lidar: LidarInput, out: np.ndarray) -> int:
    """:func:`bev_lightning.data.loaders.reference.read_points` in one pass over each file."""
    low, high = np.array(lidar.range, np.float32).reshape(2, 3)
    nearest, count = np.float32(lidar.min_distance), 0
    for source in sources:
        raw = load_lidar_file(source.path)
        matrix = np.ascontiguousarray(source.lidar_from_sweep[:3], np.float32)
        age = np.float32(source.age)
        end = append_points(raw, matrix, age, low, high, nearest, out, count)
        if end < 0 or (end == count and not raw.any()):
            # Not finite, near the largest float, or all zero: the reference decides.
            points = read_points((source,), lidar)[: len(out) - count]
            end = count + len(points)
            out[count:end] = points
        count = end
        if count == len(out):
            break
    return count


@njit(cache=True, nogil=True)
def append_points(raw, matrix, age, low, high, nearest, out, count):  # type: ignore[no-untyped-def]
    """Transform, filter and append a file's points ``(P, 5)`` to the first ``count`` rows of
    ``out``. Returns the new count, or -1 if a value is not finite."""
    capacity = len(out)
    for row in range(len(raw)):
        x, y, z = raw[row, 0], raw[row, 1], raw[row, 2]
        if not np.isfinite(x + y + z + raw[row, 3] + raw[row, 4]):
            return -1
        # Without returns of the ego vehicle, in the sweep's frame as in the devkit.
        if count == capacity or (abs(x) < nearest and abs(y) < nearest):
            continue
        u = matrix[0, 0] * x + matrix[0, 1] * y + matrix[0, 2] * z + matrix[0, 3]
        v = matrix[1, 0] * x + matrix[1, 1] * y + matrix[1, 2] * z + matrix[1, 3]
        w = matrix[2, 0] * x + matrix[2, 1] * y + matrix[2, 2] * z + matrix[2, 3]
        if (
            low[0] <= u
            and u < high[0]
            and low[1] <= v
            and v < high[1]
            and low[2] <= w
            and w < high[2]
        ):
            out[count, 0] = u
            out[count, 1] = v
            out[count, 2] = w
            out[count, 3] = raw[row, 3]
            out[count, 4] = age
            count += 1
    return count


def change_colours(change: ColourChange, image: np.ndarray) -> np.ndarray:
    """:meth:`ColourChange.distort` of an image ``(H, W, 3)`` uint8 or float32 of the 0..255 scale,
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
