"""The memory of the previous frame: streams, mixed batches, queues."""

import math
from collections.abc import Sequence
from dataclasses import replace

import lightning as L
import pytest
import torch
import torch.distributed as dist
from helpers import BatchLoader
from torch import Tensor

from bev_lightning.data.samplers import SceneSampler
from bev_lightning.losses.set_prediction import SetPredictionLoss
from bev_lightning.models.bev_encoder import BEVEncoder, PreviousBev
from bev_lightning.models.bevformer import BEVFormer
from bev_lightning.models.bevformer_head import BEVFormerHead
from bev_lightning.models.image import FPN, ResNet
from bev_lightning.modules import bevformer
from bev_lightning.modules.bevformer import BEVFormerModule
from bev_lightning.modules.optimizer import OptimizerFactory
from bev_lightning.structures import Batch, BevGrid, Boxes3D, CameraInput, Cameras, Inputs
from bev_lightning.structures.geometry import make_transform

GRID = BevGrid((-12.0, -8.0, -5.0, 12.0, 8.0, 3.0), (4.0, 4.0))
CLASSES = ("car", "truck")
LENGTHS = {"a": 4, "b": 3}


def make_module(motion: str = "can_bus", history: int = 2) -> BEVFormerModule:
    torch.manual_seed(0)
    encoder = BEVEncoder(
        GRID,
        channels=8,
        num_layers=2,
        num_heads=2,
        num_levels=1,
        num_cameras=2,
        num_anchors=2,
        num_points=2,
        num_temporal_points=2,
        ffn_channels=8,
        motion=motion,  # type: ignore[arg-type]
        use_can_bus=motion == "can_bus",
    )
    network = BEVFormer(
        ResNet(18, width=4, out_stages=(1,)),
        FPN((8,), 8, 1),
        encoder,
        BEVFormerHead(GRID, 8, 2, 6, 2, 2, 2, 8, max_boxes=4),
    )
    for name, parameter in network.named_parameters():
        if "temporal" in name:  # the previous map shall count
            torch.nn.init.normal_(parameter, std=0.5)
    inputs = Inputs(camera=CameraInput((16, 24), ("CAM_FRONT", "CAM_BACK")), history=history)
    return BEVFormerModule(
        network, SetPredictionLoss(), inputs, CLASSES, OptimizerFactory(torch.optim.AdamW, 1e-3)
    ).eval()


