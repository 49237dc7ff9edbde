"""Loading with NVIDIA DALI: worker processes read the files, a compiled graph makes the pixels.

The graph decodes, resizes the region that the network sees with antialiasing and warps once
(rotation and placement; a mirror is part of the resize), all cameras of a batch together. Where
CUDA is, the decoder is the GPU's and all after it runs there; else the same graph runs on the CPU.
"""

from collections.abc import Generator, Iterator, Sequence
from typing import Any, NoReturn

import torch
from nvidia.dali import fn, types
from nvidia.dali.pipeline import Pipeline
from torch import Tensor

from bev_lightning.data.loaders.ahead import Ahead
from bev_lightning.data.loaders.dali_source import Delivery, EncodedSource
from bev_lightning.data.loaders.decode import normalise, read_encoded
from bev_lightning.data.loaders.image_cache import ImageCache
from bev_lightning.data.loaders.protocol import BatchSampler, LoaderStats
from bev_lightning.data.loaders.slot_batch import BatchMetadata, assemble_batch, show_clouds
from bev_lightning.data.loaders.torch import read_image
from bev_lightning.data.loaders.undistort import undistort, undistort_on_device
from bev_lightning.data.samples.frame import FrameSource
from bev_lightning.data.transforms.photometric import apply_colour_changes
from bev_lightning.errors import InputError
from bev_lightning.structures import Batch, CameraInput, Points, Radar

Clouds = list[tuple[Points | None, Radar | None]]


class DaliLoader:
    """Batches through a DALI pipeline, equal to the plain loader's.

    Order, matrices and targets are the same to the bit. Pixels come from another resampler of the
    same kind (bicubic with antialiasing, then bilinear where an image is rotated): real images
    differ by 0.1 to 0.5 of 255 in the mean and by 6 at most.

    On CUDA a batch arrives on the current device.

    Attributes:
        num_workers: processes that read, and threads of the graph; 0 reads in this process.
        prefetch: batches that each worker may hold ready; the graph makes as many ahead.
        pin_memory: page-locked slots of the workers; without CUDA it does nothing.
        image_queue, cloud_queue: batches of finished images, and of point clouds, that threads of
            their own may have ready; 0: made when they are asked for. Images are the smaller and
            the less steady, so that their queue is to be the longer.
        stats: counters.
    """

    supports_image_cache = False
    full_decode = True

    def __init__(
        self,
        num_workers: int = 2,
        prefetch: int = 2,
        pin_memory: bool = False,
        image_queue: int = 0,
        cloud_queue: int = 0,
    ) -> None:
        if num_workers < 0 or prefetch < 1 or (image_queue < 1) != (cloud_queue < 1):
            raise InputError(
                f"loader.num_workers={num_workers}, loader.prefetch={prefetch}, loader.image_queue="
                f"{image_queue} and loader.cloud_queue={cloud_queue} do not work with DALI: give 0 "
                f"or more workers, a prefetch of 1 or more, and queues of 1 or more or both 0"
            )
        self.num_workers = num_workers
        self.prefetch = prefetch
        self.pin_memory = pin_memory
        self.image_queue = image_queue
        self.cloud_queue = cloud_queue
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
        cuda = torch.cuda.is_available()
        device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        # The workers start first: a process is best forked before it has the graph's threads.
        source = EncodedSource(
            frames,
            sampler,
            start,
            stop,
            self.num_workers,
            self.prefetch,
            ahead=self.prefetch + self.image_queue + 2,
        )
        pinned = self.pin_memory and cuda and source.pool.pin()
        images: Iterator[tuple[BatchMetadata, Tensor | None]] = self._make_images(
            source, device, stop
        )
        clouds: Iterator[Clouds] = self._take_clouds(source, device)
        threads: list[Ahead[Any]] = []
        if self.image_queue:
            threads = [Ahead(images, self.image_queue), Ahead(clouds, self.cloud_queue)]
            images, clouds = threads
        try:
            for _ in range(start, stop):
                metadata, pixels = next(images)
                for skipped in metadata.skipped:
                    self.stats.skipped.update(skipped)
                batch = assemble_batch(metadata, pixels, next(clouds)).to(device, non_blocking=True)
                if cuda and threads:
                    # Made on streams of the threads, which have finished.
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
        self, source: EncodedSource, device: torch.device, stop: int
    ) -> Iterator[tuple[BatchMetadata, Tensor | None]]:
        """Each micro-step's metadata and its images ``(T, B, N, 3, H, W)`` on the device."""
        inputs = source.frames.inputs
        if inputs.camera is None:
            for _ in source.steps:
                source()
                yield _take(source).metadata, None
            return
        stream = self._choose_stream(device)
        pipeline = build_pipeline(
            source, source.layout.batch_size, device, max(1, self.num_workers), self.prefetch
        )
        for micro_step in source.steps:
            with torch.cuda.stream(stream):
                try:
                    # Bound to the stream: DALI takes the memory back when that is done with it.
                    (outputs,) = pipeline.run(stream)
                except RuntimeError as error:
                    if "decoders.image" not in str(error):
                        raise
                    ahead = range(micro_step, min(stop, micro_step + self.prefetch + 1))
                    _blame_image(source.frames, source.sampler, ahead)
                metadata = _take(source).metadata
                if source.frames.has_distorted_images:
                    pixels = _straighten(metadata, outputs)
                else:
                    pixels = torch.from_dlpack(outputs.as_tensor())  # DALI's own memory
                images = normalise(pixels, inputs.camera)
                images = images.view(*metadata.lengths.shape, *images.shape[1:])
                for moment, changes in zip(images, metadata.colours, strict=True):
                    for seen, change in zip(moment, changes, strict=True):
                        if change:
                            apply_colour_changes(change, seen, inputs.camera)
                del outputs, pixels
            if stream is not None and self.image_queue:
                stream.synchronize()
            yield metadata, images
            del images
        # DALI frees memory and threads with the last name.
        del pipeline

    def _take_clouds(self, source: EncodedSource, device: torch.device) -> Iterator[Clouds]:
        """Each micro-step's point clouds on the device, out of their slot, which is then free."""
        inputs, stream = source.frames.inputs, self._choose_stream(device)
        for _ in source.steps:
            delivery = source.for_clouds.get()
            if delivery is None:
                return
            if isinstance(delivery, Exception):
                raise delivery
            with torch.cuda.stream(stream):
                clouds = [
                    (_move(points, device), _move(radar, device))
                    for points, radar in show_clouds(delivery.metadata, delivery.arrays, inputs)
                ]
            source.pool.release(delivery.slot)
            yield clouds

    def _choose_stream(self, device: torch.device) -> "torch.cuda.Stream | None":
        """A thread's own on CUDA, so that the model never waits for a batch that is not due."""
        if device.type != "cuda":
            return None
        return torch.cuda.Stream(device) if self.image_queue else torch.cuda.current_stream(device)


