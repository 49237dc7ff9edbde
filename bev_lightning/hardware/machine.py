"""Detects GPUs, CPU cores and memory of this machine, without importing torch."""

import ctypes
import json
import os
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Any

# Runs in a child process: a query of the driver initialises CUDA, and a process must not fork
# workers after that. The driver respects CUDA_VISIBLE_DEVICES.
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
    """The resources of one node that this process may use.

    Attributes:
        num_cuda_devices: visible CUDA devices.
        card: name of the first device; None without CUDA.
        memory_gib: memory of the smallest device [GiB].
        capability: lowest CUDA compute capability, such as 8.6.
        num_cpus: CPU cores that this process may run on.
        cpu_memory_gib: memory of the host [GiB].
        cpu: name of the processor.
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
    """Detect this machine: milliseconds without CUDA, well under a second with it."""
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


def choose_num_workers(num_cpus: int, num_local_processes: int, on_cuda: bool) -> int:
    """Number of loader worker processes for each training process of a node.

    Next to a GPU, the training process keeps one core and the others load. On a CPU the training
    itself needs the cores, so a quarter of them load.
    """
    share = num_cpus / num_local_processes
    return max(1, min(8, int(share) - 1)) if on_cuda else max(1, min(4, int(share / 4)))


def choose_num_threads(num_cpus: int, num_local_processes: int, num_workers: int) -> int:
    """Number of torch threads for each training process that runs on the CPU.

    Each loader process is counted as half a core, because it idles most of the time next to a
    training on the CPU.
    """
    return max(1, num_cpus // num_local_processes - num_workers // 2)


def _cuda_cards() -> list[tuple[str, float, float]]:
    """Name, memory [GiB] and compute capability of each visible CUDA device."""
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
