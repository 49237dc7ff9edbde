"""Camera models (pinhole, Brown-Conrady, Kannala-Brandt fisheye) and undistortion maps.

The network sees every camera as a pinhole, so ``image_from_lidar`` stays a matrix. Undistortion
and augmentation are one resampling of the file.

Not OpenCV's: its maps are wrong beyond 90 degrees from a fisheye's axis and beyond the radius where
a distortion polynomial folds over, and they run on the CPU alone. Tests compare with it elsewhere.
"""

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bev_lightning.data.distortion import CAMERA_MODELS

_STEP = 4  # network pixels between the nodes of an undistortion map
_OUTSIDE = -1e6  # map value [pixels] where the camera sees nothing


@dataclass(frozen=True)
class CameraModel:
    """Camera model with distortion, and the pinhole view that its images are undistorted to.

    Attributes:
        name: ``pinhole``; ``brown_conrady`` (Brown 1966: k1, k2, p1, p2 then k3, then k4,
            k5, k6, in OpenCV's order); ``kannala_brandt`` (Kannala and Brandt 2006: k1 .. k4 of
            the odd powers of the angle), for fisheyes.
        intrinsic: nine numbers of the camera matrix [pixels], row by row.
        distortion: the model's coefficients.
        zoom: focal length of the pinhole view relative to the camera's: below 1 the view shows
            more of a fisheye's sides, above 1 less.
        yaw_deg, pitch_deg: of the view's axis relative to the camera's, to the right and up.
    """

    name: str
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
        about_y = np.array(
            [[math.cos(yaw), 0, -math.sin(yaw)], [0, 1, 0], [math.sin(yaw), 0, math.cos(yaw)]]
        )
        about_x = np.array(
            [
                [1, 0, 0],
                [0, math.cos(pitch), math.sin(pitch)],
                [0, -math.sin(pitch), math.cos(pitch)],
            ]
        )
        result: np.ndarray = matrix @ about_x @ about_y
        return result

    def project(self, points: Tensor) -> Tensor:
        """Project points to pixels of the (distorted) file.

        Args:
            points: ``(..., 3)`` in the camera's frame [m], z ahead.

        Returns:
            ``(..., 2)`` u, v [pixels], centres at integers; NaN where the camera does not see.
        """
        x, y, z = points.unbind(-1)
        if self.name == "kannala_brandt":
            radius = torch.hypot(x, y)
            distorted = self._distort_angle(torch.atan2(radius, z))
            factor = torch.where(radius > 0, distorted / radius.clamp(min=1e-12), 1 / z)
            x, y = x * factor, y * factor
        else:
            inverse = torch.where(z > 0, 1 / z, math.nan)
            x, y = self._distort_plane(x * inverse, y * inverse)
        (a, b, c), (d, e, f), _ = np.array(self.intrinsic).reshape(3, 3).tolist()
        return torch.stack([a * x + b * y + c, d * x + e * y + f], dim=-1)

    def unproject(self, pixels: Tensor) -> Tensor:
        """Rays ``(..., 3)`` of pixels ``(..., 2)``, the inverse of :meth:`project`; use float64.

        z is 1; the rays of a fisheye have length 1 instead. NaN where no point is projected to.
        """
        inverse = torch.linalg.inv(pixels.new_tensor(self.intrinsic).view(3, 3))
        x, y = (pixels @ inverse[:2, :2].T + inverse[:2, 2]).unbind(-1)
        if self.name == "kannala_brandt":
            distorted = torch.hypot(x, y)
            angle = distorted.clone()
            for _ in range(20):  # Newton
                slope = _polynomial(self._angle_slope, angle.square())
                angle = angle - (self._distort_angle(angle, clip=False) - distorted) / slope
            angle = torch.where(angle <= self._limit, angle, math.nan)
            share = torch.where(distorted > 0, angle.sin() / distorted.clamp(min=1e-12), 1.0)
            return torch.stack([x * share, y * share, angle.cos()], dim=-1)
        ray_x, ray_y = x, y
        for _ in range(50):  # fixed point: distortion is small
            distorted_x, distorted_y = self._distort_plane(ray_x, ray_y, clip=False)
            ray_x, ray_y = ray_x - (distorted_x - x), ray_y - (distorted_y - y)
        seen = torch.hypot(ray_x, ray_y) <= self._limit
        rays = torch.stack([ray_x, ray_y, torch.ones_like(x)], dim=-1)
        return torch.where(seen[..., None], rays, math.nan)

    def _distort_angle(self, angle: Tensor, clip: bool = True) -> Tensor:
        """Distorted angle to a fisheye's axis [rad]; ``clip`` makes it NaN beyond the limit."""
        distorted = angle * _polynomial((1.0, *self.distortion), angle.square())
        return torch.where(angle <= self._limit, distorted, math.nan) if clip else distorted

    def _distort_plane(self, x: Tensor, y: Tensor, clip: bool = True) -> tuple[Tensor, Tensor]:
        """Distorted x / z and y / z of a Brown-Conrady camera; ``clip`` as above."""
        if not self.distortion:
            return x, y
        k1, k2, p1, p2, k3, k4, k5, k6 = (*self.distortion, *[0.0] * (8 - len(self.distortion)))
        square = x * x + y * y
        radial = _polynomial((1.0, k1, k2, k3), square) / _polynomial((1.0, k4, k5, k6), square)
        if clip:
            radial = torch.where(square <= self._limit**2, radial, math.nan)
        distorted_x = x * radial + 2 * p1 * x * y + p2 * (square + 2 * x * x)
        distorted_y = y * radial + p1 * (square + 2 * y * y) + 2 * p2 * x * y
        return distorted_x, distorted_y

    @functools.cached_property
    def _angle_slope(self) -> tuple[float, ...]:
        """Derivative of a fisheye's polynomial, as coefficients of powers of the squared angle."""
        return (1.0, *(k * (2 * n + 3) for n, k in enumerate(self.distortion)))

    @functools.cached_property
    def _limit(self) -> float:
        """Radius (fisheye: angle) up to which the model is one to one.

        Beyond it the polynomial folds over and would show a second, wrong image of what lies
        inside.
        """
        if self.name == "pinhole":
            return math.inf
        if self.name == "kannala_brandt":
            return min(math.pi, math.sqrt(_first_root(np.polynomial.Polynomial(self._angle_slope))))
        k1, k2, _, _, k3, k4, k5, k6 = (*self.distortion, *[0.0] * (8 - len(self.distortion)))
        above = np.polynomial.Polynomial([1.0, k1, k2, k3])
        below = np.polynomial.Polynomial([1.0, k4, k5, k6])
        square = np.polynomial.Polynomial([0.0, 1.0])
        # The derivative of r * above(r^2) / below(r^2) by r, times below^2.
        slope = above * below + 2 * square * (above.deriv() * below - above * below.deriv())
        return math.sqrt(min(_first_root(slope), _first_root(below)))


