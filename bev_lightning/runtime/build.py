"""Builds the parts of a run from a resolved configuration."""

import json
import os
import re
import signal
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from bev_lightning.config.resolve import plan_batch
from bev_lightning.errors import InputError
from bev_lightning.hardware.cluster import find_launcher, is_rank_zero
from bev_lightning.hardware.machine import choose_num_threads, detect_machine

if TYPE_CHECKING:
    import lightning as L

    from bev_lightning.data.datamodule import DetectionDataModule
    from bev_lightning.metrics.nuscenes import NuScenesEvaluator
    from bev_lightning.modules.detection import DetectionModule


def build_data(cfg: DictConfig) -> "DetectionDataModule":
    data: DetectionDataModule = _instantiate(cfg.data)
    return data


def build_module(cfg: DictConfig) -> "DetectionModule":
    """The module with fresh weights, which depend on ``seed`` alone; its checkpoints tell how it
    was configured."""
    from lightning import seed_everything

    seed_everything(cfg.seed, verbose=False)
    module: DetectionModule = _instantiate(cfg.model)
    if module.optim is not None:
        optim = module.optim
        lr = plan_batch(cfg).scale_lr(optim.lr, optim.scale_lr, optim.base_batch)
        module.optim = replace(optim, lr=lr, scale_lr=None)
    description = Path(cfg.paths.run) / "run.json"
    overrides = json.loads(description.read_text())["overrides"] if description.exists() else []
    module.provenance = {
        "overrides": overrides,
        "config": OmegaConf.to_container(cfg, resolve=True),
    }
    if OmegaConf.select(cfg, "tta") is not None:
        module.use_tta(_instantiate(cfg.tta))
    return module


def prepare_execution(module: "DetectionModule", cfg: DictConfig) -> None:
    """Lay out the weights and compile as the configuration says; names and values stay."""
    import torch

    from bev_lightning.hardware.compilation import compile_network

    if cfg.channels_last:
        # A convolution answers in the layout of its weights, so that all maps between follow.
        module.network.to(memory_format=torch.channels_last)
    if cfg.compile != "off":
        compile_network(module.network, cfg.compile)


def build_evaluator(cfg: DictConfig) -> "NuScenesEvaluator":
    """The metric alone, without a module."""
    evaluator: NuScenesEvaluator = _instantiate(cfg.model.evaluator)
    return evaluator