def make_frame(scene: str, number: int) -> Batch:
    """A frame of an ego that drives 1.5 m a frame on a bend, far from the origin of the map."""
    shift = {"a": 0.0, "b": 0.7}[scene]

    def pose(k: int) -> Tensor:
        yaw = shift + 0.1 * k
        cos, sin = math.cos(yaw), math.sin(yaw)
        rotation = torch.tensor([[cos, -sin, 0.0], [sin, cos, 0.0], [0.0, 0.0, 1.0]]).double()
        place = torch.tensor([600.0 + 1.5 * k * cos, 1200.0 + 1.5 * k * sin, 1.0]).double()
        return make_transform(rotation, place)

    turned = torch.tensor([[0.0, 1.0, 0.0], [-1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]).double()
    ego_from_lidar = make_transform(turned, torch.tensor([0.9, 0.0, 1.8]).double())
    now, before = pose(number), pose(max(0, number - 1))
    lidar, previous = now @ ego_from_lidar, before @ ego_from_lidar
    can_bus = torch.zeros(1, 18)
    can_bus[0, :3] = (now - before)[:3, 3]
    can_bus[0, 16] = shift + 0.1 * number
    can_bus[0, 17] = math.degrees(0.1) if number else 0.0
    rng = torch.Generator().manual_seed(100 * ord(scene) + number)
    cameras = torch.eye(4).expand(1, 2, 4, 4).clone()
    forward = torch.tensor([[12.0, 12.0, 0.0], [0.0, 8.0, -12.0], [0.0, 1.0, 0.0]])
    cameras[0, 0, :3, :3] = forward
    cameras[0, 1, :3, :3] = forward @ torch.diag(torch.tensor([-1.0, -1.0, 1.0]))
    boxes = Boxes3D.empty(1, 1)
    return Batch(
        sample_tokens=(f"{scene}{number}",),
        scene_tokens=(scene,),
        timestamps=torch.tensor([1_000_000 + 500_000 * number]),
        global_from_lidar=lidar[None],
        global_from_ego=now[None],
        lidar_from_previous_lidar=(torch.linalg.inv(lidar) @ previous).float()[None],
        has_previous=torch.tensor([number > 0]),
        cameras=Cameras(torch.randn(1, 2, 3, 16, 24, generator=rng), cameras),
        targets=replace(boxes, valid=torch.ones_like(boxes.valid)),
        can_bus=can_bus,
    )


def with_history(scene: str, number: int, length: int = 2) -> Batch:
    """A frame that brings its queue, as the data room fills it."""
    first = max(0, number - length)
    past = [make_frame(scene, k) for k in range(first, number)] or [make_frame(scene, 0)]
    past[0] = replace(past[0], has_previous=torch.tensor([False]))
    past = [past[0]] * (length - len(past)) + past
    past = [replace(frame, targets=None) for frame in past]
    return replace(make_frame(scene, number), history=tuple(past))


def batches(*groups: str) -> list[Batch]:
    """``"a0 b0"`` is a batch of two frames."""
    return [
        Batch.stack([make_frame(token[0], int(token[1])) for token in group.split()])
        for group in groups
    ]


@torch.no_grad()
def detect(module: BEVFormerModule, frames: Sequence[Batch]) -> dict[str, Tensor]:
    """Box codes of the last layer by sample token."""
    found = {}
    for batch in frames:
        code = module(batch).queries.code[-1]
        found.update(zip(batch.sample_tokens, code, strict=True))
    return found


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for token, code in first.items():
        torch.testing.assert_close(code, second[token], atol=1e-5, rtol=1e-5, msg=token)


ONE_BY_ONE = ("a0", "a1", "a2", "a3", "b0", "b1", "b2")


@pytest.mark.parametrize("motion", ["can_bus", "pose"])
@pytest.mark.parametrize(
    "groups",
    [
        ("a0 b0", "b1 a1", "a2 b2", "a3"),  # mixed scenes, in any order
        ("a0 a1", "a2 a3", "b0 b1", "b2"),  # consecutive frames in a batch
        ("a3 b1 a0 b2 a2 a1 b0",),  # everything at once
        ("b0", "a0", "b1", "a1", "a2", "b2", "a3"),  # taking turns
        ("a0 a0", "a1", "a2 a2 b0", "b1 a3", "b2"),  # padded with repeats
    ],
)
def test_batches_equal_single_samples(motion: str, groups: tuple[str, ...]) -> None:
    module = make_module(motion)
    wanted = detect(module, batches(*ONE_BY_ONE))
    module.reset_memory()
    same(detect(module, batches(*groups)), wanted)


@pytest.mark.parametrize("motion", ["can_bus", "pose"])
def test_stream_is_the_network_with_the_previous_map(motion: str) -> None:
    module = make_module(motion)
    assert module.network.reads_can_bus == (motion == "can_bus")
    streamed = detect(module, batches("a0", "a1", "a2"))
    previous = None
    with torch.no_grad():
        for frame in batches("a0", "a1", "a2"):
            predictions = module.network(frame, previous)
            code = predictions.queries.code[-1, 0]
            torch.testing.assert_close(streamed[frame.sample_tokens[0]], code, atol=1e-4, rtol=1e-4)
            previous = PreviousBev(predictions.bev, torch.tensor([True]))
            alone = module.network(frame).queries.code[-1, 0]
            if frame.sample_tokens != ("a0",):
                assert float((alone - code).abs().max()) > 1e-3


def test_first_frame_of_a_scene_ignores_what_was_before() -> None:
    module = make_module()
    detect(module, batches("a0", "a1"))
    after = detect(module, batches("b0", "a0"))
    module.reset_memory()
    same(after, detect(module, batches("b0", "a0")))


def test_a_frame_of_which_nothing_earlier_was_seen_starts_afresh() -> None:
    module = make_module()
    found = detect(module, batches("a2"))["a2"]
    frame = make_frame("a", 2)
    assert frame.can_bus is not None
    still = frame.can_bus.clone()
    still[:, [0, 1, 2, 17]] = 0.0
    with torch.no_grad():
        wanted = module.network(replace(frame, can_bus=still)).queries.code[-1, 0]
    torch.testing.assert_close(found, wanted)


def test_motion_is_counted_from_the_frame_that_was_seen() -> None:
    """a1 is skipped: the motion from a0 to a2 is that of both steps."""
    module = make_module("pose")
    found = detect(module, batches("a0", "a2"))["a2"]
    first, third = make_frame("a", 0), make_frame("a", 2)
    change = torch.linalg.inv(third.global_from_lidar) @ first.global_from_lidar
    with torch.no_grad():
        previous = PreviousBev(module.network(first).bev, torch.tensor([True]))
        third = replace(third, lidar_from_previous_lidar=change.float())
        wanted = module.network(third, previous).queries.code[-1, 0]
    torch.testing.assert_close(found, wanted)


def test_an_earlier_frame_does_not_look_into_the_future() -> None:
    module = make_module()
    detect(module, batches("a0", "a1", "a2"))
    found = detect(module, batches("a1"))
    module.reset_memory()
    same(found, detect(module, batches("a1")))


def test_queue_equals_stream_and_takes_no_gradient() -> None:
    module = make_module()
    wanted = detect(module, batches("a0", "a1", "a2"))
    module.reset_memory()
    batch = Batch.stack([with_history("a", 2), with_history("b", 0), with_history("a", 1)])
    modes = {name: part.training for name, part in module.network.train().named_modules()}
    module.network.backbone.eval()
    modes |= {name: False for name in modes if name.startswith("backbone")}
    previous = module.encode_history(batch)
    assert previous is not None and not previous.bev.requires_grad
    assert previous.valid.tolist() == [True, False, True]
    assert {n: part.training for n, part in module.network.named_modules()} == modes
    module.eval()
    with torch.no_grad():
        code = module.network(batch, previous).queries.code[-1]
    torch.testing.assert_close(code[0], wanted["a2"], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(code[2], wanted["a1"], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(code[1], detect(module, batches("b0"))["b0"])


def test_history_makes_evaluation_right_in_any_order() -> None:
    module = make_module()
    wanted = detect(module, [with_history(*pair) for pair in (("a", 1), ("a", 2), ("b", 1))])
    module.reset_memory()
    found = detect(module, [with_history(*pair) for pair in (("b", 1), ("a", 2), ("a", 1))])
    module.reset_memory()
    same({token: found[token] for token in wanted}, wanted)


def test_without_history_every_frame_starts_afresh() -> None:
    module = make_module(history=0)
    found = detect(module, batches("a0", "a1"))
    with torch.no_grad():
        alone = module.network(make_frame("a", 1)).queries.code[-1, 0]
    torch.testing.assert_close(found["a1"], alone)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("batch_size", [1, 2])
def test_processes_together_equal_one(
    batch_size: int, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank runs its share of the schedule; with three of them, one has no scene."""
    tokens = [f"{scene}{number}" for scene, length in LENGTHS.items() for number in range(length)]
    shards = []
    for rank in range(world_size):
        schedule = SceneSampler(tuple(LENGTHS.values()), batch_size, rank, world_size)
        module = make_module()
        for step in range(len(schedule)):
            places = schedule.batch(step)
            (batch,) = batches(" ".join(tokens[place] for _, place in places))
            module.validation_step(replace(batch, targets=None), step)
        shards.append(module.results)
    assert sum(len(shard) for shard in shards) == len(tokens) + world_size - 2
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: world_size)
    monkeypatch.setattr(dist, "new_group", lambda **_: None)
    monkeypatch.setattr(
        dist, "gather_object", lambda own, found, **_: found.__setitem__(slice(None), shards)
    )
    gathered = module._gather(module.results)
    alone = make_module()
    for step, token in enumerate(tokens):
        alone.validation_step(replace(make_frame(token[0], int(token[1])), targets=None), step)
    assert list(gathered) == list(alone.results) == tokens
    for token in tokens:
        for one, two in zip(gathered[token], alone.results[token], strict=True):
            assert one["detection_name"] == two["detection_name"]
            for key in ("translation", "velocity", "detection_score"):
                assert one[key] == pytest.approx(two[key], abs=1e-4)


def test_a_frame_again_changes_nothing_for_the_next() -> None:
    module = make_module()
    wanted = detect(module, batches("a0", "a1", "a2"))["a2"]
    module.reset_memory()
    found = detect(module, batches("a0", "a1", "a1", "a2"))["a2"]
    torch.testing.assert_close(found, wanted)


def test_old_scenes_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bevformer, "MAX_SCENES", 1)
    module = make_module()
    detect(module, batches("a0", "b0"))
    assert list(module._scenes) == ["b"]


def test_trains_validates_and_predicts() -> None:
    module = make_module()
    train = [Batch.stack([with_history("a", 2), with_history("b", 0)])] * 2
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    before = {name: value.clone() for name, value in module.named_parameters()}
    trainer.fit(module, BatchLoader(train), BatchLoader(batches("a0 a1", "b0")))
    changed = [n for n, value in module.named_parameters() if not torch.equal(value, before[n])]
    assert "network.encoder.layers.0.temporal.value_proj.weight" in changed
    assert "network.backbone.conv1.weight" in changed
    assert set(module.results) == {"a0", "a1", "b0"} and not module._scenes
    boxes = trainer.predict(module, BatchLoader(batches("a0", "a1")))
    assert boxes is not None and boxes[1].valid.shape == (1, 4)
    assert all(math.isfinite(float(value)) for value in trainer.callback_metrics.values())
