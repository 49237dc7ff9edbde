"""Time and memory of a function, medians of interleaved repetitions."""

import ctypes
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from bev_lightning.progress import track


@dataclass(frozen=True)
class Timing:
    """Medians of one call.

    Attributes:
        ms: on the wall [ms].
        cpu_ms: of this process's cores, all threads together [ms]. On a shared machine it is the
            steadier of the two.
    """

    ms: float
    cpu_ms: float


def time_all(
    functions: Mapping[str, Callable[[], object]], repeats: int = 5, what: str = "measuring"
) -> dict[str, Timing]:
    """Time functions in turn, so that a change of the machine's load meets all of them alike.

    Each is called once before, which compiles what is compiled on first use. On CUDA a call ends
    when the device has finished.
    """
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    for _ in track(range(repeats), what, unit="repeat"):
        for name, function in functions.items():
            samples[name].append(_time(function))
    return {
        name: Timing(*(statistics.median(column) for column in zip(*taken, strict=True)))
        for name, taken in samples.items()
    }


class PeakMemory:
    """Memory at its worst between :meth:`reset` and :meth:`read`, beyond what was taken before.

    On CUDA that of torch's allocator; else the process's resident memory, whose high-water mark
    Linux can set anew.
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
            # What was freed goes back to the system first; what reuses it would look free.
            ctypes.CDLL("libc.so.6").malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")
            self._before = _resident_kib("VmRSS") / 1024
        except OSError:
            self._before = None

    def read(self) -> float | None:
        """[MiB]; None where nobody counts it."""
        if self._before is None:
            return None
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated() / 2**20 - self._before
        return _resident_kib("VmHWM") / 1024 - self._before


def peak_extra_mib(function: Callable[[], object]) -> float | None:
    """Memory that a call takes at its worst, see :class:`PeakMemory` [MiB]."""
    memory = PeakMemory()
    memory.reset()
    function()
    return memory.read()


def _time(function: Callable[[], object]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - wall) * 1e3, (time.process_time() - cpu) * 1e3


def _resident_kib(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))
