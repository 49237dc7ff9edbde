"""The plain loader: PIL and numpy in DataLoader workers, in the manner of mmdetection3d.

It is the baseline that the other loaders are measured against and compared with, so it does one
obvious step after the other. Every file that cannot be used ends in a sentence that names it.
"""

import functools
import io
import math
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch.utils.data import DataLoader, Dataset

from bev_lightning.data.loaders.image_cache import ImageCache, choose_reduction
from bev_lightning.data.loaders.protocol import BatchSampler, LoaderStats
from bev_lightning.data.loaders.undistort import undistort
from bev_lightning.data.nuscenes.sensor_files import (
    check_holes,
    describe,
    read_bytes,
    read_lidar_file,
    read_radar_file,
)
from bev_lightning.data.process_pool import prepare_worker
from bev_lightning.data.samples.file_sources import ImageSource, LidarSource, RadarSource
from bev_lightning.data.samples.frame import Frame, FrameSource
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

_T = TypeVar("_T")


def read_image(source: ImageSource) -> np.ndarray:
    """Decode, resize (bicubic with antialiasing), crop, flip and rotate (bilinear), all as PIL
    does. What a lens bends is reduced and then mapped once.

    Returns:
        ``(H, W, 3)`` uint8 RGB; black where the network's image reaches beyond the file's.

    Raises:
        InputError: the file is absent, cut, no image or of another size than its table says.
    """
    content = read_bytes(source.path, "image")
    check_holes(source.path, content)
    try:
        # Only formats data sets use: for what is no image PIL would else import all its plugins.
        image = Image.open(io.BytesIO(content), formats=("JPEG", "PNG")).convert("RGB")
    except (OSError, UnidentifiedImageError, ValueError, SyntaxError) as error:
        raise InputError(
            f"the image {source.path} ({len(content)} bytes) cannot be decoded "
            f"({describe(error)}): replace it, or "
            f"leave such samples out with data.on_missing=skip"
        ) from None
    if (image.height, image.width) != source.original_size:
        raise InputError(
            f"the image {source.path} is {image.width}x{image.height} pixels and sample_data says "
            f"{source.original_size[1]}x{source.original_size[0]}: the calibration would be "
            f"wrong; restore the file"
        )
    if source.camera_model is not None:
        return undistort(source, np.asarray(image.reduce(choose_reduction(source.scale))))
    resized, corner, flip, angle = _decompose(source)
    image = image.resize(resized[::-1], Image.Resampling.BICUBIC)
    (top, left), (height, width) = corner, source.size
    # A turned image needs what lies around the crop: without the margin its corners would be black.
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
    """``(N, H, W, 3)`` uint8 to ``(N, 3, H, W)`` float32, minus mean, over std."""
    mean, std = np.array(camera.mean, np.float32), np.array(camera.std, np.float32)
    scaled = (images.astype(np.float32) - mean) / std
    return torch.from_numpy(np.ascontiguousarray(scaled.transpose(0, 3, 1, 2)))


def read_points(sources: tuple[LidarSource, ...], lidar: LidarInput) -> np.ndarray:
    """Sweeps in the model frame, within range, the key frame first.

    Returns:
        ``(P, 5)`` float32 x, y, z [m], intensity, age [s], P <= ``lidar.max_points``.

    Raises:
        InputError: a file is absent, empty, cut or holds NaN or infinity.
    """
    low, high = np.array(lidar.range, np.float32).reshape(2, 3)
    parts, room = [], lidar.max_points
    for source in sources:
        raw = read_lidar_file(source.path)
        # The ego car's own returns, judged in the sweep's frame as the devkit does.
        points = raw[(np.abs(raw[:, :2]) >= lidar.min_distance).any(axis=1)]
        matrix = source.lidar_from_sweep.astype(np.float32)
        xyz = points[:, :3] @ matrix[:3, :3].T + matrix[:3, 3]
        inside = ((xyz >= low) & (xyz < high)).all(axis=1)
        age = np.full((int(inside.sum()), 1), source.age, np.float32)
        parts.append(np.concatenate([xyz[inside], points[inside, 3:4], age], axis=1)[:room])
        room -= len(parts[-1])
        if room <= 0:
            break
    return np.concatenate(parts) if parts else np.zeros((0, 5), np.float32)


def read_cloud(frame: Frame, lidar: LidarInput) -> np.ndarray:
    """:func:`read_points` of a frame, with what was pasted into it."""
    points = read_points(frame.lidar, lidar)
    return points if frame.pasted is None else frame.pasted.add_points(points, lidar)


def read_radar(sources: tuple[RadarSource, ...], radar: RadarInput) -> np.ndarray:
    """Returns of all radars in the model frame, within range, key frames first.

    Kept are the returns that the devkit keeps by default: valid, of a known dynamic property, with
    an unambiguous Doppler velocity.

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
    """Read all files of a frame, its history's too, into a batch of one.

    Raises:
        InputError: a file cannot be used; names the sample, the file and its size.
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


