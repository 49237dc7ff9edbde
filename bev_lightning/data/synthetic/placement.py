"""Builds random scenes: the road and the ego's trajectory, then objects without collisions."""

from dataclasses import dataclass, field

import numba
import numpy as np
from PIL import Image, ImageDraw

from bev_lightning.data.synthetic.rig import Array
from bev_lightning.data.synthetic.scene import (
    ASPHALT,
    GRASS,
    GROUND_CELL_M,
    LEAD_IN_S,
    LOT,
    MARKING,
    PAVEMENT,
    STEP_S,
    Appearance,
    Road,
    Scene,
    draw_strip,
)
from bev_lightning.data.synthetic.shapes import BUILDING, BYSTANDERS, KINDS, Kind, build_parts

_EGO_HALF = np.array([2.6, 1.25])  # half length and width [m] that objects must leave to the ego
_GAP_M = 0.35
# Offsets to the left of the ego's lane centre [m]: (lane, direction of traffic).
_LANES = ((3.6, -1), (7.2, -1), (-3.6, 1))
_KERBS = ((-6.6, 1), (10.2, -1))
_PATHS = ((-10.4, -8.4), (12.0, 14.0))
_ROAD_M = (-7.8, 11.4)  # its edges


@numba.njit(cache=True)
def tracks_overlap(
    track: Array, half: Array, others: Array, halves: Array, num: int, gap: float
) -> bool:
    """Whether a moving rectangle overlaps one of ``num`` others at any time (separating axes).

    Args:
        track: ``(K, 3)`` x, y, yaw. half: ``(2,)`` half length and width [m].
        others: ``(N, K, 3)``. halves: ``(N, 2)``.
        gap: smallest distance to keep [m].
    """
    for n in range(num):
        reach = np.hypot(half[0], half[1]) + np.hypot(halves[n, 0], halves[n, 1]) + gap
        for k in range(track.shape[0]):
            dx, dy = others[n, k, 0] - track[k, 0], others[n, k, 1] - track[k, 1]
            if dx * dx + dy * dy > reach * reach:
                continue
            yaws = (track[k, 2], others[n, k, 2])
            turn_c, turn_s = abs(np.cos(yaws[1] - yaws[0])), abs(np.sin(yaws[1] - yaws[0]))
            apart = False
            for box in range(2):
                c, s = np.cos(yaws[box]), np.sin(yaws[box])
                own, other = (half, halves[n]) if box == 0 else (halves[n], half)
                along, across = abs(dx * c + dy * s), abs(-dx * s + dy * c)
                if along > own[0] + other[0] * turn_c + other[1] * turn_s + gap:
                    apart = True
                if across > own[1] + other[0] * turn_s + other[1] * turn_c + gap:
                    apart = True
            if not apart:
                return True
    return False


def build_scene(rng: np.random.Generator, num_frames: int, num_objects: int) -> Scene:
    """Build a random scene of ``num_frames`` key frames, 0.5 s apart.

    It has about ``num_objects`` annotated objects: one for which no free space is found is left
    out.
    """
    last_s = (num_frames - 1) * 0.5
    num_steps = int(round((last_s + 2 * LEAD_IN_S) / STEP_S)) + 1
    times = -LEAD_IN_S + STEP_S * np.arange(num_steps)
    road, ego_arc = _trajectory(rng, times)
    builder = _SceneBuilder(rng, times, road, ego_arc)
    shares = np.array([kind.share for kind in KINDS])
    exact = shares / shares.sum() * num_objects
    counts = np.floor(exact).astype(int)
    counts[np.argsort(counts - exact, kind="stable")[: num_objects - counts.sum()]] += 1
    # The long ones first, while there is free space.
    for index in np.argsort([-max(kind.size) for kind in KINDS], kind="stable"):
        builder.add_class(KINDS[index], int(counts[index]))
    for kind in BYSTANDERS:
        for _ in range(int(kind.share)):
            builder.add(kind, builder.plot(kind, kind.size[0], 50.0), moving=False)
    for _ in range(7):
        builder.add_building()
    return builder.finish()


