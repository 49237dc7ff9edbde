"""Translates names and values of state dicts by tables of renames, in both directions.

The tables of the published formats are in :mod:`bev_lightning.checkpointing.official`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from torch import Tensor

Rename = tuple[str, str]


# Changes how a value is stored: (our name, value) -> value.
ValueChange = Callable[[str, Tensor], Tensor]


def _unchanged(name: str, value: Tensor) -> Tensor:
    return value


@dataclass(frozen=True)
class Part:
    """A part of a published network and its counterpart in ours.

    Attributes:
        official, ours: prefixes of its names; ours None: it has no counterpart.
        renames: pairs (official, ours) of pieces of names. A piece matches at the beginning of a
            level of the name (with ``^``: of the name); ``#`` matches a number. To ours they are
            applied in order, to the official names in reverse order.
        values: changes of the values to ours and to the official ones, inverse to each other.
        ignored: pattern of official names, without the prefix, that have no counterpart.
        constants: further entries of the official state dict, without the prefix, which follow
            from the configuration.
    """

    official: str
    ours: str | None
    renames: tuple[Rename, ...] = ()
    values: tuple[ValueChange, ValueChange] = (_unchanged, _unchanged)
    ignored: str | None = None
    constants: Mapping[str, Tensor] = field(default_factory=dict)

    def name_ours(self, official: str) -> str | None:
        """Our name of an official one, both without the part's prefix; None: no counterpart."""
        if self.ignored is not None and re.search(self.ignored, official):
            return None
        for pair in self.renames:
            official = _substitute(pair[0], pair[1], official)
        return official

    def name_official(self, ours: str) -> str:
        """The official name of one of ours, both without the part's prefix."""
        for pair in reversed(self.renames):
            ours = _substitute(pair[1], pair[0], ours)
        return ours


@dataclass(frozen=True)
class Translation:
    """A state dict under new names.

    Attributes:
        state: values by their new name.
        sources: the old name of each.
        unknown: old names that belong to no part.
    """

    state: dict[str, Tensor]
    sources: dict[str, str]
    unknown: list[str]


@dataclass(frozen=True)
class Fit:
    """How a translated state dict fits the expected one.

    Attributes:
        state: entries that fit, by their new name.
        missing, unexpected, reshaped: the others; ``old name -> new name`` if the two differ.
    """

    state: dict[str, Tensor]
    missing: list[str]
    unexpected: list[str]
    reshaped: list[str]

    @property
    def is_whole(self) -> bool:
        return not (self.missing or self.unexpected or self.reshaped)


def fit(translation: Translation, wanted: Mapping[str, Tensor], names: Mapping[str, str]) -> Fit:
    """Compare a translated state dict with the expected one.

    Args:
        wanted: values of the expected shapes, by their new name.
        names: their old names, as far as they have one.
    """
    state, reshaped = {}, []
    for name, value in translation.state.items():
        if name in wanted and wanted[name].shape == value.shape:
            state[name] = value
        elif name in wanted:
            shapes = f"{tuple(value.shape)} for {tuple(wanted[name].shape)}"
            reshaped.append(f"{_both(translation.sources.get(name), name)} {shapes}")
    return Fit(
        state,
        [_both(names.get(name), name) for name in wanted if name not in translation.state],
        [
            *translation.unknown,
            *(translation.sources[name] for name in translation.state if name not in wanted),
        ],
        reshaped,
    )


def _both(old: str | None, new: str) -> str:
    return new if old is None or old == new else f"{old} -> {new}"


def translate_to_ours(state: Mapping[str, Tensor], parts: Sequence[Part]) -> Translation:
    """Official names and values to ours. Entries without a counterpart are left out; if several
    parts match a name, the one with the longest prefix counts."""
    result = Translation({}, {}, [])
    for official, value in state.items():
        part = _part_of(official, parts, lambda part: part.official)
        name = None if part is None else part.name_ours(official[len(part.official) :])
        if part is None or (part.ours is None and name is not None):
            result.unknown.append(official)
        elif part.ours is not None and name is not None:
            result.state[part.ours + name] = part.values[0](name, value).contiguous()
            result.sources[part.ours + name] = official
    return result


def translate_to_official(state: Mapping[str, Tensor], parts: Sequence[Part]) -> Translation:
    """Our names and values to the official ones, with the constants of the parts."""
    result = Translation({}, {}, [])
    for ours, value in state.items():
        part = _part_of(ours, parts, lambda part: part.ours)
        if part is None or part.ours is None:
            result.unknown.append(ours)
            continue
        name = ours[len(part.ours) :]
        official = part.official + part.name_official(name)
        result.state[official] = part.values[1](name, value).contiguous()
        result.sources[official] = ours
    for part in parts:
        result.state.update({part.official + name: v for name, v in part.constants.items()})
    return result


def _part_of(name: str, parts: Sequence[Part], prefix: Callable[[Part], str | None]) -> Part | None:
    """The part with the longest matching prefix."""
    matching = [p for p in parts if (start := prefix(p)) is not None and name.startswith(start)]
    return max(matching, key=lambda part: len(prefix(part) or ""), default=None)


def _substitute(before: str, after: str, name: str) -> str:
    pattern, replacement = _compile(before, after)
    return pattern.sub(replacement, name)


@cache
def _compile(before: str, after: str) -> tuple[re.Pattern[str], str]:
    start = "^" if before.startswith("^") else r"(?<![^.])"
    pattern = re.escape(before.removeprefix("^")).replace(r"\#", r"(\d+)")
    numbers = iter(range(1, 10))
    replacement = re.sub("#", lambda _: rf"\g<{next(numbers)}>", after.removeprefix("^"))
    return re.compile(start + pattern), replacement
