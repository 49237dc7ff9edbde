"""From overrides to configurations, and Hydra's refusals to sentences."""

import re
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from bev_lightning.config.compose import (
    compose_jobs,
    config_dir,
    keep_stored,
    load_config,
    quote_choices,
    read_overrides,
)
from bev_lightning.config.validate import check_machine
from bev_lightning.errors import InputError
from bev_lightning.hardware.machine import Machine


@pytest.mark.parametrize(
    ("typed", "quoted"),
    [
        ("precision=16", "precision='16'"),
        ("precision='16'", "precision='16'"),
        ("precision=bf16", "precision=bf16"),
        ("precision=32,16,bf16", "precision='32','16',bf16"),
        ("+precision=16", "+precision='16'"),
        ("++accumulation=8", "++accumulation='8'"),
        ("accumulation=1,2", "accumulation='1','2'"),
        ("accumulation=choice(1,2)", "accumulation=choice('1','2')"),
        ("precision@other=16", "precision@other='16'"),
        ("hardware=4x3090", "hardware=4x3090"),
        ("trainer.accumulate_grad_batches=3", "trainer.accumulate_grad_batches=3"),
        ("--multirun", "--multirun"),
    ],
)
def test_numbers_are_quoted_where_they_name_a_choice(typed: str, quoted: str) -> None:
    assert quote_choices([typed]) == [quoted]
    assert quote_choices([quoted]) == [quoted]


def test_the_field_command_composes_as_typed() -> None:
    cfg = load_config(
        "train", ["hardware=4x3090", "precision=16", "accumulation=2", "strategy=ddp"]
    )
    assert cfg.trainer.devices == 4
    assert cfg.trainer.accelerator == "gpu"
    assert cfg.trainer.precision == "16-mixed"
    assert cfg.trainer.accumulate_grad_batches == 2
    assert cfg.trainer.strategy == "ddp"
    assert "hydra" not in cfg


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["precison=16"], "precison=16 names no key of train; did you mean precision?"),
        (["max_steps=3"], "max_steps=3 names no key of train; did you mean trainer.max_steps?"),
        (["optim.lrr=1"], "optim.lrr=1 names no key of train; did you mean optim.lr?"),
        (["nonsense.xyzzy=1"], "nonsense.xyzzy=1 names no key of train; --cfg job lists the keys"),
        (
            ["precision=8"],
            "precision=8 does not exist; precision is one of 16, 32, auto, bf16, fp8",
        ),
        (["accumulation=3"], "2, 4, 8; any other number is trainer.accumulate_grad_batches=N"),
        (["ckpt=a=b"], "ckpt=a=b cannot be read as KEY=VALUE"),
        (["precision=32,bf16"], "gives several values; put -m in front of it"),
    ],
)
def test_refusals_are_one_sentence(overrides: list[str], sentence: str) -> None:
    with pytest.raises(InputError, match=re.escape(sentence)) as refusal:
        compose_jobs("train", overrides, multirun=False)
    assert "\n" not in str(refusal.value)


def test_a_sweep_is_every_combination() -> None:
    is_sweep, jobs = compose_jobs("train", ["precision=32,bf16", "accumulation=1,2"], multirun=True)
    assert is_sweep
    made = [(job.cfg.trainer.precision, job.cfg.trainer.accumulate_grad_batches) for job in jobs]
    assert made == [("32-true", 1), ("32-true", 2), ("bf16-mixed", 1), ("bf16-mixed", 2)]


def test_a_sweep_group_needs_no_flag_and_the_job_runs_once() -> None:
    is_sweep, jobs = compose_jobs("train", ["sweep=axes"], multirun=False)
    assert is_sweep
    assert len(jobs) == 4
    is_sweep, jobs = compose_jobs("train", [*jobs[3].overrides, "hydra.mode=RUN"], multirun=False)
    assert not is_sweep
    assert jobs[0].cfg.trainer.precision == "bf16-mixed"


