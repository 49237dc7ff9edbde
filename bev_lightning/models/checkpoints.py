"""Names and layouts of published weights, taken to ours.

Each function takes a state dict with official names and returns one for our module. MIT BEVFusion's
BEV maps are (X, Y) where ours are (Y, X), so its convolutions' last two dimensions are swapped.
"""

import re
from collections.abc import Mapping

from torch import Tensor

_TRANSFUSION_NAMES = (
    (r"prediction_heads\.(\d+)\.center\.", r"branches.\1.centre."),
    (r"prediction_heads\.(\d+)\.dim\.", r"branches.\1.size."),
    (r"prediction_heads\.(\d+)\.rot\.", r"branches.\1.rotation."),
    (r"prediction_heads\.(\d+)\.vel\.", r"branches.\1.velocity."),
    (r"prediction_heads\.(\d+)\.heatmap\.", r"branches.\1.logits."),
    (r"prediction_heads\.(\d+)\.height\.", r"branches.\1.height."),
    (r"\.self_attn\.", ".self_attention."),
    (r"\.multihead_attn\.", ".cross_attention."),
    (r"\.self_posembed\.position_embedding_head\.", ".query_position."),
    (r"\.cross_posembed\.position_embedding_head\.", ".key_position."),
)


def official_transfusion_keys(
    state: Mapping[str, Tensor], prefix: str = "heads.object."
) -> dict[str, Tensor]:
    """Weights of MIT BEVFusion's TransFusionHead for our :class:`TransFusionHead`; other entries
    of the state dict, not under the prefix, are left out."""
    converted: dict[str, Tensor] = {}
    for name, value in state.items():
        if not name.startswith(prefix):
            continue
        name = name[len(prefix) :]
        for pattern, replacement in _TRANSFUSION_NAMES:
            name = re.sub(pattern, replacement, name)
        converted[name] = value.transpose(-1, -2).contiguous() if value.dim() == 4 else value
    return converted


_IMAGE_NAMES = (
    (r"^patch_embed\.projection\.", r"patch_embed."),
    (r"^patch_embed\.norm\.", r"patch_norm."),
    (r"^stages\.(\d+)\.downsample\.", r"downsamples.\1."),
    (r"^stages\.(\d+)\.blocks\.", r"stages.\1."),
    (r"\.attn\.w_msa\.", r".attention."),
    (r"\.ffn\.layers\.0\.0\.", r".mlp.0."),
    (r"\.ffn\.layers\.1\.", r".mlp.2."),
)


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
    part = {name[len(prefix) :]: value for name, value in state.items() if name.startswith(prefix)}
    # GeneralizedLSSFPN has a batch norm behind every convolution, FPN has none.
    normed = any(re.match(r"lateral_convs\.\d+\.bn\.", name) for name in part)
    # Only the stages that Swin returns have a norm: norm1..norm3 are our norms.0..norms.2.
    out_stages = sorted({int(m[1]) for name in part if (m := re.match(r"norm(\d+)\.", name))})
    converted: dict[str, Tensor] = {}
    for name, value in part.items():
        if name.endswith("relative_position_index"):
            continue
        for pattern, replacement in _IMAGE_NAMES:
            name = re.sub(pattern, replacement, name)
        if match := re.match(r"norm(\d+)\.", name):
            name = f"norms.{out_stages.index(int(match[1]))}.{name[match.end() :]}"
        if re.match(r"(lateral|fpn)_convs\.", name):
            name = name.replace(".conv.", ".0." if normed else ".").replace(".bn.", ".1.")
        converted[name] = value.flip(1) if bgr and name == "conv1.weight" else value
    return converted


def official_lift_keys(
    state: Mapping[str, Tensor], prefix: str = "encoders.camera.vtransform."
) -> dict[str, Tensor]:
    """Weights of MIT BEVFusion's LSSTransform or DepthLSSTransform for our :class:`LiftSplat`.

    The stored constants ``dx``, ``bx``, ``nx`` and ``frustum`` are left out: ours follow from the
    grid, the depth bins and the images' size.
    """
    converted: dict[str, Tensor] = {}
    for name, value in state.items():
        if not name.startswith(prefix):
            continue
        name = name[len(prefix) :]
        if name in ("dx", "bx", "nx", "frustum"):
            continue
        # Only the convolutions behind the pooling act on the BEV map; the others act on images.
        if name.startswith("downsample.") and value.dim() == 4:
            value = value.transpose(-1, -2).contiguous()
        name = re.sub(r"^dtransform\.", "depth_encoder.", name)
        converted[re.sub(r"^depthnet\.", "depth_net.", name)] = value
    return converted


