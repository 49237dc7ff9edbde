import math

import pytest
import torch
from torch import Tensor

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


def test_gradcheck() -> None:
    inputs = [tensor.requires_grad_() for tensor in make(batch=1, queries=2, width=2)]
    assert torch.autograd.gradcheck(
        lambda v, x, w: multi_scale_deformable_attention(v, SHAPES, x, w), inputs
    )


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
    wanted = multi_scale_deformable_attention(value, SHAPES, locations, weights)
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
