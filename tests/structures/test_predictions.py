"""The box code of the heads."""

import math

import pytest
import torch

from bev_lightning.structures import BevGrid, Boxes3D
from bev_lightning.structures.predictions import BoxCodec

GRID = BevGrid((-20.0, -10.0, -5.0, 44.0, 14.0, 3.0), (2.0, 0.5))


def random_boxes(batch: int, num: int) -> Boxes3D:
    g = torch.Generator().manual_seed(0)
    return Boxes3D(
        centre=torch.randn(batch, num, 3, generator=g) * 30,
        size=torch.rand(batch, num, 3, generator=g) * 6 + 0.2,
        yaw=(torch.rand(batch, num, generator=g) * 2 - 1) * math.pi,
        velocity=torch.randn(batch, num, 2, generator=g),
        label=torch.randint(0, 10, (batch, num), generator=g),
        valid=torch.ones(batch, num, dtype=torch.bool),
    )


@pytest.mark.parametrize("height_shift", [0.0, 0.5])
def test_round_trip(height_shift: float) -> None:
    codec, boxes = BoxCodec(GRID, height_shift), random_boxes(2, 50)
    score = torch.rand(2, 50)
    decoded = codec.decode(codec.encode(boxes), boxes.label, score, boxes.valid)
    for name in ("centre", "size", "velocity"):
        torch.testing.assert_close(
            getattr(decoded, name), getattr(boxes, name), atol=2e-5, rtol=1e-5
        )
    turn = torch.remainder(decoded.yaw - boxes.yaw + math.pi, 2 * math.pi) - math.pi
    assert turn.abs().max() < 1e-5
    assert torch.equal(decoded.label, boxes.label)
    assert decoded.score is score


def test_known_code() -> None:
    """A box of 4 x 2 x 1.5 m that looks along +y, 24 m right of and 5 m beyond the first corner."""
    boxes = Boxes3D(
        centre=torch.tensor([[4.0, -5.0, 1.0]]),
        size=torch.tensor([[4.0, 2.0, 1.5]]),
        yaw=torch.tensor([math.pi / 2]),
        velocity=torch.tensor([[0.5, torch.nan]]),
        label=torch.tensor([0]),
        valid=torch.tensor([True]),
    )
    code = BoxCodec(GRID).encode(boxes)[0]
    # Legacy angle: -pi / 2 - pi / 2 = -pi, so sine 0 and cosine -1.
    expected = [12.0, 10.0, 1.75, math.log(2), math.log(4), math.log(1.5), 0.0, -1.0, 0.5]
    torch.testing.assert_close(code[:9], torch.tensor(expected), atol=1e-6, rtol=1e-6)
    assert code[9].isnan()
    assert float(BoxCodec(GRID, 0.0).encode(boxes)[0, 2]) == 1.0


def test_footprints_are_the_boxes() -> None:
    codec, boxes = BoxCodec(GRID, 0.0), random_boxes(1, 20)
    rows = codec.footprints(codec.encode(boxes))
    expected = torch.cat([boxes.centre, boxes.size, boxes.yaw.unsqueeze(-1)], dim=-1)
    torch.testing.assert_close(rows, expected, atol=2e-5, rtol=1e-5)


def test_no_boxes() -> None:
    assert BoxCodec(GRID).encode(Boxes3D.empty(2, 0)).shape == (2, 0, 10)
