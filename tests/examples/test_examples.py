"""Each example trains and evaluates from a folder outside of the checkout."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
NAMES = sorted(path.stem for path in (EXAMPLES / "conf" / "experiment").glob("*.yaml"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("elsewhere") / "mine"
    shutil.copytree(EXAMPLES, target, ignore=shutil.ignore_patterns("__pycache__"))
    return target


def run_verb(verb: str, folder: Path, *overrides: str) -> str:
    command = [sys.executable, "-m", f"bev_lightning.{verb}", "--config-dir", "conf", *overrides]
    path = os.pathsep.join([str(folder), str(ROOT)])
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_example_trains_and_evaluates(name: str, folder: Path) -> None:
    data = [
        "data=synthetic_mini",
        "data.synthetic.num_train_scenes=2",
        "data.synthetic.num_val_scenes=1",
        "data.synthetic.image_size=[45,80]",
        "data.num_workers=1",
    ]
    machine = ["hardware=cpu", "loader.num_workers=0", "trainer.enable_progress_bar=false"]
    steps = ["trainer.max_steps=20", "trainer.val_check_interval=20", "data.batch_size=1"]
    run = folder / "outputs" / name
    words = [f"experiment={name}", *data, *machine]
    printed = run_verb("train", folder, *words, *steps, f"paths.run={run}")
    score = json.loads((run / "score.json").read_text())
    assert score["status"] == "finished" and score["steps"] == 20
    if name == "own_callback":
        assert len((run / "losses.txt").read_text().splitlines()) == 20
    if name == "own_logger":
        assert "logged step 9: train/loss" in printed
    if name == "own_metric":
        assert "boxes score above 0.1" in printed
    if name == "own_data":
        assert score["frames"] == 2  # of four
    if name == "own_loader":
        assert "batches read" in printed

    again = folder / "outputs" / f"{name}_again"
    ckpt = run / "checkpoints" / "last.ckpt"
    run_verb("evaluate", folder, f"ckpt={ckpt}", *machine, f"paths.run={again}")
    assert json.loads((again / "score.json").read_text())["NDS"] == pytest.approx(score["NDS"])
