"""The program of a verb: its files, its output, its exit code.

Most run in this process; only what depends on processes (sweeps, children) starts some.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from bev_lightning.config.compose import config_dir
from bev_lightning.config.program import entry
from bev_lightning.errors import InputError

ROOT = config_dir().parent
# A verb that takes no time: what it was given goes to score.json.
VERB = """
import json
import os
from pathlib import Path

from bev_lightning.config.program import entry
from bev_lightning.errors import InputError


@entry("train")
def main(cfg):
    if cfg.seed == 13:
        raise InputError("seed=13 is unlucky; use another seed")
    score = {"NDS": cfg.optim.lr, "precision": cfg.trainer.precision}
    (Path(cfg.paths.run) / "score.json").write_text(json.dumps(score))


if __name__ == "__main__":
    main()
"""
# Two ranks that meet once.
DISTRIBUTED = """
import json
from pathlib import Path

from bev_lightning.config.program import entry


@entry("train")
def main(cfg):
    import torch
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel

    trainer = Trainer(
        accelerator=cfg.trainer.accelerator,
        devices=cfg.trainer.devices,
        strategy="ddp",
        max_steps=1,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(BoringModel())
    ranks = trainer.strategy.reduce(torch.tensor(float(trainer.global_rank)), reduce_op="sum")
    if trainer.is_global_zero:
        score = {"NDS": float(ranks), "world": trainer.world_size}
        (Path(cfg.paths.run) / "score.json").write_text(json.dumps(score))


if __name__ == "__main__":
    main()
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "verb.py").write_text(VERB)
    return tmp_path


def call(monkeypatch: pytest.MonkeyPatch, main: Any, *overrides: str) -> int:
    monkeypatch.setattr(sys, "argv", ["train", *overrides])
    try:
        entry("train")(main)()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def start(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), str(folder)])
    return subprocess.run(
        [sys.executable, "-m", "verb", *overrides],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_run_leaves_its_configuration(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[DictConfig] = []
    code = call(monkeypatch, seen.append, "hardware=cpu", "precision=32", "seed=5")
    assert code == 0
    (run_dir,) = (here / "outputs" / "train").iterdir()
    assert capsys.readouterr().out.splitlines()[-1] == f"Results: {run_dir.relative_to(here)}"
    assert sorted(path.name for path in run_dir.iterdir()) == [
        "config.yaml",
        "resolved.yaml",
        "run.json",
    ]
    assert seen[0].paths.run == str(run_dir)
    assert OmegaConf.load(run_dir / "resolved.yaml") == seen[0]
    assert OmegaConf.load(run_dir / "config.yaml").loader.num_workers == "auto"
    run = json.loads((run_dir / "run.json").read_text())
    assert run["overrides"] == ["hardware=cpu", "precision='32'", "seed=5"]
    assert run["machine"]["num_cpus"] >= 1
    assert run["versions"]["torch"]


@pytest.mark.parametrize("key", ["paths.run", "hydra.run.dir"])
def test_the_run_directory_can_be_set(
    here: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    seen: list[DictConfig] = []
    assert call(monkeypatch, seen.append, "hardware=cpu", f"{key}=some/where") == 0
    assert seen[0].paths.run == str(here / "some" / "where")
    assert OmegaConf.load(here / "some" / "where" / "resolved.yaml") == seen[0]
    assert not (here / "outputs").exists()


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["precison=16"], "did you mean precision?"),
        (["hardware=cpu", "precision=fp8"], "precision=fp8 needs compute capability 8.9"),
        (["data=nuscenes", "data.root=/nowhere"], "data.root=/nowhere does not exist"),
        (["-m", "hardware=cpu", "precision=32,fp8"], "precision=fp8 needs compute capability 8.9"),
        (["-m", "seed=1,2", "data=nowhere"], "data=nowhere does not exist; data is one of"),
        (
            ["hardware=cpu", "hydra.run.dir=verb.py/x"],
            "hydra.run.dir=verb.py/x cannot be created: ",
        ),
        (
            ["-m", "hardware=cpu", "seed=1,2", "paths.run=mine"],
            "this is a sweep; set hydra.sweep.dir",
        ),
        (
            ["-m", "hardware=cpu", "hydra.sweep.dir=verb.py/x"],
            "verb.py is no folder that this user may write to",
        ),
    ],
)
def test_refusals_come_before_anything_is_made(
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    overrides: list[str],
    sentence: str,
) -> None:
    code = call(monkeypatch, lambda cfg: pytest.fail("it ran"), *overrides)
    printed = capsys.readouterr().err
    assert code == 2
    assert sentence in printed
    assert printed.startswith("bev_lightning.train: ")
    assert printed.count("\n") == 1
    assert [path.name for path in here.iterdir()] == ["verb.py"]


