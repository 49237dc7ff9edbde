"""What a configuration may mean; refusals say the mend."""

import math
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from bev_lightning.classes import check_classes
from bev_lightning.config.aliases import KEYS
from bev_lightning.config.compose import config_dir
from bev_lightning.config.strategy import WHOLE, check_strategy, name_strategy
from bev_lightning.config.validate_axes import (
    check_auto_batch,
    check_precision,
    check_rate,
)
from bev_lightning.config.validate_axes import get as _get
from bev_lightning.data.checks import check_on_missing
from bev_lightning.errors import InputError
from bev_lightning.hardware.compilation import check_compiler
from bev_lightning.hardware.machine import Machine

_PRECISIONS = ("auto", "32-true", "16-mixed", "bf16-mixed", "fp8")
_EXAMPLE = "outputs/train/RUN/checkpoints/best.ckpt"
# Key, type, smallest value.
_NUMBERS: tuple[tuple[str, type, float], ...] = (
    ("seed", int, 0),
    ("hardware.nodes", int, 1),
    ("hardware.devices", int, 1),
    ("trainer.accumulate_grad_batches", int, 1),
    ("trainer.max_steps", int, -1),
    ("trainer.max_epochs", int, -1),
    ("trainer.val_check_interval", int, 1),
    ("trainer.log_every_n_steps", int, 1),
    ("trainer.gradient_clip_val", float, 0),
    ("trainer.limit_val_batches", float, 0),
    ("optim.weight_decay", float, 0),
    ("scheduler.start_factor", float, 0),
    ("scheduler.end_factor", float, 0),
    ("data.batch_size", int, 1),
    ("data.val_batch_size", int, 1),
    ("data.num_workers", int, 0),
    ("data.min_points", int, 0),
    ("data.cache_gib", float, 0),
    ("loader.num_workers", int, 0),
    ("loader.prefetch", int, 1),
    ("loader.image_queue", int, 1),
    ("loader.cloud_queue", int, 1),
    ("cluster.rendezvous_s", float, 1),
    ("cluster.collective_s", float, 1),
)
_AUTO = ("hardware.devices", "loader.num_workers", "data.num_workers")
# null stands for something there.
_NULLABLE = ("trainer.max_epochs", "trainer.gradient_clip_val", "trainer.limit_val_batches")
# BEV augmentation that leaves scenes as they are.
_STILL: dict[str, Any] = {
    "bev_rotate_deg": [0, 0],
    "bev_scale": [1, 1],
    "bev_flip_x": 0,
    "bev_flip_y": 0,
    "bev_translate_std_m": [0, 0, 0],
}


def check_config(cfg: DictConfig) -> None:
    """Refuse a configuration that cannot mean what it says; knows nothing of any machine.

    Raises:
        InputError: one sentence that names the key, the value and the mend.
    """
    for rule in (
        _check_names,
        _check_numbers,
        _check_axes,
        check_auto_batch,
        _check_length,
        _check_data,
        _check_checkpoints,
        _check_bench,
        _check_execution,
    ):
        try:
            rule(cfg)
        except OmegaConfBaseException as error:
            raise InputError(
                f"the configuration does not resolve: {' '.join(str(error).split())}"
            ) from None


