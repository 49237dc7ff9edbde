import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from bev_lightning.ops.backend import use_reference
from bev_lightning.ops.bev_pool import bev_pool, build_pool_index

SHAPE = (5, 8)  # Y, X


def make(seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Depth ``(2, 3, 4, 2, 6)``, features ``(2, 3, 7, 2, 6)`` and cells, a third outside."""
    generator = torch.Generator().manual_seed(seed)
    depth = torch.rand(2, 3, 4, 2, 6, generator=generator, dtype=dtype)
    features = torch.randn(2, 3, 7, 2, 6, generator=generator, dtype=dtype)
    cells = torch.randint(-20, SHAPE[0] * SHAPE[1], depth.shape, generator=generator)
    return depth, features, cells.clamp(min=-1).int()


def pool(depth: Tensor, features: Tensor, cells: Tensor) -> Tensor:
    return bev_pool(depth, features, build_pool_index(cells, SHAPE))


def pool_plainly(depth: Tensor, features: Tensor, cells: Tensor) -> Tensor:
    """The definition: the outer product in full, one point after the other."""
    batch, channels = features.shape[0], features.shape[2]
    lifted = depth.unsqueeze(2) * features.unsqueeze(3)
    out = lifted.new_zeros(batch, channels, SHAPE[0] * SHAPE[1])
    for b, n, d, v, u in (cells >= 0).nonzero().tolist():
        out[b, :, int(cells[b, n, d, v, u])] += lifted[b, n, :, d, v, u]
    return out.unflatten(2, SHAPE)


def with_gradients(depth: Tensor, features: Tensor, cells: Tensor) -> list[Tensor]:
    depth = depth.detach().requires_grad_()
    features = features.detach().requires_grad_()
    out = pool(depth, features, cells)
    weight = torch.arange(out.numel(), device=out.device).view(out.shape).float().cos()
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), (depth, features))]


@pytest.mark.parametrize("seed", range(2))
def test_equals_the_definition(seed: int) -> None:
    depth, features, cells = make(seed)
    pooled = pool(depth, features, cells)
    assert pooled.shape == (2, 7, *SHAPE)
    torch.testing.assert_close(pooled, pool_plainly(depth, features, cells))
    with use_reference():
        torch.testing.assert_close(pool(depth, features, cells), pooled)


def test_gradients_equal_the_definition() -> None:
    grads = []
    for function in (pool, pool_plainly):
        depth, features, cells = make()
        depth.requires_grad_()
        features.requires_grad_()
        out = function(depth, features, cells)
        weight = torch.arange(out.numel(), dtype=torch.float32).view(out.shape).cos()
        grads.append(torch.autograd.grad((out * weight).sum(), (depth, features)))
    torch.testing.assert_close(grads[0], grads[1])
    assert grads[0][0].abs().sum() > 1


@pytest.mark.parametrize(
    "size", [(1, 1, 1, 1, 1), (2, 1, 19, 3, 5), (1, 2, 0, 3, 5), (0, 2, 3, 2, 2)]
)
@pytest.mark.parametrize("channels", [1, 20])
def test_equals_the_reference_at_other_sizes(size: tuple[int, ...], channels: int) -> None:
    generator = torch.Generator().manual_seed(1)
    depth = torch.rand(size, generator=generator)
    features = torch.randn(*size[:2], channels, *size[3:], generator=generator)
    cells = torch.randint(-9, 40, size, generator=generator).clamp(-1)
    fast = with_gradients(depth, features, cells)
    with use_reference():
        wanted = with_gradients(depth, features, cells)
    torch.testing.assert_close(fast, wanted)


def test_gradcheck() -> None:
    depth, features, cells = make(dtype=torch.float64)
    depth, features = depth[:, :2, :, :, :3], features[:, :2, :2, :, :3]
    cells = cells[:, :2, :, :, :3]
    inputs = (depth.clone().requires_grad_(), features.clone().requires_grad_())
    assert torch.autograd.gradcheck(lambda d, f: pool(d, f, cells), inputs, fast_mode=True)


@pytest.mark.parametrize("wanted", ["depth", "features"])
def test_gradient_of_one_input_alone(wanted: str) -> None:
    depth, features, cells = make()
    leaf = (depth if wanted == "depth" else features).requires_grad_()
    pool(depth, features, cells).sum().backward()
    assert leaf.grad is not None and leaf.grad.abs().sum() > 1


def test_nothing_visible() -> None:
    depth, features, _ = make()
    pooled, *grads = with_gradients(depth, features, torch.full(depth.shape, -1))
    assert pooled.shape == (2, 7, *SHAPE) and not pooled.any()
    assert not any(grad.any() for grad in grads)


def test_one_sample_sees_nothing() -> None:
    depth, features, cells = make()
    cells[0] = -1
    pooled = pool(depth, features, cells)
    assert not pooled[0].any()
    torch.testing.assert_close(pooled[1:], pool_plainly(depth[1:], features[1:], cells[1:]))


def test_all_points_in_one_cell() -> None:
    depth, features, cells = make()
    pooled = pool(depth, features, torch.full_like(cells, 11))
    total = torch.einsum("bndhw,bnchw->bc", depth, features)
    torch.testing.assert_close(pooled[:, :, 1, 3], total)
    pooled[:, :, 1, 3] = 0
    assert not pooled.any()


def test_inputs_that_are_not_contiguous() -> None:
    wanted = with_gradients(*make())
    stored_otherwise = [x.transpose(1, 4).contiguous().transpose(1, 4) for x in make()]
    assert not stored_otherwise[0].is_contiguous()
    torch.testing.assert_close(with_gradients(*stored_otherwise), wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_float32(dtype: torch.dtype) -> None:
    # 4096 points of 1: float16 stops counting at 2048, bfloat16 at 256.
    depth = torch.ones(1, 1, 4096, 1, 1, dtype=dtype, requires_grad=True)
    features = torch.ones(1, 1, 1, 1, 1, dtype=dtype, requires_grad=True)
    index = build_pool_index(torch.zeros(1, 1, 4096, 1, 1).int(), (1, 2))
    pooled = bev_pool(depth, features, index)
    assert pooled.dtype == dtype
    assert pooled.flatten().tolist() == [4096, 0]
    pooled.sum().backward()
    assert features.grad is not None and features.grad.item() == 4096
    assert depth.grad is not None and depth.grad.dtype == dtype and bool((depth.grad == 1).all())


def test_float32_depth_with_half_features_under_autocast() -> None:
    depth, features, cells = make()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pooled, grad_depth, _ = with_gradients(depth, features.bfloat16(), cells)
    wanted = pool(depth, features.bfloat16().float(), cells)
    assert pooled.dtype == torch.bfloat16 and grad_depth.dtype == torch.float32
    torch.testing.assert_close(pooled, wanted.bfloat16())


def test_the_index_is_the_same_by_counting_and_by_sorting() -> None:
    cells = make()[2]
    fast = build_pool_index(cells, SHAPE)
    with use_reference():
        wanted = build_pool_index(cells.long(), SHAPE)
    for name in ("cells", "points", "pixels", "starts"):
        assert getattr(fast, name).dtype == torch.int32
        assert torch.equal(getattr(fast, name), getattr(wanted, name)), name
    flat = cells.flatten()[fast.points.long()]
    assert fast.starts[-1] == (cells >= 0).sum() and bool((flat[fast.starts[-1] :] < 0).all())


def test_refusals() -> None:
    depth, features, cells = make()
    index = build_pool_index(cells, SHAPE)
    with pytest.raises(ValueError, match=r"depth \(2, 2, 4, 2, 6\)"):
        bev_pool(depth[:, :2], features[:, :2], index)
    with pytest.raises(ValueError, match="lower the batch size"):
        build_pool_index(torch.zeros(1, 1, 1, 1, 1).int().expand(9, 1, 1, 1, 1), (2**14, 2**14))


def test_same_bits_at_every_thread_count() -> None:
    threads = torch.get_num_threads()
    results = []
    try:
        for num in (1, 2, 3):
            torch.set_num_threads(num)
            results.append(with_gradients(*make()))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_fake_tensors_pass() -> None:
    with FakeTensorMode():
        depth, features = torch.empty(2, 3, 4, 2, 6), torch.empty(2, 3, 7, 2, 6)
        out, *grads = with_gradients(depth, features, torch.empty(2, 3, 4, 2, 6).int())
    assert out.shape == (2, 7, *SHAPE)
    assert [grad.shape for grad in grads] == [depth.shape, features.shape]


def test_compiles_without_a_graph_break() -> None:
    compiled = torch.compile(with_gradients_of_sum, fullgraph=True, backend="aot_eager")
    depth, features, cells = make()
    depth.requires_grad_()
    for function in (compiled, with_gradients_of_sum):
        depth.grad = None
        out = function(depth, features, cells)
        out.square().sum().backward()
        if function is compiled:
            got = (out.detach(), depth.grad)
    torch.testing.assert_close(got, (out.detach(), depth.grad))


def with_gradients_of_sum(depth: Tensor, features: Tensor, cells: Tensor) -> Tensor:
    return pool(depth.softmax(2), features, cells)


def test_exports_as_one_operator_or_as_plain_ones() -> None:
    class Pool(torch.nn.Module):
        def forward(self, depth: Tensor, features: Tensor, cells: Tensor) -> Tensor:
            return pool(depth, features, cells)

    fast = torch.export.export(Pool(), make())
    assert "bev_lightning.bev_pool" in str(fast.graph)
    with use_reference():
        plain = torch.export.export(Pool(), make())
    assert "bev_lightning" not in str(plain.graph)
    for program in (fast, plain):
        torch.testing.assert_close(program.module()(*make(3)), pool(*make(3)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_equals_the_cpu_and_repeats_to_the_bit() -> None:
    results = []
    for device in ("cpu", "cuda", "cuda"):
        got = with_gradients(*(x.to(device) for x in make()))
        results.append([x.cpu() for x in got])
    torch.testing.assert_close(results[1], results[0])
    assert all(torch.equal(a, b) for a, b in zip(results[1], results[2], strict=True))
