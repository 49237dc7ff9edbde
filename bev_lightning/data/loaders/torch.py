"""Reference loader: PIL and numpy in the workers of a PyTorch DataLoader."""

from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from bev_lightning.data.loaders.clouds import read_points, read_radar
from bev_lightning.data.loaders.image_cache import ImageCache
from bev_lightning.data.loaders.images import normalise_images, read_image
from bev_lightning.data.loaders.protocol import BatchSampler, Loader
from bev_lightning.data.process_pool import prepare_worker
from bev_lightning.data.samples.frame import Frame, FrameSource
from bev_lightning.data.transforms.photometric import apply_colour_changes
from bev_lightning.errors import InputError
from bev_lightning.structures import Batch, Cameras, Inputs, Points, Radar


class TorchLoader(Loader):
    """Loads batches with a DataLoader (``loader=torch``); the other loaders are compared with it.

    ``prefetch`` and ``pin_memory`` are those of the DataLoader.
    """

    def open(
        self,
        frames: FrameSource,
        sampler: BatchSampler,
        start: int,
        stop: int,
        image_cache: ImageCache | None = None,
    ) -> Generator[Batch, None, None]:
        """Batches ``start`` .. ``stop - 1`` of the sampler; see :class:`Loader`."""
        results = iter(
            DataLoader(
                _FrameDataset(frames),
                batch_sampler=map(sampler.batch, range(start, stop)),
                collate_fn=_collate,
                num_workers=self.num_workers,
                prefetch_factor=self.prefetch if self.num_workers else None,
                worker_init_fn=prepare_worker,
                pin_memory=self.pin_memory and torch.cuda.is_available(),
                # The DataLoader draws a seed for its workers: not from the model's generator.
                generator=torch.Generator(),
            )
        )
        try:
            while (result := _next(results)) is not None:
                if isinstance(result, InputError):
                    raise result
                if isinstance(result, str):
                    raise InputError(
                        f"one of {self.num_workers} loader processes was killed ({result}), "
                        f"perhaps out of memory: set loader.num_workers lower"
                    )
                batch, skipped = result
                self.stats.skipped.update(skipped)
                yield batch
        finally:
            del results  # ends the workers, even if an error keeps this frame alive


def assemble(frame: Frame, inputs: Inputs) -> Batch:
    """Read all files of a frame and its history into a batch of one.

    Raises:
        InputError: a file cannot be used; it names the sample, the file and its size.
    """
    try:
        batch = frame.batch
        if inputs.camera is not None and frame.image_from_lidar is not None:
            images = normalise_images(
                np.stack([read_image(s) for s in frame.images]), inputs.camera
            )
            if frame.colours:
                apply_colour_changes(frame.colours, images, inputs.camera)
            if frame.mask is not None:
                frame.mask.hide(images)
            batch = replace(batch, cameras=Cameras(images[None], frame.image_from_lidar))
        if inputs.lidar is not None:
            points = read_points(frame.lidar, inputs.lidar)
            if frame.pasted is not None:
                points = frame.pasted.add_points(points, inputs.lidar)
            batch = replace(batch, points=Points(*_batch_of_one(points)))
        if inputs.radar is not None:
            returns = read_radar(frame.radar, inputs.radar)
            batch = replace(batch, radar=Radar(*_batch_of_one(returns)))
    except InputError as error:
        raise InputError(f"sample {frame.sample_token}: {error}") from None
    if frame.history:
        # At a scene's start the queue repeats one frame: read it once.
        read = {id(past): assemble(past, inputs) for past in frame.history}
        batch = replace(batch, history=tuple(read[id(past)] for past in frame.history))
    return batch


def _batch_of_one(rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(rows)[None], torch.tensor([len(rows)])


def _next(results: Iterator[Any]) -> Any:
    """The next result, None at the end, or torch's message about a worker that was killed.

    That error is not raised: it would keep the iterator alive, and with it the workers.
    """
    try:
        return next(results, None)
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        return str(error)
    except (EOFError, ConnectionError):  # killed before it had passed the memory of a batch
        return "its pipe is closed"


class _FrameDataset(Dataset[Any]):
    """A batch of one and the reasons for the samples that it replaces, or an InputError."""

    def __init__(self, frames: FrameSource) -> None:
        self.frames = frames

    def __getitem__(self, sample: tuple[int, int]) -> tuple[Batch, dict[str, str]] | InputError:
        inputs = self.frames.inputs
        try:
            return self.frames.read_or_replace(*sample, lambda frame: assemble(frame, inputs))
        except InputError as error:
            # Returned: if it were raised, torch would put its traceback into the message.
            return InputError(str(error))


def _collate(results: list[Any]) -> tuple[Batch, dict[str, str]] | InputError:
    for result in results:
        if isinstance(result, InputError):
            return result
    batches, skipped = zip(*results, strict=True)
    return Batch.stack(batches), {
        token: reason for reasons in skipped for token, reason in reasons.items()
    }
