"""BEVFormer's LightningModule: what it adds to a detector is the memory of the previous frame."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import torch
from torch import Tensor, nn

from bev_lightning.losses.protocol import DetectionLoss
from bev_lightning.metrics.nuscenes import NuScenesEvaluator
from bev_lightning.models.bev_encoder import PreviousBev
from bev_lightning.models.bevformer import BEVFormer
from bev_lightning.models.protocol import ModelPartition, RowParallel
from bev_lightning.modules.detection import DetectionModule
from bev_lightning.modules.optimizer import OptimizerFactory
from bev_lightning.structures import Batch, Inputs
from bev_lightning.structures.geometry import wrap_angle, yaw_of
from bev_lightning.structures.predictions import BEVFormerPredictions

# Scenes whose last map is kept: more than one batch mixes, few enough for the memory of a device
# (a map of the base model takes 41 MB).
MAX_SCENES = 32


@dataclass(frozen=True)
class SceneState:
    """The last frame of a scene that was seen.

    Attributes:
        timestamp: [microseconds].
        bev: ``(C, Y, X)``.
        global_from_lidar, global_from_ego: ``(4, 4)`` float64.
    """

    timestamp: int
    bev: Tensor
    global_from_lidar: Tensor
    global_from_ego: Tensor


class BEVFormerModule(DetectionModule):
    """Trains, validates and predicts with :class:`BEVFormer`.

    In training the previous map comes from ``Batch.history``, oldest frame first, without gradient
    and with the network in evaluation mode, as published.

    In evaluation it comes from the frame of the same scene that was seen last, whatever else was
    seen in between, and the ego motion is that since this frame. So a batch may mix scenes, or hold
    several frames of one in any order, and gives what its samples give one by one. The first frame
    of a scene starts afresh, and so does one of which nothing earlier was seen, unless the batch
    brings its history: then that is used, as in training. Frames must come in the order of time,
    those of a scene to one process; a batch that brings its history is right in any order. A frame
    that comes again at once starts afresh, and what comes after it does not notice.

    With ``inputs.history`` 0 every frame starts afresh, in training and in evaluation.

    Arguments are those of :class:`DetectionModule`.
    """

    network: BEVFormer

    def __init__(
        self,
        network: nn.Module,
        loss: DetectionLoss,
        inputs: Inputs,
        classes: Sequence[str],
        optim: OptimizerFactory | None = None,
        evaluator: NuScenesEvaluator | None = None,
        loss_norm: Literal["batch", "effective"] = "batch",
    ) -> None:
        super().__init__(network, loss, inputs, classes, optim, evaluator, loss_norm)
        self._scenes: OrderedDict[str, SceneState] = OrderedDict()

    def forward(self, batch: Batch) -> BEVFormerPredictions:
        if not self.inputs.history:
            return self.network(batch)
        if self.training:
            return self.network(batch, self.remember(batch))
        return self._stream(batch)

    def pipeline_parts(self, row_parallel: RowParallel) -> ModelPartition:
        previous_bev = self.remember if self.inputs.history else None
        return self.network.pipeline_parts(row_parallel, previous_bev)

    def forget(self) -> None:
        """Start all scenes afresh."""
        self._scenes.clear()

    def on_validation_epoch_start(self) -> None:
        super().on_validation_epoch_start()
        self.forget()

    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        self.forget()

    def on_predict_epoch_start(self) -> None:
        super().on_predict_epoch_start()
        self.forget()

    def on_predict_epoch_end(self) -> None:
        super().on_predict_epoch_end()
        self.forget()

    @torch.no_grad()
    def remember(self, batch: Batch) -> PreviousBev | None:
        """The map of the frame before this one, from the batch's history."""
        if not batch.history:
            return None
        previous = None
        with _evaluating(self.network):
            for frame, maps in zip(batch.history, self.network.extract(batch.history), strict=True):
                if previous is not None:
                    previous = replace(previous, valid=frame.has_previous)
                previous = PreviousBev(
                    self.network.encode(frame, maps, previous), batch.has_previous
                )
        return previous

    def _stream(self, batch: Batch) -> BEVFormerPredictions:
        """Detect with the scenes' last maps, and keep the new ones."""
        maps = self.network.extract([batch])[0]
        queue = cache(lambda: self.remember(batch))
        bevs: dict[int, Tensor] = {}
        for rows in _waves(batch):
            index = torch.tensor(rows, device=batch.has_previous.device)
            states = [self._find(batch, row, queue) for row in rows]
            frame, previous = _since(_select(batch, index), states)
            encoded = self.network.encode(frame, [m[index] for m in maps], previous)
            for row, bev in zip(rows, encoded, strict=True):
                bevs[row] = bev
                self._keep(batch, row, bev)
        return self.network.detect(torch.stack([bevs[row] for row in range(batch.size)]))

    def _find(
        self, batch: Batch, row: int, queue: Callable[[], PreviousBev | None]
    ) -> SceneState | None:
        """What is remembered before a frame: of its scene, else of its history."""
        if not batch.has_previous[row]:
            return None
        state = self._scenes.get(batch.scene_tokens[row])
        if batch.history:
            last = batch.history[-1]
            if state is None or state.timestamp != int(last.timestamps[row]):
                previous = queue()
                assert previous is not None
                return _state(last, row, previous.bev[row])
        if state is not None and state.timestamp < int(batch.timestamps[row]):
            return state
        return None

    def _keep(self, batch: Batch, row: int, bev: Tensor) -> None:
        scene = batch.scene_tokens[row]
        state = self._scenes.get(scene)
        # Of a frame that comes again, the map that had the memory of the frame before is kept.
        if state is None or state.timestamp != int(batch.timestamps[row]):
            self._scenes[scene] = _state(batch, row, bev.detach())
        self._scenes.move_to_end(scene)
        while len(self._scenes) > MAX_SCENES:
            self._scenes.popitem(last=False)


