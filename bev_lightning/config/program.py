"""Makes a program of a verb: one configuration in, one run directory out.

``load`` composes for tests and notebooks, ``entry`` for the command line. What is refused is
refused in one sentence before Hydra makes a run directory.
"""

import functools
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from bev_lightning import __version__
from bev_lightning.config.aliases import rename_overrides, rename_targets
from bev_lightning.config.auto_batch import find_batch
from bev_lightning.config.compose import (
    VERSION_BASE,
    Job,
    compose_job,
    compose_jobs,
    config_dir,
    key_of,
    quote_choices,
)
from bev_lightning.config.resolve import plan_batch, resolve
from bev_lightning.config.resume import settle_resume
from bev_lightning.config.validate import check, check_machine
from bev_lightning.errors import InputError
from bev_lightning.hardware import cluster
from bev_lightning.hardware.machine import Machine, detect_machine

__all__ = [
    "check",
    "check_machine",
    "config_dir",
    "entry",
    "load",
    "quote_choices",
    "resolve",
    "write_json",
]

_PACKAGES = ("torch", "lightning", "hydra-core", "nvidia-dali-cuda130", "nuscenes-devkit", "numpy")


def load(verb: str, overrides: Sequence[str] = ()) -> DictConfig:
    """The composed configuration of a verb, as the command line would compose it.

    Args:
        verb: ``train``, ``evaluate``, ``predict`` or ``prepare``.
        overrides: words of a command line, such as ``hardware=cpu`` and ``precision=16``.

    Raises:
        InputError: one sentence for an unknown key, an unknown choice or an unreadable word.
    """
    cfg = compose_job(verb, overrides).cfg
    with open_dict(cfg):
        cfg.pop("hydra", None)
    return cfg


def entry(verb: str) -> Callable[[Callable[[DictConfig], Any]], Callable[[], None]]:
    """Turn ``main(cfg)`` into the program of a verb.

    ``main`` receives the resolved configuration, read-only; ``cfg.paths.run`` is the run directory,
    which already holds config.yaml, resolved.yaml and run.json. In a sweep each job is a process of
    its own and the sweeper reads NDS from the job's score.json. InputError ends the program with
    one sentence and exit code 2.
    """

    def decorate(main: Callable[[DictConfig], Any]) -> Callable[[], None]:
        @functools.wraps(main)
        def program() -> None:
            try:
                _Program(verb, main).run()
            except InputError as error:
                _refuse(verb, error)
            cluster.exit_distributed(0)

        return program

    return decorate


