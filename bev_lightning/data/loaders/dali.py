"""Loading with NVIDIA DALI: worker processes read the files, a compiled graph makes the images.

The graph decodes, resizes the region that the network sees with antialiasing, and warps once
(rotation and crop; the resize mirrors), for all cameras of a batch together. With CUDA it decodes
and runs on the GPU, else on the CPU.

All files are read and checked in the worker processes, where file and sample are known: an error of
DALI's decoder names neither and ends the pipeline. Point clouds do not pass through the graph,
because DALI has no operator that keeps an unknown number of rows.

The workers are those of :mod:`bev_lightning.data.loaders.worker_pool`. DALI's own
(``parallel=True``) hang when one of them is killed at the wrong moment, and with CUDA they must be
spawned, which imports torch again for seconds each time a loader opens.
"""

import contextlib
import itertools
import math
import queue
import threading
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np
import torch
from nvidia.dali import fn, types
from nvidia.dali.pipeline import Pipeline
from torch import Tensor

from bev_lightning.data.camera_models import undistortion_map
from bev_lightning.data.loaders.image_cache import ImageCache
from bev_lightning.data.loaders.images import read_encoded, read_image
from bev_lightning.data.loaders.protocol import BatchSampler, Loader
from bev_lightning.data.loaders.slot_batch import (
    BatchMetadata,
    Clouds,
    SlotArrays,
    SlotLayout,
    assemble_batch,
    normalise,
    view_clouds,
)
from bev_lightning.data.loaders.slot_writer import SlotWriter
from bev_lightning.data.loaders.worker_pool import SlotPool, WorkerPool
from bev_lightning.data.samples.file_sources import ImageSource
from bev_lightning.data.samples.frame import FrameSource
from bev_lightning.data.transforms.photometric import apply_colour_changes
from bev_lightning.errors import InputError
from bev_lightning.structures import Batch, CameraInput

_T = TypeVar("_T")
# A black image of one pixel, for the graph to decode if a batch cannot be read.
_BLANK = np.frombuffer(b"P6 1 1 255\n\0\0\0", np.uint8)


