"""Is the plan right? A step's memory as told beforehand and as taken."""

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from omegaconf import DictConfig

from bev_lightning.benchmarks.report import Row
from bev_lightning.progress import track

_MIB = 2**20


def measure(cfg: DictConfig, jobs: Sequence[Sequence[str]]) -> tuple[list[Row], list[str]]:
    """What a step takes beyond weights and the optimizer's memory, for each job.

    ``allocator`` is what torch asked for, as its profiler saw it; ``resident`` the growth of the
    process, which holds what the operators' libraries take for themselves too.
    """
    rows = []
    for words in track(jobs, "plans", unit="job"):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
            told, allocator, resident = fresh.submit(_compare, list(words)).result()
        more: dict[str, Any] = {
            "told_mib": told,
            "allocator_mib": allocator,
            "resident_mib": resident,
            "told_of_allocator": told / allocator,
            "told_of_resident": told / resident,
        }
        rows.append(Row(" ".join(words), peak_mib=resident, more=more))
    return rows, ["told / taken: 1 is exact, below 1 the step took more than was told"]


def _compare(words: list[str]) -> tuple[float, float, float]:
    """In a process of its own: told, by the allocator, resident [MiB]."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a step on the CPU, whatever else is there
    os.environ["KINETO_LOG_LEVEL"] = "5"  # the profiler's own talk, read when torch is loaded
    import torch

    from bev_lightning.benchmarks.random_batches import make_batch
    from bev_lightning.benchmarks.timing import peak_extra_mib
    from bev_lightning.config.compose import load_config
    from bev_lightning.config.resolve import resolve
    from bev_lightning.hardware.machine import detect_machine
    from bev_lightning.runtime.build import build_module
    from bev_lightning.runtime.fake_step import Case, measure_cases, tensors_of

    torch.set_num_threads(1)
    cfg = resolve(load_config("train", [*words, "hardware=cpu"]), detect_machine())
    size = int(cfg.data.batch_size)
    (peak,) = measure_cases(cfg, [Case(size, "32-true")])
    module = build_module(cfg).train()
    batch = make_batch(module.inputs, len(module.classes), size)
    held = sum(value.untyped_storage().nbytes() for value in tensors_of(batch)) / _MIB
    told = peak.total - peak.parameters - peak.optimizer - held
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True)

    def step() -> None:
        outputs = [value for value in tensors_of(module(batch)) if value.requires_grad]
        torch.stack([value.sum() for value in outputs]).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()  # compiles what is compiled on first use, makes the optimizer's memory
    resident = peak_extra_mib(step)
    assert resident is not None, "resident memory is counted on Linux alone"
    return told, _allocator_peak(step), resident


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
