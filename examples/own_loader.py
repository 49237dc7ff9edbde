"""A loader of your own: another one, with a count of the batches it has read."""

from collections.abc import Generator
from typing import Any

from bev_lightning.data.loaders.protocol import BatchSampler, LoaderStats
from bev_lightning.data.loaders.torch import TorchLoader
from bev_lightning.data.samples.frame import FrameSource
from bev_lightning.structures import Batch


class CountingLoader:
    """Counts the batches that another loader reads; a Loader itself."""

    supports_image_cache = False
    full_decode = True

    def __init__(self, num_workers: int = 0, prefetch: int = 2, pin_memory: bool = False) -> None:
        self.loader = TorchLoader(num_workers, prefetch, pin_memory)
        self.stats: LoaderStats = self.loader.stats
        self.num_batches = 0

    def open(
        self,
        frames: FrameSource,
        sampler: BatchSampler,
        start: int,
        stop: int,
        image_cache: Any = None,
    ) -> Generator[Batch, None, None]:
        """Batches ``start`` .. ``stop - 1`` of the sampler, in order."""
        try:
            for batch in self.loader.open(frames, sampler, start, stop):
                self.num_batches += 1
                yield batch
        finally:  # the caller closes the generator
            print(f"{self.num_batches} batches read", flush=True)
