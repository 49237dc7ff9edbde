"""Overlap of rotated boxes against clipping written out, and against known areas."""

import math

import pytest
import torch
from torch import Tensor

from bev_lightning.losses.iou import overlap_area, pairwise_iou

Point = tuple[float, float]


def corners(box: list[float]) -> list[Point]:
    x, y, length, width, yaw = box
    cos, sin = math.cos(yaw), math.sin(yaw)
    signs = ((1, 1), (-1, 1), (-1, -1), (1, -1))
    local = [(0.5 * length * a, 0.5 * width * b) for a, b in signs]
    return [(x + u * cos - v * sin, y + u * sin + v * cos) for u, v in local]


def clipped_area(first: list[float], second: list[float]) -> float:
    """Sutherland-Hodgman and the shoelace formula."""
    polygon, border = corners(first), corners(second)
    for k in range(4):
        (ax, ay), (bx, by) = border[k], border[(k + 1) % 4]
        side = [(bx - ax) * (y - ay) - (by - ay) * (x - ax) for x, y in polygon]
        clipped: list[Point] = []
        for n, (p, s) in enumerate(zip(polygon, side, strict=True)):
            q, t = polygon[n - 1], side[n - 1]
            if s * t < 0:
                r = t / (t - s)
                clipped.append((q[0] + r * (p[0] - q[0]), q[1] + r * (p[1] - q[1])))
            if s >= 0:
                clipped.append(p)
        polygon = clipped
    pairs = zip(polygon, polygon[1:] + polygon[:1], strict=True)
    return 0.5 * sum(a[0] * b[1] - a[1] * b[0] for a, b in pairs)


def draw(num: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    scale = torch.tensor([6.0, 6.0, 5.0, 3.0, 8.0])
    low = torch.tensor([40.0, -20.0, 0.3, 0.3, -4.0])  # far from the origin: precision counts
    return torch.rand(num, 5, generator=generator) * scale + low


def test_equals_clipping() -> None:
    first, second = draw(300, 0), draw(300, 1)
    area = overlap_area(first, second)
    expected = [clipped_area(a, b) for a, b in zip(first.tolist(), second.tolist(), strict=True)]
    torch.testing.assert_close(area, torch.tensor(expected), atol=2e-4, rtol=1e-4)
    assert 0.2 < (area > 0.01).float().mean() < 0.95


def test_symmetric() -> None:
    first, second = draw(200, 2), draw(200, 3)
    torch.testing.assert_close(
        overlap_area(first, second), overlap_area(second, first), atol=2e-4, rtol=1e-4
    )


@pytest.mark.parametrize(
    ("first", "second", "area"),
    [
        ([5.0, 7.0, 4.0, 2.0, 0.7], [5.0, 7.0, 4.0, 2.0, 0.7], 8.0),  # the same box
        ([5.0, 7.0, 4.0, 2.0, 0.7], [5.0, 7.0, 4.0, 2.0, 0.7 + math.pi], 8.0),  # turned round
        ([0.0, 0.0, 4.0, 2.0, 0.0], [0.0, 0.0, 4.0, 2.0, math.pi / 2], 4.0),  # a cross
        ([0.0, 0.0, 2.0, 2.0, 0.0], [0.0, 0.0, 2.0, 2.0, math.pi / 4], 8 * (math.sqrt(2) - 1)),
        ([0.0, 0.0, 9.0, 9.0, 0.3], [1.0, 1.0, 2.0, 1.0, 1.0], 2.0),  # one within the other
        ([1.0, 1.0, 2.0, 1.0, 1.0], [0.0, 0.0, 9.0, 9.0, 0.3], 2.0),
        ([0.0, 0.0, 2.0, 2.0, 0.0], [2.0, 0.0, 2.0, 2.0, 0.0], 0.0),  # side by side
        ([0.0, 0.0, 2.0, 2.0, 0.0], [1.0, 0.0, 2.0, 2.0, 0.0], 2.0),  # edges on one line
        ([0.0, 0.0, 2.0, 2.0, 0.5], [50.0, 3.0, 2.0, 2.0, 0.1], 0.0),
    ],
)
def test_known_areas(first: list[float], second: list[float], area: float) -> None:
    value = overlap_area(torch.tensor(first), torch.tensor(second))
    torch.testing.assert_close(value, torch.tensor(area), atol=1e-5, rtol=1e-5)


def test_gradcheck() -> None:
    first = draw(12, 4).double().requires_grad_()
    second = draw(12, 5).double().requires_grad_()
    assert torch.autograd.gradcheck(overlap_area, (first, second))


def test_pairwise_iou_of_volumes() -> None:
    """Half a metre apart in height: 3 x 2 x 0.5 shared of two boxes of 6 cubic metres."""
    box = torch.tensor([[10.0, -3.0, 1.0, 3.0, 2.0, 1.0, 0.4]])
    raised = box + torch.tensor([0.0, 0, 0.5, 0, 0, 0, 0])
    far = box + torch.tensor([0.0, 0, 2.0, 0, 0, 0, 0])
    iou = pairwise_iou(box, torch.cat([box, raised, far]))
    torch.testing.assert_close(iou, torch.tensor([[1.0, 3.0 / 9.0, 0.0]]), atol=1e-5, rtol=1e-5)


def test_pairwise_iou_of_layers_and_no_boxes() -> None:
    """Leading dimensions broadcast: layers of predictions against one set of boxes."""
    box = torch.rand(3, 2, 5, 7) + 1
    assert pairwise_iou(box, box[0]).shape == (3, 2, 5, 5)
    assert pairwise_iou(box, torch.zeros(2, 0, 7)).shape == (3, 2, 5, 0)
    assert pairwise_iou(box.bfloat16(), box[0].bfloat16()).dtype == torch.float32
