"""Command-line entry point: composes and validates the config, then creates the run directory.

A refused configuration ends the program with one sentence before Hydra creates a directory.
"""

import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

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
from bev_lightning.config.resume import find_resume
from bev_lightning.config.run_directory import (
    check_writable,
    read_nds,
    shorten_path,
    write_json,
    write_run_directory,
)
from bev_lightning.config.validate import check_config, check_machine
from bev_lightning.errors import InputError
from bev_lightning.hardware import cluster
from bev_lightning.hardware.machine import Machine, detect_machine
from bev_lightning.private_apis import hydra_argument_parser

_Main = Callable[[DictConfig], Any]


def entry(verb: str) -> Callable[[_Main], Callable[[], None]]:
    """Turns ``main(cfg)`` into the command-line program of a verb.

    ``main`` receives the resolved, read-only configuration; ``cfg.paths.run`` is the run directory,
    which already holds config.yaml, resolved.yaml and run.json. In a sweep each job is its own
    process, and the sweeper reads NDS from the job's score.json. InputError ends the program with
    one sentence and exit code 2.
    """

    def decorate(main: _Main) -> Callable[[], None]:
        @functools.wraps(main)
        def program() -> None:
            try:
                _Program(verb, main).run()
            except InputError as error:
                sys.stdout.flush()
                print(f"bev_lightning.{verb}: {error}", file=sys.stderr, flush=True)
                cluster.exit_distributed(2)
                sys.exit(2)
            cluster.exit_distributed(0)

        return program

    return decorate


