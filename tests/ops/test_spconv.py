"""spconv behind our rulebooks. What needs it skips without; its CPU wheel is enough."""

import pytest
import torch
from torch import Tensor

from bev_lightning.errors import InputError
from bev_lightning.models.sparse_encoder import SparseEncoder
from bev_lightning.ops.backend import use_reference
from bev_lightning.ops.sparse_conv import (
    Rulebook,
    build_strided_rulebook,
    build_submanifold_rulebook,
    sparse_conv,
)
from bev_lightning.ops.sparse_conv.spconv import check_installed, convolve, is_installed, list_pairs
from bev_lightning.ops.voxelize import voxelize_hard

SHAPE = (5, 12, 14)
needs_spconv = pytest.mark.skipif(not is_installed(), reason="pip install spconv")


def make_coords(num: int = 150, seed: int = 0) -> Tensor:
    flat = torch.randperm(2 * 5 * 12 * 14, generator=torch.Generator().manual_seed(seed))[:num]
    rows = [flat // 840, flat // 168 % 5, flat // 14 % 12, flat % 14]
    return torch.stack(rows, dim=1)


def make_rulebook(coords: Tensor, strided: bool) -> Rulebook:
    if strided:
        return build_strided_rulebook(coords, SHAPE, (3, 3, 3), (2, 2, 2), (1, 1, 1))[0]
    return build_submanifold_rulebook(coords, SHAPE, (3, 3, 3))


@pytest.mark.parametrize("strided", [False, True])
def test_lists_hold_the_pairs_of_the_table(strided: bool) -> None:
    sources = make_rulebook(make_coords(), strided).sources
    pairs, counts = list_pairs(sources)
    assert pairs.dtype == counts.dtype == torch.int32
    assert counts.sum() == (sources >= 0).sum() > 100
    for offset, count in enumerate(counts.tolist()):
        inputs, outputs = pairs[:, offset, :count].long()
        assert torch.equal(sources[offset, outputs].long(), inputs)
        assert (inputs >= 0).all()
        assert len(outputs.unique()) == count


def test_lists_of_nothing() -> None:
    pairs, counts = list_pairs(torch.zeros(27, 0, dtype=torch.int32))
    assert pairs.shape == (2, 27, 0)
    assert counts.tolist() == [0] * 27


@needs_spconv
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("num", [150, 1, 0])
def test_spconv_equals_the_reference(
    strided: bool, num: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not torch.cuda.is_available():  # its backward pass asks for a stream on the CPU too
        monkeypatch.setattr("spconv.pytorch.ops.get_current_stream", lambda: 0)
    rulebook = make_rulebook(make_coords(num), strided)
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(num, 6, generator=generator)
    weight = torch.randn(3, 3, 3, 6, 8, generator=generator) / 10
    bias = torch.randn(8, generator=generator)
    results = []
    for given in (Rulebook(rulebook.sources, rulebook.targets, spconv=True), rulebook):
        leaves = [v.clone().requires_grad_() for v in (features, weight, bias)]
        if given.spconv:
            out = sparse_conv(leaves[0], leaves[1], given, leaves[2])
        else:
            with use_reference():
                out = sparse_conv(leaves[0], leaves[1], given, leaves[2])
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
        out.backward(grad)
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, atol=1e-4, rtol=1e-4)


@needs_spconv
def test_bfloat16_is_widened() -> None:
    sources = make_rulebook(make_coords(), strided=False).sources
    features, weight = torch.randn(150, 4).bfloat16(), torch.randn(27, 4, 4).bfloat16()
    out = convolve(features, weight, None, sources)
    wide = convolve(features.float(), weight.float(), None, sources)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, wide.bfloat16())


@needs_spconv
@pytest.mark.parametrize("training", [False, True])
def test_the_encoder_gives_the_same_map_with_either(training: bool) -> None:
    torch.manual_seed(0)
    kinds: dict = {"shape": (11, 32, 32), "base_channels": 4, "out_channels": 8}
    kinds |= {"stage_channels": ((4, 8), (8, 8)), "down_paddings": ((1, 1, 1),)}
    own = SparseEncoder(**kinds, backend="own").train(training)
    other = SparseEncoder(**kinds, backend="spconv").train(training)
    other.load_state_dict(own.state_dict())
    coords = torch.cat([torch.zeros(200, 1).long(), torch.randint(0, 11, (200, 3))], dim=1)
    coords = coords.unique(dim=0)
    features = torch.randn(len(coords), 5)
    one, two = (encoder(features, encoder.plan(coords, 1)) for encoder in (own, other))
    assert one.abs().max() > 0.01
    torch.testing.assert_close(one, two, atol=1e-4, rtol=1e-4)


def test_what_is_not_there_is_refused_with_the_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bev_lightning.ops.sparse_conv.spconv.is_installed", lambda: False)
    with pytest.raises(InputError, match="backend=spconv needs spconv, .*: pip install spconv-cu"):
        check_installed("backend")
    with pytest.raises(InputError, match=r"encoder\.backend=spconv needs spconv"):
        SparseEncoder(backend="spconv")
    with pytest.raises(InputError, match=r"backend=cuda is unknown: use auto, own or spconv"):
        SparseEncoder(backend="cuda")


def test_auto_is_our_own_on_a_cpu_and_for_tensors_without_contents() -> None:
    kinds: dict = {"shape": (11, 32, 32), "stage_channels": ((16, 16), (16,))}
    encoder = SparseEncoder(**kinds, down_paddings=((1, 1, 1),), backend="auto")
    plan = encoder.plan(torch.zeros(1, 4, dtype=torch.int64), 1)
    assert not plan.output.spconv
    assert not plan.stages[0].submanifold.spconv


@pytest.mark.gpu
@needs_spconv
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_spconv_equals_ours_on_cuda(dtype: torch.dtype) -> None:
    rulebook = make_rulebook(make_coords().cuda(), strided=True)
    features = torch.randn(150, 16, device="cuda").to(dtype)
    weight = torch.randn(3, 3, 3, 16, 16, device="cuda").to(dtype) / 10
    own = sparse_conv(features, weight, rulebook)
    other = sparse_conv(features, weight, Rulebook(rulebook.sources, rulebook.targets, True))
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(other, own, atol=tolerance, rtol=tolerance)


@needs_spconv
@pytest.mark.parametrize("max_voxels", [40, 4000])
def test_voxels_are_those_of_spconvs_generator(max_voxels: int) -> None:
    """The same voxels in the same order, with the same points."""
    from spconv.pytorch.utils import PointToVoxel

    reach, cell = (-5.0, -4.0, -1.0, 5.0, 4.0, 3.0), (0.5, 0.5, 0.25)
    points = torch.rand(3000, 5, generator=torch.Generator().manual_seed(0)) * 12 - 6
    points[20:400] = torch.tensor([1.2, 1.2, 0.6, 7.0, 7.0]) + points[20:400] / 100  # too many
    features, coords, number = voxelize_hard(
        points[None], torch.tensor([3000]), reach, cell, 10, max_voxels
    )
    expected = PointToVoxel(cell, reach, 5, max_voxels, 10)(points)
    assert number.max() == 10
    assert torch.equal(features, expected[0])
    assert torch.equal(coords[:, 1:].int(), expected[1])
    assert torch.equal(number.int(), expected[2])
