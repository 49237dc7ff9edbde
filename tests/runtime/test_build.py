"""Values that a constructor refuses leave as one sentence."""

from pathlib import Path

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, StepLR

from bev_lightning.benchmarks.random_batches import make_batch
from bev_lightning.config.compose import compose_job, load_config
from bev_lightning.config.resolve import resolve
from bev_lightning.config.validate import check_config
from bev_lightning.errors import InputError
from bev_lightning.hardware.machine import Machine
from bev_lightning.runtime.build import build_module, prepare_execution


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.lr=inf", "^optim.lr=inf must be a positive number"),
        ("scheduler.start_factor=-1", "^scheduler.start_factor=-1 must be a number of at least 0"),
        ("loss_norm=mean", "^loss_norm=mean is unknown; use loss_norm=batch or effective"),
        ("scheduler.warmup=2", "^scheduler.warmup=2 is a share of all steps"),
        ("model.inputs.camera.size=[96]", "under model.inputs.camera do not fit: .* height, width"),
        ("model.network.head.grid.cell=[1.7,1.6]", "model.network.head.grid do not fit: .*divide"),
        ("optim.multipliers={foo:1}", "^optim.multipliers has foo, which matches no parameter"),
    ],
)
def test_the_sentence_names_the_key(override: str, message: str) -> None:
    cfg = resolve(load_config("train", ["hardware=cpu", override]), Machine(num_cpus=2))
    with pytest.raises(InputError, match=message):
        build_module(cfg)


def test_channels_last_changes_only_the_memory_layout() -> None:
    terms, modules = [], []
    for layout in ("false", "true"):
        overrides = ["hardware=cpu", "model=bevfusion_toy", f"channels_last={layout}"]
        cfg = resolve(
            load_config("train", [*overrides, "model.inputs.camera.size=[64,128]"]), Machine()
        )
        module = build_module(cfg)
        prepare_execution(module, cfg)
        batch = make_batch(module.inputs, num_classes=10, num_boxes=5)
        terms.append(module.loss(module(batch), batch.targets))
        modules.append(module)
    torch.testing.assert_close(terms[0], terms[1], rtol=1e-3, atol=1e-4)
    plain, laid = (dict(module.named_parameters()) for module in modules)
    assert list(plain) == list(laid)
    weight = laid["network.backbone.blocks.0.0.weight"]
    assert weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()
    assert all(torch.equal(plain[name], laid[name]) for name in plain)


def test_regions_need_a_network_that_lists_them() -> None:
    cfg = resolve(load_config("train", ["hardware=cpu", "compile=regions"]), Machine(num_cpus=2))
    module = build_module(cfg)
    module.network = torch.nn.Identity()
    with pytest.raises(InputError, match="compile=regions needs .* dense_regions, which Identity"):
        prepare_execution(module, cfg)


def test_the_learning_rate_is_scaled_once() -> None:
    overrides = ["hardware=cpu", "optim.lr=2e-4", "optim.scale_lr=sqrt", "optim.base_batch=8"]
    cfg = resolve(load_config("train", [*overrides, "data.batch_size=2"]), Machine(num_cpus=2))
    module = build_module(cfg)
    assert module.optim is not None and module.optim.lr == pytest.approx(1e-4)
    assert module.optim.scale_lr is None


@pytest.mark.parametrize("optim", ["adamw_cosine", "adamw_onecycle"])
def test_optimizer_and_schedule_are_built_from_their_groups(optim: str) -> None:
    cfg = resolve(load_config("train", ["hardware=cpu", f"optim={optim}"]), Machine(num_cpus=2))
    module = build_module(cfg)
    assert module.optim is not None
    optimizer, schedule = module.optim.build(module.named_parameters(), 10)
    assert type(optimizer) is torch.optim.AdamW and isinstance(schedule, LambdaLR)
    assert cfg.scheduler.shape == optim.removeprefix("adamw_")
    # Tuples and names as in the checkpoints of earlier versions.
    assert optimizer.defaults["betas"] == ((0.9, 0.999) if "cosine" in optim else (0.9, 0.99))
    assert optimizer.defaults["fused"] and schedule.state_dict()["lr_lambdas"] == [None, None]


def test_an_optimizer_and_a_schedule_of_torch_are_configured_by_their_target(
    tmp_path: Path,
) -> None:
    files = {
        "optim/sgd.yaml": "{_target_: torch.optim.SGD, _partial_: true, lr: 0.5, momentum: 0.9}",
        "scheduler/step.yaml": "{_target_: torch.optim.lr_scheduler.StepLR, _partial_: true, "
        "step_size: 2}",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(content)
    overrides = ["hardware=cpu", "optim=sgd", "scheduler=step"]
    composed = compose_job("train", overrides, str(tmp_path)).cfg
    check_config(composed)
    module = build_module(resolve(composed, Machine(num_cpus=2)))
    assert module.optim is not None
    optimizer, schedule = module.optim.build(module.named_parameters(), 10)
    assert type(optimizer) is torch.optim.SGD and isinstance(schedule, StepLR)
    assert [group["momentum"] for group in optimizer.param_groups] == [0.9, 0.9]
