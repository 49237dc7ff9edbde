"""Loading without copies: worker processes write whole batches into slots of shared memory.

The workers leave images as uint8, a quarter of the size that the network takes. On a CPU the pass
that normalises the images also takes them out of the slot, and point clouds stay in the slot until
the model is done with them. On CUDA the slots are page-locked: a separate stream uploads a batch
while the previous one is trained on, and the GPU normalises.
"""

import math
import weakref
from collections import deque
from collections.abc import Generator

import numpy as np
import torch
from torch import Tensor

from bev_lightning.data.loaders.image_cache import ImageCache
from bev_lightning.data.loaders.protocol import BatchSampler, Loader
from bev_lightning.data.loaders.slot_batch import (
    BatchMetadata,
    SlotArrays,
    SlotLayout,
    assemble_batch,
    normalise,
    view_clouds,
    view_pixels,
)
from bev_lightning.data.loaders.slot_writer import SlotWriter
from bev_lightning.data.loaders.worker_pool import SlotPool, WorkerPool
from bev_lightning.data.samples.frame import FrameSource
from bev_lightning.structures import Batch, Inputs

# Slots in addition to those that the workers fill: for the model's current batch and its next one.
_SLOTS_IN_USE = 2


class SharedMemoryLoader(Loader):
    """Loads batches through shared memory (``loader=zero_copy``).

    Order, matrices and targets equal those of the reference loader. Images are decoded at reduced
    resolution and resampled once, bilinear: their pixels differ from the reference by about 1 of
    255 on average.
    """

    supports_image_cache = True

    def __init__(
        self,
        num_workers: int = 0,
        prefetch: int = 2,
        pin_memory: bool = False,
        full_decode: bool = False,
    ) -> None:
        super().__init__(num_workers, prefetch, pin_memory)
        self.full_decode = full_decode

    def open(
        self,
        frames: FrameSource,
        sampler: BatchSampler,
        start: int,
        stop: int,
        image_cache: ImageCache | None = None,
    ) -> Generator[Batch, None, None]:
        """Batches ``start`` .. ``stop - 1`` of the sampler; see :class:`Loader`."""
        changes_colours = frames.augment is not None and frames.augment.changes_colours
        layout = SlotLayout(frames.inputs, sampler.batch_size, changes_colours)
        pool = SlotPool(max(1, self.num_workers) * self.prefetch + _SLOTS_IN_USE, layout.num_bytes)
        writer = SlotWriter(frames, sampler, layout, pool, self.full_decode, image_cache)
        workers = WorkerPool(
            writer,
            range(start, stop),
            self.num_workers,
            pool,
            writer.describe_death,
            restart=frames.on_missing == "skip",
        )
        unload: _CudaUploader | _CpuUnloader = (
            _CudaUploader(pool, frames.inputs, self.pin_memory)
            if torch.cuda.is_available()
            else _CpuUnloader(pool, frames.inputs, sampler.batch_size)
        )
        ready: deque[Batch] = deque()
        try:
            for _ in range(start, stop):
                # A batch that has arrived is uploaded before the model gets the one before it.
                while not ready or (unload.runs_ahead and len(ready) < 2 and workers.is_ready()):
                    slot, metadata = next(workers)
                    self.stats.skipped.update(metadata.skipped)
                    self.stats.cache_hits += metadata.cache_hits
                    self.stats.cache_lookups += metadata.cache_lookups
                    ready.append(unload(slot, metadata, layout.view(pool.memory(slot))))
                yield ready.popleft()
        finally:
            workers.close()
            unload.close()


class _CpuUnloader:
    """Makes CPU batches of slots, in memory that is reused once a batch is garbage-collected.

    Point clouds stay in their slot. Images are normalised into memory that was used before, because
    the system takes longer to provide new pages than the images take. A caller who keeps more
    batches than there is such memory for gets copies, so that the workers never run out of slots.
    """

    runs_ahead = False

    def __init__(self, pool: SlotPool, inputs: Inputs, batch_size: int) -> None:
        self.pool = pool
        self.inputs = inputs
        self.num_slots_in_use = 0
        self.image_pool: SlotPool | None = None
        if inputs.camera is not None:
            num = (inputs.history + 1) * batch_size * len(inputs.camera.channels)
            self.image_pool = SlotPool(_SLOTS_IN_USE, num * 3 * math.prod(inputs.camera.size) * 4)

    def __call__(self, slot: int, metadata: BatchMetadata, arrays: SlotArrays) -> Batch:
        images = None
        if self.inputs.camera is not None:
            pixels = view_pixels(metadata, arrays)
            images = normalise(pixels, self.inputs.camera, self._image_memory(pixels))
        if self.num_slots_in_use < _SLOTS_IN_USE and (self.inputs.lidar or self.inputs.radar):
            clouds = view_clouds(metadata, arrays, self.inputs)
            self.num_slots_in_use += 1
            # All arrays of the slot are views of this base, and each keeps it alive.
            weakref.finalize(arrays.points.base, self._release, slot).atexit = False
        else:
            clouds = view_clouds(metadata, arrays, self.inputs, copy_to=torch.device("cpu"))
            self.pool.release(slot)
        return assemble_batch(metadata, images, clouds)

    def close(self) -> None:
        """Do nothing: the memory is freed with the batches."""

    def _image_memory(self, pixels: Tensor) -> Tensor | None:
        """float32 memory for as many normalised values as there are pixels; None if all is used."""
        assert self.image_pool is not None
        slot = self.image_pool.acquire()
        if slot is None:
            return None
        memory = self.image_pool.memory(slot)
        weakref.finalize(memory, self.image_pool.release, slot).atexit = False
        return torch.from_numpy(memory[: pixels.numel() * 4].view(np.float32))

    def _release(self, slot: int) -> None:
        self.num_slots_in_use -= 1
        self.pool.release(slot)


class _CudaUploader:
    """Uploads slots to the current CUDA device on a separate stream; a slot is released when its
    upload has finished."""

    runs_ahead = True

    def __init__(self, pool: SlotPool, inputs: Inputs, pin: bool) -> None:
        self.pool = pool
        self.inputs = inputs
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.stream = torch.cuda.Stream(self.device)
        self.running: deque[tuple[int, torch.cuda.Event]] = deque()  # slot, its end
        self.is_pinned = pin and pool.pin()

    def __call__(self, slot: int, metadata: BatchMetadata, arrays: SlotArrays) -> Batch:
        images = None
        consumer = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self.stream):
            if self.inputs.camera is not None:
                pixels = view_pixels(metadata, arrays).to(self.device, non_blocking=True)
                images = normalise(pixels, self.inputs.camera)
            batch = assemble_batch(metadata, images, view_clouds(metadata, arrays, self.inputs))
            batch = batch.to(self.device, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self.stream)
        consumer.wait_event(done)
        batch.record_stream(consumer)
        self.running.append((slot, done))
        # Wait for all but the last one, which may run while the model works.
        while len(self.running) > 1 or (self.running and self.running[0][1].query()):
            slot, done = self.running.popleft()
            done.synchronize()
            self.pool.release(slot)
        return batch

    def close(self) -> None:
        """Wait for running uploads and unlock the memory."""
        self.stream.synchronize()
        if self.is_pinned:
            self.pool.unpin()
