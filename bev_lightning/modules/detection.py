"""The LightningModule of every detector, with the only training step."""

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import lru_cache
from typing import Any, Literal, Protocol, runtime_checkable

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from bev_lightning.errors import InputError
from bev_lightning.losses.detection import DetectionLoss
from bev_lightning.metrics.nuscenes import NuScenesEvaluator, Scores
from bev_lightning.metrics.submission import Entries, to_entries
from bev_lightning.models.protocol import (
    ModelPartition,
    ReadsCanBus,
    RowParallel,
    SupportsPipeline,
)
from bev_lightning.modules.optimizer import OptimizerFactory, match_multipliers
from bev_lightning.modules.tta import TestTimeAugmentation, merge_views, view_batch
from bev_lightning.structures import Batch, Boxes3D, Inputs
from bev_lightning.structures.ground_truth import GroundTruth


@runtime_checkable
class DetectionData(Protocol):
    """A LightningDataModule that resumes at the same sample and names the evaluated samples.

    Training works with any LightningDataModule; one without these methods resumes without a check,
    and its evaluation covers the samples that have predictions.
    """

    def warn_of_derived_motion(self) -> None:
        """Warn of samples whose ego motion was not measured; for models that read it."""
        ...

    def list_tokens(
        self, name: Literal["val", "predict"], num_batches: int | None = None
    ) -> list[str]:
        """Sample tokens that an evaluation of so many batches per process reports results for."""
        ...

    def restore_progress(self, checkpoint: dict[str, Any]) -> tuple[int, int]:
        """Prepare a checkpoint for a resume; micro-steps done in all and in the current epoch."""
        ...


