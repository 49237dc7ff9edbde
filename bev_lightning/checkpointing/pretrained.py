"""Loads published image-model weights into backbones."""

import re
from collections.abc import Mapping
from functools import singledispatch
from pathlib import Path

from torch import Tensor, nn

from bev_lightning.checkpointing.key_map import Part, translate_to_ours
from bev_lightning.checkpointing.official import convert_module
from bev_lightning.checkpointing.weights import read_state
from bev_lightning.errors import InputError
from bev_lightning.models.image import ResNet
from bev_lightning.models.swin import Swin

_TIMM_SWIN = (
    ("^patch_embed.proj.", "^patch_embed."),
    ("^patch_embed.norm.", "^patch_norm."),
    ("^layers.#.blocks.", "^stages.#."),
    ("attn.", "attention."),
    ("mlp.fc1.", "mlp.0."),
    ("mlp.fc2.", "mlp.2."),
)
_TORCHVISION_SWIN = (
    ("^features.0.0.", "^patch_embed."),
    ("^features.0.2.", "^patch_norm."),
    *((f"^features.{2 * i + 1}.", f"^stages.{i}.") for i in range(4)),
    *((f"^features.{2 * i + 2}.", f"^downsamples.{i}.") for i in range(3)),
    ("attn.", "attention."),
    ("mlp.3.", "mlp.2."),
)


def load_backbone(backbone: nn.Module, source: str) -> list[str]:
    """Load published image-model weights into a :class:`ResNet`, a :class:`Swin` or a registered
    class.

    Args:
        source: a .pth or .safetensors file with the names of torchvision, timm, mmdetection or the
            original Swin code, under any prefix; or the name of torchvision weights such as
            ``ResNet50_Weights.IMAGENET1K_V2`` or ``Swin_T_Weights.IMAGENET1K_V1``, which
            torchvision downloads unless they are in its cache.

    Returns:
        Names that the source lacks and that keep their initial values: the norms of Swin's outputs,
        the offsets of deformable convolutions.

    Raises:
        InputError: the source cannot be read, or belongs to another backbone.
    """
    state = backbone_weights(backbone, _read(source))
    own = backbone.state_dict()
    reshaped = [name for name in state if name in own and state[name].shape != own[name].shape]
    missing = [
        name
        for name, value in own.items()
        if name not in state and not name.endswith("num_batches_tracked")
    ]
    wrong = [
        name for name in missing if not name.startswith("norms.") and "conv_offset" not in name
    ]
    if reshaped or wrong:
        raise InputError(
            f"pretrained={source} is of another backbone: {len(wrong)} of {len(own)} weights are "
            f"missing and {len(reshaped)} of another shape, such as {(wrong + reshaped)[0]}; give "
            "weights of the same depth and width"
        )
    backbone.load_state_dict({name: state[name] for name in own if name in state}, strict=False)
    return missing


def _read(source: str) -> dict[str, Tensor]:
    if Path(source).is_file():
        return read_state(source)
    from torchvision.models import get_weight

    try:
        weights = get_weight(source)
    except (ValueError, AttributeError, KeyError):
        raise InputError(
            f"pretrained={source} is neither a file nor one of torchvision's weights; give a path, "
            "or a name such as ResNet50_Weights.IMAGENET1K_V2"
        ) from None
    return dict(weights.get_state_dict(progress=True, check_hash=True))


@singledispatch
def backbone_weights(backbone: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A published image model's weights under a backbone's own names; register other classes with
    ``backbone_weights.register``."""
    raise InputError(f"{type(backbone).__name__} takes no pretrained weights; set it to null")


@backbone_weights.register
def _(backbone: ResNet, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    # torchvision, timm and mmdetection use the same names.
    prefix = _prefix(state, "conv1.weight")
    return {name[len(prefix) :]: v for name, v in state.items() if name.startswith(prefix)}


@backbone_weights.register
def _(backbone: Swin, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if "features.0.0.weight" in state:
        return translate_to_ours(state, [Part("", "", _TORCHVISION_SWIN, (_reorder,) * 2)]).state
    if any(name.endswith("patch_embed.projection.weight") for name in state):
        return convert_module(backbone, state, _prefix(state, "patch_embed.projection.weight"))
    # timm counts a merging to the stage after it, the original code to the stage before it.
    first = 1 if any(re.match(r"layers\.3\.downsample\.", name) for name in state) else 0
    merging = ((f"^layers.{i + first}.downsample.", f"^downsamples.{i}.") for i in range(3))
    part = Part("", "", (*_TIMM_SWIN, *merging), (_reorder,) * 2)
    return translate_to_ours(state, [part]).state


def _prefix(state: Mapping[str, Tensor], name: str) -> str:
    """The prefix of a name in the state dict."""
    found = [other[: -len(name)] for other in state if other.endswith(name)]
    return min(found, key=len, default="")


def _reorder(name: str, value: Tensor) -> Tensor:
    """Reorder patch merging's inputs: theirs are 2x2 tokens by column, then row, then channel, ours
    by channel, then row, then column."""
    if not name.startswith("downsamples."):
        return value
    tokens = value.unflatten(-1, (2, 2, -1))  # column, row, channel
    return tokens.movedim(-1, -3).transpose(-1, -2).flatten(-3).contiguous()
