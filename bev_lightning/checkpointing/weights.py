"""Reads state dicts from checkpoint and weight files, without executing code."""

import pickle
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from bev_lightning.errors import InputError


def read_state(checkpoint: str | Path) -> dict[str, Tensor]:
    """The state dict of a file, on the CPU.

    Args:
        checkpoint: a checkpoint of a run, a published one (a state dict, or one under
            ``state_dict`` or ``model``), or a .safetensors file.

    Raises:
        InputError: the file is missing, holds no weights, or holds objects that need code.
    """
    try:
        if Path(checkpoint).suffix == ".safetensors":
            return load_file(checkpoint)
        content = torch.load(checkpoint, map_location="cpu", weights_only=True)
        for key in ("state_dict", "model"):
            if isinstance(content.get(key), Mapping):
                content = content[key]
        state = {name: value for name, value in content.items() if torch.is_tensor(value)}
    except FileNotFoundError:
        raise InputError(
            f"there is no checkpoint {checkpoint}; give the path of a .ckpt, .pth or .safetensors "
            "file"
        ) from None
    except (
        pickle.UnpicklingError,
        SafetensorError,
        RuntimeError,
        EOFError,
        AttributeError,
        KeyError,
        TypeError,
    ) as error:
        # The unpickler's message about other files is of no help.
        plain = isinstance(error, (RuntimeError, SafetensorError))
        reason = f" ({str(error).splitlines()[0]})" if plain and str(error) else ""
        if "GLOBAL " in str(error):
            raise InputError(_explain_code(checkpoint, str(error))) from None
        raise InputError(
            f"{checkpoint} is no readable checkpoint{reason}; give a .ckpt, .pth or .safetensors "
            "file of weights"
        ) from None
    if not state:
        raise InputError(f"{checkpoint} holds no weights; give a file that does")
    return state


def _explain_code(checkpoint: str | Path, reason: str) -> str:
    found = re.search(r"GLOBAL ([\w.]+)", reason)
    return (
        f"{checkpoint} holds objects of the class {found[1] if found else 'unknown'}, which only "
        "the code that made it can read, and reading them may execute anything; "
        "where you trust the file and have that code, run python -c "
        "\"import torch; c = torch.load('FILE', map_location='cpu', weights_only=False); "
        "torch.save({'state_dict': c['state_dict']}, 'weights.pth')\" and give weights.pth"
    )
