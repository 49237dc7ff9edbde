"""Sparse convolution against a dense one that is masked to the voxels."""

import pytest
import torch
from torch.nn import functional as F

from bev_lightning.ops.sparse_conv import (
    _pair_neighbours,
    _pair_strided,
    build_strided_rulebook,
    build_submanifold_rulebook,
    sparse_conv,
)
from bev_lightning.ops.sparse_conv_cpu import pair_neighbours, pair_strided

SHAPE = (5, 7, 6)
STRIDED = [
    ((3, 3, 3), (2, 2, 2), (1, 1, 1)),
    ((3, 3, 3), (2, 2, 2), (0, 1, 1)),
    ((3, 1, 1), (2, 1, 1), (0, 0, 0)),
    ((2, 3, 1), (1, 3, 2), (0, 2, 0)),
]


def _voxels(num: int, channels: int, dtype: torch.dtype = torch.float32):
    """Distinct voxels of two samples in random order."""
    generator = torch.Generator().manual_seed(num)
    depth, height, width = SHAPE
    flat = torch.randperm(2 * depth * height * width, generator=generator)[:num]
    coords = [flat // (depth * height * width), flat // (height * width) % depth]
    coords = torch.stack([*coords, flat // width % height, flat % width], dim=1)
    return torch.randn(num, channels, generator=generator, dtype=dtype), coords


def _dense(features, coords, weight, stride, padding):
    """Convolve a dense grid: ``(2, Cout, Z, Y, X)``."""
    grid = features.new_zeros(2, *SHAPE, features.shape[1])
    grid = grid.index_put(tuple(coords.T), features)
    return F.conv3d(grid.movedim(-1, 1), weight.permute(4, 3, 0, 1, 2), None, stride, padding)


def _at(dense, coords):
    return dense.movedim(1, -1)[tuple(coords.T)]


@pytest.mark.parametrize("num", [0, 1, 60, 420])
@pytest.mark.parametrize("kernel", [(3, 3, 3), (1, 3, 5)])
def test_submanifold_equals_masked_dense(num, kernel):
    features, coords = _voxels(num, 3)
    weight = torch.randn(*kernel, 3, 4, generator=torch.Generator().manual_seed(1))
    features.requires_grad_(), weight.requires_grad_()
    rulebook = build_submanifold_rulebook(coords, SHAPE, kernel)
    padding = [extent // 2 for extent in kernel]
    expected = _at(_dense(features, coords, weight, 1, padding), coords)
    result = sparse_conv(features, weight, rulebook)
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)
    _same_gradients(result, expected, features, weight)


@pytest.mark.parametrize("num", [0, 1, 60, 420])
@pytest.mark.parametrize(("kernel", "stride", "padding"), STRIDED)
def test_strided_equals_dense(num, kernel, stride, padding):
    features, coords = _voxels(num, 3)
    weight = torch.randn(*kernel, 3, 4, generator=torch.Generator().manual_seed(1))
    features.requires_grad_(), weight.requires_grad_()
    rulebook, out_coords, out_shape = build_strided_rulebook(coords, SHAPE, kernel, stride, padding)
    dense = _dense(features, coords, weight, stride, padding)
    assert dense.shape[2:] == out_shape
    # The active outputs are those that the kernel's extent reaches, whatever its weights.
    reached = _dense(torch.ones_like(features), coords, torch.ones_like(weight), stride, padding)
    expected_coords = (reached[:, 0].detach() > 0).nonzero()
    assert torch.equal(out_coords, expected_coords)
    result, expected = sparse_conv(features, weight, rulebook), _at(dense, expected_coords)
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)
    _same_gradients(result, expected, features, weight)


def _same_gradients(result, expected, features, weight):
    upstream = torch.randn(result.shape, generator=torch.Generator().manual_seed(2))
    ours = torch.autograd.grad(result, (features, weight), upstream)
    theirs = torch.autograd.grad(expected, (features, weight), upstream)
    for got, want in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("num", [1, 60, 420])
def test_sorting_path_equals_kernels(num):
    _, coords = _voxels(num, 1)
    fast = pair_neighbours(coords.numpy(), SHAPE, (3, 3, 3))
    for ours, expected in zip(_pair_neighbours(coords, SHAPE, (3, 3, 3)), fast, strict=True):
        assert ours.tolist() == expected.tolist()
    for kernel, stride, padding in STRIDED:
        _, _, out = build_strided_rulebook(coords, SHAPE, kernel, stride, padding)
        fast = pair_strided(coords.numpy(), out, kernel, stride, padding)
        plain = _pair_strided(coords, out, kernel, stride, padding)
        for ours, expected in zip(plain, fast, strict=True):
            assert ours.tolist() == expected.tolist()


def test_sorting_path_without_voxels():
    coords = torch.zeros(0, 4, dtype=torch.int64)
    assert [len(part) for part in _pair_neighbours(coords, SHAPE, (3, 3, 3))] == [0, 0, 13]
    parts = _pair_strided(coords, (2, 3, 3), (3, 3, 3), (2, 2, 2), (1, 1, 1))
    assert [len(part) for part in parts] == [0, 0, 27, 0]


def test_gradcheck():
    features, coords = _voxels(20, 2, torch.float64)
    weight = torch.randn(3, 3, 3, 2, 3, dtype=torch.float64, requires_grad=True)
    features.requires_grad_()
    same = build_submanifold_rulebook(coords, SHAPE, (3, 3, 3))
    strided, _, _ = build_strided_rulebook(coords, SHAPE, (3, 3, 3), (2, 2, 2), (1, 1, 0))
    for rulebook in (same, strided):
        assert torch.autograd.gradcheck(
            lambda f, w, book=rulebook: sparse_conv(f, w, book), (features, weight)
        )


def test_identical_with_any_number_of_threads_and_at_every_run():
    features, coords = _voxels(400, 16)
    features.requires_grad_()
    weight = torch.randn(3, 3, 3, 16, 32, requires_grad=True)
    before, reference = torch.get_num_threads(), None
    try:
        for threads in (1, 2, 4) * 7:
            torch.set_num_threads(threads)
            results = []
            same = build_submanifold_rulebook(coords, SHAPE, (3, 3, 3))
            strided, _, _ = build_strided_rulebook(coords, SHAPE, (3, 3, 3), (2, 2, 2), (1, 1, 1))
            for rulebook in (same, strided):
                out = sparse_conv(features, weight, rulebook)
                results += [out, *torch.autograd.grad(out, (features, weight), out.detach())]
            assert torch.get_num_threads() == threads
            reference = reference or results
            assert all(torch.equal(a, b) for a, b in zip(results, reference, strict=True))
    finally:
        torch.set_num_threads(before)


def test_autocast_keeps_float32_sums():
    features, coords = _voxels(60, 8)
    weight = torch.randn(3, 3, 3, 8, 4)
    rulebook = build_submanifold_rulebook(coords, SHAPE, (3, 3, 3))
    exact = sparse_conv(features, weight, rulebook)
    with torch.autocast("cpu", torch.bfloat16):
        half = sparse_conv(features, weight, rulebook)
    assert half.dtype == torch.bfloat16
    assert (half.float() - exact).abs().max() < 0.02 * exact.abs().max()


def test_custom_op_is_well_formed():
    features, coords = _voxels(20, 2)
    book = build_submanifold_rulebook(coords, SHAPE, (3, 3, 3))
    weight = torch.randn(27, 2, 3, requires_grad=True)
    features.requires_grad_()
    arguments = (features, weight, book.inputs, book.outputs, book.counts, 20, book.centre)
    torch.library.opcheck(torch.ops.bev_lightning.sparse_conv, arguments)


def test_even_submanifold_kernel_is_refused():
    with pytest.raises(ValueError, match="odd kernel"):
        build_submanifold_rulebook(torch.zeros(0, 4).long(), SHAPE, (3, 2, 3))
