"""Loading without copies: worker processes write whole batches into slots of shared memory.

Workers read with :mod:`bev_lightning.data.loaders.decode` and leave images as uint8, a quarter of
what the network takes. On a CPU the one pass that normalises them also takes them out of the slot,
and point clouds stay where they are until the model is done with them. On CUDA the slots are
page-locked: a stream of its own uploads a batch while the one before is trained on, and the device
normalises.
"""

import math
import warnings
import weakref
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bev_lightning.data.loaders.decode import normalise
from bev_lightning.data.loaders.image_cache import ImageCache
from bev_lightning.data.loaders.protocol import BatchSampler, LoaderStats
from bev_lightning.data.loaders.slot_batch import (
    BatchMetadata,
    SlotArrays,
    SlotLayout,
    SlotWriter,
    assemble_batch,
    explain_death,
    show_clouds,
)
from bev_lightning.data.loaders.worker_pool import SlotPool, WorkerDiedError, WorkerPool
from bev_lightning.data.samples.frame import FrameSource
from bev_lightning.structures import Batch, Inputs

# Slots beyond those that workers fill: for the batch the model has, and the one it gets next.
_LENT = 2


class SharedMemoryLoader:
    """Batches through shared memory, with the same order, matrices and targets as the plain
    loader's.

    Pixels come from a coarser decode and one bilinear resampling: real images differ from the plain
    loader's by about 1 of 255 in the mean.

    Attributes:
        num_workers: processes; 0 reads in this one.
        prefetch: batches that each worker may make ahead.
        pin_memory: page-locked slots; without CUDA it does nothing.
        full_decode: decode every pixel of an image's file, however small the network's image.
        stats: counters.
    """

    supports_image_cache = True

    def __init__(
        self,
        num_workers: int = 0,
        prefetch: int = 2,
        pin_memory: bool = False,
        full_decode: bool = False,
    ) -> None:
        self.num_workers = num_workers
        self.prefetch = prefetch
        self.pin_memory = pin_memory
        self.full_decode = full_decode
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

        Closing the iterator ends the worker processes.

        Raises:
            InputError: a file cannot be used, or a worker was killed; names the samples.
        """
        changes = frames.augment is not None and frames.augment.changes_colours
        layout = SlotLayout(frames.inputs, sampler.batch_size, changes)
        pool = SlotPool(max(1, self.num_workers) * self.prefetch + _LENT, layout.num_bytes)
        workers = WorkerPool(
            SlotWriter(frames, sampler, layout, pool, self.full_decode, image_cache),
            range(start, stop),
            self.num_workers,
            pool,
            restart=frames.on_missing == "skip",
        )
        unload: _Uploads | _Loans = (
            _Uploads(pool, frames.inputs, self.pin_memory)
            if torch.cuda.is_available()
            else _Loans(pool, frames.inputs, sampler.batch_size)
        )
        ready: deque[Batch] = deque()
        try:
            for _ in range(start, stop):
                # What is there already is uploaded before the model gets the batch before it.
                while not ready or (unload.runs_ahead and len(ready) < 2 and workers.is_ready()):
                    slot, metadata = next(workers)
                    for skipped in metadata.skipped:
                        self.stats.skipped.update(skipped)
                    self.stats.cache_hits += metadata.cache_hits
                    self.stats.cache_lookups += metadata.cache_lookups
                    ready.append(unload(slot, metadata, layout.show(pool.memory(slot))))
                yield ready.popleft()
        except WorkerDiedError as died:
            raise explain_death(frames, sampler, died) from None
        finally:
            workers.close()
            unload.close()
            if workers.num_restarts:
                warnings.warn(
                    f"{workers.num_restarts} loader processes were killed, perhaps for want of "
                    f"memory, and replaced by others (data.on_missing=skip)",
                    stacklevel=2,
                )


class _Loans:
    """Batches on the CPU in memory that is used again when nobody has them any more.

    Point clouds stay in their slot, and images are normalised into memory that was touched before,
    for the system takes longer to give out new pages than the images take. A caller who keeps more
    batches than can be lent gets memory of its own, so that the workers never run out of slots.
    """

    runs_ahead = False

    def __init__(self, pool: SlotPool, inputs: Inputs, batch_size: int) -> None:
        self.pool = pool
        self.inputs = inputs
        self.num_lent = 0
        self.images: SlotPool | None = None
        if inputs.camera is not None:
            num = (inputs.history + 1) * batch_size * len(inputs.camera.channels)
            self.images = SlotPool(_LENT, num * 3 * math.prod(inputs.camera.size) * 4)

    def __call__(self, slot: int, metadata: BatchMetadata, arrays: SlotArrays) -> Batch:
        images = None
        if self.images is not None:
            images = _normalise(_pixels(metadata, arrays), self.inputs, self._lend_images(metadata))
        clouds = show_clouds(metadata, arrays, self.inputs)
        if self.num_lent < _LENT and (self.inputs.lidar or self.inputs.radar):
            self.num_lent += 1
            # All arrays of the slot show this one's memory, and each keeps it alive.
            weakref.finalize(arrays.points.base, self._return, slot).atexit = False
        else:
            clouds = [(_copy(points), _copy(radar)) for points, radar in clouds]
            self.pool.release(slot)
        return assemble_batch(metadata, images, clouds)

    def close(self) -> None:
        """Nothing: memory ends with who has it."""

    def _lend_images(self, metadata: BatchMetadata) -> Tensor | None:
        """``(T * B * N, 3, H, W)`` float32 for a batch's images."""
        assert self.images is not None and self.inputs.camera is not None
        assert metadata.image_from_lidar is not None
        slot = self.images.take()
        if slot is None:
            return None
        memory = self.images.memory(slot)
        weakref.finalize(memory, self.images.release, slot).atexit = False
        num = math.prod(metadata.image_from_lidar.shape[:3])
        shape = num, 3, *self.inputs.camera.size
        return torch.from_numpy(memory[: math.prod(shape) * 4].view(np.float32)).view(shape)

    def _return(self, slot: int) -> None:
        self.num_lent -= 1
        self.pool.release(slot)


