"""Compiled networks: no break in a region, the same numbers, the same names."""

import copy
from collections.abc import Callable

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import nn

from bev_lightning.benchmarks.random_batches import make_batch
from bev_lightning.config.compose import load_config
from bev_lightning.errors import InputError
from bev_lightning.hardware.compilation import check_compiler, compile_network
from bev_lightning.losses.bevfusion import BEVFusionLoss
from bev_lightning.losses.transfusion import TransFusionLoss
from bev_lightning.models.heads import TransFusionHead
from bev_lightning.models.image import ResNet
from bev_lightning.models.swin import Swin
from bev_lightning.modules.detection import DetectionModule

# Fewer layers than the toys have: a break shows in one.
SMALL = {
    "bevformer_toy": ["model.inputs.camera.size=[64,128]", "model.network.head.num_queries=20"],
    "bevfusion_toy": ["model.inputs.camera.size=[64,128]", "model.inputs.lidar.max_points=3000"],
    "bevfusion_lidar_toy": ["model.inputs.lidar.max_points=3000"],
}


def make_module(name: str) -> DetectionModule:
    cfg = load_config("train", [f"model={name}", "hardware=cpu", *SMALL[name]])
    model = OmegaConf.to_container(cfg.model, resolve=True)
    model["evaluator"] = None
    torch.manual_seed(0)
    module = instantiate(model, _convert_="all")
    if name == "bevfusion_lidar_toy":
        grid = module.network.head.codec.grid
        module.network.head = TransFusionHead(grid, 96, num_queries=20, dropout=0.0)
        module.loss = BEVFusionLoss(TransFusionLoss())
    return module


def take_step(module: DetectionModule) -> tuple[torch.Tensor, list[torch.Tensor]]:
    batch = make_batch(module.inputs, num_classes=10, num_boxes=5)
    torch.manual_seed(1)  # of what denoising disturbs
    loss = torch.stack(list(module.compute_loss(module(batch), batch).values())).sum()
    loss.backward()
    return loss.detach(), [value.grad for value in module.parameters()]


@pytest.mark.parametrize("name", list(SMALL))
def test_regions_compile_without_a_break(name: str) -> None:
    plain, compiled = make_module(name), make_module(name)
    # aot_eager traces forward and backward and then runs the operators themselves.
    compile_network(compiled.network, "regions", backend="aot_eager", fullgraph=True)
    assert list(compiled.state_dict()) == list(plain.state_dict())
    torch._dynamo.reset()
    (loss, grads), (expected, wanted) = take_step(compiled), take_step(plain)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    scale = max(float(grad.abs().max()) for grad in wanted)
    for grad, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad, want, rtol=0.0, atol=1e-5 * scale)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 3


def test_a_whole_model_compiles_with_breaks() -> None:
    plain, compiled = make_module("bevfusion_lidar_toy"), make_module("bevfusion_lidar_toy")
    compile_network(compiled.network, "model", backend="eager")
    torch.testing.assert_close(take_step(compiled)[0], take_step(plain)[0], rtol=1e-5, atol=1e-5)
    assert list(compiled.state_dict()) == list(plain.state_dict())


@pytest.mark.parametrize(
    "backbone",
    [
        lambda: Swin(width=12, depths=(2, 1), num_heads=(1, 2), out_stages=(0, 1), drop_path=0.0),
        lambda: ResNet(50, width=4, out_stages=(1, 2), deformable_stages=(2,), norm_eval=True),
    ],
)
def test_published_backbones_compile_without_a_break(backbone: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    plain = backbone()
    compiled = copy.deepcopy(plain)
    compiled.compile(backend="aot_eager", fullgraph=True)
    images = torch.randn(1, 3, 64, 96)
    results = []
    for network in (plain, compiled):
        maps = network(images)
        torch.stack([one.square().mean() for one in maps]).sum().backward()
        weight = next(network.parameters())
        results.append([*maps, weight.grad])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_machines_that_cannot_compile_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_compiler(True, 8.0)
    with pytest.raises(InputError, match=r"7.0 or more and this one has 6.1; use compile=off"):
        check_compiler(True, 6.1)
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(InputError, match=r"install g\+\+, or use compile=off"):
        check_compiler(False, None)
