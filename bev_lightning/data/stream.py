"""The order of samples, ours from the start: an endless stream of micro-steps.

Micro-step ``m`` alone fixes which samples are read, how they are augmented and what the random
generators hold while the model sees them. So a run that stops at ``m`` goes on at ``m`` bit for
bit, whatever was prefetched, and the same holds for any number of workers.
"""

import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from bev_lightning.data.frame import FrameSource
from bev_lightning.errors import InputError
from bev_lightning.structures import Batch


class Places(Protocol):
    """Which samples each micro-step reads on this rank: what a loader needs to know of an order."""

    @property
    def batch_size(self) -> int:
        """Samples of a batch at most."""
        ...

    def batch(self, micro_step: int) -> list[tuple[int, int]]:
        """``(epoch, position)`` of each sample of a micro-step's batch."""
        ...


class Loader(Protocol):
    """What the stream asks of a loader: batches ``start`` .. ``stop - 1`` of a schedule, in
    order."""

    def open(
        self, frames: FrameSource, schedule: Places, start: int, stop: int
    ) -> Iterator[Batch]: ...


@dataclass(frozen=True)
class Schedule:
    """Training's order: which samples each micro-step reads on this rank.

    The last batch of an epoch is filled from its beginning, so that all batches are full (few
    samples wrap round as often as needed).

    The samples of one global step are dealt out to the ranks like cards, so that the global order
    does not depend on the number of ranks.

    Attributes:
        num_samples: samples of the split; a position is an index into ``FrameSource.tokens``.
        batch_size: samples of one rank's batch.
        rank, world_size: this process among all.
        seed: of the order.
        shuffle: anew each epoch; False keeps the split's order.
    """

    num_samples: int
    batch_size: int
    rank: int = 0
    world_size: int = 1
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.num_samples < 1 or self.batch_size < 1 or not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"Schedule needs samples, a batch size and 0 <= rank < world_size, got {self}"
            )

    def __len__(self) -> int:
        """Batches per epoch, the same on every rank."""
        return math.ceil(self.num_samples / (self.batch_size * self.world_size))

    def batch(self, micro_step: int) -> list[tuple[int, int]]:
        """``(epoch, position)`` of each sample of the batch of an endless micro-step, 0 or more."""
        epoch, step = divmod(micro_step, len(self))
        order = self._order(epoch)
        start = step * self.batch_size * self.world_size + self.rank
        places = [start + i * self.world_size for i in range(self.batch_size)]
        return [(epoch, int(order[place % self.num_samples])) for place in places]

    def translate(self, state: dict[str, int], accumulation: int = 1) -> tuple[int, int]:
        """The micro-step that goes on where a schedule of other batches or processes stopped.

        The order of an epoch's samples is the same for both. Where the next batch would begin in
        the middle of one of ours, ours is read from its beginning.

        Args:
            state: of the other one's stream.
            accumulation: batches that only go together.

        Returns:
            our micro-step, and how many samples are read again.
        """
        size, count = state["batch_size"], state["world_size"]
        if (size, count) == (self.batch_size, self.world_size):
            return state["micro_step"], 0
        other = replace(self, batch_size=size, world_size=count, rank=0)
        epoch, step = divmod(state["micro_step"], len(other))
        together = self.batch_size * self.world_size * accumulation
        own, again = divmod(step * size * count, together)
        return epoch * len(self) + own * accumulation, again

    def _order(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(self.num_samples)
        # One permutation is remembered: batches of an epoch are asked for one after the other.
        remembered = self.__dict__.get("_remembered")
        if remembered is None or remembered[0] != epoch:
            remembered = (
                epoch,
                np.random.default_rng([self.seed, epoch]).permutation(self.num_samples),
            )
            object.__setattr__(self, "_remembered", remembered)
        return remembered[1]


@dataclass(frozen=True)
class SceneSchedule:
    """Evaluation's order: whole scenes to each rank, forward in time.

    A model that remembers the frame before finds it on its own rank. Every rank gets scenes that
    follow each other, so cut that the longest share is as short as such a cut allows, and makes the
    number of steps that this share takes. Its last batch may be short; after that it repeats its
    last sample, behind which nothing comes that could miss the memory of its scene (a rank without
    scenes: the last sample of the rank before it). A sample's first result counts.

    Attributes:
        scenes: samples of each scene, in the order of their positions.
        batch_size: samples of one rank's batch.
        rank, world_size: this process among all.
    """

    scenes: tuple[int, ...]
    batch_size: int
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        scenes = self.scenes and min(self.scenes) > 0
        if not scenes or self.batch_size < 1 or not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"SceneSchedule needs scenes with samples, a batch size and 0 <= rank < world_size,"
                f" got {self}"
            )
        shares = _cut(self.scenes, self.world_size)
        start = sum(shares[: self.rank])
        object.__setattr__(self, "_share", range(start, start + shares[self.rank]))
        object.__setattr__(self, "_num_steps", math.ceil(max(shares) / self.batch_size))

    def __len__(self) -> int:
        """Batches, the same number on every rank."""
        num_steps: int = self.__dict__["_num_steps"]
        return num_steps

    def batch(self, micro_step: int) -> list[tuple[int, int]]:
        """``(0, position)`` of each sample of the batch of a micro-step, 0 .. len - 1."""
        share: range = self.__dict__["_share"]
        start = micro_step * self.batch_size
        own = share[start : start + self.batch_size] or [share.stop - 1]
        return [(0, position) for position in own]


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
            :meth:`Schedule.translate`.
        shift: micro-steps that the schedule is ahead of the passes. Not 0 after a change of the
            batch or the number of processes: then the schedule goes on at the same sample, and the
            pass at the step where Lightning stands.
        seconds_waited: wall time spent waiting for the loader so far [s].
    """

    def __init__(
        self,
        loader: Loader,
        frames: FrameSource,
        schedule: Schedule,
        num_micro_steps: int,
        micro_step: int = 0,
        accumulation: int = 1,
    ) -> None:
        self.loader = loader
        self.frames = frames
        self.schedule = schedule
        self.num_micro_steps = num_micro_steps
        self.micro_step = micro_step
        self.accumulation = accumulation
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
        batches = self.loader.open(self.frames, self.schedule, start, stop)
        try:
            for micro_step in range(start, stop):
                began = time.perf_counter()
                batch = next(batches)
                self.seconds_waited += time.perf_counter() - began
                seed_everything(self.schedule.seed, self.schedule.rank, micro_step)
                self.micro_step = micro_step + 1
                yield batch
        finally:
            close = getattr(batches, "close", None)
            if close is not None:
                close()

    @property
    def cache_hit_rate(self) -> float | None:
        """Share of the images that were decoded before; None where none are kept."""
        lookups = getattr(self.loader, "cache_lookups", 0)
        return self.loader.cache_hits / lookups if lookups else None  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, int]:
        """Where the stream stands, in plain numbers."""
        return {"micro_step": self.micro_step, **_identity(self.schedule)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where another stream stopped.

        Raises:
            InputError: seed or number of samples differ, with which the order would be another.
        """
        for name in ("seed", "num_samples"):
            own = getattr(self.schedule, name)
            if state.get(name) != own:
                raise InputError(
                    f"the checkpoint's data stream has {name} = {state.get(name)} and this run has "
                    f"{own}, so it cannot go on at the same sample: set it back, or start anew "
                    f"from the weights with init_from=<checkpoint>"
                )
        self.micro_step, self.num_again = self.schedule.translate(state, self.accumulation)


