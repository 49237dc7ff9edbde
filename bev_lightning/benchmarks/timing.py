"""Measures time and memory of functions, and the copy and matrix-product rates of a machine."""

import ctypes
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from bev_lightning.progress import track

COPY_MIB = 256
# Rows and columns of the matrices in measure_matmul.
MATMUL_SIZE = {"cuda": 8192, "cpu": 1024}


@dataclass(frozen=True)
class Timing:
    """Median times of a call.

    Attributes:
        ms: wall time [ms].
        cpu_ms: CPU time of all threads of this process [ms], the steadier of the two on a shared
            machine.
    """

    ms: float
    cpu_ms: float


def time_all(
    functions: Mapping[str, Callable[[], object]], repeats: int = 5, description: str = "measuring"
) -> dict[str, Timing]:
    """Time functions in turn, so that a change of the machine's load affects all of them alike.

    Each is called once before, so that compilation on first use is not timed. On CUDA a call ends
    when the device has finished.

    Args:
        functions: by name.
        repeats: timed calls, whose median is reported.
        description: of the progress bar.
    """
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    for _ in track(range(repeats), description, unit="repeat"):
        for name, function in functions.items():
            samples[name].append(_time(function))
    return {
        name: Timing(*(statistics.median(column) for column in zip(*times, strict=True)))
        for name, times in samples.items()
    }


class PeakMemory:
    """Peak memory between :meth:`reset` and :meth:`read`, minus the memory in use at the reset.

    On CUDA of torch's allocator; otherwise the process's resident memory, whose high-water mark
    Linux can reset.
    """

    def __init__(self) -> None:
        self._before: float | None = None

    def reset(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            self._before = torch.cuda.memory_allocated() / 2**20
            torch.cuda.reset_peak_memory_stats()
            return
        try:
            # Return freed memory to the system first; its reuse would not count as growth.
            ctypes.CDLL("libc.so.6").malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")
            self._before = _resident_kib("VmRSS") / 1024
        except OSError:
            self._before = None

    def read(self) -> float | None:
        """Peak memory [MiB]; None where the system does not report it."""
        if self._before is None:
            return None
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated() / 2**20 - self._before
        return _resident_kib("VmHWM") / 1024 - self._before


def peak_extra_mib(function: Callable[[], object]) -> float | None:
    """Peak memory of a call, see :class:`PeakMemory` [MiB]."""
    memory = PeakMemory()
    memory.reset()
    function()
    return memory.read()


def measure_copy(device: torch.device) -> float:
    """Memory bandwidth of a large copy, reads plus writes [B/s]."""
    source = torch.ones(COPY_MIB * 2**18, device=device)
    target = torch.empty_like(source)
    seconds = time_all({"": lambda: target.copy_(source)})[""].ms / 1e3
    return 2 * COPY_MIB * 2**20 / seconds


def measure_matmul(device: torch.device, dtype: torch.dtype) -> float:
    """Rate of a large square matrix product [FLOP/s]."""
    size = MATMUL_SIZE[device.type]
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / (time_all({"": lambda: left @ right})[""].ms / 1e3)


def _time(function: Callable[[], object]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - wall) * 1e3, (time.process_time() - cpu) * 1e3


def _resident_kib(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))
