"""Published names and layouts: there and back, and what does not fit."""

import math

import pytest
import torch
from torch import Tensor, nn

from bev_lightning.checkpointing.key_map import Part, translate_to_official
from bev_lightning.checkpointing.official import (
    convert_to_official,
    convert_to_ours,
    detect_format,
    network_parts,
    published_parts,
)
from bev_lightning.errors import InputError
from bev_lightning.models.bev import SECOND, SECONDFPN, ConvFuser
from bev_lightning.models.bev_encoder import BEVEncoder
from bev_lightning.models.bevformer import BEVFormer
from bev_lightning.models.bevformer_head import BEVFormerHead
from bev_lightning.models.bevfusion import BEVFusion
from bev_lightning.models.heads import TransFusionHead
from bev_lightning.models.image import FPN, LiftFPN, ResNet
from bev_lightning.models.lidar import LidarVoxelBranch, MeanVoxels
from bev_lightning.models.lift import CameraBranch, LiftSplat
from bev_lightning.models.radar import RadarBranch
from bev_lightning.models.sparse_encoder import SparseEncoder
from bev_lightning.models.swin import Swin
from bev_lightning.structures import BevGrid
from bev_lightning.structures.predictions import BoxCodec

RANGE = (-8.0, -8.0, -5.0, 8.0, 8.0, 3.0)
IMAGE = (32, 64)


def make_bevfusion(lidar_depth: bool = True, radar: bool = False) -> BEVFusion:
    camera = CameraBranch(
        Swin(width=8, depths=(1, 1, 1, 1), num_heads=(1, 1, 2, 2), window=4),
        LiftFPN((16, 32, 64), 12),
        LiftSplat(
            12,
            8,
            BevGrid((-8, -8, -10, 8, 8, 10), (1.0, 1.0)),
            (1.0, 9.0, 0.5),
            downsample=2,
            lidar_depth=lidar_depth,
        ),
    )
    encoder = SparseEncoder(5, (41, 64, 64), 4, ((4, 8), (8, 8), (8, 8), (8,)), out_channels=8)
    return BEVFusion(
        SECOND(16, (8, 12), (1, 1), (1, 2)),
        SECONDFPN((8, 12), (8, 8), (1, 2)),
        TransFusionHead(
            BevGrid(RANGE, (2.0, 2.0)), 16, 10, 8, 6, num_heads=2, ffn_channels=8, branch_channels=4
        ),
        camera,
        LidarVoxelBranch(MeanVoxels(RANGE, (0.25, 0.25, 0.2)), encoder),
        RadarBranch(BevGrid(RANGE, (2.0, 2.0)), 4) if radar else None,
        ConvFuser((8, encoder.out_channels, *((4,) if radar else ())), 16),
    )


def make_bevformer() -> BEVFormer:
    grid = BevGrid(RANGE, (2.0, 1.0))
    encoder = BEVEncoder(grid, 8, 2, 2, 2, 3, 2, 4, 2, 16)
    return BEVFormer(
        ResNet(50, 4, (1, 2), caffe_style=True, deformable_stages=(2,)),
        FPN((32, 64), 8, 2),
        encoder,
        BEVFormerHead(grid, 8, 4, 6, 2, 2, 2, 16),
    )


def seed(network: nn.Module) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(value.shape, generator=generator)
        if value.is_floating_point()
        else torch.randint(100, value.shape, generator=generator)
        for name, value in network.state_dict().items()
    }


@pytest.mark.parametrize("names", ["mit", "mmdetection3d", "bevformer"])
def test_there_and_back_is_the_same(names: str) -> None:
    network = make_bevformer() if names == "bevformer" else make_bevfusion()
    state = seed(network)
    official, named = convert_to_official(network, state, names, IMAGE)
    assert official.is_whole and named == names
    # Whose names they are is seen from the names, under DDP too.
    wrapped = {f"module.{name}": value for name, value in official.state.items()}
    ours, found = convert_to_ours(network, wrapped)
    assert ours.is_whole and found == names
    assert ours.state.keys() == state.keys()
    for name, value in state.items():
        assert ours.state[name].equal(value), name
    again, _ = convert_to_official(network, ours.state, names, IMAGE)
    assert again.state.keys() == official.state.keys()
    for name, value in official.state.items():
        assert again.state[name].equal(value), name


def test_official_names_and_constants_of_bevfusion() -> None:
    network = make_bevfusion()
    official = convert_to_official(network, seed(network), "mit", IMAGE)[0].state
    lift = "encoders.camera.vtransform."
    assert official[f"{lift}dx"].tolist() == [1.0, 1.0, 20.0]
    assert official[f"{lift}bx"].tolist() == [-7.5, -7.5, 0.0]
    assert official[f"{lift}nx"].tolist() == [16, 16, 1]
    assert official[f"{lift}nx"].dtype == torch.int64
    frustum = official[f"{lift}frustum"]
    assert frustum.shape == (16, 4, 8, 3)
    assert frustum[3, 2, 7].tolist() == pytest.approx([63.0, 31 * 2 / 3, 2.5])
    index = "encoders.camera.backbone.stages.2.blocks.0.attn.w_msa.relative_position_index"
    assert official[index].shape == (16, 16) and official[index][0, 0] == 24
    assert official["encoders.camera.backbone.norm3.weight"].shape == (64,)
    assert official["encoders.lidar.backbone.conv_input.0.weight"].shape == (3, 3, 3, 5, 4)
    assert official["heads.object.prediction_heads.0.vel.1.bias"].shape == (2,)
    port = convert_to_official(network, seed(network), "mmdetection3d", IMAGE)[0].state
    assert port["pts_middle_encoder.conv_out.0.weight"].shape == (8, 1, 1, 3, 8)
    assert "bbox_head.decoder.0.ffn.layers.0.0.weight" in port
    assert "bbox_head.decoder.0.cross_attn.attn.in_proj_bias" in port


