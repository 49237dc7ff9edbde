"""Validates composed configurations; imports no torch.

Permitted values of single keys are in :mod:`bev_lightning.checks`. Here are the rules between keys.
"""

import math
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from bev_lightning.checks import (
    CHOICES,
    NUMBERS,
    check_choice,
    check_number,
    is_number,
    write_value,
)
from bev_lightning.classes import check_classes
from bev_lightning.config.aliases import KEYS
from bev_lightning.config.compose import config_dir, get_value
from bev_lightning.config.strategy import WHOLE, check_strategy, name_strategy
from bev_lightning.data.checks import check_cache_dir, check_data_root, check_gt_sampling
from bev_lightning.errors import InputError
from bev_lightning.hardware.compilation import check_compiler
from bev_lightning.hardware.machine import Machine

_PRECISIONS = ("auto", "32-true", "16-mixed", "bf16-mixed", "fp8")
# CUDA compute capability from which on cards multiply in FP8.
_FP8_CAPABILITY = 8.9
_EXAMPLE = "outputs/train/RUN/checkpoints/best.ckpt"
# BEV augmentation that leaves scenes as they are.
_IDENTITY_AUGMENT: dict[str, Any] = {
    "bev_rotate_deg": [0, 0],
    "bev_scale": [1, 1],
    "bev_flip_x": 0,
    "bev_flip_y": 0,
    "bev_translate_std_m": [0, 0, 0],
}


def check_config(cfg: DictConfig) -> None:
    """Refuse a configuration whose values are invalid or contradict each other, on any machine.

    Raises:
        InputError: one sentence that names the key, the value and the fix.
    """
    checks = [_check_former_keys, _check_values]
    if get_value(cfg, "trainer") is not None:
        checks += [_check_hardware, _check_precision, check_strategy]
    if get_value(cfg, "verb") == "train":
        checks += [_check_length, _check_rate, _check_auto_batch]
    checks += [_check_data, _check_checkpoints, _check_verb, _check_execution]
    try:
        for check in checks:
            check(cfg)
    except OmegaConfBaseException as error:
        raise InputError(
            f"the configuration does not resolve: {' '.join(str(error).split())}"
        ) from None


def check_machine(cfg: DictConfig, machine: Machine) -> None:
    """Refuse a configuration that this machine or its disk cannot serve.

    Raises:
        InputError: one sentence that names the key, what is missing and the fix.
    """
    # A plan is made for any machine, and reads no data.
    plans = get_value(cfg, "verb") == "plan"
    if not plans:
        _check_cards(cfg, machine)
        if get_value(cfg, "compile") in ("model", "regions"):
            on_cuda = get_value(cfg, "trainer.accelerator") != "cpu"
            check_compiler(on_cuda and machine.num_cuda_devices > 0, machine.capability)
    for key in ("ckpt", "init_from", "resume", "results", "source"):
        path = get_value(cfg, key)
        if key == "resume" and path == "auto":
            continue
        if path is not None and not Path(str(path)).is_file():
            raise InputError(f"{key}={path} does not exist; give a file such as {_EXAMPLE}")
    root = get_value(cfg, "data.root")
    if not plans and root is not None and get_value(cfg, "data.synthetic") is None:
        check_data_root(root, str(get_value(cfg, "data.version")))


def _check_former_keys(cfg: DictConfig) -> None:
    """A user's YAML file may still set keys by former names; overrides are translated."""
    for former, present in KEYS.items():
        if "/" not in former and OmegaConf.select(cfg, former, default="absent") != "absent":
            raise InputError(f"{former} is now {present}; rename the key in your YAML file")


def _check_values(cfg: DictConfig) -> None:
    for key in (*NUMBERS, *CHOICES):
        if (value := OmegaConf.select(cfg, key, default="absent")) != "absent":
            (check_number if key in NUMBERS else check_choice)(key, value)
    seed = get_value(cfg, "seed")
    if isinstance(seed, int) and seed >= 2**32:
        raise InputError(f"seed={seed} must be below 2^32 = {2**32}; change seed")


def _check_hardware(cfg: DictConfig) -> None:
    nodes, devices = get_value(cfg, "hardware.nodes"), get_value(cfg, "hardware.devices")
    own = get_value(cfg, "trainer.num_nodes"), get_value(cfg, "trainer.devices")
    if own != (nodes, devices):
        raise InputError(
            f"trainer.devices={own[1]} on trainer.num_nodes={own[0]} disagrees with "
            f"hardware.devices={devices} on hardware.nodes={nodes}; set hardware.devices and "
            "hardware.nodes alone"
        )


