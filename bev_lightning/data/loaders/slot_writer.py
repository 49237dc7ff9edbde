"""Work of the loader's worker processes: reads the files of a batch into a slot."""

import functools
from pathlib import Path

import cv2
import numpy as np
import torch

from bev_lightning.data.loaders.decode import (
    change_colours,
    compile_kernels,
    read_cloud_into,
    read_encoded,
    read_image_into,
)
from bev_lightning.data.loaders.image_cache import ImageCache
from bev_lightning.data.loaders.protocol import BatchSampler
from bev_lightning.data.loaders.reference import read_radar
from bev_lightning.data.loaders.slot_batch import (
    BatchMetadata,
    FillCounts,
    SlotArrays,
    SlotLayout,
)
from bev_lightning.data.loaders.worker_pool import SlotPool, WorkerDiedError
from bev_lightning.data.samples.frame import Frame, FrameSource
from bev_lightning.data.transforms.photometric import ColourChange
from bev_lightning.errors import InputError
from bev_lightning.structures import Batch


class SlotWriter:
    """The callable of a :class:`WorkerPool`: reads the batch of a micro-step into a slot."""

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
        compile_kernels()

    def __call__(self, micro_step: int, slot: int) -> BatchMetadata:
        """Read the batch of a micro-step.

        Raises:
            InputError: a file cannot be used and the policy is "error".
        """
        cv2.setNumThreads(1)  # OpenCV's thread pool does not survive the fork
        arrays, inputs = self.layout.view(self.pool.memory(slot)), self.frames.inputs
        cache = self.image_cache
        hits, lookups = (0, 0) if cache is None else (cache.hits, cache.lookups)
        samples = self.sampler.batch(micro_step)
        num_cameras = 0 if inputs.camera is None else len(inputs.camera.channels)
        shape = inputs.history + 1, len(samples)
        counts = FillCounts(
            np.zeros(shape, np.int64),
            np.zeros(shape, np.int64),
            np.zeros((*shape, num_cameras), np.int64),
            {},
        )
        queues, skipped = [], []
        for sample, (epoch, position) in enumerate(samples):
            read = functools.partial(self._read_queue, arrays, counts, sample)
            queue, reasons = self.frames.read_or_replace(epoch, position, read)
            queues.append(queue)
            skipped.append(reasons)
        for t in range(shape[0]):
            _close_gaps(arrays.points[t], counts.num_points[t], self.layout.batch_size)
            _close_gaps(arrays.radar[t], counts.num_returns[t], self.layout.batch_size)
        frames = tuple(zip(*queues, strict=True))  # (T, B)
        matrices = None
        if num_cameras:
            matrices = torch.stack(
                [torch.cat([_image_from_lidar(frame) for frame in row]) for row in frames]
            )
        return BatchMetadata(
            batches=tuple(Batch.stack([frame.batch for frame in row]) for row in frames),
            image_from_lidar=matrices,
            counts=counts,
            masks=tuple(tuple(frame.mask for frame in row) for row in frames),
            colours=tuple(tuple(frame.colours for frame in row) for row in frames),
            sources=tuple(tuple(frame.images for frame in row) for row in frames)
            if self.layout.encoded_bytes
            else (),
            skipped=tuple(skipped),
            cache_hits=0 if cache is None else cache.hits - hits,
            cache_lookups=0 if cache is None else cache.lookups - lookups,
        )

    def _read_queue(
        self, arrays: SlotArrays, counts: FillCounts, sample: int, frame: Frame
    ) -> tuple[Frame, ...]:
        """Read the files of a frame and its history; returns these, the oldest first."""
        queue = (*frame.history, frame)
        first: dict[int, int] = {}
        for t, member in enumerate(queue):
            # At a scene's start the queue repeats one frame: read it once.
            same = first.setdefault(id(member), t)
            try:
                if same == t:
                    self._read_images(arrays, counts, t, sample, member)
                    self._read_clouds(arrays, counts, t, sample, member)
                else:
                    self._copy(arrays, counts, t, sample, same, member)
            except InputError as error:
                raise InputError(f"sample {member.sample_token}: {error}") from None
        return queue

    def _read_images(
        self, arrays: SlotArrays, counts: FillCounts, t: int, sample: int, frame: Frame
    ) -> None:
        for camera, source in enumerate(frame.images):
            index = t, sample, camera
            if arrays.encoded is not None:
                content = read_encoded(source)
                counts.encoded_bytes[index] = len(content)
                if len(content) > self.layout.encoded_bytes:
                    counts.oversized[index] = content.tobytes()
                else:
                    arrays.encoded[index][: len(content)] = content
            elif arrays.pixels is not None and not self.layout.changes_colours:
                read_image_into(source, arrays.pixels[index], self.full_decode, self.image_cache)
            elif arrays.pixels is not None:
                image = np.empty((*source.size, 3), np.uint8)
                read_image_into(source, image, self.full_decode, self.image_cache)
                change = frame.colours[camera] if frame.colours else ColourChange()
                if change != ColourChange():
                    image = change_colours(change, image)
                # torch converts to half precision faster than numpy.
                torch.from_numpy(arrays.pixels[index]).copy_(torch.from_numpy(image))

    def _read_clouds(
        self, arrays: SlotArrays, counts: FillCounts, t: int, sample: int, frame: Frame
    ) -> None:
        inputs, num = self.frames.inputs, self.layout.batch_size
        if inputs.lidar is not None:
            points = arrays.points[t].reshape(num, -1, 5)[sample]
            counts.num_points[t, sample] = read_cloud_into(frame, inputs.lidar, points)
        if inputs.radar is not None:
            returns = read_radar(frame.radar, inputs.radar)
            counts.num_returns[t, sample] = len(returns)
            arrays.radar[t].reshape(num, -1, 8)[sample][: len(returns)] = returns

    def _copy(
        self, arrays: SlotArrays, counts: FillCounts, t: int, sample: int, same: int, frame: Frame
    ) -> None:
        """Copy what was read for the same frame at another position of the queue."""
        num = self.layout.batch_size
        if arrays.encoded is not None:
            self._read_images(arrays, counts, t, sample, frame)  # as fast as a copy
        elif arrays.pixels is not None:
            arrays.pixels[t, sample] = arrays.pixels[same, sample]
        for array, width in ((arrays.points, 5), (arrays.radar, 8)):
            rows = array.reshape(len(array), num, -1, width)
            rows[t, sample] = rows[same, sample]
        counts.num_points[t, sample] = counts.num_points[same, sample]
        counts.num_returns[t, sample] = counts.num_returns[same, sample]