def build_pipeline(
    source: EncodedSource,
    batch_size: int,
    device: torch.device,
    num_threads: int,
    prefetch: int,
) -> Pipeline:
    """The graph; its output are images ``(S, H, W, 3)`` uint8, or, where lenses bend them, of
    their own sizes and still bent.

    Args:
        source: gives the inputs.
        batch_size: samples of a batch at most.
        device: where images are made.
        num_threads: of the graph on the CPU.
        prefetch: batches made ahead.
    """
    inputs = source.frames.inputs
    assert inputs.camera is not None
    pipeline = Pipeline(
        batch_size=batch_size * (inputs.history + 1) * len(inputs.camera.channels),
        num_threads=num_threads,
        device_id=device.index if device.type == "cuda" else None,
        prefetch_queue_depth=prefetch,
    )
    byte, real = types.DALIDataType.UINT8, types.DALIDataType.FLOAT
    kinds = [(byte, 1), (real, 1), (real, 1), (real, 1), (real, 2)]
    kinds = kinds[: 1 + len(source.plan_fields)]
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
    """The part of the graph that makes ``(H, W, 3)`` uint8 of an encoded image and its pixel plan.

    Args:
        pixels: nodes of the image's bytes and of the fields of :class:`PixelPlan`; without the
            last one it ends with the resize.
        camera: size.
        device: where it runs.
    """
    encoded, start, end, size, *warp = pixels
    decoder = "mixed" if device.type == "cuda" else "cpu"
    # PIL ignores the orientation that EXIF claims, and so do the calibrations.
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


def _straighten(metadata: BatchMetadata, outputs: Any) -> Tensor:
    """``(S, H, W, 3)`` uint8 of images as they were resized. Not DALI's: it has a remap for the GPU
    only."""
    mapped = []
    sources = (source for moment in metadata.sources for sample in moment for source in sample)
    for place, source in enumerate(sources):
        image = torch.from_dlpack(outputs[place])
        if image.is_cuda:
            mapped.append(undistort_on_device(source, image))
        else:
            mapped.append(torch.from_numpy(undistort(source, image.numpy())))
    return torch.stack(mapped)


def _take(source: EncodedSource) -> Delivery:
    """The delivery behind the images that are next."""
    delivery = source.for_images.get_nowait()
    if isinstance(delivery, Exception):
        raise delivery
    return delivery


def _move(cloud: Any, device: torch.device) -> Any:
    if cloud is None:
        return None
    # Not asynchronous: the slot is free as soon as this is back.
    return type(cloud)(cloud.features.to(device, copy=True), cloud.count.to(device))


def _blame_image(frames: FrameSource, sampler: BatchSampler, micro_steps: range) -> NoReturn:
    """DALI's decoder names no file: go through the batches until an image fails here too.

    Raises:
        InputError: always.
    """
    tokens = []
    for micro_step in micro_steps:
        for place in sampler.batch(micro_step):
            frame = frames.frame(*place)
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
