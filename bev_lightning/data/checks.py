"""Checks of data settings that need no torch: for the DataModule and for validating a config."""

from bev_lightning.errors import InputError


def check_on_missing(on_missing: object) -> None:
    """Raise InputError unless the policy for missing files is known."""
    if on_missing not in ("error", "skip"):
        raise InputError(
            f"data.on_missing={on_missing} is unknown; use data.on_missing=error or skip"
        )
