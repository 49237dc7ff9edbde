"""The sensors of a car."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from bev_lightning.data.camera_models import LENS_MODELS, MAX_COEFFICIENTS, Lens, make_lens
from bev_lightning.data.nuscenes.json_tables import check_lens
from bev_lightning.data.nuscenes.sample import Readings
from bev_lightning.data.nuscenes.schema import LIDAR
from bev_lightning.errors import InputError
from bev_lightning.structures.inputs import CAMERAS, RADARS

_MAX_CAMERAS = 8


@dataclass(frozen=True)
class LensSettings:
    """A lens as the configuration tells it.

    Attributes:
        model, distortion: as of :class:`Lens`; None: as the tables say.
        zoom, yaw_deg, pitch_deg: of the view, as of :class:`Lens`.
    """

    model: str | None = None
    distortion: tuple[float, ...] | None = None
    zoom: float = 1.0
    yaw_deg: float = 0.0
    pitch_deg: float = 0.0


@dataclass(frozen=True)
class SensorRig:
    """Which sensors there are, and what the tables do not say of them.

    Attributes:
        cameras: channels in the order of ``Cameras.images``, 1 to 8.
        lidar: channel.
        radars: channels; a return's ``sensor`` counts them.
        reference: the channel whose frame at the key frame is the model frame, or ``ego`` for the
            car's own (x ahead, y left, z up), at the reading that is nearest to the key frame.
        lenses: settings by camera channel.
    """

    cameras: tuple[str, ...] = CAMERAS
    lidar: str = LIDAR
    radars: tuple[str, ...] = RADARS
    reference: str = LIDAR
    lenses: Mapping[str, LensSettings] = field(default_factory=dict)

    def __post_init__(self) -> None:
        cameras = tuple(self.cameras)
        if not 1 <= len(set(cameras)) == len(cameras) <= _MAX_CAMERAS:
            raise InputError(
                f"data.sensors.cameras={list(cameras)} must be 1 to {_MAX_CAMERAS} channels, each "
                f"once"
            )
        lenses = {}
        for channel, given in self.lenses.items():
            where = f"data.sensors.lenses.{channel}"
            known = dict(given) if isinstance(given, Mapping) else dict(vars(given))
            odd = known.keys() - vars(LensSettings()).keys()
            if odd or channel not in cameras:
                raise InputError(
                    f"{where}.{min(odd)} is unknown: a lens has {', '.join(vars(LensSettings()))}"
                    if odd
                    else f"{where} is no camera of data.sensors.cameras={list(cameras)}"
                )
            lens = LensSettings(**known)
            if lens.distortion is not None and lens.model is None:
                raise InputError(f"{where}.distortion needs {where}.model beside it")
            if lens.model is not None:
                check_lens(lens.model, len(lens.distortion or ()), where)
            if not lens.zoom > 0 or max(abs(lens.yaw_deg), abs(lens.pitch_deg)) > 90:
                raise InputError(
                    f"{where}: zoom={lens.zoom} must be above 0, and yaw_deg={lens.yaw_deg} and "
                    f"pitch_deg={lens.pitch_deg} within 90"
                )
            lenses[channel] = lens
        object.__setattr__(self, "cameras", cameras)
        object.__setattr__(self, "radars", tuple(self.radars))
        object.__setattr__(self, "lenses", lenses)

    def lens(self, channel: str, readings: Readings, row: int) -> Lens | None:
        """What an image was taken through; None for a plain pinhole.

        Args:
            row: of the image among the readings.
        """
        settings = self.lenses.get(channel, LensSettings())
        model, distortion = list(LENS_MODELS)[readings.lens[row]], readings.distortion[row]
        if settings.model is not None:
            model = settings.model
            given = tuple(settings.distortion or ())
            distortion = np.pad(np.array(given), (0, MAX_COEFFICIENTS - len(given)))
        view = settings.zoom, settings.yaw_deg, settings.pitch_deg
        return make_lens(model, readings.intrinsic[row], distortion, *view)
