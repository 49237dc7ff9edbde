from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch._subclasses.fake_tensor import FakeTensorMode

from bev_lightning.callbacks.health import FiniteLoss, SameWeights
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
    with pytest.raises(
        InputError, match=r"loss box is not finite at micro-step 1 \(samples token-1\)"
    ):
        step(callback, 1, heatmap=1.0, box=value)


def test_what_a_gpu_says_is_read_when_it_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    event = Mock()
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    callback = FiniteLoss()
    with FakeTensorMode():
        terms = {"box": torch.ones((), device="cuda")}
        outputs = {"terms": terms, "sample_tokens": ("token-0",)}
        callback.on_train_batch_end(None, None, outputs, None, 0)
    event.record.assert_called_once_with()
    event.synchronize.assert_not_called()
    assert callback._pending is not None
    flags = torch.tensor([True])  # memory that nothing has been copied to yet
    event.synchronize.side_effect = lambda: flags.fill_(False)
    callback._pending = (*callback._pending[:3], flags)
    with pytest.raises(InputError, match="loss box is not finite at micro-step 0"):
        callback.on_train_end(None, None)


@pytest.mark.parametrize("differ", [0, 2])
def test_processes_with_other_weights_stop_all(capsys, differ: int) -> None:
    module = torch.nn.Linear(3, 1)
    module.device = torch.device("cpu")
    weights = torch.nn.utils.parameters_to_vector(module.parameters()).detach()
    weights[:differ] += 1
    strategy = Mock(spec=DDPStrategy)
    strategy.broadcast.side_effect = lambda value, src: weights
    strategy.reduce.side_effect = lambda value, reduce_op: value
    trainer = Mock(strategy=strategy, world_size=2, global_rank=1, is_global_zero=True)
    if not differ:
        SameWeights().on_train_end(trainer, module)
        assert capsys.readouterr().out == "The weights of all 2 processes are equal.\n"
        return
    with pytest.raises(RuntimeError, match="up to 2 of 4 weights .* resume from process 0's last"):
        SameWeights().on_train_end(trainer, module)
