"""Work shared out to processes."""

import multiprocessing
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TypeVar

_Job = TypeVar("_Job")
_Result = TypeVar("_Result")


def map_in_processes(
    function: Callable[[_Job], _Result], jobs: Sequence[_Job], num_workers: int
) -> Iterator[_Result]:
    """Results in the order of the jobs, whoever made them; this process alone where it may start no
    others."""
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
    pool = ProcessPoolExecutor(num_workers, mp_context=multiprocessing.get_context("spawn"))
    try:
        yield from pool.map(function, jobs)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
