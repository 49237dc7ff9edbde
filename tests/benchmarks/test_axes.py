"""bench=axes and bench=scaling, with faked trainings."""

import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from bev_lightning.benchmarks import axes
from bev_lightning.benchmarks.axes import choose_precisions, measure_axes, measure_scaling
from bev_lightning.config.compose import load_config
from bev_lightning.hardware.machine import Machine

SPEEDS = {"1": 4.0, "2": 5.0, "4": 7.0}


class Ended:
    stderr = "bev_lightning.train: precision=fp8 needs compute capability 8.9"


@pytest.fixture
def cfg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    overrides = ["bench=axes", "bench.steps=3", "model=bevfusion_lidar_toy", "precision='32'"]
    (tmp_path / "run.json").write_text(json.dumps({"overrides": overrides}))

    def start(command: list[str], **_: Any) -> Ended:
        trained = load_config("train", command[3:])
        assert trained.trainer.max_steps == 3 and trained.model.inputs.camera is None
        values = dict(override.split("=", 1) for override in command[3:])
        if values["precision"] == "fp8":
            return Ended()
        accumulation = str(trained.trainer.accumulate_grad_batches)
        devices = str(trained.hardware.devices).replace("auto", "1")
        folder = Path(values["hydra.run.dir"])
        (folder / "checkpoints").mkdir(parents=True)
        score = {
            "status": "finished",
            "samples_per_s": SPEEDS[accumulation] * SPEEDS[devices] / 4.0,
            "peak_mib": 900,
            "cpu_ms_per_sample": 11.0,
            "effective_batch": 2 * int(accumulation),
            "loss": 1.5,
            "skipped_steps": 0,
        }
        (folder / "score.json").write_text(json.dumps(score))
        return Ended()

    monkeypatch.setattr(axes.subprocess, "run", start)
    return OmegaConf.create({"paths": {"run": str(tmp_path)}})


def test_each_combination_is_a_row(cfg: Any, tmp_path: Path) -> None:
    rows, notes = measure_axes(cfg, {"precision": [32, "fp8"], "accumulation": [1, 2]}, steps=3)
    assert [row.name for row in rows] == [
        "precision=32 accumulation=1",
        "precision=32 accumulation=2",
        "precision=fp8 accumulation=1",
        "precision=fp8 accumulation=2",
    ]
    assert rows[0].ratio == 1 and rows[1].ratio == pytest.approx(5 / 4)
    assert rows[1].samples_per_s == 5.0 and rows[1].more["effective_batch"] == 4
    assert rows[2].ratio is None
    assert str(rows[2].more["outcome"]).startswith("refused: precision=fp8 needs compute")
    assert not list((tmp_path / "rows").glob("*/checkpoints")) and "3 optimizer steps" in notes[0]


def test_scaling_is_against_one_process(cfg: Any) -> None:
    rows, _ = measure_scaling(cfg, [1, 2, 4], steps=3)
    assert [row.name for row in rows] == [f"hardware.devices={n}" for n in (1, 2, 4)]
    assert [row.ratio for row in rows] == pytest.approx([1, 5 / 4, 7 / 4])


def test_precisions_follow_the_machine() -> None:
    assert choose_precisions(Machine()) == ["32"]
    assert choose_precisions(Machine(1, "RTX 2080", 11.0, 7.5)) == ["32", "16"]
    assert choose_precisions(Machine(1, "RTX 3090", 24.0, 8.6)) == ["32", "16", "bf16"]
    assert choose_precisions(Machine(1, "H200", 139.0, 9.0)) == ["32", "16", "bf16", "fp8"]
