import numpy as np
import pytest
import torch

from bev_lightning.ops.backend import choose, share_out, use_reference


def test_the_device_chooses() -> None:
    assert choose(torch.device("cpu")) == "numba"
    assert choose(torch.device("meta")) == "numba"
    assert choose(torch.device("cuda")) == "triton"
    assert choose(torch.device("mps")) == "reference"


def test_reference_is_forced_inside_only() -> None:
    with use_reference():
        with use_reference():
            assert choose(torch.device("cuda")) == "reference"
        assert choose(torch.device("cpu")) == "reference"
    assert choose(torch.device("cpu")) == "numba"
    with pytest.raises(KeyError), use_reference():
        raise KeyError
    assert choose(torch.device("cpu")) == "numba"


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("count", [0, 1, 7])
def test_every_item_is_shared_out_once(threads: int, count: int) -> None:
    done = np.zeros(count, np.int64)

    def loop(start: int, stop: int, done: np.ndarray) -> None:
        done[start:stop] += 1

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        share_out(loop, count, done)
    finally:
        torch.set_num_threads(before)
    assert done.tolist() == [1] * count


def test_an_error_of_a_thread_is_told() -> None:
    def loop(start: int, stop: int) -> None:
        raise ValueError(f"{start}..{stop}")

    with pytest.raises(ValueError, match=r"0\.\."):
        share_out(loop, 4)