class _Program:
    """One start of a verb from the command line."""

    def __init__(self, verb: str, main: Callable[[DictConfig], Any]) -> None:
        self.verb = verb
        self.main = main
        self.typed = list(sys.argv[1:])
        # Here, not in a job: a launcher may run that on another machine.
        spec = getattr(sys.modules.get(main.__module__), "__spec__", None)
        self.program = ["-m", spec.name] if spec is not None else [os.path.abspath(sys.argv[0])]
        self.machine = Machine()
        self.results: Path | None = None
        self.failure: InputError | None = None
        self.is_sweep = False
        self.flags: list[str] = []

    def run(self) -> None:
        parser = get_args_parser()
        args = parser.parse_intermixed_args(quote_choices(self.typed))
        words = rename_overrides(args.overrides)
        if cluster.is_rank_zero():
            for former, present in zip(args.overrides, words, strict=True):
                if former != present:
                    _note(self.verb, f"{former} is now {present}; use the new name")
        self.flags = [word for word in quote_choices(self.typed) if word not in args.overrides]
        shows = args.help or args.hydra_help or args.cfg or args.info or args.shell_completion
        if args.cfg or args.info:
            words = compose_job(self.verb, words, args.config_dir).overrides
        if shows or args.experimental_rerun:
            self._hydra(words)
            return
        self.machine = detect_machine()
        self._hydra(self._settle(words, args.multirun, args.config_dir))
        self._close()

    def _settle(self, words: list[str], multirun: bool, extra_dir: str | None) -> list[str]:
        """The words that this process runs with; whatever is refused is refused here.

        All processes of one run get the same run directory and the same checkpoint to go on from:
        Lightning's children repeat the words of the first process, those of torchrun get them from
        it, those of SLURM come to the same result.
        """
        launcher = cluster.find_launcher()
        if launcher == "torchrun":
            cluster.init_store()
        if not cluster.is_rank_zero() and launcher != "slurm":
            return list(cluster.broadcast_value("words")) if launcher else words
        # Hydra makes the directory.
        words = [
            f"hydra.run.dir={word.partition('=')[2]}" if key_of(word) == "paths.run" else word
            for word in words
        ]
        is_sweep, jobs = compose_jobs(self.verb, words, multirun, extra_dir)
        if is_sweep:
            if any(key_of(word) == "hydra.run.dir" for word in words):
                raise InputError(
                    "paths.run (or hydra.run.dir) is the directory of one run and this is a sweep; "
                    "set hydra.sweep.dir"
                )
            for job in jobs:
                self._admit(job)
            self.is_sweep = True
            self.results = Path(str(OmegaConf.select(jobs[0].cfg, "hydra.sweep.dir"))).resolve()
            _check_place("hydra.sweep.dir", self.results)
            return [*words, f'hydra.sweep.dir="{self.results}"']
        (job,) = jobs
        place: Path | None = None
        given = any(key_of(word) == "hydra.run.dir" for word in job.overrides)
        if launcher is not None and not given:
            place = Path(str(OmegaConf.select(job.cfg, "hydra.run.dir")))
            if launcher == "slurm":
                place = cluster.slurm_run_dir(place)
            elif cluster.is_restart():
                place = Path(cluster.read_first_broadcast("place") or place)
            else:
                cluster.broadcast_value("place", str(place))
        asks = OmegaConf.select(job.cfg, "resume", default=None)
        if asks == "auto" or (self.verb == "train" and asks is None and cluster.is_restart()):
            job, found = settle_resume(self.verb, job, extra_dir, place)
            if cluster.is_rank_zero():
                print(f"bev_lightning.{self.verb}: {found}", flush=True)
        if cluster.is_rank_zero():
            self._admit(job)
            run_dir = place or Path(str(OmegaConf.select(job.cfg, "hydra.run.dir")))
            _check_place("hydra.run.dir", run_dir)
        if self.verb == "train" and job.cfg.auto_batch:
            job = self._settle_batch(job, launcher)
        words = job.overrides
        if place is not None and not any(key_of(word) == "hydra.run.dir" for word in words):
            words = [*words, f'hydra.run.dir="{place}"']
        return list(cluster.broadcast_value("words", words)) if launcher == "torchrun" else words

    def _admit(self, job: Job) -> None:
        check(job.cfg)
        check_machine(job.cfg, self.machine)
        # Once more for what `auto` turned out to be.
        resolved = resolve(job.cfg, self.machine)
        check(resolved)
        check_machine(resolved, self.machine)
        if "hardware" in resolved:
            cluster.check_world_size(resolved.hardware.nodes, resolved.hardware.devices)

    def _settle_batch(self, job: Job, launcher: str | None) -> Job:
        """The job with the largest micro-step that fits, before any process of it starts."""
        if launcher is not None:
            raise InputError(
                "auto_batch=true starts processes of its own, which a launcher such as torchrun or "
                "SLURM does not know; run it once without, and give the launcher the "
                "data.batch_size and accumulation that it finds"
            )
        resolved = resolve(job.cfg, self.machine)
        limit = resolved.hardware.memory_gib if resolved.trainer.accelerator == "cpu" else None
        words = find_batch(job.overrides, plan_batch(resolved), limit)
        return compose_job(self.verb, words)

    def _hydra(self, words: list[str]) -> None:
        # Lightning starts its other processes with these words, so that they compose the same.
        sys.argv[1:] = [*self.flags, *words]
        program = hydra.main(
            version_base=VERSION_BASE, config_path=str(config_dir()), config_name=self.verb
        )(self._task)
        program()

    def _task(self, cfg: DictConfig) -> Any:
        """What Hydra calls: the run itself, or one job of a sweep."""
        info = HydraConfig.get()
        run_dir = Path(info.runtime.output_dir)
        if info.mode == RunMode.MULTIRUN:
            return self._run_job(run_dir, list(info.overrides.task))
        self.results = run_dir
        if cluster.is_rank_zero():
            for former, present in rename_targets(cfg).items():
                _note(
                    self.verb, f"_target_: {former} is now {present}; change it in your YAML file"
                )
        resolved = resolve(cfg, self.machine, run_dir)
        if "hardware" in resolved:
            cluster.set_default_environment(resolved.hardware.environment or {})
        if cluster.is_rank_zero():
            _describe(run_dir, cfg, resolved, self.machine, list(info.overrides.task))
        try:
            return self.main(resolved)
        except InputError as error:
            self.failure = error
            return None

    def _run_job(self, run_dir: Path, words: list[str]) -> float:
        """A job of a sweep, in its own process.

        Lightning's DDP children repeat the command line they find, and only the command line of a
        single run starts them on the same job.
        """
        flags = [flag for flag in self.flags if flag not in ("-m", "--multirun")]
        place = [f'hydra.run.dir="{run_dir}"', "hydra.mode=RUN"]
        start = time.perf_counter()
        exit_code = subprocess.run(
            [sys.executable, *self.program, *flags, *words, *place],
            # Lightning starts the job's processes, also where a launcher got it a node of SLURM.
            env={**os.environ, "SLURM_JOB_NAME": "bash"},
            check=False,
        ).returncode
        nds = _read_nds(run_dir)
        row = {
            "dir": run_dir.name,
            "overrides": words,
            "exit_code": exit_code,
            "NDS": nds,
            "wall_s": round(time.perf_counter() - start, 1),
        }
        run_dir.mkdir(parents=True, exist_ok=True)
        write_json(run_dir / "job.json", row)
        return float("nan") if nds is None else nds

    def _close(self) -> None:
        """Say how it went; the last line names the run directory."""
        if not cluster.is_rank_zero():
            if self.failure is not None:
                # Lightning ends the first process with its children: this may be all one sees.
                raise InputError(f"process {os.environ.get('LOCAL_RANK')}: {self.failure}")
            return
        if self.failure is not None:
            raise self.failure
        if self.results is None:
            return
        if self.is_sweep:
            self._close_sweep(self.results)
        print(f"Results: {_short(self.results)}", flush=True)

    def _close_sweep(self, sweep_dir: Path) -> None:
        rows = [json.loads(path.read_text()) for path in sweep_dir.glob("*/job.json")]
        rows.sort(key=lambda row: (len(row["dir"]), row["dir"]))
        write_json(sweep_dir / "sweep.json", {"verb": self.verb, "jobs": rows})
        for row in rows:
            nds = "-" if row["NDS"] is None else f"{row['NDS']:.3f}"
            state = "" if row["exit_code"] == 0 else f"  FAILED with exit code {row['exit_code']}"
            print(f"{row['dir']:>4}  NDS {nds}  {' '.join(row['overrides'])}{state}")
        failed = [row["dir"] for row in rows if row["exit_code"] != 0]
        if failed:
            raise InputError(
                f"{len(failed)} of {len(rows)} jobs failed: {', '.join(failed)} in "
                f"{_short(sweep_dir)}; their messages stand above"
            )


