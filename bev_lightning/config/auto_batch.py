"""Finds the largest micro-step that fits, by trainings of two steps in their own processes."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from bev_lightning.errors import InputError
from bev_lightning.hardware.batch_plan import BatchPlan

# Overrides of a trial; after two steps gradients and the optimizer's state exist.
_TRIAL = {
    "auto_batch": "false",
    "trainer.accumulate_grad_batches": "1",
    "trainer.max_steps": "2",
    "trainer.max_epochs": "-1",
    "trainer.val_check_interval": "2",
    "trainer.limit_val_batches": "0",
    "trainer.enable_progress_bar": "false",
}


def find_batch(
    overrides: Sequence[str], plan: BatchPlan, limit_gib: float | None = None
) -> list[str]:
    """Overrides for the largest micro-step that fits, with the effective batch of the plan.

    Args:
        overrides: of the training.
        plan: its batch as configured.
        limit_gib: memory that a process may take; None for what the device has.

    Raises:
        InputError: not even single samples fit, or a trial fails for another reason.
    """
    for trial in plan.split():
        peak_mib = try_batch(overrides, trial)
        fits = peak_mib is not None and (limit_gib is None or peak_mib / 1024 <= limit_gib)
        measured = "out of memory" if peak_mib is None else f"{peak_mib / 1024:.2f} GiB"
        print(f"auto_batch: data.batch_size={trial.batch_size} takes {measured}", flush=True)
        if fits:
            print(f"auto_batch: {trial}", flush=True)
            values = {"data.batch_size": trial.batch_size}
            values["trainer.accumulate_grad_batches"] = trial.accumulation
            return replace_values(overrides, {"auto_batch": "false", **values})
    raise InputError(
        "auto_batch=true finds that not even data.batch_size=1 fits into the memory; set "
        "gradient_checkpointing=true on the model's backbone or encoder, then use precision=bf16"
    )


def try_batch(overrides: Sequence[str], plan: BatchPlan) -> float | None:
    """Peak memory of two steps in a fresh process [MiB]; None where it ran out."""
    with tempfile.TemporaryDirectory(prefix="auto_batch_") as folder:
        values = {**_TRIAL, "data.batch_size": plan.batch_size, "hydra.run.dir": folder}
        command = [sys.executable, "-m", "bev_lightning.train", *replace_values(overrides, values)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        try:
            score = json.loads((Path(folder) / "score.json").read_text())
        except (OSError, ValueError):
            score = {}
    if score.get("status") == "out_of_memory" or done.returncode == -9:  # killed by the kernel
        return None
    if done.returncode != 0 or "peak_mib" not in score:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise InputError(
            f"auto_batch=true tried data.batch_size={plan.batch_size} and the training failed: "
            f"{last.removeprefix('bev_lightning.train: ')}"
        )
    return float(score["peak_mib"])


def replace_values(overrides: Sequence[str], values: Mapping[str, object]) -> list[str]:
    """The overrides with new values for some keys."""
    kept = [one for one in overrides if one.partition("=")[0].lstrip("+") not in values]
    return [*kept, *(f"{key}={value}" for key, value in values.items())]
