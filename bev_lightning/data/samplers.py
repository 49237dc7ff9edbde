"""Deterministic, resumable sample order of training and evaluation."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class TrainSampler:
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
                f"TrainSampler needs samples, a batch size and 0 <= rank < world_size, got {self}"
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
        """The micro-step that goes on where a sampler of other batches or processes stopped.

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
class SceneSampler:
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
                f"SceneSampler needs scenes with samples, a batch size and 0 <= rank < world_size,"
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
