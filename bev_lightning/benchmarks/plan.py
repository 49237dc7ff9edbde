"""``bench=plan``: predicted against measured memory of training steps on a CPU."""

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from omegaconf import DictConfig

from bev_lightning.benchmarks.report import Row
from bev_lightning.progress import track

_MIB = 2**20


def measure_plan(cfg: DictConfig, jobs: Sequence[Sequence[str]]) -> tuple[list[Row], list[str]]:
    """Compare the predicted memory of a step with the measured one, for each job.

    Parameters, optimizer state and batch are subtracted. ``allocator_mib`` is the peak of torch's
    allocator, by its profiler; ``resident_mib`` is the growth of the process, which includes
    buffers of the operators' libraries.

    Arguments: see ``conf/bench/plan.yaml``.
    """
    rows = []
    for overrides in track(jobs, "plans", unit="job"):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
            predicted, allocator, resident = fresh.submit(_compare, list(overrides)).result()
        more: dict[str, Any] = {
            "predicted_mib": predicted,
            "allocator_mib": allocator,
            "resident_mib": resident,
            "predicted_over_allocator": predicted / allocator,
            "predicted_over_resident": predicted / resident,
        }
        rows.append(Row(" ".join(overrides), peak_mib=resident, more=more))
    return rows, ["predicted / measured: 1 is exact; below 1 the step took more than predicted"]


def _compare(overrides: list[str]) -> tuple[float, float, float]:
    """Predicted, allocator and resident memory [MiB]; runs in a fresh process."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # measure on the CPU, also on a machine with a GPU
    os.environ["KINETO_LOG_LEVEL"] = "5"  # silences the profiler; read when torch is imported
    import torch

    from bev_lightning.benchmarks.random_batches import make_batch
    from bev_lightning.benchmarks.timing import peak_extra_mib
    from bev_lightning.config.compose import load_config
    from bev_lightning.config.resolve import resolve
    from bev_lightning.hardware.machine import detect_machine
    from bev_lightning.runtime.build import build_module
    from bev_lightning.runtime.fake_step import Case, measure_cases, tensors_of

    torch.set_num_threads(1)
    cfg = resolve(load_config("train", [*overrides, "hardware=cpu"]), detect_machine())
    size = int(cfg.data.batch_size)
    (peak,) = measure_cases(cfg, [Case(size, "32-true")])
    module = build_module(cfg).train()
    batch = make_batch(module.inputs, len(module.classes), size)
    batch_mib = sum(value.untyped_storage().nbytes() for value in tensors_of(batch)) / _MIB
    predicted = peak.total - peak.parameters - peak.optimizer - batch_mib
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True)

    def step() -> None:
        outputs = [value for value in tensors_of(module(batch)) if value.requires_grad]
        torch.stack([value.sum() for value in outputs]).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()  # compiles kernels and allocates the optimizer state
    resident = peak_extra_mib(step)
    assert resident is not None, "resident memory is measured on Linux only"
    return predicted, _allocator_peak(step), resident


def _allocator_peak(step: Any) -> float:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = highest = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        highest = max(highest, now)
    return highest / _MIB
