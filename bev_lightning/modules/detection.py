"""LightningModule that trains, validates and predicts with any detector."""

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

from bev_lightning.checks import check_choice
from bev_lightning.errors import InputError
from bev_lightning.losses.protocol import DetectionLoss
from bev_lightning.metrics.nuscenes import NuScenesEvaluator, Scores
from bev_lightning.metrics.submission import Entries, to_entries
from bev_lightning.models.protocol import ModelPartition, ReadsCanBus, RowParallel, SupportsPipeline
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

    def list_tokens(
        self, name: Literal["val", "predict"], num_batches: int | None = None
    ) -> list[str]:
        """Sample tokens that an evaluation of so many batches per process reports results for."""

    def restore_progress(self, checkpoint: dict[str, Any]) -> tuple[int, int]:
        """Prepare a checkpoint for a resume; micro-steps done in all and in the current epoch."""


class DetectionModule(L.LightningModule):
    """Trains, validates and predicts with any detector.

    Args:
        network: an nn.Module that implements
            :class:`bev_lightning.models.protocol.DetectionNetwork`, and any of the optional
            protocols beside it.
        loss: gives weighted scalars; the loss is their sum.
        inputs: the sensors that the network reads.
        classes: names in the order of the labels.
        optim: builds the optimizer and its schedule; None for a module that is only evaluated.
        evaluator: scores predictions at the end of a validation; None leaves them unscored.
        loss_norm: what the training loss is normalised by: ``batch``, as published, the number of
            boxes, peaks and pixels in each process's micro-batch; ``effective``, that in all
            micro-batches and processes of an optimizer step, so that the gradient does not depend
            on how the samples are distributed.

    Attributes:
        train_loss: of the last micro-step, on the device; None before the first.
        results: submission entries of the last validation or prediction, on rank 0; an empty list
            for each sample without results (``data.on_missing=skip``).
        scores: of the last validation.
        samples_per_s: samples of all processes per second in the last validation, on rank 0;
            without the time for the metric.
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
        check_choice("loss_norm", loss_norm)
        self.loss_norm = loss_norm
        self.train_loss: Tensor | None = None
        self._normalizers: dict[str, Tensor] | None = None
        self.network = network
        self.loss = loss
        self.inputs = inputs
        self.classes = tuple(classes)
        self.optim = optim
        self.evaluator = evaluator
        self.provenance: dict[str, Any] = {}
        self.scores: Scores | None = None
        self.samples_per_s = 0.0
        self._began = 0.0
        self.results: Entries = {}
        self.tta: TestTimeAugmentation | None = None
        self._frozen = [] if optim is None else self._freeze(optim)

    def use_tta(self, tta: TestTimeAugmentation) -> None:
        """Turn on test-time augmentation.

        Raises:
            InputError: the model is temporal; its memory exists for one view only.
        """
        if self.inputs.history:
            raise InputError(
                f"tta needs a single-frame model and this one reads {self.inputs.history} earlier "
                "frames; set tta=null"
            )
        self.tta = tta

    def setup(self, stage: str) -> None:
        data = self._datamodule()
        network = self.network
        if data is not None and isinstance(network, ReadsCanBus) and network.reads_can_bus:
            data.warn_of_derived_motion()

    def train(self, mode: bool = True) -> "DetectionModule":
        """Set training mode; frozen modules stay in evaluation mode."""
        super().train(mode)
        if mode:
            for module in self._frozen:
                module.eval()
        return self

    def forward(self, batch: Batch) -> Any:
        """Predictions of the network for a batch."""
        return self.network(batch)

    def pipeline_parts(self, row_parallel: RowParallel) -> ModelPartition:
        """The network's parts, for a strategy that distributes them."""
        assert isinstance(self.network, SupportsPipeline)
        return self.network.pipeline_parts(row_parallel)

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        if self.loss_norm == "effective" and batch_idx % self.trainer.accumulate_grad_batches == 0:
            stream: Any = self.trainer.train_dataloader
            self._normalizers = self._sum_normalizers(stream.window)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        return self.log_loss(self.compute_loss(self(batch), batch), batch)

    def compute_loss(
        self, predictions: Any, batch: Batch, num_chunks: int = 1
    ) -> dict[str, Tensor]:
        """Weighted loss terms of a training step.

        Args:
            num_chunks: the batch is one of so many chunks of a micro-batch, over which the caller
                averages the loss.
        """
        normalizers = self._normalizers
        if normalizers is not None:
            normalizers = {name: value / num_chunks for name, value in normalizers.items()}
        return self._compute_terms(predictions, batch, normalizers)

    def log_loss(self, terms: dict[str, Tensor], batch: Batch) -> dict[str, Any]:
        """Log the loss terms of a training step; returns the step's outputs for Lightning."""
        loss = torch.stack(list(terms.values())).sum()
        self.train_loss = loss.detach()
        terms = {name: value.detach() for name, value in terms.items()}
        logged = {f"train/{name}": value for name, value in terms.items()}
        self.log_dict({"train/loss": self.train_loss, **logged}, batch_size=batch.size)
        return {"loss": loss, "terms": terms, "sample_tokens": batch.sample_tokens}

    def reset_memory(self) -> None:
        """Drop what the network remembers of earlier frames, before and after an evaluation."""

    def on_validation_epoch_start(self) -> None:
        self.results = {}
        self.reset_memory()
        self._began = time.perf_counter()
        if dist.is_initialized():
            # Batch-norm statistics differ between processes; score with those of rank 0, which a
            # checkpoint holds.
            for buffer in self.buffers():
                dist.broadcast(buffer, src=0)

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Boxes3D]:
        predictions = self(batch)
        if batch.targets is not None:
            terms = self._compute_terms(predictions, batch)
            loss = torch.stack(list(terms.values())).sum()
            # A rank that runs out of samples repeats one, which must not count twice.
            num_new = sum(token not in self.results for token in batch.sample_tokens)
            self.log("val/loss", loss, batch_size=num_new, sync_dist=True)
        return {"boxes": self._store_results(predictions, batch)}

    def on_validation_epoch_end(self) -> None:
        self.reset_memory()
        found = self._gather(self.results)
        self.samples_per_s = len(found) / (time.perf_counter() - self._began)
        if self.trainer.sanity_checking:
            return
        self.results = self._select_expected("val", found)
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
            raise scores[0]  # on every process, so that none waits for rank 0
        assert scores[0] is not None
        self.scores = scores[0]
        # Equal on all processes already; without sync_dist Lightning warns.
        values = {f"val/{name}": value for name, value in self.scores.to_log().items()}
        self.log_dict(values, sync_dist=True)

    def on_predict_epoch_start(self) -> None:
        self.results = {}
        self.reset_memory()

    def predict_step(self, batch: Batch, batch_idx: int) -> Boxes3D:
        return self._store_results(self(batch), batch)

    def detect(self, batch: Batch) -> Boxes3D:
        """Detect a batch's objects, with test-time augmentation where it is on.

        Returns:
            boxes ``(B, M)`` in the model frame, with scores.
        """
        return self._detect(self(batch), batch)

    def on_predict_epoch_end(self) -> None:
        self.reset_memory()
        self.results = self._select_expected("predict", self._gather(self.results))

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
        """Freeze parameters with the multiplier 0; returns the modules that are frozen completely.

        This happens before the optimizer is built, because DDP inspects the parameters before.
        """
        parameters = dict(self.named_parameters())
        multipliers = match_multipliers(optim.multipliers, list(parameters))
        frozen = {parameters[name] for name, multiplier in multipliers.items() if multiplier == 0}
        for parameter in frozen:
            parameter.requires_grad_(False)
        return [
            module.eval()
            for module in self.modules()
            if (own := set(module.parameters())) and own <= frozen
        ]

    def _sum_normalizers(self, window: Sequence[Batch]) -> dict[str, Tensor]:
        """Normalizers of each loss term over all micro-steps and processes of an optimizer step.

        They are divided by the number of micro-steps and processes, because Lightning averages the
        losses over the former and DDP the gradients over the latter: the gradient is then that of
        the sum over all samples, divided by the number of targets in all samples.

        Args:
            window: this process's batches of the optimizer step.
        """
        total: dict[str, Tensor] = {}
        for batch in window:
            frame = replace(batch, history=()).to(self.device)
            for name, count in self.loss.normalizers(self.network, frame).items():
                total[name] = total.get(name, 0) + count
        counts = torch.stack(list(total.values())).float()
        if dist.is_initialized():
            dist.all_reduce(counts)
        num_batches = self.trainer.accumulate_grad_batches * self.trainer.world_size
        return dict(zip(total, counts.clamp(min=1) / num_batches, strict=True))

    def _compute_terms(
        self, predictions: Any, batch: Batch, normalizers: dict[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        if batch.targets is None:
            raise InputError(
                f"the samples {', '.join(batch.sample_tokens)} have no annotations to train on; "
                "use a split that has them (v1.0-test has none)"
            )
        if normalizers is None:
            return self.loss(predictions, batch.targets)
        return self.loss(predictions, batch.targets, normalizers)

    def _store_results(self, predictions: Any, batch: Batch) -> Boxes3D:
        """Decode predictions and keep them as submission entries; returns the boxes."""
        boxes = self._detect(predictions, batch)
        names = None if self.evaluator is None else self.evaluator.detection_names
        tokens = batch.sample_tokens
        entries = to_entries(boxes, batch.global_from_lidar, tokens, self.classes, names)
        # The first result is kept: a repeated sample ran without the memory of the previous frame.
        for token, found in entries.items():
            self.results.setdefault(token, found)
        return boxes

    def _detect(self, predictions: Any, batch: Batch) -> Boxes3D:
        """Boxes of a batch; with test-time augmentation, merged from all views."""
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
        """All processes' results on rank 0, and each process's own elsewhere; of duplicate samples
        the result of the lowest rank."""
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

    def _select_expected(self, name: Literal["val", "predict"], found: Entries) -> Entries:
        """Results of the samples that the evaluation must cover, in the split's order.

        These are all samples of the split or, if ``limit_val_batches`` or ``limit_predict_batches``
        ends it early, those of the batches up to it. A sample without results gets an empty list.
        """
        data = self._datamodule()
        if data is None:
            return found
        limits: list[int | float] = getattr(self.trainer, f"num_{name}_batches")
        batches: Any = getattr(self.trainer, f"{name}_dataloaders")
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
    """A gloo group of all processes, for Python objects. The others wait in it while rank 0 scores,
    which may take longer than the default group's timeout."""
    return dist.new_group(backend="gloo", timeout=timedelta(hours=2))


def _portable(error: Exception) -> Exception:
    """The error in a form that every process can unpickle and raise, with its traceback as text."""
    if isinstance(error, InputError):
        return error
    return RuntimeError(f"process 0 failed to score:\n{''.join(traceback.format_exception(error))}")