def describe_killed_worker(
    frames: FrameSource, sampler: BatchSampler, died: WorkerDiedError
) -> InputError:
    """The error to raise for a worker that was killed: what it was reading, and the fix."""
    batch = [frames.frame(*sample) for sample in sampler.batch(died.job)]
    paths: list[Path] = []
    for frame in batch:
        for sources in (frame.images, frame.lidar, frame.radar):
            paths += [source.path for source in sources]
    return InputError(
        f"the loader process that read the samples "
        f"{', '.join(frame.sample_token for frame in batch)} ({len(paths)} files, first "
        f"{paths[0]}) {died.why}, perhaps out of memory: set loader.num_workers lower, or "
        f"data.on_missing=skip"
    )


def _image_from_lidar(frame: Frame) -> torch.Tensor:
    assert frame.image_from_lidar is not None
    return frame.image_from_lidar


def _close_gaps(rows: np.ndarray, counts: np.ndarray, batch_size: int) -> None:
    """Pad each sample's rows to the longest sample's only, instead of to the largest number."""
    capacity, longest = len(rows) // batch_size, int(counts.max())
    for sample, count in enumerate(counts.tolist()):
        start = sample * longest
        if sample:
            rows[start : start + count] = rows[sample * capacity : sample * capacity + count]
        rows[start + count : start + longest] = 0
