"""Detection heads: where queries come from, what decoding keeps, gradients, precision."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bev_lightning.errors import InputError
from bev_lightning.models.heads import CentreHead, TransFusionHead
from bev_lightning.models.selection import BoxSelection
from bev_lightning.structures import BevGrid, Boxes3D
from bev_lightning.structures.predictions import HeatmapPredictions, TransFusionPredictions

GRID = BevGrid((-20.0, -10.0, -5.0, 20.0, 14.0, 3.0), (2.0, 1.0))  # Y 24, X 20
CLASSES = 10


def make_transfusion(**options: Any) -> TransFusionHead:
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "grid": GRID,
        "in_channels": 6,
        "channels": 16,
        "num_queries": 8,
        "num_heads": 4,
        "ffn_channels": 16,
        "branch_channels": 8,
    }
    return TransFusionHead(**(settings | options)).eval()


def make_centre(**options: Any) -> CentreHead:
    torch.manual_seed(0)
    settings: dict[str, Any] = {"grid": GRID, "in_channels": 6, "channels": 8, "num_boxes": 8}
    return CentreHead(**(settings | options)).eval()


class Fixed(nn.Module):
    """A layer that answers the same whatever it is given."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = value

    def forward(self, *_: Tensor) -> Tensor:
        return self.value


def bev(batch: int = 2, seed: int = 0) -> Tensor:
    return torch.randn(batch, 6, *GRID.shape, generator=torch.Generator().manual_seed(seed))


def silence_centres(head: TransFusionHead) -> None:
    for branches in head.branches:
        nn.init.zeros_(branches["centre"][-1].weight)
        nn.init.zeros_(branches["centre"][-1].bias)


def test_queries_start_at_the_peaks() -> None:
    """A class map with two peaks in sample 0 and one in sample 1, on a map that is not square."""
    heatmap = torch.full((2, CLASSES, *GRID.shape), -9.0)
    heatmap[0, 3, 5, 17] = 2.0  # j = 5 along y, i = 17 along x
    heatmap[0, 0, 20, 2] = 1.0
    heatmap[0, 0, 20, 3] = 0.5  # beside a higher one: no peak
    heatmap[1, 9, 23, 19] = 3.0  # of a point class, in the corner
    head = make_transfusion(num_queries=2)
    head.heatmap_head = Fixed(heatmap)
    silence_centres(head)
    predictions = head(bev())
    assert predictions.query_label[0].tolist() == [3, 0]
    assert int(predictions.query_label[1, 0]) == 9
    boxes = head.decode(predictions)
    expected = GRID.to_metres(torch.tensor([[17.5, 5.5], [2.5, 20.5]]))
    torch.testing.assert_close(boxes.centre[0, :, :2], expected)
    torch.testing.assert_close(boxes.centre[1, 0, :2], GRID.to_metres(torch.tensor([19.5, 23.5])))
    probability = predictions.logits[-1, 0, 0, 3].sigmoid() * torch.tensor(2.0).sigmoid()
    torch.testing.assert_close(boxes.score[0, 0], probability)


def test_border_is_no_peak_except_of_point_classes() -> None:
    """As published: a ring of one cell, whatever its value."""
    head = make_transfusion()
    probability = torch.rand(1, CLASSES, *GRID.shape, generator=torch.Generator().manual_seed(1))
    probability[0, :, 0, 7] = 2.0
    peaks = head.find_peaks(probability)[0]
    ring = torch.ones(GRID.shape, dtype=torch.bool)
    ring[1:-1, 1:-1] = False
    assert not peaks[:8][:, ring].any()
    assert peaks[:8][:, ~ring].any()
    assert torch.equal(peaks[8:], probability[0, 8:])


def test_peaks_are_local_maxima() -> None:
    head = make_transfusion()
    probability = torch.rand(1, CLASSES, *GRID.shape, generator=torch.Generator().manual_seed(2))
    peaks = head.find_peaks(probability)
    for k, j, i in peaks[0, :8].nonzero().tolist():
        assert 1 <= j < GRID.shape[0] - 1 and 1 <= i < GRID.shape[1] - 1
        assert probability[0, k, j, i] == probability[0, k, j - 1 : j + 2, i - 1 : i + 2].max()


@pytest.mark.parametrize("num_layers", [1, 3])
def test_a_batch_equals_its_samples(num_layers: int) -> None:
    head = make_transfusion(num_layers=num_layers)
    with torch.no_grad():
        both = head(bev())
        alone = [head(bev()[b : b + 1]) for b in range(2)]
    assert both.code.shape == (num_layers, 2, 8, 10)
    assert both.logits.shape == (num_layers, 2, 8, CLASSES)
    for b in range(2):
        torch.testing.assert_close(both.code[:, b], alone[b].code[:, 0], atol=1e-4, rtol=1e-4)
        assert torch.equal(both.query_label[b], alone[b].query_label[0])


def test_each_layer_starts_from_the_position_before() -> None:
    head = make_transfusion(num_layers=3)
    for branches, step in zip(head.branches, (1.5, 0.0, -0.25), strict=True):
        nn.init.zeros_(branches["centre"][-1].weight)
        nn.init.constant_(branches["centre"][-1].bias, step)
    code = head(bev()).code
    torch.testing.assert_close(code[1, ..., :2], code[0, ..., :2])
    torch.testing.assert_close(code[2, ..., :2], code[0, ..., :2] - 0.25)
    first = code[0, ..., :2] - 1.5 - 0.5
    torch.testing.assert_close(first, first.round(), atol=1e-5, rtol=0.0)


def test_every_parameter_learns() -> None:
    head = make_transfusion(num_layers=2).train()
    predictions = head(bev())
    (predictions.heatmap.mean() + predictions.logits.mean() + predictions.code.mean()).backward()
    missing = [name for name, p in head.named_parameters() if p.grad is None]
    assert missing == []


