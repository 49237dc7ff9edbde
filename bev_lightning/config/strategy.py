"""Checks the strategy of a configuration, and finds the class that implements it."""

from typing import Any

from omegaconf import DictConfig

from bev_lightning.config.compose import get_value
from bev_lightning.errors import InputError

_NAMES = ("auto", "single", "ddp", "fsdp", "deepspeed", "pipeline", "hybrid")
_TARGETS = {
    "single": "lightning.pytorch.strategies.SingleDeviceStrategy",
    "ddp": "lightning.pytorch.strategies.DDPStrategy",
    "fsdp": "bev_lightning.parallel.fsdp.ShardedStrategy",
    "deepspeed": "bev_lightning.parallel.deepspeed.ZeroStrategy",
    "pipeline": "bev_lightning.parallel.hybrid.HybridStrategy",
    "hybrid": "bev_lightning.parallel.hybrid.HybridStrategy",
}
_MESHES = ("pipeline", "hybrid")
# Every process holds the whole model, as it was built.
WHOLE = ("auto", "single", "ddp")


def check_strategy(cfg: DictConfig) -> None:
    """Refuse a strategy that contradicts its options, the hardware or the precision.

    Raises:
        InputError: one sentence that names the key, the value and the fix.
    """
    name = name_strategy(cfg)
    nodes, devices = get_value(cfg, "hardware.nodes"), get_value(cfg, "hardware.devices")
    if name == "single" and ((isinstance(devices, int) and devices > 1) or (nodes or 1) > 1):
        raise InputError(
            f"strategy=single is one process but hardware.devices={devices} on "
            f"hardware.nodes={nodes} needs more; use strategy=ddp, or hardware.devices=1 "
            "hardware.nodes=1"
        )
    if name in ("fsdp", "deepspeed"):
        _check_shards(cfg, name)
    if name == "deepspeed":
        _check_deepspeed(cfg)
    if name in _MESHES:
        _check_mesh(cfg, name)


def resolve_strategy(plain: DictConfig, on_cuda: bool) -> None:
    """Replace the name by the class and its arguments, after the hardware is resolved."""
    trainer, num = plain.trainer, plain.hardware.devices * plain.hardware.nodes
    if trainer.strategy == "auto":
        trainer.strategy = "ddp" if num > 1 else "single"
    name = trainer.strategy
    if name not in _TARGETS:
        return
    arguments: dict[str, Any] = {"_target_": _TARGETS[name]}
    if name == "single":
        # Lightning has no name for it that keeps the device.
        arguments["device"] = "cuda:0" if on_cuda else "cpu"
        trainer.strategy = arguments
        return
    seconds = plain.cluster.rendezvous_s
    arguments["timeout"] = {"_target_": "datetime.timedelta", "seconds": seconds}
    if name == "ddp":
        # DDP reorders its buckets after the first backward pass of a process: with more than two
        # processes a resumed training would add in another order than an uninterrupted one.
        arguments["find_unused_parameters"] = not on_cuda
    elif name == "fsdp":
        arguments["num_processes"] = num
    else:
        if plain.strategy.get("data") == "auto":
            plain.strategy.data = max(1, num // (plain.strategy.pipeline * plain.strategy.model))
        arguments |= plain.strategy
    trainer.strategy = arguments


def count_replicas(cfg: DictConfig) -> int:
    """Data-parallel replicas (a process, or a pipeline of them) of a resolved configuration."""
    num = int(cfg.hardware.nodes) * int(cfg.hardware.devices)
    return num // int(cfg.strategy.pipeline) if name_strategy(cfg) in _MESHES else num


def name_strategy(cfg: DictConfig) -> str:
    """The chosen name, also of a resolved configuration."""
    strategy = get_value(cfg, "trainer.strategy")
    if isinstance(strategy, DictConfig):
        target = strategy.get("_target_")
        return next((name for name in reversed(_NAMES) if _TARGETS.get(name) == target), "")
    if strategy is not None and strategy not in _NAMES:
        raise InputError(
            f"trainer.strategy={strategy} is unknown; use strategy={', '.join(_NAMES[:-1])} or "
            f"{_NAMES[-1]}"
        )
    return str(strategy)


def _check_shards(cfg: DictConfig, name: str) -> None:
    precision = get_value(cfg, "trainer.precision")
    if name == "fsdp" and precision == "16-mixed":
        raise InputError(
            "strategy=fsdp does not scale the loss of precision=16; use precision=bf16 or "
            "precision=32, or strategy=ddp"
        )
    if get_value(cfg, "callbacks.ema") is not None:
        raise InputError(
            f"callbacks=ema averages whole weights and strategy={name} shards them; use "
            "callbacks=default, or strategy=ddp"
        )


def _check_deepspeed(cfg: DictConfig) -> None:
    if get_value(cfg, "trainer.accelerator") == "cpu":
        raise InputError(
            "strategy=deepspeed runs on CUDA devices alone; use strategy=fsdp or ddp with "
            "hardware=cpu"
        )
    stage = get_value(cfg, "strategy.stage")
    if get_value(cfg, "strategy.offload_parameters") and stage != 3:
        raise InputError(
            f"strategy.offload_parameters=true needs ZeRO stage 3 and strategy.stage={stage}; set "
            "strategy.stage=3, or strategy.offload_parameters=false"
        )


def _check_mesh(cfg: DictConfig, name: str) -> None:
    mesh = {key: get_value(cfg, f"strategy.{key}") for key in ("data", "pipeline", "model")}
    micro, stages = get_value(cfg, "strategy.micro_batches"), mesh["pipeline"]
    if get_value(cfg, "strategy.schedule") == "1f1b" and micro < stages:
        raise InputError(
            f"strategy.schedule=1f1b needs at least one micro-batch a stage and strategy."
            f"micro_batches={micro} is less than strategy.pipeline={stages}; set "
            f"strategy.micro_batches={stages} or strategy.schedule=gpipe"
        )
    batch = get_value(cfg, "data.batch_size")
    if get_value(cfg, "verb") == "train" and isinstance(batch, int) and batch % micro:
        raise InputError(
            f"strategy.micro_batches={micro} does not divide data.batch_size={batch}; set "
            f"data.batch_size={max(1, round(batch / micro)) * micro}"
        )
    if get_value(cfg, "trainer.sync_batchnorm"):
        raise InputError(
            f"trainer.sync_batchnorm=true needs every norm on all processes and strategy={name} "
            "runs each on some; set trainer.sync_batchnorm=false"
        )
    nodes, devices = get_value(cfg, "hardware.nodes"), get_value(cfg, "hardware.devices")
    if not isinstance(devices, int):
        return
    size, num = mesh["pipeline"] * mesh["model"], nodes * devices
    if num % size if mesh["data"] == "auto" else num != size * mesh["data"]:
        product = " x ".join(f"strategy.{key}={value}" for key, value in mesh.items())
        raise InputError(
            f"strategy={name}: {product} do not make up that mesh of {num} "
            f"process{'es' if num > 1 else ''} (hardware.nodes={nodes} x "
            f"hardware.devices={devices}); set the three so that their product is the number of "
            "processes, or use strategy=auto"
        )
