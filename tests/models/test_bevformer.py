"""The configured networks: parameters, and one step at full size without memory."""

from dataclasses import replace

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch._subclasses.fake_tensor import FakeTensorMode

from bev_lightning.config.compose import load_config
from bev_lightning.errors import InputError
from bev_lightning.losses.set_prediction import SetPredictionLoss
from bev_lightning.models.bev_encoder import PreviousBev
from bev_lightning.models.bevformer import BEVFormer
from bev_lightning.structures import Batch, Boxes3D, Cameras


def build(cfg: DictConfig) -> BEVFormer:
    node = OmegaConf.to_container(cfg.model.network, resolve=True)
    network: BEVFormer = instantiate(node, _convert_="all")
    return network


def make_batch(num: int, size: tuple[int, int]) -> Batch:
    tokens = tuple(f"sample{row}" for row in range(num))
    eye = torch.eye(4, dtype=torch.float64).expand(num, 4, 4)
    return Batch(
        sample_tokens=tokens,
        scene_tokens=tokens,
        timestamps=torch.zeros(num, dtype=torch.int64),
        global_from_lidar=eye,
        global_from_ego=eye,
        lidar_from_previous_lidar=eye.float(),
        has_previous=torch.ones(num, dtype=torch.bool),
        cameras=Cameras(torch.zeros(num, 6, 3, *size), torch.zeros(num, 6, 4, 4)),
        can_bus=torch.zeros(num, 18),
    )


@pytest.mark.parametrize(
    ("model", "millions"),
    # Base as published; small and tiny follow from the published configurations.
    [("bevformer_base", 69.0), ("bevformer_small", 59.5), ("bevformer_tiny", 33.5)],
)
def test_number_of_parameters(model: str, millions: float) -> None:
    with torch.device("meta"):
        network = build(load_config("train", [f"model={model}"]))
    count = sum(parameter.numel() for parameter in network.parameters())
    assert abs(count / 1e6 / millions - 1) < 0.01


@pytest.mark.parametrize("model", ["bevformer_tiny", "bevformer_base"])
def test_one_step_at_full_size(model: str) -> None:
    cfg = load_config("train", [f"model={model}"])
    size = tuple(cfg.model.inputs.camera.size)
    with FakeTensorMode():
        network = build(cfg)
        shape = network.encoder.grid.shape
        previous = PreviousBev(torch.zeros(1, 256, *shape), torch.ones(1, dtype=torch.bool))
        predictions = network(make_batch(1, size), previous)
        assert predictions.bev.shape == (1, 256, *shape)
        assert predictions.queries.logits.shape == (6, 1, 900, 10)
        (predictions.queries.logits.sum() + predictions.queries.code.sum()).backward()
        for name, parameter in network.named_parameters():
            assert (parameter.grad is not None) == parameter.requires_grad, name
        assert network.decode(predictions).valid.shape == (1, 300)


def test_configured_sizes() -> None:
    for model, shape, history in (
        ("bevformer_base", (200, 200), 3),
        ("bevformer_small", (150, 150), 2),
        ("bevformer_tiny", (50, 50), 2),
    ):
        cfg = load_config("train", [f"model={model}"])
        assert instantiate(cfg.model.network.encoder.grid).shape == shape
        assert cfg.model.inputs.history == history
        assert cfg.model.network.head.heatmap_start is False
        assert cfg.model.network.head.num_denoising == 0


def test_toy_pads_and_trains_in_bfloat16() -> None:
    torch.manual_seed(0)
    cfg = load_config("train", ["model=bevformer_toy", "model.network.pad_multiple=32"])
    network = build(cfg).train()
    targets = Boxes3D.empty(2, 3)
    batch = replace(make_batch(2, (40, 70)), targets=targets)
    maps = network.extract([batch, batch])
    assert [m.shape for m in maps[1]] == [(2, 6, 96, 8, 12), (2, 6, 96, 4, 6)]  # 64 x 96 pixels
    with torch.autocast("cpu", torch.bfloat16):
        predictions = network(batch)
    assert predictions.heatmap is not None and predictions.denoising is not None
    terms = SetPredictionLoss()(predictions, targets)
    assert all(term.dtype == torch.float32 for term in terms.values())
    torch.stack(list(terms.values())).sum().backward()
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None, name
        assert bool(torch.isfinite(parameter.grad).all()), name


def test_refuses_a_batch_without_cameras() -> None:
    network = build(load_config("train", ["model=bevformer_toy"]))
    with pytest.raises(InputError, match="samples sample0 have none"):
        network(replace(make_batch(1, (32, 32)), cameras=None))
