"""Peak memory by kind: exact on a network whose tensors can be counted by hand."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from bev_lightning.hardware.memory import Peak, StorageTracker, measure_step

MIB = 2**20


def step(rows: int) -> Peak:
    # Weights of 1024 x 1024 float32 are 4 MiB.
    network = nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.ReLU(), nn.Linear(1024, 1024))
    network[2].bias = None
    x = torch.zeros(rows, 1024)
    return measure_step(
        network, lambda p: torch.optim.AdamW(p, fused=True), [x], lambda: network(x).sum()
    )


def test_kinds_of_a_step() -> None:
    # 4096 rows: every activation takes 16 MiB.
    peak = step(4096)
    assert abs(peak.parameters - 8) < 0.01 and abs(peak.optimizer - 16) < 0.01
    # At the peak the gradients of the last weight, its input and its output exist; kept from the
    # forward pass are the input and the ReLU's output.
    assert peak.gradients == 4 and peak.activations == pytest.approx(32, abs=0.01)
    assert peak.temporaries == pytest.approx(32, abs=0.01)
    assert peak.total == pytest.approx(92, abs=0.01) and peak.to_json()["total"] == 92.0


def test_fake_tensors_give_the_same_peak() -> None:
    with FakeTensorMode():
        fake = step(4096)
        # A hundred times the machine's memory.
        huge = step(2**30)
    assert fake == step(4096)
    assert huge.activations > 2**20 * 4


def test_freed_storages_are_not_counted() -> None:
    tracker = StorageTracker()
    with tracker:
        for _ in range(5):
            torch.zeros(MIB // 4) + 1
    assert sum(tracker.current.values()) == 0
    assert max(tracker.peak.values()) == 2 * MIB
