"""Optimizer and learning-rate schedule as one typed value."""

import fnmatch
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from bev_lightning.errors import InputError


@dataclass(frozen=True)
class AdamW:
    """AdamW with a warm-up and a decay, counted in optimizer steps.

    Attributes:
        lr: peak learning rate.
        weight_decay: decoupled decay of weights; biases and norms (one-dimensional) are left out.
        betas: decay of the first and second moment.
        schedule: ``cosine`` (linear warm-up, half a cosine down), ``onecycle`` (cosine up and down,
            Smith and Topin 2019) or ``constant`` (after the warm-up).
        warmup: share of all steps, 0 to 1, in which the rate rises.
        start_factor, end_factor: rate at the first and at the last step, as a share of ``lr``.
        multipliers: of the rate, by patterns (``*`` and ``?``) of parameter names as a checkpoint
            has them; the last pattern that fits counts. 0 freezes: the parameters keep their
            values, and modules all of whose parameters are frozen their batch-norm statistics too.
        scale_lr: how the rate follows the samples of an optimizer step: ``linear`` (Goyal et al.
            2017) or ``sqrt`` (for Adam's kind: Malladi et al., NeurIPS 2022); None leaves it.
        base_batch: the samples of an optimizer step that ``lr`` is meant for; needed to scale.
    """

    lr: float
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    schedule: str = "cosine"
    warmup: float = 0.05
    start_factor: float = 0.1
    end_factor: float = 0.01
    multipliers: Mapping[str, float] | None = None
    scale_lr: str | None = None
    base_batch: int | None = None

    def __post_init__(self) -> None:
        if self.schedule not in ("cosine", "onecycle", "constant"):
            raise InputError(
                f"optim.schedule={self.schedule} is unknown; use cosine, onecycle or constant"
            )
        if not 0 < self.lr < math.inf:
            raise InputError(f"optim.lr={self.lr} must be a positive number; set it anew")
        for name in ("weight_decay", "start_factor", "end_factor"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(
                    f"optim.{name}={getattr(self, name)} must be a number of at least 0; set it "
                    "anew"
                )
        if not 0 <= self.warmup <= 1:
            raise InputError(
                f"optim.warmup={self.warmup} is a share of all steps; use a number from 0 to 1"
            )
        for pattern, multiplier in (self.multipliers or {}).items():
            if not multiplier >= 0:
                raise InputError(
                    f"optim.multipliers has {multiplier} for {pattern}; use 0 (frozen) or more"
                )

    def factor(self, step: int, num_steps: int) -> float:
        """Learning rate of the step (0-based) as a share of ``lr``."""
        num_warmup = max(1, round(self.warmup * num_steps)) if self.warmup else 0
        if step < num_warmup:
            rise = step / num_warmup
            if self.schedule == "onecycle":
                rise = (1 - math.cos(math.pi * rise)) / 2
            return self.start_factor + (1 - self.start_factor) * rise
        if self.schedule == "constant":
            return 1.0
        fall = min(1.0, (step - num_warmup) / max(1, num_steps - num_warmup))
        return self.end_factor + (1 - self.end_factor) * (1 + math.cos(math.pi * fall)) / 2

    def find_multipliers(self, names: Sequence[str]) -> dict[str, float]:
        """The multiplier of each parameter's rate, by name.

        Raises:
            InputError: a pattern fits no name.
        """
        found = dict.fromkeys(names, 1.0)
        for pattern, multiplier in (self.multipliers or {}).items():
            fits = fnmatch.filter(names, pattern)
            if not fits:
                parts = sorted({".".join(name.split(".")[:2]) for name in names})
                raise InputError(
                    f"optim.multipliers has {pattern}, which fits no parameter; names begin with "
                    f"{', '.join(parts)}, so write for example {parts[0]}.*"
                )
            found.update(dict.fromkeys(fits, float(multiplier)))
        return found

    def build(
        self, named_parameters: Iterable[tuple[str, nn.Parameter]], num_steps: int
    ) -> tuple[torch.optim.Optimizer, LambdaLR]:
        """The optimizer over the parameters that take gradients, one kernel for all of them, and
        its schedule for ``num_steps``.

        Args:
            named_parameters: of the module.
            num_steps: optimizer steps of the whole training.

        Raises:
            InputError: no parameter is left to train, or a multiplier's pattern fits none.
        """
        parameters = dict(named_parameters)
        multipliers = self.find_multipliers(list(parameters))
        groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
        for name, parameter in parameters.items():
            if parameter.requires_grad and multipliers[name] > 0:
                key = (multipliers[name], parameter.ndim > 1)
                groups.setdefault(key, []).append(parameter)
        if not groups:
            raise InputError(
                "every parameter is frozen; leave something to train in optim.multipliers"
            )
        optimizer = torch.optim.AdamW(
            [
                {
                    "params": groups[multiplier, decays],
                    "lr": self.lr * multiplier,
                    "weight_decay": self.weight_decay if decays else 0.0,
                }
                for multiplier, decays in sorted(groups, reverse=True)
            ],
            lr=self.lr,
            betas=(self.betas[0], self.betas[1]),
            fused=True,
        )
        # The kernel could unscale float16 gradients too, and Lightning then refuses to clip them,
        # in any mixed precision: leave that to the scaler.
        optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
        return optimizer, LambdaLR(optimizer, lambda step: self.factor(step, num_steps))
