"""Official state dicts, taken to our names and back: the same, with every constant in them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_files import needs_parity_files, parity_folders
from safetensors.torch import load_file
from torch import Tensor, nn

from bev_lightning.checkpointing.key_map import Part, translate_to_official, translate_to_ours
from bev_lightning.checkpointing.official import published_parts
from bev_lightning.models.bev import SECOND, SECONDFPN, ConvFuser
from bev_lightning.models.bevformer import BEVFormer
from bev_lightning.models.bevfusion import BEVFusion
from bev_lightning.models.heads import TransFusionHead
from bev_lightning.models.image import FPN, LiftFPN, ResNet
from bev_lightning.models.lidar import LidarVoxelBranch, MeanVoxels
from bev_lightning.models.lift import CameraBranch, LiftSplat
from bev_lightning.models.sparse_encoder import SparseEncoder
from bev_lightning.models.swin import Swin
from bev_lightning.structures import BevGrid

pytestmark = needs_parity_files
FOLDERS = [path.parent for path in parity_folders("*/weights.safetensors")]


def bevfusion(**parts: nn.Module) -> BEVFusion:
    backbone, neck = SECOND(1, (1,), (1,), (1,)), SECONDFPN((1,), (1,), (1,))
    head = TransFusionHead(BevGrid((0, 0, 0, 1, 1, 1), (1, 1)), 1, 10, 8, 1)
    return BEVFusion(backbone, neck, head, fuser=ConvFuser((1, 1), 1), **parts)


def make_lift(config: dict[str, Any]) -> LiftSplat:
    x, y, z = config["xbound"], config["ybound"], config["zbound"]
    return LiftSplat(
        config["in_channels"],
        config["out_channels"],
        BevGrid((x[0], y[0], z[0], x[1], y[1], z[1]), (x[2], y[2])),
        tuple(config["dbound"]),
        downsample=config["downsample"],
        lidar_depth=config["type"] == "DepthLSSTransform",
        stride=config["image_size"][0] // config["feature_size"][0],
    )


def make_swin(config: dict[str, Any]) -> Swin:
    return Swin(
        config["embed_dims"],
        config["depths"],
        config["num_heads"],
        config["window_size"],
        out_stages=config["out_indices"],
    )


def cases(folder: Path) -> list[tuple[dict[str, Tensor], tuple[Part, ...], set[str]]]:
    """The state dicts of a folder, their map, and the constants that they lack."""
    state = load_file(folder / "weights.safetensors")
    config = json.loads((folder / "config.json").read_text())
    if "modules" in config:
        found = []
        for name, module in config["modules"].items():
            size = tuple(module["image_size"])
            backbone = nn.AvgPool2d(size[0] // module["feature_size"][0])
            camera = CameraBranch(backbone, nn.Identity(), make_lift(module))
            part = {
                k.removeprefix(f"{name}/"): v for k, v in state.items() if name == k.split("/")[0]
            }
            found.append((part, published_parts(bevfusion(camera=camera), "mit", size), set()))
        return found
    constant = {"pts_bbox_head.code_weights"}
    if any(name.startswith("transformer.") for name in state):
        state = {f"pts_bbox_head.{name}": value for name, value in state.items()}
        network: nn.Module = BEVFormer(*(nn.Identity() for _ in range(4)))
        return [(state, published_parts(network, "bevformer"), set())]
    if any(name.startswith("img_backbone.") for name in state):
        backbone = ResNet(50, caffe_style=config["backbone"]["style"] == "caffe")
        network = BEVFormer(backbone, FPN((1, 1), 1, 3), nn.Identity(), nn.Identity())
        return [(state, published_parts(network, "bevformer"), constant)]
    if any(name.startswith("encoders.camera.") for name in state):
        camera = CameraBranch(make_swin(config["backbone"]), LiftFPN((1, 1), 1), nn.Identity())
        return [(state, published_parts(bevfusion(camera=camera), "mit"), set())]
    lidar = LidarVoxelBranch(MeanVoxels((0, 0, 0, 1, 1, 1), (1, 1, 1)), SparseEncoder())
    return [(state, published_parts(bevfusion(lidar=lidar), "mit"), set())]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_an_official_state_dict_comes_back(folder: Path) -> None:
    for state, parts, lacking in cases(folder):
        ours = translate_to_ours(state, parts)
        assert ours.unknown == []
        back = translate_to_official(ours.state, parts)
        assert back.unknown == []
        assert back.state.keys() == state.keys() | lacking
        for name, value in state.items():
            assert back.state[name].dtype == value.dtype, name
            assert torch.equal(back.state[name], value), name
