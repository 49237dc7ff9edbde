"""From words on a command line to composed configurations, and from Hydra's errors to sentences."""

import difflib
import json
import pickle
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from bev_lightning.config.aliases import rename_overrides, rename_targets
from bev_lightning.errors import InputError

VERSION_BASE = "1.3"
# ${count:${data.classes}} in conf/: the length of a list.
OmegaConf.register_new_resolver("count", len, replace=True)
_REFUSALS = (HydraException, OmegaConfBaseException, ValueError)
# Groups whose choices look like numbers, which Hydra refuses as the name of a choice.
_NUMBERED_GROUPS = ("precision", "accumulation")
_BARE_NUMBER = re.compile(r"(?<![\w.'\"-])\d+(?![\w.'\"-])")
# What a checkpoint's own words may say about a later run is its model and data; these belong to the
# machine and to the training.
_TRAINING_ONLY = re.compile(
    r"(trainer|hardware|cluster|precision|accumulation|strategy|loader|callbacks|logger|debug|sweep|paths|hydra"
    r"|local|ckpt|init_from|resume|source|to|names|strict)([./@]|$)"
)
# A training that is resumed keeps all of its words but where it ran and what it began with.
ONE_RUN_ONLY = re.compile(r"(paths|hydra|sweep|init_from|resume)([./@]|$)")
# The axes of the machine, and the key that each of them writes for the training.
_AXES = {
    "hardware": "trainer.accelerator",
    "precision": "trainer.precision",
    "accumulation": "trainer.accumulate_grad_batches",
    "strategy": "trainer.strategy",
}


@dataclass(frozen=True)
class Job:
    """One run to come: the words it is composed from, and the configuration with its hydra node."""

    overrides: list[str]
    cfg: DictConfig


