"""DeepSpeed through its own engine, on two CPU processes: what Lightning would hand to it."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bev_lightning.config.compose import load_config
from bev_lightning.config.resolve import resolve
from bev_lightning.config.validate import check_config
from bev_lightning.errors import InputError
from bev_lightning.hardware.machine import Machine

WORKER = Path(__file__).parent / "deepspeed_worker.py"


def train(out: Path, **job: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What two processes of DeepSpeed end with, and what one of torch does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    processes = []
    for rank in range(2):
        environment = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        environment |= {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [sys.executable, str(WORKER), json.dumps({**job, "out": str(out)})]
        with out.with_suffix(f".{rank}").open("w") as log:
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    try:
        codes = [process.wait(timeout=400) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0, 0], out.with_suffix(".0").read_text()[-2000:]
    return (
        torch.load(out, weights_only=True),
        torch.load(out.with_suffix(".one"), weights_only=True),
    )


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    for name, value in one["state_dict"].items():
        torch.testing.assert_close(value, other["state_dict"][name], rtol=1e-5, atol=1e-6)
    ours, theirs = one["optimizer"], other["optimizer"]
    assert [g["params"] for g in ours["param_groups"]] == [
        g["params"] for g in theirs["param_groups"]
    ]
    assert ours["state"].keys() == theirs["state"].keys()
    for number, moments in ours["state"].items():
        for key in ("step", "exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(
                moments[key], theirs["state"][number][key], rtol=1e-5, atol=1e-7
            )


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_stage_gives_what_one_process_gives(stage: int, tmp_path: Path) -> None:
    zero, one = train(tmp_path / "seen.pt", stage=stage, begin=0, end=8)
    assert one["optimizer"]["state"][0]["step"] == 4
    assert_same(zero, one)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "next_stage"), [(3, 2), (1, 3)])
def test_checkpoints_are_portable(stage: int, next_stage: int, tmp_path: Path) -> None:
    half = tmp_path / "half.pt"
    train(half, stage=stage, begin=0, end=4)
    zero, one = train(tmp_path / "end.pt", stage=next_stage, begin=4, end=8, resume=str(half))
    assert_same(zero, one)


def test_refusals() -> None:
    for overrides, sentence in (
        (["hardware=cpu"], "strategy=deepspeed runs on CUDA devices alone; use strategy=fsdp"),
        (["hardware=4x4090", "strategy.stage=4"], "use strategy.stage=1, 2 or 3"),
        (["hardware=4x4090", "strategy.offload_parameters=true"], "needs ZeRO stage 3"),
        (["hardware=4x4090", "callbacks=ema"], "strategy=deepspeed shards them"),
    ):
        with pytest.raises(InputError, match=sentence):
            check_config(load_config("train", ["strategy=deepspeed", *overrides]))


def test_the_class_gets_its_keys() -> None:
    overrides = ["hardware=4x4090", "strategy=deepspeed", "strategy.stage=3"]
    cfg = resolve(load_config("train", overrides), Machine())
    check_config(cfg)
    assert cfg.trainer.strategy == {
        "_target_": "bev_lightning.parallel.deepspeed.ZeroStrategy",
        "timeout": {"_target_": "datetime.timedelta", "seconds": cfg.cluster.rendezvous_s},
        "stage": 3,
        "offload_optimizer": False,
        "offload_parameters": False,
    }
