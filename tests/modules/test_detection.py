"""Training on data that lacks something, and frozen parts, with the lidar detector of the toy."""

import pickle
from dataclasses import replace
from unittest.mock import Mock

import lightning as L
import pytest
import torch
from helpers import BatchLoader
from hydra.utils import instantiate
from omegaconf import OmegaConf

from bev_lightning.callbacks.health import FiniteLoss
from bev_lightning.config.compose import load_config
from bev_lightning.data.datamodule import DetectionDataModule
from bev_lightning.errors import InputError
from bev_lightning.losses.bevfusion import BEVFusionLoss
from bev_lightning.losses.transfusion import TransFusionLoss
from bev_lightning.metrics.nuscenes import NuScenesEvaluator
from bev_lightning.models.heads import TransFusionHead
from bev_lightning.modules.detection import DetectionModule, _portable
from bev_lightning.modules.optimizer import OptimizerFactory, WarmupSchedule
from bev_lightning.structures import Batch, BevGrid, Boxes3D, Inputs, LidarInput, Points

RANGE = (-25.6, -25.6, -5.0, 25.6, 25.6, 3.0)
TINY = [
    "model=bevfusion_lidar_toy",
    f"model.inputs.lidar.range={list(RANGE)}",
    "model.network.lidar.out_channels=8",
    "model.network.backbone={in_channels:8,out_channels:[8,8,8],layer_nums:[1,1,1]}",
    "model.network.neck={in_channels:[8,8,8],out_channels:[8,8,8]}",
    "model.network.head={in_channels:24,channels:8,num_boxes:20}",
]
CLASSES = tuple(load_config("train").data.classes)


class Record(L.Callback):
    """Every step's terms."""

    def __init__(self) -> None:
        self.terms: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer, module, outputs, batch, number) -> None:
        self.terms.append({name: float(value) for name, value in outputs["terms"].items()})


def make_batch(number: int, labels: list[list[int]], unknown_velocity: bool = False) -> Batch:
    """Two samples with boxes of the given labels and points around them."""
    rng = torch.Generator().manual_seed(number)
    samples, points = [], []
    for own in labels:
        num = len(own)
        centre = torch.rand(num, 3, generator=rng) * torch.tensor([40.0, 40, 0]) - 20
        centre[:, 2] = 0
        boxes = Boxes3D(
            centre=centre,
            size=torch.tensor([[4.0, 2.0, 1.5]]).repeat(num, 1),
            yaw=torch.rand(num, generator=rng) * 6 - 3,
            velocity=torch.full((num, 2), torch.nan if unknown_velocity else 1.0),
            label=torch.tensor(own, dtype=torch.int64),
            valid=torch.ones(num, dtype=torch.bool),
        )
        samples.append(boxes)
        scene = torch.rand(300, 5, generator=rng) * torch.tensor([50.0, 50, 3, 255, 0.2])
        points.append(scene - torch.tensor([25.0, 25, 2, 0, 0]))
    size = len(labels)
    pose = torch.eye(4, dtype=torch.float64).repeat(size, 1, 1)
    return Batch(
        sample_tokens=tuple(f"sample-{number}-{i}" for i in range(size)),
        scene_tokens=("scene",) * size,
        timestamps=torch.arange(size),
        global_from_lidar=pose,
        global_from_ego=pose.clone(),
        lidar_from_previous_lidar=pose.float(),
        has_previous=torch.zeros(size, dtype=torch.bool),
        points=Points(torch.stack(points), torch.full((size,), 300)),
        targets=Boxes3D.stack(samples),
    ).validate()


def make_module(head: str = "centre", **optim) -> DetectionModule:
    torch.manual_seed(0)
    model = OmegaConf.to_container(load_config("train", TINY).model, resolve=True)
    network = instantiate(model["network"], _convert_="all")
    criterion = instantiate(model["loss"], _convert_="all")
    if head == "transfusion":
        network.head = TransFusionHead(
            BevGrid(RANGE, (1.6, 1.6)), 24, channels=8, num_queries=20, num_heads=2, ffn_channels=8
        )
        criterion = BEVFusionLoss(TransFusionLoss())
    inputs = Inputs(lidar=LidarInput(RANGE))
    factory = OptimizerFactory(torch.optim.AdamW, 1e-3, WarmupSchedule(warmup=0.0), **optim)
    return DetectionModule(network, criterion, inputs, CLASSES, factory)


def fit(module: DetectionModule, batches: list[Batch], val: list[Batch] | None = None) -> Record:
    record = Record()
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        callbacks=[FiniteLoss(), record],
    )
    trainer.fit(module, BatchLoader(batches), BatchLoader(val) if val else None)
    return record


@pytest.mark.parametrize("head", ["centre", "transfusion"])
def test_an_epoch_of_empty_frames_learns_background(head: str) -> None:
    module = make_module(head)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    record = fit(module, [make_batch(number, [[], []]) for number in range(2)])
    assert len(record.terms) == 4
    for terms in record.terms:
        assert all(torch.isfinite(torch.tensor(list(terms.values()))))
        assert terms["box"] == 0 and terms["heatmap"] > 0
    assert record.terms[-1]["heatmap"] < record.terms[0]["heatmap"]
    changed = [n for n, value in module.state_dict().items() if not torch.equal(value, before[n])]
    assert any("heatmap" in name for name in changed)


