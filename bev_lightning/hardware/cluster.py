"""Who started this process, and what the processes of a run agree on before they meet."""

import atexit
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from bev_lightning.errors import InputError

# How long a process of torchrun waits for the others.
_PATIENCE_S = 600
# Of a process that has met the others: how often they have started (known to the first), torchrun's
# store, and the one that the first process keeps for a restart.
_num_starts = 0
_lasting: Any = None
_own: Any = None


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
    """torchrun (of the first process, which has met the others) or SLURM has started these
    processes anew, after a failure or a preemption."""
    return _num_starts > 1 or int(os.environ.get("SLURM_RESTART_COUNT") or "0") > 0


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


def meet() -> None:
    """The processes that torchrun has started agree on a store for this start of theirs.

    torchrun's own outlives its restarts, and torch (2.14) looks there for the addresses of
    processes that are gone. So those of a restart meet at a store of the first process. The others
    ask it where that is, with a word that none has used before: what was answered to earlier
    processes is not for them, and torchrun's count of restarts differs between machines.

    Raises:
        InputError: some do not come.
    """
    global _num_starts, _lasting, _own
    store = _lasting = _connect()
    if is_child():
        word = uuid.uuid4().hex
        store.set(f"bev_lightning/asks/{os.environ['RANK']}", word)
        place = store.get(f"bev_lightning/answer/{word}")
        store.set(f"bev_lightning/heard/{word}", place)
        os.environ["MASTER_PORT"] = place.decode().partition("/")[0]
        return
    _num_starts = store.add("bev_lightning/starts", 1)
    if _num_starts > 1:
        from torch.distributed import TCPStore

        _own = TCPStore(os.environ["MASTER_ADDR"], 0, is_master=True, wait_for_workers=False)
        os.environ["MASTER_PORT"] = str(_own.port)
    place = f"{os.environ['MASTER_PORT']}/{_num_starts}".encode()
    others, until = set(range(1, int(os.environ["WORLD_SIZE"]))), time.monotonic() + _PATIENCE_S
    while others:
        others = {rank for rank in others if not _tell(store, rank, place)}
        if others and time.monotonic() > until:
            raise InputError(
                f"processes {', '.join(map(str, sorted(others)))} of torchrun have not come within "
                f"{_PATIENCE_S} s; look at their logs and start all again"
            )
        time.sleep(0.05)


def _tell(store: Any, rank: int, place: bytes) -> bool:
    """Answer to whoever is this process now; whether it has heard."""
    key = f"bev_lightning/asks/{rank}"
    if not store.check([key]):
        return False
    word = store.get(key).decode()
    store.set(f"bev_lightning/answer/{word}", place)
    heard = f"bev_lightning/heard/{word}"
    return bool(store.check([heard]) and store.get(heard) == place)


def share(name: str, value: Any = None) -> Any:
    """The first process' value in all processes that torchrun has started, which have met; the
    others wait for it.

    It lies in the store through which they will find each other. What the first start has shared
    stays for its restarts: see :func:`recall`.

    Args:
        value: plain containers; None in the others.
    """
    store, key = _connect(), f"bev_lightning/{name}"
    if not is_child():
        store.set(key, json.dumps(value))
    return json.loads(store.get(key))


def recall(name: str) -> Any:
    """What the first start of these processes has shared; None where there is nothing."""
    assert _lasting is not None, "the processes have not met"
    key = f"bev_lightning/{name}"
    return json.loads(_lasting.get(key)) if _lasting.check([key]) else None


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


def _connect() -> Any:
    # Late: a verb that says what it would do needs no torch.
    from torch.distributed import TCPStore

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=_PATIENCE_S))
