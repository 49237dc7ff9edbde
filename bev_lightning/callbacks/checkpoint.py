"""Saves checkpoints at optimizer steps, atomically, for an exact resume."""

import os
import shutil
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO

from bev_lightning.callbacks.stop_signals import Stopped, StopRequest
from bev_lightning.checks import check_number
from bev_lightning.errors import InputError
from bev_lightning.private_apis import epoch_is_done, validation_is_due


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes checkpoints atomically: a file with the final name is always complete.

    The file is written under another name in the same folder, flushed to the disk and renamed, so
    that a kill or a power failure at any moment leaves no partial file.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        target = Path(path)
        partial = target.with_name(f".{target.name.lstrip('.')}.partial")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            rename(partial, target)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise InputError(
                f"the checkpoint {target} could not be written ({error.strerror or error}); free "
                "disk space or fix permissions, and go on from the previous checkpoint with "
                "resume=auto"
            ) from error


def rename(source: Path, target: Path) -> None:
    """Rename a file within its folder and flush the folder to the disk."""
    os.replace(source, target)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


class StepCheckpoint(Checkpoint):
    """Saves ``step_000100.ckpt`` every few optimizer steps, at the end and on a stop signal.

    The newest file is also ``last.ckpt``.

    Every file holds the state between two optimizer steps, without partly accumulated gradients,
    after the validation of that step, if there is one. It gets its final name once the loggers'
    rows up to its step are on the disk, so that a resumed training repeats lost rows and misses
    none. (Lightning's ModelCheckpoint writes last.ckpt only with a new best, possibly within an
    accumulation after a resume, and before the row of its step.)

    Args:
        dirpath: folder of the files.
        every_n_train_steps: optimizer steps between two files.
        keep_last: number of files that are kept; older ones are deleted.
        keep_every_n_train_steps: files at multiples of it are never deleted; None for none.
        stop_signals: names of signals on which the training saves and stops at the end of the
            optimizer step.

    Attributes:
        last: path of last.ckpt; None before there is one.
    """

    def __init__(
        self,
        dirpath: str,
        every_n_train_steps: int = 500,
        keep_last: int = 2,
        keep_every_n_train_steps: int | None = None,
        stop_signals: tuple[str, ...] = (),
    ) -> None:
        check_number("callbacks.steps.every_n_train_steps", every_n_train_steps)
        check_number("callbacks.steps.keep_last", keep_last)
        check_number("callbacks.steps.keep_every_n_train_steps", keep_every_n_train_steps)
        self.dirpath = Path(dirpath)
        self.every_n_train_steps = every_n_train_steps
        self.keep_last = keep_last
        self.keep_every_n_train_steps = keep_every_n_train_steps
        self.last: Path | None = None
        self._request = StopRequest(stop_signals)
        self._signal = 0
        self._seen = 0
        self._saved = -1
        self._due = False
        self._unnamed: Path | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._seen, self._saved, self._due = trainer.global_step, -1, False
        first = trainer.strategy.broadcast(trainer.global_step, src=0)
        if first != trainer.global_step:  # machines without shared storage found other checkpoints
            raise InputError(
                f"process {trainer.global_rank} resumes from optimizer step {trainer.global_step} "
                f"and process 0 from {first}; put paths.output into a folder that all machines "
                "share, or give resume=FILE"
            )
        if trainer.is_global_zero:
            for leftover in self.dirpath.glob(".*.ckpt*"):  # of a process that was killed
                leftover.unlink()
        last = self.dirpath / "last.ckpt"
        self.last = last if last.exists() else None
        self._request.listen(trainer.world_size)

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        self._publish(trainer)
        if self._signal:
            raise Stopped(self._signal)

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        step = trainer.global_step
        if step == self._seen:
            return  # gradients are still being accumulated
        self._seen = step
        self._signal = self._request.poll()
        self._due = (
            bool(self._signal) or step % self.every_n_train_steps == 0 or self._is_permanent(step)
        )
        if not epoch_is_done(trainer) and not validation_is_due(trainer):
            self._save_if_due(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._due and not epoch_is_done(trainer):
            self._save_if_due(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.global_step != trainer.max_steps:
            self._save_if_due(trainer)
            self._publish(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._due = trainer.global_step != self._saved
        self._save_if_due(trainer)
        self._publish(trainer)
        self._request.ignore()

    def on_exception(self, *args: Any) -> None:
        self._request.ignore()

    def _is_permanent(self, step: int) -> bool:
        every = self.keep_every_n_train_steps
        return every is not None and step % every == 0

    def _save_if_due(self, trainer: L.Trainer) -> None:
        if not self._due or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        self._due, self._saved = False, trainer.global_step
        self._unnamed = self.dirpath / f".step_{trainer.global_step:06d}.ckpt"
        trainer.save_checkpoint(self._unnamed, weights_only=False)

    def _publish(self, trainer: L.Trainer) -> None:
        """Rename the file to its final name; the loggers have the rows of its step by now."""
        if self._unnamed is None:
            return
        unnamed, self._unnamed = self._unnamed, None
        self.last = self.dirpath / "last.ckpt"
        if not trainer.is_global_zero:
            return
        for logger in trainer.loggers:
            logger.save()
        target = unnamed.with_name(unnamed.name.removeprefix("."))
        rename(unnamed, target)
        link = unnamed.with_name(".last.ckpt")
        try:
            os.link(target, link)
        except OSError:  # a file system without hard links
            shutil.copyfile(target, link)
        rename(link, self.last)
        for path in list_steps(self.dirpath, self._saved)[: -self.keep_last]:
            if not self._is_permanent(step_of(path)):
                path.unlink()


def step_of(path: Path) -> int:
    """Optimizer step of a file name such as ``step_000100.ckpt``."""
    return int(path.stem.removeprefix("step_"))


def list_steps(folder: Path, until: int | None = None) -> list[Path]:
    """Files ``step_000100.ckpt`` of a folder up to the step ``until``, the newest last."""
    found = [path for path in folder.glob("step_*.ckpt") if path.stem[5:].isdigit()]
    return sorted((path for path in found if until is None or step_of(path) <= until), key=step_of)