def config_dir() -> Path:
    """The folder of YAML files: inside an installed package, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    return package / "conf" if (package / "conf").is_dir() else package.parent / "conf"


def quote_choices(argv: Sequence[str]) -> list[str]:
    """``precision=16`` -> ``precision='16'``, also in lists, behind ``+`` or ``++`` and with ``@``.

    Hydra reads a bare number as an integer and refuses it as the name of a choice; only the groups
    whose choices are numbers are touched. ``data.root=~/x``, which no shell and not Hydra expands,
    becomes the path that it means.
    """
    quoted = []
    for word in argv:
        key, equals, value = word.partition("=")
        if equals and key.lstrip("+~").partition("@")[0] in _NUMBERED_GROUPS:
            value = _BARE_NUMBER.sub(lambda number: f"'{number.group()}'", value)
        if value.startswith("~/"):
            value = str(Path(value).expanduser())
        quoted.append(key + equals + value)
    return quoted


def compose_job(verb: str, overrides: Sequence[str], extra_dir: str | None = None) -> Job:
    """Compose one run; a ``ckpt``, or the ``source`` of a conversion, brings the words its model
    was trained with, below ``overrides``, and ``resume`` all words of its run.

    Raises:
        InputError: one sentence for whatever Hydra refuses.
    """
    words = rename_overrides(quote_choices(overrides))
    cfg = _compose(verb, words, extra_dir)
    resume = OmegaConf.select(cfg, "resume")
    ckpt = resume or OmegaConf.select(cfg, "ckpt") or OmegaConf.select(cfg, "source")
    if ckpt and Path(str(ckpt)).is_file():
        stored = read_overrides(Path(str(ckpt)))
        kept = merge_overrides(stored, words, resumes=bool(resume))
        kept = kept[: len(kept) - len(words)]
        if not resume and any(key_of(word) == "experiment" for word in kept):
            # It names the machine of the training too.
            kept += _say_axes(cfg, words)
        words = [*kept, *words]
        cfg = _compose(verb, words, extra_dir)
    return Job(words, cfg)


def compose_jobs(
    verb: str, overrides: Sequence[str], multirun: bool, extra_dir: str | None = None
) -> tuple[bool, list[Job]]:
    """Every run that the words ask for; the flag says whether they are a sweep.

    Raises:
        InputError: one sentence for whatever Hydra refuses.
    """
    words = rename_overrides(quote_choices(overrides))
    with _hydra(extra_dir):
        parsed = _parse(words)
        first = [
            f"{override.get_key_element()}={next(iter(override.sweep_string_iterator()))}"
            if override.is_discrete_sweep()
            else word
            for override, word in zip(parsed, words, strict=True)
        ]
        is_sweep = any(override.is_sweep_override() for override in parsed)
    if is_sweep and not multirun:
        # A sweep without -m may still come from a sweep group; otherwise it is a slip.
        base = _compose(verb, first, extra_dir)
        if _mode(base) != "MULTIRUN":
            word = next(w for w, o in zip(words, parsed, strict=True) if o.is_sweep_override())
            raise InputError(
                f"{word} gives several values; put -m in front of it to run one job for each"
            )
    job = compose_job(verb, first, extra_dir)
    if not multirun and _mode(job.cfg) != "MULTIRUN":
        return False, [job]
    sweeper = OmegaConf.select(job.cfg, "hydra.sweeper")
    params = [f"{key}={value}" for key, value in (sweeper.get("params") or {}).items()]
    if not str(sweeper["_target_"]).endswith(".BasicSweeper"):
        return True, [job]  # it chooses its jobs as it goes; the first values stand for them
    with _hydra(extra_dir):
        split = BasicSweeper.split_arguments(_parse(quote_choices(params + words)), None)[0]
    return True, [compose_job(verb, words, extra_dir) for words in split]


def merge_overrides(
    stored: Sequence[str], given: Sequence[str], resumes: bool = False
) -> list[str]:
    """A checkpoint's words that concern its model and data, then the command line's, which win.

    Args:
        resumes: keep the words of the training too.
    """
    keys = {key_of(word) for word in given}
    groups = {key for key in keys if "." not in key}
    keys |= {written for group, written in _AXES.items() if group in groups}
    left_out = ONE_RUN_ONLY if resumes else _TRAINING_ONLY
    kept = [
        word
        for word in stored
        if not left_out.match(key_of(word))
        and key_of(word) not in keys
        and key_of(word).partition(".")[0] not in groups
    ]
    return [*kept, *given]


def read_overrides(checkpoint: Path) -> list[str]:
    """The words a checkpoint's run was composed from; none for a file of other origin.

    Executes nothing that the file holds, and leaves its tensors on the disk.
    """
    # Late, for it takes seconds: only runs that load the checkpoint anyway come here.
    import torch
    from safetensors import SafetensorError, safe_open

    try:
        if checkpoint.suffix == ".safetensors":
            with safe_open(checkpoint, framework="pt") as file:
                stored = json.loads(file.metadata()["overrides"])
                return rename_overrides([str(word) for word in stored])
        content = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)
        return rename_overrides([str(word) for word in content["bev_lightning"]["overrides"]])
    except (
        pickle.UnpicklingError,
        SafetensorError,
        RuntimeError,
        EOFError,
        KeyError,
        TypeError,
        ValueError,
    ):
        return []


def _say_axes(cfg: DictConfig, words: Sequence[str]) -> list[str]:
    """Words for the machine's axes as a composition has them, but those that ``words`` give."""
    given = {key_of(word) for word in words}
    choices = OmegaConf.select(cfg, "hydra.runtime.choices") or {}
    said = [f"{axis}={choices[axis]}" for axis in _AXES if axis in choices and axis not in given]
    for key in ("hardware.nodes", "hardware.devices"):
        value = OmegaConf.select(cfg, key)
        if value is not None and key not in given:
            said.append(f"{key}={value}")
    return quote_choices(said)


class _hydra:
    """Hydra with our conf/ for the length of a block; its refusals leave as InputError."""

    def __init__(self, extra_dir: str | None) -> None:
        if extra_dir is not None and not Path(extra_dir).is_dir():
            raise InputError(
                f"--config-dir {extra_dir} does not exist; give a folder of YAML files"
            )
        self._context = initialize_config_dir(str(config_dir()), version_base=VERSION_BASE)

    def __enter__(self) -> None:
        self._context.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)


