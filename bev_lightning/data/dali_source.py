"""The first half of DALI's loading, in worker processes: read files, check them, plan pixels.

Everything that can go wrong with a file goes wrong here, where file and sample are known: the
error of a decoder names neither and ends the pipeline. Points are finished here too and not in the
graph: a filter keeps an unforeseeable number of rows, which DALI has no operator for, and what it
leaves is a fraction of what would be uploaded before it.

The workers are a DataLoader's. DALI's own (``parallel=True``) wait for ever when one of them is
killed at the wrong moment; and they must be spawned where CUDA is in use, so they import torch
anew, which takes seconds each time a loader opens.
"""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from bev_lightning.data.frame import Frame, FrameSource, ImageSource
from bev_lightning.data.processes import prepare_worker
from bev_lightning.data.reader import read_cloud, read_image, read_position, read_radar
from bev_lightning.data.stream import Places
from bev_lightning.errors import InputError
from bev_lightning.structures import Inputs

_FRAME_HEADERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_SCAN = 0xDA


@dataclass(frozen=True)
class PixelPlan:
    """An affine pixel map as two operators: an antialiased resize of a region, then one warp.

    A warp alone would alias: it reads four pixels however far it shrinks. So the region of the
    original that the network sees is first resized to the network's scale; where the map has no
    rotation, its pixels then coincide with the network's and the warp only places them. The warp is
    fed the exact remainder, so geometry does not depend on how well the map splits.

    Attributes:
        region_start, region_end: ``(2,)`` y, x in the original [pixels, corner origin]; start > end
            mirrors.
        resized: ``(2,)`` height, width of the resized region [pixels].
        resized_from_network: ``(3, 3)`` pixel map, centres at integers. All float32.
    """

    region_start: np.ndarray
    region_end: np.ndarray
    resized: np.ndarray
    resized_from_network: np.ndarray


@dataclass(frozen=True)
class Slot:
    """One entry of the DALI batch: a camera of a frame. The first also carries its point clouds.

    Attributes:
        image: ``(n,)`` uint8 encoded file.
        plan: of its pixels.
        points: ``(P, 5)`` float32 as in :class:`Points`.
        radar: ``(R, 8)`` float32 as in :class:`Radar`.
    """

    image: np.ndarray
    plan: PixelPlan
    points: np.ndarray
    radar: np.ndarray


@dataclass(frozen=True)
class Note:
    """What goes with a micro-step beside its arrays.

    Attributes:
        skipped: for each sample the sentences of those it replaces, by token.
        error: sentence of an InputError, empty where there is none.
    """

    skipped: tuple[dict[str, str], ...] = ()
    error: str = ""


@dataclass(frozen=True)
class _Ragged:
    """Arrays of different lengths in one tensor, which travels through shared memory as one.

    Attributes:
        values: ``(sum(counts), ...)``.
        counts: rows of each array.
    """

    values: Tensor
    counts: tuple[int, ...]

    @classmethod
    def join(cls, arrays: list[np.ndarray]) -> "_Ragged":
        return cls(torch.from_numpy(np.concatenate(arrays)), tuple(len(array) for array in arrays))

    def split(self) -> list[np.ndarray]:
        return [rows.numpy() for rows in self.values.split(self.counts)]


@dataclass(frozen=True)
class _Parcel:
    """A micro-step on its way from a worker: S slots."""

    images: _Ragged
    plans: tuple[np.ndarray, ...]
    points: _Ragged
    radar: _Ragged
    note: Note


