"""float16, bfloat16 and FP8 training of tiny models on a CPU; operations kept in float32."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import pytest
import torch
from helpers import BatchLoader
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from bev_lightning.hardware.precision import Float8, Float16, fits_fp8, set_tf32
from bev_lightning.losses.centre import CentreLoss
from bev_lightning.losses.set_prediction import SetPredictionLoss
from bev_lightning.models import bev_encoder, bevformer_head, lift
from bev_lightning.models import object_queries as query_start
from bev_lightning.structures import Batch, geometry

Make = Callable[..., Any]
PLUGINS: dict[str, Callable[[], Any]] = {
    "32": lambda: None,
    "bf16": lambda: MixedPrecision("bf16-mixed", "cpu"),
    "16": lambda: Float16("cpu"),
    "16 static": lambda: Float16("cpu", 512),
    "fp8": lambda: Float8("cpu", emulate=True),
    "fp8 rowwise": lambda: Float8("cpu", "rowwise", emulate=True),
}


class Record(L.Callback):
    """The loss of every micro-step."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer, module, outputs, batch, number) -> None:
        self.losses.append(float(outputs["loss"]))


def fit(
    module: L.LightningModule, batches: Sequence[Batch], plugin: Any = None, **arguments: Any
) -> tuple[list[float], L.Trainer]:
    """The loss of every step over a fixed sequence of batches."""
    record = Record()
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[plugin] if plugin else None,
        **{"callbacks": [record], "gradient_clip_val": 10.0, **arguments},
    )
    trainer.fit(module, BatchLoader(batches))
    return record.losses, trainer


@pytest.mark.parametrize("name", ["bevfusion", "bevformer"])
def test_fifty_steps_are_those_of_float32(name: str, make_module: Make, make_batch: Make) -> None:
    batches = [make_batch(seed) for seed in (0, 1)] * 25
    found = {}
    for precision in ("32", "bf16", "16", "16 static"):
        losses, trainer = fit(make_module(name, "optim.lr=1e-3"), batches, PLUGINS[precision]())
        assert len(losses) == 50 and torch.tensor(losses).isfinite().all()
        found[precision] = sum(losses[-10:]) / 10
        if precision.startswith("16"):
            scaler = trainer.precision_plugin.scaler
            assert scaler.num_skipped == 0
            assert scaler.get_scale() == (512.0 if "static" in precision else 4096.0)
    assert losses[-1] < 0.9 * losses[0]
    for precision, loss in found.items():
        assert loss == pytest.approx(found["32"], rel=0.03), (precision, found)


def test_fp16_on_a_cpu_is_fp16(make_module: Make, make_batch: Make) -> None:
    module, seen = make_module("bevfusion"), Counter()
    hook = module.network.backbone.register_forward_hook(
        lambda part, inputs, outputs: seen.update([outputs[0].dtype])
    )
    with pytest.warns(UserWarning, match="precision=16 on a CPU is for tests"):
        plugin = Float16("cpu")
    fit(module, [make_batch(0)], plugin)
    hook.remove()
    assert seen == {torch.float16: 1}


class Overflow(L.Callback):
    """Makes a gradient infinite in some steps and records which steps changed the weights."""

    def __init__(self, steps: set[int]) -> None:
        self.steps = steps
        self.moved: list[bool] = []

    def on_train_batch_start(self, trainer, module, batch, number) -> None:
        self.before = nn.utils.parameters_to_vector(module.parameters()).detach()

    def on_after_backward(self, trainer, module) -> None:
        if trainer.global_step in self.steps:
            next(p for p in module.parameters() if p.grad is not None).grad[0] = torch.inf

    def on_train_batch_end(self, trainer, module, *_: Any) -> None:
        after = nn.utils.parameters_to_vector(module.parameters()).detach()
        assert after.isfinite().all()
        self.moved.append(not torch.equal(self.before, after))


@pytest.mark.parametrize("scale", ["dynamic", 512])
@pytest.mark.parametrize("clip", [None, 10.0])
def test_a_planted_overflow_is_skipped_and_counted(
    scale: Any, clip: float | None, make_module: Make, make_batch: Make
) -> None:
    planted, plugin = Overflow({4, 6}), Float16("cpu", scale)
    batches = [make_batch(0)] * 8
    fit(make_module("bevfusion"), batches, plugin, callbacks=[planted], gradient_clip_val=clip)
    skipped = [step for step, moved in enumerate(planted.moved) if not moved]
    assert skipped == [4, 6]
    assert plugin.scaler.num_skipped == len(skipped)
    after = 512.0 if scale == 512 else 4096.0 / 4
    assert plugin.scaler.get_scale() == after
    again = Float16("cpu", scale)
    again.load_state_dict(plugin.state_dict())
    assert again.scaler.num_skipped == len(skipped) and again.scaler.get_scale() == after