def _refuse(verb: str, error: InputError) -> NoReturn:
    sys.stdout.flush()
    print(f"bev_lightning.{verb}: {error}", file=sys.stderr, flush=True)
    cluster.exit_distributed(2)
    sys.exit(2)


def _note(verb: str, sentence: str) -> None:
    print(f"bev_lightning.{verb}: {sentence}", file=sys.stderr, flush=True)


def _check_place(key: str, path: Path) -> None:
    there = next(one for one in (path, *path.absolute().parents) if one.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise InputError(
            f"{key}={path} cannot be made: {there} is no folder that this user may write to; "
            f"choose another"
        )


def _short(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _describe(
    run_dir: Path, cfg: DictConfig, resolved: DictConfig, machine: Machine, words: list[str]
) -> None:
    batch = {}
    if resolved.verb == "train":
        plan, optim = plan_batch(resolved), resolved.optim
        batch = {
            "batch": {
                **asdict(plan),
                "effective_batch": plan.effective_batch,
                "learning_rate": plan.scale_lr(
                    optim.lr, optim.get("scale_lr"), optim.get("base_batch")
                ),
            }
        }
    OmegaConf.save(cfg, run_dir / "config.yaml")
    OmegaConf.save(resolved, run_dir / "resolved.yaml")
    write_json(
        run_dir / "run.json",
        {
            "command": shlex.join([sys.executable, *sys.orig_argv[1:]]),
            "argv": sys.argv[1:],
            "overrides": words,
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "git": _git_revision(),
            "python": sys.version.split()[0],
            "versions": {"bev_lightning": __version__}
            | {name: _version(name) for name in _PACKAGES},
            "machine": machine.to_dict(),
            **batch,
        },
    )


def _git_revision() -> dict[str, Any] | None:
    """Revision of the checkout this package runs from; None outside of one."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        git = ["git", "-C", str(root)]
        revision = subprocess.run(
            [*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        )
        changed = subprocess.run(
            [*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return {"revision": revision.stdout.strip(), "changed": bool(changed.stdout.strip())}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _read_nds(run_dir: Path) -> float | None:
    try:
        return float(json.loads((run_dir / "score.json").read_text())["NDS"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a result of the run, readable for people and programs."""
    path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")
