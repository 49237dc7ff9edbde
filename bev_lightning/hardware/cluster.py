"""Launcher detection, and values shared through a store before the process group exists."""

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
from bev_lightning.private_apis import run_exit_functions

_STORE_TIMEOUT_S = 600
_PREFIX = "bev_lightning"
# Set by init_store: how many times rank 0 has been started, torchrun's store (which outlives
# restarts) and the store that rank 0 opens for one restart.
_num_starts = 0
_torchrun_store: Any = None
_restart_store: Any = None


def is_rank_zero() -> bool:
    """Whether this process is the first or the only one of a run: it alone logs and writes."""
    return all(
        os.environ.get(name, "0") in ("", "0") for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID")
    )


def find_launcher() -> Literal["torchrun", "slurm"] | None:
    """The external launcher that started all processes; None if Lightning starts them.

    A SLURM job with a single task counts as None.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return "torchrun"
    if "SLURM_JOB_ID" in os.environ and int(os.environ.get("SLURM_NTASKS", "1")) > 1:
        return "slurm"
    return None


def is_restart() -> bool:
    """Whether torchrun or SLURM has restarted these processes after a failure or a preemption.

    Under torchrun only rank 0 knows, and only after :func:`init_store`.
    """
    return _num_starts > 1 or int(os.environ.get("SLURM_RESTART_COUNT") or "0") > 0


def check_world_size(nodes: Any, devices: Any) -> None:
    """Check that the launcher started ``nodes * devices`` processes.

    Raises:
        InputError: it started another number.
    """
    launcher = find_launcher()
    if launcher is None:
        return
    count = int(os.environ["WORLD_SIZE" if launcher == "torchrun" else "SLURM_NTASKS"])
    if not isinstance(devices, int) or nodes * devices != count:
        raise InputError(
            f"{launcher} has started {count} processes, which is not hardware.nodes={nodes} x "
            f"hardware.devices={devices}; set hardware.nodes to the number of machines and "
            f"hardware.devices to the processes on each"
        )


def slurm_run_dir(default: Path) -> Path:
    """The run directory of this SLURM job: the same in all tasks and after a requeue."""
    step = os.environ.get("SLURM_STEP_ID", "0")
    return default.parent / f"slurm_{os.environ['SLURM_JOB_ID']}_{step}"


def init_store() -> None:
    """Agree on a rendezvous store for this start of the processes that torchrun launched.

    torchrun keeps one store for all restarts, in which torch (2.14) would find the addresses of
    processes that have died. So rank 0 opens a new store at each restart and sets MASTER_PORT to
    it. The other ranks request the port through torchrun's store, each with a random id: answers to
    the requests of earlier processes cannot be mistaken for theirs, and torchrun's own restart
    counter differs between machines.

    Raises:
        InputError: some ranks do not connect in time.
    """
    global _num_starts, _torchrun_store, _restart_store
    store = _torchrun_store = _connect()
    if not is_rank_zero():
        request = uuid.uuid4().hex
        store.set(f"{_PREFIX}/request/{os.environ['RANK']}", request)
        reply = store.get(f"{_PREFIX}/reply/{request}")
        store.set(f"{_PREFIX}/ack/{request}", reply)
        os.environ["MASTER_PORT"] = reply.decode().partition("/")[0]
        return
    _num_starts = store.add(f"{_PREFIX}/starts", 1)
    if _num_starts > 1:
        from torch.distributed import TCPStore

        _restart_store = TCPStore(
            os.environ["MASTER_ADDR"], 0, is_master=True, wait_for_workers=False
        )
        os.environ["MASTER_PORT"] = str(_restart_store.port)
    reply = f"{os.environ['MASTER_PORT']}/{_num_starts}".encode()
    missing = set(range(1, int(os.environ["WORLD_SIZE"])))
    deadline = time.monotonic() + _STORE_TIMEOUT_S
    while missing:
        missing = {rank for rank in missing if not _reply(store, rank, reply)}
        if missing and time.monotonic() > deadline:
            raise InputError(
                f"ranks {', '.join(map(str, sorted(missing)))} of torchrun have not connected "
                f"within {_STORE_TIMEOUT_S} s; check their logs and restart all processes"
            )
        time.sleep(0.05)


def _reply(store: Any, rank: int, reply: bytes) -> bool:
    """Answer the latest request of a rank; True once the rank has acknowledged the answer."""
    key = f"{_PREFIX}/request/{rank}"
    if not store.check([key]):
        return False
    request = store.get(key).decode()
    store.set(f"{_PREFIX}/reply/{request}", reply)
    ack = f"{_PREFIX}/ack/{request}"
    return bool(store.check([ack]) and store.get(ack) == reply)


def broadcast_value(name: str, value: Any = None) -> Any:
    """Send a value from rank 0 to all ranks through the store of :func:`init_store`.

    The other ranks block until rank 0 has sent it. A value sent by the first start remains readable
    after restarts, see :func:`read_first_broadcast`.

    Args:
        name: key in the store.
        value: plain containers on rank 0; ignored elsewhere.
    """
    store, key = _connect(), f"{_PREFIX}/{name}"
    if is_rank_zero():
        store.set(key, json.dumps(value))
    return json.loads(store.get(key))


def read_first_broadcast(name: str) -> Any:
    """The value that rank 0 broadcast at the first start of this run; None if there is none."""
    assert _torchrun_store is not None, "call init_store first"
    key = f"{_PREFIX}/{name}"
    return json.loads(_torchrun_store.get(key)) if _torchrun_store.check([key]) else None


def set_default_environment(values: Mapping[str, Any]) -> None:
    """Set environment variables (of NCCL and torch) that the caller has not set."""
    for name, value in values.items():
        os.environ.setdefault(name, str(value))


def requeue_slurm_job() -> None:
    """Queue this SLURM job again; does nothing outside SLURM."""
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        return
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    try:
        subprocess.run(["scontrol", "requeue", job], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"SLURM job {job} could not be requeued ({error}); submit it again", file=sys.stderr)


def exit_distributed(exit_code: int) -> None:
    """Exit a process whose process group is initialised; return in any other process.

    gloo's threads release their last tensors shortly after a collective is complete. A thread that
    needs the interpreter while it shuts down aborts the process, and the launcher would count a
    finished run as failed. So the exit functions are run and the process ends without a shutdown.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return
    run_exit_functions()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _connect() -> Any:
    # Imported late: a command that only prints its configuration needs no torch.
    from torch.distributed import TCPStore

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=_STORE_TIMEOUT_S))
