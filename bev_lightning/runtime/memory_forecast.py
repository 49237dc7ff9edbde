"""Forecasts batch, learning rate and peak memory of a training before it starts."""

import math
from dataclasses import dataclass, replace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from bev_lightning.config.resolve import plan_batch, scale_lr
from bev_lightning.config.strategy import name_strategy
from bev_lightning.hardware.batch_plan import BatchPlan
from bev_lightning.hardware.machine import detect_machine
from bev_lightning.hardware.memory import KINDS, Peak
from bev_lightning.runtime.fake_step import Case, measure_cases

# Key frames of the official splits, for a plan on a machine without the data.
_OFFICIAL = {("v1.0-trainval", "train"): 28_130, ("v1.0-mini", "mini_train"): 323}
# Of v1.0-trainval under class-balanced sampling.
_BALANCED = 123_580
# A forecast above this share of the memory is tight: allocators lose some to fragmentation.
_TIGHT = 0.9
_MIB_PER_GIB = 1024


@dataclass(frozen=True)
class Plan:
    """Forecast of a training.

    Attributes:
        batch: samples per optimizer step.
        lr: peak learning rate.
        num_samples: per epoch; None if unknown.
        layout: what each process runs, as a sentence.
        precision: Lightning's name of it.
        peak: peak memory of a process [MiB]; with a sharding strategy that of its shards.
        buckets_mib: copies of the gradients that DDP sends [MiB].
        memory_gib: of the card, or of the host per process; None if unknown.
        reserve_gib: kept free for what is not forecast.
        largest_batch: samples of a micro-step that fit; None if the memory is unknown.
        remedies: total memory after each possible change [MiB].
    """

    batch: BatchPlan
    lr: float
    num_samples: int | None
    layout: str
    precision: str
    peak: Peak
    buckets_mib: float
    memory_gib: float | None
    reserve_gib: float
    largest_batch: int | None
    remedies: dict[str, float]

    @property
    def total_mib(self) -> float:
        """Peak memory of a process without the reserve."""
        return self.peak.total + self.buckets_mib

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps."""
        num = self.num_samples
        return None if num is None else math.ceil(num / self.batch.effective_batch)

    @property
    def verdict(self) -> str:
        """``fits``, ``tight``, ``does not fit``, or ``unknown`` if the memory is unknown."""
        if self.memory_gib is None:
            return "unknown"
        share = self.total_mib / _MIB_PER_GIB + self.reserve_gib
        if share > self.memory_gib:
            return "does not fit"
        return "tight" if share > _TIGHT * self.memory_gib else "fits"

    def to_json(self) -> dict[str, Any]:
        """The plan as plain values."""
        return {
            "effective_batch": self.batch.effective_batch,
            "num_processes": self.batch.num_processes,
            "batch_size": self.batch.batch_size,
            "accumulation": self.batch.accumulation,
            "lr": self.lr,
            "num_samples": self.num_samples,
            "steps_per_epoch": self.steps_per_epoch,
            "layout": self.layout,
            "precision": self.precision,
            "peak_mib": {**self.peak.to_json(), "buckets": round(self.buckets_mib, 1)},
            "total_mib": round(self.total_mib, 1),
            "memory_gib": self.memory_gib,
            "reserve_gib": self.reserve_gib,
            "largest_batch_size": self.largest_batch,
            "remedies_mib": {name: round(mib, 1) for name, mib in self.remedies.items()},
            "verdict": self.verdict,
        }

    def to_line(self) -> str:
        """The memory in one line, which ``train`` prints on a GPU before it starts."""
        memory = "" if self.memory_gib is None else f" of {self.memory_gib:.1f} GiB"
        peak = self.total_mib / _MIB_PER_GIB
        line = f"peak memory of a process: {peak:.2f} GiB{memory}, {self.verdict}"
        if self.verdict == "fits":
            return line
        return line + "; python -m bev_lightning.plan shows what takes less"

    def to_text(self) -> str:
        """The plan as a table."""
        steps = self.steps_per_epoch
        lines = [
            f"{self.batch}, learning rate {self.lr:g}, precision {self.precision}",
            f"optimizer steps per epoch: {steps} ({self.num_samples} samples)"
            if steps is not None
            else "optimizer steps per epoch: unknown; set num_samples=N",
            self.layout,
            "",
            "peak memory per process [MiB]",
        ]
        rows = [(kind, getattr(self.peak, kind)) for kind in KINDS]
        rows += [("buckets", self.buckets_mib)] if self.buckets_mib else []
        lines += [f"  {name:<14}{mib:>10,.0f}" for name, mib in [*rows, ("total", self.total_mib)]]
        if self.memory_gib is not None:
            lines.append(
                f"  {'available':<14}{self.memory_gib * _MIB_PER_GIB:>10,.0f}, of which "
                f"{self.reserve_gib * _MIB_PER_GIB:,.0f} are kept free"
            )
        if self.largest_batch is not None:
            lines += ["", f"largest data.batch_size that fits: {self.largest_batch}"]
        lines += ["", "total after one change [MiB]"] if self.remedies else []
        lines += [
            f"  {name:<48}{mib:>10,.0f}  {mib - self.total_mib:+,.0f}"
            for name, mib in self.remedies.items()
        ]
        return "\n".join([*lines, "", f"verdict: {self.verdict}"])


def make_plan(cfg: DictConfig, compare: bool = True) -> Plan:
    """Forecast a training.

    Args:
        cfg: resolved, of any verb that composes a training.
        compare: also forecast other batch sizes and remedies, which takes seconds each.
    """
    batch = plan_batch(cfg)
    precision = str(cfg.trainer.precision)
    size = batch.batch_size
    cases = {"now": Case(size, precision)}
    if compare:
        cases["larger"] = Case(size + 1, precision)
        cases["gradient_checkpointing=true wherever the model can"] = Case(size, precision, True)
    if compare and precision == "32-true":
        cases["precision=bf16 or 16"] = Case(size, "bf16-mixed")
    if compare and size > 1:
        cases[f"data.batch_size={size // 2}, accumulation doubled"] = Case(size // 2, precision)
    peaks = dict(zip(cases, measure_cases(cfg, cases.values()), strict=True))
    strategy = name_strategy(cfg)
    whole, larger = peaks.pop("now"), peaks.pop("larger", None)
    # DDP copies the gradients of all trained parameters; AdamW stores two numbers for each.
    buckets = whole.optimizer / 2 if strategy == "ddp" and batch.num_processes > 1 else 0.0
    own = _share(whole, strategy, batch.num_processes)
    memory = _memory_gib(cfg)
    remedies = {
        name: _share(peak, strategy, batch.num_processes).total + buckets
        for name, peak in peaks.items()
    }
    if strategy in ("ddp", "single") and batch.num_processes > 1:
        remedies["strategy=fsdp"] = _share(whole, "fsdp", batch.num_processes).total
    largest = None
    if memory is not None and larger is not None:
        each = larger.total - whole.total
        room = (memory - cfg.get("reserve_gib", 1.0)) * _MIB_PER_GIB - own.total - buckets
        largest = max(0, size + int(room // each))
    return Plan(
        batch,
        scale_lr(cfg),
        _num_samples(cfg),
        _layout(strategy, batch.num_processes),
        precision,
        own,
        buckets,
        memory,
        float(cfg.get("reserve_gib", 1.0)),
        largest,
        dict(sorted(remedies.items(), key=lambda item: item[1])),
    )


def _share(peak: Peak, strategy: str, num_processes: int) -> Peak:
    """Peak of one process, with its share of weights, gradients and optimizer state."""
    if strategy != "fsdp":
        return peak
    shares = {k: getattr(peak, k) / num_processes for k in ("parameters", "gradients", "optimizer")}
    return replace(peak, **shares)


def _layout(strategy: str, num_processes: int) -> str:
    if strategy == "single":
        return "one process runs the whole model"
    each = f"each of {num_processes} processes runs the whole model on its own samples"
    if strategy == "ddp":
        return each
    if strategy == "fsdp":
        return f"{each} and keeps 1/{num_processes} of weights, gradients and optimizer state"
    return f"strategy={strategy}: the memory below is that of a process with the whole model"


def _memory_gib(cfg: DictConfig) -> float | None:
    if cfg.trainer.accelerator == "gpu":
        memory = cfg.hardware.memory_gib
        return None if memory is None else float(memory)
    memory = detect_machine().cpu_memory_gib
    return None if memory is None else memory / int(cfg.hardware.devices)


def _num_samples(cfg: DictConfig) -> int | None:
    num_samples = cfg.get("num_samples", "auto")
    if num_samples != "auto":
        return int(num_samples)
    synthetic = OmegaConf.select(cfg, "data.synthetic")
    if synthetic is not None:
        return int(synthetic.num_train_scenes * synthetic.frames_per_scene)
    known = _OFFICIAL.get((str(cfg.data.version), str(cfg.data.train_split)))
    return _BALANCED if known == _OFFICIAL["v1.0-trainval", "train"] and cfg.data.cbgs else known
