"""Shapes of the synthetic objects: the ten detection classes and unannotated bystanders.

Every object is an upright box (the annotation) filled by a few smaller boxes, its parts. Front and
back differ in shape, colour and reflectance, so that the heading is observable. Parts are given in
fractions of the box: x from -0.5 (back) to 0.5 (front), y from -0.5 (right) to 0.5 (left), z from 0
(ground) to 1.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Colour = tuple[int, int, int]

# Patterns that the renderer draws on a part.
PLAIN, LAMPS, STRIPES, WINDOWS, TAIL = range(5)

# Columns of the part table that the ray casters read; see `build_parts`.
NUM_PART_COLUMNS = 20
# Annotated boxes are a little loose: the parts keep this distance from the faces of the box [m].
INSET_M = 0.03

_BODY, _SECOND = (-1, -1, -1), (-2, -2, -2)  # placeholders of the object's own two paints
_GLASS, _TYRE, _STEEL, _SKIN = (52, 66, 84), (26, 26, 28), (92, 92, 96), (206, 158, 130)
_LAMP_WHITE, _BACK_RED = (244, 240, 208), (168, 22, 26)


@dataclass(frozen=True)
class Part:
    """One box of an object.

    Attributes:
        box: x0, x1, y0, y1, z0, z1 in fractions of the object's box.
        colour: paint of the sides, ``front`` and ``back`` that of the +x and -x faces (as the sides
            where None).
        echo: lidar intensity 0..255 of the sides, the front and the back at right angles.
        pattern: PLAIN, LAMPS (at the sides of front and back), TAIL (at the back alone), STRIPES or
            WINDOWS.
        glass: share of lidar pulses that are lost on it.
        rider: whether it belongs to the rider and is absent from a cycle without one.
    """

    box: tuple[float, float, float, float, float, float]
    colour: Colour
    echo: tuple[float, float, float]
    front: Colour | None = None
    back: Colour | None = None
    pattern: int = PLAIN
    glass: float = 0.0
    rider: bool = False


@dataclass(frozen=True)
class Kind:
    """A class of objects.

    Attributes:
        name: detection class, or "" for bystanders, which have no annotation.
        categories: nuScenes categories to choose from.
        size: mean length, width, height [m], each varied by ``spread`` (relative).
        reach_m: radius within which the nuScenes metric evaluates the class.
        share: relative number of objects.
        moving: share of objects that move; ``speed`` is their range [m/s].
        rcs: mean radar cross-section [dBsm]; ``returns`` the mean number of radar returns.
        paints: first paints; ``second`` the second ones.
    """

    name: str
    categories: tuple[str, ...]
    size: tuple[float, float, float]
    parts: tuple[Part, ...]
    paints: tuple[Colour, ...]
    second: tuple[Colour, ...] = ((120, 120, 120),)
    spread: float = 0.08
    reach_m: float = 50.0
    share: float = 0.0
    moving: float = 0.0
    speed: tuple[float, float] = (0.0, 0.0)
    rcs: float = 0.0
    returns: float = 0.0


def _wheels(x0: float, x1: float, top: float) -> Part:
    return Part((x0, x1, -0.5, 0.5, 0.0, top), _TYRE, (5, 5, 5))


# fmt: off
KINDS: tuple[Kind, ...] = (
    Kind(
        "car", ("vehicle.car",), (4.6, 1.95, 1.7), share=15, moving=0.5, speed=(3, 13), rcs=10,
        returns=3.0,
        paints=((168, 172, 180), (38, 62, 132), (226, 228, 232), (60, 64, 74), (70, 110, 170)),
        parts=(
            Part((-0.5, 0.5, -0.48, 0.48, 0.12, 0.56), _BODY, (30, 20, 78), (214, 214, 206),
                 _BACK_RED, LAMPS),
            Part((-0.44, 0.16, -0.43, 0.43, 0.56, 0.93), _GLASS, (7, 5, 9), (120, 150, 176), (30,
                 34, 42), glass=0.45),
            Part((-0.42, 0.12, -0.42, 0.42, 0.93, 1.0), _BODY, (30, 30, 30)),
            _wheels(0.22, 0.38, 0.36), _wheels(-0.38, -0.22, 0.36),
        ),
    ),
    Kind(
        "truck", ("vehicle.truck",), (7.0, 2.5, 2.9), share=5, moving=0.45, speed=(3, 10), rcs=16,
        returns=4.0,
        spread=0.12, paints=((44, 112, 62), (122, 62, 34), (30, 90, 100)), second=((150, 128, 96),
        (96, 120, 98)),
        parts=(
            Part((0.2, 0.5, -0.46, 0.46, 0.16, 0.52), _BODY, (40, 26, 40), (206, 206, 196), None,
                 LAMPS),
            Part((0.2, 0.46, -0.45, 0.45, 0.52, 0.84), _BODY, (40, 6, 40), (120, 150, 176), None),
            Part((-0.5, 0.16, -0.5, 0.5, 0.27, 1.0), _SECOND, (22, 22, 100), None, _BACK_RED, TAIL),
            Part((-0.48, 0.46, -0.4, 0.4, 0.1, 0.27), _STEEL, (12, 12, 12)),
            _wheels(0.26, 0.4, 0.3), _wheels(-0.4, -0.22, 0.27),
        ),
    ),
    Kind(
        "construction_vehicle", ("vehicle.construction",), (6.4, 2.75, 3.1), share=4, moving=0.25,
        speed=(0.8, 3),
        spread=0.12, rcs=13, returns=3.5, paints=((214, 164, 20), (226, 142, 24)),
        parts=(
            Part((-0.5, 0.06, -0.42, 0.42, 0.22, 0.6), _BODY, (62, 62, 95), None, (60, 44, 20)),
            Part((-0.3, 0.02, -0.3, 0.3, 0.6, 1.0), _GLASS, (10, 6, 48), (120, 150, 176), _BODY,
                 glass=0.3),
            Part((0.06, 0.42, -0.12, 0.12, 0.34, 0.6), _BODY, (62, 62, 62)),
            Part((0.36, 0.5, -0.5, 0.5, 0.02, 0.36), _STEEL, (40, 45, 40), (130, 126, 120), None),
            Part((-0.46, 0.28, -0.5, 0.5, 0.0, 0.24), _TYRE, (6, 6, 6)),
        ),
    ),
    Kind(
        "bus", ("vehicle.bus.rigid",), (11.0, 2.9, 3.4), share=4, moving=0.5, speed=(3, 9),
        rcs=18, returns=5.0,
        paints=((190, 46, 52), (170, 40, 96)),
        parts=(
            Part((-0.5, 0.5, -0.5, 0.5, 0.1, 0.44), _BODY, (34, 22, 92), (236, 220, 200), (96, 12,
                 20), LAMPS),
            Part((-0.44, 0.49, -0.48, 0.48, 0.44, 0.8), _GLASS, (7, 5, 7), (128, 160, 188), None,
                 glass=0.4),
            Part((-0.5, -0.44, -0.5, 0.5, 0.44, 0.8), _BODY, (34, 34, 92), None, (96, 12, 20)),
            Part((-0.5, 0.47, -0.5, 0.5, 0.8, 1.0), _BODY, (34, 34, 60), (240, 190, 60), (96, 12,
                 20)),
            Part((-0.46, 0.46, -0.46, 0.46, 0.0, 0.1), _TYRE, (6, 6, 6)),
        ),
    ),
    Kind(
        "trailer", ("vehicle.trailer",), (11.0, 2.8, 3.8), share=4, moving=0.3, speed=(3, 9),
        spread=0.12, rcs=17,
        returns=4.0, paints=((224, 222, 212), (196, 202, 210)),
        parts=(
            Part((-0.5, 0.38, -0.5, 0.5, 0.3, 1.0), _BODY, (16, 16, 118), (150, 150, 146),
                 _BACK_RED, TAIL),
            Part((0.38, 0.5, -0.2, 0.2, 0.22, 0.4), _STEEL, (14, 14, 14)),
            Part((-0.44, 0.4, -0.34, 0.34, 0.16, 0.3), _STEEL, (14, 14, 14)),
            _wheels(-0.46, -0.2, 0.28),
        ),
    ),
    Kind(
        "barrier", ("movable_object.barrier",), (0.55, 2.4, 1.0), share=9, reach_m=30.0, rcs=2,
        returns=1.2,
        paints=((206, 204, 198),),
        parts=(
            Part((-0.5, 0.5, -0.5, 0.5, 0.0, 0.36), _BODY, (52, 52, 52)),
            Part((-0.24, 0.24, -0.5, 0.5, 0.36, 1.0), _BODY, (86, 86, 86), pattern=STRIPES),
        ),
    ),
    Kind(
        "motorcycle", ("vehicle.motorcycle",), (2.1, 0.8, 1.65), share=6, moving=0.5, speed=(3,
        11), reach_m=40.0,
        rcs=4, returns=1.6, paints=((24, 24, 30), (60, 16, 70)), second=((60, 60, 66), (30, 40,
        44)),
        parts=(
            Part((-0.5, 0.5, -0.16, 0.16, 0.0, 0.36), _TYRE, (9, 9, 9)),
            Part((-0.28, 0.28, -0.3, 0.3, 0.2, 0.5), _BODY, (26, 26, 26)),
            Part((0.2, 0.4, -0.5, 0.5, 0.46, 0.68), _BODY, (26, 32, 26), _LAMP_WHITE, None),
            Part((-0.5, -0.3, -0.38, 0.38, 0.42, 0.66), _BODY, (26, 26, 130), None, _BACK_RED),
            Part((-0.2, 0.12, -0.34, 0.34, 0.5, 0.86), _SECOND, (18, 18, 18), rider=True),
            Part((-0.1, 0.14, -0.17, 0.17, 0.86, 1.0), (230, 226, 216), (40, 12, 40), _GLASS,
                 None, rider=True),
        ),
    ),
    Kind(
        "bicycle", ("vehicle.bicycle",), (1.75, 0.65, 1.65), share=6, moving=0.5, speed=(2, 6),
        reach_m=40.0,
        rcs=0, returns=1.0, paints=((24, 176, 190), (60, 196, 150)), second=((236, 224, 70), (120,
        200, 70)),
        parts=(
            Part((-0.5, 0.5, -0.09, 0.09, 0.0, 0.4), _BODY, (44, 44, 44)),
            Part((0.18, 0.3, -0.5, 0.5, 0.5, 0.6), _STEEL, (40, 40, 40)),
            Part((0.28, 0.5, -0.32, 0.32, 0.38, 0.56), (150, 104, 60), (34, 34, 34), _LAMP_WHITE,
                 None),
            Part((-0.5, -0.38, -0.2, 0.2, 0.36, 0.52), _BACK_RED, (60, 60, 150)),
            Part((-0.26, 0.1, -0.4, 0.4, 0.44, 0.86), _SECOND, (42, 42, 60), rider=True),
            Part((-0.04, 0.2, -0.2, 0.2, 0.86, 1.0), (40, 30, 26), (20, 14, 20), _SKIN, None,
                 rider=True),
        ),
    ),
    Kind(
        "pedestrian", ("human.pedestrian.adult", "human.pedestrian.adult",
        "human.pedestrian.construction_worker",
                       "human.pedestrian.child"),
        (0.73, 0.67, 1.75), share=13, moving=0.65, speed=(0.8, 1.9), spread=0.06, reach_m=40.0,
        rcs=-6, returns=0.7,
        paints=((150, 60, 150), (222, 120, 150), (110, 84, 160), (236, 214, 226)),
        second=((40, 42, 66), (70, 60, 50)),
        parts=(
            Part((-0.25, 0.25, -0.34, 0.34, 0.0, 0.48), _SECOND, (14, 14, 14)),
            Part((-0.3, 0.26, -0.5, 0.5, 0.48, 0.84), _BODY, (24, 24, 24)),
            Part((-0.5, -0.3, -0.32, 0.32, 0.5, 0.8), (28, 36, 28), (60, 60, 70)),
            Part((0.26, 0.5, -0.4, 0.4, 0.54, 0.64), _SKIN, (16, 16, 16)),
            Part((-0.16, 0.2, -0.2, 0.2, 0.84, 1.0), (46, 32, 24), (16, 16, 12), _SKIN, None),
        ),
    ),
    Kind(
        "traffic_cone", ("movable_object.trafficcone",), (0.42, 0.42, 0.95), share=9,
        reach_m=30.0, rcs=-9,
        returns=0.5, paints=((240, 96, 20),),
        parts=(
            Part((-0.5, 0.5, -0.5, 0.5, 0.0, 0.1), _TYRE, (12, 12, 12)),
            Part((-0.38, 0.38, -0.38, 0.38, 0.1, 0.4), _BODY, (110, 110, 110)),
            Part((-0.27, 0.27, -0.27, 0.27, 0.4, 0.7), (238, 236, 232), (205, 205, 205)),
            Part((-0.16, 0.16, -0.16, 0.16, 0.7, 1.0), _BODY, (110, 110, 110)),
        ),
    ),
)

# Unannotated: they occlude and reflect. `share` is their number in a scene.
BYSTANDERS: tuple[Kind, ...] = (
    Kind("", (), (0.25, 0.25, 6.0), share=6, rcs=-2, returns=0.8, paints=((110, 112, 112),),
         parts=(Part((-0.5, 0.5, -0.5, 0.5, 0.0, 1.0), _BODY, (30, 30, 30)),)),
    Kind("", (), (0.45, 0.45, 8.0), share=5, rcs=-3, returns=0.6, paints=((92, 70, 48),),
         parts=(Part((-0.5, 0.5, -0.5, 0.5, 0.0, 0.6), _BODY, (18, 18, 18)),
                Part((-3.4, 3.4, -3.4, 3.4, 0.58, 0.9), (56, 92, 44), (24, 24, 24)),
                Part((-2.2, 2.2, -2.2, 2.2, 0.9, 1.0), (66, 104, 50), (24, 24, 24)))),
    Kind("", (), (6.0, 0.8, 1.2), share=3, spread=0.2, rcs=-8, returns=0.5, paints=((60, 88, 50),),
         parts=(Part((-0.5, 0.5, -0.5, 0.5, 0.0, 1.0), _BODY, (20, 20, 20)),)),
    Kind("", (), (7.0, 0.3, 1.6), share=2, spread=0.2, rcs=4, returns=2.0,
         paints=((150, 138, 124),),
         parts=(Part((-0.5, 0.5, -0.5, 0.5, 0.0, 1.0), _BODY, (26, 26, 26)),)),
)

BUILDING = Kind(
    "", (), (22.0, 12.0, 11.0), spread=0.3, rcs=12, returns=2.0,
    paints=((150, 128, 112), (126, 120, 118), (164, 150, 132), (118, 96, 84)),
    parts=(Part((-0.5, 0.5, -0.5, 0.5, 0.0, 1.0), _BODY, (24, 24, 24), pattern=WINDOWS),),
)

# fmt: on


def build_parts(
    kind: Kind, size: NDArray[np.float64], rider: bool, rng: np.random.Generator
) -> NDArray[np.float64]:
    """The part table of one object.

    Args:
        kind: its class.
        size: length, width, height [m] of its box.
        rider: False leaves the rider's parts out; the rest is scaled to the height of the box.
        rng: for the paints and the reflectance.

    Returns:
        ``(P, 20)``: centre (3) and half size (3) in the object's frame (x ahead, y left, z up
        from the ground below its centre) [m], colours of sides, front, back (9, 0..255), lidar
        intensity of sides, front, back (3), pattern, share of pulses lost.
    """
    paint = np.array(kind.paints[rng.integers(len(kind.paints))]) + rng.integers(-14, 15, 3)
    second = np.array(kind.second[rng.integers(len(kind.second))]) + rng.integers(-14, 15, 3)
    echo = rng.uniform(0.7, 1.4)
    parts = [part for part in kind.parts if rider or not part.rider]
    top = max(part.box[5] for part in parts)
    inset = np.minimum(INSET_M, 0.08 * size) if kind.name else np.zeros(3)
    scale = size - np.array([2.0, 2.0, 1.0]) * inset

    def mix(colour: Colour | None, otherwise: NDArray[np.int64]) -> NDArray[np.int64]:
        if colour is None:
            return otherwise
        return paint if colour == _BODY else second if colour == _SECOND else np.array(colour)

    table = np.zeros((len(parts), NUM_PART_COLUMNS))
    for row, part in zip(table, parts, strict=True):
        low = np.array(part.box[0::2]) * scale
        high = np.array(part.box[1::2]) * scale
        low[2], high[2] = low[2] / top, high[2] / top
        row[0:3], row[3:6] = (low + high) / 2, (high - low) / 2
        sides = mix(part.colour, paint)
        colours = np.concatenate([sides, mix(part.front, sides), mix(part.back, sides)])
        row[6:15] = np.clip(colours, 0, 255)
        row[15:18] = np.clip(np.array(part.echo) * echo, 1, 255)
        row[18], row[19] = part.pattern, part.glass
    return table
