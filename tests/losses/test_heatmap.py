"""Heatmap targets against drawing box by box."""

import math

import pytest
import torch
from torch import Tensor

from bev_lightning.losses.heatmap import gaussian_heatmap, gaussian_radius
from bev_lightning.structures import BevGrid, Boxes3D

# Not square in extent, cells or shape, and off-centre: swapped axes cannot hide.
GRID = BevGrid((-20.0, -10.0, -5.0, 44.0, 38.0, 3.0), (2.0, 1.5))  # 32 x 32 cells
WIDE = BevGrid((-20.0, -10.0, -5.0, 20.0, 14.0, 3.0), (1.0, 1.0))  # Y 24, X 40


def make_boxes(*rows: tuple[float, float, float, float, int]) -> Boxes3D:
    """One sample of x, y, length, width, label."""
    values = torch.tensor([row[:4] for row in rows])
    num = len(rows)
    return Boxes3D(
        centre=torch.cat([values[:, :2], torch.zeros(num, 1)], dim=1),
        size=torch.cat([values[:, 2:], torch.ones(num, 1)], dim=1),
        yaw=torch.zeros(num),
        velocity=torch.zeros(num, 2),
        label=torch.tensor([row[4] for row in rows]),
        valid=torch.ones(num, dtype=torch.bool),
    )


def plain_radius(length: float, width: float, overlap: float) -> float:
    b1, c1 = length + width, width * length * (1 - overlap) / (1 + overlap)
    r1 = (b1 + math.sqrt(b1**2 - 4 * c1)) / 2
    b2, c2 = 2 * (length + width), (1 - overlap) * width * length
    r2 = (b2 + math.sqrt(b2**2 - 16 * c2)) / 2
    a3, b3 = 4 * overlap, -2 * overlap * (length + width)
    r3 = (b3 + math.sqrt(b3**2 - 4 * a3 * (overlap - 1) * width * length)) / 2
    return min(r1, r2, r3)


def plain_heatmap(
    boxes: Boxes3D, grid: BevGrid, classes: int, overlap: float, least: int
) -> Tensor:
    height, width = grid.shape
    heatmap = torch.zeros(classes, height, width)
    for m in range(boxes.num):
        x, y = boxes.centre[m, :2].tolist()
        length, breadth = boxes.size[m, :2].tolist()
        if not math.isfinite(x + y):
            continue
        i = math.floor((x - grid.range[0]) / grid.cell[0])
        j = math.floor((y - grid.range[1]) / grid.cell[1])
        if not (0 <= i < width and 0 <= j < height):
            continue
        r = max(least, int(plain_radius(length / grid.cell[1], breadth / grid.cell[0], overlap)))
        sigma = (2 * r + 1) / 6
        for v in range(max(0, j - r), min(height, j + r + 1)):
            for u in range(max(0, i - r), min(width, i + r + 1)):
                value = math.exp(-((u - i) ** 2 + (v - j) ** 2) / (2 * sigma**2))
                label = int(boxes.label[m])
                heatmap[label, v, u] = max(float(heatmap[label, v, u]), value)
    return heatmap


def test_radius_equals_plain_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    length, width = (30 * torch.rand(2, 100, generator=generator)).unbind(0)
    for overlap in (0.1, 0.5, 0.7):
        radius = gaussian_radius(length, width, overlap)
        expected = [
            plain_radius(a, b, overlap)
            for a, b in zip(length.tolist(), width.tolist(), strict=True)
        ]
        torch.testing.assert_close(radius, torch.tensor(expected), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("grid", [GRID, WIDE])
def test_equals_plain_drawing(grid: BevGrid) -> None:
    generator = torch.Generator().manual_seed(1)
    rows = torch.rand(40, 4, generator=generator)
    x = grid.range[0] - 5 + rows[:, 0] * (grid.range[3] - grid.range[0] + 10)  # some lie outside
    y = grid.range[1] - 5 + rows[:, 1] * (grid.range[4] - grid.range[1] + 10)
    label = torch.randint(0, 3, (40,), generator=generator)
    columns = (x, y, 1 + 25 * rows[:, 2], 1 + 9 * rows[:, 3])
    values = torch.stack(columns, dim=1).tolist()
    boxes = make_boxes(*[(*row, int(c)) for row, c in zip(values, label, strict=True)])
    drawn = gaussian_heatmap(Boxes3D.stack([boxes]), grid, 3, 0.1, 2)[0]
    expected = plain_heatmap(boxes, grid, 3, 0.1, 2)
    assert drawn.shape == (3, *grid.shape)
    torch.testing.assert_close(drawn, expected, atol=1e-6, rtol=1e-5)
    assert 10 < int((expected == 1).sum()) < 40


def test_the_cell_of_the_centre_is_one() -> None:
    """x = 3.2 m is cell 23 of 40, y = -7.5 m cell 2 of 24."""
    drawn = gaussian_heatmap(Boxes3D.stack([make_boxes((3.2, -7.5, 4.0, 2.0, 1))]), WIDE, 3)
    assert (drawn == 1).nonzero().tolist() == [[0, 1, 2, 23]]


def test_bounds_of_the_grid() -> None:
    """The lower bound is inside, the upper one and a centre just below the lower one are not."""
    inside, outside = make_boxes((-20, -10, 4, 2, 0)), [(20.0, 0.0), (-20.1, 0.0), (0.0, 14.0)]
    assert (gaussian_heatmap(Boxes3D.stack([inside]), WIDE, 1) == 1).nonzero().tolist() == [
        [0, 0, 0, 0]
    ]
    for x, y in outside:
        assert not gaussian_heatmap(Boxes3D.stack([make_boxes((x, y, 4, 2, 0))]), WIDE, 1).any()


def test_broken_and_padding_boxes_are_not_drawn() -> None:
    boxes = make_boxes((math.nan, 0, 4, 2, 0), (0, 0, 4, 2, 0), (5, 5, math.nan, 2, 1))
    drawn = gaussian_heatmap(Boxes3D.stack([boxes, make_boxes((1, 1, 4, 2, 1))]), WIDE, 2)
    assert torch.isfinite(drawn).all()
    assert (drawn == 1).nonzero().tolist() == [[0, 0, 10, 20], [0, 1, 15, 25], [1, 1, 11, 21]]


def test_no_boxes() -> None:
    assert gaussian_heatmap(Boxes3D.empty(2, 0), WIDE, 4).shape == (2, 4, 24, 40)
    assert not gaussian_heatmap(Boxes3D.empty(2, 3), WIDE, 4).any()
