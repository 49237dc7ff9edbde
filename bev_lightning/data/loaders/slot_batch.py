"""A batch on its way from a worker process: large arrays in a slot, the rest in a metadata.

The worker makes the frames and reads all their files; the process that trains puts arrays and
metadata together and never touches a file or a frame.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import cv2
import numpy as np
import torch
from torch import Tensor

from bev_lightning.data.loaders.decode import (
    change_colours,
    read_cloud_into,
    read_encoded,
    read_image_into,
    warm_up,
)
from bev_lightning.data.loaders.image_cache import ImageCache
from bev_lightning.data.loaders.protocol import BatchSampler
from bev_lightning.data.loaders.torch import read_position, read_radar
from bev_lightning.data.loaders.worker_pool import SlotPool, WorkerDiedError
from bev_lightning.data.samples.file_sources import ImageSource
from bev_lightning.data.samples.frame import Frame, FrameSource
from bev_lightning.data.transforms.grid_mask import GridMask
from bev_lightning.data.transforms.photometric import ColourChange
from bev_lightning.errors import InputError
from bev_lightning.structures import Batch, Cameras, Inputs, Points, Radar


@dataclass(frozen=True)
class SlotArrays:
    """A slot's memory. T frames (the oldest first), B samples, N cameras.

    Attributes:
        pixels: ``(T, B, N, H, W, 3)`` uint8 RGB, or float16 where colours change, for they leave
            0..255; None without cameras, or if images travel encoded.
        encoded: ``(T, B, N, capacity)`` uint8 the files' bytes, or None.
        points: ``(T, B * max_points, 5)`` float32.
        radar: ``(T, B * max_points, 8)`` float32.
    """

    pixels: np.ndarray | None
    encoded: np.ndarray | None
    points: np.ndarray
    radar: np.ndarray


@dataclass(frozen=True)
class SlotLayout:
    """Shapes of :class:`SlotArrays`.

    Attributes:
        inputs: what the model reads.
        batch_size: samples of a batch at most.
        changes_colours: whether images are distorted photometrically.
        encoded_bytes: room for an image's file; 0 where images travel as pixels.
    """

    inputs: Inputs
    batch_size: int
    changes_colours: bool = False
    encoded_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        """Of a slot."""
        return sum(math.prod(shape) * np.dtype(kind).itemsize for shape, kind in self._parts())

    def show(self, memory: np.ndarray) -> SlotArrays:
        """The arrays in a slot's memory ``(num_bytes or more,)`` uint8."""
        arrays, start = [], 0
        for shape, kind in self._parts():
            stop = start + math.prod(shape) * np.dtype(kind).itemsize
            arrays.append(memory[start:stop].view(kind).reshape(shape))
            start = stop
        points, radar, images = arrays
        pixels, encoded = (None, images) if self.encoded_bytes else (images, None)
        return SlotArrays(None if self.inputs.camera is None else pixels, encoded, points, radar)

    def _parts(self) -> tuple[tuple[tuple[int, ...], str], ...]:
        inputs, size = self.inputs, (self.inputs.history + 1, self.batch_size)
        images: tuple[int, ...] = (0,)
        if inputs.camera is not None:
            each = (self.encoded_bytes,) if self.encoded_bytes else (*inputs.camera.size, 3)
            images = (*size, len(inputs.camera.channels), *each)
        points = 0 if inputs.lidar is None else inputs.lidar.max_points
        radar = 0 if inputs.radar is None else inputs.radar.max_points
        kind = "f2" if self.changes_colours and not self.encoded_bytes else "u1"
        return (
            ((size[0], size[1] * points, 5), "f4"),
            ((size[0], size[1] * radar, 8), "f4"),
            (images, kind),
        )


@dataclass(frozen=True)
class BatchMetadata:
    """What goes with a slot's arrays, for T frames of B samples.

    Attributes:
        batches: of each frame, with all that needs no file.
        image_from_lidar: ``(T, B, N, 4, 4)`` float32, or None.
        num_points, num_returns: ``(T, B)`` int64 of the lidar and the radars.
        masks, colours: of each frame and sample.
        sources: of each frame and sample, where images travel encoded.
        lengths: ``(T, B, N)`` int64 of the encoded images.
        oversized: encoded images that do not fit into the slot, by (t, b, n).
        skipped: for each sample the sentences of those it replaces, by token.
        cache_hits, cache_lookups: of decoded images.
    """

    batches: tuple[Batch, ...]
    image_from_lidar: Tensor | None
    num_points: np.ndarray
    num_returns: np.ndarray
    masks: tuple[tuple[GridMask | None, ...], ...]
    colours: tuple[tuple[tuple[ColourChange, ...], ...], ...]
    sources: tuple[tuple[tuple[ImageSource, ...], ...], ...]
    lengths: np.ndarray
    oversized: dict[tuple[int, int, int], bytes]
    skipped: tuple[dict[str, str], ...]
    cache_hits: int = 0
    cache_lookups: int = 0


