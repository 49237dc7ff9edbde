"""LightningModule for BEVFormer: adds the previous frame's BEV map to a detector."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from bev_lightning.models.bev_encoder import PreviousBev
from bev_lightning.models.bevformer import BEVFormer
from bev_lightning.models.protocol import ModelPartition, RowParallel
from bev_lightning.modules.detection import DetectionModule
from bev_lightning.structures import Batch
from bev_lightning.structures.geometry import wrap_angle, yaw_of
from bev_lightning.structures.predictions import BEVFormerPredictions

# Scenes whose last map is kept: more than a batch mixes, few enough for a device's memory (a map of
# the base model takes 41 MB).
MAX_SCENES = 32


@dataclass(frozen=True)
class SceneState:
    """The last frame of a scene that was processed.

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

    In evaluation it comes from the last processed frame of the same scene, and the ego motion is
    that since this frame. A batch may mix scenes, or hold several frames of one scene in any order;
    the result is that of its samples one by one. The first frame of a scene has no previous map,
    and neither has a frame without a processed predecessor, unless the batch contains its history,
    which is then used as in training. The frames of a scene must come in temporal order and to the
    same process, unless batches contain their history. A frame that is repeated immediately gets no
    previous map, and does not change the results of later frames.

    With ``inputs.history`` 0 no frame gets a previous map, in training and in evaluation.

    Arguments are those of :class:`DetectionModule`.
    """

    network: BEVFormer

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._scenes: OrderedDict[str, SceneState] = OrderedDict()

    def forward(self, batch: Batch) -> BEVFormerPredictions:
        if not self.inputs.history:
            return self.network(batch)
        if self.training:
            return self.network(batch, self.encode_history(batch))
        return self._stream(batch)

    def pipeline_parts(self, row_parallel: RowParallel) -> ModelPartition:
        previous_bev = self.encode_history if self.inputs.history else None
        return self.network.pipeline_parts(row_parallel, previous_bev)

    def reset_memory(self) -> None:
        """Drop the previous maps of all scenes."""
        self._scenes.clear()

    @torch.no_grad()
    def encode_history(self, batch: Batch) -> PreviousBev | None:
        """The previous frame's map, computed from the batch's history."""
        if not batch.history:
            return None
        previous = None
        with _evaluating(self.network):
            for frame, maps in zip(batch.history, self.network.extract(batch.history), strict=True):
                if previous is not None:
                    previous = replace(previous, valid=frame.has_previous)
                bev = self.network.encode(frame, maps, previous)
                previous = PreviousBev(bev, batch.has_previous)
        return previous

    def _stream(self, batch: Batch) -> BEVFormerPredictions:
        """Detect with each scene's last map, and store the new maps."""
        maps = self.network.extract([batch])[0]
        encode_history = cache(lambda: self.encode_history(batch))
        bevs: dict[int, Tensor] = {}
        for rows in _group_rows(batch):
            index = torch.tensor(rows, device=batch.has_previous.device)
            states = [self._find_state(batch, row, encode_history) for row in rows]
            # The encoder's inputs alone.
            frame = replace(batch, points=None, radar=None, targets=None, history=()).rows(rows)
            frame, previous = _add_motion(frame, states)
            encoded = self.network.encode(frame, [m[index] for m in maps], previous)
            for row, bev in zip(rows, encoded, strict=True):
                bevs[row] = bev
                self._store(batch, row, bev)
        return self.network.detect(torch.stack([bevs[row] for row in range(batch.size)]))

    def _find_state(
        self, batch: Batch, row: int, encode_history: Callable[[], PreviousBev | None]
    ) -> SceneState | None:
        """The previous state of a frame: from its scene, else from its history."""
        if not batch.has_previous[row]:
            return None
        state = self._scenes.get(batch.scene_tokens[row])
        if batch.history:
            last = batch.history[-1]
            if state is None or state.timestamp != int(last.timestamps[row]):
                previous = encode_history()
                assert previous is not None
                return _state(last, row, previous.bev[row])
        if state is not None and state.timestamp < int(batch.timestamps[row]):
            return state
        return None

    def _store(self, batch: Batch, row: int, bev: Tensor) -> None:
        scene = batch.scene_tokens[row]
        state = self._scenes.get(scene)
        # For a repeated frame, keep the map that was computed with the previous frame's.
        if state is None or state.timestamp != int(batch.timestamps[row]):
            self._scenes[scene] = _state(batch, row, bev.detach())
        self._scenes.move_to_end(scene)
        while len(self._scenes) > MAX_SCENES:
            self._scenes.popitem(last=False)


def _state(batch: Batch, row: int, bev: Tensor) -> SceneState:
    poses = batch.global_from_lidar[row], batch.global_from_ego[row]
    return SceneState(int(batch.timestamps[row]), bev, *poses)


def _group_rows(batch: Batch) -> list[list[int]]:
    """Rows in groups that can be encoded together: each scene's first frame in the batch, then its
    second and so on, in temporal order."""
    frames = list(zip(batch.scene_tokens, batch.timestamps.tolist(), strict=True))
    num_earlier = [len({t for s, t in frames if s == scene and t < time}) for scene, time in frames]
    return [
        [row for row, number in enumerate(num_earlier) if number == group]
        for group in range(max(num_earlier) + 1)
    ]


def _add_motion(
    batch: Batch, states: Sequence[SceneState | None]
) -> tuple[Batch, PreviousBev | None]:
    """The frames with their ego motion since the previous states, and the states' maps.

    The motion is zero without a previous state; between consecutive frames it equals the batch's,
    up to rounding.
    """
    known = [state for state in states if state is not None]
    valid = torch.tensor([s is not None for s in states], device=batch.has_previous.device)
    previous = None
    if known:
        blank = torch.zeros_like(known[0].bev)
        maps = [blank if state is None else state.bev for state in states]
        previous = PreviousBev(torch.stack(maps), valid)
    lidar_pose, ego_pose = (
        torch.stack(
            [o if s is None else getattr(s, name) for s, o in zip(states, own, strict=True)]
        )
        for name, own in (
            ("global_from_lidar", batch.global_from_lidar),
            ("global_from_ego", batch.global_from_ego),
        )
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
    """Evaluation mode within the block; modules in evaluation mode before keep it."""
    training = [module for module in network.modules() if module.training]
    network.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
