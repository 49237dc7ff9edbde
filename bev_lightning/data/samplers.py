"""Deterministic, resumable sample order for training and evaluation."""

import functools
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class TrainSampler:
    """Training order: a permutation per epoch, independent of the number of ranks.

    The last batch of an epoch is filled up from the epoch's start, so that all batches are full
    (a small split wraps around as often as needed). The samples of a global step go to the ranks
    round-robin.

    Attributes:
        num_samples: samples of the split; a position is an index into ``FrameSource.tokens``.
        batch_size: samples per batch and rank.
        rank, world_size: of this process.
        seed: of the permutations.
        shuffle: False keeps the order of the split.
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
        """``(epoch, position)`` of each sample of a micro-step's batch; micro-steps never end."""
        epoch, step = divmod(micro_step, len(self))
        order = (
            _permutation(self.num_samples, self.seed, epoch)
            if self.shuffle
            else range(self.num_samples)
        )
        start = step * self.batch_size * self.world_size + self.rank
        slots = [start + i * self.world_size for i in range(self.batch_size)]
        return [(epoch, int(order[slot % self.num_samples])) for slot in slots]

    def translate(self, state: dict[str, int], accumulation: int = 1) -> tuple[int, int]:
        """Micro-step at which to continue where a sampler with other batches or ranks stopped.

        Both have the same order within an epoch. If the other one stopped in the middle of one of
        our batches, that batch is read from its start.

        Args:
            state: of the other sampler's stream.
            accumulation: batches per optimizer step, which are never split.

        Returns:
            our micro-step, and the number of samples that are read again.
        """
        size, count = state["batch_size"], state["world_size"]
        if (size, count) == (self.batch_size, self.world_size):
            return state["micro_step"], 0
        other = replace(self, batch_size=size, world_size=count, rank=0)
        epoch, step = divmod(state["micro_step"], len(other))
        together = self.batch_size * self.world_size * accumulation
        own, again = divmod(step * size * count, together)
        return epoch * len(self) + own * accumulation, again


@dataclass(frozen=True)
class SceneSampler:
    """Evaluation order: whole scenes per rank, forward in time.

    A temporal model finds the previous frame on its own rank. Each rank gets consecutive scenes,
    and the largest share is as small as consecutive scenes allow. All ranks make the number of
    steps of the largest share: a rank's last batch may be short, and after it the rank repeats its
    last sample (a rank without scenes: the last sample of the previous rank). A sample's first
    result counts.

    Attributes:
        scenes: number of samples of each scene, in the order of their positions.
        batch_size: samples per batch and rank.
        rank, world_size: of this process.
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

    def __len__(self) -> int:
        """Batches, the same number on every rank."""
        return math.ceil(max(self._shares) / self.batch_size)

    def batch(self, micro_step: int) -> list[tuple[int, int]]:
        """``(0, position)`` of each sample of the batch of a micro-step, 0 .. len - 1."""
        stop = sum(self._shares[: self.rank + 1])
        start = stop - self._shares[self.rank] + micro_step * self.batch_size
        own = range(start, min(start + self.batch_size, stop)) or [stop - 1]
        return [(0, position) for position in own]

    @functools.cached_property
    def _shares(self) -> list[int]:
        return _cut(self.scenes, self.world_size)


@functools.lru_cache(maxsize=2)  # of the current epoch
def _permutation(num_samples: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(num_samples)


def _cut(scenes: Sequence[int], num_shares: int) -> list[int]:
    """Number of samples of each share of consecutive scenes, with the smallest possible maximum;
    the last shares may be empty."""
    limits = range(max(scenes), sum(scenes) + 1)
    fits = bisect_left(limits, True, key=lambda limit: len(_fill(scenes, limit)) <= num_shares)
    shares = _fill(scenes, limits[fits])
    return shares + [0] * (num_shares - len(shares))


def _fill(scenes: Sequence[int], limit: int) -> list[int]:
    """Shares filled greedily with the next scenes, each up to the limit."""
    shares = [0]
    for scene in scenes:
        if shares[-1] + scene > limit:
            shares.append(0)
        shares[-1] += scene
    return shares