def _trajectory(rng: np.random.Generator, times: Array) -> tuple[Road, Array]:
    """The road, and the ego's arc length ``(K,)`` over time."""
    style = rng.choice(3, p=[0.35, 0.35, 0.3])  # straight on, a bend, a turn at a junction
    radius = (np.inf, rng.uniform(50, 140), rng.uniform(17, 28))[style]
    speed = min(rng.uniform(2.5, 9.5), float(np.sqrt(2.2 * radius)))
    swing = 0.25 * speed * np.sin(2 * np.pi * times / rng.uniform(6, 14) + rng.uniform(0, 6.28))
    ego_arc = np.cumsum((speed + swing) * STEP_S)
    length, margin, step = ego_arc[-1], 110.0, 0.25
    arc = np.arange(-margin, length + margin, step)
    curvature = 0.002 * np.sin(arc / rng.uniform(15, 40) + rng.uniform(0, 6.28))
    if style:
        angle = rng.uniform(0.5, 1.0) if style == 1 else rng.uniform(1.2, 1.6)
        middle = rng.uniform(0.3, 0.7) * length
        on = np.clip((0.5 * angle * radius - np.abs(arc - middle)) / 6.0 + 0.5, 0, 1)
        curvature = curvature + on / radius * rng.choice([-1.0, 1.0])
    yaw = rng.uniform(-np.pi, np.pi) + np.cumsum(curvature) * step
    xy = np.cumsum(np.stack([np.cos(yaw), np.sin(yaw)], axis=1) * step, axis=0)
    start = rng.uniform(length / 2 + 130, length / 2 + 230, 2)
    return Road(arc, xy - xy[np.searchsorted(arc, length / 2)] + start, yaw), ego_arc


