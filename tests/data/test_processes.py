"""Workers of a loader outlive the signals that their training is to see."""

import multiprocessing
import os
import signal
import subprocess
import time

from bev_lightning.data.processes import prepare_worker


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
