"""Voxelisation: the arithmetic of cells, and hard voxelisation against a plain loop."""

from contextlib import nullcontext

import pytest
import torch

from bev_lightning.ops.backend import use_reference
from bev_lightning.ops.voxelize import assign_cells, grid_shape, voxelize_hard

RANGE = (-4.0, -2.0, -1.0, 4.0, 2.0, 2.0)
CELL = (0.5, 0.25, 1.0)
COARSE = (1.0, 1.0, 1.0)


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


def _cloud(*counts: int, longest: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    points = torch.rand(len(counts), longest, 5, generator=generator)
    # A part lies outside the range, and the cells are coarse enough to hold several points.
    points[..., :3] = points[..., :3] * torch.tensor([9.0, 4.5, 3.5]) - torch.tensor(
        [4.5, 2.2, 1.2]
    )
    return points, torch.tensor(counts)


def _loop(points, count, max_points, max_voxels):
    voxels, coords, num_points = [], [], []
    for sample in range(len(count)):
        seen: dict[tuple[int, int, int], int] = {}
        for point in points[sample, : count[sample]]:
            xyz = (point[:3] - torch.tensor(RANGE[:3])) / torch.tensor(COARSE)
            x, y, z = xyz.floor().int().tolist()
            if not (0 <= x < 8 and 0 <= y < 4 and 0 <= z < 3):
                continue
            if (z, y, x) not in seen:
                if len(seen) == max_voxels:
                    continue
                seen[z, y, x] = len(voxels)
                voxels.append(torch.zeros(max_points, 5))
                coords.append([sample, z, y, x])
                num_points.append(0)
            number = seen[z, y, x]
            if num_points[number] < max_points:
                voxels[number][num_points[number]] = point
                num_points[number] += 1
    if not voxels:
        return torch.zeros(0, max_points, 5), torch.zeros(0, 4).long(), torch.zeros(0).long()
    return torch.stack(voxels), torch.tensor(coords), torch.tensor(num_points)


@pytest.mark.parametrize("counts", [(90, 60), (0, 90), (0, 0), (1, 1)])
@pytest.mark.parametrize(("max_points", "max_voxels"), [(3, 20), (1, 5), (50, 1000)])
def test_hard_voxels_equal_plain_loop(counts, max_points, max_voxels):
    points, count = _cloud(*counts, longest=90)
    got = voxelize_hard(points, count, RANGE, COARSE, max_points, max_voxels)
    for ours, expected in zip(got, _loop(points, count, max_points, max_voxels), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("longest", [0, 1, 400])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_sorting_path_equals_hashing(longest, dtype):
    points, count = _cloud(longest, longest // 2, longest, longest=longest, seed=3)
    points = torch.cat([points, points], dim=2).to(dtype)[..., :5]  # not contiguous
    fast = voxelize_hard(points, count, RANGE, COARSE, 4, 30)
    with use_reference():
        plain = voxelize_hard(points, count, RANGE, COARSE, 4, 30)
    assert fast[0].dtype == dtype
    for ours, expected in zip(plain, fast, strict=True):
        assert torch.equal(ours, expected)


def test_borders_of_cells_are_the_same_on_all_paths():
    """Points on the planes between cells and one step of float32 beside them."""
    planes = torch.arange(-60, 60) * 0.075 + torch.tensor([-54.0, 0.0, 53.925]).view(3, 1)
    x = torch.cat([planes, planes.nextafter(planes - 1), planes.nextafter(planes + 1)]).flatten()
    points = torch.stack([x, -x, x / 9, x, x], dim=1).unsqueeze(0)
    arguments = (torch.tensor([len(x)]), (-54.0, -54.0, -5.0, 54.0, 54.0, 3.0), (0.075, 0.075, 0.2))
    fast = voxelize_hard(points, *arguments, 10, 10_000)
    with use_reference():
        plain = voxelize_hard(points, *arguments, 10, 10_000)
    assert len(fast[1]) > 90
    for ours, expected in zip(plain, fast, strict=True):
        assert torch.equal(ours, expected)


def test_custom_op_is_well_formed():
    points, count = _cloud(20, 7, longest=20)
    arguments = (points, count, RANGE, COARSE, 3, 10)
    torch.library.opcheck(torch.ops.bev_lightning.voxelize_hard, arguments)


@pytest.mark.parametrize("path", ["numba", "reference"])
def test_points_with_nan_and_infinity_are_dropped(path):
    points = torch.full((1, 4, 5), 0.25)
    points[0, 0, 0], points[0, 1, 1] = float("nan"), float("inf")
    points[0, 2, 2] = float("-inf")
    with use_reference() if path == "reference" else nullcontext():
        voxels, coords, num_points = voxelize_hard(points, torch.tensor([4]), RANGE, COARSE, 5, 10)
    assert coords.tolist() == [[0, 1, 2, 4]] and num_points.tolist() == [1]
    assert voxels[0, 0].tolist() == [0.25] * 5


def test_all_points_in_one_voxel():
    points = torch.full((1, 7, 5), 0.25)
    points[0, :, 3] = torch.arange(7)
    voxels, coords, num_points = voxelize_hard(points, torch.tensor([7]), RANGE, COARSE, 5, 10)
    assert voxels[0, :, 3].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert coords.tolist() == [[0, 1, 2, 4]] and num_points.tolist() == [5]