def make_camera_model(
    name: str,
    intrinsic: np.ndarray,
    distortion: np.ndarray,
    zoom: float = 1.0,
    yaw_deg: float = 0.0,
    pitch_deg: float = 0.0,
) -> CameraModel | None:
    """Camera model from padded arrays; None for a plain pinhole, which needs no undistortion.

    Args:
        intrinsic: ``(3, 3)``.
        distortion: ``(MAX_COEFFICIENTS,)``, padded with zeros.
    """
    view = zoom, yaw_deg, pitch_deg
    if name == "pinhole" and view == (1.0, 0.0, 0.0):
        return None
    used = distortion[: max(CAMERA_MODELS[name])]
    return CameraModel(name, tuple(intrinsic.ravel().tolist()), tuple(used.tolist()), *view)


def undistortion_map(
    camera_model: CameraModel | None,
    network_from_view: np.ndarray,
    size: tuple[int, int],
    scale: tuple[float, float] = (1.0, 1.0),
    device: torch.device | str = "cpu",
) -> Tensor:
    """For each pixel of the network's image its position in the file: undistortion, resize, crop,
    flip and rotation in one map.

    Args:
        camera_model: None for a plain pinhole.
        network_from_view: ``(3, 3)`` affine map of the pinhole view's pixels, centres at integers.
        size: height, width of the network's image [pixels].
        scale: height, width of the decoded file as shares of the file's own.
        device: where to compute.

    Returns:
        ``(H, W, 2)`` float32 u, v in the decoded file [pixels], centres at integers; far outside
        where the camera sees nothing.
    """
    matrix = np.linalg.inv(network_from_view)
    if camera_model is not None:
        matrix = np.linalg.inv(camera_model.view) @ matrix
    # The map is smooth: it is computed at nodes and interpolated between them, with an error of
    # some 0.05 pixels of the file at most.
    step = 1 if camera_model is None else _STEP
    rows, columns = (
        torch.linspace(0, length - 1, -(-(length - 1) // step) + 1, device=device)
        for length in size
    )
    rays = torch.stack([a * columns + b * rows[:, None] + c for a, b, c in matrix.tolist()], dim=-1)
    pixels = rays[..., :2].permute(2, 0, 1)
    if camera_model is not None:
        pixels = camera_model.project(rays).permute(2, 0, 1)
        pixels = torch.where(pixels.isnan(), _OUTSIDE, pixels)
        pixels = torch.nn.functional.interpolate(
            pixels[None], size=size, mode="bilinear", align_corners=True
        )[0]
    # Pixel centres lie at integers: reducing acts on u + 0.5.
    factor = pixels.new_tensor(scale[::-1])
    return ((pixels.permute(1, 2, 0) + 0.5) * factor - 0.5).contiguous()


def _polynomial(coefficients: tuple[float, ...], square: Tensor) -> Tensor:
    """A polynomial, lowest power first, by Horner's rule."""
    value = torch.full_like(square, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value = value * square + coefficient
    return value


def _first_root(polynomial: np.polynomial.Polynomial) -> float:
    """Smallest positive root; infinity where there is none."""
    roots = polynomial.trim().roots()
    real = roots[np.abs(np.imag(roots)) < 1e-9].real if len(roots) else roots
    positive = real[real > 1e-12]
    return float(positive.min()) if len(positive) else math.inf