def _check_precision(cfg: DictConfig) -> None:
    precision = get_value(cfg, "trainer.precision")
    if precision not in _PRECISIONS:
        raise InputError(
            f"trainer.precision={precision} is unknown; use precision=auto, 32, 16, bf16 or fp8"
        )
    scale = get_value(cfg, "precision.loss_scale")
    if scale not in (None, "dynamic") and not (is_number(scale) and 0 < scale < math.inf):
        raise InputError(
            f"precision.loss_scale={scale} must be dynamic or a positive number; set "
            "precision.loss_scale=dynamic, or 512"
        )
    if precision != "fp8":
        return
    strategy = name_strategy(cfg)
    if strategy not in WHOLE:
        raise InputError(
            f"strategy={strategy} does not support precision=fp8; use precision=bf16, or "
            "strategy=ddp"
        )
    capability, card = get_value(cfg, "hardware.capability"), get_value(cfg, "hardware.card")
    on_cpu = get_value(cfg, "trainer.accelerator") == "cpu"
    if get_value(cfg, "precision.emulate") is True or not (on_cpu or is_number(capability)):
        return
    if on_cpu or capability < _FP8_CAPABILITY:
        here = "a CPU has none" if on_cpu else f"the {card} has {capability}"
        other = "precision=32" if on_cpu else "precision=bf16"
        raise InputError(
            f"precision=fp8 needs compute capability {_FP8_CAPABILITY} (RTX 4090, H100, H200) and "
            f"{here}; use {other}, or precision.emulate=true to try it without its speed"
        )


def _check_length(cfg: DictConfig) -> None:
    steps, epochs = get_value(cfg, "trainer.max_steps"), get_value(cfg, "trainer.max_epochs")
    if steps <= 0 and (epochs is None or epochs <= 0):
        raise InputError(
            f"trainer.max_steps={steps} and trainer.max_epochs={epochs} leave nothing to train; "
            "set one of them to a positive number"
        )
    if steps > 0 and epochs is not None and epochs > 0:
        raise InputError(
            f"trainer.max_steps={steps} and trainer.max_epochs={epochs} both end the training; set "
            "trainer.max_steps=-1 to train whole epochs, or trainer.max_epochs=-1"
        )


def _check_rate(cfg: DictConfig) -> None:
    """The learning rate and the batch that it is tuned for."""
    lr = get_value(cfg, "optim.lr")
    if not is_number(lr) or not 0 < lr < math.inf:
        raise InputError(f"optim.lr={lr} must be a positive number; set optim.lr, for example 1e-3")
    rule, base = get_value(cfg, "optim.scale_lr"), get_value(cfg, "optim.base_batch")
    if rule is not None and not (isinstance(base, int) and base is not True and base >= 1):
        raise InputError(
            f"optim.scale_lr={rule} needs optim.base_batch={base} to be a whole number of at least "
            "1; set it to the samples per optimizer step that optim.lr is tuned for"
        )


def _check_auto_batch(cfg: DictConfig) -> None:
    if not get_value(cfg, "auto_batch"):
        return
    if get_value(cfg, "resume") is not None:
        raise InputError(
            "auto_batch=true would change the batches of the run that resume= continues; set "
            "auto_batch=false"
        )
    nodes = get_value(cfg, "hardware.nodes")
    if nodes != 1:
        raise InputError(
            f"auto_batch=true tries on one machine and hardware.nodes={nodes}; use "
            "hardware.nodes=1 once and set the data.batch_size and accumulation that it finds"
        )


def _check_data(cfg: DictConfig) -> None:
    if get_value(cfg, "data") is None:
        return
    check_classes(
        list(get_value(cfg, "data.classes") or []), get_value(cfg, "data.class_of_category")
    )
    _check_image_cache(cfg)
    _check_gt_sampling(cfg)
    _check_augment(cfg)
    root, cache = get_value(cfg, "data.root"), get_value(cfg, "data.cache_dir")
    if root is None:
        raise InputError(
            "data.root is not set; give the folder of the data set, or use data=synthetic"
        )
    if cache is not None:
        check_cache_dir(cache, root)


def _check_image_cache(cfg: DictConfig) -> None:
    cache = get_value(cfg, "data.cache")
    if cache in ("ram", "disk"):
        # Imported only here: a loader's module imports torch.
        from hydra.utils import get_object

        from bev_lightning.data.loaders.auto import choose_loader
        from bev_lightning.data.loaders.image_cache import check_image_cache

        loader = get_object(str(get_value(cfg, "loader._target_")))
        if loader is not choose_loader:
            check_image_cache(cache, loader)


def _check_gt_sampling(cfg: DictConfig) -> None:
    gt_sampling = get_value(cfg, "data.gt_sampling")
    if gt_sampling is None:
        return
    if not isinstance(gt_sampling, DictConfig):
        raise InputError(
            f"data.gt_sampling={gt_sampling} names a choice; use data/gt_sampling={gt_sampling}, "
            "or data.gt_sampling=null"
        )
    inputs = get_value(cfg, "model.inputs") or {}
    sensors = [name for name in ("camera", "lidar", "radar") if inputs.get(name) is not None]
    check_gt_sampling(sensors, inputs.get("history") or 0)


