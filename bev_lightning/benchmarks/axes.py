"""``bench=axes`` and ``bench=scaling``: short trainings of several variants, a process each."""

import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from bev_lightning.benchmarks.report import Row, with_ratios
from bev_lightning.config.auto_batch import replace_values
from bev_lightning.config.compose import key_of
from bev_lightning.hardware.machine import Machine, detect_machine
from bev_lightning.progress import track

# Further columns of a finished training, from score.json.
_COLUMNS = ("cpu_ms_per_sample", "effective_batch", "loss", "skipped_steps")


def measure_axes(
    cfg: DictConfig, axes: Mapping[str, Any], steps: int
) -> tuple[list[Row], list[str]]:
    """Train every combination of the axes; the first combination is the baseline.

    Arguments: see ``conf/bench/axes.yaml``.
    """
    values = {
        axis: choose_precisions(detect_machine()) if given == "auto" else [str(v) for v in given]
        for axis, given in axes.items()
    }
    combinations = [
        dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())
    ]
    return _measure(cfg, combinations, steps)


def measure_scaling(cfg: DictConfig, num_processes: Any, steps: int) -> tuple[list[Row], list[str]]:
    """Train with 1, 2, ... processes on this machine; the first number is the baseline.

    Arguments: see ``conf/bench/scaling.yaml``.
    """
    if num_processes == "auto":
        machine = detect_machine()
        num_processes = range(1, (machine.num_cuda_devices or machine.num_cpus) + 1)
    rows, notes = _measure(cfg, [{"hardware.devices": str(n)} for n in num_processes], steps)
    return rows, [*notes, "A ratio of n with n processes is perfect scaling."]


def choose_precisions(machine: Machine) -> list[str]:
    """Precisions that the machine supports in hardware."""
    capability = machine.capability
    if capability is None:
        return ["32"]
    return ["32", "16"] + ["bf16"] * (capability >= 8.0) + ["fp8"] * (capability >= 8.9)


def _measure(
    cfg: DictConfig, combinations: Sequence[dict[str, str]], steps: int
) -> tuple[list[Row], list[str]]:
    run = Path(cfg.paths.run)
    given = json.loads((run / "run.json").read_text())["overrides"]
    overrides = [o for o in given if key_of(o).partition(".")[0] != "bench"]
    rows = []
    for number, combination in enumerate(track(combinations, "training", unit="job")):
        rows.append(_train(overrides, combination, steps, run / "rows" / str(number)))
    note = (
        f"{steps} optimizer steps each. ms: wall time per sample over all processes; loss: of the "
        "last micro-step; peak_mib: of rank 0, on a CPU of the whole process."
    )
    return with_ratios(rows), [note]


def _train(overrides: Sequence[str], combination: dict[str, str], steps: int, folder: Path) -> Row:
    values = {
        **combination,
        "trainer.max_steps": str(steps),
        "trainer.max_epochs": "-1",
        "trainer.val_check_interval": str(steps),
        "trainer.limit_val_batches": "0",
        "trainer.enable_progress_bar": "false",
        "hydra.run.dir": str(folder),
    }
    command = [sys.executable, "-m", "bev_lightning.train", *replace_values(overrides, values)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    name = " ".join(f"{key}={value}" for key, value in combination.items())
    try:
        score = json.loads((folder / "score.json").read_text())
    except (OSError, ValueError):
        score = {"status": "refused"}
    if score["status"] != "finished":
        last = (done.stderr.strip().splitlines() or [""])[-1]
        message = last.removeprefix("bev_lightning.train: ")
        return Row(name, more={"outcome": f"{score['status']}: {message}"})
    speed = score["samples_per_s"]
    return Row(
        name,
        ms=1e3 / speed if speed else None,
        samples_per_s=speed,
        peak_mib=score["peak_mib"],
        more={key: score[key] for key in _COLUMNS} | {"outcome": "finished"},
    )
