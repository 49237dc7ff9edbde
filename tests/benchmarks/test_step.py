"""bench=step on a tiny detector."""

from pathlib import Path

import pytest
import torch

from bev_lightning.benchmarks.step import count_flops, measure_step
from bev_lightning.config.compose import load_config
from bev_lightning.config.resolve import resolve
from bev_lightning.errors import InputError
from bev_lightning.hardware.machine import Machine

TINY = [
    "model=bevfusion_lidar_toy",
    "bench=step",
    "hardware=cpu",
    "model.inputs.lidar.max_points=2000",
    "model.network.lidar.out_channels=8",
    "model.network.backbone={in_channels:8,out_channels:[8,8,8],layer_nums:[1,1,1]}",
    "model.network.neck={in_channels:[8,8,8],out_channels:[8,8,8]}",
    "model.network.head={in_channels:24,channels:8,num_boxes:20}",
]


def test_a_step_is_taken_apart(tmp_path: Path) -> None:
    cfg = resolve(load_config("bench", [*TINY, "loss_norm=effective"]), Machine(), tmp_path)
    rows, notes = measure_step(cfg, repeats=1, source="noise", num_boxes=5)
    assert [(row.group, row.name) for row in rows] == [
        (group, name) for group in ("step", "head", "lidar") for name in ("reference", "fast")
    ]
    for row in rows:
        assert row.ms > 0 and row.cpu_ms > 0 and row.ratio > 0
    fast = rows[1]
    parts = [fast.more[f"{name}_ms"] for name in ("data", "forward", "loss", "backward")]
    assert all(part >= 0 for part in parts)
    assert sum(parts) + fast.more["optimizer_ms"] == pytest.approx(fast.ms, rel=1e-6)
    assert fast.samples_per_s == pytest.approx(2e3 / fast.ms)
    assert 0 < fast.more["mfu"] < 1.5 and len(notes) == 2


def test_flops_of_a_forward_and_backward_pass_are_three_times_those_forward(tmp_path: Path) -> None:
    from bev_lightning.benchmarks.random_batches import make_batch
    from bev_lightning.runtime.build import build_module

    cfg = resolve(load_config("bench", TINY), Machine(), tmp_path)
    module = build_module(cfg)
    batch = make_batch(module.inputs, 10, size=1, num_boxes=3)
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        module(batch)
    forward = counter.get_total_flops()
    # All but the gradient of the first layer's input.
    assert 2.8 < count_flops(module, batch) / forward <= 3.0
    assert all(value.grad is None for value in module.parameters())


def test_unknown_sources_and_several_processes_are_refused(tmp_path: Path) -> None:
    cfg = resolve(load_config("bench", TINY), Machine(), tmp_path)
    with pytest.raises(InputError, match="use bench.source=noise or loader"):
        measure_step(cfg, repeats=1, source="disk", num_boxes=5)
    cfg = resolve(load_config("bench", [*TINY, "hardware.devices=2"]), Machine(), tmp_path)
    with pytest.raises(InputError, match=r"hardware.devices=1"):
        measure_step(cfg, repeats=1, source="noise", num_boxes=5)
