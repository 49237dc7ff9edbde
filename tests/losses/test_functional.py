import math

import pytest
import torch

from bev_lightning.losses.functional import (
    depth_loss,
    gaussian_focal_loss,
    masked_l1_loss,
    sigmoid_focal_loss,
)


def test_depth_loss_counts_seen_pixels_only() -> None:
    logits = torch.zeros(1, 1, 2, 1, 3, requires_grad=True)
    target = torch.tensor([[[[0, -1, 1]]]])
    loss = depth_loss(logits, target)
    torch.testing.assert_close(loss, torch.tensor(math.log(2.0)))
    loss.backward()
    assert not logits.grad[..., 1].any()
    nothing = depth_loss(logits, torch.full_like(target, -1))
    assert nothing.item() == 0.0
    half = depth_loss(logits.bfloat16(), target)
    assert half.dtype == torch.float32


def test_focal_loss_equals_its_definition() -> None:
    """RetinaNet, equation 5, written out."""
    logits = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 3, 2, 1, 3])
    loss = sigmoid_focal_loss(logits, labels)
    for q in range(5):
        for k in range(3):
            p = 1 / (1 + math.exp(-float(logits[q, k])))
            wanted = int(labels[q]) == k
            expected = (
                -0.25 * (1 - p) ** 2 * math.log(p) if wanted else -0.75 * p**2 * math.log(1 - p)
            )
            assert float(loss[q, k]) == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_gaussian_focal_loss_equals_its_definition() -> None:
    logits = torch.tensor([[[[0.5, -1.0, 2.0]]]])
    heatmap = torch.tensor([[[[1.0, 0.6, 0.0]]]])
    p = logits.sigmoid().flatten().tolist()
    expected = -((1 - p[0]) ** 2) * math.log(p[0])
    expected -= p[1] ** 2 * 0.4**4 * math.log(1 - p[1]) + p[2] ** 2 * math.log(1 - p[2])
    assert float(gaussian_focal_loss(logits, heatmap)) == pytest.approx(expected, rel=1e-5)


def test_gradcheck() -> None:
    g = torch.Generator().manual_seed(3)
    logits = torch.randn(2, 3, 4, 4, generator=g, dtype=torch.float64).requires_grad_()
    heatmap = torch.rand(2, 3, 4, 4, generator=g, dtype=torch.float64)
    heatmap[0, 1, 2, 2] = 1.0
    assert torch.autograd.gradcheck(gaussian_focal_loss, (logits, heatmap))
    labels = torch.randint(0, 5, (2, 3, 4), generator=g)
    assert torch.autograd.gradcheck(sigmoid_focal_loss, (logits, labels))
    wanted = torch.randn(2, 3, 4, 4, generator=g, dtype=torch.float64)
    wanted[0, 0, 0, 0] = torch.nan
    weight = torch.rand(2, 3, 4, 4, generator=g, dtype=torch.float64)
    assert torch.autograd.gradcheck(masked_l1_loss, (logits, wanted, weight))
    depth = torch.randn(1, 2, 5, 2, 2, generator=g, dtype=torch.float64).requires_grad_()
    target = torch.randint(-1, 5, (1, 2, 2, 2), generator=g)
    assert torch.autograd.gradcheck(depth_loss, (depth, target))
