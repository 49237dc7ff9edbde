"""Reference loader: PIL and numpy in the workers of a PyTorch DataLoader."""

import functools
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from bev_lightning.checks import check_number
from bev_lightning.data.loaders.image_cache import ImageCache
from bev_lightning.data.loaders.protocol import BatchSampler, LoaderStats
from bev_lightning.data.loaders.reference import assemble
from bev_lightning.data.process_pool import prepare_worker
from bev_lightning.data.samples.frame import FrameSource
from bev_lightning.errors import InputError
from bev_lightning.structures import Batch


class TorchLoader:
    """Loads batches with a DataLoader (``loader=torch``); the other loaders are compared with it.

    Attributes:
        num_workers: processes; 0 reads in this one.
        prefetch: batches that each worker may read ahead.
        pin_memory: page-locked batches for asynchronous transfer; without CUDA it does nothing.
        stats: counters.
    """

    supports_image_cache = False
    full_decode = True

    def __init__(
        self,
        num_workers: int = 0,
        prefetch: int = 2,
        pin_memory: bool = False,
    ) -> None:
        check_number("loader.num_workers", num_workers)
        check_number("loader.prefetch", prefetch)
        self.num_workers = num_workers
        self.prefetch = prefetch
        self.pin_memory = pin_memory
        self.stats = LoaderStats()

    def open(
        self,
        frames: FrameSource,
        sampler: BatchSampler,
        start: int,
        stop: int,
        image_cache: ImageCache | None = None,
    ) -> Generator[Batch, None, None]:
        """Batches ``start`` .. ``stop - 1`` of the sampler; see :class:`Loader`."""
        parallel = self.num_workers > 0
        results = iter(
            DataLoader(
                _FrameDataset(frames),
                batch_sampler=_BatchRange(sampler, start, stop),
                collate_fn=_collate,
                num_workers=self.num_workers,
                prefetch_factor=self.prefetch if parallel else None,
                worker_init_fn=prepare_worker,
                pin_memory=self.pin_memory and torch.cuda.is_available(),
                # The DataLoader draws a seed for its workers: not from the model's generator.
                generator=torch.Generator(),
            )
        )
        try:
            while (result := _next(results)) is not None:
                if isinstance(result, str):
                    raise InputError(
                        f"one of {self.num_workers} loader processes was killed ({result}), "
                        f"perhaps out of memory: set loader.num_workers lower"
                    )
                if isinstance(result, _Failure):
                    raise InputError(result.message)
                self.stats.skipped.update(result.skipped)
                yield result.batch
        finally:
            del results  # ends the workers, even if an error keeps this frame alive


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


@dataclass(frozen=True)
class _Result:
    batch: Batch
    skipped: dict[str, str]

    def pin_memory(self) -> "_Result":
        return replace(self, batch=self.batch.pin_memory())


@dataclass(frozen=True)
class _Failure:
    """An InputError from a worker. If it were raised there, torch would put its traceback into the
    message."""

    message: str


class _FrameDataset(Dataset["_Result | _Failure"]):
    def __init__(self, frames: FrameSource) -> None:
        self.frames = frames

    def __getitem__(self, sample: tuple[int, int]) -> "_Result | _Failure":
        read = functools.partial(assemble, inputs=self.frames.inputs)
        try:
            return _Result(*self.frames.read_or_replace(*sample, read))
        except InputError as error:
            return _Failure(str(error))


@dataclass(frozen=True)
class _BatchRange:
    """Batches ``start`` .. ``stop - 1`` of a sampler, as the DataLoader iterates over them."""

    sampler: BatchSampler
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return (self.sampler.batch(micro_step) for micro_step in range(self.start, self.stop))


def _collate(results: "list[_Result | _Failure]") -> "_Result | _Failure":
    good = []
    for result in results:
        if isinstance(result, _Failure):
            return result
        good.append(result)
    skipped = {token: reason for result in good for token, reason in result.skipped.items()}
    return _Result(Batch.stack([result.batch for result in good]), skipped)
