"""Composes configurations from command-line overrides, and explains Hydra's errors."""

import difflib
import json
import pickle
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from bev_lightning.config.aliases import rename_overrides, rename_targets
from bev_lightning.errors import InputError
from bev_lightning.private_apis import split_sweep

VERSION_BASE = "1.3"
# ${count:${data.classes}} in conf/: the length of a list.
OmegaConf.register_new_resolver("count", len, replace=True)
_HYDRA_ERRORS = (HydraException, OmegaConfBaseException, ValueError)
# Groups whose choices look like numbers, which Hydra refuses as the name of a choice.
_NUMBERED_GROUPS = ("precision", "accumulation")
_BARE_NUMBER = re.compile(r"(?<![\w.'\"-])\d+(?![\w.'\"-])")
# A checkpoint's overrides of its model and data also hold for later evaluations; these, of the
# machine and the training, do not.
_TRAINING_ONLY = re.compile(
    r"(trainer|hardware|cluster|precision|accumulation|strategy|loader|callbacks|logger|debug|sweep|paths|hydra"
    r"|local|ckpt|init_from|resume|source|to|names|strict)([./@]|$)"
)
# A resumed training keeps all of its overrides but those of its directory and its first weights.
ONE_RUN_ONLY = re.compile(r"(paths|hydra|sweep|init_from|resume)([./@]|$)")
# Config groups of the machine, with the key that each sets for the training.
_MACHINE_GROUPS = {
    "hardware": "trainer.accelerator",
    "precision": "trainer.precision",
    "accumulation": "trainer.accumulate_grad_batches",
    "strategy": "trainer.strategy",
}


@dataclass(frozen=True)
class Job:
    """A composed run: its overrides, and its configuration with the ``hydra`` node."""

    overrides: list[str]
    cfg: DictConfig


