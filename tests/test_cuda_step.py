"""Training steps of the toys on a CUDA device."""

import warnings
from collections.abc import Iterator

import lightning as L
import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from bev_lightning.benchmarks.random_batches import make_batch
from bev_lightning.config.compose import load_config
from bev_lightning.hardware.compilation import compile_network
from bev_lightning.modules.detection import DetectionModule
from bev_lightning.ops.backend import use_reference
from bev_lightning.structures import Batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TOYS = ("bevfusion_toy", "bevfusion_camera_lidar_radar_toy", "bevformer_toy")
NUM_STEPS = 8


class Batches:
    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return NUM_STEPS

    def __iter__(self) -> Iterator[Batch]:
        return (self.batch for _ in range(NUM_STEPS))


class Record(L.Callback):
    """Loss and allocated memory after each step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.allocated: list[int] = []

    def on_train_batch_end(self, trainer, module, outputs, batch, number) -> None:
        self.losses.append(float(outputs["loss"]))
        del outputs
        self.allocated.append(torch.cuda.memory_allocated())


def make_module(name: str, *words: str) -> DetectionModule:
    cfg = load_config("train", [f"model={name}", "optim.lr=5e-4", *words])
    model = OmegaConf.to_container(cfg.model, resolve=True)
    model["evaluator"] = None
    torch.manual_seed(0)
    return instantiate(model, _convert_="all")


def fit(module: DetectionModule, precision: str = "32-true") -> Record:
    record = Record()
    trainer = L.Trainer(
        accelerator="gpu",
        devices=1,
        precision=precision,
        max_steps=NUM_STEPS,
        gradient_clip_val=10.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[record],
    )
    trainer.fit(module, Batches(make_batch(module.inputs, 10, size=2, num_boxes=10).pin_memory()))
    return record


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("name", TOYS)
def test_a_toy_learns_its_batch_in_constant_memory(name: str, precision: str) -> None:
    record = fit(make_module(name), precision)
    assert all(torch.isfinite(torch.tensor(record.losses)))
    assert min(record.losses[-3:]) < record.losses[0]
    # The optimizer's moments come with the first step, a scaler's skipped ones may put them off.
    assert len(set(record.allocated[-4:])) == 1


@pytest.mark.parametrize("name", TOYS)
def test_kernels_give_the_loss_and_gradients_of_the_references(name: str) -> None:
    results = []
    for device, reference in (("cuda", False), ("cuda", True), ("cpu", False)):
        module = (
            make_module(name, "model.network.head.num_denoising=0")
            if "former" in name
            else (make_module(name))
        )
        module.to(device)
        batch = make_batch(module.inputs, 10, size=2, num_boxes=10).to(device)
        if reference:
            with use_reference():
                loss = torch.stack(list(module.compute_loss(module(batch), batch).values())).sum()
                loss.backward()
        else:
            loss = torch.stack(list(module.compute_loss(module(batch), batch).values())).sum()
            loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in module.parameters()])
        results.append((float(loss), float(norm)))
    assert results[0] == pytest.approx(results[1], rel=2e-3)
    assert results[0] == pytest.approx(results[2], rel=1e-2)


def test_a_compiled_bevformer_gives_the_loss_of_the_eager_one() -> None:
    losses = []
    for scope in ("off", "regions"):
        module = make_module("bevformer_toy", "model.network.head.num_denoising=0").cuda()
        if scope != "off":
            compile_network(module.network, "regions", fullgraph=True)
        batch = make_batch(module.inputs, 10, size=2, num_boxes=10).to("cuda")
        loss = torch.stack(list(module.compute_loss(module(batch), batch).values())).sum()
        loss.backward()
        losses.append(float(loss))
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


def test_a_step_of_bevformer_never_waits_but_for_the_costs() -> None:
    module = make_module("bevformer_toy").cuda()
    batch = make_batch(module.inputs, 10, size=2, num_boxes=10).to("cuda")
    for _ in range(2):  # kernels are built and tuned in the first
        torch.stack(list(module.compute_loss(module(batch), batch).values())).sum().backward()
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        torch.stack(list(module.compute_loss(module(batch), batch).values())).sum().backward()
        torch.cuda.set_sync_debug_mode("default")
    # The wait for the costs is one for an event, which this mode does not count.
    waits = [f"{w.filename}:{w.lineno}" for w in caught if "synchroniz" in str(w.message)]
    assert waits == []
