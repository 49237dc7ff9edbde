"""Reads and checks sensor files of nuScenes; errors name path and size."""

from pathlib import Path

import numpy as np
from PIL import Image

from bev_lightning.errors import InputError

_PCD_TYPES = {
    ("F", 4): "<f4",
    ("F", 8): "<f8",
    ("I", 1): "i1",
    ("I", 2): "<i2",
    ("I", 4): "<i4",
    ("U", 1): "u1",
    ("U", 2): "<u2",
    ("U", 4): "<u4",
}
# Fields of a radar file that models read.
_NEEDED = ("x", "y", "z", "dyn_prop", "rcs", "vx_comp", "vy_comp", "ambig_state", "invalid_state")
# Markers of a JPEG's segments.
_FRAME_HEADERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_SCAN = 0xDA
# A disk or a transfer that loses a block leaves zeros. Decoders show them as grey without an error;
# valid JPEG data does not contain that many.
_HOLE = bytes(4096)
_ENDS = {"JPEG": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82"}


def find_fault(path: Path, size: tuple[int, int]) -> str:
    """Check a sensor file without decoding it: ``missing``, the fault, or empty if it looks valid.

    Reads only a few bytes of images and lidar files, so that whole data sets can be checked.

    Args:
        path: an image (jpg, png), a lidar file (.pcd.bin) or a radar file (.pcd).
        size: height and width that an image must have [pixels].
    """
    try:
        num_bytes = path.stat().st_size
        if num_bytes == 0:
            return "0 bytes"
        if path.name.endswith(".pcd.bin"):
            return f"{num_bytes} bytes, no multiple of 20" if num_bytes % 20 else ""
        if path.suffix == ".pcd":
            read_radar_file(path)
            return ""
        with open(path, "rb") as file:
            image = Image.open(file, formats=("JPEG", "PNG"))
            file.seek(max(0, num_bytes - 64))
            tail = file.read().rstrip(b"\0\r\n")
    except FileNotFoundError:
        return "missing"
    except (OSError, ValueError, SyntaxError) as error:
        return describe(error)
    if not tail.endswith(_ENDS[str(image.format)]):
        return f"{num_bytes} bytes, the end of the {image.format} is missing"
    if (image.height, image.width) != size:
        return f"{image.width}x{image.height} pixels, but {size[1]}x{size[0]} in the tables"
    return ""


def load_lidar_file(path: Path) -> np.ndarray:
    """Read a lidar file: ``(P, 5)`` float32 x, y, z [m], intensity 0..255, ring.

    Raises:
        InputError: absent, empty, or no multiple of 20 bytes.
    """
    content = read_bytes(path, "lidar file")
    if not content:
        raise _broken("lidar file", path, 0, "is empty")
    if len(content) % 20:
        what = "is cut: its length is no multiple of 5 floats (20 bytes)"
        raise _broken("lidar file", path, len(content), what)
    return np.frombuffer(content, np.float32).reshape(-1, 5)


def read_lidar_file(path: Path) -> np.ndarray:
    """:func:`load_lidar_file`, every value of it finite, and not all of them zero.

    Raises:
        InputError: absent, empty, no multiple of 20 bytes, zeros alone, NaN or infinity.
    """
    points = load_lidar_file(path)
    if not points.any():
        raise _broken("lidar file", path, points.nbytes, "holds only zeros")
    bad = int((~np.isfinite(points)).any(axis=1).sum())
    if bad:
        what = f"holds NaN or infinity in {bad} of {len(points)} points"
        raise _broken("lidar file", path, points.nbytes, what)
    return points


def read_radar_file(path: Path) -> np.ndarray:
    """Read the returns of a binary .pcd as a structured array with the header's field names.

    It is empty where the first return is NaN, by which nuScenes marks an empty file.

    Raises:
        InputError: absent, of another format, or shorter than its header requires.
    """
    content = read_bytes(path, "radar file")
    try:
        end = content.index(b"DATA binary\n") + len(b"DATA binary\n")
        lines = content[:end].decode("ascii").splitlines()
        header = {line.split(" ")[0]: line.split(" ")[1:] for line in lines if line}
        kinds = [_PCD_TYPES[t, int(s)] for t, s in zip(header["TYPE"], header["SIZE"], strict=True)]
        layout = np.dtype(list(zip(header["FIELDS"], kinds, strict=True)))
        num = int(header["WIDTH"][0]) * int(header["HEIGHT"][0])
        returns = (
            np.frombuffer(content, layout, count=num, offset=end) if num else np.zeros(0, layout)
        )
        floats = [n for n in layout.names or () if layout[n].kind == "f"]
        for name in _NEEDED:
            returns[name]
    except (ValueError, KeyError, IndexError, UnicodeDecodeError) as error:
        what = f"is not a whole binary .pcd of nuScenes ({describe(error)})"
        raise _broken("radar file", path, len(content), what) from None
    if num and any(np.isnan(returns[name][0]) for name in floats):
        return returns[:0]
    return returns


def is_whole_jpeg(content: bytes, size: tuple[int, int]) -> bool:
    """Whether the bytes are a complete JPEG of this height and width, judged by its markers."""
    found, at = None, 2 if content[:2] == b"\xff\xd8" else len(content)
    while at + 4 <= len(content) and content[at] == 0xFF:
        marker, begin = content[at + 1], at + 4
        if marker == 0xFF:  # fill
            at += 1
            continue
        at += 2 + int.from_bytes(content[at + 2 : begin], "big")
        if at > len(content):
            break
        if marker in _FRAME_HEADERS:
            height, width = content[begin + 1 : begin + 3], content[begin + 3 : begin + 5]
            found = int.from_bytes(height, "big"), int.from_bytes(width, "big")
        elif marker == _SCAN:  # behind it FF D9 is the end and nothing else
            last = content.rfind(_ENDS["JPEG"], at)
            return found == tuple(size) and last >= 0 and content.find(_HOLE, at, last) < 0
    return False


def check_holes(path: Path, content: bytes) -> None:
    """Check a JPEG for a lost block, i.e. a run of zeros. Raises InputError."""
    end = content.rfind(_ENDS["JPEG"])
    hole = content.find(_HOLE, 0, end if end >= 0 else len(content))
    if content[:2] == b"\xff\xd8" and hole >= 0:
        what = f"has {len(_HOLE)} zero bytes in a row at byte {hole}, where a block was lost"
        raise _broken("image", path, len(content), what)


def read_bytes(path: Path, kind: str) -> bytes:
    """Read a whole file. Raises InputError, which calls it a ``kind``, if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(
            f"the {kind} {path} cannot be read ({error.strerror}): restore it, or set "
            f"data.on_missing=skip"
        ) from None


def _broken(kind: str, path: Path, num_bytes: int, what: str) -> InputError:
    return InputError(
        f"the {kind} {path} ({num_bytes} bytes) {what}: replace it, or set data.on_missing=skip"
    )


def describe(error: BaseException) -> str:
    """An error's text in one line, without the memory address PIL puts in."""
    text = " ".join(str(error).split())
    return "not an image" if "cannot identify image file" in text else text or type(error).__name__
