"""Records of nuScenes' JSON tables: read in pieces, checked, turned into columns.

A table is one JSON list. The three with millions of records are cut between records into pieces
that are parsed for themselves, by several processes, so that no process ever holds a table.
"""

import json
import mmap
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from bev_lightning.data.camera_models import CAMERA_MODELS
from bev_lightning.errors import InputError

# Where one record ends and the next begins. The large tables nest no objects, and their texts are
# tokens and file names; a piece that is cut elsewhere does not parse, so that it would be noticed.
_BETWEEN_RECORDS = re.compile(rb"\}\s*,\s*\{")
_NEEDS_CARE = r"^/|(^|/)\.\.?(/|$)|//|^[^/]*:|/$|^$"
_ANNOTATIONS = ("instance", "sample_annotation")


@dataclass(frozen=True)
class Piece:
    """Bytes ``start`` .. ``stop - 1`` of a table's file: whole records and the commas between."""

    path: Path
    start: int
    stop: int


def read_table(folder: Path, name: str, fields: Iterable[str]) -> list[dict[str, Any]]:
    """All records of a small table; none where a test set has no annotations.

    Raises:
        InputError: the table is missing, is not JSON, no list of records or lacks a field.
    """
    pieces = cut_table(folder, name, None)
    return read_records(pieces[0], fields) if pieces else []


