"""Radar branch."""

import torch

from bev_lightning.models.radar import RadarBranch
from bev_lightning.structures import BevGrid, Radar

GRID = BevGrid((-8.0, -4.0, -5.0, 8.0, 4.0, 3.0), (1.0, 1.0))


def _radar(count: list[int]) -> Radar:
    features = torch.zeros(len(count), 3, 8)
    features[:, 0] = torch.tensor([2.5, -1.5, 0.5, 10.0, 3.0, -2.0, 0.1, 4.0])
    return Radar(features, torch.tensor(count))


def test_radar_puts_returns_in_their_cell():
    torch.manual_seed(0)
    bev = RadarBranch(GRID, 4).eval()(_radar([1]))
    assert bev.shape == (1, 4, 8, 16)
    assert bev[0].abs().sum(0).nonzero().tolist() == [[2, 10]]


def test_radar_sees_every_feature():
    torch.manual_seed(1)
    branch = RadarBranch(GRID, 16).eval()
    reference = branch(_radar([1]))
    for column, change in ((3, 5.0), (4, 1.0), (5, 1.0), (6, 0.2), (7, -1.0)):
        radar = _radar([1])
        radar.features[0, 0, column] += change
        assert not torch.equal(branch(radar), reference), f"column {column} has no effect"


def test_radar_trains_without_returns():
    branch = RadarBranch(GRID, 4).train()
    bev = branch(_radar([0, 0]))
    bev.sum().backward()
    assert bev.abs().sum() == 0
    assert torch.isfinite(branch.pillars.linear.weight.grad).all()