class DaliLoader(Loader):
    """Loads batches through a DALI pipeline (``loader=dali`` and ``loader=dali_prefetch``).

    Order, matrices and targets equal those of the reference loader. Images are resampled by DALI's
    filters of the same kind (bicubic with antialiasing, then bilinear where an image is rotated):
    real images differ from the reference by 0.1 to 0.5 of 255 on average, and by 6 at most.

    With CUDA, batches arrive on the current device.

    Attributes:
        num_workers, prefetch: also the threads of the graph, and the batches that it makes ahead.
        image_queue, cloud_queue: batches of finished images, and of point clouds, that background
            threads may make ahead; 0 makes them on demand. Images are smaller and take less
            regular time, so their queue should be the longer one.
    """

    def __init__(
        self,
        num_workers: int = 2,
        prefetch: int = 2,
        pin_memory: bool = False,
        image_queue: int = 0,
        cloud_queue: int = 0,
    ) -> None:
        super().__init__(num_workers, prefetch, pin_memory)
        if (image_queue < 1) != (cloud_queue < 1):
            raise InputError(
                f"loader.image_queue={image_queue} and loader.cloud_queue={cloud_queue} must be "
                f"used together: set both to at least 1, or both to 0"
            )
        self.image_queue = image_queue
        self.cloud_queue = cloud_queue

    def open(
        self,
        frames: FrameSource,
        sampler: BatchSampler,
        start: int,
        stop: int,
        image_cache: ImageCache | None = None,
    ) -> Generator[Batch, None, None]:
        """Batches ``start`` .. ``stop - 1`` of the sampler; see :class:`Loader`."""
        cuda = torch.cuda.is_available()
        device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        # The workers start first: a process should be forked before it has the graph's threads.
        ahead = self.prefetch + self.image_queue + 2
        source = EncodedImageSource(
            frames, sampler, start, stop, self.num_workers, self.prefetch, ahead
        )
        pinned = self.pin_memory and cuda and source.pool.pin()
        images: Iterator[tuple[BatchMetadata, Tensor | None]] = self._make_images(
            source, device, stop
        )
        clouds: Iterator[Clouds] = self._upload_clouds(source, device)
        threads: list[_BackgroundIterator[Any]] = []
        if self.image_queue:
            threads = [
                _BackgroundIterator(images, self.image_queue),
                _BackgroundIterator(clouds, self.cloud_queue),
            ]
            images, clouds = threads
        try:
            for _ in range(start, stop):
                metadata, pixels = next(images)
                self.stats.skipped.update(metadata.skipped)
                batch = assemble_batch(metadata, pixels, next(clouds)).to(device, non_blocking=True)
                if cuda and threads:
                    # Made on the threads' streams, which have finished.
                    batch.record_stream(torch.cuda.current_stream(device))
                yield batch
                del batch, pixels
        finally:
            for thread in threads:
                thread.stop()
            source.close()
            for thread in threads:
                thread.join()
            if isinstance(images, Generator):
                images.close()
            if pinned:
                source.pool.unpin()

    def _make_images(
        self, source: "EncodedImageSource", device: torch.device, stop: int
    ) -> Iterator[tuple[BatchMetadata, Tensor | None]]:
        """Each micro-step's metadata and its images ``(T, B, N, 3, H, W)`` on the device."""
        inputs = source.frames.inputs
        if inputs.camera is None:
            for _ in source.steps:
                source()
                yield source.next_metadata(), None
            return
        stream = self._choose_stream(device)
        pipeline = _build_pipeline(source, device, max(1, self.num_workers), self.prefetch)
        for micro_step in source.steps:
            with torch.cuda.stream(stream):
                try:
                    # Bound to the stream: DALI reuses the memory when the stream is done with it.
                    (outputs,) = pipeline.run(stream)
                except RuntimeError as error:
                    if "decoders.image" not in str(error):
                        raise
                    ahead = range(micro_step, min(stop, micro_step + self.prefetch + 1))
                    _raise_for_image(source.frames, source.sampler, ahead)
                metadata = source.next_metadata()
                if source.frames.has_distorted_images:
                    pixels = _undistort_all(metadata, outputs)
                else:
                    pixels = torch.from_dlpack(outputs.as_tensor())  # DALI's own memory
                images = normalise(pixels, inputs.camera)
                shape = metadata.counts.encoded_bytes.shape  # (T, B, N)
                images = images.view(*shape, *images.shape[1:])
                for row, changes in zip(images, metadata.colours, strict=True):
                    for sample_images, change in zip(row, changes, strict=True):
                        if change:
                            apply_colour_changes(change, sample_images, inputs.camera)
                del outputs, pixels
            if stream is not None and self.image_queue:
                stream.synchronize()
            yield metadata, images
            del images
        # DALI frees memory and threads with the last reference.
        del pipeline

    def _upload_clouds(
        self, source: "EncodedImageSource", device: torch.device
    ) -> Iterator[Clouds]:
        """Each micro-step's point clouds on the device; their slot is then released."""
        inputs, stream = source.frames.inputs, self._choose_stream(device)
        for _ in source.steps:
            pending = source.pending_clouds.get()
            if pending is None:
                return
            if isinstance(pending, Exception):
                raise pending
            with torch.cuda.stream(stream):
                clouds = view_clouds(pending.metadata, pending.arrays, inputs, copy_to=device)
            source.pool.release(pending.slot)
            yield clouds

    def _choose_stream(self, device: torch.device) -> "torch.cuda.Stream | None":
        """A separate stream for each thread, so that the model waits for no batch but its own."""
        if device.type != "cuda":
            return None
        return torch.cuda.Stream(device) if self.image_queue else torch.cuda.current_stream(device)


class PixelPlan(NamedTuple):
    """An affine pixel map as two operators: an antialiased resize of a region, then one warp.

    A warp alone would alias, because it reads four pixels however far it shrinks. So the region of
    the original that the network sees is first resized to the network's scale. If the map has no
    rotation, the resized pixels coincide with the network's and the warp only shifts them. The warp
    gets the exact remainder, so the geometry is exact however well the map can be split.

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
class PendingBatch:
    """A micro-step's metadata and its slot, which is held until it is released."""

    slot: int
    metadata: BatchMetadata
    arrays: SlotArrays


