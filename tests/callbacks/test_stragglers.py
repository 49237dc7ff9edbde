"""Who is named when a collective fails."""

import json
import multiprocessing
import os
import re
import signal
import socket
import threading
import time
from dataclasses import asdict
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from bev_lightning.callbacks.stragglers import Heartbeat, StragglerMonitor

CLOSED = RuntimeError("[/pytorch/gloo/pair.cc:534] Connection closed by peer [10.0.0.3]:29612")
LATE = RuntimeError("[unbound_buffer.cc:81] Timed out waiting 120000ms for recv operation")


def watch(rank: int = 0, world_size: int = 3) -> StragglerMonitor:
    one = StragglerMonitor(120.0, interval_s=0.05)
    one._store, one._rank, one._world_size = dist.HashStore(), rank, world_size
    return one


def sign(store: dist.Store, rank: int, **values) -> None:
    store.set(str(rank), json.dumps(asdict(Heartbeat(host=f"ws{rank}", pid=40 + rank, **values))))


class Living(threading.Thread):
    """Heartbeats of processes that live."""

    def __init__(self, store: dist.Store, signs: dict[int, dict]) -> None:
        super().__init__(daemon=True)
        self.store, self.signs, self.ended = store, signs, threading.Event()

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, *error) -> None:
        self.ended.set()
        self.join()

    def run(self) -> None:
        beat = 100
        while not self.ended.wait(0.02):
            beat += 1
            for rank, values in self.signs.items():
                sign(self.store, rank, beat=beat, **values)


def test_a_process_without_heartbeats_is_gone() -> None:
    one = watch()
    sign(one._store, 2, beat=7, count=31, phase="computing the loss", step=10)
    with Living(one._store, {0: {"count": 32}, 1: {"count": 32}}):
        said = one.explain(CLOSED)
    assert said.startswith("process 2 (pid 42 on ws2) is gone ([/pytorch/gloo/pair.cc:534]")
    assert "dmesg" in said and "resume=auto" in said


def test_a_process_behind_the_others_is_named() -> None:
    one = watch(rank=2)
    signs = {0: {"count": 32}, 2: {"count": 32}}
    signs[1] = {"count": 30, "phase": "reading its next batch", "step": 10}
    with Living(one._store, signs):
        said = one.explain(LATE)
    assert re.match(
        r"process 1 \(pid 41 on ws1\) has been reading its next batch after optimizer step 10 for "
        r"\d s while the others wait for it, at most 120 s; run py-spy dump --pid 41 there",
        said,
    )
    signs[1]["phase"] = "scoring"
    with Living(one._store, signs):
        assert "all 3 processes are alive but have lost their connection" in one.explain(LATE)


def test_the_start_and_other_errors() -> None:
    one = StragglerMonitor(120.0)
    late = RuntimeError("Timed out after 601 seconds waiting for clients. 1/2 clients joined.")
    assert "have not found each other (Timed out after 601" in one.explain(late)
    assert "cluster.rendezvous_s" in one.explain(late)
    assert one.explain(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None
    assert one.explain(ValueError("timed out")) is None


@pytest.mark.parametrize("code", [-9, 1])
def test_lightnings_child_is_named_at_once(code: int) -> None:
    class Child:
        def poll(self) -> int:
            return code

    one = watch(world_size=2)
    one._children = [Child()]
    sign(one._store, 1, beat=7)
    assert one.explain(CLOSED).startswith("process 1 (pid 41 on ws1) is gone")


def take_part(rank: int, port: int, dies: bool, said) -> None:
    """One of two processes that are to add up their gradients; the second one does not come."""
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=120),
    )
    dist.all_reduce(torch.ones(1))
    one = StragglerMonitor(3.0, interval_s=0.2)
    launcher = SimpleNamespace(launcher=None)
    trainer = SimpleNamespace(world_size=2, global_rank=rank, global_step=5, strategy=launcher)
    one.setup(trainer, None, "fit")
    one.on_train_batch_start(trainer)
    if rank == 1:
        time.sleep(1.0)
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(300)
    one.on_before_backward(trainer)
    began = time.monotonic()
    try:
        dist.all_reduce(torch.ones(4))
    except RuntimeError as error:
        said.send((one.explain(error), time.monotonic() - began))
    os._exit(0)


@pytest.mark.parametrize("dies", [True, False])
def test_gloo_s_errors_are_told(dies: bool) -> None:
    context = multiprocessing.get_context("fork")
    heard, said = context.Pipe(duplex=False)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    members = [
        context.Process(target=take_part, args=(rank, port, dies, said), daemon=True)
        for rank in range(2)
    ]
    for member in members:
        member.start()
    assert heard.poll(200), "nobody said anything"
    sentence, seconds = heard.recv()
    for member in members:
        member.kill()
    pid = members[1].pid
    if dies:
        assert re.match(rf"process 1 \(pid {pid} on \S+\) is gone \(", sentence), sentence
    else:
        # The collective's own time-out, and some seconds to be sure.
        assert seconds < 60
        late = rf"process 1 \(pid {pid} on \S+\) has been computing the loss after optimizer step 5"
        assert re.match(late, sentence), sentence
