"""Names and layouts of published weights: the machinery that goes there and back.

The published names are listed in :mod:`bev_lightning.checkpointing.official_names`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from torch import Tensor

Rename = tuple[str, str]


def _as_it_is(name: str, value: Tensor) -> Tensor:
    return value


@dataclass(frozen=True)
class Layout:
    """How a part stores its values: two functions ``(our name, value) -> value``, each the other's
    inverse."""

    to_ours: Callable[[str, Tensor], Tensor] = _as_it_is
    to_official: Callable[[str, Tensor], Tensor] = _as_it_is

    @classmethod
    def same_both_ways(cls, change: Callable[[str, Tensor], Tensor]) -> "Layout":
        """Of a change that undoes itself."""
        return cls(change, change)


@dataclass(frozen=True)
class Part:
    """A part of a published network and our counterpart.

    Attributes:
        official, ours: what the names of the part begin with; ours None: no counterpart at all.
        renames: pairs (official, ours) of pieces of names. A piece begins where a name or a level
            of it begins (with ``^``: the name); ``#`` stands for a number. On the way to ours they
            are applied in order, on the way back in the reverse order.
        layout: of the values.
        ignored: pattern of official names, without the prefix, that have no counterpart.
        constants: what the official state dict holds besides, without the prefix; they follow from
            the configuration.
    """

    official: str
    ours: str | None
    renames: tuple[Rename, ...] = ()
    layout: Layout = Layout()
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
    """Attributes:
    state: values by their new name.
    sources: the old name of each.
    unknown: old names that belong to no part.
    """

    state: dict[str, Tensor]
    sources: dict[str, str]
    unknown: list[str]


@dataclass(frozen=True)
class Fit:
    """How a translated state dict fits the one that is wanted.

    Attributes:
        state: what fits, by its new name.
        missing, unexpected, reshaped: what does not; ``old name -> new name`` where there are two.
    """

    state: dict[str, Tensor]
    missing: list[str]
    unexpected: list[str]
    reshaped: list[str]

    @property
    def is_whole(self) -> bool:
        return not (self.missing or self.unexpected or self.reshaped)


def fit(translation: Translation, wanted: Mapping[str, Tensor], names: Mapping[str, str]) -> Fit:
    """Sort a translated state dict by what is wanted.

    Args:
        wanted: values of the right shape, by their new name.
        names: the old name of each of them that has one.
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
    """Official names and layouts to ours. What has no counterpart is left out; where several parts
    fit a name, the one with the longest prefix is meant."""
    result = Translation({}, {}, [])
    for official, value in state.items():
        part = max(
            (part for part in parts if official.startswith(part.official)),
            key=lambda part: len(part.official),
            default=None,
        )
        name = None if part is None else part.name_ours(official[len(part.official) :])
        if part is not None and name is None:
            continue
        if part is None or part.ours is None or name is None:
            result.unknown.append(official)
            continue
        result.state[part.ours + name] = part.layout.to_ours(name, value).contiguous()
        result.sources[part.ours + name] = official
    return result


def translate_to_official(state: Mapping[str, Tensor], parts: Sequence[Part]) -> Translation:
    """Our names and layouts to the official ones, with the constants that belong there."""
    result = Translation({}, {}, [])
    for ours, value in state.items():
        part = max(
            (part for part in parts if part.ours is not None and ours.startswith(part.ours)),
            key=lambda part: len(part.ours or ""),
            default=None,
        )
        if part is None or part.ours is None:
            result.unknown.append(ours)
            continue
        name = ours[len(part.ours) :]
        official = part.official + part.name_official(name)
        result.state[official] = part.layout.to_official(name, value).contiguous()
        result.sources[official] = ours
    for part in parts:
        constants = part.constants.items()
        result.state.update({part.official + name: value for name, value in constants})
    return result


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