@pytest.mark.parametrize("make", [make_transfusion, make_centre])
def test_outputs_are_float32_under_autocast(make: Callable[[], nn.Module]) -> None:
    head = make()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        predictions = head(bev())
        boxes = head.decode(predictions)
    assert predictions.heatmap.dtype == predictions.code.dtype == torch.float32
    assert boxes.centre.dtype == boxes.score.dtype == torch.float32
    assert torch.isfinite(boxes.centre).all()


def test_half_precision_keeps_cells_apart() -> None:
    """Positions are added in float32: cell 300.5 has no bfloat16 of its own."""
    wide = BevGrid((0.0, 0.0, -5.0, 400.0, 4.0, 3.0), (1.0, 1.0))
    head = make_transfusion(grid=wide, num_queries=1)
    heatmap = torch.full((1, CLASSES, *wide.shape), -9.0)
    heatmap[0, 0, 2, 300] = 1.0
    head.heatmap_head = Fixed(heatmap)
    silence_centres(head)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        code = head(torch.zeros(1, 6, *wide.shape)).code
    assert code[0, 0, 0, :2].tolist() == [300.5, 2.5]


def test_centre_head_decodes_its_peaks() -> None:
    head = make_centre(num_boxes=3)
    heatmap = torch.full((2, CLASSES, *GRID.shape), -30.0)
    heatmap[0, 3, 0, 17] = 2.0  # the border counts here
    heatmap[0, 0, 20, 2] = 1.0
    heatmap[0, 0, 20, 3] = 0.5
    heatmap[1, 9, 23, 19] = 3.0
    predictions = replace(head(bev()), heatmap=heatmap)
    boxes = head.decode(predictions)
    assert boxes.label[0, :2].tolist() == [3, 0]
    assert boxes.label[1, 0] == 9
    torch.testing.assert_close(boxes.score[0, :2], torch.tensor([2.0, 1.0]).sigmoid())
    assert (boxes.score[0, 2] < 1e-6) and (boxes.score[1, 1:] < 1e-6).all()
    code = predictions.code[0, :, 0, 17]
    torch.testing.assert_close(boxes.centre[0, 0, :2], GRID.to_metres(code[:2]))


def test_centre_head_predicts_relative_to_the_cell() -> None:
    head = make_centre()
    nn.init.zeros_(head.box[-1].weight)
    nn.init.constant_(head.box[-1].bias, 0.25)
    code = head(bev()).code
    assert code.shape == (2, 10, *GRID.shape)
    assert code[1, :2, 5, 17].tolist() == [17.75, 5.75]
    assert code[1, 2, 5, 17] == 0.25


def test_broken_code_is_not_valid() -> None:
    head = make_transfusion()
    predictions = head(bev())
    code = predictions.code.detach().clone()
    code[-1, 0, 2, 4] = torch.nan
    valid = head.decode(replace(predictions, code=code)).valid
    assert not valid[0, 2]
    assert int(valid.sum()) == 15


def some_boxes() -> Boxes3D:
    centre = [[0.0, 0.0, 0.0], [3.0, 0.0, 0.0], [3.0, 0.5, 0.0], [10.0, 14.0, -1.0]]
    return replace(
        Boxes3D.empty(1, 4),
        centre=torch.tensor([centre]),
        size=torch.tensor([4.0, 2.0, 1.5]).expand(1, 4, 3),
        label=torch.tensor([[0, 8, 8, 1]]),
        valid=torch.tensor([[True] * 4]),
        score=torch.tensor([[0.5, 0.2, 0.4, 0.1]]),
    )


@pytest.mark.parametrize(
    ("choice", "kept"),
    [
        (BoxSelection(), [True, True, True, True]),
        (BoxSelection(score_threshold=0.2), [True, False, True, False]),
        (BoxSelection(range_m=(0, 0, -1, 10, 14, 1)), [True, True, True, True]),  # bounds included
        (BoxSelection(range_m=(0.1, 0, -1, 10, 13.9, 1)), [False, True, True, False]),
        (BoxSelection(range_m=(0, 0, -0.9, 10, 14, 1)), [True, True, True, False]),
        (BoxSelection(circle_radius_m=0.5), [True, False, True, True]),
        (BoxSelection(circle_radius_m=5.0), [True, False, True, True]),  # other classes stay
        (BoxSelection(circle_radius_m=5.0, circle_classes=(0, 1)), [True, True, True, True]),
        (BoxSelection(score_threshold=0.4, circle_radius_m=5.0), [True, False, False, False]),
    ],
)
def test_choice_of_boxes(choice: BoxSelection, kept: list[bool]) -> None:
    assert choice(some_boxes()).valid[0].tolist() == kept


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(InputError, match="num_queries from 1 to 4800 .* got 5000"):
        make_transfusion(num_queries=5000)
    with pytest.raises(InputError, match="num_boxes"):
        make_centre(num_boxes=0)
    for head in (make_transfusion(), make_centre()):
        with pytest.raises(InputError, match=r"\(24, 20\) cells .* has \(20, 24\)"):
            head(torch.zeros(1, 6, 20, 24))


def test_types_of_predictions() -> None:
    assert isinstance(make_transfusion()(bev()), TransFusionPredictions)
    assert isinstance(make_centre()(bev()), HeatmapPredictions)


def test_transfusion_refuses_point_classes_that_are_not_there() -> None:
    with pytest.raises(InputError, match=r"4 classes but point_classes=\[8, 9\]"):
        TransFusionHead(BevGrid((0, 0, -1, 8, 8, 1), (1, 1)), in_channels=4, num_classes=4)
