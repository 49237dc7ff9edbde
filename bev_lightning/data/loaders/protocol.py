"""Interfaces between the batch streams, the samplers and the loaders."""

from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Protocol

from bev_lightning.checks import check_number
from bev_lightning.data.loaders.image_cache import ImageCache
from bev_lightning.data.samples.frame import FrameSource
from bev_lightning.structures import Batch


class BatchSampler(Protocol):
    """Which samples each micro-step reads on this rank."""

    @property
    def batch_size(self) -> int:
        """Samples of a batch at most."""
        ...

    def batch(self, micro_step: int) -> list[tuple[int, int]]:
        """``(epoch, position)`` of each sample of a micro-step's batch."""
        ...


@dataclass
class LoaderStats:
    """Counters of a loader, over all that it has read.

    Attributes:
        skipped: reason for each sample that could not be read and was replaced, by token.
        cache_hits, cache_lookups: of decoded images.
    """

    skipped: dict[str, str] = field(default_factory=dict)
    cache_hits: int = 0
    cache_lookups: int = 0

    @property
    def cache_hit_rate(self) -> float | None:
        """Share of the images that came from the cache; None without a cache."""
        return self.cache_hits / self.cache_lookups if self.cache_lookups else None


class Loader(ABC):
    """Reads the samples' files into batches, usually in worker processes.

    Attributes:
        supports_image_cache: whether :meth:`open` takes an image cache.
        full_decode: whether images are decoded at full resolution, even where the network's image
            is much smaller.
        num_workers: processes; 0 reads in this one.
        prefetch: batches that each worker may read ahead.
        pin_memory: page-locked memory for asynchronous transfer; without CUDA it does nothing.
        stats: counters.
    """

    supports_image_cache = False
    full_decode = True

    def __init__(self, num_workers: int = 0, prefetch: int = 2, pin_memory: bool = False) -> None:
        check_number("loader.num_workers", num_workers)
        check_number("loader.prefetch", prefetch)
        self.num_workers = num_workers
        self.prefetch = prefetch
        self.pin_memory = pin_memory
        self.stats = LoaderStats()

    @abstractmethod
    def open(
        self,
        frames: FrameSource,
        sampler: BatchSampler,
        start: int,
        stop: int,
        image_cache: ImageCache | None = None,
    ) -> Generator[Batch, None, None]:
        """Batches ``start`` .. ``stop - 1`` of the sampler, in order.

        Closing the generator ends the worker processes.

        Args:
            image_cache: decoded images to read from and add to; only for loaders that support it.

        Raises:
            InputError: a file cannot be used, or a worker process was killed.
        """
