"""Sensor inputs of a model: which sensors, at which size. Other sensors are never read."""

from dataclasses import dataclass

CAMERAS = (
    "CAM_FRONT",
    "CAM_FRONT_RIGHT",
    "CAM_FRONT_LEFT",
    "CAM_BACK",
    "CAM_BACK_LEFT",
    "CAM_BACK_RIGHT",
)
RADARS = (
    "RADAR_FRONT",
    "RADAR_FRONT_LEFT",
    "RADAR_FRONT_RIGHT",
    "RADAR_BACK_LEFT",
    "RADAR_BACK_RIGHT",
)
"""Radars of the nuScenes vehicles, in the order of the published models."""


@dataclass(frozen=True)
class CameraInput:
    """Image preprocessing for the network.

    Attributes:
        size: height, width of the network's image [pixels].
        channels: camera channels in the order of ``Cameras.images``.
        mean, std: per-channel RGB normalisation on the 0..255 scale.
        scale: of the image in evaluation; 1 makes it just cover ``size``.
    """

    size: tuple[int, int]
    channels: tuple[str, ...] = CAMERAS
    mean: tuple[float, float, float] = (123.675, 116.28, 103.53)
    std: tuple[float, float, float] = (58.395, 57.12, 57.375)
    scale: float = 1.0

    def __post_init__(self) -> None:
        for name in ("size", "channels", "mean", "std"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if len(self.size) != 2 or len(self.mean) != 3 or len(self.std) != 3 or not self.channels:
            raise ValueError(
                f"CameraInput takes size = height, width, three numbers each for mean and std, and "
                f"at least one channel, got size={self.size}, mean={self.mean}, std={self.std}, "
                f"channels={self.channels}"
            )
        if not self.scale > 0 or min(self.size) < 1 or min(self.std) <= 0:
            raise ValueError(
                f"CameraInput.size {self.size}, std {self.std} and scale {self.scale} must be "
                f"positive"
            )


@dataclass(frozen=True)
class LidarInput:
    """Lidar points for the network.

    Attributes:
        range: x_min, y_min, z_min, x_max, y_max, z_max [m]; points outside are dropped.
        sweeps: sweeps before the key frame to add to it, 0 to 10; a scene's first frames have
            fewer.
        max_points: points kept per sample, the key frame's and the youngest sweeps' first.
        min_distance: points closer than this to the sensor in x and y [m] are dropped (the ego
            car).
        channel: of the lidar.
    """

    range: tuple[float, float, float, float, float, float]
    sweeps: int = 9
    max_points: int = 300_000
    min_distance: float = 1.0
    channel: str = "LIDAR_TOP"

    def __post_init__(self) -> None:
        object.__setattr__(self, "range", tuple(float(v) for v in self.range))


@dataclass(frozen=True)
class RadarInput:
    """Radar returns for the network.

    Attributes:
        range: as for the lidar [m].
        channels: radar channels; a return's ``sensor`` feature indexes this tuple.
        sweeps: sweeps before the key frame to add, per radar.
        max_points: returns kept per sample.
    """

    range: tuple[float, float, float, float, float, float]
    channels: tuple[str, ...] = RADARS
    sweeps: int = 5
    max_points: int = 2_500

    def __post_init__(self) -> None:
        object.__setattr__(self, "range", tuple(float(v) for v in self.range))
        object.__setattr__(self, "channels", tuple(self.channels))


@dataclass(frozen=True)
class Inputs:
    """The sensors that a model reads.

    Attributes:
        camera, lidar, radar: None if the model does not read that sensor.
        history: number of previous key frames in ``Batch.history``.
    """

    camera: CameraInput | None = None
    lidar: LidarInput | None = None
    radar: RadarInput | None = None
    history: int = 0

    def __post_init__(self) -> None:
        if self.camera is None and self.lidar is None and self.radar is None:
            raise ValueError("a model must read at least one of camera, lidar and radar")

    @property
    def modalities(self) -> dict[str, bool]:
        """``use_camera``, ``use_lidar``, ``use_radar`` as a nuScenes submission states them."""
        names = ("camera", "lidar", "radar")
        return {f"use_{name}": getattr(self, name) is not None for name in names}
