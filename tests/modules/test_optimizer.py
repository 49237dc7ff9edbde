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
    optimizer, schedule = AdamW(lr=0.1, weight_decay=0.05).build([*layer.parameters(), frozen], 10)
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
