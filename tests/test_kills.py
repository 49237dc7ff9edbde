"""Trainings that are killed again and again end where an undisturbed one ends, to the last bit.

A driver loads the libraries once and forks each start of a training from there, as torchrun would
start it: the processes of a run find each other and their run directory through a store.
"""

import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import TINY_LIDAR_MODEL

OVERRIDES = [
    *TINY_LIDAR_MODEL,
    "~callbacks.pictures",
    "data=synthetic_mini",
    "data.synthetic.image_size=[36,64]",
    "data.synthetic.objects_per_scene=16",
    "data.synthetic.num_train_scenes=1",
    "data.synthetic.num_val_scenes=1",
    "data.synthetic.frames_per_scene=3",
    "data.synthetic.num_azimuths=90",
    (
        "data.augment={_target_: bev_lightning.data.transforms.augment.Augment, "
        "bev_rotate_deg: [-45, 45]}"
    ),
    "data.batch_size=1",
    "data.num_workers=1",
    "loader=torch",
    "loader.num_workers=0",
    "hardware=cpu",
    "callbacks=ema",
    "callbacks.steps.every_n_train_steps=2",
    "accumulation=2",
    "trainer.val_check_interval=4",
    "trainer.log_every_n_steps=1",
    "trainer.enable_progress_bar=false",
    "resume=auto",
]
TIMED = ("speed/", "epoch", "gpu/")  # of no two runs the same


def keep_store() -> tuple[int, int]:
    """What torchrun's agent keeps as long as it lives, in a process of its own: that, and the
    port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    keeper = os.fork()
    if not keeper:
        from torch.distributed import TCPStore

        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        signal.pause()
        del store
    return keeper, port


def start(overrides: list[str], folder: Path, world_size: int, port: int) -> list[int]:
    """Fork the processes of one start; their ids."""
    children = []
    for rank in range(world_size):
        child = os.fork()
        if child:
            children.append(child)
            continue
        os.chdir(folder)
        with (folder / f"log_{rank}.txt").open("a") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        if world_size > 1:
            os.environ |= {
                "TORCHELASTIC_RUN_ID": "test",
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(world_size),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "GROUP_RANK": "0",
            }
        sys.argv[1:] = overrides
        code = 1
        try:
            from bev_lightning.train import main

            main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        finally:
            sys.stdout.flush()
            os._exit(code)
    return children


def drive(folder: Path, overrides: list[str], world_size: int, num_kills: int, port: int) -> dict:
    """Train in ``folder`` to the end; until then kill one process after the other: at a moment
    drawn from the time between two checkpoints, and each fourth while a checkpoint is written."""
    import lightning.pytorch.loggers

    import bev_lightning.runtime.build
    import bev_lightning.train

    loaded = (bev_lightning.runtime.build, bev_lightning.train, lightning.pytorch.loggers)
    assert all(loaded)
    draw = random.Random(7)
    kills: list[str] = []  # the newest checkpoint at each
    checkpoints = folder / "run" / "checkpoints"
    pace_s = 1.0
    for starts in range(1, 3 * num_kills + 3):
        trainers = start(overrides, folder, world_size, port)
        before, seen_at, deadline = newest(checkpoints), 0.0, math.inf
        ended: dict[int, int] = {}
        while len(ended) < world_size:
            for child in trainers:
                if child not in ended and (found := os.waitpid(child, os.WNOHANG))[0]:
                    ended[child] = os.waitstatus_to_exitcode(found[1])
            now, name = time.monotonic(), newest(checkpoints)
            if name != before:
                if seen_at:
                    pace_s = now - seen_at
                before, seen_at = name, now
                deadline = min(deadline, now + draw.uniform(0.0, pace_s))
            if len(kills) % 4 == 1:
                deadline = 0.0 if list(checkpoints.glob(".step_*.partial")) else math.inf
            if len(kills) < num_kills and now > deadline and not ended:
                os.kill(draw.choice(trainers), signal.SIGKILL)
                kills.append(name)
                deadline = math.inf
                time.sleep(0.05)
                for child in trainers:  # the supervisor's part: none waits for the dead
                    os.kill(child, signal.SIGKILL)
                    ended[child] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            time.sleep(0.002)
        if not any(ended.values()):
            return {"kills": kills, "starts": starts}
        if any(code not in (0, -signal.SIGKILL) for code in ended.values()):
            raise RuntimeError(f"a training failed with {ended}; see {folder}/log_0.txt")
    raise RuntimeError(f"no end after kills at {kills}")


def newest(folder: Path) -> str:
    return max((path.name for path in folder.glob("step_*.ckpt")), default="")


def train(folder: Path, overrides: list[str], world_size: int = 1, num_kills: int = 0) -> dict:
    folder.mkdir(parents=True)
    overrides = [*overrides, f"hydra.run.dir={folder}/run"]
    request = json.dumps([str(folder), overrides, world_size, num_kills])
    done = subprocess.run(
        [sys.executable, __file__, request], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def read_log(run: Path) -> dict[str, dict[int, float]]:
    """All rows of all of a run's TensorBoard files; a row that was written twice must not
    differ."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    rows: dict[str, dict[int, float]] = {}
    for path in sorted((run / "tensorboard").glob("events.*")):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                if (
                    value.tag.startswith(TIMED)
                    or value.metadata.plugin_data.plugin_name == "images"
                ):
                    continue
                number = float(value.tensor.float_val[0]) if value.tensor.float_val else None
                known = rows.setdefault(value.tag, {})
                assert known.setdefault(event.step, number) == number, (value.tag, event.step)
    return rows


