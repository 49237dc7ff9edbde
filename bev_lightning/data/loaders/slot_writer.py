"""Work of the loader's worker processes: reads the files of a batch into a slot."""

import functools
from dataclasses import dataclass

import cv2
import numpy as np
import torch

from bev_lightning.data.loaders.clouds import append_points, read_points_into, read_radar
from bev_lightning.data.loaders.image_cache import ImageCache
from bev_lightning.data.loaders.images import change_colours, read_encoded, read_image_into
from bev_lightning.data.loaders.protocol import BatchSampler
from bev_lightning.data.loaders.slot_batch import (
    BatchMetadata,
    FillCounts,
    SlotArrays,
    SlotLayout,
)
from bev_lightning.data.loaders.worker_pool import SlotPool
from bev_lightning.data.samples.frame import Frame, FrameSource
from bev_lightning.data.transforms.photometric import ColourChange
from bev_lightning.errors import InputError
from bev_lightning.structures import Batch


@dataclass(frozen=True)
class SlotWriter:
    """The callable of a :class:`WorkerPool`: reads the batch of a micro-step into a slot."""

    frames: FrameSource
    sampler: BatchSampler
    layout: SlotLayout
    pool: SlotPool
    full_decode: bool = False
    image_cache: ImageCache | None = None

    def __post_init__(self) -> None:
        _compile_kernels()

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
        queues, skipped = [], {}
        for sample, (epoch, position) in enumerate(samples):
            read = functools.partial(self._read_queue, arrays, counts, sample)
            queue, reasons = self.frames.read_or_replace(epoch, position, read)
            queues.append(queue)
            skipped.update(reasons)
        for t in range(shape[0]):
            _close_gaps(arrays.points[t], counts.num_points[t])
            _close_gaps(arrays.radar[t], counts.num_returns[t])
        frames = tuple(zip(*queues, strict=True))  # (T, B)
        matrices = [
            [f.image_from_lidar for f in row if f.image_from_lidar is not None] for row in frames
        ]
        return BatchMetadata(
            batches=tuple(Batch.stack([frame.batch for frame in row]) for row in frames),
            image_from_lidar=torch.stack([torch.cat(row) for row in matrices])
            if num_cameras
            else None,
            counts=counts,
            masks=tuple(tuple(frame.mask for frame in row) for row in frames),
            colours=tuple(tuple(frame.colours for frame in row) for row in frames),
            sources=tuple(tuple(frame.images for frame in row) for row in frames)
            if self.layout.encoded_bytes
            else (),
            skipped=skipped,
            cache_hits=0 if cache is None else cache.hits - hits,
            cache_lookups=0 if cache is None else cache.lookups - lookups,
        )

    def describe_death(self, micro_step: int, why: str) -> InputError:
        """The error to raise for a worker that was killed: what it was reading, and the fix."""
        batch = [self.frames.frame(*sample) for sample in self.sampler.batch(micro_step)]
        paths = [
            source.path
            for frame in batch
            for sources in (frame.images, frame.lidar, frame.radar)
            for source in sources
        ]
        return InputError(
            f"the loader process that read the samples "
            f"{', '.join(frame.sample_token for frame in batch)} ({len(paths)} files, first "
            f"{paths[0]}) {why}, perhaps out of memory: set loader.num_workers lower, or "
            f"data.on_missing=skip"
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
            if same == t:
                try:
                    self._read_images(arrays, counts, (t, sample), member)
                    self._read_clouds(arrays, counts, (t, sample), member)
                except InputError as error:
                    raise InputError(f"sample {member.sample_token}: {error}") from None
                continue
            filled = arrays.points, arrays.radar, arrays.images
            for array in (*filled, counts.num_points, counts.num_returns, counts.encoded_bytes):
                array[t, sample] = array[same, sample]
            for (*first_at, camera), content in list(counts.oversized.items()):
                if first_at == [same, sample]:
                    counts.oversized[t, sample, camera] = content
        return queue

    def _read_images(
        self, arrays: SlotArrays, counts: FillCounts, at: tuple[int, int], frame: Frame
    ) -> None:
        for camera, source in enumerate(frame.images):
            index = *at, camera
            out = arrays.images[index]
            if self.layout.encoded_bytes:
                content = read_encoded(source)
                counts.encoded_bytes[index] = len(content)
                if len(content) > len(out):
                    counts.oversized[index] = content.tobytes()
                else:
                    out[: len(content)] = content
            elif not self.layout.changes_colours:
                read_image_into(source, out, self.full_decode, self.image_cache)
            else:
                image = np.empty(out.shape, np.uint8)
                read_image_into(source, image, self.full_decode, self.image_cache)
                change = frame.colours[camera] if frame.colours else ColourChange()
                if change != ColourChange():
                    image = change_colours(change, image)
                # torch converts to half precision faster than numpy.
                torch.from_numpy(out).copy_(torch.from_numpy(image))

    def _read_clouds(
        self, arrays: SlotArrays, counts: FillCounts, at: tuple[int, int], frame: Frame
    ) -> None:
        inputs = self.frames.inputs
        if inputs.lidar is not None:
            rows = arrays.points[at]
            count = read_points_into(frame.lidar, inputs.lidar, rows)
            if frame.pasted is not None:
                points = frame.pasted.add_points(rows[:count].copy(), inputs.lidar)
                count = len(points)
                rows[:count] = points
            counts.num_points[at] = count
        if inputs.radar is not None:
            returns = read_radar(frame.radar, inputs.radar)
            counts.num_returns[at] = len(returns)
            arrays.radar[at][: len(returns)] = returns


def _close_gaps(rows: np.ndarray, counts: np.ndarray) -> None:
    """Pad the rows ``(B, max, width)`` of each sample to the longest sample's only: they move to
    the first ``len(counts) * longest`` rows."""
    flat, longest = rows.reshape(-1, rows.shape[-1]), int(counts.max())
    for sample, count in enumerate(counts.tolist()):
        start = sample * longest
        if sample:
            flat[start : start + count] = rows[sample, :count]
        flat[start + count : start + longest] = 0


def _compile_kernels() -> None:
    """Compile the numba kernels before worker processes are forked, which would each do so."""
    raw, out = np.frombuffer(bytes(20), np.float32).reshape(1, 5), np.empty((1, 5), np.float32)
    bound, zero = np.zeros(3, np.float32), np.float32(0)
    append_points(raw, np.zeros((3, 4), np.float32), zero, bound, bound, zero, out, 0)
    change_colours(ColourChange(), np.zeros((1, 1, 3), np.uint8))
