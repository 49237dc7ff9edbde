"""Choice of the implementation."""

import pytest
import torch

from bev_lightning.ops.backend import accumulation_dtype, choose_backend, use_reference


def test_the_device_chooses() -> None:
    assert choose_backend(torch.device("cpu")) == "numba"
    assert choose_backend(torch.device("meta")) == "numba"
    assert choose_backend(torch.device("cuda")) == "triton"
    assert choose_backend(torch.device("mps")) == "reference"


def test_reference_is_forced_inside_only() -> None:
    with use_reference():
        with use_reference():
            assert choose_backend(torch.device("cuda")) == "reference"
        assert choose_backend(torch.device("cpu")) == "reference"
    assert choose_backend(torch.device("cpu")) == "numba"
    with pytest.raises(KeyError), use_reference():
        raise KeyError
    assert choose_backend(torch.device("cpu")) == "numba"


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ([torch.float16], torch.float32),
        ([torch.bfloat16, torch.float16], torch.float32),
        ([torch.float32, torch.bfloat16], torch.float32),
        ([torch.bfloat16, torch.float64], torch.float64),
    ],
)
def test_sums_are_taken_in_at_least_float32(
    dtypes: list[torch.dtype], expected: torch.dtype
) -> None:
    assert accumulation_dtype(*(torch.empty(0, dtype=dtype) for dtype in dtypes)) == expected
