"""Whole state dicts between a network of ours and its published counterpart."""

from collections.abc import Mapping

from torch import Tensor, nn

from bev_lightning.checkpointing.key_map import Fit, fit, translate_to_official, translate_to_ours
from bev_lightning.checkpointing.official_names import find_names, published_parts
from bev_lightning.errors import InputError
from bev_lightning.models.bevformer import BEVFormer


def convert_to_ours(
    network: nn.Module, state: Mapping[str, Tensor], names: str | None = None
) -> tuple[Fit, str]:
    """Published weights for a network.

    Args:
        names: whose names the state dict bears; None: found out.

    Returns:
        How the weights fit the network, and whose names they bore.

    Raises:
        InputError: the names are none that are known, or not of this network's kind.
    """
    if state and all(name.startswith("module.") for name in state):  # saved under DDP
        state = {name.removeprefix("module."): value for name, value in state.items()}
    # The port's view transform was called so at first.
    state = {_modernise(name): value for name, value in state.items()}
    names = names or find_names(state)
    if names is None:
        raise InputError(
            "the weights bear no published names that are known; give a checkpoint of BEVFormer, "
            "MIT BEVFusion or mmdetection3d's BEVFusion, or to=official if they are ours"
        )
    parts = published_parts(network, names)
    own = network.state_dict()
    official = translate_to_official(own, parts).sources
    return fit(
        translate_to_ours(state, parts), own, {ours: name for name, ours in official.items()}
    ), names


def convert_to_official(
    network: nn.Module,
    state: Mapping[str, Tensor],
    names: str | None = None,
    image_size: tuple[int, int] | None = None,
) -> tuple[Fit, str]:
    """A network's weights for the published code, with the constants that it stores beside them.

    Args:
        state: names as in ``network.state_dict()``.
        names: whose names to give; None: BEVFormer's, or MIT BEVFusion's.
        image_size: height, width of the network's image [pixels]; None without cameras.

    Returns:
        How the weights fit the network, by their published names, and whose names these are.
    """
    names = names or ("bevformer" if isinstance(network, BEVFormer) else "mit")
    parts = published_parts(network, names, image_size)
    wanted = translate_to_official(network.state_dict(), parts)
    return fit(translate_to_official(state, parts), wanted.state, wanted.sources), names


def _modernise(name: str) -> str:
    old = "vtransform."
    return f"view_transform.{name[len(old) :]}" if name.startswith(old) else name