@pytest.mark.parametrize("recipe", ["fp8", "fp8 rowwise"])
def test_fp8_emulated_trains(recipe: str, make_module: Make, make_batch: Make) -> None:
    batches = [make_batch(seed) for seed in (0, 1)] * 5
    plain, _ = fit(make_module("learned", "optim.lr=1e-3"), batches)
    module, plugin = make_module("learned", "optim.lr=1e-3"), PLUGINS[recipe]()
    names = list(module.state_dict())
    losses, _ = fit(module, batches, plugin)
    assert list(module.state_dict()) == names
    assert losses != plain and losses == pytest.approx(plain, rel=0.03)
    # Of the toy's 37 Linear layers those of 3, 8 and 10 outputs and of MultiheadAttention stay.
    assert 0 < plugin.num_converted < plugin.num_linears
    assert plugin.flop_share is not None and 0.1 < plugin.flop_share < 0.9
    assert f"{plugin.num_converted} of {plugin.num_linears} Linear layers" in plugin.describe()


def test_fp8_converts_only_supported_sizes(make_module: Make) -> None:
    assert fits_fp8(nn.Linear(32, 16), "a") and not fits_fp8(nn.Linear(32, 10), "a")
    assert not fits_fp8(nn.Conv2d(16, 16, 1), "a")
    assert not fits_fp8(nn.MultiheadAttention(16, 2).out_proj, "a")
    plugin = Float8("cpu", emulate=True)
    linear = nn.Sequential(nn.Linear(16, 16))
    weight = linear[0].weight
    assert plugin.convert_module(plugin.convert_module(linear))[0].weight is weight
    assert plugin.num_converted == 1
    with pytest.warns(UserWarning, match="nothing runs in FP8; use precision=bf16"):
        plugin.convert_module(nn.Sequential(nn.Linear(3, 3)))


class Dtypes(TorchDispatchMode):
    """Counts the dtypes of floating-point results by operator."""

    def __init__(self, seen: Counter) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            # Views and copies keep the dtype of their input; only computations count.
            passed_on = func.overloadpacket.__name__ in PASSED_ON
            if isinstance(value, Tensor) and value.is_floating_point() and not passed_on:
                self.seen[value.dtype] += 1
        return result


PASSED_ON = ("detach", "alias", "slice", "select", "view", "expand", "unsqueeze", "transpose")
PASSED_ON += ("permute", "split", "split_with_sizes", "unbind", "_unsafe_view", "t", "clone")
# Operations that stay float32: matching, losses, geometry, depth softmax, inverses, positions.
BORDERS: dict[str, tuple[Any, str]] = {
    "project": (geometry, "project"),
    "project in the lift": (lift, "project"),
    "project in the encoder": (bev_encoder, "project"),
    "rotation of the previous map": (bev_encoder, "rotate_map"),
    "rays": (lift.LiftSplat, "_rays"),
    "cells": (lift.LiftSplat, "cells"),
    "depth map": (lift, "depth_map"),
    "boxes": (bevformer_head, "in_float32"),
    "learned positions": (query_start, "in_float32"),
    "loss of the centre head": (CentreLoss, "__call__"),
    "loss of set prediction": (SetPredictionLoss, "__call__"),
    "matching": (SetPredictionLoss, "costs"),
    "inverse": (torch.linalg, "inv"),
    "softmax": (Tensor, "softmax"),
}


@pytest.mark.parametrize("precision", ["bf16", "16", "fp8"])
@pytest.mark.parametrize("name", ["bevfusion", "bevformer", "learned"])
def test_borders_stay_float32(
    name: str,
    precision: str,
    make_module: Make,
    make_batch: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: dict[str, Counter] = defaultdict(Counter)

    def watch(label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            with Dtypes(seen[label]):
                return function(*args, **kwargs)

        return watched

    for label, (owner, attribute) in BORDERS.items():
        monkeypatch.setattr(owner, attribute, watch(label, getattr(owner, attribute)))
    fit(make_module(name), [make_batch(0)], PLUGINS[precision]())
    wrong = {
        label: counted
        for label, counted in seen.items()
        if set(counted) - {torch.float32, torch.float64}
    }
    assert not wrong
    counted = {label for label, dtypes in seen.items() if dtypes}
    common = {"softmax"}
    expected = {
        "bevfusion": {"rays", "cells", "depth map", "loss of the centre head"},
        "bevformer": {
            "project in the encoder",
            "rotation of the previous map",
            "boxes",
            "matching",
        },
        "learned": {
            "project in the encoder",
            "boxes",
            "learned positions",
            "loss of set prediction",
        },
    }
    assert expected[name] | common <= counted, counted


def test_tf32_is_switched() -> None:
    try:
        set_tf32(True)
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.backends.cudnn.allow_tf32
        set_tf32(False)
        assert torch.get_float32_matmul_precision() == "highest"
        assert not torch.backends.cudnn.allow_tf32
    finally:
        set_tf32(False)
