"""The parts of a training recipe together, as a user switches them on: pasting, balanced sampling,
averaged weights, multipliers; then evaluation with and without test-time augmentation."""

import json
from pathlib import Path

import pytest
import torch
from helpers import TINY_DATA, run_directory, run_verb

TINY = [*TINY_DATA, "model=bevfusion_lidar_toy", "logger=none"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recipe")


def test_recipe_trains_and_its_checkpoint_scores_as_logged(folder: Path) -> None:
    process = run_verb(
        folder,
        "train",
        *TINY,
        "data/gt_sampling=published",
        "data.gt_sampling.min_points=100000",
        "data.cbgs=true",
        "callbacks=ema",
        "optim.multipliers={network.lidar.*:0}",
        "trainer.max_steps=3",
        "trainer.val_check_interval=3",
        "trainer.sync_batchnorm=true",
    )
    trained = run_directory(folder, process)
    # Every part without effect warns, once.
    printed = process.stdout + process.stderr
    for sentence in (
        "the ground-truth database has no car, truck",
        "trainer.sync_batchnorm is off",
    ):
        assert printed.count(sentence) == 1, sentence
    assert len(list((folder / "cache").glob("*-ground-truth-mini_train-3sweeps.arrow"))) == 1
    best = trained / "checkpoints" / "best.ckpt"
    content = torch.load(best, weights_only=True)
    weights, as_trained = content["state_dict"], content["ema_trained_weights"]
    frozen = [name for name in weights if name.startswith("network.lidar.")]
    assert all(torch.equal(weights[name], as_trained[name]) for name in frozen)
    assert any(not torch.equal(weights[name], as_trained[name]) for name in weights)

    overrides = f"ckpt={best}", "loader.num_workers=0", "hardware=cpu", "logger=none"
    again = run_directory(folder, run_verb(folder, "evaluate", *overrides))
    scores = [json.loads((run / "score.json").read_text()) for run in (trained, again)]
    assert scores[0]["NDS"] == scores[1]["NDS"] and scores[0]["AP"] == scores[1]["AP"]

    augmented = run_directory(folder, run_verb(folder, "predict", *overrides, "tta=flip"))
    plain = json.loads((again / "submission.json").read_text())["results"]
    merged = json.loads((augmented / "submission.json").read_text())["results"]
    assert merged.keys() == plain.keys() and merged != plain


def test_an_epoch_of_empty_frames_trains_and_warns_once(folder: Path) -> None:
    process = run_verb(
        folder, "train", *TINY, "data.min_points=100000", "data.cbgs=true", "trainer.max_steps=2"
    )
    trained = run_directory(folder, process)
    assert (process.stdout + process.stderr).count("training samples has a box to train on") == 1
    assert json.loads((trained / "score.json").read_text())["status"] == "finished"


def test_pasting_into_points_only_is_refused_for_a_fusion(folder: Path) -> None:
    process = run_verb(folder, "train", *TINY, "model=bevfusion_toy", "data/gt_sampling=published")
    assert process.returncode == 2 and "Traceback" not in process.stderr
    assert "this model reads camera too" in process.stderr
