"""Predicted against measured memory of the smallest model."""

from omegaconf import OmegaConf

from bev_lightning.benchmarks.plan import measure_plan


def test_prediction_is_close_to_the_measured_memory() -> None:
    overrides = ["model=bevfusion_camera_toy", "data.batch_size=1"]
    rows, _ = measure_plan(OmegaConf.create(), [overrides])
    assert rows[0].name == " ".join(overrides)
    assert abs(rows[0].more["predicted_over_allocator"] - 1) < 0.15
    assert rows[0].more["resident_mib"] > 0.5 * rows[0].more["predicted_mib"]
