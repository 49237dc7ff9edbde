import functools
import math

import pytest
import torch
from torch import nn

from bev_lightning.errors import InputError
from bev_lightning.modules.optimizer import (
    OptimizerFactory,
    WarmupSchedule,
    make_optimizer_factory,
    match_multipliers,
)

ADAMW = functools.partial(torch.optim.AdamW, weight_decay=0.01, fused=True)


def test_cosine_rises_and_falls():
    schedule = WarmupSchedule(warmup=0.1, start_factor=0.1, end_factor=0.01)
    factors = [schedule.factor(step, 100) for step in range(101)]
    assert factors[0] == pytest.approx(0.1)
    assert factors[5] == pytest.approx(0.55)
    assert factors[10] == pytest.approx(1.0)
    assert factors[55] == pytest.approx(0.505)
    assert factors[100] == pytest.approx(0.01)


def test_constant_and_no_warmup():
    schedule = WarmupSchedule(shape="constant", warmup=0.0)
    assert [schedule.factor(step, 10) for step in (0, 9)] == [1.0, 1.0]


def test_build_decays_weights_but_not_biases_and_leaves_out_frozen_ones():
    layer = nn.Linear(3, 2)
    frozen = nn.Parameter(torch.zeros(2, 2), requires_grad=False)
    named = [*layer.named_parameters(), ("frozen", frozen)]
    optimizer = functools.partial(torch.optim.AdamW, weight_decay=0.05)
    optimizer, schedule = OptimizerFactory(optimizer, 0.1, WarmupSchedule()).build(named, 10)
    groups = optimizer.param_groups
    assert [group["weight_decay"] for group in groups] == [0.05, 0.0]
    assert groups[0]["params"] == [layer.weight] and groups[1]["params"] == [layer.bias]
    assert schedule is not None and schedule.get_last_lr()[0] == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: OptimizerFactory(ADAMW, lr=0.0), "optim.lr"),
        (lambda: WarmupSchedule(shape="step"), "shape"),
        (lambda: WarmupSchedule(warmup=2), "share"),
        (lambda: WarmupSchedule(end_factor=math.nan), "scheduler.end_factor=nan"),
        (
            lambda: make_optimizer_factory(
                {"_target_": "torch.optim.AdamW", "lr": 1.0, "momentum": 0.9}
            ),
            r"optim does not match AdamW \(.*momentum",
        ),
        (
            lambda: make_optimizer_factory({"_target_": "torch.optim.AdamQ", "lr": 1.0}),
            "optim or scheduler cannot be built: .*AdamQ",
        ),
    ],
)
def test_refuses_what_makes_no_sense(build, message: str):
    with pytest.raises(InputError, match=message):
        build()


def test_multipliers_scale_the_rate_of_what_they_name():
    net = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("slow", "fast", "still")})
    multipliers = {"*": 0.5, "fast.*": 1.0, "still.*": 0, "slow.bias": 0.25}
    factory = OptimizerFactory(ADAMW, 1.0, WarmupSchedule(), multipliers)
    optimizer, schedule = factory.build(net.named_parameters(), 10)
    rate = {
        id(p): (g["initial_lr"], g["weight_decay"])
        for g in optimizer.param_groups
        for p in g["params"]
    }
    assert rate == {
        id(net["fast"].weight): (1.0, 0.01),
        id(net["fast"].bias): (1.0, 0.0),
        id(net["slow"].weight): (0.5, 0.01),
        id(net["slow"].bias): (0.25, 0.0),
    }
    assert schedule is not None
    assert sorted(schedule.get_last_lr()) == pytest.approx([0.025, 0.05, 0.1, 0.1])
    for net_part in net.values():
        for parameter in net_part.parameters():
            parameter.requires_grad_(False)
    with pytest.raises(InputError, match="every parameter is frozen"):
        OptimizerFactory(ADAMW, 1.0).build(net.named_parameters(), 10)


def test_a_pattern_that_matches_nothing_is_refused():
    with pytest.raises(InputError, match=r"camra\.\*, which matches no parameter.*network.head"):
        match_multipliers({"network.camra.*": 0.1}, ["network.head.weight"])
    with pytest.raises(InputError, match="use 0"):
        OptimizerFactory(ADAMW, 1.0, multipliers={"*": -1})


@pytest.mark.parametrize("shape", ["cosine", "onecycle", "constant"])
def test_steps_and_state_are_those_of_adamw_with_groups_by_hand(shape: str):
    """The optimizer as it was built before the groups were configured by target."""

    def factor(step: int, num_steps: int = 20) -> float:
        num_warmup = 8
        if step < num_warmup:
            rise = step / num_warmup
            rise = (1 - math.cos(math.pi * rise)) / 2 if shape == "onecycle" else rise
            return 0.1 + 0.9 * rise
        fall = min(1.0, (step - num_warmup) / (num_steps - num_warmup))
        return (
            1.0 if shape == "constant" else 1e-4 + (1 - 1e-4) * (1 + math.cos(math.pi * fall)) / 2
        )

    def make_net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))

    by_hand, by_factory = make_net(), make_net()
    first, last = by_hand[0], by_hand[2]
    groups = [
        {"params": [last.weight], "lr": 2e-3, "weight_decay": 0.01},
        {"params": [by_hand[1].weight, by_hand[1].bias, last.bias], "lr": 2e-3, "weight_decay": 0},
        {"params": [first.weight], "lr": 2e-4, "weight_decay": 0.01},
        {"params": [first.bias], "lr": 2e-4, "weight_decay": 0.0},
    ]
    old = torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.99), fused=True)
    old_schedule = torch.optim.lr_scheduler.LambdaLR(old, factor)
    factory = make_optimizer_factory(
        {
            "_target_": "torch.optim.AdamW",
            "_partial_": True,
            "lr": 2e-3,
            "weight_decay": 0.01,
            "betas": [0.9, 0.99],
            "fused": True,
            "multipliers": {"0.*": 0.1},
            "scale_lr": None,
            "base_batch": None,
        },
        {
            "_target_": "bev_lightning.modules.optimizer.WarmupSchedule",
            "shape": shape,
            "warmup": 0.4,
            "start_factor": 0.1,
            "end_factor": 1e-4,
        },
    )
    new, new_schedule = factory.build(by_factory.named_parameters(), 20)
    assert new_schedule is not None
    for _ in range(20):
        assert new_schedule.get_last_lr() == old_schedule.get_last_lr()
        for net, optimizer, schedule in (
            (by_hand, old, old_schedule),
            (by_factory, new, new_schedule),
        ):
            optimizer.zero_grad()
            net(torch.ones(3, 4)).square().sum().backward()
            optimizer.step()
            schedule.step()
    for a, b in zip(by_hand.parameters(), by_factory.parameters(), strict=True):
        assert torch.equal(a, b)
    assert new.state_dict()["param_groups"] == old.state_dict()["param_groups"]
    assert new_schedule.state_dict() == old_schedule.state_dict()


def test_a_user_schedule_gets_the_number_of_steps_if_it_takes_them():
    def linear(optimizer: torch.optim.Optimizer, num_steps: int):
        return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, num_steps)

    layer = nn.Linear(2, 2)
    _, schedule = OptimizerFactory(ADAMW, 1.0, linear).build(layer.named_parameters(), 7)
    assert schedule is not None and schedule.total_iters == 7
    step = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=3)
    _, schedule = OptimizerFactory(ADAMW, 1.0, step).build(layer.named_parameters(), 7)
    assert schedule is not None and schedule.step_size == 3
    assert OptimizerFactory(ADAMW, 1.0).build(layer.named_parameters(), 7)[1] is None
