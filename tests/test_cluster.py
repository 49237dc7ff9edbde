"""Training on several machines, started by scripts/launch_cluster.sh.

The slow test simulates four machines by network namespaces, each with its own address and connected
only by a bridge. ``ssh`` is replaced by a script that runs a command inside a namespace.
"""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers import TINY_LIDAR_MODEL

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "scripts" / "launch_cluster.sh"
ADDRESSES = [f"10.213.77.{number}" for number in range(1, 5)]
OVERRIDES = [
    *TINY_LIDAR_MODEL,
    "~callbacks.pictures",
    "data=synthetic_mini",
    "data.synthetic.image_size=[36,64]",
    "data.synthetic.objects_per_scene=16",
    "data.synthetic.num_train_scenes=1",
    "data.synthetic.num_val_scenes=1",
    "data.synthetic.frames_per_scene=4",
    "data.synthetic.num_azimuths=90",
    "data.batch_size=1",
    "data.num_workers=1",
    "loader=torch",
    "loader.num_workers=0",
    "hardware=cpu",
    "hardware.nodes=4",
    "callbacks.steps.every_n_train_steps=2",
    "cluster.collective_s=120",
    "trainer.max_steps=16",
    "trainer.log_every_n_steps=1",
    "trainer.enable_progress_bar=false",
]


def launch(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments], capture_output=True, text=True, check=False
    )


def test_script_prints_the_command_of_each_machine() -> None:
    done = launch("--hosts", "a,b", "--processes", "2", "--print", "--", "seed=3", "x=[1, 2]")
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith(f"a: cd {ROOT} && exec env ") and second.startswith("b: ")
    for line, host in ((first, "1"), (second, "0")):
        for part in (
            f"{ROOT}/.venv/bin/python -m torch.distributed.run --nnodes=2 --nproc-per-node=2",
            "--rdzv-endpoint=a:29500",
            f"is_host={host}",
            r"-m bev_lightning.train seed=3 x=\[1\,\ 2\]",
        ):
            assert part in line, (part, line)
    job = launch("--slurm", "4", "--interface", "eth0", "--", "hardware=4n1x4090").stdout
    assert "#SBATCH --nodes=4\n" in job and "#SBATCH --ntasks-per-node=1\n" in job
    assert "NCCL_SOCKET_IFNAME=eth0" in job
    assert job.splitlines()[-1].endswith("-m bev_lightning.train hardware=4n1x4090 ")
    assert subprocess.run(["bash", "-n"], input=job, text=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give --hosts A,B,.. or --slurm NODES"),
        (["--hosts", "a", "--slurm", "2"], "give only one of"),
        (["--hosts", "a", "--port", "x"], "x is not a whole number"),
        (["--host", "a"], "--host is unknown"),
        (["--hosts"], "--hosts needs a value"),
    ],
)
def test_script_refuses_bad_arguments(arguments: list[str], message: str) -> None:
    done = launch(*arguments)
    assert done.returncode == 2 and message in done.stderr


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Path]:
    """Four namespaces on one bridge; yields a folder for PATH with the ``ssh`` into them."""
    hint = "apt-get install iproute2, and run as root"
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip(f"network namespaces need the command ip and root: {hint}")

    def ip(*arguments: str, check: bool = True) -> int:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
        if check and done.returncode:
            pytest.skip(f"ip {' '.join(arguments)} failed ({done.stderr.strip()}): {hint}")
        return done.returncode

    def clear() -> None:
        for address in ADDRESSES:
            ip("netns", "del", address, check=False)
        ip("link", "del", "bev-bridge", check=False)

    clear()
    try:
        ip("link", "add", "bev-bridge", "type", "bridge")
        ip("link", "set", "bev-bridge", "up")
        for number, address in enumerate(ADDRESSES):
            ip("netns", "add", address)
            ip("link", "add", f"bev-{number}", "type", "veth", "peer", "eth0", "netns", address)
            ip("link", "set", f"bev-{number}", "master", "bev-bridge", "up")
            ip("-n", address, "addr", "add", f"{address}/24", "dev", "eth0")
            ip("-n", address, "link", "set", "eth0", "up")
            ip("-n", address, "link", "set", "lo", "up")
        ssh = tmp_path / "bin" / "ssh"
        ssh.parent.mkdir()
        ssh.write_text('#!/bin/sh\nshift 3\nexec ip netns exec "$1" sh -c "$2"\n')
        ssh.chmod(ssh.stat().st_mode | stat.S_IXUSR)
        yield ssh.parent
    finally:
        clear()


def train_on_four(folder: Path, path: Path, overrides: list[str], kill: bool) -> Path:
    """Train in ``folder``; with ``kill`` one process is killed after a checkpoint, then resume."""
    folder.mkdir(exist_ok=True)
    script = ["bash", str(SCRIPT), "--hosts", ",".join(ADDRESSES), "--interface", "eth0"]
    python = ["--python", sys.executable, "--dir", str(folder), "--"]
    with (folder / "log.txt").open("a") as log:
        running = subprocess.Popen(
            [*script, *python, *overrides],
            env=os.environ | {"PATH": f"{path}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        while kill and not list(folder.glob("outputs/train/*/checkpoints/step_*.ckpt")):
            assert running.poll() is None, (folder / "log.txt").read_text()[-3000:]
            time.sleep(0.05)
        if kill:
            os.kill(find_process(ADDRESSES[2], rank=2), signal.SIGKILL)
        code = running.wait()
    if kill:
        assert code != 0
        return train_on_four(folder, path, [*overrides, "resume=auto"], kill=False)
    assert code == 0, (folder / "log.txt").read_text()[-3000:]
    (run,) = folder.glob("outputs/train/*")
    return run


def find_process(address: str, rank: int) -> int:
    """The training process in a namespace."""
    listed = subprocess.run(
        ["ip", "netns", "pids", address], capture_output=True, text=True, check=True
    )
    for pid in listed.stdout.split():
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if f"RANK={rank}".encode() in environment:
            return int(pid)
    raise AssertionError(f"no process {rank} in {address}")


@pytest.mark.slow
def test_four_machines_lose_a_process_and_go_on(machines: Path, tmp_path: Path) -> None:
    overrides = [*OVERRIDES, f"paths.data={tmp_path}/data", f"paths.cache={tmp_path}/cache"]
    whole = train_on_four(tmp_path / "whole", machines, overrides, kill=False)
    killed = train_on_four(tmp_path / "killed", machines, overrides, kill=True)
    log = (tmp_path / "killed" / "log.txt").read_text()
    assert "process 2 (pid " in log and "resume=auto: continuing from" in log
    one, other = (
        torch.load(run / "checkpoints" / "last.ckpt", weights_only=True) for run in (whole, killed)
    )
    assert one["global_step"] == other["global_step"] == 16
    for name, value in one["state_dict"].items():
        assert torch.equal(value, other["state_dict"][name]), name
    scores = [json.loads((run / "score.json").read_text())["NDS"] for run in (whole, killed)]
    assert scores[0] == scores[1]
