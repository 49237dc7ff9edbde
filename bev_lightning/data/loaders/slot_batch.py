"""Serialised batch: tensors in shared memory, metadata pickled; and the ``Batch`` made of both.

:mod:`bev_lightning.data.loaders.slot_writer` fills the slots in the worker processes; the training
process assembles the batch here and never touches a file or a frame.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from numba import njit
from torch import Tensor

from bev_lightning.data.samples.file_sources import ImageSource
from bev_lightning.data.transforms.grid_mask import GridMask
from bev_lightning.data.transforms.photometric import ColourChange
from bev_lightning.structures import Batch, CameraInput, Cameras, Inputs, Points, Radar

Clouds = list[tuple[Points | None, Radar | None]]


@dataclass(frozen=True)
class SlotArrays:
    """A slot's memory as arrays, for T frames (the oldest first), B samples and N cameras.

    Attributes:
        points: ``(T, B, max_points, 5)`` float32.
        radar: ``(T, B, max_points, 8)`` float32.
        images: ``(T, B, N, H, W, 3)`` RGB, uint8, or float16 if colours are distorted, since they
            then leave 0..255; or ``(T, B, N, capacity)`` uint8 bytes of the image files.
    """

    points: np.ndarray
    radar: np.ndarray
    images: np.ndarray


@dataclass(frozen=True)
class SlotLayout:
    """Shapes of :class:`SlotArrays`.

    Attributes:
        inputs: sensors that the model reads.
        batch_size: samples of a batch at most.
        changes_colours: whether images are distorted photometrically.
        encoded_bytes: capacity for an image file; 0 if images are stored as pixels.
    """

    inputs: Inputs
    batch_size: int
    changes_colours: bool = False
    encoded_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        """Size of a slot."""
        return sum(math.prod(shape) * np.dtype(kind).itemsize for shape, kind in self._parts())

    def view(self, memory: np.ndarray) -> SlotArrays:
        """The arrays in a slot's memory ``(num_bytes or more,)`` uint8."""
        arrays, start = [], 0
        for shape, kind in self._parts():
            stop = start + math.prod(shape) * np.dtype(kind).itemsize
            arrays.append(memory[start:stop].view(kind).reshape(shape))
            start = stop
        return SlotArrays(*arrays)

    def _parts(self) -> tuple[tuple[tuple[int, ...], str], ...]:
        inputs, size = self.inputs, (self.inputs.history + 1, self.batch_size)
        image: tuple[int, ...] = (0,)
        if inputs.camera is not None:
            each = (self.encoded_bytes,) if self.encoded_bytes else (*inputs.camera.size, 3)
            image = (len(inputs.camera.channels), *each)
        points = 0 if inputs.lidar is None else inputs.lidar.max_points
        radar = 0 if inputs.radar is None else inputs.radar.max_points
        kind = "f2" if self.changes_colours and not self.encoded_bytes else "u1"
        return ((*size, points, 5), "f4"), ((*size, radar, 8), "f4"), ((*size, *image), kind)


@dataclass(frozen=True)
class FillCounts:
    """How much of a slot's arrays is filled, for T frames of B samples with N cameras.

    Attributes:
        num_points, num_returns: ``(T, B)`` int64 of the lidar and the radars.
        encoded_bytes: ``(T, B, N)`` int64 sizes of the encoded images.
        oversized: encoded images that exceed the slot's capacity, by (t, b, n); also of samples
            that were then replaced.
    """

    num_points: np.ndarray
    num_returns: np.ndarray
    encoded_bytes: np.ndarray
    oversized: dict[tuple[int, int, int], bytes]


@dataclass(frozen=True)
class BatchMetadata:
    """All of a batch but its large arrays, for T frames of B samples.

    Attributes:
        batches: of each frame, with all that needs no file.
        image_from_lidar: ``(T, B, N, 4, 4)`` float32, or None.
        counts: how much of the arrays is filled.
        masks, colours: of each frame and sample.
        sources: of each frame and sample, if images are stored encoded.
        skipped: why each sample that was replaced could not be read, by token.
        cache_hits, cache_lookups: of decoded images.
    """

    batches: tuple[Batch, ...]
    image_from_lidar: Tensor | None
    counts: FillCounts
    masks: tuple[tuple[GridMask | None, ...], ...]
    colours: tuple[tuple[tuple[ColourChange, ...], ...], ...]
    sources: tuple[tuple[tuple[ImageSource, ...], ...], ...]
    skipped: dict[str, str]
    cache_hits: int = 0
    cache_lookups: int = 0


