"""Batches of an accumulation window, seen before the first of them is trained on."""

from collections.abc import Iterator
from itertools import islice

from bev_lightning.data.stream import BatchStream, seed_everything
from bev_lightning.structures import Batch


class WindowedStream:
    """A training stream that shows the batches of the optimizer step at work.

    A loss that is divided by what the whole step holds must know that before the first backward
    pass. The price is the memory of the window's batches. Batches, their order, the generators
    during each of them and the stream's place between two optimizer steps are as without.

    Args:
        stream: hands out the batches.
        size: micro-steps of an optimizer step. The last window of a pass may be shorter, as
            Lightning's last optimizer step of an epoch is.

    Attributes:
        window: the batches of the optimizer step at work.
    """

    def __init__(self, stream: BatchStream, size: int) -> None:
        self.stream, self.size = stream, size
        self.window: tuple[Batch, ...] = ()

    @property
    def seconds_waited(self) -> float:
        """Wall time spent waiting for the loader so far [s]."""
        return self.stream.seconds_waited

    @property
    def cache_hit_rate(self) -> float | None:
        """Share of the images that were decoded before; None where none are kept."""
        return self.stream.cache_hit_rate

    def __len__(self) -> int:
        return len(self.stream)

    def __iter__(self) -> Iterator[Batch]:
        batches, schedule = iter(self.stream), self.stream.schedule
        try:
            while window := tuple(islice(batches, self.size)):
                self.window = window
                first = self.stream.micro_step - len(window)
                for offset, batch in enumerate(window):
                    # The stream has set the generators for the window's last batch by now.
                    seed_everything(schedule.seed, schedule.rank, first + offset)
                    yield batch
        finally:
            batches.close()  # type: ignore[attr-defined]
