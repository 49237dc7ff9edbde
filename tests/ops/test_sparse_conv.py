"""Sparse convolution against a dense one that is masked to the voxels."""

from contextlib import nullcontext

import pytest
import torch
from torch.nn import functional as F

from bev_lightning.ops.backend import use_reference
from bev_lightning.ops.sparse_conv import (
    Rulebook,
    build_strided_rulebook,
    build_submanifold_rulebook,
    sparse_conv,
)

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


@pytest.mark.parametrize("num", [0, 1, 60, 420])
def test_rulebooks_of_all_paths_are_the_same(num):
    _, coords = _voxels(num, 1)
    for sorted_coords in (coords, coords[_flat(coords).argsort()]):
        fast = build_submanifold_rulebook(sorted_coords, SHAPE, (3, 3, 3))
        with use_reference():
            plain = build_submanifold_rulebook(sorted_coords, SHAPE, (3, 3, 3))
        _same_rulebook(fast, plain)
        assert fast.sources.shape == (27, num)
    for settings in STRIDED:
        fast, fast_coords, shape = build_strided_rulebook(coords, SHAPE, *settings)
        with use_reference():
            plain, plain_coords, _ = build_strided_rulebook(coords, SHAPE, *settings)
        _same_rulebook(fast, plain)
        assert torch.equal(fast_coords, plain_coords)
        assert len(fast_coords) == len(torch.unique(_flat(fast_coords, shape)))


def _flat(coords, shape=SHAPE):
    sample, z, y, x = coords.unbind(1)
    return ((sample * shape[0] + z) * shape[1] + y) * shape[2] + x


def _same_rulebook(one: Rulebook, other: Rulebook) -> None:
    assert one.sources.dtype == other.sources.dtype == torch.int32
    assert torch.equal(one.sources, other.sources)
    assert (one.targets is None) == (other.targets is None)
    assert one.targets is None or torch.equal(one.targets, other.targets)


def test_sources_and_targets_are_the_same_pairs():
    _, coords = _voxels(60, 1)
    books = [build_submanifold_rulebook(coords, SHAPE, (3, 3, 3))]
    books += [build_strided_rulebook(coords, SHAPE, *settings)[0] for settings in STRIDED]
    for book in books:
        forward = {
            (k, i, o)
            for k, row in enumerate(book.sources.tolist())
            for o, i in enumerate(row)
            if i >= 0
        }
        targets = book.sources.flip(0) if book.targets is None else book.targets
        back = {
            (k, i, o) for k, row in enumerate(targets.tolist()) for i, o in enumerate(row) if o >= 0
        }
        assert forward == back
        assert len(forward) > 30


@pytest.mark.parametrize("num", [0, 1, 150])
@pytest.mark.parametrize(("cin", "cout"), [(1, 3), (18, 70)])
@pytest.mark.parametrize("strided", [False, True])
def test_equals_the_reference_at_other_sizes(num, cin, cout, strided):
    features, coords = _voxels(num, cin)
    book = build_submanifold_rulebook(coords, SHAPE, (3, 3, 3))
    if strided:
        book, _, _ = build_strided_rulebook(coords, SHAPE, *STRIDED[0])
    generator = torch.Generator().manual_seed(cin)
    weight = torch.randn(3, 3, 3, cin, cout, generator=generator)
    bias = torch.randn(cout, generator=generator)
    results = []
    for context in (nullcontext(), use_reference()):
        leaves = [t.clone().requires_grad_() for t in (features, weight, bias)]
        with context:
            out = sparse_conv(leaves[0], leaves[1], book, leaves[2])
        assert out.shape == (book.sources.shape[1], cout)
        upstream = torch.arange(out.numel()).view(out.shape).float().cos()
        results.append([out.detach(), *torch.autograd.grad(out, leaves, upstream)])
    torch.testing.assert_close(*results, atol=2e-4, rtol=1e-4)


def test_takes_tensors_that_are_not_contiguous():
    features, coords = _voxels(60, 8)
    book = build_submanifold_rulebook(coords, SHAPE, (3, 3, 3))
    weight = torch.randn(4, 8, 3, 3, 3).permute(2, 3, 4, 1, 0)
    wide = torch.stack([features, features], dim=2)[..., 1]
    out = sparse_conv(wide, weight, book)
    assert not wide.is_contiguous()
    assert torch.equal(out, sparse_conv(features, weight.contiguous(), book))
    one_sided = torch.randn(4, 60).T.requires_grad_()
    (out * one_sided).sum().backward()
    assert one_sided.grad is not None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_half_is_summed_in_float32(dtype):
    features, coords = _voxels(400, 8)
    book = build_submanifold_rulebook(coords, SHAPE, (3, 3, 3))
    weight = torch.randn(3, 3, 3, 8, 4)
    exact = sparse_conv(features.to(dtype).float(), weight.to(dtype).float(), book)
    half = sparse_conv(features.to(dtype), weight.to(dtype), book)
    assert half.dtype == dtype
    torch.testing.assert_close(half, exact.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-3)


def test_gradcheck():
    features, coords = _voxels(20, 2, torch.float64)
    weight = torch.randn(3, 3, 3, 2, 3, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(3, dtype=torch.float64, requires_grad=True)
    features.requires_grad_()
    same = build_submanifold_rulebook(coords, SHAPE, (3, 3, 3))
    strided, _, _ = build_strided_rulebook(coords, SHAPE, (3, 3, 3), (2, 2, 2), (1, 1, 0))
    for rulebook in (same, strided):
        assert torch.autograd.gradcheck(
            lambda f, w, b, book=rulebook: sparse_conv(f, w, book, b), (features, weight, bias)
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
    bias = torch.randn(3, requires_grad=True)
    operators = torch.ops.bev_lightning
    for arguments in ((features, weight, bias), (features, weight, None)):
        torch.library.opcheck(operators.sparse_conv, (*arguments, book.sources, book.targets))
    torch.library.opcheck(operators.pair_neighbours, (coords, SHAPE, (3, 3, 3)))
    torch.library.opcheck(operators.pair_strided, (coords, (3, 4, 3), *STRIDED[0]))


def test_even_submanifold_kernel_is_refused():
    with pytest.raises(ValueError, match="odd kernel"):
        build_submanifold_rulebook(torch.zeros(0, 4).long(), SHAPE, (3, 2, 3))
