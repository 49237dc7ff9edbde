"""Losses of the heads: known answers, empty frames, unknown velocities, several layers."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from bev_lightning.losses.bevfusion import BEVFusionLoss
from bev_lightning.losses.centre import CentreLoss
from bev_lightning.losses.transfusion import TransFusionLoss
from bev_lightning.structures import BevGrid, Boxes3D
from bev_lightning.structures.predictions import (
    BEVFusionPredictions,
    BoxCodec,
    HeatmapPredictions,
    TransFusionPredictions,
)

GRID = BevGrid((-20.0, -10.0, -5.0, 20.0, 14.0, 3.0), (1.0, 1.0))  # Y 24, X 40
CODEC = BoxCodec(GRID)
CLASSES = 4


def random_boxes(batch: int, num: int, seed: int = 0) -> Boxes3D:
    g = torch.Generator().manual_seed(seed)
    scale, low = torch.tensor([38.0, 22.0, 3.0]), torch.tensor([-19.0, -9.0, -2.0])
    return Boxes3D(
        centre=torch.rand(batch, num, 3, generator=g) * scale + low,
        size=torch.rand(batch, num, 3, generator=g) * 4 + 0.5,
        yaw=(torch.rand(batch, num, generator=g) * 2 - 1) * math.pi,
        velocity=torch.randn(batch, num, 2, generator=g),
        label=torch.randint(0, CLASSES, (batch, num), generator=g),
        valid=torch.ones(batch, num, dtype=torch.bool),
    )


def make_predictions(code: Tensor, logits: Tensor, seed: int = 0) -> TransFusionPredictions:
    g = torch.Generator().manual_seed(seed)
    batch, queries = code.shape[1:3]
    return TransFusionPredictions(
        heatmap=torch.randn(batch, CLASSES, *GRID.shape, generator=g).requires_grad_(),
        query_label=torch.zeros(batch, queries, dtype=torch.int64),
        query_score=torch.ones(batch, CLASSES, queries),
        logits=logits.requires_grad_(),
        code=code.requires_grad_(),
        codec=CODEC,
    )


def random_predictions(layers: int, batch: int, queries: int) -> TransFusionPredictions:
    g = torch.Generator().manual_seed(7)
    code = torch.randn(layers, batch, queries, 10, generator=g)
    return make_predictions(code, torch.randn(layers, batch, queries, CLASSES, generator=g))


def test_perfect_boxes_cost_nothing() -> None:
    targets = random_boxes(2, 6)
    code = CODEC.encode(targets).flip(1)[None].clone()
    logits = 20 * (2 * F.one_hot(targets.label.flip(1), CLASSES)[None].float() - 1)
    terms = TransFusionLoss()(make_predictions(code, logits), targets)
    assert terms["box"].item() < 1e-5
    assert terms["class"].item() < 1e-5
    assert terms["heatmap"].item() > 0.1


def test_one_metre_beside_costs_a_quarter() -> None:
    """|1 cell| x code weight 1 x box weight 0.25, one box."""
    targets = random_boxes(1, 1)
    code = CODEC.encode(targets)[None] + torch.tensor([1.0, 0, 0, 0, 0, 0, 0, 0, 0, 5.0])
    terms = TransFusionLoss()(make_predictions(code, torch.zeros(1, 1, 1, CLASSES)), targets)
    torch.testing.assert_close(terms["box"], torch.tensor(0.25 * (1.0 + 0.2 * 5.0)))


@pytest.mark.parametrize("num", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batch_without_boxes_learns_background(num: int, dtype: torch.dtype) -> None:
    predictions = random_predictions(2, 2, 5)
    with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        terms = TransFusionLoss()(predictions, Boxes3D.empty(2, num))
    sum(terms.values()).backward()
    assert terms["box"].item() == 0.0
    assert all(torch.isfinite(term) and term.dtype == torch.float32 for term in terms.values())
    assert (predictions.logits.grad > 0).all()  # every score is pushed down
    assert (predictions.heatmap.grad > 0).all()
    assert not predictions.code.grad.any()


def test_empty_sample_beside_a_full_one() -> None:
    """The empty sample's queries are background; the full one's boxes cost what they cost alone."""
    predictions = random_predictions(1, 2, 6)
    full = random_boxes(1, 4)[0]
    targets = Boxes3D.stack([full, Boxes3D.empty(0)])
    terms = TransFusionLoss()(predictions, targets)
    sum(terms.values()).backward()
    assert (predictions.logits.grad[:, 1] > 0).all()
    assert not predictions.code.grad[:, 1].any()
    alone = make_predictions(
        predictions.code[:, :1].detach().clone(), predictions.logits[:, :1].detach().clone()
    )
    box = TransFusionLoss()(alone, Boxes3D.stack([full]))["box"]
    torch.testing.assert_close(terms["box"], box)


def test_unknown_velocity_leaves_only_the_velocity_out() -> None:
    targets = random_boxes(1, 3)
    unknown = replace(targets, velocity=targets.velocity.clone())
    unknown.velocity[0, 1] = torch.nan
    predictions = random_predictions(1, 1, 3)
    criterion = TransFusionLoss()
    assignment = criterion.match(predictions, unknown).finish()
    terms = criterion(predictions, unknown)
    sum(terms.values()).backward()
    assert all(torch.isfinite(term) for term in terms.values())
    gradient = predictions.code.grad[0, 0]
    row = int((assignment.box[0, 0] == 1).nonzero())
    assert not gradient[row, 8:].any()
    assert gradient[row, :8].abs().min() > 0
    others = gradient[[r for r in range(3) if r != row]]
    assert others.abs().min() > 0
    expected = terms["box"] + 0.25 * 0.2 / 3 * (
        (predictions.code[0, 0, row, 8:] - targets.velocity[0, 1]).abs().sum()
    )
    torch.testing.assert_close(criterion(predictions, targets)["box"], expected)


def test_layers_are_matched_apart_and_share_one_normalizer() -> None:
    predictions, targets = random_predictions(3, 2, 7), random_boxes(2, 4)
    criterion = TransFusionLoss()
    assignment = criterion.match(predictions, targets).finish()
    assert len({tuple(box.flatten().tolist()) for box in assignment.box}) > 1
    by_class, by_box = criterion.layer_terms(predictions, targets, assignment)
    for layer in range(3):
        single = make_predictions(
            predictions.code[layer : layer + 1].detach(),
            predictions.logits[layer : layer + 1].detach(),
        )
        terms = criterion(single, targets)
        torch.testing.assert_close(by_class[layer] * 3, terms["class"])
        torch.testing.assert_close(by_box[layer] * 3, terms["box"])
    terms = criterion(predictions, targets)
    torch.testing.assert_close(terms["box"], by_box.sum())
    torch.testing.assert_close(terms["class"], by_class.sum())


def test_box_outside_the_grid_is_finite() -> None:
    targets = random_boxes(1, 2)
    targets.centre[0, 0, 0] = -25.0
    for criterion, predictions in (
        (TransFusionLoss(), random_predictions(1, 1, 3)),
        (CentreLoss(), centre_predictions(targets)),
    ):
        terms = criterion(predictions, targets)
        assert all(torch.isfinite(term) for term in terms.values())


def centre_predictions(targets: Boxes3D) -> HeatmapPredictions:
    code = torch.zeros(targets.valid.shape[0], 10, *GRID.shape)
    heatmap = torch.zeros(targets.valid.shape[0], CLASSES, *GRID.shape)
    return HeatmapPredictions(heatmap.requires_grad_(), code.requires_grad_(), CODEC)


def test_centre_head_is_trained_at_the_cell_of_the_box() -> None:
    targets = random_boxes(1, 1)
    targets.centre[0, 0] = torch.tensor([3.2, -7.5, 0.0])  # cell i = 23, j = 2
    predictions = centre_predictions(targets)
    terms = CentreLoss()(predictions, targets)
    weight = torch.tensor([1.0] * 8 + [0.2] * 2)
    expected = 0.25 * (CODEC.encode(targets)[0, 0].abs() * weight).sum()
    torch.testing.assert_close(terms["box"], expected)
    terms["box"].backward()
    trained = predictions.code.grad[0].abs().sum(0).nonzero()
    assert trained.tolist() == [[2, 23]]


def test_centre_head_perfect_and_empty() -> None:
    targets = random_boxes(2, 5)
    predictions = centre_predictions(targets)
    code = CODEC.encode(targets)
    with torch.no_grad():
        for b in range(2):
            for m in range(5):
                i, j = code[b, m, :2].floor().long().tolist()
                predictions.code[b, :, j, i] = code[b, m]
    assert CentreLoss()(predictions, targets)["box"].item() == 0.0
    terms = CentreLoss()(predictions, Boxes3D.empty(2, 0))
    sum(terms.values()).backward()
    assert terms["box"].item() == 0.0
    assert (predictions.heatmap.grad > 0).all()


def test_bevfusion_adds_the_depth_term() -> None:
    targets = random_boxes(1, 2)
    detections = random_predictions(1, 1, 3)
    criterion = BEVFusionLoss(TransFusionLoss(), depth_weight=0.5)
    assert set(criterion(BEVFusionPredictions(detections), targets)) == {"heatmap", "class", "box"}
    logits, target = torch.zeros(1, 2, 8, 3, 4), torch.randint(0, 8, (1, 2, 3, 4))
    terms = criterion(BEVFusionPredictions(detections, logits, target), targets)
    torch.testing.assert_close(terms["depth"], torch.tensor(0.5 * math.log(8)))
