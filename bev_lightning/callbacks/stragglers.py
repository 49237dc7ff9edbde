"""Names the process that the others of a run wait for."""

import json
import os
import re
import socket
import sys
import threading
import time
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

import lightning as L
import torch.distributed as dist

# What torch, gloo and NCCL say where another process did not come.
_LOST = re.compile(
    r"timed out|time-?out|connection (was )?(closed|reset|refused)|broken pipe|recvvalue failed"
    r"|connectfullmesh|clients joined|nccl|gloo",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Sign:
    """A sign of life.

    Attributes:
        beat: grows as long as the process lives.
        count: marks that it has passed; the same number at the same place in every process.
        place: what it is at.
        step: optimizer steps that it has done.
        host, pid: where it runs.
    """

    beat: int = 0
    count: int = 0
    place: str = "starting"
    step: int = 0
    host: str = ""
    pid: int = 0


class StragglerMonitor(L.Callback):
    """Every process leaves signs of life in the store through which they found each other.

    Who meets a broken or late collective reads them: a process whose signs have ended is gone, one
    that lives and is behind the others is what they wait for. The first process says so by itself
    after half of the time-out, because NCCL ends a process at the time-out without a word.

    A process that scores, while the others wait for the result, is not late.

    Args:
        collective_s: time after which a collective fails [s].
        interval_s: between two signs [s].
    """

    def __init__(self, collective_s: float, interval_s: float = 1.0) -> None:
        self.collective_s = collective_s
        self.interval_s = interval_s
        self._sign = Sign(host=socket.gethostname(), pid=os.getpid())
        self._store: Any = None
        self._origin: Any = None
        self._children: list[Any] = []
        self._rank, self._world_size = 0, 1
        self._seen: dict[int, tuple[Sign, float, float]] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if trainer.world_size == 1 or not dist.is_initialized():
            return
        # Until here the longer or shorter time of the start has held.
        # Torch 2.11 has it under a private name alone.
        set_timeout = getattr(dist, "set_timeout", dist.distributed_c10d._set_pg_timeout)
        set_timeout(timedelta(seconds=self.collective_s))
        self._rank, self._world_size = trainer.global_rank, trainer.world_size
        self._children = getattr(trainer.strategy.launcher, "procs", [])
        # Its own connection, for a thread of its own; the original serves those of all processes.
        self._origin = dist.distributed_c10d._get_default_store()
        store = self._origin.clone()
        store.set_timeout(timedelta(seconds=max(2.0, 2 * self.interval_s)))
        self._store = dist.PrefixStore("bev_lightning/watch", store)
        self._seen, self._ended = {}, threading.Event()
        threading.Thread(
            target=self._beat, args=(self._ended,), name="signs of life", daemon=True
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
        """One sentence for an error of communication that names who is missing; None for any
        other error. Takes a few seconds."""
        lost = isinstance(error, (RuntimeError, dist.DistError)) and _LOST.search(str(error))
        if not lost:
            return None
        reason = str(error).strip().splitlines()[0][:200]
        if self._store is None:
            place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            return (
                f"the processes of this run have not found each other ({reason}); see that every "
                f"machine has started its own, that they all reach {place}, and set "
                "GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME to the network between them, or raise "
                "cluster.rendezvous_s"
            )
        deadline = time.monotonic() + 6 * self.interval_s
        guilty = None
        while time.monotonic() < deadline:
            if not self._read():
                return (
                    f"process 0 is gone ({reason}; the store that it keeps does not answer); look "
                    "at its log for an exception and at dmesg on its machine for the kernel's "
                    "out-of-memory killer, then go on with resume=auto"
                )
            guilty = self._find_dead()
            if guilty is not None:
                break
            time.sleep(self.interval_s / 2)
        if guilty is not None:
            return (
                f"process {guilty[0]} ({_where(guilty[1])}) is gone ({reason}); look at its log "
                "for an exception and at dmesg on its machine for the kernel's out-of-memory "
                "killer, then go on with resume=auto"
            )
        late = self._find_late()
        if late is not None:
            return f"{self._tell_late(*late)} ({reason})"
        return (
            f"all {self._world_size} processes live but have lost touch ({reason}); look at the "
            "network between their machines, then go on with resume=auto"
        )

    def _mark(self, trainer: L.Trainer, place: str) -> None:
        sign = self._sign
        self._sign = replace(sign, count=sign.count + 1, place=place, step=trainer.global_step)

    def _beat(self, ended: threading.Event) -> None:
        warned = -1
        beat = 0
        while True:
            beat += 1
            try:
                content = json.dumps(asdict(replace(self._sign, beat=beat)))
                self._store.set(str(self._rank), content)
                if self._rank == 0:
                    self._read()
                    late = self._find_late()
                    if late and late[2] > self.collective_s / 2 and warned != late[1].count:
                        warned = late[1].count
                        print(f"bev_lightning: {self._tell_late(*late)}", file=sys.stderr)
            except (RuntimeError, dist.DistError):
                return  # the store's process is gone: the next collective tells
            if ended.wait(self.interval_s):
                return

    def _read(self) -> bool:
        """Take note of all signs; False where the store does not answer."""
        try:
            keys = [str(rank) for rank in range(self._world_size)]
            known = [(int(key), self._store.get(key)) for key in keys if self._store.check([key])]
        except (RuntimeError, dist.DistError):
            return False
        now = time.monotonic()
        with self._lock:
            for rank, content in known:
                sign = Sign(**json.loads(content))
                before = self._seen.get(rank)
                if before is None:
                    self._seen[rank] = (sign, now, now)
                elif before[0].beat != sign.beat:
                    moved = now if sign.count != before[0].count else before[2]
                    self._seen[rank] = (sign, now, moved)
        return True

    def _find_dead(self) -> tuple[int, Sign] | None:
        """A process without a sign for some intervals; of several the first to go, for whom the
        others may have ended."""
        now = time.monotonic()
        with self._lock:
            seen = dict(self._seen)
        for index, child in enumerate(self._children):
            if child.poll():  # Lightning ends this process, too, in a moment
                rank = self._rank + 1 + index
                return rank, seen[rank][0] if rank in seen else Sign()
        silent = [
            (sign.beat, rank, sign)
            for rank, (sign, beaten, _) in seen.items()
            if rank != self._rank and now - beaten > 3.5 * self.interval_s
        ]
        return min(silent, key=lambda one: one[:2])[1:] if silent else None

    def _find_late(self) -> tuple[int, Sign, float] | None:
        """The process that is behind the others, and for how long it has stood there [s]."""
        with self._lock:
            seen = dict(self._seen)
        if len({sign.count for sign, _, _ in seen.values()}) < 2:
            return None
        rank, (sign, _, moved) = min(seen.items(), key=lambda item: item[1][0].count)
        if sign.place == "scoring":
            return None
        return rank, sign, time.monotonic() - moved

    def _tell_late(self, rank: int, sign: Sign, seconds: float) -> str:
        return (
            f"process {rank} ({_where(sign)}) has been {sign.place} after optimizer step "
            f"{sign.step} for {seconds:.0f} s while the others wait for it, at most "
            f"{self.collective_s:g} s; look there with py-spy dump --pid {sign.pid}, at the "
            "disk of data.root and at the card, or raise cluster.collective_s"
        )


def _where(sign: Sign) -> str:
    return f"pid {sign.pid} on {sign.host}"
