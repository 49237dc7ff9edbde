"""Builds the parts of a run from a resolved configuration."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from bev_lightning.errors import InputError

if TYPE_CHECKING:
    import lightning as L

    from bev_lightning.data.datamodule import DetectionDataModule
    from bev_lightning.modules.detection import DetectionModule


def build_data(cfg: DictConfig) -> "DetectionDataModule":
    data: DetectionDataModule = _instantiate(cfg.data)
    return data


def build_module(cfg: DictConfig) -> "DetectionModule":
    """The module with fresh weights, which depend on ``seed`` alone; its checkpoints tell how it was
    configured."""
    from lightning import seed_everything

    seed_everything(cfg.seed, verbose=False)
    module: DetectionModule = _instantiate(cfg.model)
    description = Path(cfg.paths.run) / "run.json"
    overrides = json.loads(description.read_text())["overrides"] if description.exists() else []
    module.provenance = {
        "overrides": overrides,
        "config": OmegaConf.to_container(cfg, resolve=True),
    }
    return module


def build_trainer(cfg: DictConfig, **changes: Any) -> "L.Trainer":
    """Lightning's trainer with the callbacks and loggers of the configuration.

    Args:
        changes: arguments that a verb fixes, whatever the configuration says.
    """
    import lightning as L

    arguments = _instantiate(cfg.trainer)
    if arguments["max_epochs"] is None:
        arguments["max_epochs"] = -1
    arguments |= {
        "callbacks": list(_instantiate(cfg.callbacks).values()),
        "logger": list(_instantiate(cfg.logger).values()),
        "default_root_dir": cfg.paths.run,
    }
    return L.Trainer(**(arguments | changes))


def load_weights(module: "DetectionModule", checkpoint: str | Path) -> None:
    """Fill the module with the weights of a checkpoint of the same model.

    Raises:
        InputError: the file is no checkpoint, or its weights are of another model; names what differs.
    """
    stored = read_state(checkpoint)
    own = module.state_dict()
    missing = [name for name in own if name not in stored]
    unexpected = [name for name in stored if name not in own]
    reshaped = [
        f"{name} {tuple(stored[name].shape)} for {tuple(value.shape)}"
        for name, value in own.items()
        if name in stored and stored[name].shape != value.shape
    ]
    if missing or unexpected or reshaped:
        raise InputError(
            f"{checkpoint} holds the weights of another model: {_list('missing', missing)}, "
            f"{_list('unexpected', unexpected)}, {_list('of another shape', reshaped)}; give the model= and "
            "the overrides it was trained with"
        )
    module.load_state_dict(stored)


def load_matching_weights(
    module: "DetectionModule", checkpoint: str | Path
) -> dict[str, list[str]]:
    """Fill what agrees in name and shape, leave the rest fresh: to train on with other classes, say.

    Returns:
        names ``loaded``, ``reshaped`` and ``missing`` (left fresh), ``unexpected`` (not used).
    """
    stored, own = read_state(checkpoint), module.state_dict()
    fits = {
        name: value
        for name, value in stored.items()
        if name in own and own[name].shape == value.shape
    }
    if not fits:
        raise InputError(
            f"{checkpoint} holds no weight of this model; give a checkpoint of the same model="
        )
    module.load_state_dict(fits, strict=False)
    return {
        "loaded": list(fits),
        "reshaped": [name for name in own if name in stored and name not in fits],
        "missing": [name for name in own if name not in stored],
        "unexpected": [name for name in stored if name not in own],
    }


def read_state(checkpoint: str | Path) -> dict[str, Any]:
    """The state dict of a checkpoint file, on the CPU. Executes nothing that the file holds."""
    import pickle

    import torch

    try:
        content = torch.load(checkpoint, map_location="cpu", weights_only=True)
        state: dict[str, Any] = content["state_dict"]
    except FileNotFoundError:
        raise InputError(
            f"there is no checkpoint {checkpoint}; give the path of a .ckpt file"
        ) from None
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, TypeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(
            f"{checkpoint} is no checkpoint of bev_lightning ({reason}); give a .ckpt file of a run"
        ) from None
    return state


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a result of the run, readable for people and programs."""
    path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")


def _instantiate(node: DictConfig) -> Any:
    # A copy: the configuration is read-only, and nothing edits it.
    return instantiate(OmegaConf.to_container(node, resolve=True), _convert_="all")


def _list(what: str, names: list[str]) -> str:
    shown = ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")
    return f"{len(names)} {what}" + (f" ({shown})" if names else "")
