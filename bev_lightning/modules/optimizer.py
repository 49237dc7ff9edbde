"""Optimizer with parameter groups, and its learning-rate schedule, from the configuration."""

import fnmatch
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from bev_lightning.checks import check_choice, check_number
from bev_lightning.errors import InputError
from bev_lightning.private_apis import unscale_by_scaler


@dataclass(frozen=True)
class WarmupSchedule:
    """Learning-rate warm-up followed by a decay, counted in optimizer steps.

    Attributes:
        shape: ``cosine`` (linear warm-up, half a cosine down), ``onecycle`` (cosine up and down,
            Smith and Topin 2019) or ``constant`` (after the warm-up).
        warmup: share of all steps, 0 to 1, in which the rate rises.
        start_factor, end_factor: rate at the first and at the last step, as a share of the peak.
    """

    shape: Literal["cosine", "onecycle", "constant"] = "cosine"
    warmup: float = 0.05
    start_factor: float = 0.1
    end_factor: float = 0.01

    def __post_init__(self) -> None:
        check_choice("scheduler.shape", self.shape, ("cosine", "onecycle", "constant"))
        for name in ("start_factor", "end_factor"):
            check_number(f"scheduler.{name}", getattr(self, name))
        if not 0 <= self.warmup <= 1:
            raise InputError(
                f"scheduler.warmup={self.warmup} is a share of all steps; use a number from 0 to 1"
            )

    def factor(self, step: int, num_steps: int) -> float:
        """Learning rate of the step (0-based) as a share of the peak."""
        num_warmup = max(1, round(self.warmup * num_steps)) if self.warmup else 0
        if step < num_warmup:
            rise = step / num_warmup
            if self.shape == "onecycle":
                rise = (1 - math.cos(math.pi * rise)) / 2
            return self.start_factor + (1 - self.start_factor) * rise
        if self.shape == "constant":
            return 1.0
        fall = min(1.0, (step - num_warmup) / max(1, num_steps - num_warmup))
        return self.end_factor + (1 - self.end_factor) * (1 + math.cos(math.pi * fall)) / 2

    def __call__(self, optimizer: Optimizer, num_steps: int) -> LambdaLR:
        return LambdaLR(optimizer, lambda step: self.factor(step, num_steps))


@dataclass(frozen=True)
class OptimizerFactory:
    """Builds a module's optimizer and learning-rate schedule.

    Attributes:
        optimizer: called with the parameter groups and ``lr``: a class of torch.optim with its
            other arguments bound, or a user's own.
        lr: peak learning rate.
        scheduler: called with the optimizer and, if it has a parameter of that name, ``num_steps``,
            the optimizer steps of the whole training; None for a constant rate.
        multipliers: of the rate, by patterns (``*`` and ``?``) of parameter names as a checkpoint
            has them; the last pattern that matches counts. 0 freezes: the parameters keep their
            values, and modules all of whose parameters are frozen their batch-norm statistics too.
        scale_lr: how the rate follows the samples of an optimizer step: ``linear`` (Goyal et al.
            2017) or ``sqrt`` (for Adam and its variants: Malladi et al., NeurIPS 2022); None keeps
            it.
        base_batch: the samples of an optimizer step that ``lr`` is meant for; needed to scale.
    """

    optimizer: Callable[..., Optimizer]
    lr: float
    scheduler: Callable[..., LRScheduler] | None = None
    multipliers: Mapping[str, float] | None = None
    scale_lr: str | None = None
    base_batch: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.lr < math.inf:
            raise InputError(
                f"optim.lr={self.lr} must be a positive number; set optim.lr, for example 1e-3"
            )
        for pattern, multiplier in (self.multipliers or {}).items():
            if not multiplier >= 0:
                raise InputError(
                    f"optim.multipliers has {multiplier} for {pattern}; use 0 (frozen) or more"
                )
        _check_arguments("optim", self.optimizer, lr=self.lr)
        if self.scheduler is not None:
            _check_arguments("scheduler", self.scheduler)

    def build(
        self, named_parameters: Iterable[tuple[str, nn.Parameter]], num_steps: int
    ) -> tuple[Optimizer, LRScheduler | None]:
        """The optimizer over the parameters that take gradients, and its schedule over
        ``num_steps`` optimizer steps.

        Raises:
            InputError: no parameter is left to train, or a multiplier's pattern matches none.
        """
        groups = group_parameters(named_parameters, self.lr, self.multipliers)
        if not groups:
            raise InputError(
                "every parameter is frozen; leave something to train in optim.multipliers"
            )
        optimizer = self.optimizer(groups, lr=self.lr)
        unscale_by_scaler(optimizer)
        if self.scheduler is None:
            return optimizer, None
        if "num_steps" in inspect.signature(self.scheduler).parameters:
            return optimizer, self.scheduler(optimizer, num_steps=num_steps)
        return optimizer, self.scheduler(optimizer)