class DetectionModule(L.LightningModule):
    """Trains, validates and predicts with any detector.

    Args:
        network: an nn.Module that implements
            :class:`bev_lightning.models.protocol.DetectionNetwork`, and as many of the optional
            protocols beside it as it likes.
        loss: gives weighted scalars; the loss is their sum.
        inputs: the sensors that the network reads.
        classes: names in the order of the labels.
        optim: builds the optimizer and its schedule; None for a module that is only evaluated.
        evaluator: scores predictions at the end of a validation; None leaves them unscored.
        loss_norm: what the losses of training are divided by: the boxes, peaks and pixels of each
            process's own ``batch``, as published, or those of the ``effective`` batch: all
            micro-steps and processes of an optimizer step, so that it does not matter how the
            samples are shared out.

    Attributes:
        train_loss: of the last micro-step, on the device; None before the first.
        results: the submission of the last validation or prediction, on the first process; with an
            empty list for each sample that has none (``data.on_missing=skip``).
        scores, scored_step: of the last validation, and the optimizer step it stood at.
        samples_per_s: samples of all processes a second in the last validation, on the first
            process; without the metric.
    """

    def __init__(
        self,
        network: nn.Module,
        loss: DetectionLoss,
        inputs: Inputs,
        classes: Sequence[str],
        optim: OptimizerFactory | None = None,
        evaluator: NuScenesEvaluator | None = None,
        loss_norm: Literal["batch", "effective"] = "batch",
    ) -> None:
        super().__init__()
        if loss_norm not in ("batch", "effective"):
            raise InputError(f"loss_norm={loss_norm} is unknown; use loss_norm=batch or effective")
        self.loss_norm = loss_norm
        self.train_loss: Tensor | None = None
        self._counts: dict[str, Tensor] | None = None
        self.network = network
        self.loss = loss
        self.inputs = inputs
        self.classes = tuple(classes)
        self.optim = optim
        self.evaluator = evaluator
        self.provenance: dict[str, Any] = {}
        self.scores: Scores | None = None
        self.scored_step = -1
        self.samples_per_s = 0.0
        self._began = 0.0
        self.results: Entries = {}
        self.tta: TestTimeAugmentation | None = None
        self._frozen = [] if optim is None else self._freeze(optim)

    def use_tta(self, tta: TestTimeAugmentation) -> None:
        """Detect in several views of each scene from now on.

        Raises:
            InputError: the model carries memory from frame to frame, which has one view.
        """
        if self.inputs.history:
            raise InputError(
                f"tta is for models of single frames and this one reads {self.inputs.history} "
                f"earlier ones; set tta=null"
            )
        self.tta = tta

    def setup(self, stage: str) -> None:
        data = self._datamodule()
        network = self.network
        if data is not None and isinstance(network, ReadsCanBus) and network.reads_can_bus:
            data.warn_of_derived_motion()

    def train(self, mode: bool = True) -> "DetectionModule":
        """Training mode, all but what ``optim`` freezes."""
        super().train(mode)
        if mode:
            for part in self._frozen:
                part.eval()
        return self

    def forward(self, batch: Batch) -> Any:
        """Predictions for a batch; what every step calls."""
        return self.network(batch)

    def pipeline_parts(self, row_parallel: RowParallel) -> ModelPartition:
        """The network's parts, for a strategy that distributes them."""
        assert isinstance(self.network, SupportsPipeline)
        return self.network.pipeline_parts(row_parallel)

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        if self.loss_norm == "effective" and batch_idx % self.trainer.accumulate_grad_batches == 0:
            stream: Any = self.trainer.train_dataloader
            self._counts = self._count(stream.window)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        return self.report(self.compute_terms(self(batch), batch), batch)

    def compute_terms(
        self, predictions: Any, batch: Batch, num_pieces: int = 1
    ) -> dict[str, Tensor]:
        """The weighted terms of a training step's loss, or of one of the pieces that its batch is
        cut into and whose mean is trained."""
        counts = self._counts
        if counts is not None:
            counts = {name: count / num_pieces for name, count in counts.items()}
        return self._losses(predictions, batch, counts)

    def report(self, terms: dict[str, Tensor], batch: Batch) -> dict[str, Any]:
        """Log the terms of a training step; what the step returns."""
        loss = torch.stack(list(terms.values())).sum()
        self.train_loss = loss.detach()
        logged = {f"train/{name}": value.detach() for name, value in terms.items()}
        self.log_dict({"train/loss": loss.detach(), **logged}, batch_size=batch.size)
        return {
            "loss": loss,
            "terms": {name: value.detach() for name, value in terms.items()},
            "sample_tokens": batch.sample_tokens,
        }

    def on_validation_epoch_start(self) -> None:
        self.results = {}
        self._began = time.perf_counter()
        if dist.is_initialized():
            # Each process has its own batch-norm statistics, a checkpoint those of the first: score
            # what is saved.
            for buffer in self.buffers():
                dist.broadcast(buffer, src=0)

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Boxes3D]:
        predictions = self(batch)
        if batch.targets is not None:
            terms = self._losses(predictions, batch)
            loss = torch.stack(list(terms.values())).sum()
            # A rank that is done early repeats a sample, which must not weigh twice.
            num_new = sum(token not in self.results for token in batch.sample_tokens)
            self.log("val/loss", loss, batch_size=num_new, sync_dist=True)
        return {"boxes": self._collect(predictions, batch)}

    def on_validation_epoch_end(self) -> None:
        found = self._gather(self.results)
        self.samples_per_s = len(found) / (time.perf_counter() - self._began)
        if self.trainer.sanity_checking:
            return
        self.results = self._complete("val", found)
        if self.evaluator is None:
            return
        scores: list[Scores | Exception | None] = [None]
        if self.global_rank == 0:
            try:
                known = {token: found[token] for token in self.results if token in found}
                scores = [self.evaluator.evaluate(known, self._ground_truth())]
            except Exception as error:
                if not dist.is_initialized():
                    raise
                scores = [_portable(error)]
        if dist.is_initialized():
            dist.broadcast_object_list(scores, src=0, group=_host_group(dist.group.WORLD))
        if isinstance(scores[0], Exception):
            raise scores[0]  # on every process: none waits for the first
        assert scores[0] is not None
        self.scores, self.scored_step = scores[0], self.global_step
        # Equal on all processes already; sync_dist keeps Lightning from doubting it.
        values = {f"val/{name}": value for name, value in self.scores.to_log().items()}
        self.log_dict(values, sync_dist=True)

    def on_predict_epoch_start(self) -> None:
        self.results = {}

    def predict_step(self, batch: Batch, batch_idx: int) -> Boxes3D:
        return self._collect(self(batch), batch)

    def on_predict_epoch_end(self) -> None:
        self.results = self._complete("predict", self._gather(self.results))

    def configure_optimizers(self) -> Any:
        if self.optim is None:
            raise InputError("this module was built without an optimizer; give optim= to train it")
        optimizer, schedule = self.optim.build(
            self.named_parameters(), int(self.trainer.estimated_stepping_batches)
        )
        if schedule is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # Plain containers only, so that the file loads with weights_only=True.
        checkpoint["bev_lightning"] = self.provenance

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Convert Lightning's progress to this run's micro-steps: the checkpoint's run may have had
        another batch size, number of processes or accumulation."""
        # Only training resumes; nothing is done yet at step 0.
        if self.trainer.state.fn != TrainerFn.FITTING or not checkpoint["global_step"]:
            return
        data = self._datamodule()
        if data is None:
            return
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        counts = data.restore_progress(checkpoint)
        for kind, count in zip(("total", "current"), counts, strict=True):
            # The file is written when a batch is ready and processed, but not yet completed.
            difference = count - progress[kind]["ready"]
            progress[kind] = {name: old + difference for name, old in progress[kind].items()}

    def _freeze(self, optim: OptimizerFactory) -> list[nn.Module]:
        """Take the gradients off what has a learning rate of 0, here and not when the optimizer is
        built: DDP has looked at the parameters by then. Returns the modules all of which is frozen.
        """
        parameters = dict(self.named_parameters())
        multipliers = match_multipliers(optim.multipliers, list(parameters))
        frozen = {parameters[name] for name, multiplier in multipliers.items() if multiplier == 0}
        for parameter in frozen:
            parameter.requires_grad_(False)
        parts = []
        for part in self.modules():
            own = set(part.parameters())
            if own and own <= frozen:
                parts.append(part.eval())
        return parts

    def _count(self, window: Sequence[Batch]) -> dict[str, Tensor]:
        """What the terms of each micro-step are divided by, so that Lightning's mean over the
        micro-steps and the mean of the gradients over the processes give the sum over all samples
        divided by the count of all samples."""
        total: dict[str, Tensor] = {}
        for batch in window:
            frame = replace(batch, history=()).to(self.device)
            for name, count in self.loss.count(self.network, frame).items():
                total[name] = total.get(name, 0) + count
        counts = torch.stack(list(total.values())).float()
        if dist.is_initialized():
            dist.all_reduce(counts)
        parts = self.trainer.accumulate_grad_batches * self.trainer.world_size
        return dict(zip(total, counts.clamp(min=1) / parts, strict=True))

    def _losses(
        self, predictions: Any, batch: Batch, counts: dict[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        if batch.targets is None:
            raise InputError(
                f"the samples {', '.join(batch.sample_tokens)} have no annotations to train on; "
                "use a split that has them (v1.0-test has none)"
            )
        if counts is None:
            return self.loss(predictions, batch.targets)
        return self.loss(predictions, batch.targets, counts)

    def _collect(self, predictions: Any, batch: Batch) -> Boxes3D:
        boxes = self._detect(predictions, batch)
        names = None if self.evaluator is None else self.evaluator.detection_names
        entries = to_entries(
            boxes, batch.global_from_lidar, batch.sample_tokens, self.classes, names
        )
        # The first result counts: a repeated sample has lost the memory of the frame before.
        for token, found in entries.items():
            self.results.setdefault(token, found)
        return boxes

    def _detect(self, predictions: Any, batch: Batch) -> Boxes3D:
        """The boxes of a batch, with test-time augmentation those of all views."""
        decode: Callable[[Any], Boxes3D] = self.network.decode  # type: ignore[assignment]
        boxes = decode(predictions)
        if self.tta is None:
            return boxes
        views = [boxes]
        for view_from_lidar in self.tta.views()[1:].to(boxes.centre.device):
            seen = decode(self(view_batch(batch, view_from_lidar)))
            views.append(seen.transform(torch.linalg.inv(view_from_lidar)))
        return merge_views(views, self.tta.reach)

    def _gather(self, results: Entries) -> Entries:
        """All processes' results on the first one, of a sample that several have the first's; on
        the others their own."""
        if not dist.is_initialized():
            return results
        first = self.global_rank == 0
        shards: list[Entries] | None = [{}] * dist.get_world_size() if first else None
        dist.gather_object(results, shards, dst=0, group=_host_group(dist.group.WORLD))
        gathered: Entries = {}
        for shard in shards or [results]:
            for token, entries in shard.items():
                gathered.setdefault(token, entries)
        return gathered

    def _complete(self, name: Literal["val", "predict"], found: Entries) -> Entries:
        """Results of the samples that the evaluation answers for, in the split's order: all of the
        split or, where ``limit_..._batches`` stops it early, those of the batches that were to be
        read. A sample without results gets an empty list."""
        data = self._datamodule()
        if data is None:
            return found
        if name == "val":
            limits, batches = self.trainer.num_val_batches, self.trainer.val_dataloaders
        else:
            limits, batches = self.trainer.num_predict_batches, self.trainer.predict_dataloaders
        assert batches is not None
        cut = int(limits[0]) if limits[0] < len(batches) else None
        return {token: found.get(token, []) for token in data.list_tokens(name, cut)}

    def _ground_truth(self) -> dict[str, GroundTruth]:
        """Annotated boxes of the evaluated samples."""
        data: Any = getattr(self.trainer, "datamodule", None)
        if not hasattr(data, "ground_truth"):
            raise InputError(
                "the metric needs ground truth: pass the trainer a datamodule with a method "
                "ground_truth(tokens), such as DetectionDataModule, or set model.evaluator=null"
            )
        truth: dict[str, GroundTruth] = data.ground_truth(list(self.results))
        return truth

    def _datamodule(self) -> DetectionData | None:
        data = getattr(self.trainer, "datamodule", None)
        return data if isinstance(data, DetectionData) else None


@lru_cache(maxsize=1)
def _host_group(world: Any) -> Any:
    """A group of all processes for objects that lie on the host. The others wait in it while the
    first one scores, for which the half hour or less of the default group may be too short."""
    return dist.new_group(backend="gloo", timeout=timedelta(hours=2))


def _portable(error: Exception) -> Exception:
    """An error that any process can unpickle and raise, with the traceback as its text."""
    if isinstance(error, InputError):
        return error
    return RuntimeError(f"process 0 failed to score:\n{''.join(traceback.format_exception(error))}")
