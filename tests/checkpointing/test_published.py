"""The published configurations at full size: built, run forward and backward without memory,
counted.

Numbers that depend on data are given: how many voxels each stage of the sparse encoder has,
and which share of a mask is true.
"""

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from bev_lightning.config.compose import load_config
from bev_lightning.config.resolve import plan_batch, resolve
from bev_lightning.config.validate import check_config
from bev_lightning.hardware.machine import Machine
from bev_lightning.models.bev_encoder import PreviousBev
from bev_lightning.models.bevformer import BEVFormer
from bev_lightning.runtime.fake_step import AssumedCounts, blank_batch, tensors_of
from bev_lightning.structures import Batch, Boxes3D, Cameras, Points, Radar

ROOT = Path(__file__).resolve().parent.parent.parent
MODELS = sorted(
    path.stem for path in (ROOT / "conf/model").glob("*.yaml") if not path.stem.startswith("_")
)
FULL_SIZE = [name for name in MODELS if not name.endswith("_toy")]


def make_network(name: str) -> tuple[nn.Module, Any]:
    cfg = load_config("train", [f"model={name}", "hardware=cpu"])
    node = OmegaConf.to_container(cfg.model, resolve=True)
    return instantiate(node["network"], _convert_="all"), instantiate(
        node["inputs"], _convert_="all"
    )


@pytest.mark.parametrize("name", FULL_SIZE)
def test_full_size_runs_forward_and_backward(name: str) -> None:
    with FakeTensorMode(), AssumedCounts():
        network, inputs = make_network(name)
        if getattr(network, "lidar", None) is not None:
            network.lidar.forward = network.lidar.fake_forward
        batch = blank_batch(inputs, 1)
        if isinstance(network, BEVFormer):
            encoder = network.encoder
            bev = torch.empty(1, encoder.channels, *encoder.grid.shape)
            predictions = network(batch, PreviousBev(bev, batch.has_previous))
        else:
            predictions = network(batch)
        tensors = [value for value in tensors_of(predictions) if value.requires_grad]
        torch.stack([value.sum() for value in tensors]).sum().backward()
    if name.startswith("bevfusion"):
        assert predictions.detections.heatmap.shape == (1, 10, 180, 180)
        assert predictions.detections.code.shape == (1, 1, 200, 10)
    else:
        assert predictions.queries.logits.shape == (6, 1, 900, 10)
        side = {"bevformer_base": 200, "bevformer_small": 150, "bevformer_tiny": 50}[name]
        assert predictions.bev.shape == (1, 256, side, side)
    without = [
        parameter
        for parameter, value in network.named_parameters()
        if value.requires_grad and value.grad is None
    ]
    assert without == []


def test_the_document_counts_the_parameters_of_every_model() -> None:
    text = (ROOT / "docs/models.md").read_text()
    predicted = dict(re.findall(r"^\| `(\w+)` \| ([\d.]+) M \|", text, re.M))
    assert sorted(predicted) == FULL_SIZE
    counted = {}
    for name in FULL_SIZE:
        with torch.device("meta"):
            network, _ = make_network(name)
        counted[name] = sum(parameter.numel() for parameter in network.parameters())
    assert {name: f"{number / 1e6:.2f}" for name, number in counted.items()} == predicted
    assert abs(counted["bevformer_base"] - 69e6) < 0.01 * 69e6


@pytest.mark.parametrize("name", [name for name in FULL_SIZE if name.startswith("bevfusion")])
def test_every_set_of_sensors_has_a_toy_and_a_target_range(name: str) -> None:
    full, toy = (
        load_config("train", [f"model={one}", "hardware=cpu"]) for one in (name, f"{name}_toy")
    )
    for sensor in ("camera", "lidar", "radar"):
        assert (full.model.inputs.get(sensor) is None) == (toy.model.inputs.get(sensor) is None)
    for cfg in (full, toy):
        has_lidar = cfg.model.inputs.get("lidar") is not None
        grid = cfg.model.network.head.grid
        assert cfg.data.target_range == (None if has_lidar else grid.range)


def test_a_camera_model_learns_boxes_of_its_range() -> None:
    cfg = load_config("train", ["model=bevformer_tiny", "hardware=cpu"])
    assert cfg.data.target_range == [-51.2, -51.2, -5.0, 51.2, 51.2, 3.0]
    cfg = load_config("train", ["model=bevformer_tiny", "hardware=cpu", "data.target_range=null"])
    assert cfg.data.target_range is None


def test_every_experiment_composes() -> None:
    paths = sorted((ROOT / "conf/experiment").glob("*.yaml"))
    assert len(paths) > 10
    for path in paths:
        check_config(load_config("train", [f"experiment={path.stem}"]))


