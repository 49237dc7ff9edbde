"""``bench=step``: times a training step and its parts, with fast and with reference operators.

The steps run in Lightning's Trainer, with the precision, clipping and optimizer of the
configuration. Steps with fast and with reference operators alternate. On CUDA the whole step is
timed without synchronisation inside, and its parts in separate steps that synchronise in between.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from bev_lightning.benchmarks.random_batches import make_batch
from bev_lightning.benchmarks.report import Row, with_ratios
from bev_lightning.benchmarks.step_parts import measure_matching, measure_parts
from bev_lightning.benchmarks.step_timer import PARTS, StepTimer
from bev_lightning.benchmarks.timing import MATMUL_SIZE, measure_matmul
from bev_lightning.errors import InputError
from bev_lightning.hardware.flops import FlopCounter
from bev_lightning.modules.detection import DetectionModule
from bev_lightning.runtime.build import build_data, build_module, build_trainer, prepare_execution
from bev_lightning.structures import Batch

_DTYPES = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}


@dataclass(frozen=True)
class RepeatedBatch:
    """A loader that yields one batch ``count`` times."""

    batch: Batch
    count: int

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Batch]:
        return (self.batch for _ in range(self.count))


def measure_step(
    cfg: DictConfig, repeats: int, source: Literal["noise", "loader"], num_boxes: int
) -> tuple[list[Row], list[str]]:
    """Rows of the whole step, of the parts with custom operators, and of the matching.

    Arguments: see ``conf/bench/step.yaml``.

    Raises:
        InputError: the source is unknown, or the run spans several processes.
    """
    if source not in ("noise", "loader"):
        raise InputError(f"bench.source={source} is unknown; use bench.source=noise or loader")
    if cfg.trainer.devices * cfg.trainer.num_nodes > 1:
        raise InputError(
            f"bench=step runs in one process, not on hardware.nodes={cfg.trainer.num_nodes} x "
            f"hardware.devices={cfg.trainer.devices}; use hardware.devices=1 hardware.nodes=1"
        )
    cfg = _lean(cfg)
    module = build_module(cfg)
    prepare_execution(module, cfg)
    on_cuda = cfg.trainer.accelerator == "gpu"
    timer = StepTimer(module, on_cuda)
    num_steps = timer.num_kinds * (1 + repeats)
    trainer = build_trainer(
        cfg,
        callbacks=[timer],
        max_steps=num_steps,
        max_epochs=-1,
        accumulate_grad_batches=1,
        limit_val_batches=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    if source == "loader":
        trainer.fit(module, datamodule=build_data(cfg))
    else:
        noise = make_batch(module.inputs, len(module.classes), cfg.data.batch_size, num_boxes)
        trainer.fit(module, RepeatedBatch(noise.pin_memory(), num_steps))
    batch, device = timer.batch, torch.device("cuda" if on_cuda else "cpu")
    assert batch is not None
    module.to(device)  # Lightning has moved it back to the CPU
    flops = count_flops(module, batch)
    rate = measure_matmul(device, _DTYPES.get(cfg.trainer.precision, torch.float32))
    context = trainer.precision_plugin.forward_context
    size = batch.size
    rows = []
    for row in timer.rows():
        seconds = (row.ms or 0.0) / 1e3
        more = row.more | {"tflop": flops / 1e12, "mfu": flops / seconds / rate}
        rows.append(replace(row, samples_per_s=size / seconds, more=more))
    fast: Any = rows[-1]
    rows += measure_parts(module, batch, context, repeats, on_cuda)
    matching = measure_matching(module, batch, context, repeats)
    if matching is not None:
        share = matching.ms / sum(fast.more[f"{part}_ms"] for part in PARTS)
        rows.append(Row("match", "matching", matching.ms, matching.cpu_ms, more={"share": share}))
    conditions = (
        f"{module.network.__class__.__name__}, {size} samples of {source}, precision "
        f"{cfg.trainer.precision}, compile={cfg.compile}, channels_last={cfg.channels_last}; "
        f"medians of {repeats}."
    )
    mfu = (
        f"mfu: the step's {flops / 1e12:.3g} TFLOP (convolutions and matrix products, forward and "
        f"backward) per second over the {rate / 1e12:.3g} TFLOP/s of a matrix product of this "
        f"dtype and {MATMUL_SIZE[device.type]} rows on this machine."
    )
    return with_ratios(rows), [conditions, mfu]


def count_flops(module: DetectionModule, batch: Batch) -> float:
    """FLOPs of convolutions, matrix products and attentions of a forward and backward pass."""
    module.train()
    counter = FlopCounter()
    with torch.compiler.set_stance("force_eager"), counter:
        terms: dict[str, Tensor] = module.loss(module(batch), batch.targets)  # type: ignore[arg-type]
        torch.stack(list(terms.values())).sum().backward()
    module.zero_grad()
    return counter.total


def _lean(cfg: DictConfig) -> DictConfig:
    """The configuration without callbacks, loggers and evaluator, which need optional packages."""
    plain: Any = OmegaConf.to_container(cfg, resolve=True)
    plain["callbacks"], plain["logger"], plain["model"]["evaluator"] = {}, {}, None
    plain["model"]["loss_norm"] = "batch"  # the same for one process without accumulation
    lean = OmegaConf.create(plain)
    assert isinstance(lean, DictConfig)
    return lean
