"""Exchanges heartbeats between processes, and names the one that the others wait for."""

import json
import os
import re
import socket
import sys
import threading
import time
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from itertools import count
from typing import Any

import lightning as L
import torch.distributed as dist

from bev_lightning.private_apis import rendezvous_store, set_collective_timeout

# Error messages of torch, gloo and NCCL when another process is missing.
_LOST = re.compile(
    r"timed out|time-?out|connection (was )?(closed|reset|refused)|broken pipe|recvvalue failed"
    r"|connectfullmesh|clients joined|nccl|gloo",
    re.IGNORECASE,
)
_CAUSES = (
    "look for an exception in its log and for the out-of-memory killer in its machine's dmesg, "
    "then go on with resume=auto"
)


@dataclass(frozen=True)
class Heartbeat:
    """State of one process, written to the shared store at regular intervals.

    Attributes:
        beat: increases as long as the process is alive.
        count: phases that it has entered; equal in all processes at the same point of the training.
        phase: what it is doing.
        step: optimizer steps done.
        host, pid: where it runs.
    """

    beat: int = 0
    count: int = 0
    phase: str = "starting"
    step: int = 0
    host: str = ""
    pid: int = 0


class StragglerMonitor(L.Callback):
    """Writes heartbeats to the store of the process group.

    On a failed or slow collective, each rank reads these heartbeats: a process whose heartbeats
    have stopped is dead; one that is alive and behind the others is the straggler. Rank 0 also
    reports a straggler after half of the timeout, because NCCL kills a process at the timeout
    without a message.

    A process that computes scores, while the others wait for the result, is no straggler.

    Args:
        collective_s: timeout of a collective [s].
        interval_s: time between two heartbeats [s].
    """

    def __init__(self, collective_s: float, interval_s: float = 1.0) -> None:
        self.collective_s = collective_s
        self.interval_s = interval_s
        self._heartbeat = Heartbeat(host=socket.gethostname(), pid=os.getpid())
        self._store: Any = None
        self._origin: Any = None
        self._children: list[Any] = []
        self._rank, self._world_size = 0, 1
        self._seen: dict[int, tuple[Heartbeat, float, float]] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if trainer.world_size == 1 or not dist.is_initialized():
            return
        # The timeout of the rendezvous has applied until here.
        set_collective_timeout(timedelta(seconds=self.collective_s))
        self._rank, self._world_size = trainer.global_rank, trainer.world_size
        self._children = getattr(trainer.strategy.launcher, "procs", [])
        # The thread needs its own connection; the original one serves all processes.
        self._origin = rendezvous_store()
        store = self._origin.clone()
        store.set_timeout(timedelta(seconds=max(2.0, 2 * self.interval_s)))
        self._store = dist.PrefixStore("bev_lightning/heartbeats", store)
        self._seen, self._ended = {}, threading.Event()
        threading.Thread(
            target=self._beat, args=(self._ended,), name="heartbeats", daemon=True
        ).start()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._ended.set()

    def on_train_start(self, trainer: L.Trainer, *args: Any) -> None:
        self._mark(trainer, "reading its next batch")

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        self._mark(trainer, "computing the loss")

    def on_before_backward(self, trainer: L.Trainer, *args: Any) -> None:
        self._mark(trainer, "computing and exchanging gradients")

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self._mark(trainer, "reading its next batch")

    def on_validation_batch_start(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        self._mark(trainer, "predicting a validation batch")

    def on_validation_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        self._mark(trainer, "reading its next validation batch")

    def on_validation_epoch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self._mark(trainer, "scoring")

    def on_validation_end(self, trainer: L.Trainer, *args: Any) -> None:
        self._mark(trainer, "reading its next batch")

    def explain(self, error: BaseException) -> str | None:
        """One sentence that names the missing or slow process, for a communication error; None for
        any other error. Takes a few seconds."""
        lost = isinstance(error, (RuntimeError, dist.DistError)) and _LOST.search(str(error))
        if not lost:
            return None
        reason = str(error).strip().splitlines()[0][:200]
        if self._store is None:
            address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            return (
                f"the processes of this run have not found each other ({reason}); check that each "
                f"machine started its own and reaches {address}, set GLOO_SOCKET_IFNAME or "
                "NCCL_SOCKET_IFNAME, or raise cluster.rendezvous_s"
            )
        deadline = time.monotonic() + 6 * self.interval_s
        while time.monotonic() < deadline:
            if not self._read():
                return f"process 0 is gone ({reason}; its store does not answer); {_CAUSES}"
            if (dead := self._find_dead()) is not None:
                return f"process {dead[0]} ({_where(dead[1])}) is gone ({reason}); {_CAUSES}"
            time.sleep(self.interval_s / 2)
        late = self._find_late()
        if late is not None:
            return f"{self._describe_late(*late)} ({reason})"
        return (
            f"all {self._world_size} processes are alive but have lost their connection "
            f"({reason}); check the network between their machines, then go on with resume=auto"
        )

    def _mark(self, trainer: L.Trainer, phase: str) -> None:
        num_phases = self._heartbeat.count + 1
        self._heartbeat = replace(
            self._heartbeat, count=num_phases, phase=phase, step=trainer.global_step
        )

    def _beat(self, ended: threading.Event) -> None:
        warned = -1
        for beat in count(1):
            try:
                heartbeat = replace(self._heartbeat, beat=beat)
                self._store.set(str(self._rank), json.dumps(asdict(heartbeat)))
                if self._rank == 0:
                    self._read()
                    late = self._find_late()
                    if late and late[2] > self.collective_s / 2 and warned != late[1].count:
                        warned = late[1].count
                        print(f"bev_lightning: {self._describe_late(*late)}", file=sys.stderr)
            except (RuntimeError, dist.DistError):
                return  # the store's process is gone: the next collective fails
            if ended.wait(self.interval_s):
                return

    def _read(self) -> bool:
        """Read all heartbeats; False if the store does not answer."""
        try:
            keys = [str(rank) for rank in range(self._world_size)]
            known = [(int(key), self._store.get(key)) for key in keys if self._store.check([key])]
        except (RuntimeError, dist.DistError):
            return False
        now = time.monotonic()
        with self._lock:
            for rank, content in known:
                heartbeat = Heartbeat(**json.loads(content))
                before = self._seen.get(rank)
                if before is None:
                    self._seen[rank] = (heartbeat, now, now)
                elif before[0].beat != heartbeat.beat:
                    moved = now if heartbeat.count != before[0].count else before[2]
                    self._seen[rank] = (heartbeat, now, moved)
        return True

    def _find_dead(self) -> tuple[int, Heartbeat] | None:
        """A process without a heartbeat for some intervals; of several the first to stop, which may
        have caused the others to end."""
        now = time.monotonic()
        with self._lock:
            seen = dict(self._seen)
        for index, child in enumerate(self._children):
            if child.poll():  # Lightning ends this process, too, in a moment
                rank = self._rank + 1 + index
                return rank, seen[rank][0] if rank in seen else Heartbeat()
        silent = [
            (heartbeat.beat, rank, heartbeat)
            for rank, (heartbeat, beaten, _) in seen.items()
            if rank != self._rank and now - beaten > 3.5 * self.interval_s
        ]
        return min(silent, key=lambda one: one[:2])[1:] if silent else None

    def _find_late(self) -> tuple[int, Heartbeat, float] | None:
        """The process that is behind the others, and how long it has been in its phase [s]."""
        with self._lock:
            seen = dict(self._seen)
        if len({heartbeat.count for heartbeat, _, _ in seen.values()}) < 2:
            return None
        rank, (heartbeat, _, moved) = min(seen.items(), key=lambda item: item[1][0].count)
        if heartbeat.phase == "scoring":
            return None
        return rank, heartbeat, time.monotonic() - moved

    def _describe_late(self, rank: int, heartbeat: Heartbeat, seconds: float) -> str:
        return (
            f"process {rank} ({_where(heartbeat)}) has been {heartbeat.phase} after optimizer step "
            f"{heartbeat.step} for {seconds:.0f} s while the others wait for it, at most "
            f"{self.collective_s:g} s; run py-spy dump --pid {heartbeat.pid} there, or raise "
            "cluster.collective_s"
        )


def _where(heartbeat: Heartbeat) -> str:
    return f"pid {heartbeat.pid} on {heartbeat.host}"