def group_parameters(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    lr: float,
    multipliers: Mapping[str, float] | None = None,
) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer: one for each learning rate, with and without weight decay.

    Biases and norms (one-dimensional parameters) get no decay. Parameters that take no gradient or
    have the multiplier 0 are left out.

    Raises:
        InputError: a multiplier's pattern matches no name.
    """
    parameters = dict(named_parameters)
    factors = match_multipliers(multipliers, list(parameters))
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        if parameter.requires_grad and factors[name] > 0:
            groups.setdefault((factors[name], parameter.ndim > 1), []).append(parameter)
    return [
        {"params": groups[factor, decays], "lr": lr * factor}
        | ({} if decays else {"weight_decay": 0.0})
        for factor, decays in sorted(groups, reverse=True)
    ]


def match_multipliers(
    multipliers: Mapping[str, float] | None, names: Sequence[str]
) -> dict[str, float]:
    """The multiplier of each parameter's learning rate, by name.

    Raises:
        InputError: a pattern matches no name.
    """
    found = dict.fromkeys(names, 1.0)
    for pattern, multiplier in (multipliers or {}).items():
        matches = fnmatch.filter(names, pattern)
        if not matches:
            parts = sorted({".".join(name.split(".")[:2]) for name in names})
            raise InputError(
                f"optim.multipliers has {pattern}, which matches no parameter; names begin with "
                f"{', '.join(parts)}, so write for example {parts[0]}.*"
            )
        found.update(dict.fromkeys(matches, float(multiplier)))
    return found


def make_optimizer_factory(
    optim: Mapping[str, Any], scheduler: Mapping[str, Any] | None = None
) -> OptimizerFactory:
    """The factory that the configuration groups ``optim`` and ``scheduler`` describe.

    Args:
        optim: ``_target_`` and arguments of an optimizer, with ``multipliers``, ``scale_lr`` and
            ``base_batch`` beside them, which it does not get.
        scheduler: ``_target_`` and arguments of a schedule.
    """
    rest = {key: tuple(v) if isinstance(v, list) else v for key, v in optim.items()}
    own: dict[str, Any] = {
        key: rest.pop(key, None) for key in ("lr", "multipliers", "scale_lr", "base_batch")
    }
    try:
        optimizer = instantiate({**rest, "_partial_": True}, _convert_="all")
        schedule = None if scheduler is None else instantiate(dict(scheduler), _convert_="all")
    except InstantiationException as error:
        if isinstance(error.__cause__, InputError):
            raise error.__cause__ from None
        raise InputError(
            f"optim or scheduler cannot be built: {str(error).splitlines()[0]}; see conf/optim and "
            "conf/scheduler for an example of each"
        ) from error
    return OptimizerFactory(optimizer, scheduler=schedule, **own)


def _check_arguments(group: str, factory: Callable[..., Any], **arguments: Any) -> None:
    """Refuse what a factory will not take, before hours of preparation."""
    try:
        inspect.signature(factory).bind_partial(None, **arguments)
    except (TypeError, ValueError) as error:  # ValueError: arguments that are bound already
        name = getattr(getattr(factory, "func", factory), "__qualname__", group)
        raise InputError(
            f"{group} does not match {name} ({error.__cause__ or error}); correct its arguments "
            f"under {group}"
        ) from None
