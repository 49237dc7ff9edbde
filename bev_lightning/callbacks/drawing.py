"""Draws boxes into camera images and a bird's eye view, as uint8 RGB arrays."""

import math
from collections.abc import Sequence
from functools import lru_cache

import cv2
import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from bev_lightning.structures.boxes import Boxes3D

Colour = tuple[int, int, int]

BACKGROUND: Colour = (16, 19, 25)
PANEL: Colour = (24, 28, 36)
GRID: Colour = (52, 60, 72)
TEXT: Colour = (226, 230, 236)
MUTED: Colour = (146, 156, 170)
TRUTH: Colour = (64, 214, 128)
PREDICTION: Colour = (255, 152, 48)

_EDGES = np.array(
    [(0, 1), (1, 2), (2, 3), (3, 0), (4, 5), (5, 6), (6, 7), (7, 4), (0, 4), (1, 5), (2, 6), (3, 7)]
    + [(8, 9)]
)
"""Lines of a box over the vertices of :func:`box_vertices`: twelve edges, then the heading."""

_NEAR_M = 0.1
"""Lines end this far before a camera's plane [m]; what lies behind it has no pixel."""

_SHIFT = 4
"""Fractional bits of the coordinates given to OpenCV."""


def box_vertices(boxes: Boxes3D) -> Tensor:
    """``(M, 10, 3)`` [m]: the corners, the centre of the bottom face and that of its front edge."""
    corners = boxes.corners().float()
    centre = corners[:, :4].mean(dim=1, keepdim=True)
    front = corners[:, :2].mean(dim=1, keepdim=True)
    return torch.cat([corners, centre, front], dim=1)


