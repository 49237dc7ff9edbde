import pytest
import torch

from bev_lightning.errors import InputError
from bev_lightning.modules.optimizer import AdamW


def test_cosine_rises_and_falls():
    recipe = AdamW(lr=1.0, warmup=0.1, start_factor=0.1, end_factor=0.01)
    factors = [recipe.factor(step, 100) for step in range(101)]
    assert factors[0] == pytest.approx(0.1)
    assert factors[5] == pytest.approx(0.55)
    assert factors[10] == pytest.approx(1.0)
    assert factors[55] == pytest.approx(0.505)
    assert factors[100] == pytest.approx(0.01)


def test_constant_and_no_warmup():
    recipe = AdamW(lr=1.0, schedule="constant", warmup=0.0)
    assert [recipe.factor(step, 10) for step in (0, 9)] == [1.0, 1.0]


def test_build_decays_weights_but_not_biases_and_leaves_out_frozen_ones():
    layer = torch.nn.Linear(3, 2)
    frozen = torch.nn.Parameter(torch.zeros(2, 2), requires_grad=False)
    named = [*layer.named_parameters(), ("frozen", frozen)]
    optimizer, schedule = AdamW(lr=0.1, weight_decay=0.05).build(named, 10)
    groups = optimizer.param_groups
    assert [group["weight_decay"] for group in groups] == [0.05, 0.0]
    assert groups[0]["params"] == [layer.weight] and groups[1]["params"] == [layer.bias]
    assert schedule.get_last_lr()[0] == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": 0.0}, "optim.lr"),
        ({"lr": 1.0, "schedule": "step"}, "schedule"),
        ({"lr": 1.0, "warmup": 2}, "share"),
    ],
)
def test_refuses_what_makes_no_sense(arguments: dict, message: str):
    with pytest.raises(InputError, match=message):
        AdamW(**arguments)


def test_multipliers_scale_the_rate_of_what_they_name():
    net = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2) for name in ("slow", "fast", "still")})
    recipe = AdamW(lr=1.0, multipliers={"*": 0.5, "fast.*": 1.0, "still.*": 0, "slow.bias": 0.25})
    optimizer, schedule = recipe.build(net.named_parameters(), 10)
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
    assert sorted(schedule.get_last_lr()) == pytest.approx([0.025, 0.05, 0.1, 0.1])
    for net_part in net.values():
        for parameter in net_part.parameters():
            parameter.requires_grad_(False)
    with pytest.raises(InputError, match="every parameter is frozen"):
        AdamW(lr=1.0).build(net.named_parameters(), 10)


def test_a_pattern_that_fits_nothing_is_refused():
    with pytest.raises(InputError, match=r"camra\.\*, which fits no parameter.*network.head"):
        AdamW(lr=1.0, multipliers={"network.camra.*": 0.1}).find_multipliers(
            ["network.head.weight"]
        )
    with pytest.raises(InputError, match="use 0"):
        AdamW(lr=1.0, multipliers={"*": -1})
