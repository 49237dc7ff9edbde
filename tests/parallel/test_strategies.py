"""A training under each strategy from the command line, and its checkpoint in one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TINY = [
    "data=synthetic_mini",
    "data.synthetic.num_train_scenes=1",
    "data.synthetic.num_val_scenes=1",
    "data.synthetic.frames_per_scene=3",
    "data.synthetic.num_azimuths=90",
    "loader=torch",
    "loader.num_workers=0",
    "hardware=cpu",
]


def run(verb: str, words: list[str], folder: Path) -> Path:
    """The run directory of a verb."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", f"bev_lightning.{verb}", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-3000:]
    (place,) = [line for line in done.stdout.splitlines() if line.startswith("Results: ")]
    return folder / place.removeprefix("Results: ")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "pipeline"])
def test_one_process_evaluates_what_several_trained(strategy: str, tmp_path: Path) -> None:
    words = ["model=bevfusion_lidar_toy", "model.network.head.num_boxes=20", *TINY]
    words += [f"strategy={strategy}", "hardware.devices=2", "data.batch_size=2", "accumulation=2"]
    words += ["trainer.max_steps=3", "logger=none", "trainer.enable_progress_bar=false"]
    place = run("train", words, tmp_path)
    score = json.loads((place / "score.json").read_text())
    assert score["status"] == "finished" and score["steps"] == 3
    ckpt = place / "checkpoints" / "last.ckpt"
    alone = run("evaluate", [f"ckpt={ckpt}", *TINY], tmp_path)
    again = json.loads((alone / "score.json").read_text())
    assert again["NDS"] == pytest.approx(score["NDS"], abs=1e-9)