def read_position(
    frames: FrameSource, epoch: int, position: int, read: Callable[[Frame], _T]
) -> tuple[_T, dict[str, str]]:
    """The sample at a position, or under ``on_missing="skip"`` the next one that can be read.

    The replacement depends on the files alone, so all workers, ranks and repetitions choose alike.

    Returns:
        what ``read`` gives, and the sentence for each sample skipped, by token.

    Raises:
        InputError: the file cannot be used and the policy is "error", or no sample can be read.
    """
    skipped: dict[str, str] = {}
    for step in range(len(frames)):
        frame = frames.frame(epoch, (position + step) % len(frames))
        try:
            return read(frame), skipped
        except InputError as error:
            if frames.on_missing == "error":
                raise
            skipped[frame.sample_token] = str(error)
    raise InputError(
        f"none of the {len(frames)} samples can be read, for instance "
        f"{next(iter(skipped.values()))}"
    )


class TorchLoader:
    """Reads with PIL and numpy in the workers of a DataLoader.

    Attributes:
        num_workers: processes; 0 reads in this one.
        prefetch: batches that each worker may hold ready.
        pin_memory: page-locked batches for asynchronous transfer; without CUDA it does nothing.
        stats: counters.
    """

    supports_image_cache = False
    full_decode = True

    def __init__(
        self,
        num_workers: int = 0,
        prefetch: int = 2,
        pin_memory: bool = False,
    ) -> None:
        self.num_workers = num_workers
        self.prefetch = prefetch
        self.pin_memory = pin_memory
        self.stats = LoaderStats()

    def open(
        self,
        frames: FrameSource,
        sampler: BatchSampler,
        start: int,
        stop: int,
        image_cache: ImageCache | None = None,
    ) -> Generator[Batch, None, None]:
        """Batches ``start`` .. ``stop - 1`` of the sampler, in order.

        Raises:
            InputError: a file cannot be used, in the sentence of the worker that met it; or a
                worker was killed.
        """
        parallel = self.num_workers > 0
        results = iter(
            DataLoader(
                _Positions(frames),
                batch_sampler=_Places(sampler, start, stop),
                collate_fn=_stack,
                num_workers=self.num_workers,
                prefetch_factor=self.prefetch if parallel else None,
                worker_init_fn=prepare_worker,
                pin_memory=self.pin_memory and torch.cuda.is_available(),
                # Its own generator: the DataLoader draws a seed for its workers, which would
                # disturb the model's random numbers.
                generator=torch.Generator(),
            )
        )
        try:
            while (result := _next(results)) is not None:
                if isinstance(result, str):
                    raise InputError(
                        f"one of {self.num_workers} loader processes was killed ({result}), "
                        f"perhaps for want of memory: set loader.num_workers lower"
                    )
                if isinstance(result, _Failure):
                    raise InputError(result.sentence)
                self.stats.skipped.update(result.skipped)
                yield result.batch
        finally:
            del results  # ends the workers, also where an error keeps this frame


def _next(results: Iterator[Any]) -> Any:
    """The next result, None at the end, or what torch says of a worker that was killed.

    Not raised from torch's error, which would hold the iterator and with it the workers.
    """
    try:
        return next(results, None)
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        return str(error)
    except (EOFError, ConnectionError):  # it had not yet handed over the memory of a batch
        return "its pipe is closed"


@dataclass(frozen=True)
class _Result:
    batch: Batch
    skipped: dict[str, str]

    def pin_memory(self) -> "_Result":
        return replace(self, batch=self.batch.pin_memory())


@dataclass(frozen=True)
class _Failure:
    """An InputError on its way out of a worker, whose exceptions arrive with a traceback as their
    text."""

    sentence: str


class _Positions(Dataset["_Result | _Failure"]):
    def __init__(self, frames: FrameSource) -> None:
        self.frames = frames

    def __getitem__(self, place: tuple[int, int]) -> "_Result | _Failure":
        try:
            return _Result(
                *read_position(
                    self.frames, *place, functools.partial(assemble, inputs=self.frames.inputs)
                )
            )
        except InputError as error:
            return _Failure(str(error))


@dataclass(frozen=True)
class _Places:
    sampler: BatchSampler
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return (self.sampler.batch(micro_step) for micro_step in range(self.start, self.stop))


def _stack(results: "list[_Result | _Failure]") -> "_Result | _Failure":
    good = []
    for result in results:
        if isinstance(result, _Failure):
            return result
        good.append(result)
    skipped = {token: text for result in good for token, text in result.skipped.items()}
    return _Result(Batch.stack([result.batch for result in good]), skipped)


def _decompose(source: ImageSource) -> tuple[tuple[int, int], tuple[int, int], bool, float]:
    """The steps that :func:`image_transform` made one map of: resized (height, width), corner (top,
    left), flip, angle [rad]."""
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