def build_trainer(cfg: DictConfig, **changes: Any) -> "L.Trainer":
    """Lightning's trainer with the callbacks and loggers of the configuration.

    Args:
        changes: arguments that a verb fixes, whatever the configuration says.
    """
    import lightning as L
    import torch
    from lightning.pytorch.callbacks import ProgressBar
    from lightning.pytorch.plugins.environments import SLURMEnvironment
    from lightning.pytorch.utilities.rank_zero import rank_zero_warn

    from bev_lightning.callbacks.checkpoint import AtomicCheckpointIO

    # Lightning 2.6 asks torch in a way that 2.14 deprecates; nothing that a user could mend.
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)`")
    arguments = _instantiate(cfg.trainer)
    if arguments["accelerator"] == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        cpus, processes = detect_machine().num_cpus, arguments["devices"]
        torch.set_num_threads(choose_num_threads(cpus, processes, cfg.loader.num_workers))
    if arguments["sync_batchnorm"]:
        # Torch has it for CUDA alone, and one process has nothing to share.
        several = arguments["devices"] * arguments["num_nodes"] > 1
        arguments["sync_batchnorm"] = several and arguments["accelerator"] == "gpu"
        if not arguments["sync_batchnorm"]:
            rank_zero_warn("trainer.sync_batchnorm is off: it takes several CUDA processes")
    if arguments["max_epochs"] is None:
        arguments["max_epochs"] = -1
    # Lightning counts batches here. A validation inside of an accumulation would meet gradients
    # that are half summed up.
    arguments["val_check_interval"] *= arguments["accumulate_grad_batches"]
    _set_precision(cfg.precision, arguments)
    callbacks = list(_instantiate(cfg.callbacks).values())
    if not arguments["enable_progress_bar"]:
        # Lightning refuses a bar that it is told not to draw.
        callbacks = [one for one in callbacks if not isinstance(one, ProgressBar)]
    plugins = [*arguments.get("plugins", []), AtomicCheckpointIO()]
    if find_launcher() == "slurm":
        # Lightning's own requeueing would save in the middle of a step.
        number = cfg.cluster.requeue_signal and signal.Signals[cfg.cluster.requeue_signal]
        plugins.append(SLURMEnvironment(auto_requeue=False, requeue_signal=number))
    arguments |= {
        "plugins": plugins,
        "callbacks": callbacks,
        "logger": list(_instantiate(cfg.logger).values()),
        "default_root_dir": cfg.paths.run,
    }
    return L.Trainer(**(arguments | changes))


def _set_precision(options: DictConfig, arguments: dict[str, Any]) -> None:
    """Exchange what Lightning does not have, or not on this device, for a plugin of ours."""
    from lightning.pytorch.strategies import DeepSpeedStrategy

    from bev_lightning.hardware.precision import Float8, Float16, set_tf32

    set_tf32(options.tf32)
    name = arguments["precision"]
    device = "cuda" if arguments["accelerator"] == "gpu" else "cpu"
    # DeepSpeed has its own loss scale.
    own = isinstance(arguments["strategy"], DeepSpeedStrategy)
    if name == "fp8" or (name == "16-mixed" and not own):
        del arguments["precision"]
        plugin = (
            Float16(device, options.loss_scale)
            if name == "16-mixed"
            else Float8(device, options.recipe, options.emulate)
        )
        arguments["plugins"] = [plugin]


def load_weights(module: "DetectionModule", checkpoint: str | Path) -> None:
    """Fill the module with the weights of a checkpoint, or of a file that ``convert`` wrote, of the
    same model; say loudly where it reads another number of sweeps than they were trained with.

    Raises:
        InputError: the file is no checkpoint, or its weights are of another model; names what
            differs.
    """
    from bev_lightning.checkpointing.weights import read_state

    stored = read_state(checkpoint)
    _refuse_other_model(
        module, stored, checkpoint, "give the model= and the overrides it was trained with"
    )
    module.load_state_dict(stored)
    _warn_of_other_sweeps(module, checkpoint)


def check_resume(module: "DetectionModule", checkpoint: str | Path) -> None:
    """Look whether a training of the module can go on from a checkpoint.

    Raises:
        InputError: the file is no checkpoint of a run, or of a run of another model; names what
            differs.
    """
    from bev_lightning.checkpointing.weights import read_state

    stored = read_state(checkpoint)
    mend = f"use init_from={checkpoint} to start a new training from the weights that fit"
    content = {}
    if Path(checkpoint).suffix != ".safetensors":
        content = _open(checkpoint)
    lacks = [name for name in ("optimizer_states", "lr_schedulers", "loops") if name not in content]
    if lacks:
        raise InputError(
            f"resume={checkpoint} holds weights but not the state of a training (no "
            f"{', '.join(lacks)}); {mend}, or give the last.ckpt of a run"
        )
    _refuse_other_model(module, stored, f"resume={checkpoint}", mend)


def _refuse_other_model(
    module: "DetectionModule", stored: Mapping[str, Any], name: str | Path, mend: str
) -> None:
    own = module.state_dict()
    missing = [key for key in own if key not in stored]
    unexpected = [key for key in stored if key not in own]
    reshaped = [
        f"{key} {tuple(stored[key].shape)} for {tuple(value.shape)}"
        for key, value in own.items()
        if key in stored and stored[key].shape != value.shape
    ]
    if missing or unexpected or reshaped:
        raise InputError(
            f"{name} holds the weights of another model: {_list('missing', missing)}, "
            f"{_list('unexpected', unexpected)}, {_list('of another shape', reshaped)}; {mend}"
        )


def load_matching_weights(
    module: "DetectionModule", checkpoint: str | Path
) -> dict[str, list[str]]:
    """Fill what agrees in name and shape, leave the rest fresh: to train other classes, say.

    Returns:
        names ``loaded``, ``reshaped`` and ``missing`` (left fresh), ``unexpected`` (not used).
    """
    from bev_lightning.checkpointing.weights import read_state

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


def read_trained_inputs(checkpoint: str | Path) -> dict[str, Any]:
    """``model.inputs`` that a file's weights were trained with; empty where it does not say."""
    from safetensors import safe_open

    if Path(checkpoint).suffix == ".safetensors":
        with safe_open(checkpoint, "pt") as file:
            told: str | None = (file.metadata() or {}).get("inputs")
        return json.loads(told) if told else {}
    config = _open(checkpoint).get("bev_lightning", {}).get("config", {})
    inputs: dict[str, Any] = config.get("model", {}).get("inputs", {})
    return inputs


def read_steps(checkpoint: str | Path) -> int | None:
    """Optimizer steps that a checkpoint was trained for; None where the file does not say."""
    if Path(checkpoint).suffix == ".safetensors":
        return None
    steps = _open(checkpoint).get("global_step")
    return None if steps is None else int(steps)


def _open(checkpoint: str | Path) -> dict[str, Any]:
    """What a file of torch's holds; its tensors stay on the disk where its format allows that."""
    import torch

    content: dict[str, Any] = torch.load(
        checkpoint, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(checkpoint)
    )
    return content


def _warn_of_other_sweeps(module: "DetectionModule", checkpoint: str | Path) -> None:
    from lightning.pytorch.utilities.rank_zero import rank_zero_warn

    trained = read_trained_inputs(checkpoint)
    for name in ("lidar", "radar"):
        sensor, told = getattr(module.inputs, name), trained.get(name) or {}
        if sensor is not None and told.get("sweeps", sensor.sweeps) != sensor.sweeps:
            rank_zero_warn(
                f"the weights of {checkpoint} were trained with model.inputs.{name}.sweeps="
                f"{told['sweeps']} but read {sensor.sweeps} here: scores will be lower; leave the "
                "key out to read what they were trained with"
            )


def load_backbones(module: "DetectionModule") -> None:
    """Fill the image backbones that ask for it (``pretrained=``) with published weights."""
    from bev_lightning.checkpointing.pretrained import load_backbone

    for name, part in module.named_modules():
        source = getattr(part, "pretrained", None)
        if source is not None:
            fresh = load_backbone(part, source)
            left = f"; left fresh: {', '.join(fresh)}" if fresh else ""
            if is_rank_zero():
                print(f"{name}: weights of {source}{left}")


def _instantiate(node: DictConfig) -> Any:
    """Build what a node describes; a value that a constructor refuses is the user's to mend."""
    try:
        # A copy: the configuration is read-only, and nothing edits it.
        return instantiate(OmegaConf.to_container(node, resolve=True), _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, InputError):
            raise cause from None
        if isinstance(cause, (TypeError, ValueError)):
            place = ".".join(filter(None, [node._get_full_key(None), _full_key(error)]))
            raise InputError(f"the values under {place} do not fit: {cause}") from error
        raise


def _full_key(error: InstantiationException) -> str:
    found = re.search(r"full_key: (\S+)", str(error))
    return found[1] if found else ""


def _list(what: str, names: list[str]) -> str:
    shown = ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")
    return f"{len(names)} {what}" + (f" ({shown})" if names else "")