def _state(batch: Batch, row: int, bev: Tensor) -> SceneState:
    return SceneState(
        int(batch.timestamps[row]),
        bev,
        batch.global_from_lidar[row],
        batch.global_from_ego[row],
    )


def _waves(batch: Batch) -> list[list[int]]:
    """Rows in groups that can be encoded together: a scene's first frame of the batch, then its
    second and so on, in the order of time."""
    times = batch.timestamps.tolist()
    seen: dict[str, list[int]] = {}
    for scene, time in sorted(set(zip(batch.scene_tokens, times, strict=True))):
        seen.setdefault(scene, []).append(time)
    waves: dict[int, list[int]] = {}
    for row, (scene, time) in enumerate(zip(batch.scene_tokens, times, strict=True)):
        waves.setdefault(seen[scene].index(time), []).append(row)
    return [waves[number] for number in sorted(waves)]


def _select(batch: Batch, index: Tensor) -> Batch:
    """What the encoder reads of some rows."""
    cameras, rows = batch.cameras, index.tolist()
    if cameras is not None:
        cameras = replace(
            cameras, images=cameras.images[index], image_from_lidar=cameras.image_from_lidar[index]
        )
    return replace(
        batch,
        sample_tokens=tuple(batch.sample_tokens[row] for row in rows),
        scene_tokens=tuple(batch.scene_tokens[row] for row in rows),
        timestamps=batch.timestamps[index],
        global_from_lidar=batch.global_from_lidar[index],
        global_from_ego=batch.global_from_ego[index],
        lidar_from_previous_lidar=batch.lidar_from_previous_lidar[index],
        has_previous=batch.has_previous[index],
        can_bus=None if batch.can_bus is None else batch.can_bus[index],
        cameras=cameras,
        points=None,
        radar=None,
        targets=None,
        history=(),
    )


def _since(batch: Batch, states: Sequence[SceneState | None]) -> tuple[Batch, PreviousBev | None]:
    """The frames with their ego motion counted from what is remembered, none where that is nothing;
    and the remembered maps.

    Between consecutive frames the motion is what the batch brought, up to rounding.
    """
    known = [state for state in states if state is not None]
    valid = torch.tensor([s is not None for s in states], device=batch.has_previous.device)
    lidar_pose, ego_pose = batch.global_from_lidar, batch.global_from_ego
    previous = None
    if known:
        blank = torch.zeros_like(known[0].bev)
        maps = [blank if state is None else state.bev for state in states]
        previous = PreviousBev(torch.stack(maps), valid)
        lidar_pose = torch.stack(
            [
                own if s is None else s.global_from_lidar
                for s, own in zip(states, lidar_pose, strict=True)
            ]
        )
        ego_pose = torch.stack(
            [
                own if s is None else s.global_from_ego
                for s, own in zip(states, ego_pose, strict=True)
            ]
        )
    pose = torch.linalg.inv(batch.global_from_lidar) @ lidar_pose
    can_bus = batch.can_bus
    if can_bus is not None:
        can_bus = can_bus.clone()
        turn = wrap_angle(yaw_of(batch.global_from_ego) - yaw_of(ego_pose))
        can_bus[:, :3] = (batch.global_from_ego - ego_pose)[:, :3, 3].to(can_bus.dtype)
        can_bus[:, 17] = turn.rad2deg().to(can_bus.dtype)
    moved = replace(
        batch,
        lidar_from_previous_lidar=pose.to(batch.lidar_from_previous_lidar.dtype),
        can_bus=can_bus,
    )
    return moved, previous


@contextmanager
def _evaluating(network: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while; what was in evaluation mode before stays there."""
    training = [module for module in network.modules() if module.training]
    network.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
