from dataclasses import replace

import torch
from torch import Tensor

from bev_lightning.losses.set_prediction import SetPredictionLoss
from bev_lightning.structures import BevGrid, Boxes3D
from bev_lightning.structures.predictions import (
    BEVFormerPredictions,
    DenoisingPredictions,
    MetricBoxCodec,
    QueryPredictions,
)

GRID = BevGrid((-8.0, -8.0, -5.0, 8.0, 8.0, 3.0), (2.0, 2.0))
CODEC = MetricBoxCodec(GRID)


def make_targets(x: tuple[float, ...] = (1.0, -3.0)) -> Boxes3D:
    boxes = Boxes3D.empty(1, len(x))
    centre = torch.tensor([[[value, 2.0, 0.0] for value in x]])
    label = torch.arange(len(x)).unsqueeze(0) % 3
    return replace(boxes, centre=centre, label=label, valid=torch.ones_like(boxes.valid))


def make_predictions(code: Tensor, logits: Tensor | None = None) -> BEVFormerPredictions:
    """Two layers alike, ``(1, Q, 10)`` and ``(1, Q, 3)``."""
    logits = torch.zeros(*code.shape[:2], 3) if logits is None else logits
    queries = QueryPredictions(logits.expand(2, -1, -1, -1), code.expand(2, -1, -1, -1))
    return BEVFormerPredictions(torch.zeros(1, 1, 8, 8), queries, CODEC)


def test_perfect_boxes_cost_nothing() -> None:
    targets = make_targets()
    code = torch.cat([CODEC.encode(targets).flip(1), torch.full((1, 1, 10), 5.0)], dim=1)
    predictions = make_predictions(code, torch.full((1, 3, 3), -20.0))
    criterion = SetPredictionLoss()
    assert criterion.match(predictions, targets).finish().box.tolist() == [[[1, 0, -1]]] * 2
    assert float(criterion(predictions, targets)["box"]) < 1e-5


def test_terms_by_hand() -> None:
    targets = make_targets((1.0,))
    code = CODEC.encode(targets).clone()
    code[..., 0] += 2.0  # metres
    code[..., 8] += 3.0  # metres per second, weighs a fifth
    terms = SetPredictionLoss(class_weight=2.0, box_weight=0.25)(make_predictions(code), targets)
    torch.testing.assert_close(terms["box"], torch.tensor(2 * 0.25 * (2.0 + 0.2 * 3.0)))
    # At probability one half the focal loss is 0.25 ln 2 times 0.25 (hit) or 0.75 (two misses).
    focal = torch.log(torch.tensor(2.0)) * 0.25 * (0.25 + 2 * 0.75)
    torch.testing.assert_close(terms["class"], 2 * 2.0 * focal)


def test_unknown_velocity() -> None:
    targets = make_targets((1.0,))
    targets = replace(targets, velocity=torch.full_like(targets.velocity, torch.nan))
    code = torch.zeros(1, 2, 10, requires_grad=True)
    wanted = CODEC.encode(targets)
    by_row = {}
    for skip in (True, False):
        criterion = SetPredictionLoss(skip_unknown_rows=skip)
        terms = criterion(make_predictions(code), targets)
        by_row[skip] = float(terms["box"])
        (gradient,) = torch.autograd.grad(terms["box"] + terms["class"], code)
        assert bool(torch.isfinite(gradient).all())
    assert by_row[True] == 0.0
    assert abs(by_row[False] - 2 * 0.25 * float(wanted[..., :8].abs().sum())) < 1e-5


def test_frames_without_boxes_train() -> None:
    for targets in (Boxes3D.empty(1, 0), Boxes3D.empty(1, 3)):
        code = torch.randn(1, 4, 10, requires_grad=True)
        logits = torch.zeros(1, 4, 3, requires_grad=True)
        terms = SetPredictionLoss()(make_predictions(code, logits), targets)
        assert float(terms["box"]) == 0.0 and float(terms["class"]) > 0.0
        sum(terms.values()).backward()
        assert code.grad is not None and float(code.grad.abs().sum()) == 0.0
        assert logits.grad is not None and bool((logits.grad > 0).all())


def test_boxes_out_of_range_are_left_out() -> None:
    inside, both = make_targets((1.0,)), make_targets((1.0, 9.0))
    predictions = make_predictions(torch.randn(1, 3, 10))
    criterion = SetPredictionLoss()
    wanted, terms = criterion(predictions, inside), criterion(predictions, both)
    for name in wanted:
        torch.testing.assert_close(terms[name], wanted[name])


def test_more_boxes_than_queries() -> None:
    terms = SetPredictionLoss()(
        make_predictions(torch.randn(1, 2, 10)), make_targets((1.0, -3.0, 2.0, 5.0))
    )
    assert all(bool(torch.isfinite(term)) for term in terms.values())


def test_heatmap_and_denoising() -> None:
    targets = make_targets()
    predictions = make_predictions(torch.randn(1, 3, 10))
    code = CODEC.encode(targets)[:, [0, 1, 0]].expand(2, -1, -1, -1).clone()
    code[:, :, 1, 0] += 4.0
    box, valid = torch.tensor([[0, 1, 0]]), torch.tensor([[True, True, False]])
    predictions = replace(
        predictions,
        heatmap=torch.zeros(1, 3, 8, 8),
        denoising=DenoisingPredictions(torch.zeros(2, 1, 3, 3), code, box, valid),
    )
    terms = SetPredictionLoss(denoising_weight=0.5, heatmap_weight=2.0)(predictions, targets)
    assert set(terms) == {"class", "box", "heatmap", "denoising_class", "denoising_box"}
    # One of two queries is 4 m off; the third is padding.
    torch.testing.assert_close(terms["denoising_box"], torch.tensor(0.5 * 2 * 0.25 * 4.0 / 2))
    focal = torch.log(torch.tensor(2.0)) * 0.25 * (0.25 + 2 * 0.75)
    torch.testing.assert_close(terms["denoising_class"], 0.5 * 2 * 2.0 * focal)
    once = SetPredictionLoss()(predictions, targets)["heatmap"]
    torch.testing.assert_close(terms["heatmap"], 2 * once)


def test_codec_round_trip() -> None:
    rng = torch.Generator().manual_seed(0)
    boxes = replace(
        Boxes3D.empty(6),
        centre=torch.randn(6, 3, generator=rng),
        size=torch.rand(6, 3, generator=rng) + 0.5,
        yaw=torch.linspace(-3.0, 3.0, 6),
        velocity=torch.randn(6, 2, generator=rng),
    )
    back = CODEC.decode(CODEC.encode(boxes), boxes.label, torch.ones(6), boxes.valid)
    for name in ("centre", "size", "yaw", "velocity"):
        torch.testing.assert_close(getattr(back, name), getattr(boxes, name))
    code = CODEC.encode(boxes)
    torch.testing.assert_close(code[:, [2, 3, 5]].exp(), boxes.size[:, [1, 0, 2]])
    torch.testing.assert_close(code[:, 4], boxes.centre[:, 2])
    legacy = -boxes.yaw - torch.pi / 2
    torch.testing.assert_close(code[:, 6:8], torch.stack([legacy.sin(), legacy.cos()], dim=-1))