class SlotSource:
    """The callable that DALI asks for one micro-step after the other, ``start`` .. ``stop - 1``.

    Attributes:
        notes: of the micro-steps handed out, oldest first; to be taken by who uses the outputs.
    """

    def __init__(
        self,
        frames: FrameSource,
        schedule: Places,
        start: int,
        stop: int,
        num_workers: int,
        prefetch: int,
        start_method: str | None,
    ) -> None:
        """Start the workers.

        Args:
            num_workers: processes; 0 reads in this one.
            prefetch: micro-steps that each worker may hold ready.
            start_method: of the workers (fork, spawn, forkserver); None is the platform's own.
        """
        self.notes: deque[Note] = deque()
        self._has_images = frames.inputs.camera is not None
        parallel = num_workers > 0
        loader = DataLoader(
            MicroSteps(frames, schedule),
            batch_size=None,
            sampler=range(start, stop),
            collate_fn=_keep,  # batch_size None still converts arrays to tensors otherwise
            num_workers=num_workers,
            prefetch_factor=prefetch if parallel else None,
            multiprocessing_context=start_method if parallel else None,
            worker_init_fn=prepare_worker,
            # Its own generator: the DataLoader draws a seed for its workers, which would disturb
            # the model's random numbers.
            generator=torch.Generator(),
        )
        self._parcels: Iterator[_Parcel] | None = iter(loader)

    def __call__(self) -> tuple[list[np.ndarray], ...]:
        """The arrays of each slot: its image and the four of its plan if the model reads cameras,
        points and radar.

        Raises:
            StopIteration: past the last micro-step.
            RuntimeError: a worker was killed.
        """
        if self._parcels is None:
            raise StopIteration
        try:
            parcel = next(self._parcels)
        except (OSError, EOFError) as error:  # the parcel's memory went with the process
            raise RuntimeError("a worker process of the loader was killed") from error
        self.notes.append(parcel.note)
        clouds = parcel.points.split(), parcel.radar.split()
        if not self._has_images:
            return clouds
        return (parcel.images.split(), *(list(plan) for plan in parcel.plans), *clouds)

    def close(self) -> None:
        """End the workers."""
        self._parcels = None


class MicroSteps(Dataset[_Parcel]):
    """What the workers read. A micro-step follows from its number alone, so a loader that is opened
    at any of them goes on exactly there."""

    def __init__(self, frames: FrameSource, schedule: Places) -> None:
        self.frames = frames
        self.schedule = schedule

    def __getitem__(self, micro_step: int) -> _Parcel:
        """All slots: first those of the oldest frames of all samples, last the current frames',
        within a sample camera by camera."""
        try:
            results = [
                read_position(self.frames, *place, self._read)
                for place in self.schedule.batch(micro_step)
            ]
        except InputError as error:
            return _pack([_empty_slot()], Note(error=str(error)))
        queues = [queue for queue, _ in results]
        slots = [slot for moment in zip(*queues, strict=True) for frame in moment for slot in frame]
        return _pack(slots, Note(tuple(skipped for _, skipped in results)))

    def _read(self, frame: Frame) -> list[list[Slot]]:
        """Slots of the frame's history and of itself."""
        queue = (*frame.history, frame)
        # At a scene's start the queue repeats one frame: read it once.
        read = {id(member): read_slots(member, self.frames.inputs) for member in queue}
        return [read[id(member)] for member in queue]


def read_slots(frame: Frame, inputs: Inputs) -> list[Slot]:
    """Read one frame's files; one slot where there are no cameras.

    Raises:
        InputError: a file cannot be used; names sample and file.
    """
    try:
        slots = [
            Slot(
                read_encoded(source),
                plan_pixels(source.network_from_original, source.original_size, source.size),
                np.zeros((0, 5), np.float32),
                np.zeros((0, 8), np.float32),
            )
            for source in frame.images
        ] or [_empty_slot()]
        first = slots[0]
        slots[0] = Slot(
            first.image,
            first.plan,
            first.points if inputs.lidar is None else read_cloud(frame, inputs.lidar),
            first.radar if inputs.radar is None else read_radar(frame.radar, inputs.radar),
        )
    except InputError as error:
        raise InputError(f"sample {frame.sample_token}: {error}") from None
    return slots


def read_encoded(source: ImageSource) -> np.ndarray:
    """``(n,)`` uint8 bytes of an image that will decode to the size the tables promise.

    A JPEG's markers are walked and its end marker is looked for, which finds files cut short
    without decoding them. What does not pass is judged by the plain reader, so that both loaders
    refuse the same files in the same words.

    Raises:
        InputError: missing, empty, cut short, no image or of another size.
    """
    try:
        content = source.path.read_bytes()
    except OSError:
        content = b""
    if not is_whole_jpeg(content, source.original_size):
        read_image(source)
    return np.frombuffer(content, np.uint8)


def is_whole_jpeg(content: bytes, size: tuple[int, int]) -> bool:
    """Whether the bytes look like a complete JPEG of this height and width."""
    found = None
    for marker, begin, end in _segments(content):
        if marker in _FRAME_HEADERS:
            found = (
                int.from_bytes(content[begin + 1 : begin + 3], "big"),
                int.from_bytes(content[begin + 3 : begin + 5], "big"),
            )
        elif marker == _SCAN:  # behind it FF D9 is the end and nothing else
            return found == tuple(size) and content.rfind(b"\xff\xd9", end) >= 0
    return False