class SlotWriter:
    """The work of the worker processes: a batch into a slot."""

    def __init__(
        self,
        frames: FrameSource,
        sampler: BatchSampler,
        layout: SlotLayout,
        pool: SlotPool,
        full_decode: bool = False,
        image_cache: ImageCache | None = None,
    ) -> None:
        self.frames = frames
        self.sampler = sampler
        self.layout = layout
        self.pool = pool
        self.full_decode = full_decode
        self.image_cache = image_cache
        warm_up()

    def __call__(self, micro_step: int, slot: int) -> BatchMetadata:
        """Read a micro-step.

        Raises:
            InputError: a file cannot be used and the policy is "error".
        """
        cv2.setNumThreads(1)  # a pool of threads does not survive the fork
        arrays, inputs = self.layout.show(self.pool.memory(slot)), self.frames.inputs
        cache = self.image_cache
        before = (0, 0) if cache is None else (cache.hits, cache.lookups)
        places = self.sampler.batch(micro_step)
        cameras = 0 if inputs.camera is None else len(inputs.camera.channels)
        shape = inputs.history + 1, len(places)
        num_points, num_returns = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        lengths = np.zeros((*shape, cameras), np.int64)
        oversized: dict[tuple[int, int, int], bytes] = {}
        queues, skipped = [], []
        for sample, place in enumerate(places):
            read = functools.partial(
                self._read, arrays, sample, num_points, num_returns, lengths, oversized
            )
            queue, instead_of = read_position(self.frames, *place, read)
            queues.append(queue)
            skipped.append(instead_of)
        for moment in range(shape[0]):
            _close_ranks(arrays.points[moment], num_points[moment], self.layout.batch_size)
            _close_ranks(arrays.radar[moment], num_returns[moment], self.layout.batch_size)
        moments = tuple(zip(*queues, strict=True))
        matrices = None
        if cameras:
            matrices = torch.stack(
                [torch.cat([_matrices_of(frame) for frame in moment]) for moment in moments]
            )
        after = (0, 0) if cache is None else (cache.hits, cache.lookups)
        return BatchMetadata(
            tuple(Batch.stack([frame.batch for frame in moment]) for moment in moments),
            matrices,
            num_points,
            num_returns,
            tuple(tuple(frame.mask for frame in moment) for moment in moments),
            tuple(tuple(frame.colours for frame in moment) for moment in moments),
            tuple(tuple(frame.images for frame in moment) for moment in moments)
            if self.layout.encoded_bytes
            else (),
            lengths,
            oversized,
            tuple(skipped),
            after[0] - before[0],
            after[1] - before[1],
        )

    def _read(
        self,
        arrays: SlotArrays,
        sample: int,
        num_points: np.ndarray,
        num_returns: np.ndarray,
        lengths: np.ndarray,
        oversized: dict[tuple[int, int, int], bytes],
        frame: Frame,
    ) -> tuple[Frame, ...]:
        """The files of a frame and its history, the oldest first."""
        queue = (*frame.history, frame)
        first: dict[int, int] = {}
        inputs, num = self.frames.inputs, self.layout.batch_size
        for moment, member in enumerate(queue):
            # At a scene's start the queue repeats one frame: read it once.
            same = first.setdefault(id(member), moment)
            points = arrays.points[moment].reshape(num, -1, 5)[sample]
            returns = arrays.radar[moment].reshape(num, -1, 8)[sample]
            try:
                self._read_images(arrays, moment, sample, member, same, lengths, oversized)
                if same != moment:
                    points[:] = arrays.points[same].reshape(num, -1, 5)[sample]
                    returns[:] = arrays.radar[same].reshape(num, -1, 8)[sample]
                    num_points[moment, sample] = num_points[same, sample]
                    num_returns[moment, sample] = num_returns[same, sample]
                    continue
                if inputs.lidar is not None:
                    num_points[moment, sample] = read_cloud_into(member, inputs.lidar, points)
                if inputs.radar is not None:
                    found = read_radar(member.radar, inputs.radar)
                    num_returns[moment, sample] = len(found)
                    returns[: len(found)] = found
            except InputError as error:
                raise InputError(f"sample {member.sample_token}: {error}") from None
        return queue

    def _read_images(
        self,
        arrays: SlotArrays,
        moment: int,
        sample: int,
        frame: Frame,
        same: int,
        lengths: np.ndarray,
        oversized: dict[tuple[int, int, int], bytes],
    ) -> None:
        for number, source in enumerate(frame.images):
            place = moment, sample, number
            if arrays.encoded is not None:
                content = read_encoded(source)
                lengths[place] = len(content)
                if len(content) > self.layout.encoded_bytes:
                    oversized[place] = content.tobytes()
                else:
                    arrays.encoded[place][: len(content)] = content
            elif arrays.pixels is not None and same != moment:
                arrays.pixels[place] = arrays.pixels[same, sample, number]
            elif arrays.pixels is not None and not self.layout.changes_colours:
                self._read_image(source, arrays.pixels[place])
            elif arrays.pixels is not None:
                image = np.empty((*source.size, 3), np.uint8)
                self._read_image(source, image)
                change = frame.colours[number] if frame.colours else ColourChange()
                if change != ColourChange():
                    image = change_colours(change, image)
                # Through torch, whose conversion to half precision is the faster one.
                torch.from_numpy(arrays.pixels[place]).copy_(torch.from_numpy(image))

    def _read_image(self, source: ImageSource, out: np.ndarray) -> None:
        read_image_into(source, out, self.full_decode, self.image_cache)


