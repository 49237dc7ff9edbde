import pytest
import torch

from bev_lightning.structures import BevGrid

GRID = BevGrid(range=(-8.0, -4.0, -3.0, 8.0, 6.0, 2.0), cell=(2.0, 1.0))


def test_shape_is_rows_of_y_and_columns_of_x():
    assert GRID.shape == (10, 8)
    assert GRID.coarsen(2).shape == (5, 4)


def test_cells_and_metres_are_inverse():
    xy = torch.tensor([[-8.0, -4.0], [7.9, 5.9], [0.0, 0.0]])
    cells = GRID.to_cells(xy)
    torch.testing.assert_close(cells, torch.tensor([[0.0, 0.0], [7.95, 9.9], [4.0, 4.0]]))
    torch.testing.assert_close(GRID.to_metres(cells), xy)


def test_centres():
    centres = GRID.centres()
    assert centres.shape == (10, 8, 2)
    torch.testing.assert_close(centres[0, 0], torch.tensor([-7.0, -3.5]))
    torch.testing.assert_close(centres[9, 7], torch.tensor([7.0, 5.5]))


def test_contains_excludes_the_upper_bound():
    points = torch.tensor([[-8.0, -4.0, -3.0], [8.0, 0.0, 0.0], [0.0, 0.0, 2.0], [0.0, 5.99, 1.99]])
    assert GRID.contains(points).tolist() == [True, False, False, True]


@pytest.mark.parametrize(
    ("limits", "cell", "message"),
    [
        ((0, 0, 0, 10, 10, 1), (3, 1), "does not divide"),
        ((0, 0, 0, -1, 10, 1), (1, 1), "is empty"),
        ((0, 0, 0, 1), (1, 1), "6 numbers"),
    ],
)
def test_refuses_a_grid_that_cannot_be(limits: tuple, cell: tuple, message: str):
    with pytest.raises(ValueError, match=message):
        BevGrid(limits, cell)
