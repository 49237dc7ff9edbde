"""Silences library warnings about which a user can do nothing; loggers are in conf/hydra."""

import warnings
from pathlib import Path
from typing import Any

# Beginnings of messages (regular expressions).
_IGNORED = (
    # Lightning 2.6 calls torch 2.14 in a deprecated way.
    r"`isinstance\(treespec, LeafSpec\)`",
    # Logging is by optimizer steps, and a short epoch is no mistake.
    r"The number of training batches \(\d+\) is smaller than the logging interval",
    # The number of loader processes is resolved for the machine.
    r"The '\w+_dataloader' does not have many workers",
    # A resumed run continues in its directory.
    r"Checkpoint directory .* exists and is not empty",
)
_PACKAGE = str(Path(__file__).resolve().parents[1])


def ignore_library_warnings() -> None:
    """Ignore the messages listed here, and show this package's own warnings as plain sentences."""
    for message in _IGNORED:
        warnings.filterwarnings("ignore", message=message)
    if warnings.formatwarning is not _format:
        global _format_others
        _format_others = warnings.formatwarning
        warnings.formatwarning = _format


_format_others = warnings.formatwarning


def _format(
    message: Warning | str, category: Any, filename: str, lineno: int, line: str | None = None
) -> str:
    if filename.startswith(_PACKAGE):
        return f"warning: {message}\n"
    return _format_others(message, category, filename, lineno, line)