def test_layouts_turn_the_axes_that_differ() -> None:
    network = make_bevfusion()
    own = seed(network)
    state = convert_to_official(network, own, "mit")[0].state
    # (x, y) and (kx, ky, kz) in the published ones.
    assert state["fuser.0.weight"][1, 2, 0, 2] == own["fuser.0.weight"][1, 2, 2, 0]
    sparse = "encoder_layers.encoder_layer1.0.conv1.weight"
    ours, theirs = own[f"lidar.encoder.{sparse}"], state[f"encoders.lidar.backbone.{sparse}"]
    assert theirs[0, 1, 2, 3, 1] == ours[2, 1, 0, 3, 1]
    port = convert_to_official(network, own, "mmdetection3d")[0].state
    assert port[f"pts_middle_encoder.{sparse}"][1, 0, 1, 2, 3] == ours[2, 1, 0, 3, 1]
    # Images are images everywhere.
    name = "lift.depth_encoder.3.weight"
    assert state["encoders.camera.vtransform.dtransform.3.weight"].equal(own[f"camera.{name}"])
    former = make_bevformer()
    own = seed(former)
    official = convert_to_official(former, own)[0].state
    assert official["img_backbone.conv1.weight"].equal(own["backbone.conv1.weight"].flip(1))
    assert official["pts_bbox_head.code_weights"].tolist() == pytest.approx([1.0] * 8 + [0.2] * 2)


def test_boxes_of_the_port_mean_the_same() -> None:
    """The port's last layers predict log length, width, height and sine, cosine of the yaw."""
    network = make_bevfusion()
    state = {name: torch.zeros_like(value) for name, value in network.state_dict().items()}
    port = convert_to_official(network, state, "mmdetection3d", IMAGE)[0].state
    yaw = 0.7
    head = "bbox_head.prediction_heads.0."
    port[f"{head}dim.1.bias"] = torch.tensor([4.0, 2.0, 1.5]).log()
    port[f"{head}rot.1.bias"] = torch.tensor([math.sin(yaw), math.cos(yaw)])
    ours = convert_to_ours(network, port)[0].state
    code = torch.zeros(1, 10)
    code[0, 3:6] = ours["head.branches.0.size.1.bias"]
    code[0, 6:8] = ours["head.branches.0.rotation.1.bias"]
    codec = BoxCodec(BevGrid(RANGE, (2.0, 2.0)), height_shift=0.0)
    label = torch.zeros(1, dtype=torch.long)
    boxes = codec.decode(code, label, torch.ones(1), torch.ones(1, dtype=torch.bool))
    assert boxes.size[0].tolist() == pytest.approx([4.0, 2.0, 1.5])
    assert float(boxes.yaw[0]) == pytest.approx(yaw)


def test_what_does_not_fit_is_named() -> None:
    network = make_bevfusion()
    state = convert_to_official(network, seed(network), "mit", IMAGE)[0].state
    del state["heads.object.shared_conv.bias"]
    state["heads.object.extra"] = torch.zeros(1)
    state["teacher.weight"] = torch.zeros(1)
    state["fuser.1.bias"] = torch.zeros(3)
    fit, _ = convert_to_ours(network, state)
    assert not fit.is_whole
    assert fit.missing == ["heads.object.shared_conv.bias -> head.shared_conv.bias"]
    assert sorted(fit.unexpected) == ["heads.object.extra", "teacher.weight"]
    assert fit.reshaped == ["fuser.1.bias (3,) for (16,)"]
    assert len(fit.state) == len(network.state_dict()) - 2


def test_what_was_never_published_has_no_name() -> None:
    network = make_bevfusion(lidar_depth=False, radar=True)
    fit, _ = convert_to_official(network, network.state_dict(), image_size=IMAGE)
    assert fit.unexpected and all(name.startswith("radar.") for name in fit.unexpected)
    fit, _ = convert_to_ours(network, fit.state)
    assert fit.missing and all(name.startswith("radar.") for name in fit.missing)


def test_names_that_are_not_known_are_refused() -> None:
    assert detect_format({"encoders.lidar.backbone.conv_input.0.weight": torch.zeros(1)}) == "mit"
    assert detect_format({"conv1.weight": torch.zeros(1)}) is None
    with pytest.raises(InputError, match="no published format"):
        convert_to_ours(make_bevfusion(), {"network.head.x": torch.zeros(1)})
    with pytest.raises(InputError, match="BEVFusion has no counterpart in the format bevformer"):
        published_parts(make_bevfusion(), "bevformer")


def test_a_network_of_your_own_registers_its_parts() -> None:
    class Own(nn.Linear):
        official_formats = ("theirs",)

    network = Own(2, 2)
    with pytest.raises(InputError, match="the parts of Own are not registered; register them"):
        convert_to_official(network, network.state_dict())
    network_parts.register(Own, lambda network, published, image_size: (Part("linear.", ""),))
    official, published = convert_to_official(network, network.state_dict())
    assert published == "theirs" and list(official.state) == ["linear.weight", "linear.bias"]
    with pytest.raises(InputError, match="Linear has no counterpart in the format mit"):
        convert_to_official(nn.Linear(2, 2), {}, "mit")


def test_the_port_called_its_view_transform_otherwise_at_first() -> None:
    network = make_bevfusion()
    state = translate_to_official(
        network.state_dict(), published_parts(network, "mmdetection3d", IMAGE)
    ).state
    old = {name.replace("view_transform.", "vtransform."): v for name, v in state.items()}
    assert old.keys() != state.keys()
    assert convert_to_ours(network, old)[0].is_whole