def check_machine(cfg: DictConfig, machine: Machine) -> None:
    """Refuse a configuration that this machine or its disk cannot serve.

    Raises:
        InputError: one sentence that names the key, what is there and the mend.
    """
    # A plan is made for any machine, and reads no data.
    plans = _get(cfg, "verb") == "plan"
    if not plans:
        _check_cards(cfg, machine)
        if _get(cfg, "compile") in ("model", "regions"):
            on_cuda = _get(cfg, "trainer.accelerator") != "cpu" and machine.num_cuda_devices > 0
            check_compiler(on_cuda, machine.capability)
    for key in ("ckpt", "init_from", "resume", "results", "source"):
        path = _get(cfg, key)
        if key == "resume" and path == "auto":
            continue
        if path is not None and not Path(str(path)).is_file():
            raise InputError(f"{key}={path} does not exist; give a file such as {_EXAMPLE}")
    root, version = _get(cfg, "data.root"), _get(cfg, "data.version")
    root = root if root is None else Path(str(root)).expanduser()
    if plans or root is None or _get(cfg, "data.synthetic") is not None:
        return
    if not root.is_dir():
        mend = f"set data.root to the folder of {version}/ and samples/, or use data=synthetic"
        raise InputError(f"data.root={root} does not exist; {mend}")
    if not (root / str(version)).is_dir():
        found = sorted(path.name for path in root.glob("v*.*") if path.is_dir())
        mend = f"set data.version={found[0]}" if found else "set data.root to a nuScenes data set"
        raise InputError(f"data.root={root} has no folder {version}; {mend}")


def _check_names(cfg: DictConfig) -> None:
    """A YAML file of a user's may still set keys by former names; overrides are translated."""
    for former, present in KEYS.items():
        if "/" not in former and OmegaConf.select(cfg, former, default="absent") != "absent":
            raise InputError(f"{former} is now {present}; rename the key in your YAML file")


def _check_numbers(cfg: DictConfig) -> None:
    for key, kind, smallest in _NUMBERS:
        value = OmegaConf.select(cfg, key, default="absent")
        if value == "absent" or (value == "auto" and key in _AUTO):
            continue
        if value is None and key in _NULLABLE:
            continue
        word = "a whole number" if kind is int else "a number"
        numeric = isinstance(value, int if kind is int else (int, float)) and not isinstance(
            value, bool
        )
        if not numeric or not smallest <= value < math.inf:
            said = "null" if value is None else value
            raise InputError(
                f"{key}={said} must be {word} of at least {smallest:g}; set {key} anew"
            )
    seed = _get(cfg, "seed")
    if isinstance(seed, int) and seed >= 2**32:
        raise InputError(f"seed={seed} must be below 2^32 = {2**32}; set seed anew")


def _check_axes(cfg: DictConfig) -> None:
    if _get(cfg, "trainer") is None:
        return
    precision = _get(cfg, "trainer.precision")
    nodes, devices = _get(cfg, "hardware.nodes"), _get(cfg, "hardware.devices")
    if _get(cfg, "trainer.devices") != devices or _get(cfg, "trainer.num_nodes") != nodes:
        raise InputError(
            f"trainer.devices={_get(cfg, 'trainer.devices')} on trainer.num_nodes="
            f"{_get(cfg, 'trainer.num_nodes')} disagrees with hardware.devices={devices} on "
            f"hardware.nodes={nodes}; set hardware.devices and hardware.nodes alone"
        )
    if precision not in _PRECISIONS:
        raise InputError(
            f"trainer.precision={precision} is unknown; use precision=auto, 32, 16, bf16 or fp8"
        )
    check_precision(cfg, str(precision))
    check_strategy(cfg)


def _check_length(cfg: DictConfig) -> None:
    if _get(cfg, "verb") != "train":
        return
    steps, epochs = _get(cfg, "trainer.max_steps"), _get(cfg, "trainer.max_epochs")
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
    check_rate(cfg)


def _check_data(cfg: DictConfig) -> None:
    if _get(cfg, "data") is None:
        return
    check_on_missing(_get(cfg, "data.on_missing"))
    classes = list(_get(cfg, "data.classes") or [])
    check_classes(classes, _get(cfg, "data.class_of_category"))
    _check_loader(cfg)
    _check_paste(cfg)
    _check_augment(cfg)
    root, cache = _get(cfg, "data.root"), _get(cfg, "data.cache_dir")
    if root is None:
        raise InputError(
            "data.root is not set; give the folder of the data set, or use data=synthetic"
        )
    if cache is not None and Path(str(cache)).resolve().is_relative_to(Path(str(root)).resolve()):
        raise InputError(
            f"paths.cache={cache} lies inside data.root={root}, which is only read; set "
            "paths.cache to a folder outside of it"
        )