@dataclass
class _SceneBuilder:
    """Adds objects one after the other, each where it never collides with an earlier one."""

    rng: np.random.Generator
    times: Array
    road: Road
    ego_arc: Array
    tracks: list[Array] = field(default_factory=list)
    kinds: list[Kind] = field(default_factory=list)
    sizes: list[Array] = field(default_factory=list)
    categories: list[str] = field(default_factory=list)
    attributes: list[str] = field(default_factory=list)
    parts: list[Array] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ego = self.road.poses_at(self.ego_arc, 0.0)
        # The ego's origin is its rear axle; its body reaches further ahead than back.
        heading = np.stack([np.cos(self.ego[:, 2]), np.sin(self.ego[:, 2])], axis=1)
        self.body = np.concatenate([self.ego[:, :2] + 1.25 * heading, self.ego[:, 2:]], axis=1)

    def add_class(self, kind: Kind, count: int) -> None:
        """``count`` objects of a class; cones and barriers in rows."""
        placed = 0
        for _ in range(40 * count):
            if placed >= count:
                return
            if kind.name in ("barrier", "traffic_cone"):
                placed += self._add_row(kind, min(int(self.rng.integers(1, 6)), count - placed))
                continue
            moving = self.rng.random() < kind.moving
            track = self._moving(kind) if moving else self._standing(kind)
            placed += self.add(kind, track, moving)

    def add(self, kind: Kind, track: Array | None, moving: bool) -> int:
        """Add one object if its track ``(K, 3)`` is free; how many were added."""
        if track is None:
            return 0
        rng = self.rng
        size = np.array(kind.size) * (1 + kind.spread * rng.uniform(-1.7, 1.7, 3))
        size[:2] *= 1 + 0.5 * kind.spread * rng.uniform(-1, 1)
        category = str(rng.choice(kind.categories)) if kind.categories else ""
        if category.endswith("child"):
            size *= (0.75, 0.75, 0.7)
        rider = moving or kind.name not in ("bicycle", "motorcycle")
        if not rider:  # a cycle without its rider is lower
            size[2] *= max(part.box[5] for part in kind.parts if not part.rider)
        if self._occupied(track, size[:2] / 2):
            return 0
        self.tracks.append(track)
        self.kinds.append(kind)
        self.sizes.append(size)
        self.categories.append(category)
        self.attributes.append(self._attribute(kind, moving))
        self.parts.append(build_parts(kind, size, rider, rng))
        return 1

    def add_building(self) -> None:
        """A building beyond every class range, so that it occludes no evaluated object."""
        for _ in range(20):
            track = self.plot(BUILDING, 0.0, 100.0)
            if track is not None and self.road.clearance(track[0, :2]) > 66:
                self.add(BUILDING, track, moving=False)
                return

    def _occupied(self, track: Array, half: Array) -> bool:
        if tracks_overlap(track, half, self.body[None], _EGO_HALF[None], 1, _GAP_M):
            return True
        if not self.tracks:
            return False
        others, halves = np.stack(self.tracks), np.stack(self.sizes)[:, :2] / 2
        return bool(tracks_overlap(track, half, others, halves, len(others), _GAP_M))

    def _attribute(self, kind: Kind, moving: bool) -> str:
        if kind.name in ("", "barrier", "traffic_cone"):
            return ""
        if kind.name in ("bicycle", "motorcycle"):
            return "cycle.with_rider" if moving else "cycle.without_rider"
        if kind.name == "pedestrian":
            return "pedestrian.moving" if moving else "pedestrian.standing"
        if moving:
            return "vehicle.moving"
        return str(self.rng.choice(["vehicle.parked", "vehicle.stopped"], p=[0.75, 0.25]))

    # -- random tracks (K, 3); None where the draw is invalid

    def _still(self, pose: Array) -> Array:
        return np.tile(pose, (len(self.times), 1))

    def _near(self, reach: float) -> tuple[int, Array]:
        """A time step and a point around the ego then, uniform in distance up to the reach."""
        moment = int(self.rng.integers(len(self.times)))
        distance, angle = self.rng.uniform(4, 1.05 * reach), self.rng.uniform(-np.pi, np.pi)
        return moment, self.ego[moment, :2] + distance * np.array([np.cos(angle), np.sin(angle)])

    def plot(self, kind: Kind, length: float, reach: float) -> Array | None:
        """A still object beside the road at any heading."""
        _, xy = self._near(reach)
        if self.road.clearance(xy) < 12.5 + length / 2:
            return None
        return self._still(np.array([*xy, self.rng.uniform(-np.pi, np.pi)]))

    def _along(self, kind: Kind, offset: float) -> Array:
        moment = int(self.rng.integers(len(self.times)))
        arc = self.ego_arc[moment] + self.rng.uniform(-kind.reach_m, kind.reach_m)
        return self.road.poses_at(np.array(arc), offset)

    def _standing(self, kind: Kind) -> Array | None:
        rng = self.rng
        if kind.name == "pedestrian" and rng.random() < 0.4:
            pose = self._along(kind, rng.uniform(*_PATHS[rng.integers(2)]))
            pose[2] += rng.uniform(-np.pi, np.pi)
            return self._still(pose)
        if kind.name != "pedestrian" and rng.random() < 0.3:
            offset, direction = _KERBS[rng.integers(2)]
            pose = self._along(kind, offset + rng.normal(0, 0.15))
            pose[2] += rng.normal(0, 0.04) + (np.pi if direction < 0 else 0.0)
            return self._still(pose)
        return self.plot(kind, kind.size[0], kind.reach_m)

    def _moving(self, kind: Kind) -> Array | None:
        rng, times = self.rng, self.times
        speed = rng.uniform(*kind.speed)
        way = rng.random()
        if kind.name == "pedestrian" and way < 0.5:
            offset, direction = rng.uniform(*_PATHS[rng.integers(2)]), rng.choice([-1, 1])
        elif kind.name == "bicycle" and way < 0.5:
            offset, direction = (-5.2, 1) if way < 0.3 else (9.0, -1)
        elif kind.name not in ("pedestrian", "bicycle") and way < 0.5:
            offset, direction = _LANES[rng.integers(3)]
        elif kind.name not in ("pedestrian", "bicycle") and way < 0.62:  # in the ego's own lane
            gap = rng.uniform(10, 0.9 * kind.reach_m) * rng.choice([-1, 1], p=[0.35, 0.65])
            return self.road.poses_at(self.ego_arc + gap, rng.normal(0, 0.2))
        else:
            return self._free(kind, speed)
        moment = int(rng.integers(len(times)))
        start = self.ego_arc[moment] + rng.uniform(-1.05, 1.05) * kind.reach_m
        track = self.road.poses_at(start + direction * speed * (times - times[moment]), offset)
        track[:, 2] += np.pi if direction < 0 else 0.0
        return track

    def _free(self, kind: Kind, speed: float) -> Array:
        """Constant speed and turn rate, in any direction: crossing, turning."""
        moment, xy = self._near(kind.reach_m)
        turn = self.rng.uniform(-0.3, 0.3) if self.rng.random() < 0.5 else 0.0
        turn = np.clip(turn, -speed / 6, speed / 6) if kind.name != "pedestrian" else turn
        yaw = self.rng.uniform(-np.pi, np.pi) + turn * (self.times - self.times[moment])
        step = speed * STEP_S * np.stack([np.cos(yaw), np.sin(yaw)], axis=1)
        path = np.cumsum(step, axis=0)
        return np.concatenate([path - path[moment] + xy, yaw[:, None]], axis=1)

    def _add_row(self, kind: Kind, count: int) -> int:
        """Cones and barriers as at road works: a row along the road or across a plot."""
        rng = self.rng
        barrier = kind.name == "barrier"
        if rng.random() < 0.55:
            start = self._along(kind, rng.choice([-5.6, 9.2, -11.5, 15.0]))
        else:
            _, xy = self._near(kind.reach_m)
            if self.road.clearance(xy) < 13:
                return 0
            start = np.array([*xy, rng.uniform(-np.pi, np.pi)])
        pitch = kind.size[1] * 1.15 + rng.uniform(0.35, 0.8) if barrier else rng.uniform(1.2, 3.5)
        placed = 0
        for i in range(count):
            pose = start.copy()
            pose[:2] += i * pitch * np.array([np.cos(start[2]), np.sin(start[2])])
            pose[2] += np.pi / 2 + rng.normal(0, 0.05) if barrier else 0.0
            placed += self.add(kind, self._still(pose), moving=False)
        return placed

    def finish(self) -> Scene:
        first = np.cumsum([0, *(len(part) for part in self.parts)])
        low = np.stack([(p[:, 0:3] - p[:, 3:6]).min(axis=0) for p in self.parts])
        high = np.stack([(p[:, 0:3] + p[:, 3:6]).max(axis=0) for p in self.parts])
        return Scene(
            times=self.times,
            ego=self.ego,
            road=self.road,
            tracks=np.stack(self.tracks, axis=1),
            kinds=tuple(self.kinds),
            sizes=np.stack(self.sizes),
            categories=tuple(self.categories),
            attributes=tuple(self.attributes),
            parts=np.concatenate(self.parts),
            first_part=first.astype(np.int64),
            hulls=np.concatenate([(low + high) / 2, (high - low) / 2], axis=1),
            appearance=_appearance(self.rng, self.road),
            sway=self.rng.uniform(0, 2 * np.pi, 2),
        )


