"""The sensor rig: which channels a model reads, and camera models that the tables lack."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from bev_lightning.data.camera_models import CameraModel, make_camera_model
from bev_lightning.data.distortion import CAMERA_MODELS, MAX_COEFFICIENTS, check_camera_model
from bev_lightning.data.nuscenes.sample import Readings
from bev_lightning.data.nuscenes.schema import LIDAR
from bev_lightning.errors import InputError
from bev_lightning.structures.inputs import CAMERAS, RADARS

_MAX_CAMERAS = 8


@dataclass(frozen=True)
class CameraModelSettings:
    """Camera model settings of one camera in the configuration.

    Attributes:
        model, distortion: as of :class:`CameraModel`; None: as in the tables.
        zoom, yaw_deg, pitch_deg: of the view, as of :class:`CameraModel`.
    """

    model: str | None = None
    distortion: tuple[float, ...] | None = None
    zoom: float = 1.0
    yaw_deg: float = 0.0
    pitch_deg: float = 0.0


@dataclass(frozen=True)
class SensorRig:
    """Sensors that the model reads, and settings that the tables lack.

    Attributes:
        cameras: channels in the order of ``Cameras.images``, 1 to 8.
        lidar: channel.
        radars: channels; a return's ``sensor`` counts them.
        reference: the channel whose frame at the key frame is the model frame, or ``ego`` for the
            car's own (x ahead, y left, z up), at the reading that is nearest to the key frame.
        camera_models: settings by camera channel.
    """

    cameras: tuple[str, ...] = CAMERAS
    lidar: str = LIDAR
    radars: tuple[str, ...] = RADARS
    reference: str = LIDAR
    camera_models: Mapping[str, CameraModelSettings] = field(default_factory=dict)

    def __post_init__(self) -> None:
        cameras = tuple(self.cameras)
        if not 1 <= len(set(cameras)) == len(cameras) <= _MAX_CAMERAS:
            raise InputError(
                f"data.sensors.cameras={list(cameras)} must be 1 to {_MAX_CAMERAS} channels, each "
                f"once"
            )
        camera_models = {}
        for channel, given in self.camera_models.items():
            where = f"data.sensors.camera_models.{channel}"
            known = dict(given) if isinstance(given, Mapping) else dict(vars(given))
            odd = known.keys() - vars(CameraModelSettings()).keys()
            if odd or channel not in cameras:
                raise InputError(
                    f"{where}.{min(odd)} is unknown: choose from "
                    f"{', '.join(vars(CameraModelSettings()))}"
                    if odd
                    else f"{where} is no camera of data.sensors.cameras={list(cameras)}"
                )
            settings = CameraModelSettings(**known)
            if settings.distortion is not None and settings.model is None:
                raise InputError(f"{where}.distortion needs {where}.model beside it")
            if settings.model is not None:
                check_camera_model(settings.model, len(settings.distortion or ()), where)
            if not settings.zoom > 0 or max(abs(settings.yaw_deg), abs(settings.pitch_deg)) > 90:
                raise InputError(
                    f"{where}: zoom={settings.zoom} must be above 0, and yaw_deg="
                    f"{settings.yaw_deg} and pitch_deg={settings.pitch_deg} within 90"
                )
            camera_models[channel] = settings
        object.__setattr__(self, "cameras", cameras)
        object.__setattr__(self, "radars", tuple(self.radars))
        object.__setattr__(self, "camera_models", camera_models)

    def camera_model(self, channel: str, readings: Readings, row: int) -> CameraModel | None:
        """Camera model of an image; None for a plain pinhole.

        Args:
            row: of the image among the readings.
        """
        settings = self.camera_models.get(channel, CameraModelSettings())
        model = list(CAMERA_MODELS)[readings.camera_model[row]]
        distortion = readings.distortion[row]
        if settings.model is not None:
            model = settings.model
            given = tuple(settings.distortion or ())
            distortion = np.pad(np.array(given), (0, MAX_COEFFICIENTS - len(given)))
        view = settings.zoom, settings.yaw_deg, settings.pitch_deg
        return make_camera_model(model, readings.intrinsic[row], distortion, *view)
