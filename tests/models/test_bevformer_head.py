import math
from dataclasses import replace

import pytest
import torch

from bev_lightning.errors import InputError
from bev_lightning.models import bevformer_head
from bev_lightning.models.bevformer_head import BEVFormerHead, _denoising_mask, _passes
from bev_lightning.structures import BevGrid, Boxes3D
from bev_lightning.structures.predictions import QueryPredictions

GRID = BevGrid((-8.0, -4.0, -5.0, 8.0, 8.0, 3.0), (2.0, 2.0))  # 6 x 8 cells


def make_head(**changes: object) -> BEVFormerHead:
    torch.manual_seed(0)
    settings: dict[str, object] = {
        "grid": GRID,
        "channels": 16,
        "num_classes": 3,
        "num_queries": 7,
        "num_layers": 2,
        "num_heads": 2,
        "num_points": 2,
        "ffn_channels": 8,
        "dropout": 0.0,
        "max_boxes": 5,
    }
    return BEVFormerHead(**(settings | changes))  # type: ignore[arg-type]


def make_targets() -> Boxes3D:
    """Two samples: two boxes, and one."""
    boxes = Boxes3D.empty(2, 2)
    centre = torch.tensor([[[1.0, 2.0, 0.0], [-5.0, 6.0, -1.0]], [[3.0, -3.0, 0.0], [0.0] * 3]])
    valid = torch.tensor([[True, True], [True, False]])
    return replace(boxes, centre=centre, label=torch.tensor([[0, 2], [1, 0]]), valid=valid)


def test_published_head_has_no_more_than_its_parts() -> None:
    head = make_head()
    names = {name.split(".")[0] for name, _ in head.named_parameters()}
    assert names == {"learned", "layers", "class_branches", "box_branches"}
    predictions = head.train()(torch.randn(2, 16, 6, 8), make_targets())
    assert predictions.heatmap is None and predictions.denoising is None
    assert predictions.queries.logits.shape == (2, 2, 7, 3)
    assert predictions.queries.code.shape == (2, 2, 7, 10)
    probability = predictions.queries.logits.detach().sigmoid().mean()
    assert 0.001 < float(probability) < 0.1  # classes are rare at the start


def test_centres_lie_in_the_range() -> None:
    head = make_head()
    with torch.no_grad():
        for branch in head.box_branches:
            branch[-1].weight.mul_(100.0)  # type: ignore[index]
    code = head(torch.randn(2, 16, 6, 8)).queries.code.detach()
    for column, low, high in ((0, -8.0, 8.0), (1, -4.0, 8.0), (4, -5.0, 3.0)):
        assert float(code[..., column].min()) >= low
        assert float(code[..., column].max()) <= high


def test_only_the_first_reference_keeps_its_gradient() -> None:
    head = make_head()
    head(torch.randn(1, 16, 6, 8)).queries.code[1, ..., 0].sum().backward()
    # The second layer's centre does not depend on the first layer's box, nor on its reference.
    assert float(head.box_branches[0][-1].weight.grad.abs().sum()) == 0.0  # type: ignore[index]
    head.zero_grad()
    head(torch.randn(1, 16, 6, 8)).queries.code[0, ..., 0].sum().backward()
    assert head.learned is not None
    assert float(head.learned.reference.weight.grad.abs().sum()) > 0.0  # type: ignore[union-attr]


def test_decode_takes_pairs_by_score() -> None:
    head = make_head(range_m=(-100.0, -100.0, -100.0, 50.0, 100.0, 100.0))
    predictions = head(torch.randn(1, 16, 6, 8))
    logits = torch.full((2, 1, 7, 3), -9.0)
    logits[0] = 9.0  # only the last layer counts
    logits[1, 0, 4, 2], logits[1, 0, 4, 0], logits[1, 0, 1, 1] = 3.0, 2.0, 1.0
    code = torch.zeros(2, 1, 7, 10)
    code[1, 0, :, 0] = torch.arange(7.0)
    code[1, 0, 1, 0] = 50.5  # outside
    code[..., 6:8] = torch.tensor([-1.0, 0.0])
    boxes = head.decode(replace(predictions, queries=QueryPredictions(logits, code)))
    assert boxes.valid[0].tolist()[:3] == [True, True, False]
    assert boxes.label[0, :3].tolist() == [2, 0, 1]
    assert boxes.centre[0, :2, 0].tolist() == [4.0, 4.0]
    assert boxes.yaw[0, 0] == 0.0 and boxes.size[0, 0].tolist() == [1.0, 1.0, 1.0]
    assert boxes.score is not None
    assert boxes.score[0, 0] == torch.tensor(3.0).sigmoid()


