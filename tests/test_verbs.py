"""The programs as a user starts them, on a synthetic data set of a few frames."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import torch
from helpers import TINY_DATA, run_directory, run_verb

TINY = [*TINY_DATA, "model.network.head.num_boxes=20"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("verbs")


@pytest.fixture(scope="module")
def training(folder: Path) -> subprocess.CompletedProcess:
    return run_verb(folder, "train", *TINY, "trainer.max_steps=2")


@pytest.fixture(scope="module")
def trained(folder: Path, training: subprocess.CompletedProcess) -> Path:
    return run_directory(folder, training)


# What a run may print: the plan, progress, scores, this package's own warnings and the results.
ALLOWED = [
    r"\d+ samples per optimizer step = .*; learning rate .*",
    r"(synthetic data|making|drawing|reading|writing|train|validate|predict|cutting)[\w ]*: .*",
    r"(\w+ [\d.-]+ +)+\w+ [\d.-]+",
    r"class +AP +ATE .*",
    r"[a-z_]+( +[\d.-]+)+",
    r"\d+ samples, [\d.]+ evaluable annotations a sample; .*",
    r"warning: [a-z].*",
    r"Results: .*",
]


def foreign_lines(process: subprocess.CompletedProcess) -> list[str]:
    lines = (process.stdout + process.stderr).replace("\r", "\n").splitlines()
    pattern = re.compile("|".join(f"(?:{one})" for one in ALLOWED))
    return [line for line in lines if line.strip() and not pattern.fullmatch(line.strip())]


def test_a_training_prints_expected_lines_only(training: subprocess.CompletedProcess) -> None:
    assert foreign_lines(training) == []


def test_train_leaves_the_documented_files(trained: Path):
    names = {path.name for path in trained.iterdir()}
    assert {"config.yaml", "resolved.yaml", "run.json", "score.json", "checkpoints"} <= names
    score = json.loads((trained / "score.json").read_text())
    assert score["steps"] == 2 and score["status"] == "finished" and score["frames"] == 2
    assert set(score["AP"]) >= {"car", "traffic_cone"}
    names = {path.name for path in (trained / "checkpoints").iterdir()}
    assert names == {"best.ckpt", "last.ckpt", "step_000002.ckpt"}
    assert list((trained / "pictures").glob("*.png"))
    assert list((trained / "tensorboard").glob("events*"))


def test_checkpoint_loads_without_executing_anything(trained: Path):
    content = torch.load(trained / "checkpoints" / "best.ckpt", weights_only=True)
    assert "model.network.head.num_boxes=20" in content["bev_lightning"]["overrides"]
    assert content["global_step"] == 2


def test_evaluate_recomposes_the_model_and_gives_the_same_score(folder: Path, trained: Path):
    checkpoint = f"ckpt={trained / 'checkpoints' / 'best.ckpt'}"
    again = run_directory(folder, run_verb(folder, "evaluate", checkpoint, "loader.num_workers=0"))
    scores = [json.loads((run / "score.json").read_text()) for run in (trained, again)]
    assert scores[0]["AP"] == scores[1]["AP"] and scores[0]["NDS"] == scores[1]["NDS"]
    assert scores[1]["steps"] == 2 and scores[1]["status"] == "finished"
    assert scores[1]["samples_per_s"] > 0 and scores[1]["wall_s"] > 0 and not scores[1]["left_out"]
    submission = again / "submission.json"
    content = json.loads(submission.read_text())
    assert content["meta"]["use_camera"] is True

    # A submission takes the tables alone, and may lack samples.
    gone, kept = content["results"]
    content["results"] = {kept: content["results"][kept]}
    partial = folder / "partial.json"
    partial.write_text(json.dumps(content))
    (sensors,) = folder.glob("**/samples")
    hidden = sensors.rename(sensors.with_name("hidden"))
    scored = run_directory(folder, run_verb(folder, "evaluate", f"results={partial}", *TINY))
    hidden.rename(sensors)
    score = json.loads((scored / "score.json").read_text())
    assert score["frames"] == 2 and score["left_out"] == 1 and score["steps"] is None

    # So does a checkpoint whose files are missing.
    table = json.loads((sensors.parent / "v1.0-mini" / "sample_data.json").read_text())
    names = [row["filename"] for row in table if row["sample_token"] == gone]
    lost = sensors.parent / next(name for name in names if "samples/CAM_FRONT/" in name)
    put_away = lost.rename(lost.with_suffix(".lost"))
    skip = [checkpoint, "loader.num_workers=0", "data.on_missing=skip"]
    skipped = run_directory(folder, run_verb(folder, "evaluate", *skip))
    put_away.rename(lost)
    found = json.loads((skipped / "score.json").read_text())
    assert found["frames"] == 2 and found["left_out"] == 1
    assert found["AP"] == pytest.approx(score["AP"], abs=1e-6)
    assert json.loads((skipped / "submission.json").read_text())["results"][gone] == []

    # Predictions of one split scored on another: one sentence that names both.
    wrong = run_verb(
        folder, "evaluate", f"results={submission}", *TINY, "data.val_split=mini_train"
    )
    assert wrong.returncode == 2 and "Traceback" not in wrong.stderr
    assert "mini_val" in wrong.stderr and "mini_train" in wrong.stderr


def test_predict_writes_a_submission(folder: Path, trained: Path):
    checkpoint = f"ckpt={trained / 'checkpoints' / 'last.ckpt'}"
    run = run_directory(folder, run_verb(folder, "predict", checkpoint, "loader.num_workers=0"))
    every = list(json.loads((run / "submission.json").read_text())["results"])
    assert len(every) == 2
    limits = ["loader.num_workers=0", "trainer.limit_val_batches=1", "data.val_batch_size=1"]
    run = run_directory(folder, run_verb(folder, "predict", checkpoint, *limits))
    assert list(json.loads((run / "submission.json").read_text())["results"]) == every[:1]


def test_two_processes_end_with_the_same_weights(folder: Path, trained: Path):
    process = run_verb(
        folder,
        "train",
        *TINY,
        "hardware.devices=2",
        "strategy=ddp",
        "trainer.max_steps=2",
    )
    assert "weights of all 2 processes are equal" in process.stdout + process.stderr
    score = json.loads((run_directory(folder, process) / "score.json").read_text())
    assert score["steps"] == 2 and score["frames"] == 2


def test_sweep_writes_one_folder_and_config_per_job(folder: Path, trained: Path):
    axes = ["precision=32,bf16", "accumulation=1,2"]
    process = run_verb(folder, "train", "-m", *TINY, *axes, "trainer.max_steps=1", "logger=none")
    run = run_directory(folder, process)
    jobs = sorted(path for path in run.iterdir() if path.is_dir())
    assert [job.name for job in jobs] == ["0", "1", "2", "3"]
    for job in jobs:
        assert (job / "config.yaml").exists() and (job / "score.json").exists()


def test_refuses_a_checkpoint_of_another_model(folder: Path, trained: Path):
    checkpoint = f"ckpt={trained / 'checkpoints' / 'last.ckpt'}"
    process = run_verb(folder, "evaluate", checkpoint, "model.network.head.channels=32")
    assert process.returncode == 2 and "Traceback" not in process.stderr
    assert "holds the weights of another model" in process.stderr
