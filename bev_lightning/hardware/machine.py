"""What a machine has, and the arithmetic of a batch spread over it. Imports no torch."""

import ctypes
import json
import math
import os
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from typing import Any

# Runs in a child process: asking the driver initialises CUDA, after which a process must not fork
# workers that use it. The driver's own view honours CUDA_VISIBLE_DEVICES.
_PROBE = """
import ctypes, json
cuda, cards, value, device = ctypes.CDLL("libcuda.so.1"), [], ctypes.c_int(), ctypes.c_int()
total, name = ctypes.c_size_t(), ctypes.create_string_buffer(256)
def attribute(number):
    cuda.cuDeviceGetAttribute(ctypes.byref(value), number, device)
    return value.value
if cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(value)) == 0:
    for index in range(value.value):
        cuda.cuDeviceGet(ctypes.byref(device), index)
        cuda.cuDeviceGetName(name, 256, device)
        cuda.cuDeviceTotalMem_v2(ctypes.byref(total), device)
        # compute capability, major and minor
        cards.append([name.value.decode(), total.value / 2**30, attribute(75) + attribute(76) / 10])
print(json.dumps(cards))
"""


@dataclass(frozen=True)
class Machine:
    """One node, as this process may use it.

    Attributes:
        num_cuda_devices: visible CUDA devices.
        card: name of the first one; None without any.
        memory_gib: memory of the smallest card [GiB].
        capability: lowest CUDA compute capability, such as 8.6.
        num_cpus: cores this process may run on.
        cpu_memory_gib: memory of the host [GiB].
        cpu: the processor's name.
    """

    num_cuda_devices: int = 0
    card: str | None = None
    memory_gib: float | None = None
    capability: float | None = None
    num_cpus: int = 1
    cpu_memory_gib: float | None = None
    cpu: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        if self.num_cuda_devices == 0:
            return f"{self.num_cpus} CPU cores, no CUDA device"
        cards = f"{self.num_cuda_devices} x {self.card} ({self.memory_gib:.0f} GiB)"
        return f"{cards}, {self.num_cpus} CPU cores"


def detect_machine() -> Machine:
    """Look at this machine. Takes milliseconds without CUDA, well under a second with it."""
    cards = _cuda_cards()
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Machine(
        num_cuda_devices=len(cards),
        card=cards[0][0] if cards else None,
        memory_gib=round(min(card[1] for card in cards), 2) if cards else None,
        capability=min(card[2] for card in cards) if cards else None,
        num_cpus=cpus or 1,
        cpu_memory_gib=_cpu_memory_gib(),
        cpu=platform.processor() or platform.machine(),
    )


@dataclass(frozen=True)
class BatchPlan:
    """How one optimizer step's samples come together.

    Attributes:
        num_processes: training processes over all nodes.
        batch_size: samples per process and micro-step.
        accumulation: micro-steps per optimizer step.
    """

    num_processes: int
    batch_size: int
    accumulation: int

    @property
    def effective_batch(self) -> int:
        """Samples behind one optimizer step."""
        return self.num_processes * self.batch_size * self.accumulation

    def scale_lr(self, lr: float, rule: str | None, base_batch: int | None) -> float:
        """The learning rate for this batch, of one that was meant for ``base_batch`` samples a
        step: in proportion (``linear``), to the square root (``sqrt``), or as it is (None)."""
        if rule is None or base_batch is None:
            return lr
        ratio = self.effective_batch / base_batch
        return lr * (ratio if rule == "linear" else math.sqrt(ratio))

    def describe(self, lr: float, rule: str | None, base_batch: int | None) -> str:
        """Batch and learning rate in one line."""
        said = f"{self}; learning rate {self.scale_lr(lr, rule, base_batch):.4g}"
        if rule is not None and base_batch != self.effective_batch:
            ratio = f"{self.effective_batch}/{base_batch}"
            said += f" = {lr:.4g} x {ratio if rule == 'linear' else f'sqrt({ratio})'}"
            said += f" (recipe and its number of steps are made for {base_batch} samples a step)"
        return said

    def split(self) -> list["BatchPlan"]:
        """All plans with as many samples per optimizer step on as many processes, the largest
        micro-step first."""
        samples = self.batch_size * self.accumulation
        return [
            replace(self, batch_size=size, accumulation=samples // size)
            for size in range(samples, 0, -1)
            if samples % size == 0
        ]

    def __str__(self) -> str:
        return (
            f"{self.effective_batch} samples per optimizer step = {self.num_processes} "
            f"process{'' if self.num_processes == 1 else 'es'} x {self.batch_size} x "
            f"{self.accumulation} accumulated"
        )


def choose_num_workers(num_cpus: int, num_local_processes: int, on_cuda: bool) -> int:
    """Loader processes for each training process of a node.

    Beside a card the training process needs one core and the rest load; on a CPU the training
    itself wants the cores, so that a quarter of them loads.
    """
    share = num_cpus / num_local_processes
    return max(1, min(8, int(share) - 1)) if on_cuda else max(1, min(4, int(share / 4)))


def choose_num_threads(num_cpus: int, num_local_processes: int, num_workers: int) -> int:
    """Threads of torch for each training process that runs on the CPU.

    Half of its loader processes get a core: beside a training on a CPU they rest most of the time.
    """
    return max(1, num_cpus // num_local_processes - num_workers // 2)


def _cuda_cards() -> list[tuple[str, float, float]]:
    """Name, memory [GiB] and compute capability of each visible card."""
    if not sys.platform.startswith("linux"):
        return []
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    probe = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _PROBE],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if probe.returncode != 0:
        return []
    return [(str(name), float(gib), float(cap)) for name, gib, cap in json.loads(probe.stdout)]


def _cpu_memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError, AttributeError):
        return None
