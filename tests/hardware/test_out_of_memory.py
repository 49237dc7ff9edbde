import re

import pytest
import torch

from bev_lightning.hardware.out_of_memory import (
    MemoryUse,
    explain_memory,
    is_out_of_memory,
    measure_peak_mib,
)


def test_memory_is_reported_by_kind() -> None:
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
    ("tokens", "validates", "fixes"),
    [
        (("a", "b"), False, "; use auto_batch=true, .*, then set gradient_checkpointing.*bf16$"),
        (("a",), False, "at the samples a .*; set gradient_checkpointing=true .* precision=bf16$"),
        (("a", "b"), True, "; lower data.val_batch_size, then use precision=bf16$"),
    ],
)
def test_the_remedies_fit_the_step(tokens: tuple[str, ...], validates: bool, fixes: str) -> None:
    memory = MemoryUse(0.1, 0.1, 0.2, None)
    reason = "CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has a total capacity of"
    sentence = explain_memory(reason, memory, tokens, validates)
    assert "Tried to allocate 2 GiB; in GiB: parameters 0.10, gradients 0.10, optim" in sentence
    assert "GPU 0" not in sentence and "\n" not in sentence
    assert re.search(fixes, sentence), sentence


def test_what_is_out_of_memory() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("")) and is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2"))
