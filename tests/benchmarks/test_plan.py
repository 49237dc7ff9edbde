"""Told against taken, on the smallest model."""

from omegaconf import OmegaConf

from bev_lightning.benchmarks.plan import measure


def test_a_toys_step_takes_what_was_told() -> None:
    words = ["model=bevfusion_camera_toy", "data.batch_size=1"]
    rows, _ = measure(OmegaConf.create(), [words])
    assert rows[0].name == " ".join(words)
    assert abs(rows[0].more["told_of_allocator"] - 1) < 0.15
    assert rows[0].more["resident_mib"] > 0.5 * rows[0].more["told_mib"]