def test_threshold_is_lowered_where_nothing_passes() -> None:
    score = torch.tensor([[0.6, 0.5, 0.2], [0.45, 0.42, 0.3], [0.004, 0.003, 0.0]])
    passes = _passes(score, 0.5)
    # 0.5 x 0.9 = 0.45 lets the second sample's first through; the third's all pass in the end.
    assert passes.tolist() == [[True, False, False], [True, False, False], [True, True, True]]


def test_heatmap_start_begins_at_peaks() -> None:
    head = make_head(heatmap_start=True, num_queries=2).eval()
    assert head.seeded is not None and head.learned is None
    bev = torch.randn(1, 16, 6, 8)
    heatmap = torch.full((1, 3, 6, 8), -5.0)
    heatmap[0, 2, 1, 3], heatmap[0, 0, 4, 7], heatmap[0, 2, 1, 4] = 4.0, 3.0, 3.5  # no peak
    head.seeded.heatmap = torch.nn.Identity()
    head.seeded.heatmap.forward = lambda x: heatmap  # type: ignore[method-assign]
    _, start = head.seeded.from_heatmap(bev, 2)
    torch.testing.assert_close(
        start.reference[0], torch.tensor([[3.5 / 8, 1.5 / 6, 0.5], [7.5 / 8, 4.5 / 6, 0.5]])
    )
    assert start.logits is not None
    assert start.logits[0].tolist() == [[-5.0, -5.0, 4.0], [3.0, -5.0, -5.0]]
    wanted = head.seeded.content(bev[0, :, 1, 3]) + head.seeded.class_embedding.weight[2]
    torch.testing.assert_close(start.query[0, 0], wanted)


def test_denoising_is_not_seen_by_the_detections() -> None:
    for heatmap_start in (True, False):
        head = make_head(heatmap_start=heatmap_start, num_denoising=3).eval()
        bev = torch.randn(2, 16, 6, 8)
        with torch.no_grad():
            alone, beside = head(bev), head(bev, make_targets())
        torch.testing.assert_close(alone.queries.logits, beside.queries.logits)
        torch.testing.assert_close(alone.queries.code, beside.queries.code)
        assert alone.denoising is None
        denoising = beside.denoising
        assert denoising is not None and denoising.code.shape == (2, 2, 6, 10)
        assert denoising.box.tolist() == [[0, 1] * 3] * 2
        assert denoising.valid.tolist() == [[True] * 6, [True, False] * 3]


def test_denoising_mask() -> None:
    blocked = _denoising_mask(1, 2, 2, torch.device("cpu"))
    assert blocked.int().tolist() == [
        [0, 1, 1, 1, 1],
        [0, 0, 0, 1, 1],
        [0, 0, 0, 1, 1],
        [0, 1, 1, 0, 0],
        [0, 1, 1, 0, 0],
    ]


def test_noisy_centres_stay_near(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bevformer_head, "DENOISING_FLIP", 0.0)
    head = make_head(num_denoising=50)
    start, box, _ = head._add_noise(torch.randn(2, 16, 6, 8), None, make_targets())
    centre = start.reference[0, :, :2] * torch.tensor([16.0, 12.0]) + torch.tensor([-8.0, -4.0])
    offset = centre - make_targets().centre[0, box[0], :2]
    assert 0.3 < float(offset.abs().max()) <= 0.5 + 1e-5  # half of a box of one metre


def test_frames_without_annotations() -> None:
    head = make_head(heatmap_start=True, num_denoising=2)
    assert head(torch.randn(2, 16, 6, 8), Boxes3D.empty(2, 0)).denoising is None
    predictions = head(torch.randn(2, 16, 6, 8), Boxes3D.empty(2, 1))
    assert predictions.denoising is not None
    assert not predictions.denoising.valid.any()
    assert bool(torch.isfinite(predictions.denoising.code).all())


def test_refusals() -> None:
    with pytest.raises(InputError, match="num_queries=145 exceeds the cells"):
        make_head(heatmap_start=True, num_queries=145)
    with pytest.raises(InputError, match=r"\(6, 8\) cells \(Y, X\) but its BEV map has \(8, 6\)"):
        make_head()(torch.randn(1, 16, 8, 6))
    assert math.isclose(
        float(make_head().class_branches[0][-1].bias[0]), -math.log(99.0), rel_tol=1e-4
    )  # type: ignore[index]
