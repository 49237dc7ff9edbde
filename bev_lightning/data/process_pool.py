"""Distributes jobs to worker processes."""

import gc
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, TypeVar

from bev_lightning.errors import InputError

_Job = TypeVar("_Job")
_Result = TypeVar("_Result")
_function: Callable[[Any], Any]  # of a worker


def map_in_processes(
    function: Callable[[_Job], _Result], jobs: Sequence[_Job], num_workers: int
) -> Iterator[_Result]:
    """Map a function over jobs in spawned processes; results come in the order of the jobs.

    The function is sent to each process once, so that it may be a partial with large arguments. A
    process that cannot start others runs the jobs itself.

    Raises:
        InputError: the system killed a process.
    """
    # Daemons may have no children; children import the main file, which a script from stdin lacks.
    alone = (
        multiprocessing.current_process().daemon
        or not Path(getattr(sys.modules["__main__"], "__file__", None) or __file__).exists()
    )
    num_workers = 1 if alone else min(num_workers, len(jobs))
    if num_workers <= 1:
        yield from map(function, jobs)
        return
    # Not forked: the caller may have threads and a CUDA context.
    pool = ProcessPoolExecutor(
        num_workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(function,),
    )
    try:
        yield from pool.map(_call, jobs)
    except BrokenProcessPool:
        raise InputError(
            f"one of {num_workers} processes was killed, perhaps for lack of memory: set a smaller "
            f"data.num_workers and start again; finished parts are kept"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def prepare_worker(worker: int) -> None:
    """Initialise a forked worker: freeze inherited objects, one torch thread, and ignore signals
    that do not come from its parent.

    A terminal and a scheduler signal all processes of a job. The workers have to keep loading until
    the training has finished its step, and end with it.
    """
    import torch  # late: processes that render scenes do not need it

    # Inherited objects must not be destroyed here: a DALI pipeline awaiting collection would wait
    # for threads that only its own process has.
    gc.freeze()
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def wait() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent.pid:
            pass
        os._exit(0)

    threading.Thread(target=wait, name="SIGTERM", daemon=True).start()


def _start_worker(function: Callable[[Any], Any]) -> None:
    global _function
    _function = function
    # There are as many processes as cores: more threads would only compete with each other.
    os.environ["OMP_NUM_THREADS"] = "1"
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _call(job: Any) -> Any:
    return _function(job)


def _die_with_parent() -> None:
    """Exit when the parent dies: a pool's processes would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)
