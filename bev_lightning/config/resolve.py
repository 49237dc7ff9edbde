"""Resolves a configuration for a machine: replaces interpolations and every ``auto``."""

from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from bev_lightning.config.aliases import rename_targets
from bev_lightning.config.compose import config_dir
from bev_lightning.config.strategy import WHOLE, count_replicas, name_strategy, resolve_strategy
from bev_lightning.data.loaders.auto import choose_loader, choose_loader_name
from bev_lightning.hardware.batch_plan import BatchPlan
from bev_lightning.hardware.machine import Machine, choose_num_workers


def resolve(cfg: DictConfig, machine: Machine, run_dir: Path | None = None) -> DictConfig:
    """A new, read-only configuration without interpolations and ``auto``; ``cfg`` is not changed.

    On a CPU precision ``auto`` is float32: bf16 and fp16 convolutions are tens of times slower.

    Args:
        cfg: composed, checked.
        machine: where it will run.
        run_dir: becomes ``paths.run``.
    """
    plain = OmegaConf.create(OmegaConf.to_container(cfg, resolve=False))
    assert isinstance(plain, DictConfig)
    plain.pop("hydra", None)
    if run_dir is not None and "paths" in plain:
        plain.paths.run = str(run_dir)
    if "data" in plain and isinstance(plain.data.get("root"), str):
        plain.data.root = str(Path(plain.data.root).expanduser())
    rename_targets(plain)
    OmegaConf.resolve(plain)
    on_cuda = "trainer" in plain and _resolve_hardware(plain, machine)
    if plain.get("channels_last") == "auto":
        plain.channels_last = on_cuda and name_strategy(plain) in WHOLE
    if "loader" in plain:
        _resolve_loader(plain, machine, on_cuda)
        if "data" in plain and "loader" in plain.data:
            plain.data.loader = plain.loader
    OmegaConf.set_struct(plain, True)
    OmegaConf.set_readonly(plain, True)
    return plain


def plan_batch(resolved: DictConfig) -> BatchPlan:
    """The samples per optimizer step of a resolved configuration."""
    return BatchPlan(
        num_processes=count_replicas(resolved),
        batch_size=resolved.data.batch_size,
        accumulation=resolved.trainer.accumulate_grad_batches,
    )


def scale_lr(resolved: DictConfig) -> float:
    """The peak learning rate, scaled to the samples per optimizer step."""
    optim = resolved.optim
    return plan_batch(resolved).scale_lr(
        float(optim.lr), optim.get("scale_lr"), optim.get("base_batch")
    )


def _resolve_hardware(plain: DictConfig, machine: Machine) -> bool:
    trainer, hardware = plain.trainer, plain.hardware
    if trainer.accelerator == "auto":
        trainer.accelerator = "gpu" if machine.num_cuda_devices else "cpu"
    on_cuda = bool(trainer.accelerator == "gpu")
    if hardware.card == "auto":
        hardware.card = machine.card if on_cuda else "cpu"
    for key in ("memory_gib", "capability"):
        if hardware[key] == "auto":
            hardware[key] = getattr(machine, key) if on_cuda else None
    if hardware.devices == "auto":
        hardware.devices = (
            machine.num_cuda_devices if on_cuda and trainer.strategy != "single" else 1
        )
    trainer.devices = hardware.devices
    if trainer.precision == "auto":
        bf16 = (hardware.capability or 0) >= 8.0
        trainer.precision = ("bf16-mixed" if bf16 else "16-mixed") if on_cuda else "32-true"
        if trainer.precision == "16-mixed":
            plain.precision.loss_scale = "dynamic"
    resolve_strategy(plain, on_cuda)
    return on_cuda


def _resolve_loader(plain: DictConfig, machine: Machine, on_cuda: bool) -> None:
    if plain.loader["_target_"] == f"{choose_loader.__module__}.choose_loader":
        # The factory is replaced by its choice, so that resolved.yaml shows it.
        choice = choose_loader_name(on_cuda, plain.loader.image_cache)
        del plain.loader["_target_"], plain.loader["image_cache"]
        plain.loader = OmegaConf.merge(
            OmegaConf.load(config_dir() / "loader" / f"{choice}.yaml"), plain.loader
        )
    if plain.loader.num_workers == "auto":
        num_local = int(plain.trainer.devices) if "trainer" in plain else 1
        plain.loader.num_workers = choose_num_workers(machine.num_cpus, num_local, on_cuda)
    if plain.loader.pin_memory == "auto":
        plain.loader.pin_memory = on_cuda
