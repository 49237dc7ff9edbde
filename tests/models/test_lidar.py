"""Lidar branches."""

import pytest
import torch

from bev_lightning.models.lidar import LidarPillarBranch, LidarVoxelBranch, MeanVoxels
from bev_lightning.models.sparse_encoder import SparseEncoder
from bev_lightning.structures import BevGrid, Points

GRID = BevGrid((-4.0, -2.0, -3.0, 4.0, 2.0, 1.0), (0.5, 0.5))


def _points(*counts: int, longest: int = 60) -> Points:
    generator = torch.Generator().manual_seed(sum(counts))
    features = torch.rand(len(counts), longest, 5, generator=generator)
    features[..., :3] = features[..., :3] * torch.tensor([8.0, 4.0, 4.0]) - torch.tensor(
        [4.0, 2.0, 3.0]
    )
    features[..., 3] *= 255
    return Points(features, torch.tensor(counts))


def test_pillars_put_points_in_their_cell():
    torch.manual_seed(0)
    branch = LidarPillarBranch(GRID, 6).eval()
    points = _points(1, longest=3)
    points.features[0, 0] = torch.tensor([-1.8, 1.3, 0.0, 90.0, 0.1])
    bev = branch(points)
    assert bev.shape == (1, 6, 8, 16)
    occupied = bev[0].abs().sum(0).nonzero()
    assert occupied.tolist() == [[6, 4]]  # y = 1.3 -> row 6, x = -1.8 -> column 4


def test_pillars_equal_plain_loop():
    torch.manual_seed(0)
    branch = LidarPillarBranch(GRID, 4).eval()
    branch.pillars.norm.running_mean.uniform_(-1, 1)
    points = _points(40)
    bev = branch(points)[0].detach()
    expected = torch.zeros(4, 8, 16)
    cloud = points.features[0, :40]
    column = ((cloud[:, 0] + 4) / 0.5).floor().long()
    row = ((cloud[:, 1] + 2) / 0.5).floor().long()
    for j in range(8):
        for i in range(16):
            inside = cloud[(row == j) & (column == i)]
            if not len(inside):
                continue
            xyz = inside[:, :3]
            centre = torch.tensor([-4 + (i + 0.5) * 0.5, -2 + (j + 0.5) * 0.5])
            inputs = torch.cat(
                [
                    (xyz - torch.tensor([0.0, 0.0, -1.0])) / torch.tensor([4.0, 2.0, 2.0]),
                    (xyz[:, :2] - centre) / 0.5,
                    (xyz - xyz.mean(0)) / torch.tensor([0.5, 0.5, 2.0]),
                    inside[:, 3:] * torch.tensor([1 / 255, 2.0]),
                ],
                dim=1,
            )
            rows = branch.pillars.norm(branch.pillars.linear(inputs)).relu()
            expected[:, j, i] = rows.amax(0)
    torch.testing.assert_close(bev, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("counts", [(0, 0), (0, 30), (1, 0)])
def test_pillars_train_on_empty_clouds(counts):
    branch = LidarPillarBranch(GRID, 4).train()
    bev = branch(_points(*counts))
    bev.sum().backward()
    assert torch.isfinite(bev).all()
    for sample, count in enumerate(counts):
        assert count > 0 or bev[sample].abs().sum() == 0
    assert torch.isfinite(branch.pillars.linear.weight.grad).all()
    assert torch.isfinite(branch.pillars.norm.running_var).all()


def test_pillars_ignore_padding_and_other_samples():
    branch = LidarPillarBranch(GRID, 4).eval()
    points = _points(25, 60)
    alone = Points(points.features[:1, :25], points.count[:1])
    assert torch.equal(branch(points)[:1], branch(alone))


def test_pillars_same_at_any_number_of_threads():
    branch = LidarPillarBranch(GRID, 4).eval()  # torch's own batch statistics do depend on threads
    points, results = _points(60, 50), []
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        branch.zero_grad()
        bev = branch(points)
        bev.square().sum().backward()
        results.append((bev.detach(), branch.pillars.linear.weight.grad.clone()))
    torch.set_num_threads(before)
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


def _voxel_branch() -> LidarVoxelBranch:
    torch.manual_seed(0)
    voxels = MeanVoxels((-4.0, -2.0, -3.0, 4.0, 2.0, 1.0), (0.25, 0.25, 0.4), 3, (12, 500))
    encoder = SparseEncoder(5, (11, 16, 32), 4, ((4, 6), (6,)), ((1, 1, 1),), 7)
    return LidarVoxelBranch(voxels, encoder)


def test_mean_voxels_average_kept_points_and_cap_by_mode():
    voxels = _voxel_branch().voxels
    points = _points(4, longest=4)
    points.features[0, :, :3] = torch.tensor([0.1, 0.1, 0.1])
    points.features[0, :, 3] = torch.tensor([2.0, 3.0, 7.0, 100.0])
    features, coords = voxels(points)
    assert coords.tolist() == [[0, 7, 8, 16]]
    assert features[0, 3].item() == 4.0  # the fourth point finds the voxel full
    crowd = _points(60, 60)
    assert [len(voxels.train(mode)(crowd)[1]) > 24 for mode in (True, False)] == [False, True]


@pytest.mark.parametrize("counts", [(0, 0), (0, 30), (50, 60)])
def test_voxel_branch_trains(counts):
    branch = _voxel_branch().train()
    bev = branch(_points(*counts))
    bev.sum().backward()
    assert bev.shape == (2, branch.out_channels, 8, 16)
    assert torch.isfinite(bev).all()
    assert all(torch.isfinite(p.grad).all() for p in branch.parameters())


def test_voxel_branch_position_of_points():
    branch = _voxel_branch().eval()
    points = _points(1, longest=1)
    points.features[0, 0] = torch.tensor([3.1, -1.3, -0.5, 90.0, 0.0])
    rows, columns = branch(points)[0].abs().sum(0).nonzero().unbind(1)
    # A voxel at row 2, column 28 reaches the map of half the size through a kernel of 3.
    assert set(rows.tolist()) <= {1, 2} and set(columns.tolist()) <= {14, 15}
    assert len(rows) > 0
