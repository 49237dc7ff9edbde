"""Batch iterables in sampler order: an endless stream for training, one pass for evaluation.

The micro-step ``m`` alone determines which samples are read, how they are augmented, and the state
of the random generators while the model runs. So a run that stops at ``m`` resumes at ``m`` bit for
bit, whatever was prefetched and with any number of workers.
"""

import random
import time
from collections.abc import Generator
from contextlib import closing
from itertools import islice

import numpy as np
import torch

from bev_lightning.data.loaders.image_cache import ImageCache
from bev_lightning.data.loaders.protocol import BatchSampler, Loader
from bev_lightning.data.samplers import SceneSampler, TrainSampler
from bev_lightning.data.samples.frame import FrameSource
from bev_lightning.errors import InputError
from bev_lightning.structures import Batch

_IDENTITY = "seed", "num_samples", "batch_size", "world_size"  # what a stream's order depends on


class _Stream:
    """Reads the batches of a sampler and measures the time that it waits for them.

    Attributes:
        seconds_waited: wall time spent waiting for the loader so far [s].
    """

    def __init__(self, loader: Loader, frames: FrameSource) -> None:
        self.loader = loader
        self.frames = frames
        self.seconds_waited = 0.0

    def _read(
        self, sampler: BatchSampler, start: int, stop: int, image_cache: ImageCache | None = None
    ) -> Generator[Batch, None, None]:
        with closing(self.loader.open(self.frames, sampler, start, stop, image_cache)) as batches:
            for _ in range(start, stop):
                began = time.perf_counter()
                batch = next(batches)
                self.seconds_waited += time.perf_counter() - began
                yield batch


class BatchStream(_Stream):
    """Endless, resumable iterable of training batches.

    It is no DataLoader on purpose: Lightning would replace its sampler and call its state methods.

    One pass yields ``num_micro_steps`` batches; a pass that starts at micro-step ``m`` yields the
    rest. ``len`` is always the full number, because Lightning itself counts the steps before a
    resume. Before each batch the generators of torch, numpy and random are seeded from (seed, rank,
    m). This replaces saved generator states, and replays batches that were prefetched but unused.

    Attributes:
        micro_step: the next one; what a checkpoint stores.
        accumulation: batches per optimizer step if each epoch is a pass, else 1.
        num_again: samples read twice since :meth:`load_state_dict`, see
            :meth:`TrainSampler.translate`.
        shift: micro-steps that the sampler is ahead of the passes. It is 0 unless the batch size
            or the number of processes changed: then the sampler continues at the same sample, and
            the pass at Lightning's step.
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
        super().__init__(loader, frames)
        self.order = sampler  # Lightning inspects an attribute `sampler`
        self.num_micro_steps = num_micro_steps
        self.micro_step = micro_step
        self.accumulation = accumulation
        self.image_cache = image_cache
        self.num_again = 0
        self.shift = 0

    def __len__(self) -> int:
        return self.num_micro_steps

    def __iter__(self) -> Generator[Batch, None, None]:
        # A generator, so that the loader opens with the first batch: Lightning calls iter() twice.
        start = self.micro_step
        stop = ((start - self.shift) // self.num_micro_steps + 1) * self.num_micro_steps
        stop += self.shift
        with closing(self._read(self.order, start, stop, self.image_cache)) as batches:
            for micro_step, batch in enumerate(batches, start):
                seed_everything(self.order.seed, self.order.rank, micro_step)
                self.micro_step = micro_step + 1
                yield batch

    @property
    def cache_hit_rate(self) -> float | None:
        """Share of the images that came from the image cache; None without one."""
        return self.loader.stats.cache_hit_rate

    def state_dict(self) -> dict[str, int]:
        """Position of the stream and what its order depends on, in plain numbers."""
        identity = {name: getattr(self.order, name) for name in _IDENTITY}
        return {"micro_step": self.micro_step, **identity}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue where another stream stopped.

        Raises:
            InputError: the seed or the number of samples differs, and with it the order.
        """
        for name in ("seed", "num_samples"):
            own = getattr(self.order, name)
            if state.get(name) != own:
                raise InputError(
                    f"the checkpoint's data stream has {name} = {state.get(name)} and this run has "
                    f"{own}, so it cannot resume at the same sample; set it back, or start a new "
                    f"run from its weights with init_from=<checkpoint>"
                )
        self.micro_step, self.num_again = self.order.translate(state, self.accumulation)


class WindowedStream:
    """A training stream that exposes all batches of the current optimizer step.

    A loss that is normalised over the whole step needs them before the first backward pass. The
    price is the memory of the window's batches. Batches, order, random generators and the state
    between two optimizer steps are the same as without a window.

    Args:
        stream: yields the batches.
        size: micro-steps per optimizer step. The last window of a pass may be shorter, like
            Lightning's last optimizer step of an epoch.

    Attributes:
        window: the batches of the current optimizer step.
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
        """Share of the images that came from the image cache; None without one."""
        return self.stream.cache_hit_rate

    def __len__(self) -> int:
        return len(self.stream)

    def __iter__(self) -> Generator[Batch, None, None]:
        sampler = self.stream.order
        with closing(iter(self.stream)) as batches:
            while window := tuple(islice(batches, self.size)):
                self.window = window
                first = self.stream.micro_step - len(window)
                for micro_step, batch in enumerate(window, first):
                    # The stream has already seeded the generators for the window's last batch.
                    seed_everything(sampler.seed, sampler.rank, micro_step)
                    yield batch


class EvaluationStream(_Stream):
    """Iterable of evaluation batches: all of a sampler, from the start on each iteration."""

    def __init__(self, loader: Loader, frames: FrameSource, sampler: SceneSampler) -> None:
        super().__init__(loader, frames)
        self.order = sampler  # Lightning inspects an attribute `sampler`

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Generator[Batch, None, None]:
        return self._read(self.order, 0, len(self.order))


def seed_everything(seed: int, rank: int, micro_step: int) -> None:
    """Seed the generators of torch (all devices), numpy and random for a micro-step."""
    seeds = np.random.SeedSequence([seed, rank, micro_step]).generate_state(3, np.uint32)
    torch.manual_seed(int(seeds[0]))
    np.random.seed(int(seeds[1]))  # noqa: NPY002  the generator that third parties use
    random.seed(int(seeds[2]))


def is_stream_state(value: object) -> bool:
    """Whether a value of a checkpoint is the state of a :class:`BatchStream`."""
    return isinstance(value, dict) and {"micro_step", *_IDENTITY} <= value.keys()
