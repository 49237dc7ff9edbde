"""What DALI's worker processes do: read and check image files, plan their pixels, sum up sweeps.

Everything that can go wrong with a file goes wrong here, where file and sample are known, and
travels as data: an exception would kill the pipeline, and a decoder's error names no file. Points
are finished here too and not in the graph: a filter keeps an unforeseeable number of rows, which
DALI has no operator for, and what it leaves is a fraction of what would be uploaded before it.

DALI starts these processes by spawning, so this file knows nothing of DALI or CUDA.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from bev_lightning.data.frame import Frame, FrameSource, ImageSource
from bev_lightning.data.reader import read_image, read_points, read_position, read_radar
from bev_lightning.data.stream import Schedule
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


class SlotSource:
    """The callable that DALI asks for micro-steps.

    What it gives follows from the number alone, so that any worker may be asked and a loader that
    is opened at any micro-step goes on exactly there.
    """

    def __init__(self, frames: FrameSource, schedule: Schedule, start: int, stop: int) -> None:
        self.frames = frames
        self.schedule = schedule
        self.start = start
        self.stop = stop

    def __call__(self, iteration: int) -> tuple[list[np.ndarray], ...]:
        """All slots of micro-step ``start + iteration``: first those of the oldest frames of all
        samples, last the current frames', within a sample camera by camera.

        Returns:
            the arrays of each slot: its image and the four of its plan if the model reads cameras,
            points, radar, and a note ``(k,)`` uint8. The first slot's note is JSON: either
            ``{"skipped": [...]}`` with the sentences of those skipped, by token, for each sample,
            or ``{"error": sentence}``.

        Raises:
            StopIteration: past the last micro-step.
        """
        micro_step = self.start + iteration
        if micro_step >= self.stop:
            raise StopIteration
        try:
            results = [
                read_position(self.frames, *place, self._read)
                for place in self.schedule.batch(micro_step)
            ]
        except InputError as error:
            return self._columns([_empty_slot()], {"error": str(error)})
        queue = [queue for queue, _ in results]
        slots = [slot for moment in zip(*queue, strict=True) for frame in moment for slot in frame]
        return self._columns(slots, {"skipped": [skipped for _, skipped in results]})

    def _read(self, frame: Frame) -> list[list[Slot]]:
        """Slots of the frame's history and of itself."""
        read = {id(past): read_slots(past, self.frames.inputs) for past in (*frame.history, frame)}
        return [read[id(past)] for past in (*frame.history, frame)]

    def _columns(self, slots: list[Slot], note: dict[str, object]) -> tuple[list[np.ndarray], ...]:
        notes = [np.frombuffer(json.dumps(note).encode(), np.uint8)]
        notes += [np.zeros(0, np.uint8)] * (len(slots) - 1)
        clouds = [slot.points for slot in slots], [slot.radar for slot in slots], notes
        if self.frames.inputs.camera is None:
            return clouds
        return (
            [slot.image for slot in slots],
            [slot.plan.region_start for slot in slots],
            [slot.plan.region_end for slot in slots],
            [slot.plan.resized for slot in slots],
            [slot.plan.resized_from_network for slot in slots],
            *clouds,
        )


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
            first.points if inputs.lidar is None else read_points(frame.lidar, inputs.lidar),
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