def _appearance(rng: np.random.Generator, road: Road) -> Appearance:
    height, turn = rng.uniform(0.4, 1.2), rng.uniform(-np.pi, np.pi)
    sun = np.array([np.cos(height) * np.cos(turn), np.cos(height) * np.sin(turn), np.sin(height)])
    clear = rng.random()
    sky = np.array([[205, 212, 220], [150 - 60 * clear, 165 - 20 * clear, 182 + 30 * clear]], float)
    corner = np.floor(road.xy.min(axis=0)) - 20.0
    cells = np.ceil((road.xy.max(axis=0) + 20.0 - corner) / GROUND_CELL_M).astype(int)
    image = Image.new("L", (int(cells[0]), int(cells[1])), GRASS)
    draw = ImageDraw.Draw(image)

    def strip(left: float, right: float, value: int, dash: bool = False) -> None:
        edges = [(road.line(offset)[::8] - corner) / GROUND_CELL_M for offset in (left, right)]
        draw_strip(draw, edges, value, every=3 if dash else 1)

    for _ in range(16):  # car parks and yards
        xy = (road.xy[rng.integers(len(road.xy))] - corner) / GROUND_CELL_M
        centre, half = xy + rng.uniform(-180, 180, 2), rng.uniform(20, 70, 2)
        draw.rectangle([*(centre - half), *(centre + half)], fill=LOT)
    strip(_ROAD_M[1] + 3.2, _ROAD_M[0] - 3.2, PAVEMENT)
    strip(_ROAD_M[1], _ROAD_M[0], ASPHALT)
    for offset in (-5.4, 1.8, 9.0):
        strip(offset + 0.1, offset - 0.1, MARKING)
    for offset in (-1.8, 5.4):
        strip(offset + 0.1, offset - 0.1, MARKING, dash=True)
    exposure, haze = float(rng.uniform(0.72, 1.12)), 1 / rng.uniform(90, 400)
    return Appearance(sun, exposure, haze, sky, np.asarray(image), corner)
