"""Published weights: the names and layouts of MIT BEVFusion, of mmdetection3d's port of it and of
BEVFormer, beside ours.

MIT BEVFusion's BEV maps, and the port's, are (X, Y) where ours are (Y, X), so their convolutions'
last two dimensions are swapped.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from bev_lightning.checkpointing.key_map import Layout, Part, Rename, translate_to_ours
from bev_lightning.errors import InputError
from bev_lightning.models.bevformer import BEVFormer
from bev_lightning.models.bevfusion import BEVFusion
from bev_lightning.models.image import FPN, LiftFPN, ResNet
from bev_lightning.models.lidar import LidarVoxelBranch
from bev_lightning.models.lift import CameraBranch
from bev_lightning.models.swin import Swin, WindowAttention

# Where a model's parts stand in the published state dicts.
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
_DECODER_LAYER: dict[str, tuple[Rename, ...]] = {
    "mit": (("self_attn.", "self_attention."), ("multihead_attn.", "cross_attention.")),
    "mmdetection3d": (
        ("self_attn.attn.", "self_attention."),
        ("cross_attn.attn.", "cross_attention."),
        ("ffn.layers.0.0.", "linear1."),
        ("ffn.layers.1.", "linear2."),
        ("norms.0.", "norm1."),
        ("norms.1.", "norm2."),
        ("norms.2.", "norm3."),
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
_FPN: tuple[Rename, ...] = (
    ("^lateral_convs.#.conv.", "^lateral_convs.#."),
    ("^fpn_convs.#.conv.", "^fpn_convs.#."),
)
_LIFT_FPN: tuple[Rename, ...] = (
    ("^lateral_convs.#.conv.", "^lateral_convs.#.0."),
    ("^lateral_convs.#.bn.", "^lateral_convs.#.1."),
    ("^fpn_convs.#.conv.", "^fpn_convs.#.0."),
    ("^fpn_convs.#.bn.", "^fpn_convs.#.1."),
)
_LIFT: tuple[Rename, ...] = (("^dtransform.", "^depth_encoder."), ("^depthnet.", "^depth_net."))
_CODE_WEIGHTS = torch.tensor([1.0] * 8 + [0.2] * 2)
_LIFT_CONSTANTS = r"^(dx|bx|nx|frustum)$"
_BEVFORMER_LAYER: tuple[Rename, ...] = (
    ("ffns.0.layers.0.0.", "feed_forward.linear1."),
    ("ffns.0.layers.1.", "feed_forward.linear2."),
    ("norms.0.", "norm1."),
    ("norms.1.", "norm2."),
    ("norms.2.", "norm3."),
)


def _swap_xy(name: str, value: Tensor) -> Tensor:
    return value.transpose(-1, -2) if value.dim() == 4 else value


def _swap_xy_of_lift(name: str, value: Tensor) -> Tensor:
    # Only the convolutions behind the pooling act on the BEV map; the others act on images.
    return _swap_xy(name, value) if name.startswith("downsample.") else value


def _swap_xyz(name: str, value: Tensor) -> Tensor:
    return value.permute(2, 1, 0, 3, 4) if value.dim() == 5 else _swap_xy(name, value)


def _rgb_from_bgr(name: str, value: Tensor) -> Tensor:
    return value.flip(1) if name == "conv1.weight" else value


def _swap_box_code(name: str, value: Tensor) -> Tensor:
    """Length before width, and sine and cosine of the yaw itself: boxes of mmdetection3d from 1.0
    on. Ours are the older ones, see :class:`BoxCodec`."""
    if re.fullmatch(r"branches\.\d+\.size\.1\.(weight|bias)", name):
        return value[[1, 0, 2]]
    if re.fullmatch(r"branches\.\d+\.rotation\.1\.(weight|bias)", name):
        return -value[[1, 0]]
    return _swap_xy(name, value)


_BEV = Layout.same_both_ways(_swap_xy)
_SPARSE = {
    # (kx, ky, kz, Cin, Cout), as spconv 1 has it
    "mit": Layout.same_both_ways(_swap_xyz),
    # (Cout, kx, ky, kz, Cin), as spconv 2 has it
    "mmdetection3d": Layout(
        lambda name, value: value.permute(3, 2, 1, 4, 0) if value.dim() == 5 else value,
        lambda name, value: value.permute(4, 2, 1, 0, 3) if value.dim() == 5 else value,
    ),
}
_HEAD = {"mit": _BEV, "mmdetection3d": Layout.same_both_ways(_swap_box_code)}


def find_names(state: Mapping[str, Tensor]) -> str | None:
    """Whose names a state dict bears: ``mit``, ``mmdetection3d``, ``bevformer``, or None."""
    beginnings = (
        ("bevformer", ("pts_bbox_head.transformer.", "pts_bbox_head.bev_embedding.")),
        ("mit", ("encoders.", "heads.object.", "decoder.backbone.")),
        ("mmdetection3d", ("pts_middle_encoder.", "view_transform.", "bbox_head.")),
    )
    for names, prefixes in beginnings:
        if any(name.startswith(prefixes) for name in state):
            return names
    return None


def published_parts(
    network: nn.Module, names: str, image_size: tuple[int, int] | None = None
) -> tuple[Part, ...]:
    """The map between a network of ours and its published counterpart.

    What the network has and the published code does not (the radar branch, pillars) has no part.

    Args:
        names: ``mit`` or ``mmdetection3d`` for BEVFusion, ``bevformer``.
        image_size: height, width of the network's image [pixels]; MIT BEVFusion's constants depend
            on it.

    Raises:
        InputError: the network is none that was published under these names.
    """
    if isinstance(network, BEVFormer) and names == "bevformer":
        image = _image_parts(network, "", {"backbone.": "img_backbone.", "neck.": "img_neck."})
        return (*image, *_bevformer_parts("pts_bbox_head."))
    if not isinstance(network, BEVFusion) or names not in _PREFIXES:
        raise InputError(
            f"{type(network).__name__} has no counterpart under the names of {names}; take names="
            "mit or mmdetection3d for BEVFusion, bevformer for BEVFormer"
        )
    prefixes = _PREFIXES[names]
    parts: list[Part] = []
    if isinstance(network.camera, CameraBranch):
        parts += _image_parts(network.camera, "camera.", prefixes)
        parts.append(_lift_part(network.camera, prefixes["camera.lift."], image_size))
    if isinstance(network.lidar, LidarVoxelBranch):
        prefix = prefixes["lidar.encoder."]
        parts.append(Part(prefix, "lidar.encoder.", layout=_SPARSE[names]))
    if network.fuser is not None:
        parts.append(Part(prefixes["fuser."], "fuser.", layout=_BEV))
    parts += [Part(prefixes[name], name, layout=_BEV) for name in ("backbone.", "neck.")]
    parts.append(_transfusion_part(prefixes["head."], "head.", names))
    return tuple(parts)


def _transfusion_part(official: str, ours: str, names: str) -> Part:
    return Part(official, ours, (*_TRANSFUSION, *_DECODER_LAYER[names]), _HEAD[names])


def _image_parts(branch: nn.Module, ours: str, prefixes: Mapping[str, str]) -> list[Part]:
    backbone, neck = branch.get_submodule("backbone"), branch.get_submodule("neck")
    official = prefixes[f"{ours}backbone."]
    if isinstance(backbone, Swin):
        part = _swin_part(official, f"{ours}backbone.", backbone.out_stages)
        constants = {
            part.name_official(f"{name}.relative_position_index"): module.relative_position_index
            for name, module in backbone.named_modules()
            if isinstance(module, WindowAttention)
        }
        part = replace(part, constants=constants)
    else:
        bgr = isinstance(backbone, ResNet) and backbone.caffe_style
        part = _resnet_part(official, f"{ours}backbone.", bgr)
    renames = _LIFT_FPN if isinstance(neck, LiftFPN) else _FPN if isinstance(neck, FPN) else ()
    return [part, Part(prefixes[f"{ours}neck."], f"{ours}neck.", renames)]


def _resnet_part(official: str, ours: str, bgr: bool) -> Part:
    return Part(official, ours, layout=Layout.same_both_ways(_rgb_from_bgr) if bgr else Layout())


def _swin_part(official: str, ours: str, out_stages: Sequence[int]) -> Part:
    # Only the stages that Swin returns have a norm, ours are counted from 0.
    norms = ((f"^norm{stage}.", f"^norms.{i}.") for i, stage in enumerate(out_stages))
    return Part(official, ours, (*_SWIN, *norms), ignored="relative_position_index$")


def _lift_part(branch: CameraBranch, official: str, image_size: tuple[int, int] | None) -> Part:
    constants = {} if image_size is None else _lift_constants(branch, image_size)
    layout = Layout.same_both_ways(_swap_xy_of_lift)
    return Part(official, "camera.lift.", _LIFT, layout, _LIFT_CONSTANTS, constants)


def _lift_constants(branch: CameraBranch, image_size: tuple[int, int]) -> dict[str, Tensor]:
    """What LSSTransform stores among its weights: cells, and the rays' pixels and depths."""
    grid, bins = branch.lift.pool_grid, branch.lift.depth_bins
    low, high = torch.tensor(grid.range).view(2, 3)
    cell = torch.tensor([*grid.cell, grid.range[5] - grid.range[2]])
    stages = getattr(branch.backbone, "out_stages", (1,))
    stride = 4 * 2 ** stages[0]
    height, width = image_size
    depth, v, u = torch.meshgrid(
        torch.arange(*bins),
        torch.linspace(0, height - 1, height // stride),
        torch.linspace(0, width - 1, width // stride),
        indexing="ij",
    )
    return {
        "dx": cell,
        "bx": low + cell / 2,
        "nx": ((high - low) / cell).round().long(),
        "frustum": torch.stack([u, v, depth], dim=-1),
    }


def _bevformer_parts(official: str) -> tuple[Part, ...]:
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
        # A constant of the loss, the published one.
        Part(official, None, ignored="^code_weights$", constants={"code_weights": _CODE_WEIGHTS}),
    )


def official_transfusion_keys(
    state: Mapping[str, Tensor], prefix: str = "heads.object."
) -> dict[str, Tensor]:
    """Weights of MIT BEVFusion's TransFusionHead for our :class:`TransFusionHead`; other entries
    of the state dict, not under the prefix, are left out."""
    return translate_to_ours(state, [_transfusion_part(prefix, "", "mit")]).state


def official_image_keys(
    state: Mapping[str, Tensor], prefix: str, bgr: bool = False
) -> dict[str, Tensor]:
    """Weights of mmdetection's ResNet, SwinTransformer or FPN, or of MIT BEVFusion's
    GeneralizedLSSFPN, for our :class:`ResNet`, :class:`Swin`, :class:`FPN` or :class:`LiftFPN`.

    Args:
        prefix: what the names of the part begin with, as ``img_backbone.``; other entries are left
            out, and so is ``relative_position_index``, a constant.
        bgr: the network was trained on BGR images (the caffe style of BEVFormer's ResNet-101); the
            first convolution's input channels are reversed, since our images are RGB.
    """
    names = [name[len(prefix) :] for name in state if name.startswith(prefix)]
    if any(name.startswith("patch_embed.") for name in names):
        stages = {int(found[1]) for name in names if (found := re.match(r"norm(\d+)\.", name))}
        part = _swin_part(prefix, "", sorted(stages))
    elif any(name.startswith("lateral_convs.") for name in names):
        # GeneralizedLSSFPN has a batch norm behind every convolution, FPN has none.
        normed = any(re.match(r"lateral_convs\.\d+\.bn\.", name) for name in names)
        part = Part(prefix, "", _LIFT_FPN if normed else _FPN)
    else:
        part = _resnet_part(prefix, "", bgr)
    return translate_to_ours(state, [part]).state


def official_lift_keys(
    state: Mapping[str, Tensor], prefix: str = "encoders.camera.vtransform."
) -> dict[str, Tensor]:
    """Weights of MIT BEVFusion's LSSTransform or DepthLSSTransform for our :class:`LiftSplat`.

    The stored constants ``dx``, ``bx``, ``nx`` and ``frustum`` are left out: ours follow from the
    grid, the depth bins and the images' size.
    """
    layout = Layout.same_both_ways(_swap_xy_of_lift)
    return translate_to_ours(state, [Part(prefix, "", _LIFT, layout, _LIFT_CONSTANTS)]).state


def official_lidar_keys(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Weights of MIT BEVFusion's SparseEncoder, ConvFuser, SECOND or SECONDFPN for ours, whose
    names are the same.

    Sparse weights ``(kx, ky, kz, Cin, Cout)`` become ``(kz, ky, kx, Cin, Cout)``.

    Args:
        prefix: what the names of the part begin with: ``encoders.lidar.backbone.``, ``fuser.``,
            ``decoder.backbone.`` or ``decoder.neck.``; other entries are left out.
    """
    return translate_to_ours(state, [Part(prefix, "", layout=_SPARSE["mit"])]).state


def official_bevformer_keys(
    state: Mapping[str, Tensor], prefix: str = "pts_bbox_head."
) -> dict[str, Tensor]:
    """Weights of the published BEVFormerHead (encoder, decoder and branches) for ``encoder.`` and
    ``head.`` of our :class:`BEVFormer`.

    ``code_weights``, a constant of the loss, is left out. Backbone and neck are those of
    :func:`official_image_keys` with the prefixes ``img_backbone.`` and ``img_neck.``.
    """
    return translate_to_ours(state, _bevformer_parts(prefix)).state
