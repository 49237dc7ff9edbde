"""Processes that do numbered jobs ahead of time, each into a slot of shared memory.

What crosses a pipe is the number of a slot and what is small. Slots have owners: a job's worker
from the moment it is told until it answers, then whoever took the answer, until nobody holds the
slot any more. The memory has no name, so nothing of it is left in /dev/shm, whatever ends a
process, and a container's limit on /dev/shm does not matter.

Each worker has a pipe of its own and they share no lock: one that is killed at any moment leaves
the others as they are, and its end is seen at once.
"""

import contextlib
import io
import mmap
import multiprocessing
import pickle
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch

from bev_lightning.data.process_pool import prepare_worker
from bev_lightning.errors import InputError

# Jobs told to a worker: the one it does, and the next, so that it need not wait for an answer.
_TOLD = 2


class WorkerDiedError(RuntimeError):
    """A worker ended without an answer.

    Attributes:
        job: what it was doing.
        why: how it ended.
    """

    def __init__(self, job: int, why: str) -> None:
        super().__init__(f"a worker process of the loader {why}")
        self.job = job
        self.why = why


class SlotPool:
    """Slots of equal size in memory that forked processes share, and how many hold each.

    Attributes:
        slot_bytes, num_bytes: of a slot, and of all.
    """

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        self.slot_bytes = -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.num_bytes = self.slot_bytes * num_slots
        self._memory = mmap.mmap(-1, max(self.num_bytes, mmap.PAGESIZE))
        self._holders = [0] * num_slots
        self._lock = threading.Lock()
        self._address = np.frombuffer(self._memory, np.uint8).ctypes.data

    def memory(self, slot: int) -> np.ndarray:
        """``(slot_bytes,)`` uint8. The memory lives as long as an array that shows it."""
        return np.frombuffer(self._memory, np.uint8, self.slot_bytes, slot * self.slot_bytes)

    def take(self) -> int | None:
        """A free slot, now held once; None where there is none."""
        with self._lock:
            if 0 not in self._holders:
                return None
            slot = self._holders.index(0)
            self._holders[slot] = 1
            return slot

    def share(self, slot: int) -> None:
        """One more holds a slot, who must release it too."""
        with self._lock:
            if not self._holders[slot]:
                raise RuntimeError(f"slot {slot} is free: only who holds it may share it")
            self._holders[slot] += 1

    def release(self, slot: int) -> None:
        """One holder less; without any the slot is free."""
        with self._lock:
            if not self._holders[slot]:
                raise RuntimeError(f"slot {slot} is free already")
            self._holders[slot] -= 1

    def pin(self) -> bool:
        """Page-lock the memory for CUDA; whether that worked. After the workers have forked."""
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
    told: list[tuple[int, int]] = field(default_factory=list)  # job, slot; the oldest is being done


