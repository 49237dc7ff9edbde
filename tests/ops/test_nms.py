"""Suppression against the greedy rule written out."""

import pytest
import torch
from torch import Tensor

from bev_lightning.ops.backend import use_reference
from bev_lightning.ops.nms import circle_nms


def greedy(centre: Tensor, score: Tensor, radius: Tensor, group: Tensor, valid: Tensor) -> Tensor:
    keep: list[int] = []
    for i in score.argsort(descending=True, stable=True).tolist():
        near = (
            bool((centre[i] - centre[j]).norm() <= radius[j])
            and radius[j] > 0
            and group[i] == group[j]
            for j in keep
        )
        if valid[i] and not any(near):
            keep.append(i)
    result = torch.zeros(len(score), dtype=torch.bool)
    result[keep] = True
    return result


@pytest.mark.parametrize("seed", range(5))
def test_equals_greedy(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    centre = 10 * torch.rand(3, 60, 2, generator=generator)
    score = torch.rand(3, 60, generator=generator)
    radius = 2 * torch.rand(3, 60, generator=generator) - 0.3
    group = torch.randint(0, 3, (3, 60), generator=generator)
    valid = torch.rand(3, 60, generator=generator) > 0.2
    kept = circle_nms(centre, score, radius, group, valid)
    expected = torch.stack(
        [greedy(*row) for row in zip(centre, score, radius, group, valid, strict=True)]
    )
    assert torch.equal(kept, expected)
    with use_reference():
        assert torch.equal(circle_nms(centre, score, radius, group, valid), expected)
    assert 0 < int(kept.sum()) < int(valid.sum())


def test_long_chain_of_suppressions() -> None:
    """Each box lies near the next only: every second one is kept, the last decided last."""
    centre = torch.stack([torch.arange(41.0), torch.zeros(41)], dim=1)
    kept = circle_nms(centre, torch.linspace(1, 0, 41), 1.5)
    assert kept.tolist() == [i % 2 == 0 for i in range(41)]
    with use_reference():
        kept = circle_nms(centre, torch.linspace(1, 0, 41), 1.5)
    assert kept.tolist() == [i % 2 == 0 for i in range(41)]


def test_distance_equal_to_radius_suppresses() -> None:
    centre, score = torch.tensor([[0.0, 0.0], [3.0, 4.0]]), torch.tensor([0.2, 0.9])
    assert circle_nms(centre, score, 5.0).tolist() == [False, True]
    assert circle_nms(centre, score, 4.999).tolist() == [True, True]


def test_no_radius_suppresses_nothing() -> None:
    assert circle_nms(torch.zeros(1, 3, 2), torch.rand(1, 3), 0.0).all()


def test_equal_scores_keep_the_first() -> None:
    assert circle_nms(torch.zeros(3, 2), torch.ones(3), 1.0).tolist() == [True, False, False]


def test_invalid_boxes_neither_stay_nor_suppress() -> None:
    valid = torch.tensor([False, True])
    assert circle_nms(torch.zeros(2, 2), torch.tensor([0.9, 0.1]), 1.0, valid=valid).tolist() == [
        False,
        True,
    ]


def test_no_boxes() -> None:
    assert circle_nms(torch.zeros(2, 0, 2), torch.zeros(2, 0), 1.0).shape == (2, 0)
