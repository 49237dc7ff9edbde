"""Suppression against the greedy rule written out, overlap against areas known or sampled."""

import math

import pytest
import torch
from torch import Tensor

from bev_lightning.ops.backend import use_reference
from bev_lightning.ops.nms import circle_nms, rotated_nms
from bev_lightning.ops.nms.reference import rotated_iou


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
    assert rotated_nms(torch.zeros(2, 0, 5), torch.zeros(2, 0), 0.5).shape == (2, 0)


def make_boxes(num: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    boxes = torch.rand(num, 5, generator=generator)
    return boxes * torch.tensor([8.0, 8.0, 4.0, 2.0, 7.0]) + torch.tensor([40.0, 20, 0.5, 0.5, -3])


def sample_iou(one: Tensor, other: Tensor, num: int = 150) -> float:
    """Counted on a fine grid of points in the first box."""
    side = (torch.arange(num, dtype=torch.float64) + 0.5) / num - 0.5
    local = torch.cartesian_prod(side * one[2], side * one[3])
    x, y = (local[:, :1], local[:, 1:])
    x, y = (
        x * one[4].cos() - y * one[4].sin() + one[0],
        x * one[4].sin() + y * one[4].cos() + one[1],
    )
    x, y = x - other[0], y - other[1]
    x, y = x * other[4].cos() + y * other[4].sin(), y * other[4].cos() - x * other[4].sin()
    inside = (x.abs() < other[2] / 2) & (y.abs() < other[3] / 2)
    shared = inside.double().mean() * one[2] * one[3]
    return float(shared / (one[2] * one[3] + other[2] * other[3] - shared))


def test_overlap_equals_a_sampled_one() -> None:
    boxes = make_boxes(8, seed=0)
    got = rotated_iou(boxes[:, None], boxes[None])
    for i in range(8):
        for j in range(8):
            assert float(got[i, j]) == pytest.approx(
                sample_iou(boxes[i].double(), boxes[j].double()), abs=1e-2
            )
    assert int((got > 0.05).sum()) >= 12
    torch.testing.assert_close(got, got.T, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ((0, 0, 4, 2, 0), 1.0),
        ((0, 0, 4, 2, math.pi), 1.0),
        ((0, 0, 2, 4, math.pi / 2), 1.0),
        ((2, 0, 4, 2, 0), 1 / 3),
        ((0, 0, 4, 2, math.pi / 2), 4 / 12),
        ((0, 0, 2, 1, 0.3), 2 / 8),
        ((4, 0, 4, 2, 0), 0.0),
        ((0, 0, 0, 0, 0), 0.0),
        ((0, 0, math.sqrt(2), math.sqrt(2), math.pi / 4), 2 / 8),
    ],
)
@pytest.mark.parametrize("offset", [0.0, 50.0])
def test_known_overlaps(other: tuple[float, ...], expected: float, offset: float) -> None:
    one = torch.tensor([0.0, 0.0, 4.0, 2.0, 0.0])
    move = torch.tensor([offset, -offset, 0.0, 0.0, 0.0])
    got = rotated_iou(one + move, torch.tensor(other) + move)
    assert float(got) == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("most_overlap", [0.0, 0.2])
def test_rotated_equals_greedy(seed: int, most_overlap: float) -> None:
    boxes = torch.stack([make_boxes(50, seed), make_boxes(50, seed + 10)])
    generator = torch.Generator().manual_seed(seed)
    score = torch.rand(2, 50, generator=generator)
    group = torch.randint(0, 2, (2, 50), generator=generator)
    valid = torch.rand(2, 50, generator=generator) > 0.2
    kept = rotated_nms(boxes, score, most_overlap, group, valid)
    with use_reference():
        assert torch.equal(rotated_nms(boxes, score, most_overlap, group, valid), kept)
    for sample in range(2):
        overlap = rotated_iou(boxes[sample][:, None], boxes[sample][None])
        keep: list[int] = []
        for i in score[sample].argsort(descending=True).tolist():
            mine = [j for j in keep if group[sample, j] == group[sample, i]]
            if valid[sample, i] and not any(overlap[j, i] > most_overlap for j in mine):
                keep.append(i)
        assert sorted(keep) == kept[sample].nonzero().flatten().tolist()
        assert 0 < len(keep) < int(valid[sample].sum())


def test_rotated_takes_one_sample_and_half() -> None:
    boxes = torch.tensor([[0.0, 0, 4, 2, 0], [0.5, 0, 4, 2, 0], [9, 0, 4, 2, 0]])
    score = torch.tensor([0.3, 0.6, 0.1])
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        kept = rotated_nms(boxes.to(dtype), score.to(dtype), 0.5)
        assert kept.tolist() == [False, True, True]
