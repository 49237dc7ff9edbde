"""Worker processes that run numbered jobs ahead of time, each into a slot of shared memory.

Only slot numbers and small results cross the pipes. A slot is owned by the job's worker from its
assignment until its result arrives, then by the consumer of the result until no holder is left. The
memory has no name, so that nothing of it is left in /dev/shm, however a process ends, and a
container's limit on /dev/shm does not matter.

Each worker has its own pipe and they share no lock: a worker that is killed at any moment leaves
the others intact, and its end is noticed at once.
"""

import contextlib
import io
import mmap
import multiprocessing
import pickle
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch

from bev_lightning.data.process_pool import prepare_worker
from bev_lightning.errors import InputError

# Pending jobs of a worker: the running one and the next, so that it need not wait for its result to
# be taken.
_MAX_PENDING = 2


class SlotPool:
    """Reference-counted slots of equal size in memory that forked processes share.

    Attributes:
        slot_bytes, num_bytes: size of a slot, and of all.
    """

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        self.slot_bytes = -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.num_bytes = self.slot_bytes * num_slots
        self._memory = mmap.mmap(-1, max(self.num_bytes, mmap.PAGESIZE))
        self._holders = [0] * num_slots
        self._lock = threading.Lock()
        self._address = np.frombuffer(self._memory, np.uint8).ctypes.data

    def memory(self, slot: int) -> np.ndarray:
        """``(slot_bytes,)`` uint8. The memory lives as long as any array on it."""
        return np.frombuffer(self._memory, np.uint8, self.slot_bytes, slot * self.slot_bytes)

    def acquire(self) -> int | None:
        """A free slot, which then has one holder; None if all are held."""
        with self._lock:
            if 0 not in self._holders:
                return None
            slot = self._holders.index(0)
            self._holders[slot] = 1
            return slot

    def share(self, slot: int) -> None:
        """Add a holder, which must release the slot too."""
        with self._lock:
            if not self._holders[slot]:
                raise RuntimeError(f"slot {slot} is free: only a holder may share it")
            self._holders[slot] += 1

    def release(self, slot: int) -> None:
        """Remove a holder; a slot without holders is free."""
        with self._lock:
            if not self._holders[slot]:
                raise RuntimeError(f"slot {slot} is free already")
            self._holders[slot] -= 1

    def pin(self) -> bool:
        """Page-lock the memory for CUDA, after the workers have forked; whether that worked."""
        runtime: Any = torch.cuda.cudart()
        return int(runtime.cudaHostRegister(self._address, self.num_bytes, 0)) == 0

    def unpin(self) -> None:
        """Undo :meth:`pin`."""
        runtime: Any = torch.cuda.cudart()
        runtime.cudaHostUnregister(self._address)


@dataclass
class _Worker:
    process: BaseProcess
    connection: Connection
    pending: list[tuple[int, int]] = field(default_factory=list)  # job, slot; the first one runs


