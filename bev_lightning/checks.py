"""Permitted values of single config keys, for constructors and for validation; imports no torch."""

import math
from dataclasses import dataclass
from typing import Any

from bev_lightning.errors import InputError


def is_number(value: Any) -> bool:
    """Whether a value is an int or a float; a bool is neither."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclass(frozen=True)
class Number:
    """Permitted numbers of a key.

    Attributes:
        kind: ``int`` for whole numbers, ``float`` for any finite ones.
        at_least: smallest permitted value.
        auto: a configuration may hold ``auto``, which is replaced before anything is built.
        nullable: null is permitted.
    """

    kind: type
    at_least: float
    auto: bool = False
    nullable: bool = False


NUMBERS: dict[str, Number] = {
    "seed": Number(int, 0),
    "hardware.nodes": Number(int, 1),
    "hardware.devices": Number(int, 1, auto=True),
    "trainer.accumulate_grad_batches": Number(int, 1),
    "trainer.max_steps": Number(int, -1),
    "trainer.max_epochs": Number(int, -1, nullable=True),
    "trainer.val_check_interval": Number(int, 1),
    "trainer.log_every_n_steps": Number(int, 1),
    "trainer.gradient_clip_val": Number(float, 0, nullable=True),
    "trainer.limit_val_batches": Number(float, 0, nullable=True),
    "optim.weight_decay": Number(float, 0),
    "scheduler.start_factor": Number(float, 0),
    "scheduler.end_factor": Number(float, 0),
    "data.batch_size": Number(int, 1),
    "data.val_batch_size": Number(int, 1),
    "data.num_workers": Number(int, 0, auto=True),
    "data.min_points": Number(int, 0),
    "data.cache_gib": Number(float, 0),
    "loader.num_workers": Number(int, 0, auto=True),
    "loader.prefetch": Number(int, 1),
    "loader.image_queue": Number(int, 1),
    "loader.cloud_queue": Number(int, 1),
    "callbacks.steps.every_n_train_steps": Number(int, 1),
    "callbacks.steps.keep_last": Number(int, 1),
    "callbacks.steps.keep_every_n_train_steps": Number(int, 1, nullable=True),
    "cluster.rendezvous_s": Number(float, 1),
    "cluster.collective_s": Number(float, 1),
    "strategy.data": Number(int, 1, auto=True),
    "strategy.pipeline": Number(int, 1),
    "strategy.model": Number(int, 1),
    "strategy.micro_batches": Number(int, 1),
}
CHOICES: dict[str, tuple[object, ...]] = {
    "compile": ("off", "model", "regions"),
    "channels_last": ("auto", True, False),
    "loss_norm": ("batch", "effective"),
    "auto_batch": (True, False),
    "data.on_missing": ("error", "skip"),
    "data.cache": ("none", "ram", "disk"),
    "loader.pin_memory": ("auto", True, False),
    "loader.full_decode": (True, False),
    "optim.scale_lr": (None, "linear", "sqrt"),
    "precision.tf32": (True, False),
    "precision.recipe": ("tensorwise", "rowwise"),
    "precision.emulate": (True, False),
    "strategy.stage": (1, 2, 3),
    "strategy.schedule": ("gpipe", "1f1b"),
    "to": ("ours", "official"),
    "names": ("auto", "mit", "mmdetection3d", "bevformer"),
    "strict": (True, False),
}


def check_number(key: str, value: Any) -> None:
    """Check a value against :data:`NUMBERS`.

    Raises:
        InputError: it is no number of the right kind, or too small.
    """
    rule = NUMBERS[key]
    if (value == "auto" and rule.auto) or (value is None and rule.nullable):
        return
    kinds = int if rule.kind is int else (int, float)
    if (
        isinstance(value, bool)
        or not isinstance(value, kinds)
        or not rule.at_least <= value < math.inf
    ):
        kind = "a whole number" if rule.kind is int else "a number"
        raise InputError(
            f"{key}={write_value(value)} must be {kind} of at least {rule.at_least:g}; change {key}"
        )


def check_choice(key: str, value: Any, choices: tuple[object, ...] | None = None) -> None:
    """Check a value against :data:`CHOICES`, or against ``choices``.

    Raises:
        InputError: it is none of them; names them all.
    """
    known = CHOICES[key] if choices is None else choices
    # 1 == True, but only one of the two is a choice.
    if not any(value == choice and type(value) is type(choice) for choice in known):
        *first, last = map(write_value, known)
        raise InputError(
            f"{key}={write_value(value)} is unknown; use {key}={', '.join(first)} or {last}"
        )


def write_value(value: object) -> str:
    """A value as YAML and the command line write it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
