"""Who started this process, and what the processes of a run agree on before they meet."""

import atexit
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from bev_lightning.errors import InputError


def is_child() -> bool:
    """True in every process of a distributed run but the first; it must not write or talk."""
    return any(
        os.environ.get(name, "0") not in ("", "0")
        for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID")
    )


def find_launcher() -> Literal["torchrun", "slurm"] | None:
    """What has started all processes from outside; None where Lightning starts them itself.

    A job of SLURM with one task is as good as any shell.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return "torchrun"
    if "SLURM_JOB_ID" in os.environ and int(os.environ.get("SLURM_NTASKS", "1")) > 1:
        return "slurm"
    return None


def is_restart() -> bool:
    """torchrun or SLURM has started these processes anew, after a failure or a preemption."""
    names = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    return any(int(os.environ.get(name) or "0") > 0 for name in names)


def check_launch(nodes: Any, devices: Any) -> None:
    """Refuse a launch that has not as many processes as the configuration asks for.

    Raises:
        InputError: names both numbers.
    """
    launcher = find_launcher()
    if launcher is None:
        return
    count = int(os.environ["WORLD_SIZE" if launcher == "torchrun" else "SLURM_NTASKS"])
    if not isinstance(devices, int) or nodes * devices != count:
        raise InputError(
            f"{launcher} has started {count} processes and hardware.nodes={nodes} "
            f"hardware.devices={devices} asks for others; set hardware.nodes to the number of "
            f"machines and hardware.devices to the processes of each"
        )


def name_job(default: Path) -> Path:
    """The run directory of a SLURM job, the same in all tasks and when it is requeued."""
    job = os.environ["SLURM_JOB_ID"]
    step = os.environ.get("SLURM_STEP_ID", "0")
    return default.parent / f"slurm_{job}_{step}"


def share(name: str, value: Any = None) -> Any:
    """The first process' value in all processes that torchrun has started; the others wait for it.

    It lies in the store through which they will find each other. What a start has shared stays
    there for its restarts: see :func:`recall`.

    Args:
        value: plain containers; None in the others.
    """
    store = _connect()
    if not is_child():
        store.set(_key(name), json.dumps(value))
    return json.loads(store.get(_key(name)))


def recall(name: str) -> Any:
    """What the first start of these processes has shared; None where there is nothing."""
    store, key = _connect(), f"bev_lightning/{name}/0"
    return json.loads(store.get(key)) if store.check([key]) else None


def set_environment(values: Mapping[str, Any]) -> None:
    """Variables for NCCL and torch, where the caller's environment has not set them."""
    for name, value in values.items():
        os.environ.setdefault(name, str(value))


def requeue() -> None:
    """Have SLURM start this job again, which goes on by itself; nothing outside of SLURM."""
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        return
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    try:
        subprocess.run(["scontrol", "requeue", job], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"the job {job} could not be requeued ({error}); submit it again", file=sys.stderr)


def leave(exit_code: int) -> None:
    """End a process of a distributed run whose work is done; return in any other process.

    The threads of gloo let go of their last tensors a moment after the results are there. One that
    asks for the interpreter while Python takes that down aborts the process, and a launcher counts
    a finished run as failed. So Python is not taken down; its exit functions are run.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _key(name: str) -> str:
    return f"bev_lightning/{name}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _connect() -> Any:
    # Late: a verb that says what it would do needs no torch.
    from torch.distributed import TCPStore

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(address, port, is_master=False, timeout=timedelta(minutes=10))
