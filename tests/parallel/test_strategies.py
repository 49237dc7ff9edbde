"""A training under each strategy from the command line, and its checkpoint in one process."""

import json
from pathlib import Path

import pytest
from helpers import TINY_DATA, run_directory, run_verb

TINY = [*TINY_DATA, "data.synthetic.frames_per_scene=3"]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "pipeline"])
def test_one_process_evaluates_what_several_trained(strategy: str, tmp_path: Path) -> None:
    overrides = ["model=bevfusion_lidar_toy", "model.network.head.num_boxes=20", *TINY]
    overrides += [
        f"strategy={strategy}",
        "hardware.devices=2",
        "data.batch_size=2",
        "accumulation=2",
    ]
    overrides += ["trainer.max_steps=3", "logger=none", "trainer.enable_progress_bar=false"]
    trained = run_directory(tmp_path, run_verb(tmp_path, "train", *overrides))
    score = json.loads((trained / "score.json").read_text())
    assert score["status"] == "finished" and score["steps"] == 3
    ckpt = trained / "checkpoints" / "last.ckpt"
    alone = run_directory(tmp_path, run_verb(tmp_path, "evaluate", *[f"ckpt={ckpt}", *TINY]))
    again = json.loads((alone / "score.json").read_text())
    assert again["NDS"] == pytest.approx(score["NDS"], abs=1e-9)