def assert_same(one: object, other: object, path: str = "") -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            assert_same(one[key], other[key], f"{path}/{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), path
        for index, pair in enumerate(zip(one, other, strict=True)):
            assert_same(*pair, f"{path}/{index}")
    elif torch.is_tensor(one):
        assert one.dtype == other.dtype and torch.equal(one, other), path
    else:
        assert one == other, (path, one, other)


def assert_same_runs(whole: Path, killed: Path) -> None:
    one, other = (
        torch.load(run / "checkpoints" / "last.ckpt", weights_only=True) for run in (whole, killed)
    )
    for key in ("state_dict", "ema_trained_weights", "optimizer_states", "lr_schedulers", "loops"):
        assert_same(one[key], other[key], key)
    assert one["DetectionDataModule"] == other["DetectionDataModule"]
    assert one["global_step"] == other["global_step"]
    assert_same(read_log(whole), read_log(killed))
    scores = [json.loads((run / "score.json").read_text()) for run in (whole, killed)]
    for score in scores:
        for name in (
            "wall_s",
            "samples_per_s",
            "cpu_ms_per_sample",
            "data_wait_share",
            "peak_mib",
        ):
            del score[name]
    assert scores[0] == scores[1] and scores[0]["status"] == "finished"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides with the folder of the data set, which is written once."""
    folder = tmp_path_factory.mktemp("data")
    return [f"paths.data={folder}", f"paths.cache={folder}/cache"]


def test_a_killed_training_ends_where_an_undisturbed_one_ends(data, tmp_path: Path) -> None:
    overrides = [*OVERRIDES, *data, "trainer.max_steps=11"]
    train(tmp_path / "whole", overrides)
    report = train(tmp_path / "killed", overrides, num_kills=3)
    assert len(report["kills"]) == 3 and report["starts"] == 4
    rows = read_log(tmp_path / "whole" / "run")
    assert list(rows["train/loss"]) == list(range(11)) and list(rows["val/NDS"]) == [3, 7, 10]
    assert_same_runs(tmp_path / "whole" / "run", tmp_path / "killed" / "run")


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_twenty_kills(data, tmp_path: Path, world_size: int) -> None:
    steps = [f"hardware.devices={world_size}", "trainer.max_steps=70"]
    overrides = [*OVERRIDES, *data, *steps]
    train(tmp_path / "whole", overrides, world_size)
    report = train(tmp_path / "killed", overrides, world_size, num_kills=20)
    assert len(report["kills"]) == 20
    print(report)
    assert_same_runs(tmp_path / "whole" / "run", tmp_path / "killed" / "run")


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    keeper, port = keep_store()
    try:
        print(json.dumps(drive(Path(given[0]), *given[1:], port)))
    finally:
        os.kill(keeper, signal.SIGKILL)
