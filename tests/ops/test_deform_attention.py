import math

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from bev_lightning.ops.backend import use_reference
from bev_lightning.ops.deform_attention import multi_scale_deformable_attention

SHAPES = [(3, 4), (2, 1)]


def make(
    batch: int = 2, queries: int = 5, heads: int = 2, width: int = 3, points: int = 2
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    cells = sum(height * columns for height, columns in SHAPES)
    value = torch.randn(batch, cells, heads, width, generator=generator, dtype=torch.float64)
    layout = (batch, queries, heads, len(SHAPES), points)
    # A little beyond the borders, where the map fades out.
    locations = torch.rand(*layout, 2, generator=generator, dtype=torch.float64) * 1.4 - 0.2
    return value, locations, torch.rand(layout, generator=generator, dtype=torch.float64)


def sample(cells: Tensor, x: float, y: float) -> Tensor:
    """Bilinear sample of a map ``(h, w, D)`` at fractions x, y; zero outside."""
    height, width, _ = cells.shape
    column, row = x * width - 0.5, y * height - 0.5
    total = torch.zeros_like(cells[0, 0])
    for j in (math.floor(row), math.floor(row) + 1):
        for i in (math.floor(column), math.floor(column) + 1):
            if 0 <= j < height and 0 <= i < width:
                total = total + cells[j, i] * (1 - abs(column - i)) * (1 - abs(row - j))
    return total


def test_equals_loops() -> None:
    value, locations, weights = make()
    out = multi_scale_deformable_attention(value, SHAPES, locations, weights)
    assert out.shape == (2, 5, 6)
    maps = [v.unflatten(1, shape) for v, shape in zip(value.split([12, 2], 1), SHAPES, strict=True)]
    for b in range(2):
        for q in range(5):
            for head in range(2):
                wanted = torch.zeros(3, dtype=torch.float64)
                for level in range(2):
                    for point in range(2):
                        x, y = locations[b, q, head, level, point].tolist()
                        seen = sample(maps[level][b, :, :, head], x, y)
                        wanted = wanted + seen * weights[b, q, head, level, point]
                torch.testing.assert_close(out[b, q, 3 * head : 3 * head + 3], wanted)


def make_views(
    batch: int = 2, views: int = 3, queries: int = 9, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, ...]:
    """Value, locations, weights, anchors and what is seen: of each view a third of the queries, of
    the last view none."""
    _, locations, weights = make(batch, queries, points=4)
    generator = torch.Generator().manual_seed(1)
    value = torch.randn(batch * views, 14, 2, 3, generator=generator, dtype=torch.float64)
    anchors = torch.rand(batch, views, queries, 2, 2, generator=generator, dtype=torch.float64)
    seen = torch.rand(batch, views, queries, generator=generator) < 0.4
    seen[:, -1] = False
    anchors = torch.where(seen[..., None, None], anchors, torch.nan)
    inputs = (value, 0.3 * (locations - 0.5), weights, anchors)
    return *(tensor.to(dtype) for tensor in inputs), seen


def attend(value: Tensor, locations: Tensor, weights: Tensor, *views: Tensor) -> Tensor:
    return multi_scale_deformable_attention(value, SHAPES, locations, weights, *views)


def with_gradients(*inputs: Tensor) -> list[Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in inputs[:3]]
    out = attend(*leaves, *inputs[3:])
    weight = torch.arange(out.numel(), device=out.device).view(out.shape).float().cos()
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_views_and_their_gradients_equal_the_reference(dtype: torch.dtype) -> None:
    inputs = make_views(dtype=dtype)
    fast = with_gradients(*inputs)
    with use_reference():
        wanted = with_gradients(*inputs)
    torch.testing.assert_close(fast, wanted)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in fast)
    value, locations, weights, anchors, seen = inputs
    # One view after the other, of the pairs that see each other alone.
    total = torch.zeros_like(fast[0])
    for b, n, q in seen.nonzero().tolist():
        anchor = anchors[b, n, q].repeat(2, 1)
        position = locations[b : b + 1, q : q + 1] + anchor
        weight = weights[b : b + 1, q : q + 1]
        total[b, q] += attend(value[3 * b + n].unsqueeze(0), position, weight)[0, 0]
    torch.testing.assert_close(fast[0], total)


@pytest.mark.parametrize("channels", [1, 32])
def test_one_view_equals_the_reference(channels: int) -> None:
    # More queries than a block of the GPU kernel, and one channel.
    inputs = [tensor.float() for tensor in make(1, 40, 1, channels, 1)]
    fast = with_gradients(*inputs)
    with use_reference():
        torch.testing.assert_close(fast, with_gradients(*inputs), atol=1e-5, rtol=1e-4)


def test_nothing_visible() -> None:
    *inputs, seen = make_views()
    assert not any(tensor.any() for tensor in with_gradients(*inputs, torch.zeros_like(seen)))


