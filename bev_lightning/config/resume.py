"""``resume=auto``: which run a training goes on with, and from which of its checkpoints."""

import json
import zipfile
from collections.abc import Sequence
from pathlib import Path

from omegaconf import OmegaConf

from bev_lightning.config.aliases import rename_overrides
from bev_lightning.config.compose import ONE_RUN_ONLY, Job, compose_job, key_of


def settle_resume(
    verb: str, job: Job, extra_dir: str | None = None, run_dir: Path | None = None
) -> tuple[Job, str]:
    """A job with the file in the place of ``resume=auto``, or without a resume where there is none.

    The run is that of the directory that ``hydra.run.dir`` names. Without the word it is the
    newest with the same words, which goes on in its directory.

    Args:
        job: of a single run.
        run_dir: where to look first, unless ``hydra.run.dir`` is given.

    Returns:
        the job, and one sentence about what was found.
    """
    # Late, for it brings torch: only runs that load a checkpoint anyway come here.
    from bev_lightning.callbacks.checkpoint import step_of

    words = [word for word in job.overrides if key_of(word) != "resume"]
    given = any(key_of(word) == "hydra.run.dir" for word in words)
    if given:
        runs = [Path(str(OmegaConf.select(job.cfg, "hydra.run.dir")))]
        nothing = f"{runs[0]} has no checkpoint yet"
    else:
        runs = [run_dir] if run_dir is not None else []
        runs += find_runs(Path(str(job.cfg.paths.output)) / verb, words)
        nothing = "no run with these words has a checkpoint yet"
    damaged: list[Path] = []
    for run in runs:
        checkpoint = find_checkpoint(run / "checkpoints", damaged)
        if checkpoint is None:
            continue
        found = f"going on from {checkpoint} (optimizer step {step_of(checkpoint)})"
        place = [] if given else [f'hydra.run.dir="{run}"']
        words = [word for word in words if key_of(word) != "init_from"]  # that was its beginning
        job = compose_job(verb, [*words, *place, f'resume="{checkpoint}"'], extra_dir)
        return job, f"resume=auto: {found}{_tell(damaged)}"
    job = compose_job(verb, words, extra_dir)
    return job, f"resume=auto: {nothing}, so a new training begins{_tell(damaged)}"


def find_runs(folder: Path, words: Sequence[str]) -> list[Path]:
    """Run directories that were started with the same words, the newest first; what names a place
    or a beginning does not count."""
    wanted = _essence(words)
    found = []
    for description in folder.glob("*/run.json"):
        try:
            told = json.loads(description.read_text())
            if _essence(told["overrides"]) == wanted:
                found.append((str(told["started"]), description.parent))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # of another program, or half written
    return [run for _, run in sorted(found, reverse=True)]


def find_checkpoint(folder: Path, damaged: list[Path] | None = None) -> Path | None:
    """The newest whole checkpoint of a folder.

    Every byte is read and compared with the file's own check sums: torch would load a file with
    pages that never reached the disk.

    Args:
        damaged: newer files that are not whole are added to it.
    """
    from bev_lightning.callbacks.checkpoint import list_steps

    for path in reversed(list_steps(folder)):
        try:
            with zipfile.ZipFile(path) as file:
                if file.testzip() is None:
                    return path
        except (OSError, zipfile.BadZipFile):
            pass
        if damaged is not None:
            damaged.append(path)
    return None


def _essence(words: Sequence[str]) -> list[str]:
    return sorted(word for word in rename_overrides(words) if not ONE_RUN_ONLY.match(key_of(word)))


def _tell(damaged: Sequence[Path]) -> str:
    return f"; left out as damaged: {', '.join(map(str, damaged))}" if damaged else ""
