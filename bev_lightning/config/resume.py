"""Finds the run and the checkpoint for ``resume=auto``."""

import json
import zipfile
from collections.abc import Sequence
from pathlib import Path

from omegaconf import OmegaConf

from bev_lightning.config.aliases import rename_overrides
from bev_lightning.config.compose import ONE_RUN_ONLY, Job, compose_job, key_of


def find_resume(
    verb: str, job: Job, extra_dir: str | None = None, run_dir: Path | None = None
) -> tuple[Job, str]:
    """The job with a checkpoint for ``resume=auto``, or without ``resume`` if there is none; and a
    message about what was found.

    Looks in the directory that ``hydra.run.dir`` names. If that is not set, looks in ``run_dir``,
    then takes the newest run with the same overrides and continues in its directory.
    """
    # Imports torch, so it stays here: only runs that load a checkpoint anyway come this far.
    from bev_lightning.callbacks.checkpoint import step_of

    overrides = [override for override in job.overrides if key_of(override) != "resume"]
    given = any(key_of(override) == "hydra.run.dir" for override in overrides)
    if given:
        runs = [Path(str(OmegaConf.select(job.cfg, "hydra.run.dir")))]
        nothing = f"{runs[0]} has no checkpoint yet"
    else:
        runs = [run_dir] if run_dir is not None else []
        runs += find_runs(Path(str(job.cfg.paths.output)) / verb, overrides)
        nothing = "no run with these overrides has a checkpoint yet"
    damaged: list[Path] = []
    for run in runs:
        checkpoint = find_checkpoint(run / "checkpoints", damaged)
        if checkpoint is None:
            continue
        found = f"continuing from {checkpoint} (optimizer step {step_of(checkpoint)})"
        same_run = [] if given else [f'hydra.run.dir="{run}"']
        # The resumed run has loaded it already.
        overrides = [override for override in overrides if key_of(override) != "init_from"]
        overrides += [*same_run, f'resume="{checkpoint}"']
        break
    else:
        found = f"{nothing}, starting a new training"
    skipped = f"; skipped as damaged: {', '.join(map(str, damaged))}" if damaged else ""
    return compose_job(verb, overrides, extra_dir), f"resume=auto: {found}{skipped}"


def find_runs(folder: Path, overrides: Sequence[str]) -> list[Path]:
    """Run directories that were started with the same overrides, the newest first.

    Overrides of paths and of the first weights do not count.
    """
    wanted = _comparable(overrides)
    found = []
    for description in folder.glob("*/run.json"):
        try:
            run = json.loads(description.read_text())
            if _comparable(run["overrides"]) == wanted:
                found.append((str(run["started"]), description.parent))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # of another program, or half written
    return [run for _, run in sorted(found, reverse=True)]


def find_checkpoint(folder: Path, damaged: list[Path]) -> Path | None:
    """The newest undamaged checkpoint of a folder.

    Reads every byte and compares it with the file's check sums: torch would load a file with
    pages that never reached the disk.

    Args:
        damaged: receives newer files that are damaged.
    """
    from bev_lightning.callbacks.checkpoint import list_steps

    for path in reversed(list_steps(folder)):
        try:
            with zipfile.ZipFile(path) as file:
                if file.testzip() is None:
                    return path
        except (OSError, zipfile.BadZipFile):
            pass
        damaged.append(path)
    return None


def _comparable(overrides: Sequence[str]) -> list[str]:
    renamed = rename_overrides(overrides)
    return sorted(override for override in renamed if not ONE_RUN_ONLY.match(key_of(override)))
