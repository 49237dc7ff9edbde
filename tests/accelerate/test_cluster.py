"""What processes find out about their start, and agree on through torchrun's store."""

import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from bev_lightning.accelerate.cluster import (
    check_launch,
    find_launcher,
    is_child,
    is_restart,
    name_job,
    recall,
    set_environment,
    share,
)
from bev_lightning.errors import InputError

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
SLURM = ("SLURM_PROCID", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_NTASKS", "SLURM_RESTART_COUNT")


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*NAMES, *SLURM):
        monkeypatch.delenv(name, raising=False)


def enter(monkeypatch: pytest.MonkeyPatch, **values: object) -> None:
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))


def test_a_shell_is_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_launcher() is None and not is_child() and not is_restart()
    check_launch(4, 1)
    # One task, as a sweep's launcher asks for: Lightning starts the processes.
    enter(monkeypatch, SLURM_JOB_ID=77, SLURM_NTASKS=1, SLURM_PROCID=0)
    assert find_launcher() is None
    enter(monkeypatch, LOCAL_RANK=1)
    assert is_child()


def test_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    enter(monkeypatch, SLURM_JOB_ID=77, SLURM_NTASKS=4, SLURM_PROCID=2, SLURM_RESTART_COUNT=0)
    assert find_launcher() == "slurm" and is_child() and not is_restart()
    assert name_job(Path("outputs/train/today")) == Path("outputs/train/slurm_77_0")
    enter(monkeypatch, SLURM_STEP_ID=3, SLURM_RESTART_COUNT=1)
    assert name_job(Path("outputs/train/today")) == Path("outputs/train/slurm_77_3")
    assert is_restart()
    check_launch(2, 2)
    with pytest.raises(InputError, match=r"slurm has started 4 processes and hardware.nodes=1"):
        check_launch(1, 1)


def test_processes_of_torchrun_share_words_and_remember_their_place(monkeypatch) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    enter(monkeypatch, TORCHELASTIC_RUN_ID="x", TORCHELASTIC_RESTART_COUNT=0, WORLD_SIZE=2)
    enter(monkeypatch, MASTER_ADDR="127.0.0.1", MASTER_PORT=store.port, RANK=0)
    assert recall("place") is None
    assert share("place", "outputs/a") == "outputs/a" and share("words", ["seed=1"]) == ["seed=1"]
    enter(monkeypatch, RANK=1)
    assert share("words") == ["seed=1"]
    # Started again: the words are anew, the place is the first start's.
    enter(monkeypatch, TORCHELASTIC_RESTART_COUNT=1, RANK=0)
    assert is_restart() and recall("place") == "outputs/a"
    assert share("words", ["seed=1", "resume=b"]) == ["seed=1", "resume=b"]
    enter(monkeypatch, RANK=1)
    assert share("words") == ["seed=1", "resume=b"]
    with pytest.raises(InputError, match="torchrun has started 2 processes"):
        check_launch(4, 1)


def test_the_shells_variables_win(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    enter(monkeypatch, TORCH_FR_BUFFER_SIZE=5)
    monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "")
    monkeypatch.delenv("TORCH_NCCL_DUMP_ON_TIMEOUT")
    set_environment({"TORCH_FR_BUFFER_SIZE": 2000, "TORCH_NCCL_DUMP_ON_TIMEOUT": 1})
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == "5"
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"


END = """
import atexit, sys
import torch, torch.distributed as dist
from bev_lightning.accelerate.cluster import leave

class Late:
    def __del__(self):
        print("taken down")

late = Late()
leave(1)  # nothing to leave
if sys.argv[1] == "meets":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
atexit.register(print, "exit functions")
print("done", end=" ")
leave(3)
"""


@pytest.mark.parametrize(
    ("way", "exit_code", "says"),
    [("alone", 0, "done exit functions\ntaken down\n"), ("meets", 3, "done exit functions\n")],
)
def test_python_is_not_taken_down_under_the_threads_of_a_process_group(way, exit_code, says):
    program = [sys.executable, "-c", END, way]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (exit_code, says), done.stderr