def project_lines(
    vertices: Tensor, image_from_lidar: Tensor, size: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """The visible parts of the boxes' lines in an image.

    Lines that cross the camera's plane are clipped in 3D, before the division by depth, which would
    mirror a corner behind the camera.

    Args:
        vertices: ``(M, 10, 3)`` of :func:`box_vertices`, model frame.
        image_from_lidar: ``(4, 4)``.
        size: height, width of the image [pixels].

    Returns:
        lines ``(L, 2, 2)``: two ends as u, v [pixels], and the box ``(L,)`` each line is of.
    """
    matrix = image_from_lidar.double().numpy()
    points = vertices.double().numpy() @ matrix[:3, :3].T + matrix[:3, 3]
    start, end = (points[:, _EDGES[:, side]].reshape(-1, 3) for side in (0, 1))
    owner = np.repeat(np.arange(len(points)), len(_EDGES))
    # Each condition cuts the line at start + t (end - start) to the side where it is positive. In
    # the image frame (u d, v d, d) the image's borders are planes through the camera's centre as
    # well.
    height, width = size
    planes = (
        ((0.0, 0.0, 1.0), -_NEAR_M),
        ((1.0, 0.0, 0.5), 0.0),
        ((-1.0, 0.0, width - 0.5), 0.0),
        ((0.0, 1.0, 0.5), 0.0),
        ((0.0, -1.0, height - 0.5), 0.0),
    )
    first, last = np.zeros(len(start)), np.ones(len(start))
    for normal, offset in planes:
        at_start, at_end = start @ normal + offset, end @ normal + offset
        with np.errstate(divide="ignore", invalid="ignore"):
            crossing = at_start / (at_start - at_end)
        first = np.where((at_start < 0) & (at_end >= 0), np.maximum(first, crossing), first)
        last = np.where((at_start >= 0) & (at_end < 0), np.minimum(last, crossing), last)
        last = np.where((at_start < 0) & (at_end < 0), -1.0, last)
    seen = first < last
    cut = start[seen, None] + np.stack([first, last], 1)[seen, :, None] * (end - start)[seen, None]
    return cut[..., :2] / cut[..., 2:], owner[seen]


def draw_lines(image: np.ndarray, lines: np.ndarray, colour: Colour, thickness: int = 1) -> None:
    """Draw anti-aliased lines ``(L, 2, 2)`` [pixels] into the image, which is changed."""
    ends = np.round(lines * 2**_SHIFT).astype(np.int32)
    cv2.polylines(image, list(ends), False, colour, thickness, cv2.LINE_AA, _SHIFT)


_font = lru_cache(ImageFont.load_default)


class TextLayer:
    """Collects texts and writes them into an image at once."""

    def __init__(self) -> None:
        self._texts: list[tuple[tuple[float, float], str, Colour, int, str, bool]] = []

    def add(
        self,
        xy: tuple[float, float],
        text: str,
        colour: Colour = TEXT,
        size: int = 14,
        anchor: str = "la",
        boxed: bool = False,
    ) -> None:
        """Add a text; ``anchor`` as in Pillow, ``boxed`` with a dark background."""
        self._texts.append((xy, text, colour, size, anchor, boxed))

    def write(self, image: np.ndarray) -> np.ndarray:
        """The image ``(H, W, 3)`` with all texts."""
        picture = Image.fromarray(image)
        draw = ImageDraw.Draw(picture)
        for xy, text, colour, size, anchor, boxed in self._texts:
            if boxed:
                left, top, right, bottom = draw.textbbox(xy, text, font=_font(size), anchor=anchor)
                draw.rectangle((left - 4, top - 3, right + 4, bottom + 3), fill=BACKGROUND)
            draw.text(xy, text, fill=colour, font=_font(size), anchor=anchor)
        return np.asarray(picture)


class TopView:
    """A square bird's eye view, the car's forward direction up.

    Args:
        pixels: side of the picture.
        radius_m: what it shows to each side of the model frame's origin [m].
        lidar_from_ego: ``(4, 4)``; gives the forward direction in the model frame.
    """

    def __init__(self, pixels: int, radius_m: float, lidar_from_ego: Tensor) -> None:
        x, y = torch.nn.functional.normalize(lidar_from_ego[:2, 0].double(), dim=0).tolist()
        self.basis = np.array([[y, -x], [x, y]])  # right, forward
        self.pixels = pixels
        self.radius_m = radius_m
        self.scale = pixels / (2 * radius_m)
        self.image = np.full((pixels, pixels, 3), PANEL, np.uint8)

    def to_pixels(self, xy: np.ndarray) -> np.ndarray:
        """Model frame ``(..., 2)`` [m] to u, v ``(..., 2)`` [pixels]."""
        middle = self.pixels / 2 - 0.5
        return middle + np.asarray(xy, np.float64) @ self.basis.T * self.scale * (1, -1)

    def draw_rings(self, text_layer: TextLayer, origin: tuple[int, int], step_m: int = 10) -> None:
        """Circles every ``step_m`` metres, the car, and both axes in metres.

        Args:
            text_layer: gets the numbers.
            origin: u, v of this view's top left corner in the whole picture.
        """
        left, top = origin
        middle, base = self.pixels / 2 - 0.5, self.pixels - 1.0
        centre = (round(middle * 2**_SHIFT),) * 2
        for ring in range(step_m, math.floor(self.radius_m) + 1, step_m):
            radius = round(ring * self.scale * 2**_SHIFT)
            cv2.circle(self.image, centre, radius, GRID, 1, cv2.LINE_AA, _SHIFT)
        num_ticks = math.floor(self.radius_m) // (2 * step_m)
        for metres in (2 * step_m * number for number in range(-num_ticks, num_ticks + 1)):
            u, v = middle + metres * self.scale, middle - metres * self.scale
            ticks = [[[u, base], [u, base - 6]], [[0.0, v], [6.0, v]]]
            draw_lines(self.image, np.array(ticks), MUTED)
            text_layer.add((left + u, top + base - 9), str(metres), MUTED, 12, "ms")
            text_layer.add((left + 9.0, top + v), str(metres), MUTED, 12, "lm")
        car = np.array([[0.0, 9.0], [6.0, -7.0], [0.0, -3.0], [-6.0, -7.0]]) * (1, -1) + middle
        polygon = np.round(car * 2**_SHIFT).astype(np.int32)
        cv2.fillPoly(self.image, [polygon], TEXT, cv2.LINE_AA, _SHIFT)
        corner = (left + self.pixels - 8, top + self.pixels - 28)
        text_layer.add(corner, "to the right [m]", MUTED, 12, "rs")
        text_layer.add((left + 8, top + 8), "forward [m]", MUTED, 12)

    def draw_points(self, points: np.ndarray) -> None:
        """Points ``(P, >= 3)`` [m]: the higher, the brighter."""
        points = points[np.argsort(points[:, 2])]
        u, v = np.round(self.to_pixels(points[:, :2])).astype(np.int64).T
        inside = (u >= 0) & (v >= 0) & (u < self.pixels) & (v < self.pixels)
        brightness = np.clip((points[inside, 2:3] + 2.5) / 5.0, 0.0, 1.0)
        low, high = np.array([64.0, 78.0, 102.0]), np.array([186.0, 206.0, 232.0])
        self.image[v[inside], u[inside]] = low + brightness * (high - low)

    def draw_boxes(self, boxes: Boxes3D, colour: Colour, thickness: int) -> None:
        """Draw outlines of ``(M,)`` boxes, a line from the centre to the front, and an arrow to the
        position one second later for moving boxes. Boxes shorter than 2 m are drawn thin."""
        vertices = box_vertices(boxes)[..., :2].double().numpy()
        velocity = boxes.velocity.double().nan_to_num().numpy()
        motions = velocity @ self.basis.T
        widths = [thickness if length > 2.0 else 1 for length in boxes.size[:, 0].tolist()]
        for corners, motion, width in zip(self.to_pixels(vertices), motions, widths, strict=True):
            outline = np.round(corners[:4] * 2**_SHIFT).astype(np.int32)
            cv2.polylines(self.image, [outline], True, colour, width, cv2.LINE_AA, _SHIFT)
            draw_lines(self.image, corners[None, 8:10], colour, width)
            if np.hypot(*motion) > 0.5:
                tip = corners[8] + motion * (1, -1) * self.scale
                start, end = ([int(x) for x in np.round(p)] for p in (corners[8], tip))
                cv2.arrowedLine(self.image, start, end, colour, 1, cv2.LINE_AA, tipLength=0.25)


def denormalise(image: Tensor, mean: Sequence[float], std: Sequence[float]) -> np.ndarray:
    """A network's image ``(3, H, W)`` as uint8 ``(H, W, 3)``."""
    values = image.float() * image.new_tensor(std)[:, None, None].float()
    values = values + image.new_tensor(mean)[:, None, None].float()
    return values.round().clamp(0, 255).byte().permute(1, 2, 0).contiguous().numpy()