class WorkerPool:
    """The answers to jobs, in the order of their numbers.

    ``next`` gives a slot, which the caller then holds, and what ``work`` returned.

    Attributes:
        num_restarts: workers that were killed and replaced.
    """

    def __init__(
        self,
        work: Callable[[int, int], Any],
        jobs: range,
        num_workers: int,
        pool: SlotPool,
        restart: bool = False,
    ) -> None:
        """Fork the workers.

        Args:
            work: of a job's number and the slot to write into; an InputError it raises is handed
                on.
            jobs: their numbers.
            num_workers: processes; 0 works in this one, when the answer is asked for.
            pool: how far the workers may run ahead.
            restart: replace a worker that was killed, once for each job.
        """
        self.num_restarts = 0
        self._work, self._jobs, self._pool, self._restart = work, jobs, pool, restart
        self._next = self._untold = jobs.start
        self._answers: dict[int, tuple[int, Any]] = {}
        self._casualties: set[int] = set()
        self._workers: list[_Worker] = []
        self._end: Exception | None = None
        self._lock = threading.Lock()  # of a thread that waits and one that closes
        for _ in range(min(num_workers, len(jobs))):
            self._start()
        self._is_parallel = bool(self._workers)
        self._tell()

    def __iter__(self) -> "WorkerPool":
        return self

    def __next__(self) -> tuple[int, Any]:
        """Raises:
        StopIteration: past the last job, or closed.
        InputError: that of the job.
        WorkerDiedError: a worker was killed.
        """
        job = self._next
        if job >= self._jobs.stop:
            raise StopIteration
        if not self._is_parallel:
            slot = self._pool.take()
            if slot is None:
                raise RuntimeError("all slots are held: release one before the next is asked for")
            self._answers[job] = slot, _try(self._work, job, slot)
        while job not in self._answers:
            with self._lock:
                if self._end is not None:
                    raise self._end
                self._tell()
                self._listen(timeout_s=0.05)
        slot, result = self._answers.pop(job)
        self._next += 1
        with self._lock:
            self._tell()
        if isinstance(result, BaseException):
            self._pool.release(slot)
            raise result
        return slot, result

    def is_ready(self) -> bool:
        """Whether the next answer is there already."""
        if self._is_parallel and self._next < self._jobs.stop:
            with self._lock:
                self._listen(timeout_s=0.0)
        return self._next in self._answers

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

    def _start(self) -> _Worker:
        # Forked, for they share the memory and what the loader has in hand. They touch no CUDA.
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        others = [worker.connection for worker in self._workers]
        process = context.Process(
            target=_serve, args=(self._work, theirs, [ours, *others]), daemon=True
        )
        process.start()
        theirs.close()
        worker = _Worker(process, ours)
        self._workers.append(worker)
        return worker

    def _tell(self) -> None:
        while self._untold < self._jobs.stop and self._workers:
            worker = min(self._workers, key=lambda one: len(one.told))
            slot = None if len(worker.told) >= _TOLD else self._pool.take()
            if slot is None:
                return
            self._send(worker, self._untold, slot)
            self._untold += 1

    def _send(self, worker: _Worker, job: int, slot: int) -> None:
        worker.told.append((job, slot))
        with contextlib.suppress(OSError):  # it is dead, which shows when it is listened to
            worker.connection.send((job, slot))

    def _listen(self, timeout_s: float) -> None:
        busy = {worker.connection: worker for worker in self._workers if worker.told}
        for connection in wait(list(busy), timeout_s):
            assert isinstance(connection, Connection)
            worker = busy[connection]
            try:
                result = connection.recv()
            except (EOFError, OSError):
                self._bury(worker)
                continue
            job, slot = worker.told.pop(0)
            self._answers[job] = slot, result

    def _bury(self, worker: _Worker) -> None:
        """Hand the jobs of a dead worker to a new one, or tell of its end."""
        self._workers.remove(worker)
        worker.process.join(2)
        code = worker.process.exitcode
        why = (
            f"was killed (signal {-code})" if code and code < 0 else f"ended with exit code {code}"
        )
        (job, _), *_ = worker.told
        if not self._restart or job in self._casualties:
            self._end = WorkerDiedError(job, why)
            raise self._end
        self._casualties.add(job)
        self.num_restarts += 1
        successor = self._start()
        for told in worker.told:
            self._send(successor, *told)


class _Pickler(pickle.Pickler):
    """Tensors as the arrays that they show: torch's own way opens a file for each."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.from_numpy, (value.numpy(),)
        return NotImplemented


def _serve(
    work: Callable[[int, int], Any], connection: Connection, inherited: Sequence[Connection]
) -> None:
    """A worker's life. It ends with the process that started it: its pipe then is at its end."""
    prepare_worker(0)
    for other in inherited:
        other.close()
    while True:
        try:
            job = connection.recv()
            buffer = io.BytesIO()
            _Pickler(buffer, protocol=5).dump(_try(work, *job))
            connection.send_bytes(buffer.getbuffer())
        except (EOFError, OSError):
            return


def _try(work: Callable[[int, int], Any], job: int, slot: int) -> Any:
    """The result, or the exception that it ended with."""
    try:
        return work(job, slot)
    except InputError as error:
        return InputError(str(error))
    except Exception:
        return RuntimeError(f"a loader failed:\n{traceback.format_exc()}")