def show_clouds(
    metadata: BatchMetadata, arrays: SlotArrays, inputs: Inputs
) -> list[tuple[Points | None, Radar | None]]:
    """Points and radar of each frame, in the slot's memory."""
    clouds = []
    for moment in range(len(metadata.batches)):
        points = radar = None
        if inputs.lidar is not None:
            points = Points(*_show(arrays.points[moment], metadata.num_points[moment]))
        if inputs.radar is not None:
            radar = Radar(*_show(arrays.radar[moment], metadata.num_returns[moment]))
        clouds.append((points, radar))
    return clouds


def assemble_batch(
    metadata: BatchMetadata,
    images: Tensor | None,
    clouds: Sequence[tuple[Points | None, Radar | None]],
) -> Batch:
    """The batch.

    Args:
        images: ``(T, B, N, 3, H, W)`` float32, normalised; what masks hide is set to 0 in it.
        clouds: of each frame.
    """
    *history, batch = (
        replace(
            metadata.batches[moment],
            cameras=_put_cameras(metadata, moment, images),
            points=points,
            radar=radar,
        )
        for moment, (points, radar) in enumerate(clouds)
    )
    return replace(batch, history=tuple(history))


def explain_death(frames: FrameSource, sampler: BatchSampler, died: WorkerDiedError) -> InputError:
    """The sentence for a worker that was killed: what it read, and the mend."""
    members = [frames.frame(*place) for place in sampler.batch(died.job)]
    paths: list[Path] = []
    for frame in members:
        for sources in (frame.images, frame.lidar, frame.radar):
            paths += [source.path for source in sources]
    return InputError(
        f"the loader process that read the samples "
        f"{', '.join(frame.sample_token for frame in members)} ({len(paths)} files, first "
        f"{paths[0]}) {died.why}, perhaps for want of memory: set loader.num_workers lower, or "
        f"data.on_missing=skip to have another take its place"
    )


def _put_cameras(metadata: BatchMetadata, moment: int, images: Tensor | None) -> Cameras | None:
    if images is None or metadata.image_from_lidar is None:
        return None
    for mask, seen in zip(metadata.masks[moment], images[moment], strict=True):
        if mask is not None:
            mask.hide(seen)
    return Cameras(images[moment], metadata.image_from_lidar[moment])


def _matrices_of(frame: Frame) -> Tensor:
    assert frame.image_from_lidar is not None
    return frame.image_from_lidar


def _close_ranks(rows: np.ndarray, counts: np.ndarray, batch_size: int) -> None:
    """From samples that are as far apart as the longest may be, to as far as the longest is."""
    room, longest = len(rows) // batch_size, int(counts.max())
    for sample, count in enumerate(counts.tolist()):
        start = sample * longest
        if sample:
            rows[start : start + count] = rows[sample * room : sample * room + count]
        rows[start + count : start + longest] = 0


def _show(rows: np.ndarray, counts: np.ndarray) -> tuple[Tensor, Tensor]:
    num, longest = len(counts), int(counts.max())
    features = torch.from_numpy(rows[: num * longest]).view(num, longest, rows.shape[1])
    return features, torch.from_numpy(counts)
