"""The loss in the images: right cells, right depths, nothing from what no camera sees."""

import math

import torch

from bev_lightning.losses.perspective import perspective_terms
from bev_lightning.structures import Boxes3D
from bev_lightning.structures.predictions import PerspectivePredictions

# One camera that looks along y of the model frame: focal length 100, centre (50, 30) [pixels].
CAMERA = torch.tensor([[100.0, 50, 0, 0], [0, 30, -100, 0], [0, 1, 0, 0], [0, 0, 0, 1]])


def boxes(*centres: tuple[float, float, float], label: int = 1) -> Boxes3D:
    num = len(centres)
    return Boxes3D(
        centre=torch.tensor(centres).view(1, num, 3),
        size=torch.ones(1, num, 3),
        yaw=torch.zeros(1, num),
        velocity=torch.zeros(1, num, 2),
        label=torch.full((1, num), label),
        valid=torch.ones(1, num, dtype=torch.bool),
    )


def predictions(heatmap: torch.Tensor, log_depth: torch.Tensor) -> PerspectivePredictions:
    return PerspectivePredictions(heatmap, log_depth, CAMERA.view(1, 1, 4, 4), (0.1, 0.1))


def test_a_centre_is_wanted_in_its_cell_at_its_depth() -> None:
    # At x = 2, z = 1 and 10 m ahead the centre is pixel (70, 20), cell (7, 2) of the map.
    heatmap = torch.full((1, 1, 3, 6, 10), -20.0)
    log_depth = torch.zeros(1, 1, 6, 10)
    heatmap[0, 0, 1, 2, 7] = 20.0
    log_depth[0, 0, 2, 7] = math.log(10.0)
    terms = perspective_terms(predictions(heatmap, log_depth), boxes((2.0, 10.0, 1.0)))
    assert terms["perspective_class"] < 1e-3 and terms["perspective_depth"] < 1e-6
    wrong_class = perspective_terms(predictions(heatmap, log_depth), boxes((2, 10, 1), label=2))
    assert wrong_class["perspective_class"] > 5
    farther = perspective_terms(predictions(heatmap, log_depth), boxes((4.0, 20.0, 2.0)))
    torch.testing.assert_close(farther["perspective_depth"], torch.tensor(math.log(2.0)))


def test_what_no_camera_sees_teaches_nothing() -> None:
    heatmap = torch.full((1, 1, 3, 6, 10), -20.0, requires_grad=True)
    log_depth = torch.zeros(1, 1, 6, 10, requires_grad=True)
    unseen = boxes((2.0, -10.0, 1.0), (90.0, 10.0, 1.0), (float("nan"), 10.0, 1.0))
    for targets in (unseen, boxes()):
        terms = perspective_terms(predictions(heatmap, log_depth), targets)
        assert terms["perspective_depth"] == 0 and terms["perspective_class"] < 1e-3
        sum(terms.values()).backward()
        assert bool(torch.isfinite(heatmap.grad).all()) and bool((log_depth.grad == 0).all())


def test_gradients_are_those_of_the_value() -> None:
    generator = torch.Generator().manual_seed(0)
    heatmap = torch.randn(1, 1, 2, 6, 10, generator=generator, requires_grad=True)
    log_depth = torch.randn(1, 1, 6, 10, generator=generator, requires_grad=True)
    targets = boxes((2.0, 10.0, 1.0), (-1.0, 20.0, 1.0))

    def total() -> torch.Tensor:
        return torch.stack(
            list(perspective_terms(predictions(heatmap, log_depth), targets).values())
        ).sum()

    before = total()
    (g_heatmap, g_depth) = torch.autograd.grad(before, (heatmap, log_depth))
    step = 1e-3
    with torch.no_grad():
        heatmap -= step * g_heatmap
        log_depth -= step * g_depth
    lower = before - step * (g_heatmap.square().sum() + g_depth.square().sum())
    torch.testing.assert_close(total(), lower, atol=1e-4, rtol=1e-4)