class EncodedImageSource:
    """DALI's external source: the encoded images of one micro-step after the other.

    Attributes:
        steps: the micro-steps.
        pending_images, pending_clouds: batches of the micro-steps that DALI works on, oldest first,
            or the exception with which a micro-step ended; None at the end. Each has one consumer.
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
            prefetch: micro-steps that each worker may read ahead.
            ahead: micro-steps between DALI and the consumer of the clouds at most.
        """
        self.frames = frames
        self.sampler = sampler
        self.steps = range(start, stop)
        self.layout = SlotLayout(
            frames.inputs, sampler.batch_size, encoded_bytes=_encoded_capacity(frames)
        )
        self.pool = SlotPool(max(1, num_workers) * prefetch + ahead, self.layout.num_bytes)
        writer = SlotWriter(frames, sampler, self.layout, self.pool)
        self.workers = WorkerPool(
            writer,
            self.steps,
            num_workers,
            self.pool,
            writer.describe_death,
            restart=frames.on_missing == "skip",
        )
        self.pending_images: queue.SimpleQueue[PendingBatch | Exception] = queue.SimpleQueue()
        self.pending_clouds: queue.SimpleQueue[PendingBatch | Exception | None] = (
            queue.SimpleQueue()
        )
        self._last_slot: int | None = None

    def __call__(self) -> tuple[list[np.ndarray], ...]:
        """The encoded images, and the fields of the :class:`PixelPlan` of each.

        The images of the oldest frames of all samples come first, those of the current frames last;
        within a sample camera by camera. An error is raised only when its micro-step is due, since
        DALI reads ahead.

        Raises:
            StopIteration: past the last micro-step.
        """
        if self._last_slot is not None:  # DALI has copied it
            self.pool.release(self._last_slot)
            self._last_slot = None
        try:
            slot, metadata = next(self.workers)
        except (InputError, RuntimeError) as error:
            self.pending_images.put(error)
            self.pending_clouds.put(error)
            return self._columns([_BLANK], [plan_pixels(np.eye(3), (1, 1), (1, 1))])
        self._last_slot = slot
        self.pool.share(slot)
        pending = PendingBatch(slot, metadata, self.layout.view(self.pool.memory(slot)))
        self.pending_images.put(pending)
        self.pending_clouds.put(pending)
        images, counts = [], metadata.counts
        for index, size in np.ndenumerate(counts.encoded_bytes):
            if size > self.layout.encoded_bytes:
                images.append(np.frombuffer(counts.oversized[index], np.uint8))
            else:
                images.append(pending.arrays.images[index][:size])
        plans = [
            plan_reduction(source)
            if self.frames.has_distorted_images
            else plan_pixels(source.network_from_original, source.original_size, source.size)
            for row in metadata.sources
            for sample in row
            for source in sample
        ]
        return self._columns(images, plans)

    @property
    def num_columns(self) -> int:
        """Inputs of the graph. It does not warp images that are undistorted afterwards."""
        return 4 if self.frames.has_distorted_images else 5

    def next_metadata(self) -> BatchMetadata:
        """Metadata of the images that the graph has returned last."""
        pending = self.pending_images.get_nowait()
        if isinstance(pending, Exception):
            raise pending
        return pending.metadata

    def close(self) -> None:
        """End the workers."""
        self.workers.close()
        self.pending_clouds.put(None)

    def _columns(
        self, images: list[np.ndarray], plans: list[PixelPlan]
    ) -> tuple[list[np.ndarray], ...]:
        columns = images, *(list(column) for column in zip(*plans, strict=True))
        return columns[: self.num_columns]


def _build_pipeline(
    source: EncodedImageSource, device: torch.device, num_threads: int, prefetch: int
) -> Pipeline:
    """The graph. It makes images ``(S, H, W, 3)`` uint8, or resized ones that are still to be
    undistorted."""
    inputs, num_frames = source.frames.inputs, source.frames.inputs.history + 1
    assert inputs.camera is not None
    pipeline = Pipeline(
        batch_size=source.layout.batch_size * num_frames * len(inputs.camera.channels),
        num_threads=num_threads,
        device_id=device.index if device.type == "cuda" else None,
        prefetch_queue_depth=prefetch,
    )
    byte, real = types.DALIDataType.UINT8, types.DALIDataType.FLOAT
    kinds = [(byte, 1), (real, 1), (real, 1), (real, 1), (real, 2)][: source.num_columns]
    with pipeline:
        pixels = fn.external_source(
            source,
            num_outputs=len(kinds),
            batch=True,
            dtype=[kind for kind, _ in kinds],
            ndim=[ndim for _, ndim in kinds],
        )
        pipeline.set_outputs(make_images(pixels, inputs.camera, device))
    pipeline.build()
    return pipeline


