"""Image backbones and necks against outputs of the official code (fixtures C and C2)."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_files import needs_parity_files, parity_folders, read_tensors
from safetensors.torch import load_file
from torch import Tensor, nn

from bev_lightning.checkpointing.official import convert_module
from bev_lightning.models.image import FPN, LiftFPN, ResNet
from bev_lightning.models.swin import Swin

pytestmark = needs_parity_files
FOLDERS = parity_folders("C*_*")
BACKBONES = {"ResNet": "resnet", "SwinTransformer": "swin"}
NECKS = {"FPN": "fpn", "GeneralizedLSSFPN": "lssfpn"}


def make_backbone(config: Mapping[str, Any]) -> ResNet | Swin:
    if config["type"] == "ResNet":
        deformable = config.get("stage_with_dcn") or ()
        assert not config.get("dcn") or config["dcn"]["deform_groups"] == 1
        return ResNet(
            config["depth"],
            config["base_channels"],
            config["out_indices"],
            caffe_style=config["style"] == "caffe",
            deformable_stages=[k for k, used in enumerate(deformable) if used],
            frozen_stages=config.get("frozen_stages", -1),
            norm_eval=config.get("norm_eval", True),
            norm_frozen=not config["norm_cfg"]["requires_grad"],
        )
    return Swin(
        config["embed_dims"],
        config["depths"],
        config["num_heads"],
        config["window_size"],
        config["drop_path_rate"],
        config["out_indices"],
    )


def make_neck(config: Mapping[str, Any]) -> FPN | LiftFPN:
    if config["type"] == "FPN":
        assert config.get("add_extra_convs", "on_output") == "on_output"
        return FPN(config["in_channels"], config["out_channels"], config["num_outs"])
    return LiftFPN(config["in_channels"], config["out_channels"])


def run(folder: Path) -> dict[str, Tensor]:
    """Every map of our backbone and neck under the official name."""
    config = json.loads((folder / "config.json").read_text())
    state = load_file(folder / "weights.safetensors")
    prefixes = {name.split(".")[0] for name in state}
    mit = "encoders" in prefixes
    images = read_tensors(folder, "inputs.npz")["network_input"]
    # The caffe style comes with BGR images: we feed RGB and turn the first convolution round.
    bgr = config["backbone"].get("style") == "caffe"
    parts: list[nn.Module] = [make_backbone(config["backbone"]), make_neck(config["neck"])]
    names = ("encoders.camera.backbone.", "encoders.camera.neck.")
    names = names if mit else ("img_backbone.", "img_neck.")
    for part, prefix in zip(parts, names, strict=True):
        part.load_state_dict(convert_module(part, state, prefix), strict=True)
        part.eval()
    with torch.no_grad():
        features = parts[0](images.flip(1) if bgr else images)
        pyramid = parts[1](features)
    backbone, neck = BACKBONES[config["backbone"]["type"]], NECKS[config["neck"]["type"]]
    outputs = {f"{backbone}/out{k}": value for k, value in enumerate(features)}
    return outputs | {f"{neck}/out{k}": value for k, value in enumerate(pyramid)}


def check(outputs: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Compare all maps; an output on one side alone fails."""
    assert sorted(outputs) == sorted(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(
            outputs[name], value, rtol=1e-4, atol=1e-4, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_maps_equal_the_official_ones(folder: Path) -> None:
    check(run(folder), read_tensors(folder, "outputs.npz"))


@pytest.mark.parametrize("folder", FOLDERS[:1], ids=lambda folder: folder.name)
def test_an_unknown_output_fails(folder: Path) -> None:
    wanted = read_tensors(folder, "outputs.npz")
    with pytest.raises(AssertionError, match="unheard/out9"):
        check(run(folder), wanted | {"unheard/out9": next(iter(wanted.values()))})
