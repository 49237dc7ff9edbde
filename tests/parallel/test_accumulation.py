"""Two micro-steps of one sample are one step of two, where losses look at the whole step."""

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from bev_lightning.data.batch_stream import WindowedStream
from bev_lightning.models import bevformer_head
from bev_lightning.modules.detection import DetectionModule
from bev_lightning.structures import Batch

Make = Callable[..., Any]
NUM_BOXES = ((1, 7), (4, 0), (2, 3), (0, 0))


class Stream:
    """Batches as a training stream hands them out, with a draw of the generator at each."""

    order = SimpleNamespace(seed=3, rank=0)
    seconds_waited = 0.5

    def __init__(self, batches: Sequence[Any]) -> None:
        self.batches = batches
        self.micro_step = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            self.micro_step += 1
            yield batch


class FrozenNorms(L.Callback):
    def on_train_batch_start(self, trainer, module, batch, number) -> None:
        for part in module.modules():
            if isinstance(part, nn.modules.batchnorm._BatchNorm):
                part.eval()


def train(module: DetectionModule, batches: list[Batch], accumulation: int) -> Tensor:
    """All weights after a pass with SGD and batch norms in evaluation mode."""
    # AdamW would hide a factor of all gradients.
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=1e-2)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        accumulate_grad_batches=accumulation,
        gradient_clip_val=5.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[FrozenNorms()],
    )
    trainer.fit(module, WindowedStream(Stream(batches), accumulation))
    assert trainer.global_step == len(batches) // accumulation
    return nn.utils.parameters_to_vector(module.parameters()).detach()


@pytest.mark.parametrize("name", ["bevfusion", "bevformer", "learned"])
def test_two_times_one_is_two(
    name: str, make_module: Make, make_batch: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    singles = [
        make_batch(2 * step + row, (boxes,))
        for step, pair in enumerate(NUM_BOXES)
        for row, boxes in enumerate(pair)
    ]
    pairs = [Batch.stack(singles[i : i + 2]) for i in range(0, len(singles), 2)]
    # Denoising draws its noise for all samples of a micro-step together.
    monkeypatch.setattr(bevformer_head, "DENOISING_SHIFT", 0.0)
    monkeypatch.setattr(bevformer_head, "DENOISING_FLIP", 0.0)
    start = nn.utils.parameters_to_vector(make_module(name).parameters()).detach()

    def differ(norm: str) -> float:
        found = [
            train(make_module(name, f"loss_norm={norm}"), batches, accumulation)
            for batches, accumulation in ((singles, 2), (pairs, 1))
        ]
        assert (found[1] - start).norm() > 1e-3
        return float((found[0] - found[1]).norm() / (found[1] - start).norm())

    deviation, published = differ("effective"), differ("batch")
    print(f"{name}: weights differ by {deviation:.1e} of their way; published: {published:.1e}")
    assert deviation < 1e-4
    assert published > 1e-2


def test_normalizers_are_of_all_processes(
    make_module: Make, make_batch: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    window = [make_batch(0, (2,)), make_batch(1, (3,))]
    module = make_module("bevformer", "loss_norm=effective")
    module._trainer = SimpleNamespace(accumulate_grad_batches=2, world_size=4)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.all_reduce", lambda counts: counts.mul_(4))
    counts = module._sum_normalizers(window)
    assert float(counts["class"]) == float(counts["box"]) == 5 * 4 / (2 * 4)
    assert float(counts["denoising_box"]) == 2 * 5 * 4 / (2 * 4)
    nothing = module._sum_normalizers([make_batch(2, (0,))])
    assert float(nothing["class"]) == 1 / (2 * 4)


def test_losses_divide_by_their_normalizers(make_module: Make, make_batch: Make) -> None:
    batch = make_batch(5)
    for name in ("bevfusion", "bevformer", "learned"):
        module = make_module(name)
        counts = module.loss.normalizers(module.network, batch)
        predictions = module.network.train()(batch)
        own = module.loss(predictions, batch.targets)
        given = module.loss(predictions, batch.targets, counts)
        assert own.keys() == given.keys() == counts.keys()
        for term in own:
            assert torch.equal(own[term], given[term]), (name, term)
        double = {term: 2 * count for term, count in counts.items()}
        for term, value in module.loss(predictions, batch.targets, double).items():
            assert float(value) == pytest.approx(float(own[term]) / 2)


def test_a_window_shows_the_batches_to_come() -> None:
    stream = WindowedStream(Stream("abcde"), 2)
    seen, draws = [], []
    for letter in stream:
        seen.append((letter, "".join(stream.window)))
        draws.append(float(torch.rand(())))
    assert seen == [("a", "ab"), ("b", "ab"), ("c", "cd"), ("d", "cd"), ("e", "e")]
    assert len(stream) == 5 and stream.seconds_waited == 0.5
    # The generators are those of each micro-step, whatever the window.
    assert len(set(draws)) == 5
    alone = []
    for _ in WindowedStream(Stream("abcde"), 1):
        alone.append(float(torch.rand(())))
    assert alone == draws
