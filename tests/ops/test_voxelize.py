"""Voxelisation: the arithmetic of cells, and hard voxelisation against a plain loop."""

import torch

from bev_lightning.ops.voxelize import assign_cells, grid_shape

RANGE = (-4.0, -2.0, -1.0, 4.0, 2.0, 2.0)
CELL = (0.5, 0.25, 1.0)


def test_grid_shape_is_z_y_x():
    assert grid_shape(RANGE, CELL) == (3, 16, 16)
    assert grid_shape((-54.0, -54.0, -5.0, 54.0, 54.0, 3.0), (0.075, 0.075, 0.2)) == (
        40,
        1440,
        1440,
    )


def test_assign_cells_numbers_z_y_x_and_drops_padding_and_outside():
    points = torch.zeros(2, 4, 5)
    points[0, 0, :3] = torch.tensor([-4.0, -2.0, -1.0])  # the first cell
    points[0, 1, :3] = torch.tensor([3.99, 1.99, 1.99])  # the last cell
    points[0, 2, :3] = torch.tensor([4.0, 0.0, 0.0])  # upper bound excluded
    points[0, 3, :3] = torch.tensor([0.0, 0.0, float("nan")])
    points[1, 0, :3] = torch.tensor([-3.4, -1.7, 0.5])
    cells = assign_cells(points, torch.tensor([4, 1]), RANGE, CELL)
    assert cells[0].tolist() == [0, 3 * 16 * 16 - 1, -1, -1]
    assert cells[1].tolist() == [((1 * 3 + 1) * 16 + 1) * 16 + 1, -1, -1, -1]


def test_assign_cells_of_empty_clouds():
    assert assign_cells(
        torch.zeros(2, 0, 5), torch.zeros(2, dtype=torch.int64), RANGE, CELL
    ).shape == (2, 0)