def view_pixels(metadata: BatchMetadata, arrays: SlotArrays) -> Tensor:
    """Images ``(T, B, N, H, W, 3)`` of the batch's samples, in the slot's memory."""
    return torch.from_numpy(arrays.images)[:, : metadata.batches[0].size]


def view_clouds(
    metadata: BatchMetadata,
    arrays: SlotArrays,
    inputs: Inputs,
    copy_to: torch.device | None = None,
) -> Clouds:
    """Points and radar of each frame, in the slot's memory, or copied to a device."""

    def view(rows: np.ndarray, counts: np.ndarray) -> tuple[Tensor, Tensor]:
        num, longest, width = len(counts), int(counts.max()), rows.shape[-1]
        features = torch.from_numpy(rows.reshape(-1, width)[: num * longest])
        features, count = features.view(num, longest, width), torch.from_numpy(counts)
        if copy_to is not None:  # synchronously: the slot is released afterwards
            features, count = features.to(copy_to, copy=True), count.to(copy_to)
        return features, count

    counts = metadata.counts
    return [
        (
            None if inputs.lidar is None else Points(*view(arrays.points[t], counts.num_points[t])),
            None if inputs.radar is None else Radar(*view(arrays.radar[t], counts.num_returns[t])),
        )
        for t in range(len(metadata.batches))
    ]


def normalise(pixels: Tensor, camera: CameraInput, out: Tensor | None = None) -> Tensor:
    """Normalise images ``(..., H, W, 3)`` uint8 or float16 to ``(..., 3, H, W)`` float32.

    They stay on their device. The values equal those of
    :func:`bev_lightning.data.loaders.images.normalise_images`.

    Args:
        out: memory for the result, contiguous, of any shape; on a CPU.
    """
    leading, (height, width, _) = pixels.shape[:-3], pixels.shape[-3:]
    pixels = pixels.reshape(-1, height, width, 3)
    mean, std = np.array(camera.mean, np.float32), np.array(camera.std, np.float32)
    if pixels.dtype == torch.uint8 and pixels.device.type == "cpu":
        shape = (len(pixels), 3, height, width)
        images = torch.empty(shape) if out is None else out.view(shape)
        table = (np.arange(256, dtype=np.float32)[:, None] - mean) / std
        _look_up(pixels.numpy(), table, images.numpy())
    else:
        scaled = pixels.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format)
        mean_, std_ = (torch.from_numpy(v).to(pixels.device).view(3, 1, 1) for v in (mean, std))
        images = scaled.sub_(mean_).div_(std_)
        if out is not None:
            images = out.view(images.shape).copy_(images)
    return images.view(*leading, 3, height, width)


def assemble_batch(
    metadata: BatchMetadata,
    images: Tensor | None,
    clouds: Clouds,
) -> Batch:
    """Build the batch, whose history are the frames before the last.

    Args:
        images: ``(T, B, N, 3, H, W)`` float32, normalised; masked pixels are set to 0 in it.
        clouds: of each frame.
    """
    frames = []
    for t, (points, radar) in enumerate(clouds):
        cameras = None
        if images is not None and metadata.image_from_lidar is not None:
            for mask, sample_images in zip(metadata.masks[t], images[t], strict=True):
                if mask is not None:
                    mask.hide(sample_images)
            cameras = Cameras(images[t], metadata.image_from_lidar[t])
        frames.append(replace(metadata.batches[t], cameras=cameras, points=points, radar=radar))
    *history, batch = frames
    return replace(batch, history=tuple(history))


@njit(cache=True, nogil=True)
def _look_up(pixels, table, images):  # type: ignore[no-untyped-def]
    """``images[n, c, v, u] = table[pixels[n, v, u, c], c]``."""
    num, height, width, _ = pixels.shape
    for n in range(num):
        for v in range(height):
            for u in range(width):
                images[n, 0, v, u] = table[pixels[n, v, u, 0], 0]
                images[n, 1, v, u] = table[pixels[n, v, u, 1], 1]
                images[n, 2, v, u] = table[pixels[n, v, u, 2], 2]
