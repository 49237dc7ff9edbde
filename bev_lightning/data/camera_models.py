"""Camera models: how a lens bends rays, and the one map from the network's pixels to the file's.

The network sees every camera as a pinhole, so that ``image_from_lidar`` stays a matrix. What the
lens bends is straightened, and the augmentation applied, in a single resampling of the file.
"""

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

LENS_MODELS = {"pinhole": (0,), "brown_conrady": (4, 5, 8), "kannala_brandt": (4,)}
"""How many coefficients each may have."""
MAX_COEFFICIENTS = 8
_STEP = 4  # network pixels between the nodes of a map
_OUTSIDE = -1e6  # pixels: where a map shows nothing


@dataclass(frozen=True)
class Lens:
    """A camera's own geometry, and the pinhole view that is made of it.

    Attributes:
        model: ``pinhole``; ``brown_conrady`` (Brown 1966: k1, k2, p1, p2 then k3, then k4,
            k5, k6, in OpenCV's order); ``kannala_brandt`` (Kannala and Brandt 2006: k1 .. k4 of
            the odd powers of the angle), for fisheyes.
        intrinsic: nine numbers of the camera matrix [pixels], row by row.
        distortion: the model's coefficients.
        zoom: focal length of the pinhole view in relation to the camera's own: below 1 it sees
            more of a fisheye's sides, above less.
        yaw_deg, pitch_deg: of the view's axis against the camera's, to the right and up.
    """

    model: str
    intrinsic: tuple[float, ...]
    distortion: tuple[float, ...] = ()
    zoom: float = 1.0
    yaw_deg: float = 0.0
    pitch_deg: float = 0.0

    @property
    def view(self) -> np.ndarray:
        """``(3, 3)`` float64 from the camera's frame to the pixels of the pinhole view, which is as
        large as the file: the view's camera matrix times its rotation."""
        matrix = np.array(self.intrinsic, np.float64).reshape(3, 3)
        matrix[:2, :2] *= self.zoom
        yaw, pitch = math.radians(self.yaw_deg), math.radians(self.pitch_deg)
        across = np.array(
            [[math.cos(yaw), 0, -math.sin(yaw)], [0, 1, 0], [math.sin(yaw), 0, math.cos(yaw)]]
        )
        up = np.array(
            [
                [1, 0, 0],
                [0, math.cos(pitch), math.sin(pitch)],
                [0, -math.sin(pitch), math.cos(pitch)],
            ]
        )
        result: np.ndarray = matrix @ up @ across
        return result

    def project(self, points: Tensor) -> Tensor:
        """Where the file shows points.

        Args:
            points: ``(..., 3)`` in the camera's frame [m], z ahead.

        Returns:
            ``(..., 2)`` u, v [pixels], centres at integers; NaN where the lens does not see.
        """
        x, y, z = points.unbind(-1)
        if self.model == "kannala_brandt":
            across = torch.hypot(x, y)
            bent = self._bend_angle(torch.atan2(across, z))
            factor = torch.where(across > 0, bent / across.clamp(min=1e-12), 1 / z)
            x, y = x * factor, y * factor
        else:
            inverse = torch.where(z > 0, 1 / z, math.nan)
            x, y = self._bend_plane(x * inverse, y * inverse)
        (a, b, c), (d, e, f), _ = np.array(self.intrinsic).reshape(3, 3).tolist()
        return torch.stack([a * x + b * y + c, d * x + e * y + f], dim=-1)

    def unproject(self, pixels: Tensor) -> Tensor:
        """The rays ``(..., 3)`` of pixels ``(..., 2)``, the inverse of :meth:`project`: z is 1 but
        for a fisheye, where they have length 1. NaN where nothing is projected to. For float64."""
        inverse = torch.linalg.inv(pixels.new_tensor(self.intrinsic).view(3, 3))
        x, y = (pixels @ inverse[:2, :2].T + inverse[:2, 2]).unbind(-1)
        if self.model == "kannala_brandt":
            bent = torch.hypot(x, y)
            angle = bent.clone()
            for _ in range(20):  # Newton
                slope = _evaluate(self._slope, angle.square())
                angle = angle - (self._bend_angle(angle, everywhere=True) - bent) / slope
            angle = torch.where(angle <= self._limit, angle, math.nan)
            share = torch.where(bent > 0, angle.sin() / bent.clamp(min=1e-12), 1.0)
            return torch.stack([x * share, y * share, angle.cos()], dim=-1)
        ray_x, ray_y = x, y
        for _ in range(50):  # a fixed point: a lens moves a ray by little
            bent_x, bent_y = self._bend_plane(ray_x, ray_y, everywhere=True)
            ray_x, ray_y = ray_x - (bent_x - x), ray_y - (bent_y - y)
        seen = torch.hypot(ray_x, ray_y) <= self._limit
        rays = torch.stack([ray_x, ray_y, torch.ones_like(x)], dim=-1)
        return torch.where(seen[..., None], rays, math.nan)

    def _bend_angle(self, angle: Tensor, everywhere: bool = False) -> Tensor:
        """What a fisheye makes of the angle to its axis [rad]."""
        bent = angle * _evaluate((1.0, *self.distortion), angle.square())
        return bent if everywhere else torch.where(angle <= self._limit, bent, math.nan)

    def _bend_plane(self, x: Tensor, y: Tensor, everywhere: bool = False) -> tuple[Tensor, Tensor]:
        """What a lens makes of x / z and y / z."""
        if not self.distortion:
            return x, y
        k1, k2, p1, p2, k3, k4, k5, k6 = (*self.distortion, *[0.0] * (8 - len(self.distortion)))
        square = x * x + y * y
        radial = _evaluate((1.0, k1, k2, k3), square) / _evaluate((1.0, k4, k5, k6), square)
        if not everywhere:
            radial = torch.where(square <= self._limit**2, radial, math.nan)
        bent_x = x * radial + 2 * p1 * x * y + p2 * (square + 2 * x * x)
        bent_y = y * radial + p1 * (square + 2 * y * y) + 2 * p2 * x * y
        return bent_x, bent_y

    @functools.cached_property
    def _slope(self) -> tuple[float, ...]:
        """Of a fisheye's polynomial, in the square of the angle."""
        return (1.0, *(k * (2 * n + 3) for n, k in enumerate(self.distortion)))

    @functools.cached_property
    def _limit(self) -> float:
        """The radius, or the angle, up to which the model is one to one. Beyond it the polynomial
        turns round and would show a second, wrong picture of what lies inside."""
        if self.model == "pinhole":
            return math.inf
        if self.model == "kannala_brandt":
            return min(math.pi, math.sqrt(_first_root(np.polynomial.Polynomial(self._slope))))
        k1, k2, _, _, k3, k4, k5, k6 = (*self.distortion, *[0.0] * (8 - len(self.distortion)))
        above = np.polynomial.Polynomial([1.0, k1, k2, k3])
        below = np.polynomial.Polynomial([1.0, k4, k5, k6])
        square = np.polynomial.Polynomial([0.0, 1.0])
        # The derivative of r * above(r^2) / below(r^2) by r, times below^2.
        slope = above * below + 2 * square * (above.deriv() * below - above * below.deriv())
        return math.sqrt(min(_first_root(slope), _first_root(below)))