class FixedBatches:
    """Evaluation's iterable: all batches of its schedule, from the start each time.

    Attributes:
        seconds_waited: wall time spent waiting for the loader so far [s].
    """

    def __init__(self, loader: Loader, frames: FrameSource, schedule: SceneSchedule) -> None:
        self.loader = loader
        self.frames = frames
        self.schedule = schedule
        self.seconds_waited = 0.0

    def __len__(self) -> int:
        return len(self.schedule)

    def __iter__(self) -> Iterator[Batch]:
        batches = self.loader.open(self.frames, self.schedule, 0, len(self.schedule))
        try:
            for _ in range(len(self.schedule)):
                began = time.perf_counter()
                batch = next(batches)
                self.seconds_waited += time.perf_counter() - began
                yield batch
        finally:
            close = getattr(batches, "close", None)
            if close is not None:
                close()


def seed_everything(seed: int, rank: int, micro_step: int) -> None:
    """Set the generators of torch (all devices), numpy and random from three numbers."""
    words = np.random.SeedSequence([seed, rank, micro_step]).generate_state(3, np.uint32)
    torch.manual_seed(int(words[0]))
    np.random.seed(int(words[1]))  # noqa: NPY002  what third parties draw from
    random.seed(int(words[2]))


def _cut(scenes: Sequence[int], num_shares: int) -> list[int]:
    """Samples of each share when scenes are cut into rows of neighbours, the largest as small as
    can be; shares at the end may be empty."""
    low, high = max(scenes), sum(scenes)
    while low < high:
        limit = (low + high) // 2
        if len(_fill(scenes, limit)) <= num_shares:
            high = limit
        else:
            low = limit + 1
    shares = _fill(scenes, low)
    return shares + [0] * (num_shares - len(shares))


def _fill(scenes: Sequence[int], limit: int) -> list[int]:
    """Shares that take the next scene as long as they stay within the limit."""
    shares = [0]
    for scene in scenes:
        if shares[-1] + scene > limit:
            shares.append(0)
        shares[-1] += scene
    return shares


def _identity(schedule: Schedule) -> dict[str, int]:
    return {
        "seed": schedule.seed,
        "num_samples": schedule.num_samples,
        "batch_size": schedule.batch_size,
        "world_size": schedule.world_size,
    }