@pytest.mark.parametrize(
    "name",
    [
        path.stem
        for path in sorted((ROOT / "conf/experiment").glob("*.yaml"))
        if re.match(r"bevformer_(base|small|tiny)|bevfusion_(lidar|fusion)", path.stem)
        and "toy" not in path.stem
    ],
)
def test_the_published_recipes(name: str) -> None:
    text = " ".join((ROOT / f"conf/experiment/{name}.yaml").read_text().replace("#", "").split())
    assert "mAP" in text and "NDS" in text and "have not run it in full" in text
    batch = re.search(r"effective batch:? (?:of )?(\d+)", text)
    cfg = load_config("train", [f"experiment={name}"])
    assert batch and int(batch[1]) == cfg.optim.base_batch and cfg.optim.scale_lr == "sqrt"
    # Samples seen, and an epoch between validations, do not depend on the cards.
    epochs, samples = (
        (24, 28_130)
        if name.startswith("bevformer")
        else ((20, 123_580) if name.startswith("bevfusion_lidar") else (6, 123_580))
    )
    assert cfg.trainer.max_steps == epochs * -(-samples // int(batch[1]))
    assert abs(cfg.trainer.val_check_interval * int(batch[1]) / samples - 1) < 1e-3
    if name.endswith("_4x24gib"):
        plan = plan_batch(resolve(cfg, Machine(4, "RTX 3090", 24.0, 8.6)))
        assert cfg.hardware.memory_gib == 24 and plan.num_processes == 4
        assert plan.effective_batch == int(batch[1])


def look_around(num_cameras: int, size: tuple[int, int]) -> Tensor:
    """``image_from_lidar`` ``(N, 4, 4)`` of cameras that look outwards all around."""
    matrices = []
    for number in range(num_cameras):
        yaw = 2 * math.pi * number / num_cameras
        cos, sin = math.cos(yaw), math.sin(yaw)
        camera_from_lidar = torch.eye(4)
        camera_from_lidar[:3, :3] = torch.tensor([[sin, -cos, 0], [0, 0, -1.0], [cos, sin, 0]])
        image_from_camera = torch.eye(4)
        focal = 0.8 * size[1]
        image_from_camera[:2, :3] = torch.tensor([[focal, 0, size[1] / 2], [0, focal, size[0] / 2]])
        matrices.append(image_from_camera @ camera_from_lidar)
    return torch.stack(matrices)


def fill(batch: Batch) -> Batch:
    """Real values: noise in the images, a street of points, returns and boxes."""
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    cameras, points, radar = batch.cameras, batch.points, batch.radar
    if cameras is not None:
        size, num, _, height, width = cameras.images.shape
        matrix = look_around(num, (height, width)).expand(size, -1, -1, -1)
        cameras = Cameras(noise(*cameras.images.shape) - 0.5, matrix)
    if points is not None:
        size = points.features.shape[0]
        low, extent = torch.tensor([-30.0, -30, -3, 0, 0]), torch.tensor([60.0, 60, 4, 255, 0.5])
        points = Points(low + extent * noise(size, 3000, 5), torch.full((size,), 3000))
    if radar is not None:
        size = radar.features.shape[0]
        features = 60 * noise(size, 100, 8) - 30
        features[..., 2], features[..., 7] = 0.0, 1.0
        radar = Radar(features, torch.full((size,), 100))
    size = batch.size
    targets = Boxes3D(
        centre=40 * noise(size, 6, 3) * torch.tensor([1, 1, 0]) - 20,
        size=1 + 4 * noise(size, 6, 3),
        yaw=noise(size, 6),
        velocity=noise(size, 6, 2),
        label=torch.arange(6).expand(size, 6),
        valid=torch.ones(size, 6, dtype=torch.bool),
    )
    return dataclasses.replace(
        batch, cameras=cameras, points=points, radar=radar, targets=targets, can_bus=None
    )


@pytest.mark.parametrize("name", [name for name in MODELS if re.match(r"bevfusion.*_toy", name)])
def test_a_toy_takes_a_step_and_detects(name: str) -> None:
    torch.manual_seed(0)
    network, inputs = make_network(name)
    batch = fill(blank_batch(inputs, 1))
    cfg = load_config("train", [f"model={name}", "hardware=cpu"])
    criterion = instantiate(cfg.model.loss, _convert_="all")
    terms = criterion(network(batch), batch.targets)
    assert ("depth" in terms) == (inputs.camera is not None and inputs.lidar is not None)
    torch.stack(list(terms.values())).sum().backward()
    for parameter, value in network.named_parameters():
        assert value.grad is not None and bool(torch.isfinite(value.grad).all()), parameter
    network.eval()
    with torch.no_grad():
        boxes = network.decode(network(batch))
    assert boxes.centre.shape[0] == 1 and bool(torch.isfinite(boxes.centre[boxes.valid]).all())
