"""FLOP counts."""

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from bev_lightning.hardware.flops import FlopCounter


def test_counts_as_torch_does() -> None:
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5))
    image = torch.randn(2, 3, 8, 8, requires_grad=True)
    totals = []
    for counter in (FlopCounter(), FlopCounterMode(display=False)):
        with counter:
            network(image).sum().backward()
        totals.append(
            counter.total if isinstance(counter, FlopCounter) else counter.get_total_flops()
        )
    assert totals[0] == totals[1] == 3 * 2 * 2 * (8 * 36 * 27 + 8 * 36 * 5)


def test_counts_modules_called_without_gradient() -> None:
    layer = nn.Linear(4, 6)
    with FlopCounter() as counter:
        with torch.no_grad():
            hidden = layer(torch.ones(2, 4, requires_grad=True))
        (layer(torch.ones(2, 4, requires_grad=True)) + hidden).sum().backward()
    assert counter.total == 4 * 2 * 2 * 4 * 6
