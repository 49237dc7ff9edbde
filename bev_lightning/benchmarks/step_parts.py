"""Times parts of a network alone, with what they were given in a step."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bev_lightning.benchmarks.report import Row
from bev_lightning.benchmarks.timing import Timing, peak_extra_mib, time_all
from bev_lightning.modules.detection import DetectionModule
from bev_lightning.ops.backend import use_reference
from bev_lightning.structures import Batch

# Where a network's own operators are, of the networks that have them.
_PARTS = ("encoder", "head", "camera.lift", "lidar")
_Context = Callable[[], AbstractContextManager[Any]]


def measure_parts(
    module: DetectionModule, batch: Batch, context: _Context, repeats: int, on_cuda: bool
) -> list[Row]:
    """Forward and backward of each part with operators of its own, on references and fast.

    Args:
        context: of the precision.
    """
    rows = []
    known = dict(module.network.named_modules())
    parts = {name: known[name] for name in _PARTS if name in known}
    for name, given in _record(module, parts, batch, context).items():
        run = _isolate(parts[name], given, context)

        def run_reference(run: Callable[[], None] = run) -> None:
            with use_reference():
                run()

        times = time_all({"reference": run_reference, "fast": run}, repeats, name)
        for kind, function in (("reference", run_reference), ("fast", run)):
            spent = times[kind]
            cpu_ms = None if on_cuda else spent.cpu_ms
            rows.append(Row(kind, name, spent.ms, cpu_ms, peak_mib=peak_extra_mib(function)))
    module.zero_grad()
    return rows


def measure_matching(
    module: DetectionModule, batch: Batch, context: _Context, repeats: int
) -> Timing | None:
    """Costs, their way to the host, the assignment of all layers and samples, and its way back;
    None of a head that matches nothing."""
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
    """The arguments of each part in a forward pass of the module; of several calls, those of the
    last: it is that of the current frame."""
    seen: dict[str, Any] = {}

    def make_hook(name: str) -> Callable[..., None]:
        return lambda _, *given: seen.update({name: given})

    hooks = [
        part.register_forward_pre_hook(make_hook(name), with_kwargs=True)
        for name, part in parts.items()
    ]
    with torch.no_grad(), context():
        module.train()(batch)
    for hook in hooks:
        hook.remove()
    return {name: seen[name] for name in parts}


def _isolate(part: nn.Module, given: Any, context: _Context) -> Callable[[], None]:
    """Forward and backward of ``part`` with given arguments."""
    args, kwargs = _cut(given)

    def run() -> None:
        with context():
            outputs = list(_tensors(part(*args, **kwargs)))
        torch.stack([out.float().sum() for out in outputs if out.requires_grad]).sum().backward()

    return run


def _cut(value: Any) -> Any:
    """The same arguments as leaves that take gradients, where a map comes from before."""
    if isinstance(value, Tensor):
        return value.detach().requires_grad_(value.is_floating_point() and value.dim() > 3)
    if type(value) in (list, tuple):
        return type(value)(_cut(item) for item in value)
    if type(value) is dict:
        return {key: _cut(item) for key, item in value.items()}
    return value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))
