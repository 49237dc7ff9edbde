"""What training and evaluation ask of a loader."""

from collections.abc import Iterator
from typing import Protocol

from bev_lightning.data.samples.frame import FrameSource
from bev_lightning.structures import Batch


class BatchSampler(Protocol):
    """Which samples each micro-step reads on this rank: what a loader needs to know of an order."""

    @property
    def batch_size(self) -> int:
        """Samples of a batch at most."""
        ...

    def batch(self, micro_step: int) -> list[tuple[int, int]]:
        """``(epoch, position)`` of each sample of a micro-step's batch."""
        ...


class Loader(Protocol):
    """What the stream asks of a loader: batches ``start`` .. ``stop - 1`` of a sampler, in
    order."""

    def open(
        self, frames: FrameSource, sampler: BatchSampler, start: int, stop: int
    ) -> Iterator[Batch]: ...
