"""Loading with NVIDIA DALI: worker processes read the files, a compiled graph makes the pixels.

The graph decodes, resizes the region that the network sees with antialiasing, warps once (rotation
and placement; a mirror is part of the resize) and normalises to float32 channels first, all cameras
of a batch together. Where CUDA is, the decoder is the GPU's and all after it runs there; else the
same graph runs on the CPU.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, NoReturn, TypeVar

import torch
from nvidia.dali import fn, types
from nvidia.dali.pipeline import Pipeline

from bev_lightning.data.dali_source import SlotSource, read_encoded
from bev_lightning.data.frame import Frame, FrameSource
from bev_lightning.data.photometric import distort_images
from bev_lightning.data.reader import read_image
from bev_lightning.data.stream import Places
from bev_lightning.errors import InputError
from bev_lightning.structures import Batch, CameraInput, Cameras, Inputs, Points, Radar

_Cloud = TypeVar("_Cloud", Points, Radar)


class DaliLoader:
    """Batches through a DALI pipeline, equal to the plain loader's.

    Order, matrices, targets, points and radar are the same to the bit. Pixels come from another
    resampler of the same kind (bicubic with antialiasing, then bilinear where an image is rotated):
    real images differ by 0.1 to 0.5 of 255 in the mean and by 6 at most.

    On CUDA a batch arrives on the current device. Images are DALI's memory in either case, no copy.

    Attributes:
        num_workers: processes that read, and threads of the graph; 0 reads in this process.
        prefetch: batches that each worker may hold ready; the graph makes as many ahead.
        pin_memory: page-locked batches if the graph runs on the CPU; without CUDA it does nothing.
        device: where the graph runs; auto takes CUDA where it is.
        start_method: of the workers (fork, spawn, forkserver); None is the platform's own.
        skipped: sentence for each sample that could not be read and was replaced, by token.
    """

    def __init__(
        self,
        num_workers: int = 2,
        prefetch: int = 2,
        pin_memory: bool = False,
        device: Literal["auto", "cpu", "cuda"] = "auto",
        start_method: str | None = None,
    ) -> None:
        if num_workers < 0 or prefetch < 1:
            raise InputError(
                f"loader.num_workers={num_workers} and loader.prefetch={prefetch} do not work with "
                f"DALI: give 0 or more workers and a prefetch of 1 or more"
            )
        self.num_workers = num_workers
        self.prefetch = prefetch
        self.pin_memory = pin_memory
        self.device = device
        self.start_method = start_method
        self.skipped: dict[str, str] = {}

    def open(self, frames: FrameSource, schedule: Places, start: int, stop: int) -> Iterator[Batch]:
        """Batches ``start`` .. ``stop - 1`` of the schedule, in order.

        Closing the iterator ends the worker processes.

        Raises:
            InputError: a file cannot be used; the sentence of the worker that met it.
        """
        cuda = torch.cuda.is_available() if self.device == "auto" else self.device == "cuda"
        device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        # The workers start first: a process is best forked before it has the graph's threads.
        source = SlotSource(
            frames, schedule, start, stop, self.num_workers, self.prefetch, self.start_method
        )
        pipeline = None
        try:
            num_threads = max(1, self.num_workers)
            pipeline = build_pipeline(
                source, frames.inputs, schedule.batch_size, device, num_threads, self.prefetch
            )
            for micro_step in range(start, stop):
                try:
                    # Bound to torch's stream: nothing waits here, and DALI takes the memory back
                    # only when that stream is done with it.
                    outputs = pipeline.run(torch.cuda.current_stream() if cuda else None)
                except RuntimeError as error:
                    if "decoders.image" not in str(error):
                        raise
                    ahead = range(micro_step, min(stop, micro_step + self.prefetch + 1))
                    _blame_image(frames, schedule, ahead)
                note = source.notes.popleft()
                if note.error:
                    raise InputError(note.error)
                samples = []
                for (epoch, position), skipped in zip(
                    schedule.batch(micro_step), note.skipped, strict=True
                ):
                    self.skipped.update(skipped)
                    samples.append(frames.frame(epoch, (position + len(skipped)) % len(frames)))
                batch = _assemble(outputs, samples, frames.inputs, device)
                del outputs
                yield batch.pin_memory() if self.pin_memory and not cuda else batch
                del batch
        finally:
            source.close()
            # DALI frees memory and threads with the last name: the traceback of an exception keeps
            # this frame alive.
            del pipeline


def build_pipeline(
    source: SlotSource,
    inputs: Inputs,
    batch_size: int,
    device: torch.device,
    num_threads: int,
    prefetch: int,
) -> Pipeline:
    """The graph.

    Outputs are images ``(S, 3, H, W)`` if the model reads cameras, then lists of points ``(P, 5)``
    and of radar ``(R, 8)``, each with an entry for every slot of :class:`MicroSteps`.

    Args:
        source: gives the inputs.
        inputs: what the model reads.
        batch_size: samples of a batch at most.
        device: where images are made.
        num_threads: of the graph on the CPU.
        prefetch: batches made ahead.
    """
    cameras = 1 if inputs.camera is None else len(inputs.camera.channels)
    pipeline = Pipeline(
        batch_size=batch_size * (inputs.history + 1) * cameras,
        num_threads=num_threads,
        device_id=device.index if device.type == "cuda" else None,
        prefetch_queue_depth=prefetch,
    )
    byte, real = types.DALIDataType.UINT8, types.DALIDataType.FLOAT
    kinds = [(real, 2), (real, 2)]
    if inputs.camera is not None:
        kinds = [(byte, 1), (real, 1), (real, 1), (real, 1), (real, 2), *kinds]
    with pipeline:
        *pixels, points, radar = fn.external_source(
            source,
            num_outputs=len(kinds),
            batch=True,
            dtype=[kind for kind, _ in kinds],
            ndim=[ndim for _, ndim in kinds],
        )
        if device.type == "cuda":
            points, radar = points.gpu(), radar.gpu()
        outputs = [points, radar]
        if inputs.camera is not None:
            outputs.insert(0, make_images(pixels, inputs.camera, device))
        pipeline.set_outputs(*outputs)
    pipeline.build()
    return pipeline


def make_images(pixels: Sequence[Any], camera: CameraInput, device: torch.device) -> Any:
    """The part of the graph that makes ``(3, H, W)`` of an encoded image and its pixel plan.

    Args:
        pixels: nodes of the image's bytes and of the four fields of :class:`PixelPlan`.
        camera: size and normalisation.
        device: where it runs.
    """
    encoded, start, end, size, warp = pixels
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
    images = fn.experimental.warp_perspective(
        images,
        matrix=warp,
        size=list(camera.size),
        pixel_origin="center",
        interp_type=types.DALIInterpType.INTERP_LINEAR,
        fill_value=0,
    )
    return fn.crop_mirror_normalize(
        images,
        dtype=types.DALIDataType.FLOAT,
        output_layout="CHW",
        mean=list(camera.mean),
        std=list(camera.std),
    )


def _assemble(
    outputs: Sequence[Any], samples: list[Frame], inputs: Inputs, device: torch.device
) -> Batch:
    """Put images and clouds into what the frames already know."""
    cameras = 1 if inputs.camera is None else len(inputs.camera.channels)
    images = None
    if inputs.camera is not None:
        images = torch.from_dlpack(outputs[0].as_tensor())
        images = images.view(inputs.history + 1, len(samples), cameras, *images.shape[1:])
    points, radar = outputs[-2:]

    def fill(moment: int, frames: list[Frame]) -> Batch:
        slots = range(
            moment * len(samples) * cameras, (moment + 1) * len(samples) * cameras, cameras
        )
        batch = Batch.stack([frame.batch for frame in frames])
        if images is not None and inputs.camera is not None:
            for seen, frame in zip(images[moment], frames, strict=True):
                if frame.colours:
                    distort_images(frame.colours, seen, inputs.camera)
                if frame.mask is not None:
                    frame.mask.hide(seen)
            matrices = torch.cat(
                [f.image_from_lidar for f in frames if f.image_from_lidar is not None]
            )
            batch = replace(batch, cameras=Cameras(images[moment], matrices))
        if inputs.lidar is not None:
            batch = replace(batch, points=_pad(points, slots, Points))
        if inputs.radar is not None:
            batch = replace(batch, radar=_pad(radar, slots, Radar))
        return batch

    *history, batch = (
        fill(moment, list(frames))
        for moment, frames in enumerate(zip(*((*f.history, f) for f in samples), strict=True))
    )
    # On CUDA the sensors' data is there already and stays where it is; the small rest follows.
    return replace(batch, history=tuple(history)).to(device, non_blocking=True)


def _pad(clouds: Any, slots: range, kind: type[_Cloud]) -> _Cloud:
    """Copy the clouds of some slots into one tensor."""
    rows = [torch.from_dlpack(clouds[slot]) for slot in slots]
    count = torch.tensor([len(row) for row in rows])
    features = rows[0].new_zeros(len(rows), int(count.max()), rows[0].shape[1])
    for target, row in zip(features, rows, strict=True):
        target[: len(row)] = row
    return kind(features, count)


def _blame_image(frames: FrameSource, schedule: Places, micro_steps: range) -> NoReturn:
    """DALI's decoder names no file: go through the batches until an image fails here too.

    Raises:
        InputError: always.
    """
    tokens = []
    for micro_step in micro_steps:
        for place in schedule.batch(micro_step):
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
