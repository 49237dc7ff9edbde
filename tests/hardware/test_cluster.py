"""Launcher detection and values shared through torchrun's store."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from bev_lightning.errors import InputError
from bev_lightning.hardware import cluster
from bev_lightning.hardware.cluster import (
    check_world_size,
    find_launcher,
    is_rank_zero,
    is_restart,
    set_default_environment,
    slurm_run_dir,
)

ROOT = Path(__file__).parents[2]
NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
SLURM = ("SLURM_PROCID", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_NTASKS", "SLURM_RESTART_COUNT")


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*NAMES, *SLURM):
        monkeypatch.delenv(name, raising=False)


def enter(monkeypatch: pytest.MonkeyPatch, **values: object) -> None:
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))


def test_no_launcher_in_a_plain_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_launcher() is None and is_rank_zero() and not is_restart()
    check_world_size(4, 1)
    # One task, as in a sweep: Lightning starts the processes.
    enter(monkeypatch, SLURM_JOB_ID=77, SLURM_NTASKS=1, SLURM_PROCID=0)
    assert find_launcher() is None
    enter(monkeypatch, LOCAL_RANK=1)
    assert not is_rank_zero()


def test_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    enter(monkeypatch, SLURM_JOB_ID=77, SLURM_NTASKS=4, SLURM_PROCID=2, SLURM_RESTART_COUNT=0)
    assert find_launcher() == "slurm" and not is_rank_zero() and not is_restart()
    assert slurm_run_dir(Path("outputs/train/today")) == Path("outputs/train/slurm_77_0")
    enter(monkeypatch, SLURM_STEP_ID=3, SLURM_RESTART_COUNT=1)
    assert slurm_run_dir(Path("outputs/train/today")) == Path("outputs/train/slurm_77_3")
    assert is_restart()
    check_world_size(2, 2)
    with pytest.raises(
        InputError, match=r"slurm has started 4 processes, which is not hardware.nodes=1"
    ):
        check_world_size(1, 1)


# Each rank of torchrun. On the first start the last rank is killed after a collective and the other
# waits for it in vain.
WORKER = """
import os, signal, sys, torch, torch.distributed as dist
from bev_lightning.hardware import cluster

assert cluster.find_launcher() == "torchrun"
cluster.init_store()
rank = int(os.environ["RANK"])
if rank == 0:
    again = cluster.is_restart()
    assert cluster.read_first_broadcast("run_dir") == ("runs/a" if again else None)
    if not again:
        cluster.broadcast_value("run_dir", "runs/a")
    shared = cluster.broadcast_value("overrides", ["seed=1", f"again={again}"])
else:
    shared = cluster.broadcast_value("overrides")
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
if shared[1] == "again=False" and rank == dist.get_world_size() - 1:
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(total)
print(f"rank {rank} {shared} {total.item():.0f}")
"""


@pytest.mark.parametrize("num_machines", [1, 2])
def test_processes_restarted_by_torchrun_connect(tmp_path: Path, num_machines) -> None:
    """Of two machines, only the one whose process was killed may count a restart."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    command = [sys.executable, "-m", "torch.distributed.run", "--max-restarts", "2"]
    if num_machines == 1:
        command += ["--nproc-per-node", "2", "--master-port", str(free_port())]
    else:
        command += ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d"]
        command += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--local-addr", "127.0.0.1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    agents = [
        subprocess.Popen(
            [*command, str(script)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(num_machines)
    ]
    output = "".join(agent.communicate(timeout=240)[0] for agent in agents)
    assert [agent.returncode for agent in agents] == [0] * num_machines, output
    for rank in range(2):
        assert f"rank {rank} ['seed=1', 'again=True'] 4" in output


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_world_size_must_match_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    enter(monkeypatch, TORCHELASTIC_RUN_ID="x", WORLD_SIZE=2, RANK=0)
    check_world_size(1, 2)
    with pytest.raises(InputError, match="torchrun has started 2 processes"):
        check_world_size(4, 1)


def test_missing_ranks_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    enter(monkeypatch, MASTER_ADDR="127.0.0.1", MASTER_PORT=store.port, RANK=0, WORLD_SIZE=3)
    monkeypatch.setattr(cluster, "_STORE_TIMEOUT_S", 1)
    store.set("bev_lightning/request/1", "of a process that has died")
    with pytest.raises(InputError, match=r"^ranks 1, 2 of torchrun have not connected within 1 s"):
        cluster.init_store()


def test_variables_of_the_caller_take_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    enter(monkeypatch, TORCH_FR_BUFFER_SIZE=5)
    monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "")
    monkeypatch.delenv("TORCH_NCCL_DUMP_ON_TIMEOUT")
    set_default_environment({"TORCH_FR_BUFFER_SIZE": 2000, "TORCH_NCCL_DUMP_ON_TIMEOUT": 1})
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == "5"
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"


END = """
import atexit, sys
import torch, torch.distributed as dist
from bev_lightning.hardware.cluster import exit_distributed

class Late:
    def __del__(self):
        print("shut down")

late = Late()
exit_distributed(1)  # no process group: returns
if sys.argv[1] == "process group":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
atexit.register(print, "exit functions")
print("done", end=" ")
exit_distributed(3)
"""


@pytest.mark.parametrize(
    ("way", "exit_code", "expected"),
    [
        ("alone", 0, "done exit functions\nshut down\n"),
        ("process group", 3, "done exit functions\n"),
    ],
)
def test_interpreter_is_not_shut_down_with_a_process_group(way, exit_code, expected):
    program = [sys.executable, "-c", END, way]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (exit_code, expected), done.stderr
