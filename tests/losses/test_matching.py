"""Assignment of queries to boxes, batched over layers and samples."""

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from bev_lightning.losses.matching import (
    Assignment,
    Matching,
    TransFusionMatcher,
    distance_cost,
    focal_cost,
)
from bev_lightning.structures import BevGrid

GRID = BevGrid((-20.0, -10.0, -5.0, 44.0, 38.0, 3.0), (2.0, 1.5))


def assign(cost: Tensor, valid: Tensor) -> Tensor:
    return Matching(cost, valid).finish().box


def random_boxes(*shape: int) -> Tensor:
    low = torch.tensor([-20.0, -10.0, -2.0, 1.0, 1.0, 1.0, -3.0])
    return low + torch.rand(*shape, 7) * torch.tensor([64.0, 48.0, 1.0, 3.0, 2.0, 1.0, 6.0])


def test_each_layer_and_sample_is_optimal() -> None:
    torch.manual_seed(0)
    cost = torch.rand(3, 2, 8, 5)
    valid = torch.tensor([[True, False, True, True, False], [True] * 5])
    box = assign(cost, valid)
    for layer in range(3):
        for sample in range(2):
            columns = valid[sample].nonzero().squeeze(1)
            rows, matched = linear_sum_assignment(cost[layer, sample][:, columns].numpy())
            expected = torch.full((8,), -1)
            expected[torch.from_numpy(rows)] = columns[torch.from_numpy(matched)]
            assert torch.equal(box[layer, sample], expected)


def test_samples_without_boxes() -> None:
    valid = torch.tensor([[False, False], [True, False]])
    box = assign(torch.rand(2, 2, 4, 2), valid)
    assert (box[:, 0] == -1).all()
    assert box[:, 1].amax(-1).tolist() == [0, 0]
    assert (box[:, 1] >= 0).sum(-1).tolist() == [1, 1]
    assert (assign(torch.rand(2, 2, 4, 0), torch.zeros(2, 0, dtype=torch.bool)) == -1).all()


def test_more_boxes_than_queries() -> None:
    box = assign(torch.rand(1, 1, 3, 9), torch.ones(1, 9, dtype=torch.bool))[0, 0]
    assert len(set(box.tolist())) == 3
    assert box.min() >= 0


def test_broken_cost_is_matched_last() -> None:
    cost = torch.tensor([[torch.nan, torch.nan], [0.3, 0.1], [0.2, torch.inf]])[None, None]
    box = assign(cost, torch.ones(1, 2, dtype=torch.bool))
    assert box[0, 0].tolist() == [-1, 1, 0]


def test_gather_gives_what_belongs_to_each_query() -> None:
    assignment = Assignment(torch.tensor([[[1, -1], [-1, 0]]]), torch.zeros(1, 2, 2))
    values = torch.tensor([[[1.0], [2.0]], [[3.0], [4.0]]])
    assert assignment.gather(values)[0, ..., 0].tolist() == [[2.0, 0.0], [0.0, 3.0]]
    assert assignment.gather(torch.zeros(2, 0, 5)).shape == (1, 2, 2, 5)


def test_focal_cost_prefers_the_sure_query() -> None:
    """0.5: -0.25 * 0.25 * log .5 + 0.75 * 0.25 * log .5 = -0.5 * 0.25 * 0.6931."""
    logits = torch.tensor([[[[0.0, 5.0], [5.0, 0.0]]]])
    cost = focal_cost(logits, torch.tensor([[1, 0]]))[0, 0]
    assert cost[0, 0] < cost[1, 0]
    assert cost[1, 1] < cost[0, 1]
    torch.testing.assert_close(cost[1, 0], torch.tensor(-0.5 * 0.25 * 0.693147))


def test_distance_cost_is_scaled_by_each_extent() -> None:
    centres, targets = torch.tensor([[[[0.0, 0.0]]]]), torch.tensor([[[6.4, 12.0]]])
    expected = 6.4 / 64 + 12 / 48
    torch.testing.assert_close(
        distance_cost(centres, targets, GRID), torch.full((1, 1, 1, 1), expected)
    )


def test_predictions_on_the_boxes_are_matched_to_them() -> None:
    torch.manual_seed(1)
    targets = random_boxes(2, 6)
    order = torch.stack([torch.randperm(6) for _ in range(2)])
    labels = torch.randint(0, 4, (2, 6))
    boxes = targets.gather(1, order.unsqueeze(-1).expand(-1, -1, 7))
    logits = torch.full((2, 2, 6, 4), -4.0)
    valid = torch.ones(2, 6, dtype=torch.bool)
    matcher = TransFusionMatcher()
    result = matcher(logits, boxes.expand(2, 2, 6, 7), labels, targets, valid, GRID).finish()
    assert torch.equal(result.box, order.expand(2, 2, 6))
    torch.testing.assert_close(result.overlap, torch.ones(2, 2, 6), atol=1e-4, rtol=0.0)


def test_float32_under_autocast() -> None:
    torch.manual_seed(2)
    targets = random_boxes(1, 4)
    boxes, logits = random_boxes(1, 1, 9), torch.randn(1, 1, 9, 3)
    labels, valid = torch.tensor([[0, 1, 2, 0]]), torch.ones(1, 4, dtype=torch.bool)
    matcher = TransFusionMatcher()
    plain = matcher(logits, boxes, labels, targets, valid, GRID).finish()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = matcher(logits, boxes, labels, targets, valid, GRID).finish()
    assert torch.equal(plain.box, mixed.box)
    assert mixed.overlap.dtype == torch.float32
    assert torch.equal(plain.overlap, mixed.overlap)


def test_no_boxes_at_all() -> None:
    matcher = TransFusionMatcher()
    result = matcher(
        torch.randn(2, 1, 5, 3),
        random_boxes(2, 1, 5),
        torch.zeros(1, 0, dtype=torch.int64),
        torch.zeros(1, 0, 7),
        torch.zeros(1, 0, dtype=torch.bool),
        GRID,
    ).finish()
    assert (result.box == -1).all()
    assert result.overlap.shape == (2, 1, 5)
    assert not result.overlap.any()
