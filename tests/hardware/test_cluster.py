"""What processes find out about their start, and agree on through torchrun's store."""

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
    check_launch,
    find_launcher,
    is_child,
    is_restart,
    name_job,
    set_environment,
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


# What a process of torchrun does before and after it has met the others. On the first start the
# last one is killed when all have met, and the first waits for it in vain.
MEMBER = """
import os, signal, sys, torch, torch.distributed as dist
from bev_lightning.hardware import cluster

assert cluster.find_launcher() == "torchrun"
cluster.meet()
rank = int(os.environ["RANK"])
if rank == 0:
    again = cluster.is_restart()
    assert cluster.recall("place") == ("runs/a" if again else None)
    if not again:
        cluster.share("place", "runs/a")
    words = cluster.share("words", ["seed=1", f"again={again}"])
else:
    words = cluster.share("words")
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
if words[1] == "again=False" and rank == dist.get_world_size() - 1:
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(total)
print(f"rank {rank} {words} {total.item():.0f}")
"""


@pytest.mark.parametrize("num_machines", [1, 2])
def test_processes_that_torchrun_starts_again_find_each_other(tmp_path: Path, num_machines) -> None:
    """Of two machines, that whose process was killed counts a restart, the other may not."""
    script = tmp_path / "member.py"
    script.write_text(MEMBER)
    words = [sys.executable, "-m", "torch.distributed.run", "--max-restarts", "2"]
    if num_machines == 1:
        words += ["--nproc-per-node", "2", "--master-port", str(free_port())]
    else:
        words += ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d"]
        words += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--local-addr", "127.0.0.1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    agents = [
        subprocess.Popen(
            [*words, str(script)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(num_machines)
    ]
    said = "".join(agent.communicate(timeout=240)[0] for agent in agents)
    assert [agent.returncode for agent in agents] == [0] * num_machines, said
    for rank in range(2):
        assert f"rank {rank} ['seed=1', 'again=True'] 4" in said


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_a_launch_has_the_processes_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    enter(monkeypatch, TORCHELASTIC_RUN_ID="x", WORLD_SIZE=2, RANK=0)
    check_launch(1, 2)
    with pytest.raises(InputError, match="torchrun has started 2 processes"):
        check_launch(4, 1)


def test_one_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    enter(monkeypatch, MASTER_ADDR="127.0.0.1", MASTER_PORT=store.port, RANK=0, WORLD_SIZE=3)
    monkeypatch.setattr(cluster, "_PATIENCE_S", 1)
    store.set("bev_lightning/asks/1", "left by one that is gone")
    with pytest.raises(InputError, match=r"^processes 1, 2 of torchrun have not come within 1 s"):
        cluster.meet()


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
from bev_lightning.hardware.cluster import leave

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
