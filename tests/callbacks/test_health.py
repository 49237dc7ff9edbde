import re
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch._subclasses.fake_tensor import FakeTensorMode

from bev_lightning.callbacks.health import (
    FiniteLoss,
    MemoryUse,
    SameWeights,
    explain_memory,
    is_out_of_memory,
    measure_peak_mib,
)
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
    with pytest.raises(RuntimeError, match="up to 2 of 4 weights .* train again from the last"):
        SameWeights().on_train_end(trainer, module)


def test_memory_is_told_by_kind() -> None:
    module = torch.nn.Linear(512, 1024, bias=False)  # 2 MiB
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 512)).sum().backward()
    optimizer.step()
    memory = MemoryUse.measure(module, [optimizer])
    mib = 1 / 1024
    assert memory.parameters == memory.gradients == 2 * mib
    assert memory.optimizer == pytest.approx(4 * mib, rel=1e-5)
    peak = measure_peak_mib()
    assert peak is not None and memory.rest == pytest.approx(peak / 1024 - 8 * mib, abs=0.5)
    assert str(MemoryUse(0.1, 0.2, 0.3, 21.4)) == (
        "parameters 0.10, gradients 0.20, optimizer 0.30, activations and the rest 21.40"
    )


@pytest.mark.parametrize(
    ("tokens", "validates", "mends"),
    [
        (("a", "b"), False, "; use auto_batch=true, .*, then set gradient_checkpointing.*bf16$"),
        (("a",), False, "at the samples a .*; set gradient_checkpointing=true .* precision=bf16$"),
        (("a", "b"), True, "; lower data.val_batch_size, then use precision=bf16$"),
    ],
)
def test_the_remedies_fit_the_step(tokens: tuple[str, ...], validates: bool, mends: str) -> None:
    memory = MemoryUse(0.1, 0.1, 0.2, None)
    reason = "CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has a total capacity of"
    sentence = explain_memory(reason, memory, tokens, validates)
    assert "Tried to allocate 2 GiB; in GiB: parameters 0.10, gradients 0.10, optim" in sentence
    assert "GPU 0" not in sentence and "\n" not in sentence
    assert re.search(mends, sentence), sentence


def test_what_is_out_of_memory() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("")) and is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2"))
