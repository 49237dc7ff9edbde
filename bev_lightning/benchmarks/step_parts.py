"""Times single parts of a network, with the inputs recorded in a training step."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from bev_lightning.benchmarks.report import Row
from bev_lightning.benchmarks.timing import Timing, peak_extra_mib, time_all
from bev_lightning.modules.detection import DetectionModule
from bev_lightning.ops.backend import use_reference
from bev_lightning.runtime.fake_step import tensors_of
from bev_lightning.structures import Batch

# Submodules that use operators of bev_lightning.ops, by name, in any network.
_PARTS = ("encoder", "head", "camera.lift", "lidar")
_Context = Callable[[], AbstractContextManager[Any]]


def measure_parts(
    module: DetectionModule, batch: Batch, context: _Context, repeats: int, on_cuda: bool
) -> list[Row]:
    """Rows of forward plus backward of each part, with reference and fast operators.

    Args:
        module: the detector.
        batch: a batch on the module's device.
        context: the precision plugin's forward context.
        repeats: timed calls, whose median is reported.
        on_cuda: whether to leave out CPU times.
    """
    rows = []
    known = dict(module.network.named_modules())
    parts = {name: known[name] for name in _PARTS if name in known}
    for name, given in _record(module, parts, batch, context).items():
        run = _isolate(parts[name], given, context)
        functions = {"reference": use_reference()(run), "fast": run}
        for kind, spent in time_all(functions, repeats, name).items():
            cpu_ms = None if on_cuda else spent.cpu_ms
            peak_mib = peak_extra_mib(functions[kind])
            rows.append(Row(kind, name, spent.ms, cpu_ms, peak_mib=peak_mib))
    module.zero_grad()
    return rows


def measure_matching(
    module: DetectionModule, batch: Batch, context: _Context, repeats: int
) -> Timing | None:
    """Time of matching predictions to boxes; None for a head without matching.

    Covers the costs, their copy to the host, the assignments of all layers and samples, and their
    copy back.
    """
    criterion: Any = module.loss
    match = getattr(getattr(criterion, "detection", criterion), "match", None)
    if match is None:
        return None
    with torch.no_grad(), context():
        predictions = module.train()(batch)
    predictions = getattr(predictions, "detections", predictions)
    return time_all({"": lambda: match(predictions, batch.targets).finish()}, repeats)[""]


def _record(
    module: DetectionModule, parts: dict[str, nn.Module], batch: Batch, context: _Context
) -> dict[str, Any]:
    """The arguments of each part in a forward pass of the module.

    Of several calls the last one counts, which is that of the current frame.
    """
    seen: dict[nn.Module, Any] = {}
    hooks = [
        part.register_forward_pre_hook(
            lambda part, *given: seen.update({part: given}), with_kwargs=True
        )
        for part in parts.values()
    ]
    with torch.no_grad(), context():
        module.train()(batch)
    for hook in hooks:
        hook.remove()
    return {name: seen[part] for name, part in parts.items()}


def _isolate(part: nn.Module, given: Any, context: _Context) -> Callable[[], None]:
    """A function that runs forward and backward of a part with given arguments."""
    args, kwargs = _detach(given)

    def run() -> None:
        with context():
            outputs = list(tensors_of(part(*args, **kwargs)))
        torch.stack([out.float().sum() for out in outputs if out.requires_grad]).sum().backward()

    return run


def _detach(value: Any) -> Any:
    """The arguments detached; feature maps become leaves that require gradients."""
    if isinstance(value, Tensor):
        return value.detach().requires_grad_(value.is_floating_point() and value.dim() > 3)
    if type(value) in (list, tuple):
        return type(value)(_detach(item) for item in value)
    if type(value) is dict:
        return {key: _detach(item) for key, item in value.items()}
    return value