def test_an_input_error_in_the_run_is_one_sentence(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def main(cfg: DictConfig) -> None:
        raise InputError("frame.jpg is cut short; copy it again")

    assert call(monkeypatch, main, "hardware=cpu") == 2
    captured = capsys.readouterr()
    assert captured.err == "bev_lightning.train: frame.jpg is cut short; copy it again\n"
    assert "Results" not in captured.out
    assert len(list((here / "outputs" / "train").iterdir())) == 1


def test_a_child_of_a_distributed_run_writes_and_prints_nothing(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    run_dir = here / "run of rank 0"
    seen: list[DictConfig] = []
    overrides = ["hardware=cpu", f'hydra.run.dir="{run_dir}"', "hydra.job.name=train_ddp_process_1"]
    assert call(monkeypatch, seen.append, *overrides, "hydra.output_subdir=null") == 0
    assert seen[0].paths.run == str(run_dir)
    assert list(run_dir.iterdir()) == []
    assert capsys.readouterr().out == ""


def test_a_sweep_is_a_process_for_each_job(here: Path) -> None:
    done = start(here, "-m", "hardware=cpu", "precision=32,bf16", "optim.lr=0.25", "seed=1,13")
    (sweep_dir,) = (here / "outputs" / "train").iterdir()
    assert done.returncode == 2
    assert "2 of 4 jobs failed: 1, 3 in " in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    jobs = json.loads((sweep_dir / "sweep.json").read_text())["jobs"]
    assert [job["exit_code"] for job in jobs] == [0, 2, 0, 2]
    assert [job["NDS"] for job in jobs] == [0.25, None, 0.25, None]
    assert sorted(path.name for path in sweep_dir.iterdir() if path.is_dir()) == list("0123")
    made = [OmegaConf.load(sweep_dir / job / "config.yaml") for job in "0123"]
    assert [cfg.trainer.precision for cfg in made] == ["32-true"] * 2 + ["bf16-mixed"] * 2


def test_showing_the_configuration_imports_no_torch(here: Path) -> None:
    script = (
        "import sys, runpy\n"
        "sys.argv = ['verb', 'hardware=4x3090', 'precision=16', '--cfg', 'job']\n"
        "runpy.run_module('verb', run_name='__main__')\n"
        "print('torch imported:', 'torch' in sys.modules)\n"
    )
    path = os.pathsep.join([str(ROOT), str(here)])
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=here,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "  precision: 16-mixed\n" in done.stdout
    assert "  devices: 4 " in done.stdout or "  devices: 4\n" in done.stdout
    assert done.stdout.endswith("torch imported: False\n")
    assert [path.name for path in here.iterdir() if path.name != "__pycache__"] == ["verb.py"]


def test_help_teaches(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, lambda cfg: pytest.fail("it ran"), "--help") == 0
    printed = capsys.readouterr().out
    assert "hardware: 1x3090, 1x4090, 1xh200, 4n1x4090, 4x3090, 4x4090, auto, cpu" in printed
    assert printed.count("bev_lightning.train ") >= 6


def test_a_sweep_of_distributed_jobs_finishes_in_its_own_folders(here: Path) -> None:
    (here / "verb.py").write_text(DISTRIBUTED)
    axes = ["hardware=cpu", "hardware.devices=2", "strategy=ddp"]
    done = start(here, "-m", "optim.lr=1e-4,2e-4", *axes)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (here / "outputs").iterdir()] == ["train"]
    (sweep_dir,) = (here / "outputs" / "train").iterdir()
    assert sorted(path.name for path in sweep_dir.iterdir() if path.is_dir()) == ["0", "1"]
    for job, lr in (("0", 1e-4), ("1", 2e-4)):
        assert OmegaConf.load(sweep_dir / job / "config.yaml").optim.lr == lr
        assert json.loads((sweep_dir / job / "score.json").read_text()) == {"NDS": 1.0, "world": 2}
    assert done.stdout.count("Results: ") == 3
    assert done.stdout.splitlines()[-1] == f"Results: {sweep_dir.relative_to(here)}"
