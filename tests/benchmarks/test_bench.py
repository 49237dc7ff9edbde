"""The bench verb."""

import json
from pathlib import Path

import pytest
from hydra.core.hydra_config import HydraConfig

from bev_lightning import bench
from bev_lightning.benchmarks import axes
from bev_lightning.benchmarks.report import Row
from bev_lightning.config.compose import compose_job
from bev_lightning.config.resolve import resolve
from bev_lightning.hardware.machine import Machine


def test_a_report_bears_the_name_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = compose_job("bench", ["bench=scaling", "hardware=cpu"]).cfg
    monkeypatch.setattr(HydraConfig.instance(), "cfg", cfg)
    monkeypatch.setattr(axes, "measure_scaling", lambda *_, **__: ([Row("one", ms=1.0)], []))
    bench.main.__wrapped__(resolve(cfg, Machine(), tmp_path))
    assert json.loads((tmp_path / "bench.json").read_text())["bench"] == "scaling"