def make_images(pixels: Sequence[Any], camera: CameraInput, device: torch.device) -> Any:
    """Add the operators from an encoded image and its pixel plan to ``(H, W, 3)`` uint8.

    Args:
        pixels: nodes of the image's bytes and of the fields of :class:`PixelPlan`; without the
            last one there is no warp.
    """
    encoded, start, end, size, *warp = pixels
    decoder = "mixed" if device.type == "cuda" else "cpu"
    # As in PIL and in the calibrations, the EXIF orientation is ignored.
    images: Any = fn.decoders.image(
        encoded, device=decoder, output_type=types.DALIImageType.RGB, adjust_orientation=False
    )
    images = fn.resize(
        images,
        roi_start=start,
        roi_end=end,
        size=size,
        interp_type=types.DALIInterpType.INTERP_CUBIC,
        antialias=True,
    )
    if not warp:
        return images
    return fn.experimental.warp_perspective(
        images,
        matrix=warp[0],
        size=list(camera.size),
        pixel_origin="center",
        interp_type=types.DALIInterpType.INTERP_LINEAR,
        fill_value=0,
    )


def plan_pixels(
    network_from_original: np.ndarray, original_size: tuple[int, int], size: tuple[int, int]
) -> PixelPlan:
    """Split an affine pixel map into a resize of a region and a warp.

    Args:
        network_from_original: ``(3, 3)`` affine, pixel centres at integers.
        original_size, size: height, width of the file and of the network's image [pixels].
    """
    corner = _shift(0.5, 0.5) @ network_from_original @ _shift(-0.5, -0.5)
    linear = corner[:2, :2]
    # linear = rotation @ diag(scale), where a mirror is a negative first scale. The warp does what
    # is no such product (shear).
    scale = np.hypot(linear[0], linear[1])
    scale[0] *= math.copysign(1.0, np.linalg.det(linear))
    angle = math.atan2(-linear[0, 1], linear[1, 1])
    cos, sin = math.cos(angle), math.sin(angle)
    unrotate = np.array([[cos, sin], [-sin, cos]])
    # The network's image before its rotation about the centre, with a margin for the corners that
    # the rotation moves into it, and a pixel for the interpolation.
    network = np.array([size[1], size[0]], dtype=np.float64)
    offset = unrotate @ (corner[:2, 2] - network / 2) + network / 2
    margin = np.ceil((np.abs(unrotate) @ network - network) / 2 - 1e-6).clip(min=0) + (
        abs(sin) > 1e-9
    )
    edges = np.stack([offset, scale * original_size[::-1] + offset])
    low = np.maximum(np.floor(edges.min(axis=0) + 1e-6), -margin)
    high = np.minimum(np.ceil(edges.max(axis=0) - 1e-6), network + margin)
    if (high <= low).any():  # the image is outside: read one pixel and move it far away
        return _make_plan(np.zeros(2), np.ones(2), np.ones(2), _shift(1e6, 1e6))
    resized_from_original = np.eye(3)
    resized_from_original[[0, 1], [0, 1]] = scale
    resized_from_original[:2, 2] = offset - low
    warp = _shift(-0.5, -0.5) @ resized_from_original @ np.linalg.inv(corner) @ _shift(0.5, 0.5)
    return _make_plan((low - offset) / scale, (high - offset) / scale, high - low, warp)


def plan_reduction(source: ImageSource) -> PixelPlan:
    """Resize the whole image by its reduction; undistortion does the rest of the map."""
    whole = np.array(source.original_size[::-1], np.float64)
    return _make_plan(np.zeros(2), whole, np.ceil(whole / source.reduction), np.eye(3))


