"""What DALI's graph is fed: encoded images from the worker processes, and a plan of their pixels.

Everything that can go wrong with a file goes wrong in the workers, where file and sample are known:
the error of a decoder names neither and ends the pipeline. Point clouds do not pass through the
graph: a filter keeps an unforeseeable number of rows, which DALI has no operator for.

The workers are ours. DALI's own (``parallel=True``) wait for ever when one of them is killed at the
wrong moment; and they must be spawned where CUDA is in use, so they import torch anew, which takes
seconds each time a loader opens.
"""

import math
import queue
from dataclasses import dataclass

import numpy as np

from bev_lightning.data.loaders.image_cache import choose_reduction
from bev_lightning.data.loaders.protocol import BatchSampler
from bev_lightning.data.loaders.slot_batch import (
    BatchMetadata,
    SlotArrays,
    SlotLayout,
    SlotWriter,
    explain_death,
)
from bev_lightning.data.loaders.worker_pool import SlotPool, WorkerDiedError, WorkerPool
from bev_lightning.data.samples.file_sources import ImageSource
from bev_lightning.data.samples.frame import FrameSource
from bev_lightning.errors import InputError


@dataclass(frozen=True)
class PixelPlan:
    """An affine pixel map as two operators: an antialiased resize of a region, then one warp.

    A warp alone would alias: it reads four pixels however far it shrinks. So the region of the
    original that the network sees is first resized to the network's scale; where the map has no
    rotation, its pixels then coincide with the network's and the warp only places them. The warp is
    fed the exact remainder, so geometry does not depend on how well the map splits.

    Attributes:
        region_start, region_end: ``(2,)`` y, x in the original [pixels, corner origin]; start > end
            mirrors.
        resized: ``(2,)`` height, width of the resized region [pixels].
        resized_from_network: ``(3, 3)`` pixel map, centres at integers. All float32.
    """

    region_start: np.ndarray
    region_end: np.ndarray
    resized: np.ndarray
    resized_from_network: np.ndarray


@dataclass(frozen=True)
class Delivery:
    """A micro-step's metadata and the slot it came with, held until it is released."""

    slot: int
    metadata: BatchMetadata
    arrays: SlotArrays


class EncodedSource:
    """The callable that DALI asks for one micro-step after the other, ``start`` .. ``stop - 1``.

    Attributes:
        steps: the micro-steps.
        for_images, for_clouds: deliveries of the micro-steps handed out, oldest first, each in the
            hands of who takes it there; the exception with which a micro-step ended; None at the
            end.
    """

    def __init__(
        self,
        frames: FrameSource,
        sampler: BatchSampler,
        start: int,
        stop: int,
        num_workers: int,
        prefetch: int,
        ahead: int,
    ) -> None:
        """Start the workers.

        Args:
            num_workers: processes; 0 reads in this one.
            prefetch: micro-steps that each worker may hold ready.
            ahead: micro-steps between the source and who takes the clouds, at most.
        """
        self.frames = frames
        self.sampler = sampler
        self.steps = range(start, stop)
        self.layout = SlotLayout(frames.inputs, sampler.batch_size, encoded_bytes=_room(frames))
        self.pool = SlotPool(max(1, num_workers) * prefetch + ahead, self.layout.num_bytes)
        self.workers = WorkerPool(
            SlotWriter(frames, sampler, self.layout, self.pool),
            self.steps,
            num_workers,
            self.pool,
            restart=frames.on_missing == "skip",
        )
        self.for_images: queue.SimpleQueue[Delivery | Exception] = queue.SimpleQueue()
        self.for_clouds: queue.SimpleQueue[Delivery | Exception | None] = queue.SimpleQueue()
        self._fed: int | None = None

    def __call__(self) -> tuple[list[np.ndarray], ...]:
        """Images and :attr:`plan_fields`, an array for every image: first those
        of the oldest frames of all samples, last the current frames', within a sample camera by
        camera.

        An error is put off until its micro-step is due: it may be far ahead.

        Raises:
            StopIteration: past the last micro-step.
        """
        if self._fed is not None:  # DALI has copied it
            self.pool.release(self._fed)
            self._fed = None
        try:
            slot, metadata = next(self.workers)
        except (InputError, WorkerDiedError, RuntimeError) as error:
            if isinstance(error, WorkerDiedError):
                error = explain_death(self.frames, self.sampler, error)
            self.for_images.put(error)
            self.for_clouds.put(error)
            blank = plan_pixels(np.eye(3), (1, 1), (1, 1))
            return [_BLANK], *self._columns([blank])
        self._fed = slot
        self.pool.share(slot)
        delivery = Delivery(slot, metadata, self.layout.show(self.pool.memory(slot)))
        self.for_images.put(delivery)
        self.for_clouds.put(delivery)
        images = []
        for place in np.ndindex(metadata.lengths.shape):
            if place in metadata.oversized:
                images.append(np.frombuffer(metadata.oversized[place], np.uint8))
            else:
                assert delivery.arrays.encoded is not None
                images.append(delivery.arrays.encoded[place][: metadata.lengths[place]])
        plans = [
            plan_reduction(source)
            if self.frames.has_distorted_images
            else plan_pixels(source.network_from_original, source.original_size, source.size)
            for moment in metadata.sources
            for sample in moment
            for source in sample
        ]
        return images, *self._columns(plans)

    @property
    def plan_fields(self) -> tuple[str, ...]:
        """Of :class:`PixelPlan` that the graph is given; the warp is not DALI's where a lens is."""
        fields = "region_start", "region_end", "resized"
        return fields if self.frames.has_distorted_images else (*fields, "resized_from_network")

    def close(self) -> None:
        """End the workers."""
        self.workers.close()
        self.for_clouds.put(None)

    def _columns(self, plans: list[PixelPlan]) -> list[list[np.ndarray]]:
        return [[getattr(plan, name) for plan in plans] for name in self.plan_fields]