def make_lens(
    model: str,
    intrinsic: np.ndarray,
    distortion: np.ndarray,
    zoom: float = 1.0,
    yaw_deg: float = 0.0,
    pitch_deg: float = 0.0,
) -> Lens | None:
    """The lens of a camera; None for a plain pinhole, whose files need not be straightened.

    Args:
        intrinsic: ``(3, 3)``.
        distortion: ``(MAX_COEFFICIENTS,)``, padded with zeros.
    """
    view = zoom, yaw_deg, pitch_deg
    if model == "pinhole" and view == (1.0, 0.0, 0.0):
        return None
    used = distortion[: max(LENS_MODELS[model])]
    return Lens(model, tuple(intrinsic.ravel().tolist()), tuple(used.tolist()), *view)


def map_pixels(
    lens: Lens | None,
    network_from_view: np.ndarray,
    size: tuple[int, int],
    scale: tuple[float, float] = (1.0, 1.0),
    device: torch.device | str = "cpu",
) -> Tensor:
    """Where each pixel of the network's image lies in the file: one map for straightening, resize,
    crop, flip and rotation.

    Args:
        lens: None for a plain pinhole.
        network_from_view: ``(3, 3)`` affine map of the pinhole view's pixels, centres at integers.
        size: height, width of the network's image [pixels].
        scale: height, width of the decoded file as shares of the file's own.
        device: where to compute.

    Returns:
        ``(H, W, 2)`` float32 u, v in the decoded file [pixels], centres at integers; far outside
        where the lens shows nothing.
    """
    matrix = np.linalg.inv(network_from_view)
    if lens is not None:
        matrix = np.linalg.inv(lens.view) @ matrix
    # A map is smooth: between nodes that are computed it is interpolated, to some 0.05
    # pixels of the file at most.
    step = 1 if lens is None else _STEP
    rows, columns = (
        torch.linspace(0, length - 1, -(-(length - 1) // step) + 1, device=device)
        for length in size
    )
    rays = torch.stack([a * columns + b * rows[:, None] + c for a, b, c in matrix.tolist()], dim=-1)
    where = rays[..., :2].permute(2, 0, 1)
    if lens is not None:
        where = lens.project(rays).permute(2, 0, 1)
        where = torch.where(where.isnan(), _OUTSIDE, where)
        where = torch.nn.functional.interpolate(
            where[None], size=size, mode="bilinear", align_corners=True
        )[0]
    # Pixel centres lie at integers: reducing acts on u + 0.5.
    factor = where.new_tensor(scale[::-1])
    return ((where.permute(1, 2, 0) + 0.5) * factor - 0.5).contiguous()


def _evaluate(coefficients: tuple[float, ...], square: Tensor) -> Tensor:
    """A polynomial, lowest power first, by Horner."""
    value = torch.full_like(square, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value = value * square + coefficient
    return value


def _first_root(polynomial: np.polynomial.Polynomial) -> float:
    """The smallest positive root; infinity where there is none."""
    roots = polynomial.trim().roots()
    real = roots[np.abs(np.imag(roots)) < 1e-9].real if len(roots) else roots
    positive = real[real > 1e-12]
    return float(positive.min()) if len(positive) else math.inf
