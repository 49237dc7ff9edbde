"""Measures the memory of a training step on fake tensors, which have shapes but no values.

Quantities that depend on values are assumed: how many voxels a sample fills, which share of a mask
is true. A sum of the outputs replaces matching and losses.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from bev_lightning.hardware.memory import Peak, measure_step
from bev_lightning.models.protocol import SupportsCheckpointing, SupportsFakeForward
from bev_lightning.modules.detection import DetectionModule
from bev_lightning.private_apis import FakeTensorMode, TorchDispatchMode
from bev_lightning.runtime.build import build_module
from bev_lightning.structures import Batch, Cameras, Inputs, Points, Radar

# Share of a mask that is true, where their number decides a shape: the points of a padded cloud
# that lie in the grid.
SHARE_TRUE = 0.75
_DTYPES = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16, "fp8": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """Settings of one measured training step."""

    batch_size: int  # samples of a micro-step
    precision: str  # Lightning's name of it
    checkpointing: bool = False  # recompute activations wherever the model can


def measure_cases(cfg: DictConfig, cases: Iterable[Case]) -> list[Peak]:
    """Peak memory of an optimizer step of one process that holds the whole model."""
    with FakeTensorMode(), AssumedCounts():
        module = build_module(cfg).train()
        for part in module.modules():
            if isinstance(part, SupportsFakeForward):
                part.forward = part.fake_forward  # type: ignore[method-assign]
        return [_measure(module, case) for case in cases]


def _measure(module: DetectionModule, case: Case) -> Peak:
    history = module.inputs.history
    frames = [blank_batch(module.inputs, case.batch_size) for _ in range(1 + history)]
    batch = dataclasses.replace(frames[-1], history=tuple(frames[:-1]))
    dtype = _DTYPES.get(case.precision)

    def loss() -> Tensor:
        with torch.autocast("cpu", dtype) if dtype is not None else nullcontext():
            predictions = module(batch)
        outputs = [value for value in tensors_of(predictions) if value.requires_grad]
        return torch.stack([value.float().sum() for value in outputs]).sum()

    def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        # Fused, as in the training: no copies of the gradients.
        return torch.optim.AdamW(parameters, lr=1e-3, fused=True)

    hooks = []
    if dtype is not None:
        # Norms in float32, as autocast has them on CUDA and not on a CPU.
        norms = [part for part in module.modules() if isinstance(part, nn.LayerNorm)]
        hooks = [n.register_forward_pre_hook(lambda _, given: (given[0].float(),)) for n in norms]
    parts = [part for part in module.modules() if isinstance(part, SupportsCheckpointing)]
    flags = [part.gradient_checkpointing for part in parts]
    for part, flag in zip(parts, flags, strict=True):
        part.gradient_checkpointing = flag or case.checkpointing
    try:
        return measure_step(module, make_optimizer, tensors_of(batch), loss)
    finally:
        for part, flag in zip(parts, flags, strict=True):
            part.gradient_checkpointing = flag
        for hook in hooks:
            hook.remove()


class AssumedCounts(TorchDispatchMode):
    """Replaces operators whose output shape depends on values by assumed sizes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.nonzero.default:
            rows = max(1, int(args[0].numel() * SHARE_TRUE))
            return torch.empty(rows, args[0].dim(), dtype=torch.int64)
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype == torch.bool:
            return False  # trunc_normal_ asks whether it must draw again
        if func is torch.ops.aten.bincount.default:
            return torch.empty(args[2], dtype=torch.int64)
        return func(*args, **(kwargs or {}))


def blank_batch(inputs: Inputs, size: int) -> Batch:
    """A batch of ``size`` samples with the shapes that a model's inputs have, and no values."""
    cameras = points = radar = None
    if inputs.camera is not None:
        num = len(inputs.camera.channels)
        images = torch.empty(size, num, 3, *inputs.camera.size)
        cameras = Cameras(images, torch.empty(size, num, 4, 4))
    if inputs.lidar is not None:
        features = torch.empty(size, inputs.lidar.max_points, 5)
        points = Points(features, torch.empty(size, dtype=torch.int64))
    if inputs.radar is not None:
        features = torch.empty(size, inputs.radar.max_points, 8)
        radar = Radar(features, torch.empty(size, dtype=torch.int64))
    pose = torch.empty(size, 4, 4, dtype=torch.float64)
    return Batch(
        ("sample",) * size,
        ("scene",) * size,
        torch.empty(size, dtype=torch.int64),
        pose,
        pose,
        torch.empty(size, 4, 4),
        torch.empty(size, dtype=torch.bool),
        cameras,
        points,
        radar,
        can_bus=torch.empty(size, 18),
    )


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested dataclasses, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors_of(getattr(value, field.name))
