"""Batches in the order of a sampler: an endless stream for training, one pass for evaluation.

Micro-step ``m`` alone fixes which samples are read, how they are augmented and what the random
generators hold while the model sees them. So a run that stops at ``m`` goes on at ``m`` bit for
bit, whatever was prefetched, and the same holds for any number of workers.
"""

import random
import time
from collections.abc import Iterator
from itertools import islice

import numpy as np
import torch

from bev_lightning.data.loaders.image_cache import ImageCache
from bev_lightning.data.loaders.protocol import Loader
from bev_lightning.data.samplers import SceneSampler, TrainSampler
from bev_lightning.data.samples.frame import FrameSource
from bev_lightning.errors import InputError
from bev_lightning.structures import Batch


class BatchStream:
    """The iterable that training gives to Lightning. Not a DataLoader on purpose: Lightning would
    replace its sampler and call its state methods.

    One pass yields ``num_micro_steps`` batches; a pass begun at micro-step ``m`` yields what is
    left of it. ``len`` is always the full number: Lightning counts the steps done before a resume
    itself. Before each batch the generators of torch, numpy and random are set from (seed, rank,
    m), which stands in for saved generator states and replays what was prefetched but unused.

    Attributes:
        micro_step: the next to be handed out; what a checkpoint must hold.
        accumulation: batches that only go together, where each epoch is a pass.
        num_again: samples that are read twice since :meth:`load_state_dict`: see
            :meth:`TrainSampler.translate`.
        shift: micro-steps that the sampler is ahead of the passes. Not 0 after a change of the
            batch or the number of processes: then the sampler goes on at the same sample, and the
            pass at the step where Lightning stands.
        seconds_waited: wall time spent waiting for the loader so far [s].
    """

    def __init__(
        self,
        loader: Loader,
        frames: FrameSource,
        sampler: TrainSampler,
        num_micro_steps: int,
        micro_step: int = 0,
        accumulation: int = 1,
        image_cache: ImageCache | None = None,
    ) -> None:
        self.loader = loader
        self.frames = frames
        self.order = sampler
        self.num_micro_steps = num_micro_steps
        self.micro_step = micro_step
        self.accumulation = accumulation
        self.image_cache = image_cache
        self.num_again = 0
        self.shift = 0
        self.seconds_waited = 0.0

    def __len__(self) -> int:
        return self.num_micro_steps

    def __iter__(self) -> Iterator[Batch]:
        # A generator: nothing opens before the first batch is asked for, and Lightning calls iter()
        # twice.
        start = self.micro_step
        stop = ((start - self.shift) // self.num_micro_steps + 1) * self.num_micro_steps
        stop += self.shift
        batches = self.loader.open(self.frames, self.order, start, stop, self.image_cache)
        try:
            for micro_step in range(start, stop):
                began = time.perf_counter()
                batch = next(batches)
                self.seconds_waited += time.perf_counter() - began
                seed_everything(self.order.seed, self.order.rank, micro_step)
                self.micro_step = micro_step + 1
                yield batch
        finally:
            batches.close()

    @property
    def cache_hit_rate(self) -> float | None:
        """Share of the images that were decoded before; None where none are kept."""
        return self.loader.stats.cache_hit_rate

    def state_dict(self) -> dict[str, int]:
        """Where the stream stands, in plain numbers."""
        return {"micro_step": self.micro_step, **_identity(self.order)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where another stream stopped.

        Raises:
            InputError: seed or number of samples differ, with which the order would be another.
        """
        for name in ("seed", "num_samples"):
            own = getattr(self.order, name)
            if state.get(name) != own:
                raise InputError(
                    f"the checkpoint's data stream has {name} = {state.get(name)} and this run has "
                    f"{own}, so it cannot go on at the same sample: set it back, or start anew "
                    f"from the weights with init_from=<checkpoint>"
                )
        self.micro_step, self.num_again = self.order.translate(state, self.accumulation)


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
        batches, sampler = iter(self.stream), self.stream.order
        try:
            while window := tuple(islice(batches, self.size)):
                self.window = window
                first = self.stream.micro_step - len(window)
                for offset, batch in enumerate(window):
                    # The stream has set the generators for the window's last batch by now.
                    seed_everything(sampler.seed, sampler.rank, first + offset)
                    yield batch
        finally:
            batches.close()  # type: ignore[attr-defined]


class EvaluationStream:
    """Evaluation's iterable: all batches of its sampler, from the start each time.

    Attributes:
        seconds_waited: wall time spent waiting for the loader so far [s].
    """

    def __init__(self, loader: Loader, frames: FrameSource, sampler: SceneSampler) -> None:
        self.loader = loader
        self.frames = frames
        self.order = sampler
        self.seconds_waited = 0.0

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[Batch]:
        batches = self.loader.open(self.frames, self.order, 0, len(self.order))
        try:
            for _ in range(len(self.order)):
                began = time.perf_counter()
                batch = next(batches)
                self.seconds_waited += time.perf_counter() - began
                yield batch
        finally:
            batches.close()


def seed_everything(seed: int, rank: int, micro_step: int) -> None:
    """Set the generators of torch (all devices), numpy and random from three numbers."""
    words = np.random.SeedSequence([seed, rank, micro_step]).generate_state(3, np.uint32)
    torch.manual_seed(int(words[0]))
    np.random.seed(int(words[1]))  # noqa: NPY002  what third parties draw from
    random.seed(int(words[2]))


def _identity(sampler: TrainSampler) -> dict[str, int]:
    return {
        "seed": sampler.seed,
        "num_samples": sampler.num_samples,
        "batch_size": sampler.batch_size,
        "world_size": sampler.world_size,
    }