def plan_pixels(
    network_from_original: np.ndarray, original_size: tuple[int, int], size: tuple[int, int]
) -> PixelPlan:
    """Split a map into a resize and a warp.

    Args:
        network_from_original: ``(3, 3)`` affine, pixel centres at integers.
        original_size, size: height, width of the file and of the network's image [pixels].
    """
    corner = _shift(0.5, 0.5) @ network_from_original @ _shift(-0.5, -0.5)
    linear = corner[:2, :2]
    # linear = rotation @ diag(scale), a mirror being a negative first scale. What is no such
    # product (shear) is left to the warp.
    scale = np.hypot(linear[0], linear[1])
    scale[0] *= math.copysign(1.0, np.linalg.det(linear))
    angle = math.atan2(-linear[0, 1], linear[1, 1])
    cos, sin = math.cos(angle), math.sin(angle)
    unrotate = np.array([[cos, sin], [-sin, cos]])
    # The network's image before its rotation about the centre, with a margin for what the rotation
    # brings in at the corners and a pixel for the interpolation.
    network = np.array([size[1], size[0]], dtype=np.float64)
    offset = unrotate @ (corner[:2, 2] - network / 2) + network / 2
    margin = np.ceil((np.abs(unrotate) @ network - network) / 2 - 1e-6).clip(min=0) + (
        abs(sin) > 1e-9
    )
    edges = np.stack([offset, scale * original_size[::-1] + offset])
    low = np.maximum(np.floor(edges.min(axis=0) + 1e-6), -margin)
    high = np.minimum(np.ceil(edges.max(axis=0) - 1e-6), network + margin)
    if (high <= low).any():  # the image lies outside: read one pixel and put it far away
        return _plan(np.zeros(2), np.ones(2), np.ones(2), _shift(1e6, 1e6))
    resized_from_original = np.eye(3)
    resized_from_original[[0, 1], [0, 1]] = scale
    resized_from_original[:2, 2] = offset - low
    warp = _shift(-0.5, -0.5) @ resized_from_original @ np.linalg.inv(corner) @ _shift(0.5, 0.5)
    return _plan((low - offset) / scale, (high - offset) / scale, high - low, warp)


def _segments(content: bytes) -> Iterator[tuple[int, int, int]]:
    """Marker, begin and end of the payload of a JPEG's segments, as long as they are whole."""
    at = 2 if content[:2] == b"\xff\xd8" else len(content)
    while at + 4 <= len(content) and content[at] == 0xFF:
        if content[at + 1] == 0xFF:  # fill
            at += 1
            continue
        end = at + 2 + int.from_bytes(content[at + 2 : at + 4], "big")
        if end > len(content):
            return
        yield content[at + 1], at + 4, end
        at = end


def _pack(slots: list[Slot], note: Note) -> _Parcel:
    plans = [slot.plan for slot in slots]
    return _Parcel(
        _Ragged.join([slot.image for slot in slots]),
        (
            np.stack([plan.region_start for plan in plans]),
            np.stack([plan.region_end for plan in plans]),
            np.stack([plan.resized for plan in plans]),
            np.stack([plan.resized_from_network for plan in plans]),
        ),
        _Ragged.join([slot.points for slot in slots]),
        _Ragged.join([slot.radar for slot in slots]),
        note,
    )


def _keep(parcel: Any) -> Any:
    return parcel


def _empty_slot() -> Slot:
    return Slot(
        _BLANK,
        _plan(np.zeros(2), np.ones(2), np.ones(2), np.eye(3)),
        np.zeros((0, 5), np.float32),
        np.zeros((0, 8), np.float32),
    )


def _plan(start: np.ndarray, end: np.ndarray, resized: np.ndarray, warp: np.ndarray) -> PixelPlan:
    """From x, y as matrices have them to the y, x of the operators."""
    start, end, resized = (np.ascontiguousarray(v[::-1], np.float32) for v in (start, end, resized))
    return PixelPlan(start, end, resized, warp.astype(np.float32))


def _shift(x: float, y: float) -> np.ndarray:
    return np.array([[1.0, 0.0, x], [0.0, 1.0, y], [0.0, 0.0, 1.0]])


# A black image of one pixel for slots that carry none.
_BLANK = np.frombuffer(b"P6 1 1 255\n\0\0\0", np.uint8)
