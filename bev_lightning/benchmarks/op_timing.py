"""Times implementations of an operator: forward alone, or forward and backward."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from bev_lightning.benchmarks.report import Row
from bev_lightning.benchmarks.timing import peak_extra_mib, time_all

Forward = Callable[[], Tensor]


def measure_forward(
    group: str,
    functions: Mapping[str, Callable[[], object]],
    repeats: int,
    counted: Mapping[str, float],
) -> list[Row]:
    """Time several implementations without gradient; arguments as :func:`measure_backward`."""
    rows = []
    for name, timing in time_all(functions, repeats, group).items():
        peak_mib = peak_extra_mib(functions[name])
        more: dict[str, float | str | None] = {**counted}
        rows.append(Row(name, group, timing.ms, timing.cpu_ms, peak_mib=peak_mib, more=more))
    return rows


def measure_backward(
    group: str,
    functions: Mapping[str, Forward],
    leaves: Sequence[Tensor],
    grad: Tensor,
    repeats: int,
    counted: Mapping[str, float],
) -> list[Row]:
    """Time forward plus backward of several implementations.

    Args:
        group: name of the group of rows.
        functions: forward pass of each implementation, by name; the first is the baseline.
        leaves: tensors whose gradients are computed.
        grad: gradient of the output.
        repeats: timed calls, whose median is reported.
        counted: further columns, the same for all rows.
    """
    results_mib = 4.0 * (grad.numel() + sum(leaf.numel() for leaf in leaves)) / 2**20
    rows = []
    # Not interleaved: otherwise one pays for returning the memory that another has freed.
    for name, function in functions.items():
        forward_ms: list[float] = []

        def step(forward: Forward = function, forward_ms: list[float] = forward_ms) -> None:
            start = time.process_time()
            out = forward()
            if out.is_cuda:
                torch.cuda.synchronize()
            forward_ms.append(1e3 * (time.process_time() - start))
            torch.autograd.grad(out, leaves, grad)

        timing = time_all({name: step}, repeats, f"{group}, {name}")[name]
        forward_cpu_ms = statistics.median(forward_ms[1:])
        peak_mib = peak_extra_mib(step)
        # Output and gradients are part of the peak.
        extra_mib = None if peak_mib is None else max(0.0, peak_mib - results_mib)
        row = Row(name, group, timing.ms, timing.cpu_ms, peak_mib=peak_mib)
        row.more.update({"forward_cpu_ms": forward_cpu_ms, "extra_mib": extra_mib, **counted})
        rows.append(row)
    return rows
