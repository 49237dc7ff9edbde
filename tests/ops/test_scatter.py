"""Pooling of rows into cells against loops in Python."""

from contextlib import nullcontext

import pytest
import torch

from bev_lightning.ops.backend import use_reference
from bev_lightning.ops.scatter import scatter_max, scatter_mean, scatter_sum
from bev_lightning.ops.scatter.reference import scatter_max_reference, scatter_sum_sorted


def _random(num_rows: int, num_cells: int, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(num_rows)
    # Few distinct values, so that maxima are shared.
    values = torch.randint(-4, 5, (num_rows, 3), generator=generator).to(dtype)
    return values, torch.randint(0, num_cells, (num_rows,), generator=generator)


@pytest.mark.parametrize("num_rows", [0, 1, 50])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_scatter_matches_loop(num_rows, dtype):
    values, index = _random(num_rows, 7, dtype)
    largest, total, mean = torch.zeros(3, 7, 3, dtype=dtype)
    for cell in range(7):
        rows = values[index == cell]
        if len(rows):
            largest[cell], total[cell], mean[cell] = rows.amax(0), rows.sum(0), rows.mean(0)
    assert torch.equal(scatter_max(values, index, 7), largest)
    assert torch.equal(scatter_sum(values, index, 7), total)
    torch.testing.assert_close(scatter_mean(values, index, 7), mean)


@pytest.mark.parametrize("num_rows", [0, 1, 50])
@pytest.mark.parametrize("function", [scatter_max, scatter_sum, scatter_mean])
def test_reference_is_the_same_without_custom_operators(function, num_rows):
    values, index = _random(num_rows, 7)
    values.requires_grad_()
    results = []
    for context in (nullcontext(), use_reference()):
        with context:
            out = function(values, index, 7)
        results.append((out, *torch.autograd.grad((out * out).sum(), values)))
    torch.testing.assert_close(*results)
    assert "Scatter" not in str(out.grad_fn) and "bev_lightning" not in str(out.grad_fn)


def test_scatter_max_gradient_goes_to_first_maximum():
    values = torch.tensor([[1.0], [3.0], [3.0], [-2.0]], requires_grad=True)
    scatter_max(values, torch.tensor([0, 0, 0, 2]), 4).backward(
        torch.tensor([[5.0], [6.0], [7.0], [8.0]])
    )
    assert values.grad.flatten().tolist() == [0.0, 5.0, 0.0, 7.0]


@pytest.mark.parametrize("num_rows", [0, 1, 200])
def test_scatter_sum_by_sorting_equals_index_add(num_rows):
    values, index = _random(num_rows, 11)
    by_sorting = scatter_sum_sorted(values, index, 11)
    assert torch.equal(by_sorting, scatter_sum(values, index, 11))


def test_scatter_max_kernel_equals_reference():
    values, index = _random(200, 11)
    pooled, winner = scatter_max_reference(values, index, 11)
    fast, fast_winner = torch.ops.bev_lightning.scatter_max(values, index, 11)
    assert torch.equal(pooled, fast) and torch.equal(winner, fast_winner)


@pytest.mark.parametrize("function", [scatter_max, scatter_sum, scatter_mean])
def test_scatter_gradcheck(function):
    values = torch.randn(12, 2, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([0, 1, 1, 3, 3, 3, 0, 5, 5, 1, 0, 3])
    assert torch.autograd.gradcheck(lambda v: function(v, index, 6), values)


def test_scatter_custom_ops_are_well_formed():
    values, index = _random(9, 4)
    values.requires_grad_()
    torch.library.opcheck(torch.ops.bev_lightning.scatter_max, (values, index, 4))
    torch.library.opcheck(torch.ops.bev_lightning.scatter_sum, (values, index, 4))


def test_scatter_max_refuses_index_out_of_range():
    with pytest.raises(IndexError, match=r"outside 0\.\.3"):
        scatter_max(torch.ones(2, 1), torch.tensor([0, 4]), 4)