def test_evaluation_recomposes_what_was_trained(tmp_path: Path) -> None:
    stored = [
        "model=bevfusion_toy",
        "data.root=here",
        "data.batch_size=3",
        "data.val_split=train",
        "hardware=cpu",
        "trainer.max_steps=4",
        "optim.lr=0.5",
    ]
    checkpoint = tmp_path / "best.ckpt"
    torch.save(
        {
            "state_dict": {"weight": torch.ones(2, 2), "half": torch.ones(3).bfloat16()},
            "optimizer_states": [
                torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))]).state_dict()
            ],
            "bev_lightning": {"overrides": stored},
        },
        checkpoint,
    )
    assert read_overrides(checkpoint) == stored
    cfg = load_config("evaluate", [f"ckpt={checkpoint}", "data.root=there"])
    assert (cfg.data.root, cfg.data.batch_size, cfg.data.val_split) == ("there", 3, "train")
    assert cfg.hardware.card == "auto"
    assert cfg.trainer.max_steps == load_config("train").trainer.max_steps


def write(folder: Path, *overrides: str) -> str:
    checkpoint = folder / "last.ckpt"
    torch.save({"state_dict": {}, "bev_lightning": {"overrides": list(overrides)}}, checkpoint)
    return str(checkpoint)


def test_evaluation_leaves_the_machine_of_the_training(tmp_path: Path) -> None:
    ckpt = "ckpt=" + write(tmp_path, "experiment=bevfusion_lidar_4x24gib", "data.root=here")
    cfg = load_config("evaluate", [ckpt])
    assert cfg.model.network.lidar and cfg.data.root == "here"
    assert (cfg.hardware.card, cfg.hardware.devices, cfg.hardware.nodes) == ("auto", "auto", 1)
    assert (cfg.trainer.precision, cfg.trainer.accumulate_grad_batches) == ("auto", 1)
    check_machine(OmegaConf.merge(cfg, {"data": {"synthetic": {}}}), Machine(num_cpus=1))
    cfg = load_config("evaluate", [ckpt, "hardware=4x4090", "precision=32"])
    assert (cfg.hardware.devices, cfg.trainer.precision) == (4, "32-true")
    assert (
        load_config("evaluate", [ckpt, "hardware=cpu", "hardware.devices=2"]).hardware.devices == 2
    )


def test_a_resumed_training_keeps_its_overrides(tmp_path: Path) -> None:
    stored = [
        "optim.lr=0.5",
        "accumulation='2'",
        "trainer.max_steps=4",
        "paths.output=there",
        "init_from=a.ckpt",
        "experiment=bevfusion_lidar_4x24gib",
    ]
    resume = "resume=" + write(tmp_path, *stored)
    cfg = load_config("train", [resume])
    assert (cfg.optim.lr, cfg.trainer.accumulate_grad_batches, cfg.trainer.max_steps) == (0.5, 2, 4)
    assert cfg.hardware.devices == 4 and cfg.trainer.precision == "bf16-mixed"
    assert cfg.init_from is None and cfg.paths.output == "outputs"
    cfg = load_config("train", [resume, "trainer.max_steps=8", "precision=32"])
    assert (cfg.trainer.max_steps, cfg.trainer.precision, cfg.optim.lr) == (8, "32-true", 0.5)


def test_an_axis_on_the_command_line_beats_the_stored_key_that_it_writes(tmp_path: Path) -> None:
    resume = "resume=" + write(tmp_path, "trainer.accumulate_grad_batches=3")
    assert load_config("train", [resume, "accumulation=2"]).trainer.accumulate_grad_batches == 2


def test_files_of_other_origin_bring_no_overrides(tmp_path: Path) -> None:
    torch.save({"state_dict": {}}, tmp_path / "other.pth")
    (tmp_path / "text.ckpt").write_text("no archive")
    assert read_overrides(tmp_path / "other.pth") == []
    assert read_overrides(tmp_path / "text.ckpt") == []


def test_a_group_on_the_command_line_drops_the_stored_keys_below_it() -> None:
    stored = ["data=synthetic", "data.root=x", "seed=3"]
    assert keep_stored(stored, ["data=nuscenes"]) == ["seed=3"]


def test_every_experiment_and_debug_choice_composes() -> None:
    for group in ("experiment", "debug", "sweep", "data", "optim", "logger", "callbacks", "loader"):
        for path in sorted((config_dir() / group).glob("*.yaml")):
            load_config("train", [f"{group}={path.stem}"])


def test_the_command_line_beats_the_groups() -> None:
    assert load_config("train", ["debug=fast"]).trainer.max_steps == 4
    assert load_config("train", ["debug=fast", "trainer.max_steps=9"]).trainer.max_steps == 9
