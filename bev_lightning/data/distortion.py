"""Names of the camera models and their numbers of distortion coefficients. Imports no torch."""

from bev_lightning.errors import InputError

CAMERA_MODELS = {"pinhole": (0,), "brown_conrady": (4, 5, 8), "kannala_brandt": (4,)}
"""Possible numbers of distortion coefficients, by camera model."""
MAX_COEFFICIENTS = 8


def check_camera_model(model: str, coefficients: int, where: str) -> None:
    """Check a camera model and its number of distortion coefficients. Raises InputError.

    Args:
        where: start of the error message, e.g. the config key.
    """
    if model not in CAMERA_MODELS:
        raise InputError(
            f"{where} has the camera model {model!r}: use one of {', '.join(CAMERA_MODELS)}"
        )
    if coefficients not in CAMERA_MODELS[model]:
        numbers = " or ".join(str(number) for number in CAMERA_MODELS[model])
        raise InputError(
            f"{where} has {coefficients} distortion coefficients; {model} takes {numbers}"
        )
