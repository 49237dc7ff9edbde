"""Times implementations of an operator: forward alone, or forward and backward."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from bev_lightning.benchmarks.report import Row
from bev_lightning.benchmarks.timing import peak_extra_mib, time_all
from bev_lightning.ops.backend import use_reference

T = TypeVar("T")
Forward = Callable[[], Tensor]


def by_reference(function: Callable[[], T]) -> T:
    """Call a function with all operators on their reference."""
    with use_reference():
        return function()


def measure_forward(
    group: str,
    functions: Mapping[str, Callable[[], object]],
    repeats: int,
    counted: Mapping[str, float],
) -> list[Row]:
    """Time several implementations without gradient; arguments as :func:`measure_backward`."""
    timings = time_all(functions, repeats, group)
    return [
        Row(
            name=name,
            group=group,
            ms=timings[name].ms,
            cpu_ms=timings[name].cpu_ms,
            peak_mib=peak_extra_mib(function),
            more=dict(counted),
        )
        for name, function in functions.items()
    ]


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
    forward_ms: dict[str, list[float]] = {name: [] for name in functions}

    def make_step(name: str, function: Forward) -> Callable[[], object]:
        def step() -> None:
            start = time.process_time()
            out = function()
            if out.is_cuda:
                torch.cuda.synchronize()
            forward_ms[name].append(1e3 * (time.process_time() - start))
            torch.autograd.grad(out, leaves, grad)

        return step

    steps = {name: make_step(name, function) for name, function in functions.items()}
    # Not interleaved: otherwise one pays for returning the memory that another has freed.
    timings = {
        name: time_all({name: step}, repeats, f"{group}, {name}")[name]
        for name, step in steps.items()
    }
    results_mib = 4.0 * (grad.numel() + sum(leaf.numel() for leaf in leaves)) / 2**20
    forward = {name: statistics.median(values[1:]) for name, values in forward_ms.items()}
    rows = []
    for name, step in steps.items():
        peak_mib = peak_extra_mib(step)
        # Output and gradients are part of the peak.
        extra_mib = None if peak_mib is None else max(0.0, peak_mib - results_mib)
        rows.append(
            Row(
                name=name,
                group=group,
                ms=timings[name].ms,
                cpu_ms=timings[name].cpu_ms,
                peak_mib=peak_mib,
                more={"forward_cpu_ms": forward[name], "extra_mib": extra_mib, **counted},
            )
        )
    return rows