def _compose(verb: str, words: list[str], extra_dir: str | None) -> DictConfig:
    extra = (
        [] if extra_dir is None else [f"hydra.searchpath=['file://{Path(extra_dir).resolve()}']"]
    )
    with _hydra(extra_dir):
        _parse(words)
        try:
            cfg = compose(verb, overrides=[*extra, *words], return_hydra_config=True)
            rename_targets(cfg)
            return cfg
        except _REFUSALS as error:
            raise InputError(_explain(error, verb, words)) from None


def _parse(words: Sequence[str]) -> list[Any]:
    loader = GlobalHydra.instance().config_loader()
    try:
        return list(OverridesParser.create(config_loader=loader).parse_overrides(list(words)))
    except OverrideParseException as error:
        reason = str(error).splitlines()[0]
        raise InputError(
            f"{error.override} cannot be read as KEY=VALUE ({reason}); put quotes round a value "
            "that holds = , : or a space, as in KEY='\"a=b\"'"
        ) from None


def _mode(cfg: DictConfig) -> str:
    mode = OmegaConf.select(cfg, "hydra.mode")
    return "RUN" if mode is None else str(getattr(mode, "name", mode))


def key_of(word: str) -> str:
    """What a word of a command line sets."""
    return word.partition("=")[0].lstrip("+~").partition("@")[0]


def _explain(error: Exception, verb: str, words: list[str]) -> str:
    """One sentence for a composition that failed: what was given, and what is possible."""
    loader = GlobalHydra.instance().config_loader()
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, choice = error.missing_cfg_file.rpartition("/")
        choices = sorted(option for option in error.options if not option.startswith("_"))
        said = f"{group}={choice} does not exist; {group} is one of {', '.join(choices)}"
        if group == "accumulation":
            said += "; any other number is trainer.accumulate_grad_batches=N"
        return said
    groups = [group for group in loader.list_groups("") if group != "hydra"]
    plain = f"the configuration does not compose: {' '.join(str(error).split())}"
    try:
        known = compose(verb, overrides=[word for word in words if key_of(word) in groups])
    except _REFUSALS:
        try:
            known = compose(verb)
        except _REFUSALS:
            return plain
    keys = _flatten(known)
    taken = [
        group
        for group in groups
        if OmegaConf.select(known, group) is not None or group in _optional(verb)
    ]
    for word in words:
        key = key_of(word)
        if word.startswith("+") or key.startswith("hydra") or key in taken or key in keys:
            continue
        meant = _similar(key, [*taken, *keys])
        hint = (
            f"did you mean {' or '.join(meant)}?" if meant else "--cfg job lists the keys there are"
        )
        return f"{word} names no key of {verb}; {hint}"
    return plain


def _optional(verb: str) -> list[str]:
    """Groups in the verb's defaults list; choices may be null or write to other nodes."""
    groups: list[str] = []
    content = OmegaConf.load(config_dir() / f"{verb}.yaml")
    for item in content.get("defaults", []) if isinstance(content, DictConfig) else []:
        if isinstance(item, str):
            groups += _optional(item) if item != "_self_" else []
        else:
            groups += [str(key).rpartition(" ")[2] for key in item]
    return groups


def _flatten(node: Any, prefix: str = "") -> list[str]:
    if not isinstance(node, DictConfig):
        return []
    keys = []
    for key in map(str, node):
        name = f"{prefix}{key}"
        missing = OmegaConf.is_missing(node, key) or OmegaConf.is_interpolation(node, key)
        keys += [name] if missing else [name, *_flatten(node[key], name + ".")]
    return keys


def _similar(key: str, known: Sequence[str]) -> list[str]:
    """Up to three known names: the same last part elsewhere, else a similar spelling."""
    last = key.rpartition(".")[2]
    same = [name for name in known if name.rpartition(".")[2] == last]
    if same:
        return same[:3]
    whole = difflib.get_close_matches(key, known, n=1, cutoff=0.7)
    if whole:
        return whole
    by_last = {name.rpartition(".")[2]: name for name in reversed(known)}
    return [by_last[name] for name in difflib.get_close_matches(last, by_last, n=1, cutoff=0.75)]
