"""The order of samples: endless, the same for any number of ranks, exact after a stop."""

import random
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bev_lightning.data.batch_stream import BatchStream, EvaluationStream, seed_everything
from bev_lightning.data.samplers import SceneSampler, TrainSampler
from bev_lightning.errors import InputError


class Echo:
    """A loader whose batches are the sampler's own."""

    def __init__(self) -> None:
        self.opened: list[tuple[int, int]] = []
        self.closed = 0

    def open(self, frames, sampler, start: int, stop: int, image_cache=None) -> Iterator:
        self.opened.append((start, stop))
        try:
            for micro_step in range(start, stop):
                yield SimpleNamespace(step=micro_step, samples=sampler.batch(micro_step))
        finally:
            self.closed += 1


def test_each_epoch_is_a_new_permutation_and_a_function_of_the_seed() -> None:
    sampler = TrainSampler(7, 1, seed=3)
    epochs = [[sampler.batch(e * 7 + i)[0] for i in range(7)] for e in range(3)]
    assert all(sorted(p for _, p in epoch) == list(range(7)) for epoch in epochs)
    assert [{e for e, _ in epoch} for epoch in epochs] == [{0}, {1}, {2}]
    assert len({tuple(p for _, p in epoch) for epoch in epochs}) == 3
    assert TrainSampler(7, 1, seed=3).batch(16) == sampler.batch(16)
    order = np.random.default_rng([3, 1]).permutation(7).tolist()
    assert [p for _, p in epochs[1]] == order


@pytest.mark.parametrize("num_samples", [1, 3, 8, 11])
def test_global_order_does_not_depend_on_ranks(num_samples: int) -> None:
    one = TrainSampler(num_samples, 4, seed=1)
    two = [TrainSampler(num_samples, 2, rank, 2, seed=1) for rank in range(2)]
    assert len(one) == len(two[0]) == len(two[1])
    for micro_step in range(2 * len(one)):
        dealt = [
            samples
            for pair in zip(*(s.batch(micro_step) for s in two), strict=True)
            for samples in pair
        ]
        assert dealt == one.batch(micro_step)


def test_few_samples_wrap_round_in_training() -> None:
    full = TrainSampler(3, 2, 0, 2, shuffle=False)
    assert len(full) == 1 and full.batch(0) == [(0, 0), (0, 2)]
    assert TrainSampler(3, 2, 1, 2, shuffle=False).batch(0) == [(0, 1), (0, 0)]
    assert TrainSampler(1, 4, shuffle=False).batch(0) == [(0, 0)] * 4


def test_evaluation_gives_whole_scenes_to_ranks_in_the_order_of_time() -> None:
    one = SceneSampler((3, 2, 4), 2)
    assert [one.batch(m) for m in range(len(one))] == [
        [(0, 0), (0, 1)],
        [(0, 2), (0, 3)],
        [(0, 4), (0, 5)],
        [(0, 6), (0, 7)],
        [(0, 8)],
    ]
    two = [SceneSampler((3, 2, 4), 2, rank, 2) for rank in range(2)]
    assert [len(s) for s in two] == [3, 3]
    assert [[p for _, p in two[0].batch(m)] for m in range(3)] == [[0, 1], [2, 3], [4]]
    # One step too many: the last sample again, so that no rank hangs.
    assert [[p for _, p in two[1].batch(m)] for m in range(3)] == [[5, 6], [7, 8], [8]]
    idle = SceneSampler((3, 2), 2, rank=2, world_size=3)
    assert len(idle) == 2 and [idle.batch(m) for m in range(2)] == [[(0, 4)]] * 2


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
def test_shares_of_evaluation_are_whole_complete_and_balanced(world_size: int) -> None:
    rng = np.random.default_rng(world_size)
    scenes = tuple(rng.integers(35, 42, size=20).tolist())
    scene_of = np.repeat(np.arange(20), scenes)
    ranks = [SceneSampler(scenes, 4, rank, world_size) for rank in range(world_size)]
    assert len({len(sampler) for sampler in ranks}) == 1
    owner: dict[int, int] = {}
    for rank, sampler in enumerate(ranks):
        samples = [p for m in range(len(sampler)) for _, p in sampler.batch(m)]
        assert samples == sorted(samples)
        for sample in samples:
            owner.setdefault(sample, rank)
    assert sorted(owner) == list(range(sum(scenes)))
    assert all(len({owner[p] for p in np.flatnonzero(scene_of == s)}) == 1 for s in range(20))
    # Never a scene more than an even share.
    assert len(ranks[0]) * 4 <= sum(scenes) / world_size + max(scenes) + 4


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="rank < world_size"):
        TrainSampler(3, 1, rank=2, world_size=2)
    with pytest.raises(ValueError, match="rank < world_size"):
        SceneSampler((3,), 1, rank=2, world_size=2)
    with pytest.raises(ValueError, match="scenes with samples"):
        SceneSampler((), 1)