class WorkerPool:
    """Iterator over the results of numbered jobs, in the order of the jobs.

    Each item is a slot, which the caller then holds, and the return value of ``work``.

    """

    def __init__(
        self,
        work: Callable[[int, int], Any],
        jobs: range,
        num_workers: int,
        pool: SlotPool,
        describe_death: Callable[[int, str], Exception] | None = None,
        restart: bool = False,
    ) -> None:
        """Fork the workers.

        Args:
            work: called with a job's number and the slot to write into; an InputError that it
                raises reaches the caller.
            jobs: numbers of the jobs.
            num_workers: processes; 0 runs a job in this process when its result is requested.
            pool: its slots limit how far the workers run ahead.
            describe_death: the error to raise for a worker that was killed, from the number of the
                job that it was working on and how it ended.
            restart: replace a worker that was killed, once per job.
        """
        self._num_restarts = 0
        self._describe_death = describe_death
        self._work, self._jobs, self._pool, self._restart = work, jobs, pool, restart
        self._next = self._next_to_assign = jobs.start
        self._results: dict[int, tuple[int, Any]] = {}
        self._retried_jobs: set[int] = set()
        self._workers: list[_Worker] = []
        self._end: Exception | None = None
        self._lock = threading.Lock()  # one thread may wait while another one closes
        for _ in range(min(num_workers, len(jobs))):
            self._start_worker()
        self._is_parallel = bool(self._workers)
        self._assign_jobs()

    def __iter__(self) -> "WorkerPool":
        return self

    def __next__(self) -> tuple[int, Any]:
        """Raises:
        StopIteration: past the last job, or closed.
        InputError: that of the job, or a worker was killed.
        """
        job = self._next
        if job >= self._jobs.stop:
            raise StopIteration
        if not self._is_parallel:
            slot = self._pool.acquire()
            if slot is None:
                raise RuntimeError("all slots are held: release one before taking the next result")
            self._results[job] = slot, _run(self._work, job, slot)
        while job not in self._results:
            with self._lock:
                if self._end is not None:
                    raise self._end
                self._assign_jobs()
                self._receive_results(timeout_s=0.05)
        slot, result = self._results.pop(job)
        self._next += 1
        with self._lock:
            self._assign_jobs()
        if isinstance(result, BaseException):
            self._pool.release(slot)
            raise result
        return slot, result

    def is_ready(self) -> bool:
        """Whether the next result has arrived."""
        if self._is_parallel and self._next < self._jobs.stop:
            with self._lock:
                self._receive_results(timeout_s=0.0)
        return self._next in self._results

    def close(self) -> None:
        """End the processes."""
        with self._lock:
            self._end = StopIteration()
            workers, self._workers = self._workers, []
        for worker in workers:
            worker.process.kill()
            worker.connection.close()
        for worker in workers:
            worker.process.join()
            worker.process.close()
        if self._num_restarts:
            warnings.warn(
                f"{self._num_restarts} loader processes were killed, perhaps out of memory, and "
                f"replaced (data.on_missing=skip)",
                stacklevel=3,
            )
            self._num_restarts = 0

    def _start_worker(self) -> _Worker:
        # Forked: they share the slots and all that `work` refers to. They use no CUDA.
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        others = [worker.connection for worker in self._workers]
        process = context.Process(
            target=_run_jobs, args=(self._work, theirs, [ours, *others]), daemon=True
        )
        process.start()
        theirs.close()
        worker = _Worker(process, ours)
        self._workers.append(worker)
        return worker

    def _assign_jobs(self) -> None:
        while self._next_to_assign < self._jobs.stop and self._workers:
            worker = min(self._workers, key=lambda one: len(one.pending))
            slot = None if len(worker.pending) >= _MAX_PENDING else self._pool.acquire()
            if slot is None:
                return
            self._send(worker, self._next_to_assign, slot)
            self._next_to_assign += 1

    def _send(self, worker: _Worker, job: int, slot: int) -> None:
        worker.pending.append((job, slot))
        with contextlib.suppress(OSError):  # it died, which _receive_results notices
            worker.connection.send((job, slot))

    def _receive_results(self, timeout_s: float) -> None:
        busy = {worker.connection: worker for worker in self._workers if worker.pending}
        for connection in wait(list(busy), timeout_s):
            assert isinstance(connection, Connection)
            worker = busy[connection]
            try:
                result = connection.recv()
            except (EOFError, OSError):
                self._replace_worker(worker)
                continue
            job, slot = worker.pending.pop(0)
            self._results[job] = slot, result

    def _replace_worker(self, worker: _Worker) -> None:
        """Pass the jobs of a worker that died to a new one, or raise where that is not allowed."""
        self._workers.remove(worker)
        worker.process.join(2)
        code = worker.process.exitcode
        why = (
            f"was killed (signal {-code})" if code and code < 0 else f"ended with exit code {code}"
        )
        (job, _), *_ = worker.pending
        if not self._restart or job in self._retried_jobs:
            self._end = (
                RuntimeError(f"a worker process of the loader {why}")
                if self._describe_death is None
                else self._describe_death(job, why)
            )
            raise self._end
        self._retried_jobs.add(job)
        self._num_restarts += 1
        successor = self._start_worker()
        for pending in worker.pending:
            self._send(successor, *pending)


class _Pickler(pickle.Pickler):
    """Pickles tensors as numpy arrays: torch's own way opens a file for each."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.from_numpy, (value.numpy(),)
        return NotImplemented


def _run_jobs(
    work: Callable[[int, int], Any], connection: Connection, inherited: Sequence[Connection]
) -> None:
    """Main loop of a worker process. It ends with its parent, since the pipe is then closed."""
    prepare_worker(0)
    for other in inherited:
        other.close()
    while True:
        try:
            job = connection.recv()
            buffer = io.BytesIO()
            _Pickler(buffer, protocol=5).dump(_run(work, *job))
            connection.send_bytes(buffer.getbuffer())
        except (EOFError, OSError):
            return


def _run(work: Callable[[int, int], Any], job: int, slot: int) -> Any:
    """The job's result, or the exception that it raised."""
    try:
        return work(job, slot)
    except InputError as error:
        return InputError(str(error))
    except Exception:
        return RuntimeError(f"a loader failed:\n{traceback.format_exc()}")