def cut_table(folder: Path, name: str, piece_bytes: int | None) -> list[Piece]:
    """Cut a table into pieces of about so many bytes; None: one piece.

    Raises:
        InputError: the table is missing, or no list.
    """
    path = folder / f"{name}.json"
    try:
        with open(path, "rb") as file:
            if path.stat().st_size == 0:
                raise _not_json(path, "it is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return _cut(path, content, piece_bytes)
    except FileNotFoundError:
        if folder.name.endswith("-test") and name in _ANNOTATIONS:
            return []
        raise InputError(
            f"the table {path} is missing: download the metadata of {folder.name} again"
        ) from None


def read_records(piece: Piece, fields: Iterable[str]) -> list[dict[str, Any]]:
    """The records of a piece.

    Raises:
        InputError: it is not JSON, or a record lacks one of the fields.
    """
    with open(piece.path, "rb") as file:
        file.seek(piece.start)
        content = b"[" + file.read(piece.stop - piece.start) + b"]"
    try:
        records = orjson.loads(content)
    except orjson.JSONDecodeError:
        try:
            records = json.loads(content)  # knows NaN, which the checks of numbers name
        except ValueError as error:
            raise _not_json(piece.path, f"{error}, counted from byte {piece.start}") from None
    fields = frozenset(fields)
    for record in records:
        if not isinstance(record, dict) or not fields <= record.keys():
            raise InputError(
                f"the table {piece.path} has a record that lacks one of {', '.join(fields)}: "
                f"{str(record)[:200]}; download the metadata of {piece.path.parent.name} again"
            )
    return records


def read_numbers(
    table: str, records: Sequence[dict[str, Any]], field: str, shape: tuple[int, ...]
) -> np.ndarray:
    """``(N, *shape)`` finite float64. Raises InputError, which names the record that holds
    others."""
    try:
        numbers = np.array([record[field] for record in records], np.float64)
        if numbers.shape == (len(records), *shape) and np.isfinite(numbers).all():
            return numbers
    except (TypeError, ValueError):
        pass
    if not records:
        return np.zeros((0, *shape))
    for record in records:
        if len(records) == 1:
            size = " x ".join(str(length) for length in shape)
            raise InputError(
                f"the record {record['token']} of {table}.json has {field} = {record[field]!r} "
                f"where {size} finite numbers belong; download the metadata again"
            )
        read_numbers(table, [record], field, shape)
    raise AssertionError("each record for itself is right")


def read_rotations(table: str, records: Sequence[dict[str, Any]]) -> np.ndarray:
    """``(N, 4)`` quaternions w, x, y, z. Raises InputError."""
    rotations = read_numbers(table, records, "rotation", (4,))
    for row in np.flatnonzero(~rotations.any(axis=1)):
        raise InputError(
            f"the record {records[row]['token']} of {table}.json has a rotation of four zeros, "
            f"which turns nothing; download the metadata again"
        )
    return rotations


def read_poses(table: str, records: Sequence[dict[str, Any]]) -> np.ndarray:
    """``(N, 7)`` translations [m] and quaternions. Raises InputError."""
    translations = read_numbers(table, records, "translation", (3,))
    return np.concatenate([translations, read_rotations(table, records)], axis=1)


def read_integers(table: str, records: Sequence[dict[str, Any]], field: str) -> np.ndarray:
    """``(N,)`` int64, 0 for null. Raises InputError."""
    values = [record[field] or 0 for record in records]
    if {type(value) for value in values} <= {int}:
        return np.array(values, np.int64)
    for record, value in zip(records, values, strict=True):
        if type(value) is not int:
            raise InputError(
                f"the record {record['token']} of {table}.json has {field} = {value!r} where a "
                f"whole number belongs; download the metadata again"
            )
    raise AssertionError("one of them is no whole number")


def read_texts(table: str, records: Sequence[dict[str, Any]], field: str) -> pa.Array:
    """``(N,)`` strings, empty for null. Raises InputError."""
    try:
        return pa.array([record[field] or "" for record in records], pa.string())
    except (pa.ArrowTypeError, pa.ArrowInvalid):
        raise InputError(
            f"the table {table}.json has a {field} that is no text; download the metadata again"
        ) from None


def read_paths(records: Sequence[dict[str, Any]]) -> pa.Array:
    """``(N,)`` paths of sample_data with forward slashes.

    Raises:
        InputError: one is no path, or leaves the root.
    """
    paths = pc.replace_substring(read_texts("sample_data", records, "filename"), "\\", "/")
    odd = pc.match_substring_regex(paths, _NEEDS_CARE).to_numpy(zero_copy_only=False)
    if not odd.any():
        return paths
    plain = paths.to_pylist()
    for row in np.flatnonzero(odd):
        plain[row] = _relative(plain[row], records[row]["filename"], records[row]["token"])
    return pa.array(plain, pa.string())


def check_camera_model(model: str, coefficients: int, where: str) -> None:
    """Refuse an unknown model, or a number of coefficients that it does not have. Raises
    InputError.

    Args:
        where: what the sentence begins with.
    """
    if model not in CAMERA_MODELS:
        raise InputError(
            f"{where} has the camera model {model!r}: use one of {', '.join(CAMERA_MODELS)}"
        )
    if coefficients not in CAMERA_MODELS[model]:
        numbers = " or ".join(str(number) for number in CAMERA_MODELS[model])
        raise InputError(
            f"{where} has {coefficients} distortion coefficients, and {model} has {numbers}"
        )


def refuse_lookup(table: str, token: Any) -> InputError:
    """For a token that leads nowhere."""
    return InputError(
        f"a record of {table}.json refers to the token {token!r}, which is in none of the tables; "
        f"download the metadata again"
    )


def _relative(path: str, filename: Any, token: str) -> str:
    pure = PurePosixPath(path)
    if not pure.parts:
        raise InputError(
            f"sample_data {token} has filename = {filename!r} where the path of a file belongs; "
            f"download the metadata again"
        )
    if pure.is_absolute() or ".." in pure.parts or ":" in pure.parts[0]:
        raise InputError(
            f"sample_data {token} names the file {filename!r}, which lies outside data.root: "
            f"tables may name only files below it"
        )
    return str(pure)


def _cut(path: Path, content: mmap.mmap, piece_bytes: int | None) -> list[Piece]:
    head, tail = content[: 1 << 16].lstrip(), content[-(1 << 16) :].rstrip()
    start = len(content[: 1 << 16]) - len(head)
    stop = len(content) - (len(content[-(1 << 16) :]) - len(tail))
    if head[:1] != b"[":
        try:
            json.loads(content[:])
        except ValueError as error:
            raise _not_json(path, error) from None
        raise InputError(
            f"the table {path} holds no list of records: download the metadata of "
            f"{path.parent.name} again"
        )
    if tail[-1:] != b"]" or stop - start < 2:
        raise _not_json(path, "its end is missing")
    start, stop = start + 1, stop - 1
    if not content[start : start + (1 << 16)].strip() and stop - start < 1 << 16:
        return []
    pieces = []
    while piece_bytes is not None and stop - start > piece_bytes:
        between = _BETWEEN_RECORDS.search(content, start + piece_bytes, stop)
        if between is None:
            break
        pieces.append(Piece(path, start, between.start() + 1))
        start = between.end() - 1
    return [*pieces, Piece(path, start, stop)]


def _not_json(path: Path, error: object) -> InputError:
    return InputError(
        f"the table {path} ({path.stat().st_size} bytes) is not JSON ({error}): download the "
        f"metadata of {path.parent.name} again"
    )