@pytest.mark.parametrize("head", ["centre", "transfusion"])
def test_unknown_velocities_and_absent_classes_leave_losses_finite(head: str) -> None:
    known = [make_batch(number, [[0, 0, 8], []]) for number in range(2)]
    unknown = [make_batch(number, [[0, 0, 8], []], unknown_velocity=True) for number in range(2)]
    terms = []
    for batches in (known, unknown):
        module = make_module(head)
        record = fit(module, batches)
        assert all(v > 0 and v < float("inf") for t in record.terms for v in t.values())
        assert all(torch.isfinite(value).all() for value in module.state_dict().values())
        terms.append(record.terms[0])
    # The first step sees the same network: only the velocity's share is missing.
    assert terms[1]["heatmap"] == terms[0]["heatmap"] and terms[1]["box"] < terms[0]["box"]


def test_frozen_parts_keep_weights_and_statistics() -> None:
    module = make_module(multipliers={"network.lidar.*": 0, "network.neck.*": 0.1})
    before = {name: value.clone() for name, value in module.state_dict().items()}
    batches = [make_batch(number, [[0], [1, 2]]) for number in range(2)]
    # Validation switches modes and must leave them as they were.
    fit(module, batches, val=batches)
    changed = {n for n, value in module.state_dict().items() if not torch.equal(value, before[n])}
    assert not any(name.startswith("network.lidar.") for name in changed)
    for part in ("backbone", "neck", "head"):
        names = {name for name in before if name.startswith(f"network.{part}.")}
        assert {n for n in names if "running" in n} <= changed
        assert any(name.endswith("weight") for name in names & changed)
    module.train()
    assert not module.network.lidar.training and module.network.neck.training
    assert all(not part.training for part in module.network.lidar.modules())


def test_validation_without_targets_or_optimizer() -> None:
    module = make_module()
    batch = replace(make_batch(0, [[0], []]), targets=None)
    boxes = module.eval().validation_step(batch, 0)["boxes"]
    assert boxes.valid.shape == (2, 20) and set(module.results) == set(batch.sample_tokens)


def test_all_processes_validate_with_the_statistics_of_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[torch.Tensor] = []
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.broadcast", lambda value, src: sent.append(value))
    module = make_module()
    module.on_validation_epoch_start()
    norm = module.network.backbone.blocks[0][1]
    assert any(value is norm.running_mean for value in sent)
    assert len(sent) == len(list(module.buffers()))


def test_a_missing_can_bus_is_told_for_models_that_read_it(monkeypatch) -> None:
    module, data = make_module(), Mock(spec=DetectionDataModule)
    monkeypatch.setattr(module, "_datamodule", lambda: data)
    module.setup("fit")
    data.warn_of_derived_motion.assert_not_called()
    module.network.reads_can_bus = True
    module.setup("fit")
    data.warn_of_derived_motion.assert_called_once_with()


def test_a_metric_that_cannot_be_had_stops_every_process(monkeypatch) -> None:
    """The first one says why; the others get its sentence instead of waiting."""
    module = make_module()
    module.evaluator = Mock(evaluate=Mock(side_effect=InputError("no tables")))
    monkeypatch.setattr(module, "_ground_truth", dict)
    module.trainer = Mock(sanity_checking=False, datamodule=None, global_rank=0)
    with pytest.raises(InputError, match="no tables"):
        module.on_validation_epoch_end()
    module.trainer.global_rank = 1
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.new_group", lambda **_: None)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    monkeypatch.setattr("torch.distributed.gather_object", lambda own, found, **_: None)
    monkeypatch.setattr(
        "torch.distributed.broadcast_object_list",
        lambda scores, **_: scores.__setitem__(0, InputError("no tables")),
    )
    with pytest.raises(InputError, match="no tables"):
        module.on_validation_epoch_end()
    assert module.evaluator.evaluate.call_count == 1


def test_the_metric_needs_a_datamodule_with_ground_truth() -> None:
    module = make_module()
    module.evaluator = NuScenesEvaluator(CLASSES)
    module.trainer = Mock(sanity_checking=False, datamodule=None, global_rank=0)
    with pytest.raises(InputError, match="the metric needs ground truth: pass the trainer a"):
        module.on_validation_epoch_end()


def test_any_error_of_scoring_can_travel() -> None:
    class LocalError(Exception):
        """Cannot be pickled."""

    try:
        raise LocalError("no such table")
    except LocalError as error:
        carried = pickle.loads(pickle.dumps(_portable(error)))
    assert type(carried) is RuntimeError
    assert str(carried).startswith("process 0 failed to score:") and "no such table" in str(carried)
    own = InputError("frame.jpg is cut short; copy it again")
    assert _portable(own) is own
