"""Which run and which checkpoint ``resume=auto`` takes."""

import json
from pathlib import Path

import pytest
import torch

from bev_lightning.config.compose import compose_job
from bev_lightning.config.resume import find_checkpoint, find_resume, find_runs


def write(run: Path, steps: list[int], started: str = "2026-01-01", overrides: tuple = ()) -> Path:
    (run / "checkpoints").mkdir(parents=True)
    (run / "run.json").write_text(json.dumps({"started": started, "overrides": list(overrides)}))
    for step in steps:
        content = {"weights": torch.full((4096,), float(step)), "bev_lightning": {"overrides": []}}
        torch.save(content, run / "checkpoints" / f"step_{step:06d}.ckpt")
    return run


def test_the_newest_whole_file_is_taken(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", [2, 10, 100, 101]) / "checkpoints"
    (folder / "step_x.ckpt").write_text("of somebody else")
    assert find_checkpoint(folder, []) == folder / "step_000101.ckpt"
    torn, zeroed = folder / "step_000101.ckpt", folder / "step_000100.ckpt"
    torn.write_bytes(torn.read_bytes()[:5000])
    content = bytearray(zeroed.read_bytes())
    content[4096:8192] = bytes(4096)  # a page that never reached the disk
    zeroed.write_bytes(content)
    assert len(torch.load(zeroed, weights_only=True)["weights"]) == 4096  # torch sees nothing
    damaged: list[Path] = []
    assert find_checkpoint(folder, damaged) == folder / "step_000010.ckpt"
    assert damaged == [torn, zeroed]
    assert find_checkpoint(tmp_path, []) is None


def test_the_newest_run_with_the_same_overrides_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runs = tmp_path / "outputs" / "train"
    overrides = ["seed=3", "hardware=cpu"]
    write(runs / "a", [4], "2026-01-01T10", tuple(overrides))
    write(runs / "b", [6], "2026-01-01T11", (*reversed(overrides), "resume=a.ckpt"))
    write(runs / "c", [], "2026-01-01T12", tuple(overrides))
    write(runs / "d", [8], "2026-01-01T13", ("seed=4", "hardware=cpu"))
    (runs / "e").mkdir()
    (runs / "e" / "run.json").write_text("{")
    assert [run.name for run in find_runs(runs, overrides)] == ["c", "b", "a"]

    job, found = find_resume("train", compose_job("train", [*overrides, "resume=auto"]))
    path = "outputs/train/b/checkpoints/step_000006.ckpt"
    assert found == f"resume=auto: continuing from {path} (optimizer step 6)"
    assert job.cfg.resume == path and job.cfg.hydra.run.dir == "outputs/train/b"
    assert job.cfg.seed == 3

    torn = runs / "b" / "checkpoints" / "step_000006.ckpt"
    torn.write_bytes(torn.read_bytes()[:3000])
    job, found = find_resume("train", compose_job("train", [*overrides, "resume=auto"]))
    assert job.cfg.hydra.run.dir == "outputs/train/a"
    assert found.endswith(f"step 4); skipped as damaged: {path}")

    job, found = find_resume("train", compose_job("train", ["seed=5", "resume=auto"]))
    assert job.cfg.resume is None and job.overrides == ["seed=5"]
    assert found.endswith(
        "no run with these overrides has a checkpoint yet, starting a new training"
    )


def test_a_given_directory_is_the_only_one(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "outputs" / "train" / "a", [4], overrides=("seed=3",))
    overrides = ["seed=3", "resume=auto", "hydra.run.dir=mine", "init_from=weights.ckpt"]
    job, found = find_resume("train", compose_job("train", overrides))
    assert job.cfg.init_from == "weights.ckpt"
    assert job.cfg.resume is None and found.startswith("resume=auto: mine has no checkpoint yet")
    write(tmp_path / "mine", [2, 4])
    job, _ = find_resume("train", compose_job("train", overrides))
    assert job.cfg.resume == "mine/checkpoints/step_000004.ckpt"
    assert job.cfg.hydra.run.dir == "mine" and job.cfg.init_from is None
