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
    """Destroyed by the collector alone; tells in which process."""

    def __init__(self, told: list[int]) -> None:
        self.itself, self.told = self, told

    def __del__(self) -> None:
        self.told.append(os.getpid())


def collect(pipe, told: list[int]) -> None:
    prepare_worker(0)
    gc.collect()
    pipe.send(told)


def test_a_worker_destroys_nothing_that_it_inherited() -> None:
    """A DALI pipeline would wait for its threads, which were not forked, and with it the loader."""
    told: list[int] = []
    gc.disable()
    try:
        Cycle(told)
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        worker = context.Process(target=collect, args=(theirs, told))
        worker.start()
        assert ours.poll(60) and ours.recv() == []
        worker.join()
    finally:
        gc.enable()
    gc.collect()
    assert told == [os.getpid()]
