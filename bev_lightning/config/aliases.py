"""Translates former names, so that older checkpoints, run directories and YAML files still work.

A name that moves or changes gets a row here. Rows chain: a name that changes twice has two.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf, flag_override

# Config keys and groups on a command line; a row also covers every key below.
KEYS = {
    "data.sensors.lenses": "data.sensors.camera_models",
    "data.paste": "data.gt_sampling",
    "data/paste": "data/gt_sampling",
    "model.objective": "model.loss",
    "callbacks.watch": "callbacks.stragglers",
    "model.network.encoder.turn_centre": "model.network.encoder.rotation_centre",
    "model.network.head.choice": "model.network.head.selection",
    "optim.schedule": "scheduler.shape",
    "optim.warmup": "scheduler.warmup",
    "optim.start_factor": "scheduler.start_factor",
    "optim.end_factor": "scheduler.end_factor",
}
# Config keys that are ignored, with what they once set gone.
REMOVED_KEYS = ("model.evaluator.root", "model.evaluator.version")
# Constructor arguments by class: former name -> present name, None for those removed.
ARGUMENTS: dict[str, dict[str, str | None]] = {
    "bev_lightning.metrics.nuscenes.NuScenesEvaluator": {"root": None, "version": None},
    "bev_lightning.models.heads.CentreHead": {"choice": "selection"},
    "bev_lightning.models.heads.TransFusionHead": {"choice": "selection"},
}
# Modules whose classes and functions may stand in a `_target_`.
MODULES = {
    "bev_lightning.accelerate.fsdp": "bev_lightning.parallel.fsdp",
    "bev_lightning.accelerate.hybrid": "bev_lightning.parallel.hybrid",
    "bev_lightning.accelerate.precision": "bev_lightning.hardware.precision",
    "bev_lightning.accelerate.zero": "bev_lightning.parallel.deepspeed",
    "bev_lightning.benches.axes": "bev_lightning.benchmarks.axes",
    "bev_lightning.benches.gpu": "bev_lightning.benchmarks.gpu",
    "bev_lightning.benches.loading": "bev_lightning.benchmarks.loading",
    "bev_lightning.benches.ops": "bev_lightning.benchmarks.ops",
    "bev_lightning.benches.plan": "bev_lightning.benchmarks.plan",
    "bev_lightning.benches.prepare": "bev_lightning.benchmarks.prepare",
    "bev_lightning.benches.step": "bev_lightning.benchmarks.step",
    "bev_lightning.callbacks.monitor": "bev_lightning.callbacks.speed",
    "bev_lightning.callbacks.stop": "bev_lightning.callbacks.stop_signals",
    "bev_lightning.callbacks.watch": "bev_lightning.callbacks.stragglers",
    "bev_lightning.data.augment": "bev_lightning.data.transforms.augment",
    "bev_lightning.data.dali": "bev_lightning.data.loaders.dali",
    "bev_lightning.data.grid_mask": "bev_lightning.data.transforms.grid_mask",
    "bev_lightning.data.lens": "bev_lightning.data.camera_models",
    "bev_lightning.data.paste": "bev_lightning.data.transforms.gt_sampling",
    "bev_lightning.data.photometric": "bev_lightning.data.transforms.photometric",
    "bev_lightning.data.reader": "bev_lightning.data.loaders.torch",
    "bev_lightning.data.rig": "bev_lightning.data.nuscenes.sensor_rig",
    "bev_lightning.data.synthetic": "bev_lightning.data.synthetic.dataset",
    "bev_lightning.data.zero_copy": "bev_lightning.data.loaders.shared_memory",
    "bev_lightning.models.box_choice": "bev_lightning.models.selection",
    "bev_lightning.models.query_start": "bev_lightning.models.object_queries",
    "bev_lightning.objectives.heatmap": "bev_lightning.losses.heatmap",
    "bev_lightning.objectives.matching": "bev_lightning.losses.matching",
    "bev_lightning.objectives.nuscenes": "bev_lightning.metrics.nuscenes",
    "bev_lightning.objectives.perspective": "bev_lightning.losses.perspective",
    "bev_lightning.objectives.set_prediction": "bev_lightning.losses.set_prediction",
}
# Classes by name, whichever module of this package they stand in.
CLASSES = {
    "BEVFusionObjective": "BEVFusionLoss",
    "BoxChoice": "BoxSelection",
    "CentreObjective": "CentreLoss",
    "Objective": "DetectionLoss",
    "Paste": "GTSampling",
    "PixelCache": "ImageCache",
    "ProcessWatch": "StragglerMonitor",
    "Rig": "SensorRig",
    "Schedule": "TrainSampler",
    "SetPredictionObjective": "SetPredictionLoss",
    "TransFusionObjective": "TransFusionLoss",
    "WholeFileIO": "AtomicCheckpointIO",
    "ZeroCopyLoader": "SharedMemoryLoader",
}
# Import paths whose names went to different modules, or left this package.
TARGETS = {
    "bev_lightning.benches.plan.measure": "bev_lightning.benchmarks.plan.measure_plan",
    "bev_lightning.benches.prepare.run": "bev_lightning.benchmarks.prepare.measure_prepare",
    "bev_lightning.modules.optimizer.AdamW": "torch.optim.AdamW",
    "bev_lightning.objectives.losses.BEVFusionObjective": (
        "bev_lightning.losses.bevfusion.BEVFusionLoss"
    ),
    "bev_lightning.objectives.losses.CentreObjective": "bev_lightning.losses.centre.CentreLoss",
    "bev_lightning.objectives.losses.TransFusionObjective": (
        "bev_lightning.losses.transfusion.TransFusionLoss"
    ),
}
_IMPORT_PATH = re.compile(r"\bbev_lightning(?:\.\w+)+")
_OVERRIDE_KEY = re.compile(r"^([+~]*)([^=@]*)(.*)$", re.DOTALL)


def rename_target(path: str) -> str:
    """The present import path of a class or function: ``bev_lightning.data.rig.Rig`` -> ..."""
    if path in TARGETS:
        return TARGETS[path]
    module, _, name = path.rpartition(".")
    if not module.startswith("bev_lightning"):
        return path
    while module in MODULES:
        module = MODULES[module]
    while name in CLASSES:
        name = CLASSES[name]
    return f"{module}.{name}"


def rename_key(key: str) -> str:
    """The present name of a config key or group: ``data.paste.min_points`` -> ..."""
    for old, new in KEYS.items():
        if key == old or key.startswith((f"{old}.", f"{old}@")):
            return rename_key(new + key[len(old) :])
    return key


def rename_override(override: str) -> str:
    """An override of a command line with present names for its key and for import paths in its
    value."""
    found = _OVERRIDE_KEY.match(override)
    assert found is not None
    prefix, key, rest = found.groups()
    package, equals, value = rest.partition("=")
    if package:  # GROUP@PACKAGE=CHOICE
        package = "@" + rename_key(package[1:])
    value = _IMPORT_PATH.sub(lambda path: rename_target(path.group()), value)
    return f"{prefix}{rename_key(key)}{package}{equals}{value}"


def rename_overrides(overrides: Sequence[str]) -> list[str]:
    """Every override with present names, without those of removed keys."""
    renamed = (rename_override(override) for override in overrides)
    return [one for one in renamed if one.lstrip("+~").partition("=")[0] not in REMOVED_KEYS]


def rename_targets(cfg: Any) -> dict[str, str]:
    """Replaces former import paths in every ``_target_`` below a config node, and former names of
    arguments beside it.

    Args:
        cfg: changed; anything but an OmegaConf container is left alone.

    Returns:
        the former paths that were found, with their replacements.
    """
    renamed: dict[str, str] = {}
    if isinstance(cfg, DictConfig):
        target = cfg.get("_target_")
        if isinstance(target, str):
            _rename_arguments(cfg, ARGUMENTS.get(rename_target(target), {}))
        for key in map(str, list(cfg)):
            if OmegaConf.is_missing(cfg, key) or OmegaConf.is_interpolation(cfg, key):
                continue
            value = cfg[key]
            if key == "_target_" and isinstance(value, str):
                if (path := rename_target(value)) != value:
                    renamed[value] = path
                    cfg[key] = path
            else:
                renamed |= rename_targets(value)
    elif isinstance(cfg, ListConfig):
        for index in range(len(cfg)):
            if not OmegaConf.is_interpolation(cfg, index):
                renamed |= rename_targets(cfg[index])
    return renamed


def _rename_arguments(cfg: DictConfig, names: Mapping[str, str | None]) -> None:
    """Replace former names of constructor arguments; their values go into those already there."""
    with flag_override(cfg, ["struct", "readonly"], False):
        for former, present in names.items():
            if former in cfg:
                value = cfg._get_node(former)
                del cfg[former]
                if present is not None:
                    cfg.merge_with({present: value})
