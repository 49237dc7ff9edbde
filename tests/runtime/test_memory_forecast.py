"""The plan of a training: arithmetic, verdict, and that it needs neither the cards nor the data."""

import json
from pathlib import Path

import pytest
from helpers import run_verb

from bev_lightning.config.compose import load_config
from bev_lightning.config.resolve import resolve
from bev_lightning.hardware.machine import Machine
from bev_lightning.hardware.memory import Peak
from bev_lightning.runtime.memory_forecast import Plan, make_plan

CPU = Machine(num_cpus=2, cpu_memory_gib=24.0)


@pytest.fixture
def peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """10 GiB of activations a sample, half of it with checkpointing or 16 bits."""

    def measure(cfg: object, cases: object) -> list[Peak]:
        return [
            Peak(
                512.0,
                0.0,
                1024.0,
                10_240.0
                * case.batch_size
                * (0.5 if case.checkpointing else 1)
                * (1 if case.precision == "32-true" else 0.5),
                0.0,
            )
            for case in cases  # type: ignore[attr-defined]
        ]

    monkeypatch.setattr("bev_lightning.runtime.memory_forecast.measure_cases", measure)


def plan(*overrides: str) -> Plan:
    return make_plan(resolve(load_config("plan", ["data=nuscenes", *overrides]), CPU))


@pytest.mark.usefixtures("peaks")
def test_arithmetic_and_verdict() -> None:
    forecast = plan("hardware=4x3090", "precision=32", "data.batch_size=1", "accumulation=2")
    assert forecast.batch.effective_batch == 8 and forecast.steps_per_epoch == 3517
    # ddp sends a copy of the gradients.
    assert forecast.buckets_mib == 512 and forecast.total_mib == 512 + 1024 + 10_240 + 512
    assert forecast.verdict == "fits" and forecast.largest_batch == 2
    assert forecast.remedies["precision=bf16 or 16"] == forecast.total_mib - 5_120
    assert forecast.remedies["strategy=fsdp"] == pytest.approx(1536 / 4 + 10_240)
    assert plan("hardware=4x3090", "precision=32", "data.batch_size=2").verdict == "tight"
    forecast = plan("hardware=4x3090", "precision=32", "data.batch_size=3")
    assert forecast.verdict == "does not fit"
    assert forecast.to_line() == (
        "peak memory of a process: 32.00 GiB of 24.0 GiB, does not fit; python -m "
        "bev_lightning.plan shows what takes less"
    )
    assert plan("hardware=4x3090", "precision=16", "data.batch_size=4").verdict == "tight"


@pytest.mark.usefixtures("peaks")
def test_samples_are_those_of_the_data() -> None:
    assert plan("hardware=1x3090", "data.cbgs=true").num_samples == 123_580
    assert plan("hardware=1x3090", "data.version=v9.9").steps_per_epoch is None
    assert plan("hardware=1x3090", "num_samples=1000", "data.batch_size=3").steps_per_epoch == 334
    cfg = resolve(load_config("plan", ["hardware=cpu"]), CPU)
    assert make_plan(cfg).num_samples == 800 and make_plan(cfg).memory_gib is not None


def test_any_machine_plans_for_any_cards(tmp_path: Path) -> None:
    overrides = ["hardware=4x4090", "model=bevfusion_toy", "data.batch_size=4", "data=nuscenes"]
    process = run_verb(tmp_path, "plan", *overrides)
    assert process.returncode == 0, process.stderr[-2000:]
    assert "16 samples per optimizer step" in process.stdout and "verdict: fits" in process.stdout
    (path,) = tmp_path.glob("outputs/plan/*/plan.json")
    written = json.loads(path.read_text())
    assert written["effective_batch"] == 16 and written["memory_gib"] == 24
    assert written["total_mib"] == pytest.approx(
        sum(list(written["peak_mib"].values())[:5]) + 4.4, abs=1
    )
    assert written["largest_batch_size"] > 4
    assert written["remedies_mib"]["data.batch_size=2, accumulation doubled"] < written["total_mib"]
