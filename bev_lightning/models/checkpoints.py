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
    """Weights of MIT BEVFusion's TransFusionHead for our :class:`TransFusionHead`; other entries of the
    state dict, not under the prefix, are left out."""
    converted: dict[str, Tensor] = {}
    for name, value in state.items():
        if not name.startswith(prefix):
            continue
        name = name[len(prefix) :]
        for pattern, replacement in _TRANSFUSION_NAMES:
            name = re.sub(pattern, replacement, name)
        converted[name] = value.transpose(-1, -2).contiguous() if value.dim() == 4 else value
    return converted
