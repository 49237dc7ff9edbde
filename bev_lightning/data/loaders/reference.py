"""Reference reading of images, lidar and radar with PIL and numpy, in the manner of mmdetection3d.

The faster loaders are compared with it and measured against it, so it does one obvious step after
the other. Every file that cannot be used raises an error that names it.
"""

import io
import math
from dataclasses import replace

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError

from bev_lightning.data.loaders.image_cache import choose_reduction
from bev_lightning.data.loaders.undistort import undistort
from bev_lightning.data.nuscenes.sensor_files import (
    check_holes,
    describe,
    read_bytes,
    read_lidar_file,
    read_radar_file,
)
from bev_lightning.data.samples.file_sources import ImageSource, LidarSource, RadarSource
from bev_lightning.data.samples.frame import Frame
from bev_lightning.data.transforms.augment import image_rotation
from bev_lightning.data.transforms.photometric import apply_colour_changes
from bev_lightning.errors import InputError
from bev_lightning.structures import (
    Batch,
    CameraInput,
    Cameras,
    Inputs,
    LidarInput,
    Points,
    Radar,
    RadarInput,
)


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
        return undistort(source, np.asarray(image.reduce(choose_reduction(source.scale))))
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


def read_points(sources: tuple[LidarSource, ...], lidar: LidarInput) -> np.ndarray:
    """Read lidar sweeps into the model frame and crop them to the range, the key frame first.

    Returns:
        ``(P, 5)`` float32 x, y, z [m], intensity, age [s], P <= ``lidar.max_points``.

    Raises:
        InputError: a file is absent, empty, cut or holds NaN or infinity.
    """
    low, high = np.array(lidar.range, np.float32).reshape(2, 3)
    parts, capacity = [], lidar.max_points
    for source in sources:
        raw = read_lidar_file(source.path)
        # Without returns of the ego vehicle, in the sweep's frame as in the devkit.
        points = raw[(np.abs(raw[:, :2]) >= lidar.min_distance).any(axis=1)]
        matrix = source.lidar_from_sweep.astype(np.float32)
        xyz = points[:, :3] @ matrix[:3, :3].T + matrix[:3, 3]
        inside = ((xyz >= low) & (xyz < high)).all(axis=1)
        age = np.full((int(inside.sum()), 1), source.age, np.float32)
        parts.append(np.concatenate([xyz[inside], points[inside, 3:4], age], axis=1)[:capacity])
        capacity -= len(parts[-1])
        if capacity <= 0:
            break
    return np.concatenate(parts) if parts else np.zeros((0, 5), np.float32)


def read_cloud(frame: Frame, lidar: LidarInput) -> np.ndarray:
    """:func:`read_points` of a frame, with the objects pasted into it."""
    points = read_points(frame.lidar, lidar)
    return points if frame.pasted is None else frame.pasted.add_points(points, lidar)


def read_radar(sources: tuple[RadarSource, ...], radar: RadarInput) -> np.ndarray:
    """Read the returns of all radars into the model frame and crop them to the range.

    As by default in the devkit, only valid returns of a known dynamic property and with an
    unambiguous Doppler velocity are kept. Key frames come first.

    Returns:
        ``(P, 8)`` float32 as :class:`Radar` lays them out, P <= ``radar.max_points``.

    Raises:
        InputError: a file is absent or no nuScenes radar file.
    """
    low, high = np.array(radar.range, np.float32).reshape(2, 3)
    parts = [np.zeros((0, 8), np.float32)]
    for source in sources:
        raw = read_radar_file(source.path)
        keep = (raw["invalid_state"] == 0) & (raw["dyn_prop"] <= 6) & (raw["ambig_state"] == 3)
        raw = raw[keep & (raw["dyn_prop"] >= 0)]
        matrix = source.lidar_from_radar.astype(np.float32)
        position = np.stack([raw["x"], raw["y"], raw["z"]], axis=1).astype(np.float32)
        velocity = np.stack([raw["vx_comp"], raw["vy_comp"], np.zeros(len(raw))], axis=1).astype(
            np.float32
        )
        features = np.empty((len(raw), 8), np.float32)
        features[:, :3] = position @ matrix[:3, :3].T + matrix[:3, 3]
        features[:, 3] = raw["rcs"]
        features[:, 4:6] = (velocity @ matrix[:3, :3].T)[:, :2]
        features[:, 6] = source.age
        features[:, 7] = source.sensor
        parts.append(features[((features[:, :3] >= low) & (features[:, :3] < high)).all(axis=1)])
    return np.concatenate(parts)[: radar.max_points]


def assemble(frame: Frame, inputs: Inputs) -> Batch:
    """Read all files of a frame and its history into a batch of one.

    Raises:
        InputError: a file cannot be used; it names the sample, the file and its size.
    """
    try:
        batch = frame.batch
        if inputs.camera is not None and frame.image_from_lidar is not None:
            images = normalise_images(
                np.stack([read_image(s) for s in frame.images]), inputs.camera
            )
            if frame.colours:
                apply_colour_changes(frame.colours, images, inputs.camera)
            if frame.mask is not None:
                frame.mask.hide(images)
            batch = replace(batch, cameras=Cameras(images[None], frame.image_from_lidar))
        if inputs.lidar is not None:
            points = read_cloud(frame, inputs.lidar)
            batch = replace(
                batch, points=Points(torch.from_numpy(points)[None], torch.tensor([len(points)]))
            )
        if inputs.radar is not None:
            returns = read_radar(frame.radar, inputs.radar)
            batch = replace(
                batch, radar=Radar(torch.from_numpy(returns)[None], torch.tensor([len(returns)]))
            )
    except InputError as error:
        raise InputError(f"sample {frame.sample_token}: {error}") from None
    if frame.history:
        # At a scene's start the queue repeats one frame: read it once.
        read = {id(past): assemble(past, inputs) for past in frame.history}
        batch = replace(batch, history=tuple(read[id(past)] for past in frame.history))
    return batch


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
