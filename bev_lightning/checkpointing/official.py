"""Converts state dicts between our networks and the published ones.

Three published formats are known: ``mit`` (MIT BEVFusion), ``mmdetection3d`` (its port) and
``bevformer``. MIT BEVFusion's BEV maps, and the port's, are (X, Y) where ours are (Y, X), so the
last two dimensions of their BEV convolutions are swapped.

A network of your own can take part: list its formats in ``official_formats`` (see
:class:`bev_lightning.models.protocol.HasOfficialWeights`), register its parts with
``network_parts.register`` and those of its modules with ``module_part.register``.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import singledispatch

import torch
from torch import Tensor, nn

from bev_lightning.checkpointing.key_map import (
    Fit,
    Part,
    Rename,
    fit,
    translate_to_official,
    translate_to_ours,
)
from bev_lightning.errors import InputError
from bev_lightning.models.bev import SECOND, SECONDFPN, ConvFuser
from bev_lightning.models.bevformer import BEVFormer
from bev_lightning.models.bevfusion import BEVFusion
from bev_lightning.models.heads import TransFusionHead
from bev_lightning.models.image import FPN, LiftFPN, ResNet
from bev_lightning.models.lift import CameraBranch, LiftSplat
from bev_lightning.models.protocol import HasOfficialWeights
from bev_lightning.models.sparse_encoder import SparseEncoder
from bev_lightning.models.swin import Swin, WindowAttention

# Prefixes of BEVFusion's parts in each format: ours, then the published one.
_PREFIXES = {
    "mit": {
        "camera.backbone.": "encoders.camera.backbone.",
        "camera.neck.": "encoders.camera.neck.",
        "camera.lift.": "encoders.camera.vtransform.",
        "lidar.encoder.": "encoders.lidar.backbone.",
        "fuser.": "fuser.",
        "backbone.": "decoder.backbone.",
        "neck.": "decoder.neck.",
        "head.": "heads.object.",
    },
    "mmdetection3d": {
        "camera.backbone.": "img_backbone.",
        "camera.neck.": "img_neck.",
        "camera.lift.": "view_transform.",
        "lidar.encoder.": "pts_middle_encoder.",
        "fuser.": "fusion_layer.",
        "backbone.": "pts_backbone.",
        "neck.": "pts_neck.",
        "head.": "bbox_head.",
    },
}
_TRANSFUSION: tuple[Rename, ...] = (
    ("^prediction_heads.#.center.", "^branches.#.centre."),
    ("^prediction_heads.#.dim.", "^branches.#.size."),
    ("^prediction_heads.#.rot.", "^branches.#.rotation."),
    ("^prediction_heads.#.vel.", "^branches.#.velocity."),
    ("^prediction_heads.#.heatmap.", "^branches.#.logits."),
    ("^prediction_heads.#.height.", "^branches.#.height."),
    ("self_posembed.position_embedding_head.", "query_position."),
    ("cross_posembed.position_embedding_head.", "key_position."),
)
_NORMS: tuple[Rename, ...] = tuple((f"norms.{i}.", f"norm{i + 1}.") for i in range(3))
_DECODER_LAYER: dict[str, tuple[Rename, ...]] = {
    "mit": (("self_attn.", "self_attention."), ("multihead_attn.", "cross_attention.")),
    "mmdetection3d": (
        ("self_attn.attn.", "self_attention."),
        ("cross_attn.attn.", "cross_attention."),
        ("ffn.layers.0.0.", "linear1."),
        ("ffn.layers.1.", "linear2."),
        *_NORMS,
    ),
}
_SWIN: tuple[Rename, ...] = (
    ("^patch_embed.norm.", "^patch_norm."),
    ("^patch_embed.projection.", "^patch_embed."),
    ("^stages.#.downsample.", "^downsamples.#."),
    ("^stages.#.blocks.", "^stages.#."),
    ("attn.w_msa.", "attention."),
    ("ffn.layers.0.0.", "mlp.0."),
    ("ffn.layers.1.", "mlp.2."),
)
_CODE_WEIGHTS = torch.tensor([1.0] * 8 + [0.2] * 2)
_BEVFORMER_LAYER: tuple[Rename, ...] = (
    ("ffns.0.layers.0.0.", "feed_forward.linear1."),
    ("ffns.0.layers.1.", "feed_forward.linear2."),
    *_NORMS,
)


def _swap_xy(name: str, value: Tensor) -> Tensor:
    return value.transpose(-1, -2) if value.dim() == 4 else value


def _swap_xy_of_lift(name: str, value: Tensor) -> Tensor:
    # Only the convolutions after the pooling act on the BEV map; the others act on images.
    return _swap_xy(name, value) if name.startswith("downsample.") else value


def _swap_xyz(name: str, value: Tensor) -> Tensor:
    return value.permute(2, 1, 0, 3, 4) if value.dim() == 5 else _swap_xy(name, value)


def _rgb_from_bgr(name: str, value: Tensor) -> Tensor:
    return value.flip(1) if name == "conv1.weight" else value


def _swap_box_code(name: str, value: Tensor) -> Tensor:
    """Between our box code, mmdetection3d's before 1.0 (see :class:`BoxCodec`), and that from 1.0
    on: length before width, and sine and cosine of the yaw itself."""
    if re.fullmatch(r"branches\.\d+\.size\.1\.(weight|bias)", name):
        return value[[1, 0, 2]]
    if re.fullmatch(r"branches\.\d+\.rotation\.1\.(weight|bias)", name):
        return -value[[1, 0]]
    return _swap_xy(name, value)


_BEV = (_swap_xy, _swap_xy)
_SPARSE = {
    # spconv 1: (kx, ky, kz, Cin, Cout)
    "mit": (_swap_xyz, _swap_xyz),
    # spconv 2: (Cout, kx, ky, kz, Cin)
    "mmdetection3d": (
        lambda name, value: value.permute(3, 2, 1, 4, 0) if value.dim() == 5 else value,
        lambda name, value: value.permute(4, 2, 1, 0, 3) if value.dim() == 5 else value,
    ),
}
_HEAD = {"mit": _BEV, "mmdetection3d": (_swap_box_code, _swap_box_code)}


def convert_to_ours(
    network: nn.Module, state: Mapping[str, Tensor], published: str | None = None
) -> tuple[Fit, str]:
    """Published weights for a network.

    Args:
        published: format of the state dict; None detects it.

    Returns:
        How the weights fit the network, and their format.

    Raises:
        InputError: the format is unknown, or not one of this network.
    """
    if state and all(name.startswith("module.") for name in state):  # saved under DDP
        state = {name.removeprefix("module."): value for name, value in state.items()}
    # The port's view transform had another name at first.
    state = {re.sub(r"^vtransform\.", "view_transform.", name): v for name, v in state.items()}
    published = published or detect_format(state)
    if published is None:
        raise InputError(
            "the weights are in no published format that is known; give a checkpoint of BEVFormer, "
            "MIT BEVFusion or mmdetection3d's BEVFusion, or to=official for your own"
        )
    parts = published_parts(network, published)
    own = network.state_dict()
    official = translate_to_official(own, parts).sources
    names = {ours: name for name, ours in official.items()}
    return fit(translate_to_ours(state, parts), own, names), published


def convert_to_official(
    network: nn.Module,
    state: Mapping[str, Tensor],
    published: str | None = None,
    image_size: tuple[int, int] | None = None,
) -> tuple[Fit, str]:
    """A network's weights for the published code, with the constants that it stores beside them.

    Args:
        state: names as in ``network.state_dict()``.
        published: format of the result; None takes the network's first.
        image_size: height, width of the network's image [pixels]; None without cameras.

    Returns:
        How the weights fit the network, by their published names, and their format.
    """
    published = published or next(iter(_formats(network)), "any format")
    parts = published_parts(network, published, image_size)
    wanted = translate_to_official(network.state_dict(), parts)
    return fit(translate_to_official(state, parts), wanted.state, wanted.sources), published


def convert_module(
    module: nn.Module, state: Mapping[str, Tensor], prefix: str, published: str = "mit"
) -> dict[str, Tensor]:
    """Published weights of one module, such as a backbone, as its own state dict.

    Args:
        prefix: of the module's names in ``state``; other entries are left out.
    """
    part = replace(module_part(module, published), official=prefix)
    return translate_to_ours(state, [part]).state


def detect_format(state: Mapping[str, Tensor]) -> str | None:
    """Format of a published state dict, from its names: ``mit``, ``mmdetection3d``, ``bevformer``
    or None."""
    beginnings = (
        ("bevformer", ("pts_bbox_head.transformer.", "pts_bbox_head.bev_embedding.")),
        ("mit", ("encoders.", "heads.object.", "decoder.backbone.")),
        ("mmdetection3d", ("pts_middle_encoder.", "view_transform.", "bbox_head.")),
    )
    for published, prefixes in beginnings:
        if any(name.startswith(prefixes) for name in state):
            return published
    return None


def published_parts(
    network: nn.Module, published: str, image_size: tuple[int, int] | None = None
) -> tuple[Part, ...]:
    """The parts of a network in a published format.

    What the network has and the published code does not (the radar branch, pillars) has no part.

    Args:
        image_size: height, width of the network's image [pixels]; some constants depend on it.

    Raises:
        InputError: the network was not published in this format.
    """
    if published not in _formats(network):
        known = ", ".join(_formats(network)) or "none"
        raise InputError(
            f"{type(network).__name__} has no counterpart in the format {published}; set names to "
            f"one of its official_formats: {known}"
        )
    return network_parts(network, published, image_size)


def _formats(network: nn.Module) -> tuple[str, ...]:
    return network.official_formats if isinstance(network, HasOfficialWeights) else ()


@singledispatch
def network_parts(
    network: nn.Module, published: str, image_size: tuple[int, int] | None
) -> tuple[Part, ...]:
    """The parts of a network, by its class; see :func:`published_parts`."""
    raise InputError(
        f"the parts of {type(network).__name__} are not registered; register them with "
        "bev_lightning.checkpointing.official.network_parts.register"
    )


@network_parts.register
def _(network: BEVFormer, published: str, image_size: tuple[int, int] | None) -> tuple[Part, ...]:
    image = [
        replace(module_part(module, published), official=f"img_{name}.", ours=f"{name}.")
        for name, module in (("backbone", network.backbone), ("neck", network.neck))
    ]
    return (*image, *bevformer_head_parts("pts_bbox_head."))


@network_parts.register
def _(network: BEVFusion, published: str, image_size: tuple[int, int] | None) -> tuple[Part, ...]:
    parts = []
    for ours, official in _PREFIXES[published].items():
        try:
            module = network.get_submodule(ours.removesuffix("."))
        except AttributeError:  # the network lacks this part
            continue
        part = replace(module_part(module, published), official=official, ours=ours)
        if isinstance(module, LiftSplat) and image_size is not None:
            assert network.camera is not None
            part = replace(part, constants=_lift_constants(network.camera, image_size))
        parts.append(part)
    return tuple(parts)


def bevformer_head_parts(official: str) -> tuple[Part, ...]:
    """The published BEVFormerHead, which holds encoder, decoder and branches.

    Args:
        official: prefix of its names.
    """
    encoder = (
        ("^layers.#.attentions.0.", "^layers.#.temporal."),
        ("^layers.#.attentions.1.", "^layers.#.spatial."),
    )
    decoder = (
        ("^layers.#.attentions.0.attn.", "^layers.#.self_attention."),
        ("^layers.#.attentions.1.", "^layers.#.map_attention."),
    )
    names = {
        "bev_embedding.weight": "encoder.queries",
        "positional_encoding.col_embed.weight": "encoder.column_embedding",
        "positional_encoding.row_embed.weight": "encoder.row_embedding",
        "transformer.level_embeds": "encoder.level_embedding",
        "transformer.cams_embeds": "encoder.camera_embedding",
        "transformer.can_bus_mlp.": "encoder.can_bus_mlp.",
        "transformer.can_bus_mlp.norm.": "encoder.can_bus_mlp.4.",
        "transformer.reference_points.": "head.learned.reference.",
        "query_embedding.weight": "head.learned.embedding",
        "cls_branches.": "head.class_branches.",
        "reg_branches.": "head.box_branches.",
    }
    return (
        Part(f"{official}transformer.encoder.", "encoder.", (*encoder, *_BEVFORMER_LAYER)),
        Part(f"{official}transformer.decoder.", "head.", (*decoder, *_BEVFORMER_LAYER)),
        *(Part(official + name, ours) for name, ours in names.items()),
        # The loss stores its constant.
        Part(official, None, ignored="^code_weights$", constants={"code_weights": _CODE_WEIGHTS}),
    )


@singledispatch
def module_part(module: nn.Module, published: str) -> Part:
    """How a published format stores a module, without prefixes; unchanged unless registered."""
    return Part("", "")


@module_part.register
def _(module: ResNet, published: str) -> Part:
    # The caffe style was trained on BGR images, and ours are RGB.
    return Part("", "", values=(_rgb_from_bgr,) * 2) if module.caffe_style else Part("", "")


@module_part.register
def _(module: Swin, published: str) -> Part:
    # The published norms are numbered by stage, ours by output.
    norms = ((f"^norm{stage}.", f"^norms.{i}.") for i, stage in enumerate(module.out_stages))
    part = Part("", "", (*_SWIN, *norms), ignored="relative_position_index$")
    constants = {
        part.name_official(f"{name}.relative_position_index"): child.relative_position_index
        for name, child in module.named_modules()
        if isinstance(child, WindowAttention)
    }
    return replace(part, constants=constants)


@module_part.register
def _(module: FPN, published: str) -> Part:
    convs = ("lateral_convs", "fpn_convs")
    return Part("", "", tuple((f"^{name}.#.conv.", f"^{name}.#.") for name in convs))


@module_part.register
def _(module: LiftFPN, published: str) -> Part:
    return Part(
        "",
        "",
        tuple(
            (f"^{name}.#.{theirs}.", f"^{name}.#.{ours}.")
            for name in ("lateral_convs", "fpn_convs")
            for ours, theirs in enumerate(("conv", "bn"))
        ),
    )


@module_part.register
def _(module: LiftSplat, published: str) -> Part:
    renames = (("^dtransform.", "^depth_encoder."), ("^depthnet.", "^depth_net."))
    return Part("", "", renames, (_swap_xy_of_lift,) * 2, r"^(dx|bx|nx|frustum)$")


@module_part.register
def _(module: SparseEncoder, published: str) -> Part:
    return Part("", "", values=_SPARSE[published])


@module_part.register(ConvFuser)
@module_part.register(SECOND)
@module_part.register(SECONDFPN)
def _(module: nn.Module, published: str) -> Part:
    return Part("", "", values=_BEV)


@module_part.register
def _(module: TransFusionHead, published: str) -> Part:
    return Part("", "", (*_TRANSFUSION, *_DECODER_LAYER[published]), _HEAD[published])


def _lift_constants(camera: CameraBranch, image_size: tuple[int, int]) -> dict[str, Tensor]:
    """What LSSTransform stores beside its weights: the grid, and pixels and depths of the rays."""
    grid, bins = camera.lift.pool_grid, camera.lift.depth_bins
    low, high = torch.tensor(grid.range).view(2, 3)
    cell = torch.tensor([*grid.cell, grid.range[5] - grid.range[2]])
    (height, width), (rows, columns) = image_size, camera.map_size(*image_size)
    depth, v, u = torch.meshgrid(
        torch.arange(*bins),
        torch.linspace(0, height - 1, rows),
        torch.linspace(0, width - 1, columns),
        indexing="ij",
    )
    return {
        "dx": cell,
        "bx": low + cell / 2,
        "nx": ((high - low) / cell).round().long(),
        "frustum": torch.stack([u, v, depth], dim=-1),
    }