class _Program:
    """One invocation of a verb from the command line."""

    def __init__(self, verb: str, main: _Main) -> None:
        self.verb = verb
        self.main = main
        self.argv = quote_choices(sys.argv[1:])
        # Read here, not in a job: a launcher may run that on another machine.
        spec = getattr(sys.modules.get(main.__module__), "__spec__", None)
        self.program = ["-m", spec.name] if spec is not None else [os.path.abspath(sys.argv[0])]
        self.machine = Machine()
        self.result_dir: Path | None = None
        self.failure: InputError | None = None
        self.is_sweep = False
        self.flags: list[str] = []

    def run(self) -> None:
        args = hydra_argument_parser().parse_intermixed_args(self.argv)
        overrides = self._rename(args.overrides)
        self.flags = [argument for argument in self.argv if argument not in args.overrides]
        shows = args.help or args.hydra_help or args.cfg or args.info or args.shell_completion
        if args.cfg or args.info:
            overrides = compose_job(self.verb, overrides, args.config_dir).overrides
        if shows or args.experimental_rerun:
            self._run_hydra(overrides)
            return
        self.machine = detect_machine()
        self._run_hydra(self._prepare(overrides, args.multirun, args.config_dir))
        self._finish()

    def _rename(self, overrides: list[str]) -> list[str]:
        renamed = rename_overrides(overrides)
        for former, present in zip(overrides, renamed, strict=True):
            if former != present:
                self._warn(f"{former} is now {present}; use the new name")
        return renamed

    def _prepare(self, overrides: list[str], multirun: bool, extra_dir: str | None) -> list[str]:
        """Validates everything; returns the overrides that Hydra runs with.

        All processes of one run get the same run directory and resume from the same checkpoint:
        Lightning's child processes repeat the first process' command line, torchrun's receive it
        from the first process, SLURM's compute the same result.

        Raises:
            InputError: one sentence about what is refused.
        """
        launcher = cluster.find_launcher()
        if launcher == "torchrun":
            cluster.init_store()
        if not cluster.is_rank_zero() and launcher != "slurm":
            return list(cluster.broadcast_value("overrides")) if launcher else overrides
        # Hydra creates the directory.
        overrides = [
            f"hydra.run.dir={override.partition('=')[2]}"
            if key_of(override) == "paths.run"
            else override
            for override in overrides
        ]
        is_sweep, jobs = compose_jobs(self.verb, overrides, multirun, extra_dir)
        if is_sweep:
            return self._prepare_sweep(overrides, jobs)
        overrides = self._prepare_job(jobs[0], extra_dir, launcher)
        if launcher == "torchrun":
            overrides = list(cluster.broadcast_value("overrides", overrides))
        return overrides

    def _prepare_sweep(self, overrides: list[str], jobs: list[Job]) -> list[str]:
        if _sets_run_dir(overrides):
            raise InputError(
                "paths.run (or hydra.run.dir) is the directory of one run and this is a sweep; "
                "set hydra.sweep.dir"
            )
        for job in jobs:
            self._check(job)
        self.is_sweep = True
        self.result_dir = Path(str(OmegaConf.select(jobs[0].cfg, "hydra.sweep.dir"))).resolve()
        check_writable("hydra.sweep.dir", self.result_dir)
        return [*overrides, f'hydra.sweep.dir="{self.result_dir}"']

    def _prepare_job(self, job: Job, extra_dir: str | None, launcher: str | None) -> list[str]:
        run_dir: Path | None = None
        if launcher is not None and not _sets_run_dir(job.overrides):
            run_dir = _agree_on_run_dir(job, launcher)
        resume = OmegaConf.select(job.cfg, "resume", default=None)
        if resume == "auto" or (self.verb == "train" and resume is None and cluster.is_restart()):
            job, message = find_resume(self.verb, job, extra_dir, run_dir)
            if cluster.is_rank_zero():
                print(f"bev_lightning.{self.verb}: {message}", flush=True)
        if cluster.is_rank_zero():
            self._check(job)
            created = run_dir or Path(str(OmegaConf.select(job.cfg, "hydra.run.dir")))
            check_writable("hydra.run.dir", created)
        if self.verb == "train" and job.cfg.auto_batch:
            job = self._find_batch(job, launcher)
        if run_dir is not None and not _sets_run_dir(job.overrides):
            return [*job.overrides, f'hydra.run.dir="{run_dir}"']
        return job.overrides

    def _check(self, job: Job) -> None:
        check_config(job.cfg)
        check_machine(job.cfg, self.machine)
        # Again for the values that replace `auto`.
        resolved = resolve(job.cfg, self.machine)
        check_config(resolved)
        check_machine(resolved, self.machine)
        if "hardware" in resolved:
            cluster.check_world_size(resolved.hardware.nodes, resolved.hardware.devices)

    def _find_batch(self, job: Job, launcher: str | None) -> Job:
        """The job with the largest micro-step that fits, before any of its processes starts."""
        if launcher is not None:
            raise InputError(
                "auto_batch=true starts its own processes, which torchrun and SLURM do not know; "
                "run it once without a launcher, then give the data.batch_size and accumulation "
                "that it finds"
            )
        resolved = resolve(job.cfg, self.machine)
        limit = resolved.hardware.memory_gib if resolved.trainer.accelerator == "cpu" else None
        return compose_job(self.verb, find_batch(job.overrides, plan_batch(resolved), limit))

    def _run_hydra(self, overrides: list[str]) -> None:
        # Lightning starts its other processes with this command line, so that they compose alike.
        sys.argv[1:] = [*self.flags, *overrides]
        program = hydra.main(
            version_base=VERSION_BASE, config_path=str(config_dir()), config_name=self.verb
        )(self._task)
        program()

    def _task(self, cfg: DictConfig) -> Any:
        """Called by Hydra: the run itself, or one job of a sweep."""
        info = HydraConfig.get()
        run_dir = Path(info.runtime.output_dir)
        if info.mode == RunMode.MULTIRUN:
            return self._run_job(run_dir, list(info.overrides.task))
        self.result_dir = run_dir
        for former, present in rename_targets(cfg).items():
            self._warn(f"_target_: {former} is now {present}; change it in your YAML file")
        resolved = resolve(cfg, self.machine, run_dir)
        if "hardware" in resolved:
            cluster.set_default_environment(resolved.hardware.environment or {})
        if cluster.is_rank_zero():
            write_run_directory(run_dir, cfg, resolved, self.machine, info.overrides.task)
        try:
            return self.main(resolved)
        except InputError as error:
            self.failure = error
            return None

    def _run_job(self, run_dir: Path, overrides: list[str]) -> float:
        """A job of a sweep, in its own process.

        Lightning's DDP child processes repeat the command line of their parent, and only that of a
        single run starts them on the same job.
        """
        flags = [flag for flag in self.flags if flag not in ("-m", "--multirun")]
        single = [f'hydra.run.dir="{run_dir}"', "hydra.mode=RUN"]
        start = time.perf_counter()
        exit_code = subprocess.run(
            [sys.executable, *self.program, *flags, *overrides, *single],
            # Lightning starts the job's processes, also on a node that SLURM granted.
            env={**os.environ, "SLURM_JOB_NAME": "bash"},
            check=False,
        ).returncode
        nds = read_nds(run_dir)
        row = {
            "dir": run_dir.name,
            "overrides": overrides,
            "exit_code": exit_code,
            "NDS": nds,
            "wall_s": round(time.perf_counter() - start, 1),
        }
        run_dir.mkdir(parents=True, exist_ok=True)
        write_json(run_dir / "job.json", row)
        return float("nan") if nds is None else nds

    def _finish(self) -> None:
        """Reports the outcome; the last line names the run directory."""
        if not cluster.is_rank_zero():
            if self.failure is not None:
                # Lightning ends the first process with its children: this may be all one sees.
                raise InputError(f"process {os.environ.get('LOCAL_RANK')}: {self.failure}")
            return
        if self.failure is not None:
            raise self.failure
        if self.result_dir is None:
            return
        if self.is_sweep:
            self._finish_sweep(self.result_dir)
        print(f"Results: {shorten_path(self.result_dir)}", flush=True)

    def _finish_sweep(self, sweep_dir: Path) -> None:
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
                f"{shorten_path(sweep_dir)}; see their messages above"
            )

    def _warn(self, message: str) -> None:
        if cluster.is_rank_zero():
            print(f"bev_lightning.{self.verb}: {message}", file=sys.stderr, flush=True)


def _sets_run_dir(overrides: list[str]) -> bool:
    return any(key_of(override) == "hydra.run.dir" for override in overrides)


def _agree_on_run_dir(job: Job, launcher: str) -> Path:
    """One run directory for all processes that a launcher started, also after a restart."""
    run_dir = Path(str(OmegaConf.select(job.cfg, "hydra.run.dir")))
    if launcher == "slurm":
        return cluster.slurm_run_dir(run_dir)
    if cluster.is_restart():
        return Path(cluster.read_first_broadcast("run_dir") or run_dir)
    cluster.broadcast_value("run_dir", str(run_dir))
    return run_dir