def config_dir() -> Path:
    """The folder of YAML files: inside an installed package, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    return package / "conf" if (package / "conf").is_dir() else package.parent / "conf"


def load_config(verb: str, overrides: Sequence[str] = ()) -> DictConfig:
    """The configuration of a verb, composed as on the command line but without a run directory.

    Args:
        verb: ``train``, ``evaluate``, ``predict``, ``prepare``, ``convert``, ``plan`` or ``bench``.
        overrides: such as ``hardware=cpu`` and ``precision=16``.

    Raises:
        InputError: one sentence for an unknown key, an unknown choice or an unreadable override.
    """
    cfg = compose_job(verb, overrides).cfg
    with open_dict(cfg):
        cfg.pop("hydra", None)
    return cfg


def get_value(cfg: DictConfig, key: str) -> Any:
    """The value of a dotted key; None where there is none."""
    return OmegaConf.select(cfg, key, default=None)


def quote_choices(argv: Sequence[str]) -> list[str]:
    """``precision=16`` -> ``precision='16'``, also in lists, behind ``+`` or ``++`` and with ``@``.

    Hydra reads a bare number as an integer and refuses it as the name of a choice; only the groups
    whose choices are numbers are touched. ``~/`` at the start of a value becomes the home
    directory, which neither the shell nor Hydra expands there.
    """
    quoted = []
    for argument in argv:
        key, equals, value = argument.partition("=")
        if equals and key.lstrip("+~").partition("@")[0] in _NUMBERED_GROUPS:
            value = _BARE_NUMBER.sub(lambda number: f"'{number.group()}'", value)
        if value.startswith("~/"):
            value = str(Path(value).expanduser())
        quoted.append(key + equals + value)
    return quoted


def compose_job(verb: str, overrides: Sequence[str], extra_dir: str | None = None) -> Job:
    """Compose one run.

    ``ckpt``, or the ``source`` of a conversion, adds the overrides of its model and data below
    ``overrides``; ``resume`` adds all overrides of its run.

    Raises:
        InputError: one sentence for whatever Hydra refuses.
    """
    overrides = rename_overrides(quote_choices(overrides))
    cfg = _compose(verb, overrides, extra_dir)
    resume = OmegaConf.select(cfg, "resume")
    ckpt = resume or OmegaConf.select(cfg, "ckpt") or OmegaConf.select(cfg, "source")
    if ckpt and Path(str(ckpt)).is_file():
        stored = read_overrides(Path(str(ckpt)))
        kept = keep_stored(stored, overrides, resumes=bool(resume))
        if not resume and any(key_of(override) == "experiment" for override in kept):
            # An experiment also sets the machine of the training.
            kept += _keep_machine(cfg, overrides)
        overrides = [*kept, *overrides]
        cfg = _compose(verb, overrides, extra_dir)
    return Job(overrides, cfg)


def compose_jobs(
    verb: str, overrides: Sequence[str], multirun: bool, extra_dir: str | None = None
) -> tuple[bool, list[Job]]:
    """Compose the run, or every run of a sweep; the flag is true for a sweep.

    Raises:
        InputError: one sentence for whatever Hydra refuses.
    """
    overrides = rename_overrides(quote_choices(overrides))
    with _hydra(extra_dir):
        parsed = _parse(overrides)
        first = [
            f"{one.get_key_element()}={next(iter(one.sweep_string_iterator()))}"
            if one.is_discrete_sweep()
            else override
            for one, override in zip(parsed, overrides, strict=True)
        ]
    sweeps = [o for o, one in zip(overrides, parsed, strict=True) if one.is_sweep_override()]
    if sweeps and not multirun:
        # A sweep without -m may still come from a sweep group; otherwise it is a mistake.
        base = _compose(verb, first, extra_dir)
        if _mode(base) != "MULTIRUN":
            raise InputError(
                f"{sweeps[0]} gives several values; put -m in front of it to run one job for each"
            )
    job = compose_job(verb, first, extra_dir)
    if not multirun and _mode(job.cfg) != "MULTIRUN":
        return False, [job]
    sweeper = OmegaConf.select(job.cfg, "hydra.sweeper")
    params = [f"{key}={value}" for key, value in (sweeper.get("params") or {}).items()]
    if not str(sweeper["_target_"]).endswith(".BasicSweeper"):
        return True, [job]  # it chooses its jobs while it runs: check the first values
    with _hydra(extra_dir):
        split = split_sweep(_parse(rename_overrides(quote_choices(params + overrides))))
    return True, [compose_job(verb, one, extra_dir) for one in split]


def keep_stored(stored: Sequence[str], given: Sequence[str], resumes: bool = False) -> list[str]:
    """A checkpoint's overrides of model and data that the command line does not replace.

    Args:
        resumes: keep the overrides of the training too.
    """
    keys = {key_of(override) for override in given}
    groups = {key for key in keys if "." not in key}
    keys |= {written for group, written in _MACHINE_GROUPS.items() if group in groups}
    dropped = ONE_RUN_ONLY if resumes else _TRAINING_ONLY
    return [
        override
        for override in stored
        if not dropped.match(key_of(override))
        and key_of(override) not in keys
        and key_of(override).partition(".")[0] not in groups
    ]


def read_overrides(checkpoint: Path) -> list[str]:
    """The overrides of a checkpoint's run, under present names; none for a file of other origin.

    Executes nothing that the file holds, and leaves its tensors on the disk.
    """
    # Imports torch, which takes seconds: only runs that load the checkpoint anyway come here.
    import torch
    from safetensors import SafetensorError, safe_open

    try:
        if checkpoint.suffix == ".safetensors":
            with safe_open(checkpoint, framework="pt") as file:
                stored = json.loads(file.metadata()["overrides"])
        else:
            content = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)
            stored = content["bev_lightning"]["overrides"]
        return rename_overrides([str(override) for override in stored])
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


def key_of(override: str) -> str:
    """The key that an override sets."""
    return override.partition("=")[0].lstrip("+~").partition("@")[0]


def _keep_machine(cfg: DictConfig, overrides: Sequence[str]) -> list[str]:
    """Overrides for the machine's groups as composed, except those already in ``overrides``."""
    given = {key_of(override) for override in overrides}
    choices = OmegaConf.select(cfg, "hydra.runtime.choices") or {}
    values = {group: choices.get(group) for group in _MACHINE_GROUPS}
    values |= {key: get_value(cfg, key) for key in ("hardware.nodes", "hardware.devices")}
    return quote_choices(
        [f"{k}={value}" for k, value in values.items() if value is not None and k not in given]
    )