def plan_pixels(
    network_from_original: np.ndarray, original_size: tuple[int, int], size: tuple[int, int]
) -> PixelPlan:
    """Split a map into a resize and a warp.

    Args:
        network_from_original: ``(3, 3)`` affine, pixel centres at integers.
        original_size, size: height, width of the file and of the network's image [pixels].
    """
    corner = _shift(0.5, 0.5) @ network_from_original @ _shift(-0.5, -0.5)
    linear = corner[:2, :2]
    # linear = rotation @ diag(scale), a mirror being a negative first scale. What is no such
    # product (shear) is left to the warp.
    scale = np.hypot(linear[0], linear[1])
    scale[0] *= math.copysign(1.0, np.linalg.det(linear))
    angle = math.atan2(-linear[0, 1], linear[1, 1])
    cos, sin = math.cos(angle), math.sin(angle)
    unrotate = np.array([[cos, sin], [-sin, cos]])
    # The network's image before its rotation about the centre, with a margin for what the rotation
    # brings in at the corners and a pixel for the interpolation.
    network = np.array([size[1], size[0]], dtype=np.float64)
    offset = unrotate @ (corner[:2, 2] - network / 2) + network / 2
    margin = np.ceil((np.abs(unrotate) @ network - network) / 2 - 1e-6).clip(min=0) + (
        abs(sin) > 1e-9
    )
    edges = np.stack([offset, scale * original_size[::-1] + offset])
    low = np.maximum(np.floor(edges.min(axis=0) + 1e-6), -margin)
    high = np.minimum(np.ceil(edges.max(axis=0) - 1e-6), network + margin)
    if (high <= low).any():  # the image lies outside: read one pixel and put it far away
        return _plan(np.zeros(2), np.ones(2), np.ones(2), _shift(1e6, 1e6))
    resized_from_original = np.eye(3)
    resized_from_original[[0, 1], [0, 1]] = scale
    resized_from_original[:2, 2] = offset - low
    warp = _shift(-0.5, -0.5) @ resized_from_original @ np.linalg.inv(corner) @ _shift(0.5, 0.5)
    return _plan((low - offset) / scale, (high - offset) / scale, high - low, warp)


def plan_reduction(source: ImageSource) -> PixelPlan:
    """The whole image, by how much it can be reduced; what is left of the map is for the lens."""
    height, width = source.original_size
    reduction = choose_reduction(source.scale)
    whole = np.array([width, height], np.float64)
    resized = np.array([-(-width // reduction), -(-height // reduction)], np.float64)
    return _plan(np.zeros(2), whole, resized, np.eye(3))


def _room(frames: FrameSource) -> int:
    """Bytes for an encoded image: half as many again as the largest of the first sample has. What
    does not fit travels with the metadata."""
    sizes = [1024]
    for source in frames.frame(0, 0).images:
        if source.path.exists():
            sizes.append(source.path.stat().st_size)
    return max(sizes) * 3 // 2


def _plan(start: np.ndarray, end: np.ndarray, resized: np.ndarray, warp: np.ndarray) -> PixelPlan:
    """From x, y as matrices have them to the y, x of the operators."""
    start, end, resized = (np.ascontiguousarray(v[::-1], np.float32) for v in (start, end, resized))
    return PixelPlan(start, end, resized, warp.astype(np.float32))


def _shift(x: float, y: float) -> np.ndarray:
    return np.array([[1.0, 0.0, x], [0.0, 1.0, y], [0.0, 0.0, 1.0]])


# A black image of one pixel, in place of those that cannot be read.
_BLANK = np.frombuffer(b"P6 1 1 255\n\0\0\0", np.uint8)
