import pytest
import torch

from bev_lightning.callbacks.health import FiniteLoss
from bev_lightning.errors import InputError


def step(callback: FiniteLoss, batch_idx: int, **terms: float) -> None:
    outputs = {
        "terms": {name: torch.tensor(value) for name, value in terms.items()},
        "sample_tokens": (f"token-{batch_idx}",),
    }
    callback.on_train_batch_end(None, None, outputs, None, batch_idx)


def test_finite_losses_pass():
    callback = FiniteLoss()
    for batch_idx in range(3):
        step(callback, batch_idx, heatmap=1.0, box=0.0)
    callback.on_train_end(None, None)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_names_the_term_the_step_and_the_samples(value: float):
    callback = FiniteLoss()
    step(callback, 0, heatmap=1.0, box=1.0)
    with pytest.raises(InputError, match=r"loss box is not finite at micro-step 1 \(samples token-1\)"):
        step(callback, 1, heatmap=1.0, box=value)
