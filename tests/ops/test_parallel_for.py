"""Loops on several threads."""

import numpy as np
import pytest
import torch

from bev_lightning.ops.parallel_for import parallel_for


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("count", [0, 1, 7])
def test_every_item_is_visited_once(threads: int, count: int) -> None:
    done = np.zeros(count, np.int64)

    def loop(start: int, stop: int, done: np.ndarray) -> None:
        done[start:stop] += 1

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        parallel_for(loop, count, done)
    finally:
        torch.set_num_threads(before)
    assert done.tolist() == [1] * count


def test_an_error_in_a_thread_is_raised() -> None:
    def loop(start: int, stop: int) -> None:
        raise ValueError(f"{start}..{stop}")

    with pytest.raises(ValueError, match=r"0\.\."):
        parallel_for(loop, 4)
