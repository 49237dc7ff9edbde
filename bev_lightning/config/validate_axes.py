"""What the axes may mean: precision, the batch of an optimizer step, strategy."""

import math
from typing import Any

from omegaconf import DictConfig, OmegaConf

from bev_lightning.config.strategy import name_strategy
from bev_lightning.errors import InputError

# CUDA compute capability from which on cards multiply in FP8.
FP8_CAPABILITY = 8.9


def get(cfg: DictConfig, key: str) -> Any:
    """The value of a dotted key; None where there is none."""
    return OmegaConf.select(cfg, key, default=None)


def check_precision(cfg: DictConfig, precision: str) -> None:
    """Options of the precision, and whether the hardware that is named has it."""
    for key in ("tf32", "emulate"):
        value = get(cfg, f"precision.{key}")
        if value is not None and not isinstance(value, bool):
            raise InputError(f"precision.{key}={value} must be true or false; set it anew")
    scale = get(cfg, "precision.loss_scale")
    if scale not in (None, "dynamic") and not (_is_number(scale) and 0 < scale < math.inf):
        raise InputError(
            f"precision.loss_scale={scale} must be dynamic or a positive number; set "
            "precision.loss_scale=dynamic, or 512"
        )
    if precision != "fp8":
        return
    strategy = name_strategy(cfg)
    if strategy not in ("auto", "single", "ddp"):
        raise InputError(
            f"strategy={strategy} does not know the layers of precision=fp8; use precision=bf16, "
            "or strategy=ddp"
        )
    recipe = get(cfg, "precision.recipe")
    if recipe not in ("tensorwise", "rowwise"):
        raise InputError(
            f"precision.recipe={recipe} is unknown; use precision.recipe=tensorwise or rowwise"
        )
    capability, card = get(cfg, "hardware.capability"), get(cfg, "hardware.card")
    on_cpu = get(cfg, "trainer.accelerator") == "cpu"
    if get(cfg, "precision.emulate") is True or not (on_cpu or _is_number(capability)):
        return
    if on_cpu or capability < FP8_CAPABILITY:
        here = "a CPU has none" if on_cpu else f"the {card} has {capability}"
        other = "precision=32" if on_cpu else "precision=bf16"
        raise InputError(
            f"precision=fp8 needs compute capability {FP8_CAPABILITY} (RTX 4090, H100, H200) and "
            f"{here}; use {other}, or precision.emulate=true to try it without its speed"
        )


def check_auto_batch(cfg: DictConfig) -> None:
    """Where the search for the largest micro-step cannot run."""
    wanted = get(cfg, "auto_batch")
    if wanted not in (None, True, False):
        raise InputError(f"auto_batch={wanted} must be true or false; set it anew")
    if not wanted or get(cfg, "verb") != "train":
        return
    if get(cfg, "resume") is not None:
        raise InputError(
            "auto_batch=true would change the batches of the run that resume= goes on with; set "
            "auto_batch=false"
        )
    if get(cfg, "hardware.nodes") != 1:
        raise InputError(
            f"auto_batch=true tries on one machine and hardware.nodes={get(cfg, 'hardware.nodes')}"
            "; use hardware.nodes=1 once and set the data.batch_size and accumulation that it finds"
        )


def check_rate(cfg: DictConfig) -> None:
    """The learning rate and the batch that it is meant for."""
    lr = get(cfg, "optim.lr")
    if not _is_number(lr) or not 0 < lr < math.inf:
        raise InputError(f"optim.lr={lr} must be a positive number; set optim.lr, for example 1e-3")
    rule, base = get(cfg, "optim.scale_lr"), get(cfg, "optim.base_batch")
    if rule not in (None, "linear", "sqrt"):
        raise InputError(f"optim.scale_lr={rule} is unknown; use optim.scale_lr=linear or sqrt")
    if rule is not None and (isinstance(base, bool) or not isinstance(base, int) or base < 1):
        raise InputError(
            f"optim.scale_lr={rule} scales from optim.base_batch={base}, which must be a whole "
            "number of at least 1; set the samples per optimizer step that optim.lr is meant for, "
            "or optim.scale_lr=null"
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
