"""Values that a constructor refuses leave as one sentence."""

import pytest

from bev_lightning.accelerate.plan import Machine
from bev_lightning.assembly import build_module
from bev_lightning.config import load, resolve
from bev_lightning.errors import InputError


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("optim.warmup=2", "^optim.warmup=2 is a share of all steps"),
        ("model.inputs.camera.size=[96]", "under model.inputs.camera do not fit: .* height, width"),
        ("model.network.head.grid.cell=[1.7,1.6]", "model.network.head.grid do not fit: .*divide"),
        ("optim.multipliers={foo:1}", "^optim.multipliers has foo, which fits no parameter"),
    ],
)
def test_the_sentence_names_the_key(word: str, message: str) -> None:
    cfg = resolve(load("train", ["hardware=cpu", word]), Machine(num_cpus=2))
    with pytest.raises(InputError, match=message):
        build_module(cfg)