def _check_loader(cfg: DictConfig) -> None:
    for key, known in (
        ("loader.pin_memory", ("auto", True, False)),
        ("loader.full_decode", (True, False)),
        ("data.cache", ("none", "ram", "disk")),
    ):
        value = OmegaConf.select(cfg, key, default=known[0])
        # 1 == True, and is none of the words.
        if not any(value is one or (value == one and isinstance(one, str)) for one in known):
            words = ", ".join(str(one).lower() for one in known[:-1])
            raise InputError(f"{key}={value} is unknown; use {words} or {str(known[-1]).lower()}")
    target, cache = str(_get(cfg, "loader._target_")), _get(cfg, "data.cache")
    if cache in ("ram", "disk"):
        # Imported only here: a loader's module imports torch.
        from hydra.utils import get_object

        from bev_lightning.data.loaders.auto import choose_loader
        from bev_lightning.data.loaders.image_cache import check_image_cache

        loader = get_object(target)
        if loader is not choose_loader:
            check_image_cache(cache, loader)


def _check_paste(cfg: DictConfig) -> None:
    gt_sampling = _get(cfg, "data.gt_sampling")
    if gt_sampling is None:
        return
    if not isinstance(gt_sampling, DictConfig):
        raise InputError(
            f"data.gt_sampling={gt_sampling} names a choice; use data/gt_sampling={gt_sampling}, "
            "or data.gt_sampling=null"
        )
    others = [name for name in ("camera", "radar") if _get(cfg, f"model.inputs.{name}") is not None]
    if others:
        raise InputError(
            f"data/gt_sampling puts objects into the lidar's points alone and this model reads "
            f"{' and '.join(others)} too, where they would be missing; use data/gt_sampling with a "
            "model that reads only the lidar, or set data.gt_sampling=null"
        )


def _check_augment(cfg: DictConfig) -> None:
    """The CAN bus tells of the car as it drove, not of a scene that was turned or mirrored."""
    augment, encoder = _get(cfg, "data.augment"), _get(cfg, "model.network.encoder")
    if _get(cfg, "verb") != "train" or augment is None or encoder is None:
        return
    readers = [
        f"{key}={str(value).lower()}"
        for key, value in (("motion", "can_bus"), ("use_can_bus", True))
        if encoder.get(key) == value
    ]
    varied = [key for key, value in _STILL.items() if (augment.get(key) or value) != value]
    if readers and varied:
        still = [f"data.augment.{key}={_STILL[key]}".replace(" ", "") for key in varied]
        raise InputError(
            f"model.network.encoder has {' and '.join(readers)}, and the CAN bus knows nothing of "
            f"the BEV augmentation ({', '.join(varied)}); set {' '.join(still)}, or "
            "data.augment=null, or model.network.encoder.motion=pose and use_can_bus=false"
        )


def _check_checkpoints(cfg: DictConfig) -> None:
    verb = _get(cfg, "verb")
    if verb in ("evaluate", "predict"):
        given = [key for key in ("ckpt", "results") if _get(cfg, key) is not None]
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
            if _get(cfg, key) is not None:
                raise InputError(
                    f"{key}={_get(cfg, key)} is for training; {verb} reads ckpt=FILE alone"
                )
    elif verb == "convert":
        _check_conversion(cfg)
    elif _get(cfg, "init_from") is not None and _get(cfg, "resume") not in (None, "auto"):
        raise InputError(
            "init_from and resume are both set; use resume=FILE to go on with a run, or "
            "init_from=FILE to start a new one from its weights"
        )


def _check_bench(cfg: DictConfig) -> None:
    if _get(cfg, "verb") == "bench" and _get(cfg, "bench") is None:
        known = sorted(path.stem for path in (config_dir() / "bench").glob("*.yaml"))
        raise InputError(f"bench does not say what to measure; give bench={' or '.join(known)}")


