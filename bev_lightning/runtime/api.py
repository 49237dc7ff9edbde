"""Python API for notebooks and scripts: one call gives data, model, predictions and pictures."""

from collections.abc import Iterator
from contextlib import closing
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from omegaconf import DictConfig

from bev_lightning.config.compose import load_config
from bev_lightning.config.resolve import resolve
from bev_lightning.config.validate import check_config, check_machine
from bev_lightning.errors import InputError
from bev_lightning.hardware.machine import detect_machine

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image
    from torch import Tensor

    from bev_lightning.data.datamodule import DetectionDataModule
    from bev_lightning.metrics.nuscenes import Scores
    from bev_lightning.modules.detection import DetectionModule
    from bev_lightning.structures import Batch, Boxes3D

Split = Literal["train", "val"]

# One process: a script needs no `if __name__ == "__main__"`, a notebook leaves no process behind.
_DEFAULTS = ("data.num_workers=1", "loader.num_workers=0")


def load(*overrides: str, ckpt: str | Path | None = None) -> "Run":
    """Composes and checks a configuration; data and model are built when they are first used.

    Files are read in this process; ``"loader.num_workers=4"`` starts worker processes.

    Args:
        overrides: as on the command line of ``train``, for example ``"model=bevfusion_toy"``,
            ``"data=synthetic_mini"``, ``"data.batch_size=1"``.
        ckpt: checkpoint of a training, or weights that ``convert`` wrote. It brings the model and
            data it was trained with; ``overrides`` take precedence. None: fresh weights.

    Raises:
        InputError: an override, the checkpoint or the data root is wrong; one sentence with the
            fix.

    Example:
        >>> import bev_lightning as bev
        >>> run = bev.load("model=bevfusion_toy", "data=synthetic_mini")
        >>> batch = run.batch()
        >>> boxes = run.predict(batch)
        >>> run.draw(batch, boxes)
    """
    for override in overrides:
        key = override.partition("=")[0]
        if key in ("ckpt", "resume"):
            raise InputError(
                f"{override} is not an override of bev_lightning.load: open a checkpoint with "
                f'bev_lightning.load(ckpt="FILE"), resume a training with the train command'
            )
    verb, composed = "train", [*_DEFAULTS, *overrides]
    if ckpt is not None:
        verb, composed = "evaluate", [*composed, f'ckpt="{Path(ckpt).expanduser()}"']
    cfg, machine = load_config(verb, composed), detect_machine()
    check_config(cfg)
    check_machine(cfg, machine)
    return Run(resolve(cfg, machine))


class Run:
    """Data, model and pictures of one configuration; made by :func:`load`.

    Args:
        cfg: resolved configuration.

    Attributes:
        cfg: resolved configuration, read-only.
    """

    def __init__(self, cfg: DictConfig) -> None:
        self.cfg = cfg

    def __repr__(self) -> str:
        network = str(self.cfg.model.network["_target_"]).rpartition(".")[2]
        source = self.cfg.get("ckpt") or self.cfg.get("init_from") or "fresh"
        return f"Run({network}, weights: {source}, data: {self.cfg.data.root})"

    @cached_property
    def data(self) -> "DetectionDataModule":
        """The LightningDataModule; the first use makes or reads the data set's index."""
        from bev_lightning.runtime.build import build_data

        data = build_data(self.cfg)
        data.prepare_data()
        return data

    @cached_property
    def module(self) -> "DetectionModule":
        """The LightningModule on :attr:`device`, with the checkpoint's weights if there is one."""
        from bev_lightning.runtime.build import build_loaded_module

        return build_loaded_module(self.cfg).to(self.device)

    @cached_property
    def device(self) -> "torch.device":
        """Where the model runs: the first GPU unless the configuration chooses the CPU."""
        import torch

        return torch.device("cuda" if self.cfg.trainer.accelerator == "gpu" else "cpu")

    def batches(self, split: Split = "val") -> Iterator["Batch"]:
        """Yields a split's batches on the CPU: ``val`` in order, ``train`` in the training's order
        and with its augmentation."""
        if split not in ("train", "val"):
            raise InputError(f"split={split!r} does not exist; use 'train' or 'val'")
        self.data.setup("fit" if split == "train" else "validate")
        loader = self.data.train_dataloader() if split == "train" else self.data.val_dataloader()
        # Closing the iterator ends the loader's worker processes.
        iterator: Any = iter(loader)
        with closing(iterator):
            yield from iterator

    def batch(self, split: Split = "val", index: int = 0) -> "Batch":
        """One batch of a split, checked for shapes, types and finite values.

        Args:
            split: ``val`` or ``train``.
            index: position in the order of :meth:`batches`.
        """
        batches: Any = self.batches(split)
        with closing(batches):
            for batch in islice(batches, index, None):
                found: Batch = batch.validate()
                return found
        raise InputError(f"index={index} is beyond the last batch of the {split} split; use less")

    def predict(self, batch: "Batch") -> "Boxes3D":
        """Detects the objects of a batch in evaluation mode and float32.

        BEVFormer uses the BEV features of the previous frame of the same scene: pass the frames of
        a scene in order.

        Returns:
            boxes ``(B, M)`` in the model frame with scores, on the CPU; rows with ``valid`` False
            are padding.
        """
        import torch

        self.module.eval()
        with torch.no_grad():
            return self.module.detect(batch.to(self.device)).to("cpu")

    def losses(self, batch: "Batch") -> "dict[str, Tensor]":
        """The weighted terms of the training loss, with gradients; their sum is the loss."""
        self.module.train()
        on_device = batch.to(self.device)
        return self.module.compute_loss(self.module(on_device), on_device)

    def evaluate(self, num_batches: int | None = None) -> "Scores":
        """Scores the validation split with the nuScenes metric, in this process and in float32.

        Args:
            num_batches: stop after so many batches and score their samples; None: whole split.
        """
        from bev_lightning.metrics.submission import to_entries
        from bev_lightning.runtime.build import build_evaluator

        results: dict[str, Any] = {}
        with closing(self.batches("val")) as batches:  # type: ignore[type-var]
            for batch in islice(batches, num_batches):
                boxes = self.predict(batch)
                found = to_entries(
                    boxes, batch.global_from_lidar, batch.sample_tokens, self.module.classes
                )
                results = {**found, **results}
        tokens = self.data.list_tokens("val", num_batches)
        return build_evaluator(self.cfg).evaluate(results, self.data.ground_truth(tokens))

    def draw(
        self,
        batch: "Batch",
        boxes: "Boxes3D | None" = None,
        sample: int = 0,
        min_score: float = 0.2,
        radius_m: float = 55.0,
    ) -> "Image":
        """Draws one sample: cameras and bird's-eye view with annotations and predictions.

        Args:
            boxes: predictions ``(B, M)``; None draws the annotations alone.
            sample: row of the batch.
            min_score: lower-scored predictions are left out.
            radius_m: half the side of the bird's-eye view [m].

        Returns:
            RGB picture; a notebook shows it when it is the last value of a cell.
        """
        from PIL import Image

        from bev_lightning.callbacks.pictures import draw_sample

        classes, camera = list(self.cfg.data.classes), self.data.inputs.camera
        picture = draw_sample(batch, sample, boxes, classes, camera, min_score, radius_m)
        return Image.fromarray(picture)
