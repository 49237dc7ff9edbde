"""Operators on CUDA against their CPU counterparts, where a file of their own has no such test."""

import pytest
import torch
from torch import Tensor

from bev_lightning.losses.iou import pairwise_iou
from bev_lightning.ops.nms import circle_nms
from bev_lightning.ops.scatter import scatter_max, scatter_mean, scatter_sum
from bev_lightning.ops.sparse_conv import (
    build_strided_rulebook,
    build_submanifold_rulebook,
    sparse_conv,
)
from bev_lightning.ops.voxelize import voxelize_hard

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICES = ("cpu", "cuda")
SHAPE = (8, 16, 16)


def make_coords(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    cells = torch.randperm(2 * SHAPE[0] * SHAPE[1] * SHAPE[2], generator=generator)[:count]
    extent = torch.tensor([SHAPE[0] * SHAPE[1] * SHAPE[2], SHAPE[1] * SHAPE[2], SHAPE[2], 1])
    rows = cells.unsqueeze(1) // extent
    return torch.cat([rows[:, :1], rows[:, 1:] % torch.tensor(SHAPE)], dim=1)


@pytest.mark.parametrize("count", [0, 1, 5000])
def test_voxels_come_in_the_order_of_the_cpu(count: int) -> None:
    torch.manual_seed(0)
    points = torch.rand(2, 5000, 5) * torch.tensor([8.0, 8, 4, 255, 1]) - 1
    counts = torch.tensor([count, count // 2])
    got = [
        voxelize_hard(
            points.to(d), counts.to(d), (0.0, 0.0, 0.0, 6.0, 6.0, 2.0), (0.5, 0.5, 0.5), 4, 300
        )
        for d in DEVICES
    ]
    for cpu, cuda in zip(*got, strict=True):
        assert torch.equal(cpu, cuda.cpu())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("strided", [False, True])
def test_sparse_convolutions_and_their_gradients(strided: bool, dtype: torch.dtype) -> None:
    coords = make_coords(700)
    torch.manual_seed(1)
    weight, rows = torch.randn(3, 3, 3, 16, 32) / 20, torch.randn(700, 16)
    got = []
    for device in DEVICES:
        where = coords.to(device)
        if strided:
            book, out, _ = build_strided_rulebook(where, SHAPE, (3, 3, 3), (2, 2, 2), (1, 1, 1))
        else:
            book, out = build_submanifold_rulebook(where, SHAPE, (3, 3, 3)), where
        w = weight.to(device, dtype).requires_grad_()
        x = rows.to(device, dtype).requires_grad_()
        y = sparse_conv(x, w, book)
        y.float().square().sum().backward()
        got.append([v.float().cpu() for v in (y, w.grad, x.grad)] + [out.cpu()])
    tight = dtype == torch.float32
    assert torch.equal(got[0][3], got[1][3])
    for cpu, cuda in zip(got[0][:3], got[1][:3], strict=True):
        scale = float(cpu.abs().max())
        torch.testing.assert_close(
            cuda, cpu, rtol=1e-3 if tight else 5e-2, atol=(1e-3 if tight else 2e-2) * scale
        )


@pytest.mark.parametrize("scatter", [scatter_max, scatter_mean, scatter_sum])
def test_scatters_and_their_gradients(scatter) -> None:
    torch.manual_seed(2)
    values, index = torch.randn(400, 7), torch.randint(0, 50, (400,))
    got = []
    for device in DEVICES:
        x = values.to(device).requires_grad_()
        y = scatter(x, index.to(device), 60)
        y.square().sum().backward()
        got.append((y.detach().cpu(), x.grad.cpu()))
    torch.testing.assert_close(got[1], got[0])


def test_suppression_keeps_the_boxes_of_the_cpu() -> None:
    torch.manual_seed(3)
    centre, score, radius = torch.rand(2, 80, 2) * 20, torch.rand(2, 80), torch.full((2, 80), 2.0)
    label, valid = torch.randint(0, 3, (2, 80)), torch.rand(2, 80) > 0.1
    tensors = (centre, score, radius, label, valid)
    cpu, cuda = (circle_nms(*(tensor.to(device) for tensor in tensors)) for device in DEVICES)
    assert torch.equal(cpu, cuda.cpu()) and 0 < int(cpu.sum()) < int(valid.sum())


def test_overlaps_of_all_pairs_equal_those_of_the_near_ones() -> None:
    torch.manual_seed(4)
    scale = torch.tensor([30.0, 30, 2, 5, 3, 2, 6])
    first, second = torch.rand(50, 7) * scale + 0.1, torch.rand(40, 7) * scale + 0.1
    cpu, cuda = (pairwise_iou(first.to(device), second.to(device)) for device in DEVICES)
    torch.testing.assert_close(cuda.cpu(), cpu, atol=1e-4, rtol=1e-3)
    assert float(cpu.max()) > 0.1