def _check_execution(cfg: DictConfig) -> None:
    scope = OmegaConf.select(cfg, "compile", default="off")
    if scope not in ("off", "model", "regions"):
        raise InputError(f"compile={scope} is unknown; use compile=off, model or regions")
    layout = OmegaConf.select(cfg, "channels_last", default=False)
    if layout not in ("auto", True, False):
        raise InputError(
            f"channels_last={layout} is unknown; use channels_last=auto, true or false"
        )
    for part in ("model.network.backbone", "model.network.camera.backbone"):
        # Recomputed blocks keep their norms' statistics, which torch.compile cannot trace.
        if scope != "off" and _get(cfg, f"{part}.gradient_checkpointing"):
            raise InputError(
                f"compile={scope} does not see through {part}.gradient_checkpointing=true; set "
                "that to false, or use compile=off"
            )
    if _get(cfg, "trainer") is None or (name := name_strategy(cfg)) in WHOLE:
        return
    for key, value, mend in (("compile", scope, "off"), ("channels_last", layout, "auto")):
        if value not in ("off", "auto", False):
            said = str(value).lower()
            raise InputError(
                f"{key}={said} is for strategy=single and ddp, where every process holds the "
                f"whole model; use {key}={mend} with strategy={name}"
            )


def _check_conversion(cfg: DictConfig) -> None:
    if _get(cfg, "source") is None:
        raise InputError(
            "convert needs a file of weights; give source=FILE and the model= it belongs to"
        )
    choices: dict[str, tuple[object, ...]] = {
        "to": ("ours", "official"),
        "names": ("auto", "mit", "mmdetection3d", "bevformer"),
        "strict": (True, False),
    }
    for key, known in choices.items():
        if _get(cfg, key) not in known:
            possible = " or ".join(str(one).lower() for one in known)
            raise InputError(f"{key}={_get(cfg, key)} is unknown; use {key}={possible}")


def _profile_devices(choice: str) -> Any:
    path = config_dir() / "hardware" / f"{choice}.yaml"
    return OmegaConf.load(path).hardware.devices if path.is_file() else None


def _check_cards(cfg: DictConfig, machine: Machine) -> None:
    if _get(cfg, "trainer.accelerator") not in ("gpu", "auto"):
        return
    devices = _get(cfg, "hardware.devices")
    on_auto = _get(cfg, "trainer.accelerator") == "auto"
    if devices == "auto" or (on_auto and machine.num_cuda_devices == 0):
        return
    choice = _get(cfg, "hydra.runtime.choices.hardware")
    by_choice = choice and not on_auto and devices == _profile_devices(str(choice))
    name = f"hardware={choice}" if by_choice else f"hardware.devices={devices}"
    auto, one = ("", "") if by_choice else (" hardware.devices=auto", " hardware.devices=1")
    verb = _get(cfg, "verb")
    mend = f"use hardware=auto{auto}, or python -m bev_lightning.{verb} ... hardware=cpu{one}"
    if machine.num_cuda_devices < devices:
        plural = "" if devices == 1 else "s"
        raise InputError(
            f"{name} needs {devices} CUDA device{plural}, this machine has "
            f"{machine.num_cuda_devices}; {mend}"
        )
    capability, memory = _get(cfg, "hardware.capability"), _get(cfg, "hardware.memory_gib")
    if isinstance(capability, (int, float)) and (machine.capability or 0) < capability:
        raise InputError(
            f"{name} needs compute capability {capability}, the {machine.card} here has "
            f"{machine.capability}; {mend}"
        )
    # Cards report a little less than their name plate.
    if isinstance(memory, (int, float)) and (machine.memory_gib or 0) < 0.9 * memory:
        raise InputError(
            f"{name} needs cards of {memory:g} GiB, the {machine.card} here has "
            f"{machine.memory_gib:.0f} GiB; {mend}"
        )