def test_stream_goes_on_where_it_stopped() -> None:
    sampler = TrainSampler(5, 2, seed=9)
    whole = [b.samples for b in BatchStream(Echo(), None, sampler, 8)]
    stream = BatchStream(Echo(), None, sampler, 8)
    batches = iter(stream)
    assert stream.loader.opened == []  # iter() alone opens nothing
    first = [next(batches).samples for _ in range(3)]
    state = stream.state_dict()
    next(batches)  # read ahead, never trained on
    batches.close()
    assert stream.loader.closed == 1
    assert state == {"micro_step": 3, "seed": 9, "num_samples": 5, "batch_size": 2, "world_size": 1}
    resumed = BatchStream(Echo(), None, sampler, 8)
    resumed.load_state_dict(state)
    assert len(resumed) == 8  # the full number, whatever is done
    assert first + [b.samples for b in resumed] == whole
    assert resumed.loader.opened == [(3, 8)] and resumed.micro_step == 8
    assert [b.step for b in resumed] == list(range(8, 16))  # the next pass


def test_random_generators_are_set_before_each_batch() -> None:
    def draw() -> tuple:
        return torch.rand(1).item(), np.random.rand(), random.random()  # noqa: NPY002

    sampler = TrainSampler(4, 1, seed=2)
    draws = [draw() for _ in BatchStream(Echo(), None, sampler, 4)]
    torch.rand(5), np.random.rand(5)  # noqa: NPY002
    assert [draw() for _ in BatchStream(Echo(), None, sampler, 4, micro_step=2)] == draws[2:]
    assert len(set(draws)) == 4
    other = TrainSampler(4, 1, rank=1, world_size=2, seed=2)
    assert next(draw() for _ in BatchStream(Echo(), None, other, 4)) != draws[0]
    seed_everything(2, 0, 3)
    assert draw() == draws[3]


def test_another_order_is_refused() -> None:
    state = BatchStream(Echo(), None, TrainSampler(5, 2, seed=9), 8).state_dict()
    for changed, name in (
        (TrainSampler(5, 2, seed=8), "seed"),
        (TrainSampler(6, 2, seed=9), "num_samples"),
    ):
        with pytest.raises(InputError, match=f"{name} = .*init_from"):
            BatchStream(Echo(), None, changed, 8).load_state_dict(state)


def read(streams: list[BatchStream]) -> list[tuple[int, int]]:
    """What all ranks read, dealt out like cards."""
    steps = [zip(*(b.samples for b in step), strict=True) for step in zip(*streams, strict=True)]
    return [sample for step in steps for deal in step for sample in deal]


@pytest.mark.parametrize(("ranks", "size", "again"), [(1, 4, 0), (4, 1, 0), (1, 2, 0), (2, 5, 8)])
def test_other_processes_go_on_in_the_same_order(ranks: int, size: int, again: int) -> None:
    stop = 7  # of epochs of 5 batches of 2 x 2
    old = [TrainSampler(20, 2, rank, 2, seed=4) for rank in range(2)]
    whole = read([BatchStream(Echo(), None, one, 15) for one in old])
    state = BatchStream(Echo(), None, old[0], 15, micro_step=stop).state_dict()
    streams = []
    for rank in range(ranks):
        sampler = TrainSampler(20, size, rank, ranks, seed=4)
        stream = BatchStream(Echo(), None, sampler, 3 * len(sampler))
        stream.load_state_dict(state)
        assert stream.num_again == again
        # Lightning has counted the old steps.
        stream.shift = stream.micro_step - stop
        stream.num_micro_steps = stop + 3 * len(sampler) - stream.micro_step
        streams.append(stream)
    rest = whole[4 * stop - again :]
    assert read(streams)[: len(rest)] == rest[: len(rest)]
    assert streams[0].state_dict()["batch_size"] == size


def test_epochs_go_on_with_whole_accumulations() -> None:
    state = BatchStream(Echo(), None, TrainSampler(24, 2, 0, 2), 6, micro_step=9).state_dict()
    stream = BatchStream(Echo(), None, TrainSampler(24, 1), 24, accumulation=8)
    stream.load_state_dict(state)  # 12 samples of the second epoch were read
    assert stream.micro_step == 24 + 8 and stream.num_again == 4
    same = BatchStream(Echo(), None, TrainSampler(24, 2, 0, 2), 6, accumulation=8)
    same.load_state_dict(state)
    assert same.micro_step == 9 and same.num_again == 0


def test_waiting_is_counted_and_evaluation_starts_afresh() -> None:
    fixed = EvaluationStream(Echo(), None, SceneSampler((3,), 2))
    assert len(fixed) == 2
    assert [[p for _, p in b.samples] for b in fixed] == [[0, 1], [2]]
    assert [[p for _, p in b.samples] for b in fixed] == [[0, 1], [2]]
    assert fixed.seconds_waited > 0 and fixed.loader.closed == 2
