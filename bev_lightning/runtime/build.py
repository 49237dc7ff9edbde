"""Builds the parts of a run from a resolved configuration."""

import json
import os
import re
import signal
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from omegaconf import DictConfig, OmegaConf
from safetensors import safe_open

from bev_lightning.callbacks.checkpoint import AtomicCheckpointIO
from bev_lightning.callbacks.final_validation import FinalValidation
from bev_lightning.checkpointing.key_map import Fit, Translation, fit
from bev_lightning.checkpointing.pretrained import load_backbone
from bev_lightning.checkpointing.weights import read_state
from bev_lightning.config.resolve import plan_batch
from bev_lightning.data.datamodule import DetectionDataModule
from bev_lightning.errors import InputError
from bev_lightning.hardware.cluster import find_launcher, is_rank_zero
from bev_lightning.hardware.compilation import compile_network
from bev_lightning.hardware.machine import choose_num_threads, detect_machine
from bev_lightning.hardware.precision import Float8, Float16, set_tf32
from bev_lightning.metrics.nuscenes import NuScenesEvaluator
from bev_lightning.models.protocol import SupportsRegionalCompile
from bev_lightning.modules.detection import DetectionModule
from bev_lightning.private_apis import config_key
from bev_lightning.runtime.quiet import ignore_library_warnings


def build_data(cfg: DictConfig) -> DetectionDataModule:
    """The data module; reads nothing yet."""
    data: DetectionDataModule = _instantiate(cfg.data)
    return data


def build_module(cfg: DictConfig) -> DetectionModule:
    """The module with fresh weights, which depend on ``seed`` alone.

    Its checkpoints store the configuration and the overrides of the run.
    """
    L.seed_everything(cfg.seed, verbose=False)
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


def prepare_execution(module: DetectionModule, cfg: DictConfig) -> None:
    """Set the memory layout of the weights and compile, as configured; names and values stay.

    Raises:
        InputError: ``compile=regions`` and the network lists no regions.
    """
    if cfg.channels_last:
        # Convolutions return the layout of their weights, so that all feature maps follow.
        module.network.to(memory_format=torch.channels_last)
    if cfg.compile == "regions" and not isinstance(module.network, SupportsRegionalCompile):
        raise InputError(
            f"compile=regions needs a network with the method dense_regions, which "
            f"{type(module.network).__name__} lacks; add the method, or use compile=model or off"
        )
    if cfg.compile != "off":
        compile_network(module.network, cfg.compile)


def build_evaluator(cfg: DictConfig) -> NuScenesEvaluator:
    """The metric alone, without a module."""
    evaluator: NuScenesEvaluator = _instantiate(cfg.model.evaluator)
    return evaluator


def build_trainer(cfg: DictConfig, **changes: Any) -> L.Trainer:
    """Lightning's trainer with the callbacks and loggers of the configuration.

    Args:
        changes: Trainer arguments that take precedence over the configuration.
    """
    ignore_library_warnings()
    arguments = _instantiate(cfg.trainer)
    if arguments["accelerator"] == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        cpus, processes = detect_machine().num_cpus, arguments["devices"]
        torch.set_num_threads(choose_num_threads(cpus, processes, cfg.loader.num_workers))
    if arguments["sync_batchnorm"]:
        # Torch implements it for CUDA only, and it needs several processes.
        several = arguments["devices"] * arguments["num_nodes"] > 1
        arguments["sync_batchnorm"] = several and arguments["accelerator"] == "gpu"
        if not arguments["sync_batchnorm"]:
            rank_zero_warn("trainer.sync_batchnorm is off: it needs several CUDA processes")
    if arguments["max_epochs"] is None:
        arguments["max_epochs"] = -1
    # Lightning counts batches here. A validation must not fall between the micro-steps of an
    # optimizer step.
    arguments["val_check_interval"] *= arguments["accumulate_grad_batches"]
    _set_precision(cfg.precision, arguments)
    callbacks = [one for one in _instantiate(cfg.callbacks).values() if one is not None]
    if not arguments["enable_progress_bar"]:
        # Lightning refuses a progress bar with enable_progress_bar=False.
        callbacks = [one for one in callbacks if not isinstance(one, ProgressBar)]
    callbacks.append(FinalValidation())
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
    """Replace a precision that Lightning lacks, or lacks on this device, by a plugin."""
    set_tf32(options.tf32)
    name = arguments["precision"]
    device = "cuda" if arguments["accelerator"] == "gpu" else "cpu"
    # DeepSpeed has its own loss scale.
    if name == "16-mixed" and not isinstance(arguments["strategy"], DeepSpeedStrategy):
        arguments["plugins"] = [Float16(device, options.loss_scale)]
    elif name == "fp8":
        arguments["plugins"] = [Float8(device, options.recipe, options.emulate)]
    else:
        return
    del arguments["precision"]


def load_weights(module: DetectionModule, checkpoint: str | Path) -> None:
    """Load the weights of a checkpoint, or of a file that ``convert`` wrote, of the same model.

    Warns if the module reads another number of sweeps than the weights were trained with.

    Raises:
        InputError: the file is no checkpoint, or its weights are of another model; names what
            differs.
    """
    stored = read_state(checkpoint)
    _refuse_other_model(
        module, stored, checkpoint, "give the model= and the overrides it was trained with"
    )
    module.load_state_dict(stored)
    _warn_of_other_sweeps(module, checkpoint)


