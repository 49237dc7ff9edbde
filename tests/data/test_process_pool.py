"""Workers of a loader: which signals end them, and what they leave alone."""

import gc
import multiprocessing
import os
import signal
import subprocess
import time

from bev_lightning.data.process_pool import prepare_worker


def work(ready) -> None:
    prepare_worker(0)
    ready.set()
    time.sleep(60)


def test_only_its_parent_ends_a_worker() -> None:
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    worker = context.Process(target=work, args=(ready,), daemon=True)
    worker.start()
    assert ready.wait(60) and worker.pid is not None
    for number in (signal.SIGINT, signal.SIGUSR1):
        os.kill(worker.pid, number)
    subprocess.run(["kill", "-TERM", str(worker.pid)], check=True)  # of another process
    worker.join(0.5)
    assert worker.is_alive()
    worker.terminate()
    worker.join(60)
    assert worker.exitcode == 0


class Cycle:
    """A reference cycle; records the process in which it is collected."""

    def __init__(self, deleted_in: list[int]) -> None:
        self.itself, self.deleted_in = self, deleted_in

    def __del__(self) -> None:
        self.deleted_in.append(os.getpid())


def collect(pipe, deleted_in: list[int]) -> None:
    prepare_worker(0)
    gc.collect()
    pipe.send(deleted_in)


def test_a_worker_destroys_nothing_that_it_inherited() -> None:
    """A DALI pipeline would wait for its threads, which were not forked, and with it the loader."""
    deleted_in: list[int] = []
    gc.disable()
    try:
        Cycle(deleted_in)
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        worker = context.Process(target=collect, args=(theirs, deleted_in))
        worker.start()
        assert ours.poll(60) and ours.recv() == []
        worker.join()
    finally:
        gc.enable()
    gc.collect()
    assert deleted_in == [os.getpid()]