def _check_augment(cfg: DictConfig) -> None:
    """The CAN bus describes the car's motion in the scene as recorded, not rotated or mirrored."""
    augment, encoder = get_value(cfg, "data.augment"), get_value(cfg, "model.network.encoder")
    if get_value(cfg, "verb") != "train" or augment is None or encoder is None:
        return
    readers = [
        f"{key}={write_value(value)}"
        for key, value in (("motion", "can_bus"), ("use_can_bus", True))
        if encoder.get(key) == value
    ]
    varied = [
        key for key, value in _IDENTITY_AUGMENT.items() if (augment.get(key) or value) != value
    ]
    if readers and varied:
        fixes = [f"data.augment.{key}={_IDENTITY_AUGMENT[key]}".replace(" ", "") for key in varied]
        raise InputError(
            f"model.network.encoder has {' and '.join(readers)}, and the CAN bus is not augmented "
            f"like the scene ({', '.join(varied)}); set {' '.join(fixes)}, or data.augment=null, "
            "or model.network.encoder.motion=pose and use_can_bus=false"
        )


def _check_checkpoints(cfg: DictConfig) -> None:
    verb = get_value(cfg, "verb")
    if verb in ("evaluate", "predict"):
        given = [key for key in ("ckpt", "results") if get_value(cfg, key) is not None]
        if len(given) != 1:
            other = (
                ", or results=FILE, a submission to score as it is" if verb == "evaluate" else ""
            )
            found = " and ".join(given) or "nothing"
            raise InputError(
                f"{verb} needs a checkpoint and got {found}; give ckpt=FILE, for example "
                f"{_EXAMPLE}{other}"
            )
        for key in ("init_from", "resume"):
            if get_value(cfg, key) is not None:
                raise InputError(
                    f"{key}={get_value(cfg, key)} is for training; {verb} reads ckpt=FILE alone"
                )
    elif get_value(cfg, "init_from") is not None and get_value(cfg, "resume") not in (None, "auto"):
        raise InputError(
            "init_from and resume are both set; use resume=FILE to continue a run, or "
            "init_from=FILE to start a new one from its weights"
        )


def _check_verb(cfg: DictConfig) -> None:
    verb = get_value(cfg, "verb")
    if verb == "convert" and get_value(cfg, "source") is None:
        raise InputError(
            "convert needs a file of weights; give source=FILE and the model= it belongs to"
        )
    if verb == "bench" and get_value(cfg, "bench") is None:
        known = sorted(path.stem for path in (config_dir() / "bench").glob("*.yaml"))
        raise InputError(f"bench needs a choice; give bench={' or '.join(known)}")


def _check_execution(cfg: DictConfig) -> None:
    scope, layout = get_value(cfg, "compile") or "off", get_value(cfg, "channels_last")
    for part in ("model.network.backbone", "model.network.camera.backbone"):
        # Recomputed blocks keep their norms' statistics, which torch.compile cannot trace.
        if scope != "off" and get_value(cfg, f"{part}.gradient_checkpointing"):
            raise InputError(
                f"compile={scope} cannot trace {part}.gradient_checkpointing=true; set that to "
                "false, or use compile=off"
            )
    if get_value(cfg, "trainer") is None or (strategy := name_strategy(cfg)) in WHOLE:
        return
    for key, value, default in (("compile", scope, "off"), ("channels_last", layout, "auto")):
        if value not in ("off", "auto", False, None):
            raise InputError(
                f"{key}={write_value(value)} is for strategy=single and ddp, where every process "
                f"holds the whole model; use {key}={default} with strategy={strategy}"
            )


def _check_cards(cfg: DictConfig, machine: Machine) -> None:
    accelerator = get_value(cfg, "trainer.accelerator")
    devices = get_value(cfg, "hardware.devices")
    if accelerator not in ("gpu", "auto") or devices == "auto":
        return
    if accelerator == "auto" and machine.num_cuda_devices == 0:
        return
    choice = get_value(cfg, "hydra.runtime.choices.hardware")
    by_choice = choice and accelerator == "gpu" and devices == _profile_devices(str(choice))
    name = f"hardware={choice}" if by_choice else f"hardware.devices={devices}"
    auto, one = ("", "") if by_choice else (" hardware.devices=auto", " hardware.devices=1")
    verb = get_value(cfg, "verb")
    fix = f"use hardware=auto{auto}, or python -m bev_lightning.{verb} ... hardware=cpu{one}"
    if machine.num_cuda_devices < devices:
        raise InputError(
            f"{name} needs {devices} CUDA device{'s' * (devices > 1)}, this machine has "
            f"{machine.num_cuda_devices}; {fix}"
        )
    capability = get_value(cfg, "hardware.capability")
    if is_number(capability) and (machine.capability or 0) < capability:
        raise InputError(
            f"{name} needs compute capability {capability}, the {machine.card} here has "
            f"{machine.capability}; {fix}"
        )
    memory = get_value(cfg, "hardware.memory_gib")
    # Cards report a little less than their nominal memory.
    if is_number(memory) and (machine.memory_gib or 0) < 0.9 * memory:
        raise InputError(
            f"{name} needs cards of {memory:g} GiB, the {machine.card} here has "
            f"{machine.memory_gib:.0f} GiB; {fix}"
        )


def _profile_devices(choice: str) -> Any:
    path = config_dir() / "hardware" / f"{choice}.yaml"
    return OmegaConf.load(path).hardware.devices if path.is_file() else None