@contextmanager
def _hydra(extra_dir: str | None) -> Iterator[None]:
    """Context in which Hydra composes from conf/."""
    if extra_dir is not None and not Path(extra_dir).is_dir():
        raise InputError(f"--config-dir {extra_dir} does not exist; give a folder of YAML files")
    with initialize_config_dir(str(config_dir()), version_base=VERSION_BASE):
        yield


def _compose(verb: str, overrides: list[str], extra_dir: str | None) -> DictConfig:
    extra = (
        [] if extra_dir is None else [f"hydra.searchpath=['file://{Path(extra_dir).resolve()}']"]
    )
    with _hydra(extra_dir):
        _parse(overrides)
        try:
            cfg = compose(verb, overrides=[*extra, *overrides], return_hydra_config=True)
        except _HYDRA_ERRORS as error:
            raise InputError(_explain(error, verb, overrides)) from None
    rename_targets(cfg)
    return cfg


def _parse(overrides: Sequence[str]) -> list[Any]:
    loader = GlobalHydra.instance().config_loader()
    try:
        return list(OverridesParser.create(config_loader=loader).parse_overrides(list(overrides)))
    except OverrideParseException as error:
        reason = str(error).splitlines()[0]
        raise InputError(
            f"{error.override} cannot be read as KEY=VALUE ({reason}); put quotes round a value "
            "that holds = , : or a space, as in KEY='\"a=b\"'"
        ) from None


def _mode(cfg: DictConfig) -> str:
    mode = OmegaConf.select(cfg, "hydra.mode")
    return "RUN" if mode is None else str(getattr(mode, "name", mode))


def _explain(error: Exception, verb: str, overrides: list[str]) -> str:
    """One sentence for a composition that failed: what was given, and what is possible."""
    loader = GlobalHydra.instance().config_loader()
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, choice = error.missing_cfg_file.rpartition("/")
        choices = sorted(option for option in error.options if not option.startswith("_"))
        sentence = f"{group}={choice} does not exist; {group} is one of {', '.join(choices)}"
        if group == "accumulation":
            sentence += "; any other number is trainer.accumulate_grad_batches=N"
        return sentence
    unexplained = f"the configuration does not compose: {' '.join(str(error).split())}"
    groups = [group for group in loader.list_groups("") if group != "hydra"]
    chosen = [override for override in overrides if key_of(override) in groups]
    try:
        known = compose(verb, overrides=chosen, return_hydra_config=True)
    except _HYDRA_ERRORS:
        try:
            known = compose(verb, return_hydra_config=True)
        except _HYDRA_ERRORS:
            return unexplained
    names = [*map(str, known.hydra.runtime.choices), *_flatten(known)]
    names = [name for name in names if not name.startswith("hydra")]
    for override in overrides:
        key = key_of(override)
        # A group within a group, such as data/gt_sampling.
        nested = "/" in key and (config_dir() / key).is_dir()
        if override.startswith("+") or key.startswith("hydra") or nested or key in names:
            continue
        similar = " or ".join(_similar(key, names))
        hint = f"did you mean {similar}?" if similar else "--cfg job lists the keys there are"
        return f"{override} names no key of {verb}; {hint}"
    return unexplained


def _flatten(node: Any, prefix: str = "") -> list[str]:
    """All dotted keys, without those that an interpolation brings."""
    if not isinstance(node, DictConfig):
        return []
    keys = []
    for key in map(str, node):
        keys.append(prefix + key)
        if not OmegaConf.is_missing(node, key) and not OmegaConf.is_interpolation(node, key):
            keys += _flatten(node[key], f"{prefix}{key}.")
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