def check_resume(module: DetectionModule, checkpoint: str | Path) -> None:
    """Check that a training of the module can resume from a checkpoint.

    Raises:
        InputError: the file is no checkpoint of a run, or of a run of another model; names what
            differs.
    """
    stored = read_state(checkpoint)
    fix = f"use init_from={checkpoint} to start a new training from the weights that fit"
    content = {} if Path(checkpoint).suffix == ".safetensors" else _open(checkpoint)
    lacks = [name for name in ("optimizer_states", "lr_schedulers", "loops") if name not in content]
    if lacks:
        raise InputError(
            f"resume={checkpoint} holds weights but not the state of a training (no "
            f"{', '.join(lacks)}); {fix}, or give the last.ckpt of a run"
        )
    _refuse_other_model(module, stored, f"resume={checkpoint}", fix)


def _refuse_other_model(
    module: DetectionModule, stored: Mapping[str, Any], name: str | Path, fix: str
) -> None:
    found = _compare(module, stored)
    if not found.is_whole:
        raise InputError(
            f"{name} holds the weights of another model: {_list('missing', found.missing)}, "
            f"{_list('unexpected', found.unexpected)}, "
            f"{_list('of another shape', found.reshaped)}; {fix}"
        )


def _compare(module: DetectionModule, stored: Mapping[str, Any]) -> Fit:
    same_names = {name: name for name in stored}
    return fit(Translation(dict(stored), same_names, []), module.state_dict(), {})


def load_matching_weights(module: DetectionModule, checkpoint: str | Path) -> dict[str, list[str]]:
    """Load the weights that match in name and shape, for example to train other classes.

    Returns:
        names ``loaded``, ``reshaped`` and ``missing`` (left fresh), ``unexpected`` (not used).
    """
    found = _compare(module, read_state(checkpoint))
    if not found.state:
        raise InputError(
            f"{checkpoint} holds no weight of this model; give a checkpoint of the same model="
        )
    module.load_state_dict(found.state, strict=False)
    return {
        "loaded": list(found.state),
        "reshaped": [entry.partition(" ")[0] for entry in found.reshaped],
        "missing": found.missing,
        "unexpected": found.unexpected,
    }


def read_trained_inputs(checkpoint: str | Path) -> dict[str, Any]:
    """``model.inputs`` that a file's weights were trained with; empty if it does not store them."""
    if Path(checkpoint).suffix == ".safetensors":
        with safe_open(checkpoint, "pt") as file:
            stored: str | None = (file.metadata() or {}).get("inputs")
        return json.loads(stored) if stored else {}
    config = _open(checkpoint).get("bev_lightning", {}).get("config", {})
    inputs: dict[str, Any] = config.get("model", {}).get("inputs", {})
    return inputs


def read_steps(checkpoint: str | Path) -> int | None:
    """Optimizer steps that a checkpoint was trained for; None if the file does not store them."""
    if Path(checkpoint).suffix == ".safetensors":
        return None
    steps = _open(checkpoint).get("global_step")
    return None if steps is None else int(steps)


def _open(checkpoint: str | Path) -> dict[str, Any]:
    """Content of a file that torch wrote; its tensors stay on the disk if possible."""
    content: dict[str, Any] = torch.load(
        checkpoint, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(checkpoint)
    )
    return content


def _warn_of_other_sweeps(module: DetectionModule, checkpoint: str | Path) -> None:
    trained = read_trained_inputs(checkpoint)
    for name in ("lidar", "radar"):
        sensor, stored = getattr(module.inputs, name), trained.get(name) or {}
        if sensor is not None and stored.get("sweeps", sensor.sweeps) != sensor.sweeps:
            rank_zero_warn(
                f"the weights of {checkpoint} were trained with model.inputs.{name}.sweeps="
                f"{stored['sweeps']} but read {sensor.sweeps} here, which lowers the scores; omit "
                "the key to read as many as in training"
            )


def build_loaded_module(cfg: DictConfig) -> DetectionModule:
    """The module ready to run: with its weights, in its memory layout, compiled as configured.

    The weights are those of ``ckpt``, else fresh with published backbones and ``init_from``. Of a
    ``resume`` the checkpoint is only checked.

    Raises:
        InputError: a file does not fit the model; names what differs.
    """
    module = build_module(cfg)
    if cfg.get("ckpt") is not None:
        load_weights(module, cfg.ckpt)
    elif cfg.resume is not None:
        check_resume(module, cfg.resume)
    else:
        _load_initial_weights(module, cfg)
    prepare_execution(module, cfg)
    return module


def _load_initial_weights(module: DetectionModule, cfg: DictConfig) -> None:
    for name, part in module.named_modules():
        source = getattr(part, "pretrained", None)
        if source is not None:
            fresh = load_backbone(part, source)
            left = f"; left fresh: {', '.join(fresh)}" if fresh else ""
            if is_rank_zero():
                print(f"{name}: weights of {source}{left}")
    if cfg.init_from is not None:
        names = load_matching_weights(module, cfg.init_from)
        if is_rank_zero():
            print(f"{cfg.init_from}: {len(names['loaded'])} weights loaded")
            for kind in ("reshaped", "missing", "unexpected"):
                if names[kind]:
                    print(f"  {kind}: {', '.join(names[kind])}")


def _instantiate(node: DictConfig) -> Any:
    """Instantiate a config node; a value that a constructor refuses becomes an InputError."""
    try:
        # A copy: the configuration is read-only, and nothing edits it.
        return instantiate(OmegaConf.to_container(node, resolve=True), _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, InputError):
            raise cause from None
        if isinstance(cause, (TypeError, ValueError)):
            inner = re.search(r"full_key: (\S+)", str(error))
            key = ".".join(filter(None, [config_key(node), inner and inner[1]]))
            raise InputError(f"the values under {key} do not fit: {cause}") from error
        raise


def _list(what: str, names: list[str]) -> str:
    shown = ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")
    return f"{len(names)} {what}" + (f" ({shown})" if names else "")