@dataclass(frozen=True)
class _Upload:
    slot: int
    done: torch.cuda.Event


class _Uploads:
    """Batches on the current CUDA device, uploaded on a stream of their own; a slot is free when
    its upload is done."""

    runs_ahead = True

    def __init__(self, pool: SlotPool, inputs: Inputs, pin: bool) -> None:
        self.pool = pool
        self.inputs = inputs
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.stream = torch.cuda.Stream(self.device)
        self.running: deque[_Upload] = deque()
        self.is_pinned = pin and pool.pin()

    def __call__(self, slot: int, metadata: BatchMetadata, arrays: SlotArrays) -> Batch:
        images = None
        consumer = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self.stream):
            if self.inputs.camera is not None:
                pixels = _pixels(metadata, arrays).to(self.device, non_blocking=True)
                images = _normalise(pixels, self.inputs)
            batch = assemble_batch(metadata, images, show_clouds(metadata, arrays, self.inputs))
            batch = batch.to(self.device, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self.stream)
        consumer.wait_event(done)
        batch.record_stream(consumer)
        self.running.append(_Upload(slot, done))
        # All but the youngest: it may run while the model works.
        while len(self.running) > 1 or (self.running and self.running[0].done.query()):
            upload = self.running.popleft()
            upload.done.synchronize()
            self.pool.release(upload.slot)
        return batch

    def close(self) -> None:
        """Wait for what runs and unlock the memory."""
        self.stream.synchronize()
        if self.is_pinned:
            self.pool.unpin()


def _pixels(metadata: BatchMetadata, arrays: SlotArrays) -> Tensor:
    """``(T, B, N, H, W, 3)`` with as many samples as there are."""
    assert arrays.pixels is not None
    return torch.from_numpy(arrays.pixels)[:, : metadata.batches[0].size]


def _normalise(pixels: Tensor, inputs: Inputs, out: Tensor | None = None) -> Tensor:
    """``(T, B, N, 3, H, W)`` float32."""
    assert inputs.camera is not None
    images = normalise(pixels.reshape(-1, *pixels.shape[3:]), inputs.camera, out)
    return images.view(*pixels.shape[:3], *images.shape[1:])


def _copy(cloud: Any) -> Any:
    return cloud if cloud is None else type(cloud)(cloud.features.clone(), cloud.count)
