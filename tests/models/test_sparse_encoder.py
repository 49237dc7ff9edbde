"""The sparse encoder against the same layers on a dense, masked grid, and at its published size."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from bev_lightning.models.sparse_encoder import EncoderPlan, SparseEncoder, StagePlan
from bev_lightning.ops.backend import use_reference
from bev_lightning.ops.sparse_conv import Rulebook

SHAPE = (21, 8, 12)  # z, y, x


def _encoder() -> SparseEncoder:
    torch.manual_seed(0)
    return SparseEncoder(
        in_channels=3,
        shape=SHAPE,
        base_channels=4,
        stage_channels=((4, 6), (6, 6, 8), (8,)),
        down_paddings=((1, 1, 1), (0, 1, 1)),
        out_channels=5,
    )


def _voxels(num: int):
    generator = torch.Generator().manual_seed(num)
    depth, height, width = SHAPE
    flat = torch.randperm(2 * depth * height * width, generator=generator)[:num]
    coords = [flat // (depth * height * width), flat // (height * width) % depth]
    coords = torch.stack([*coords, flat // width % height, flat % width], dim=1)
    return torch.randn(num, 3, generator=generator), coords


def _dense(encoder: SparseEncoder, features, coords):
    """The same network of dense convolutions, with every map masked to the active voxels."""
    grid = features.new_zeros(2, *SHAPE, 3).index_put(tuple(coords.T), features).movedim(-1, 1)
    mask = torch.zeros(2, 1, *SHAPE).index_put(
        (coords[:, 0], torch.tensor(0), *coords[:, 1:].T), torch.tensor(1.0)
    )

    def conv(module, grid, mask, stride=1, padding=1):
        weight = module.weight.permute(4, 3, 0, 1, 2)
        if stride != 1:
            ones = torch.ones(1, 1, *weight.shape[2:])
            mask = (F.conv3d(mask, ones, stride=stride, padding=padding) > 0).float()
        return F.conv3d(grid, weight, stride=stride, padding=padding), mask

    def norm(module, grid, mask):
        return (
            module(grid.movedim(1, -1).flatten(0, -2))
            .view(*grid.movedim(1, -1).shape)
            .movedim(-1, 1)
            * mask
        )

    def block(module, grid, mask, stride=1, padding=1):
        grid, mask = conv(module[0], grid, mask, stride, padding)
        return norm(module[1], grid, mask).relu(), mask

    grid, mask = block(encoder.conv_input, grid, mask)
    for stage, padding in zip(
        encoder.encoder_layers.values(), (*encoder.down_paddings, None), strict=True
    ):
        for layer in stage:
            if hasattr(layer, "conv1"):
                hidden = norm(layer.bn1, conv(layer.conv1, grid, mask)[0], mask).relu()
                grid = (norm(layer.bn2, conv(layer.conv2, hidden, mask)[0], mask) + grid).relu()
            else:
                grid, mask = block(layer, grid, mask, 2, padding)
    grid, _ = block(encoder.conv_out, grid, mask, (2, 1, 1), 0)
    return grid.flatten(1, 2)


def test_equals_dense_masked_network_forward_and_gradient():
    encoder = _encoder().eval()
    features, coords = _voxels(150)
    features.requires_grad_()
    bev = encoder(features, encoder.plan(coords, 2))
    expected = _dense(encoder, features, coords)
    assert bev.shape == (2, 5 * 2, 2, 3) == (2, encoder.out_channels, *encoder.out_shape[1:])
    torch.testing.assert_close(bev, expected, atol=1e-4, rtol=1e-4)
    weight = torch.randn(bev.shape)
    inputs = [features, *(p for name, p in encoder.named_parameters() if "weight" in name)]
    ours = torch.autograd.grad((bev * weight).sum(), inputs)
    theirs = torch.autograd.grad((expected * weight).sum(), inputs)
    for got, want in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("num", [0, 1, 40])
def test_trains_with_few_voxels(num):
    encoder = _encoder().train()
    features, coords = _voxels(num)
    bev = encoder(features, encoder.plan(coords, 2))
    bev.sum().backward()
    assert bev.shape == (2, 10, 2, 3)
    assert torch.isfinite(bev).all()
    for name, parameter in encoder.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name


def test_same_at_any_number_of_threads():
    encoder = _encoder().eval()
    features, coords = _voxels(300)
    before, maps = torch.get_num_threads(), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        encoder.zero_grad()
        bev = encoder(features, encoder.plan(coords, 2))
        bev.square().sum().backward()
        maps.append((bev.detach(), encoder.conv_input[0].weight.grad.clone()))
    torch.set_num_threads(before)
    assert torch.equal(maps[0][0], maps[1][0]) and torch.equal(maps[0][1], maps[1][1])


def _stated_plan(encoder: SparseEncoder, counts: list[int], batch_size: int) -> EncoderPlan:
    """A plan for stated numbers of voxels that enter each stage and the last convolution's outputs;
    its rulebooks point nowhere in particular."""

    def book(offsets: int, *counts: int) -> Rulebook:
        """Columns of both tables."""
        return Rulebook(*(torch.zeros(offsets, count, dtype=torch.int32) for count in counts))

    shape, stages = encoder.shape, []
    for number, padding in enumerate((*encoder.down_paddings, None)):
        num = counts[number]
        submanifold = book(27, num)
        downsample = None
        if padding is not None:
            num = counts[number + 1]
            downsample = book(27, num, counts[number])
            shape = tuple((s + 2 * p - 3) // 2 + 1 for s, p in zip(shape, padding, strict=True))
        coords = torch.zeros(num, 4, dtype=torch.int64)
        stages.append(StagePlan(submanifold, downsample, coords, shape))
    output = book(3, counts[-1], counts[-2])
    coords = torch.zeros(counts[-1], 4, dtype=torch.int64)
    return EncoderPlan(tuple(stages), output, coords, encoder.out_shape, batch_size)


def test_published_size_without_memory():
    counts = [160_000, 140_000, 60_000, 20_000, 15_000]
    with FakeTensorMode():
        encoder = SparseEncoder()
        features = torch.empty(counts[0], 5, requires_grad=True)
        bev = encoder(features, _stated_plan(encoder, counts, batch_size=2))
        bev.sum().backward()
    assert bev.shape == (2, 256, 180, 180)
    assert features.grad.shape == (counts[0], 5)
    convolutions = sum(p.numel() for p in encoder.parameters() if p.ndim == 5)
    assert (encoder.out_channels, encoder.out_shape) == (256, (2, 180, 180))
    assert all(p.grad is not None for p in encoder.parameters())
    assert convolutions == 2_691_696


def test_impossible_sizes_are_refused():
    with pytest.raises(ValueError, match="one padding for each of its 3 strided"):
        SparseEncoder(down_paddings=((1, 1, 1),))
    with pytest.raises(ValueError, match="stage 2 receives 32 channels"):
        SparseEncoder(stage_channels=((16, 32), (16, 64)), down_paddings=((1, 1, 1),))
    with pytest.raises(ValueError, match="grid of 4 layers is too low"):
        SparseEncoder(shape=(4, 64, 64))


def test_evaluation_folds_the_norm_and_equals_the_norm_written_out():
    encoder = _encoder().train()
    features, coords = _voxels(150)
    plan = encoder.plan(coords, 2)
    encoder(features, plan)  # running statistics that are not 0 and 1
    for module in encoder.modules():
        if isinstance(module, torch.nn.BatchNorm1d):
            torch.nn.init.uniform_(module.weight, 0.5, 2.0)
            torch.nn.init.uniform_(module.bias, -1.0, 1.0)
    encoder.eval()
    block = encoder.conv_input
    rulebook = plan.stages[0].submanifold
    written_out = block[1](block[0](features, rulebook)).relu()
    torch.testing.assert_close(block(features, rulebook), written_out, atol=1e-5, rtol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        half = block(features, rulebook)
    assert half.dtype == torch.bfloat16
    assert (half.float() - written_out).abs().max() < 0.03 * written_out.abs().max()


def test_reference_and_kernels_agree():
    encoder = _encoder().eval()
    features, coords = _voxels(150)
    bev = encoder(features, encoder.plan(coords, 2))
    with use_reference():
        reference = encoder(features, encoder.plan(coords, 2))
    torch.testing.assert_close(bev, reference, atol=1e-5, rtol=1e-5)