def official_lidar_keys(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Weights of MIT BEVFusion's SparseEncoder, ConvFuser, SECOND or SECONDFPN for ours, whose
    names are the same.

    Sparse weights ``(kx, ky, kz, Cin, Cout)`` become ``(kz, ky, kx, Cin, Cout)``.

    Args:
        prefix: what the names of the part begin with: ``encoders.lidar.backbone.``, ``fuser.``,
            ``decoder.backbone.`` or ``decoder.neck.``; other entries are left out.
    """
    converted: dict[str, Tensor] = {}
    for name, value in state.items():
        if not name.startswith(prefix):
            continue
        if value.dim() == 5:
            value = value.permute(2, 1, 0, 3, 4).contiguous()
        elif value.dim() == 4:
            value = value.transpose(-1, -2).contiguous()
        converted[name[len(prefix) :]] = value
    return converted


_BEVFORMER_NAMES = (
    (r"^bev_embedding\.weight$", r"encoder.queries"),
    (r"^positional_encoding\.col_embed\.weight$", r"encoder.column_embedding"),
    (r"^positional_encoding\.row_embed\.weight$", r"encoder.row_embedding"),
    (r"^transformer\.level_embeds$", r"encoder.level_embedding"),
    (r"^transformer\.cams_embeds$", r"encoder.camera_embedding"),
    (r"^transformer\.can_bus_mlp\.norm\.", r"encoder.can_bus_mlp.4."),
    (r"^transformer\.can_bus_mlp\.", r"encoder.can_bus_mlp."),
    (r"^transformer\.encoder\.layers\.(\d+)\.attentions\.0\.", r"encoder.layers.\1.temporal."),
    (r"^transformer\.encoder\.layers\.(\d+)\.attentions\.1\.", r"encoder.layers.\1.spatial."),
    (r"^transformer\.encoder\.", r"encoder."),
    (
        r"^transformer\.decoder\.layers\.(\d+)\.attentions\.0\.attn\.",
        r"head.layers.\1.self_attention.",
    ),
    (
        r"^transformer\.decoder\.layers\.(\d+)\.attentions\.1\.",
        r"head.layers.\1.map_attention.",
    ),
    (r"^transformer\.decoder\.", r"head."),
    (r"^transformer\.reference_points\.", r"head.learned.reference."),
    (r"^query_embedding\.weight$", r"head.learned.embedding"),
    (r"^cls_branches\.", r"head.class_branches."),
    (r"^reg_branches\.", r"head.box_branches."),
    (r"\.ffns\.0\.layers\.0\.0\.", r".feed_forward.linear1."),
    (r"\.ffns\.0\.layers\.1\.", r".feed_forward.linear2."),
    (r"\.norms\.0\.", r".norm1."),
    (r"\.norms\.1\.", r".norm2."),
    (r"\.norms\.2\.", r".norm3."),
)


def official_bevformer_keys(
    state: Mapping[str, Tensor], prefix: str = "pts_bbox_head."
) -> dict[str, Tensor]:
    """Weights of the published BEVFormerHead (encoder, decoder and branches) for ``encoder.`` and
    ``head.`` of our :class:`BEVFormer`.

    ``code_weights``, a constant of the loss, is left out. Backbone and neck are those of
    :func:`official_image_keys` with the prefixes ``img_backbone.`` and ``img_neck.``.
    """
    converted: dict[str, Tensor] = {}
    for name, value in state.items():
        if not name.startswith(prefix) or name == f"{prefix}code_weights":
            continue
        name = name[len(prefix) :]
        for pattern, replacement in _BEVFORMER_NAMES:
            name = re.sub(pattern, replacement, name)
        converted[name] = value
    return converted
