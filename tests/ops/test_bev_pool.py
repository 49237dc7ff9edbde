import pytest
import torch
from torch import Tensor

from bev_lightning.ops.bev_pool import bev_pool, bev_pool_indexed, build_pool_index

SHAPE = (5, 8)  # Y, X


def make(seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Depth ``(2, 3, 4, 2, 6)``, features ``(2, 3, 7, 2, 6)`` and cells, a third outside."""
    generator = torch.Generator().manual_seed(seed)
    depth = torch.rand(2, 3, 4, 2, 6, generator=generator, dtype=dtype)
    features = torch.randn(2, 3, 7, 2, 6, generator=generator, dtype=dtype)
    cells = torch.randint(-20, SHAPE[0] * SHAPE[1], depth.shape, generator=generator)
    return depth, features, cells.clamp(min=-1).int()


def pool_plainly(depth: Tensor, features: Tensor, cells: Tensor) -> Tensor:
    """The definition: the outer product in full, one point after the other."""
    batch, channels = features.shape[0], features.shape[2]
    lifted = depth.unsqueeze(2) * features.unsqueeze(3)
    out = lifted.new_zeros(batch, channels, SHAPE[0] * SHAPE[1])
    for place in (cells >= 0).nonzero().tolist():
        b, n, d, v, u = place
        out[b, :, int(cells[b, n, d, v, u])] += lifted[b, n, :, d, v, u]
    return out.unflatten(2, SHAPE)


@pytest.mark.parametrize("seed", range(3))
def test_equals_the_definition(seed: int) -> None:
    depth, features, cells = make(seed)
    pooled = bev_pool(depth, features, cells, SHAPE)
    assert pooled.shape == (2, 7, *SHAPE)
    torch.testing.assert_close(pooled, pool_plainly(depth, features, cells))


def test_gradients_equal_the_definition() -> None:
    grads = []
    for pool in (lambda *args: bev_pool(*args, SHAPE), pool_plainly):
        depth, features, cells = make()
        depth.requires_grad_()
        features.requires_grad_()
        out = pool(depth, features, cells)
        weight = torch.arange(out.numel(), dtype=torch.float32).view(out.shape).cos()
        grads.append(torch.autograd.grad((out * weight).sum(), (depth, features)))
    torch.testing.assert_close(grads[0], grads[1])
    assert grads[0][0].abs().sum() > 1


def test_gradcheck() -> None:
    depth, features, cells = make(dtype=torch.float64)
    depth, features = depth[:, :2, :, :, :3], features[:, :2, :2, :, :3]
    cells = cells[:, :2, :, :, :3]
    inputs = (depth.clone().requires_grad_(), features.clone().requires_grad_())
    assert torch.autograd.gradcheck(lambda d, f: bev_pool(d, f, cells, SHAPE), inputs)


@pytest.mark.parametrize("wanted", ["depth", "features"])
def test_gradient_of_one_input_alone(wanted: str) -> None:
    depth, features, cells = make()
    leaf = (depth if wanted == "depth" else features).requires_grad_()
    bev_pool(depth, features, cells, SHAPE).sum().backward()
    assert leaf.grad is not None and leaf.grad.abs().sum() > 1


def test_nothing_visible() -> None:
    depth, features, _ = make()
    depth.requires_grad_()
    features.requires_grad_()
    pooled = bev_pool(depth, features, torch.full(depth.shape, -1), SHAPE)
    assert pooled.shape == (2, 7, *SHAPE) and not pooled.any()
    pooled.sum().backward()
    assert depth.grad is not None and not depth.grad.any()
    assert features.grad is not None and not features.grad.any()


def test_one_sample_sees_nothing() -> None:
    depth, features, cells = make()
    cells[0] = -1
    pooled = bev_pool(depth, features, cells, SHAPE)
    assert not pooled[0].any()
    torch.testing.assert_close(pooled[1:], pool_plainly(depth[1:], features[1:], cells[1:]))


def test_all_points_in_one_cell() -> None:
    depth, features, cells = make()
    pooled = bev_pool(depth, features, torch.full_like(cells, 11), SHAPE)
    total = torch.einsum("bndhw,bnchw->bc", depth, features)
    torch.testing.assert_close(pooled[:, :, 1, 3], total)
    pooled[:, :, 1, 3] = 0
    assert not pooled.any()


def test_inputs_that_are_not_contiguous() -> None:
    depth, features, cells = make()
    wanted = bev_pool(depth, features, cells, SHAPE)
    stored_otherwise = [x.transpose(1, 4).contiguous().transpose(1, 4) for x in make()]
    assert not stored_otherwise[0].is_contiguous()
    torch.testing.assert_close(bev_pool(*stored_otherwise, SHAPE), wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_float32(dtype: torch.dtype) -> None:
    # 4096 points of 1 and one of 8 more: float16 stops counting at 2048, bfloat16 at 256.
    depth = torch.ones(1, 1, 4096, 1, 1, dtype=dtype, requires_grad=True)
    features = torch.ones(1, 1, 1, 1, 1, dtype=dtype, requires_grad=True)
    pooled = bev_pool(depth, features, torch.zeros(1, 1, 4096, 1, 1).int(), (1, 2))
    assert pooled.dtype == dtype
    assert pooled.flatten().tolist() == [4096, 0]
    pooled.sum().backward()
    assert features.grad is not None and features.grad.item() == 4096
    assert depth.grad is not None and depth.grad.dtype == dtype and bool((depth.grad == 1).all())


def test_float32_depth_with_half_features_under_autocast() -> None:
    depth, features, cells = make()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pooled = bev_pool(depth, features.bfloat16(), cells, SHAPE)
    wanted = bev_pool(depth, features.bfloat16().float(), cells, SHAPE)
    assert pooled.dtype == torch.bfloat16
    torch.testing.assert_close(pooled, wanted.bfloat16())


def test_an_index_can_be_used_again() -> None:
    _, _, cells = make()
    index = build_pool_index(cells, SHAPE)
    assert index.points.dtype == torch.int32
    for seed in range(2):
        depth, features, _ = make(seed)
        pooled = bev_pool_indexed(depth, features, index)
        assert torch.equal(pooled, bev_pool(depth, features, cells, SHAPE))


def test_same_bits_at_every_thread_count() -> None:
    threads = torch.get_num_threads()
    results = []
    try:
        for num in (1, 2, 2):
            torch.set_num_threads(num)
            depth, features, cells = make()
            depth.requires_grad_()
            features.requires_grad_()
            pooled = bev_pool(depth, features, cells, SHAPE)
            results.append((pooled, *torch.autograd.grad(pooled.square().sum(), (depth, features))))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_equals_the_cpu_and_repeats_to_the_bit() -> None:
    results = []
    for device in ("cpu", "cuda", "cuda"):
        depth, features, cells = (x.to(device) for x in make())
        depth.requires_grad_()
        features.requires_grad_()
        pooled = bev_pool(depth, features, cells, SHAPE)
        grads = torch.autograd.grad(pooled.square().sum(), (depth, features))
        results.append([x.cpu() for x in (pooled, *grads)])
    torch.testing.assert_close(results[1], results[0])
    assert all(torch.equal(a, b) for a, b in zip(results[1], results[2], strict=True))