def test_gradcheck() -> None:
    inputs = [tensor.requires_grad_() for tensor in make(batch=1, queries=2, width=2)]
    assert torch.autograd.gradcheck(attend, inputs, fast_mode=True)
    value, locations, weights, anchors, seen = make_views(1, 2, 3)
    leaves = [tensor.requires_grad_() for tensor in (value, locations, weights)]
    assert torch.autograd.gradcheck(attend, (*leaves, anchors, seen), fast_mode=True)


def test_same_bits_at_every_thread_count() -> None:
    threads = torch.get_num_threads()
    results = []
    try:
        for num in (1, 2, 3):
            torch.set_num_threads(num)
            results.append(with_gradients(*make_views(dtype=torch.float32)))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_fake_tensors_pass() -> None:
    real = make_views()
    with FakeTensorMode():
        fake = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in real]
        results = with_gradients(*fake)
    shapes = [(2, 9, 6), *(tensor.shape for tensor in real[:3])]
    assert [tuple(tensor.shape) for tensor in results] == [tuple(shape) for shape in shapes]


def attend_and_square(*inputs: Tensor) -> Tensor:
    return attend(inputs[0] * 2, *inputs[1:]).square()


def test_compiles_without_a_graph_break() -> None:
    compiled = torch.compile(attend_and_square, fullgraph=True, backend="aot_eager")
    results = []
    for function in (compiled, attend_and_square):
        value, locations, weights, *views = make_views()
        leaves = [tensor.requires_grad_() for tensor in (value, locations, weights)]
        out = function(*leaves, *views)
        results.append((out.detach(), *torch.autograd.grad(out.sum(), leaves)))
    torch.testing.assert_close(*results)


def test_exports_as_one_operator_or_as_plain_ones() -> None:
    class Attend(torch.nn.Module):
        def forward(self, *inputs: Tensor) -> Tensor:
            return attend(*inputs)

    inputs = make_views(dtype=torch.float32)
    fast = torch.export.export(Attend(), inputs)
    assert "bev_lightning.deform_attention" in str(fast.graph)
    with use_reference():
        plain = torch.export.export(Attend(), inputs)
    assert "bev_lightning" not in str(plain.graph) and "grid_sampler" in str(plain.graph)
    for program in (fast, plain):
        torch.testing.assert_close(program.module()(*inputs), attend(*inputs))


@pytest.mark.parametrize("sizes", [{"queries": 0}, {"points": 0}, {"batch": 0}])
def test_empty_inputs_have_zero_gradients(sizes: dict[str, int]) -> None:
    value, locations, weights = (tensor.requires_grad_() for tensor in make(**sizes))
    out = multi_scale_deformable_attention(value, SHAPES, locations, weights)
    assert out.shape == (*locations.shape[:2], 6)
    assert out.abs().sum() == 0
    out.sum().backward()
    for tensor in (value, locations, weights):
        assert tensor.grad is not None and tensor.grad.abs().sum() == 0


def test_a_map_without_cells_counts_nothing() -> None:
    value, locations, weights = make()
    out = multi_scale_deformable_attention(value[:, :12], [(3, 4), (0, 7)], locations, weights)
    alone = multi_scale_deformable_attention(
        value[:, :12], [(3, 4)], locations[:, :, :, :1], weights[:, :, :, :1]
    )
    torch.testing.assert_close(out, alone)


def test_strided_and_half_precision_inputs() -> None:
    value, locations, weights = make()
    wanted = attend(value, locations, weights)
    strided = value.transpose(1, 2).contiguous().transpose(1, 2)
    assert not strided.is_contiguous()
    torch.testing.assert_close(
        multi_scale_deformable_attention(strided, SHAPES, locations, weights), wanted
    )
    half = multi_scale_deformable_attention(
        value.bfloat16(), SHAPES, locations.float(), weights.bfloat16()
    )
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.double(), wanted, atol=0.05, rtol=0.02)


def test_refuses_shapes_that_do_not_fit() -> None:
    value, locations, weights = make()
    with pytest.raises(ValueError, match=r"value \(2, 14, 2, 3\) for maps \[\(3, 4\), \(2, 2\)\]"):
        multi_scale_deformable_attention(value, [(3, 4), (2, 2)], locations, weights)
    value, locations, weights, anchors, seen = make_views()
    with pytest.raises(ValueError, match=r"anchors \(2, 3, 9, 2, 2\) and seen \(2, 3, 8\)"):
        attend(value, locations, weights, anchors, seen[..., 1:])
    with pytest.raises(ValueError, match="no gradient for anchors"):
        attend(value, locations, weights, anchors.requires_grad_(), seen)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_equals_the_cpu() -> None:
    for inputs in (make_views(), make_views(dtype=torch.float32), make()):
        wanted = with_gradients(*inputs)
        got = with_gradients(*(tensor.cuda() for tensor in inputs))
        torch.testing.assert_close([tensor.cpu() for tensor in got], wanted)
