"""Attention with dropout against its definition, with the weights that it dropped."""

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from bev_lightning.ops.attention import attention
from bev_lightning.ops.attention import cpu as attention_cpu
from bev_lightning.ops.backend import use_reference


def make(queries: int = 5, keys: int = 7, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(2, 3, count, 4, generator=generator, dtype=dtype).requires_grad_()
        for count in (queries, keys, keys)
    ]


def attend(*tensors: Tensor, dropout: float = 0.3, seed: int = 8) -> Tensor:
    torch.manual_seed(seed)
    return attention(*tensors, dropout=dropout)


def kept_weights(query: Tensor, key: Tensor, dropout: float = 0.3) -> Tensor:
    """``(B, H, Q, K)``, what becomes of values that are the rows of a unit matrix."""
    unit = torch.eye(key.shape[2], dtype=query.dtype).expand(2, 3, -1, -1)
    return attend(query, key, unit, dropout=dropout)


def test_weights_are_dropped_or_enlarged() -> None:
    query, key, _ = make(40, 60)
    weights = F.softmax(query @ key.transpose(2, 3) / 2, -1)
    ratio = (kept_weights(query, key) / weights).detach()
    kept = ratio > 0.5
    torch.testing.assert_close(ratio, kept.to(ratio.dtype) / 0.7)
    assert 0.28 < 1 - kept.double().mean() < 0.32
    # Neither rows nor columns, heads or samples have anything in common.
    for dim in range(4):
        others = [other for other in range(4) if other != dim]
        share = kept.double().mean(others)
        assert (share - 0.7).abs().max() < 5 * (0.21 / (kept.numel() / kept.shape[dim])) ** 0.5
    for one, other in (
        (kept[0], kept[1]),
        (kept[:, 0], kept[:, 2]),
        (kept[:, :, 1:], kept[:, :, :-1]),
    ):
        assert abs((one == other).double().mean() - 0.58) < 0.02
    assert not torch.equal(attend(*make(), seed=8), attend(*make(), seed=9))


def test_output_and_gradients_are_the_definitions(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    tensors = make()
    kept = kept_weights(*tensors[:2]).detach() != 0
    weights = F.softmax(tensors[0] @ tensors[1].transpose(2, 3) / 2, -1)
    expected = (weights * kept / 0.7) @ tensors[2]
    grad = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, tensors, grad)
    for chunk in (1, attention_cpu._CHUNK_BYTES):  # one head at a time, and all
        monkeypatch.setattr(attention_cpu, "_CHUNK_BYTES", chunk)
        out = attend(*tensors)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(torch.autograd.grad(out, tensors, grad), wanted)
    assert gradcheck(attend, tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_types(dtype: torch.dtype) -> None:
    tensors = make(dtype=dtype)
    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    out, expected = attend(*tensors), attend(*wide)
    grads = torch.autograd.grad(out.sum(), tensors)
    atol = {torch.float32: 1e-5}.get(dtype, 3e-2)
    assert {out.dtype, *(grad.dtype for grad in grads)} == {dtype}
    for one, other in zip(
        (out, *grads), (expected, *torch.autograd.grad(expected.sum(), wide)), strict=True
    ):
        torch.testing.assert_close(one.double(), other, atol=atol, rtol=0)


@pytest.mark.parametrize(("queries", "keys"), [(0, 7), (1, 1), (5, 0)])
def test_few_and_none(queries: int, keys: int) -> None:
    tensors = make(queries, keys)
    out = attend(*tensors)
    assert out.shape == (2, 3, queries, 4)
    if not keys:
        assert not out.any()
    grads = torch.autograd.grad(out.sum(), tensors)
    assert [grad.shape for grad in grads] == [tensor.shape for tensor in tensors]


def test_number_of_threads_does_not_matter() -> None:
    tensors = make(30, 50, torch.float32)
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            out = attend(*tensors)
            results.append((out, *torch.autograd.grad(out.sum(), tensors)))
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(*results)
    assert all(torch.equal(a == 0, b == 0) for a, b in zip(*results, strict=True))


def test_without_dropout_or_with_a_mask_it_is_pytorchs() -> None:
    tensors = make()
    hidden = torch.rand(2, 1, 5, 7) < 0.3
    plain = F.scaled_dot_product_attention(*tensors)
    assert torch.equal(attention(*tensors), plain)
    assert torch.equal(
        attention(*tensors, hidden=hidden), F.scaled_dot_product_attention(*tensors, ~hidden)
    )
    torch.manual_seed(1)
    expected = F.scaled_dot_product_attention(*tensors, dropout_p=0.3)
    with use_reference():
        assert torch.equal(attend(*tensors, seed=1), expected)


def test_compile_fake_tensors_and_flops_pass_through() -> None:
    tensors = make(dtype=torch.float32)
    seed = torch.tensor([5])
    torch.library.opcheck(torch.ops.bev_lightning.attention, (*tensors, 0.3, seed))
    with FlopCounterMode(display=False) as ours:
        attend(*tensors).sum().backward()
    with FlopCounterMode(display=False) as theirs, use_reference():
        attend(*tensors).sum().backward()
    assert ours.get_total_flops() == theirs.get_total_flops() == 3 * 2 * 3 * 4 * 5 * 7 * 4