def undistort_on_device(source: ImageSource, pixels: Tensor, reduction: int = 1) -> Tensor:
    """:func:`bev_lightning.data.loaders.images.undistort` with torch, on the device of ``pixels``;
    equal to 1 of 255."""
    height, width, _ = pixels.shape
    where = undistortion_map(
        source.camera_model,
        source.network_from_original,
        source.size,
        (1 / reduction, 1 / reduction),
        pixels.device,
    )
    # grid_sample's -1 and 1 are the centres of the first and the last pixel.
    where = where * (2 / torch.tensor([max(width - 1, 1), max(height - 1, 1)])).to(where) - 1
    image = pixels.permute(2, 0, 1)[None].float()
    mapped = torch.nn.functional.grid_sample(image, where[None], align_corners=True)
    return mapped[0].permute(1, 2, 0).round().to(torch.uint8)


def _make_plan(
    start: np.ndarray, end: np.ndarray, resized: np.ndarray, warp: np.ndarray
) -> PixelPlan:
    """From the x, y of matrices to the y, x of DALI's operators."""
    start, end, resized = (np.ascontiguousarray(v[::-1], np.float32) for v in (start, end, resized))
    return PixelPlan(start, end, resized, warp.astype(np.float32))


def _shift(x: float, y: float) -> np.ndarray:
    return np.array([[1.0, 0.0, x], [0.0, 1.0, y], [0.0, 0.0, 1.0]])


class _BackgroundIterator(Iterator[_T]):
    """Runs an iterator in a thread, up to a bounded number of items ahead.

    The iterator's exception is raised at the position of its item.
    """

    def __init__(self, items: Iterator[_T], depth: int) -> None:
        self._queue: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(depth)
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(items,), daemon=True)
        self._thread.start()

    def __next__(self) -> _T:
        item, error = self._queue.get()
        if error is not None:
            self._queue.put((None, error))  # for the next call
            raise error
        return item  # type: ignore[no-any-return]

    def stop(self) -> None:
        """Let the thread end after its current item."""
        self._is_stopped.set()

    def join(self) -> None:
        """Wait for the end of the thread; queued items are dropped, so that it is not blocked."""
        while self._thread.is_alive():
            with contextlib.suppress(queue.Empty):
                self._queue.get(timeout=0.05)

    def _run(self, items: Iterator[_T]) -> None:
        try:
            for item in items:
                self._queue.put((item, None))
                if self._is_stopped.is_set():
                    return
        except BaseException as error:
            self._queue.put((None, error))
        else:
            self._queue.put((None, StopIteration()))


def _encoded_capacity(frames: FrameSource) -> int:
    """Bytes per encoded image in a slot: 1.5 times the largest image of the first sample. Larger
    images are sent with the metadata."""
    paths = [source.path for source in frames.frame(0, 0).images]
    return max([1024, *(path.stat().st_size for path in paths if path.exists())]) * 3 // 2


def _undistort_all(metadata: BatchMetadata, outputs: Any) -> Tensor:
    """Undistorted images ``(S, H, W, 3)`` uint8 of the resized ones. DALI has a remap for the GPU
    only."""
    sources = (source for row in metadata.sources for sample in row for source in sample)
    return torch.stack(
        [
            undistort_on_device(source, torch.from_dlpack(outputs[number]), source.reduction)
            for number, source in enumerate(sources)
        ]
    )


def _raise_for_image(frames: FrameSource, sampler: BatchSampler, micro_steps: range) -> NoReturn:
    """Find the image that DALI's decoder failed at, which its error does not name.

    Raises:
        InputError: always.
    """
    tokens = []
    for sample in itertools.chain.from_iterable(map(sampler.batch, micro_steps)):
        frame = frames.frame(*sample)
        tokens.append(frame.sample_token)
        for member in (*frame.history, frame):
            for source in member.images:
                try:
                    read_encoded(source)
                except InputError:
                    continue  # its sample was skipped, so it never reached the decoder
                try:
                    read_image(source)
                except InputError as error:
                    raise InputError(f"sample {member.sample_token}: {error}") from None
    raise InputError(
        f"DALI cannot decode an image of the samples {', '.join(tokens)}, though PIL can: save it "
        f"as JPEG, or set loader=torch"
    )
