"""Data, pipeline and model parallelism on one mesh, as a Lightning strategy."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from bev_lightning.errors import InputError
from bev_lightning.models.protocol import PipelinePart
from bev_lightning.modules.detection import DetectionModule
from bev_lightning.parallel.collectives import RowParallelGroup
from bev_lightning.parallel.partition import partition_model, split_stages
from bev_lightning.parallel.pipeline_stage import PipelineRunner
from bev_lightning.private_apis import _BatchNorm
from bev_lightning.structures import Batch

# Elements per all-reduce of gradients.
BUCKET_SIZE = 16 * 2**20


class HybridStrategy(DDPStrategy):
    """Data, pipeline and row parallelism on the mesh (data, pipeline, model), last axis fastest.

    The processes of one pipeline are a replica with samples of its own. Each batch is split into
    micro-batches, which a schedule of torch.distributed.pipelining runs through the stages, the
    image branch first, the head last. Replicas that differ along ``model`` only split the BEV
    transform between them (:class:`bev_lightning.models.protocol.RowParallel`) and keep their own
    samples before and after it.

    Every process holds all weights and optimizer states, computes the gradients of its stage, and
    sums them with all others at the end of an accumulation. Activations and compute are
    distributed, since they fill a card: weights, gradients and optimizer states of BEVFormer base
    are 1.1 GB. So clipping, loss scaling, checkpoints, weight averages and validation (the whole
    model in every process) work as under ddp.

    Args:
        data, pipeline, model: sizes of the mesh; their product is the number of processes.
        schedule: ``gpipe`` (all forward passes, then all backward passes) or ``1f1b`` (alternating
            as early as possible, which keeps the activations of fewer micro-batches).
        micro_batches: micro-batches per batch.
        cuts: parts that begin a stage; None for the network's own order of preference.
    """

    def __init__(
        self,
        data: int,
        pipeline: int,
        model: int,
        schedule: str,
        micro_batches: int,
        cuts: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.shape = (data, pipeline, model)
        self.schedule, self.micro_batches, self.cuts = schedule, micro_batches, cuts
        self._mesh: DeviceMesh | None = None
        self._stages: list[list[PipelinePart]] = []
        self._runners: dict[Any, PipelineRunner] = {}
        self._new_gradients: list[Tensor | None] = []
        self._is_accumulating = False

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Training samples are sharded over replicas; all processes of one read the same."""
        data, _, model = self.shape
        assert self._mesh is not None
        replica = self._mesh.get_local_rank("data") * model + self._mesh.get_local_rank("model")
        return {"num_replicas": data * model, "rank": replica}

    def setup_environment(self) -> None:
        super().setup_environment()
        names = ("data", "pipeline", "model")
        self._mesh = init_device_mesh(self.root_device.type, self.shape, mesh_dim_names=names)

    def configure_ddp(self) -> None:
        """Split the model into stages; nothing is wrapped."""
        assert self._mesh is not None
        row_parallel = RowParallelGroup(self._mesh.get_group("model"))
        partition = partition_model(self._module, row_parallel)
        self._stages = split_stages(partition, self.shape[1], self.cuts)
        self._runners = {}

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        """Forward and backward passes of a micro-step. The gradients are kept for
        :meth:`backward`, because Lightning clears those of the parameters in between."""
        if batch.size % self.micro_batches:
            raise InputError(
                f"strategy.micro_batches={self.micro_batches} does not divide a batch of "
                f"{batch.size} samples; set data.batch_size to a multiple"
            )
        size = batch.size // self.micro_batches
        micro = [batch.rows(range(i * size, (i + 1) * size)) for i in range(self.micro_batches)]
        parameters = self._parameters
        held = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        terms = self._broadcast_terms(self._runner(micro[0]).step(micro, self._loss_scale()))
        self._new_gradients = [parameter.grad for parameter in parameters]
        for parameter, gradient in zip(parameters, held, strict=True):
            parameter.grad = gradient
        return self._module.log_loss(terms, batch)

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Add the gradients of the micro-step; at the end of an accumulation, sum over all
        processes."""
        for parameter, gradient in zip(self._parameters, self._new_gradients, strict=True):
            if parameter.grad is None:
                parameter.grad = gradient
            elif gradient is not None:
                parameter.grad += gradient
        self._new_gradients = []
        if not self._is_accumulating:
            self._sum_gradients()
            self._copy_statistics()
        loss: Tensor = self.precision_plugin.post_backward(closure_loss, self._module)
        return loss

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Lightning enters this context while it accumulates."""
        self._is_accumulating = True
        try:
            yield
        finally:
            self._is_accumulating = False

    @property
    def _module(self) -> DetectionModule:
        assert isinstance(self.lightning_module, DetectionModule)
        return self.lightning_module

    @property
    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self._module.parameters() if parameter.requires_grad]

    def _runner(self, example: Batch) -> PipelineRunner:
        """The runner for batches of these shapes."""
        images = None if example.cameras is None else example.cameras.images.shape
        key = (example.size, images)
        if key not in self._runners:
            assert self._mesh is not None
            self._runners[key] = PipelineRunner(
                self._stages,
                partial(self._module.compute_loss, num_chunks=self.micro_batches),
                self.schedule,
                self.micro_batches,
                self._mesh.get_group("pipeline"),
                self.precision_plugin.forward_context,
                example,
                self.root_device,
            )
        return self._runners[key]

    def _loss_scale(self) -> Tensor | float:
        """Factor of a micro-batch's loss: 1 / (micro-batches x accumulation), times the loss scale
        of float16."""
        share = 1.0 / (self.micro_batches * self._module.trainer.accumulate_grad_batches)
        scaler = getattr(self.precision_plugin, "scaler", None)
        if scaler is None:
            return share
        # On every process: a scaler is initialised by its first use, also without a loss.
        scale: Tensor = scaler.scale(torch.full((), share, device=self.root_device))
        return scale

    def _broadcast_terms(self, terms: dict[str, Tensor]) -> dict[str, Tensor]:
        """The last stage's loss terms, on all stages."""
        if self.shape[1] == 1:
            return terms
        assert self._mesh is not None
        group = self._mesh.get_group("pipeline")
        values: list[dict[str, float]] = [{name: float(value) for name, value in terms.items()}]
        last = dist.get_global_rank(group, self.shape[1] - 1)
        dist.broadcast_object_list(values, last, group=group, device=self.root_device)
        return {
            name: torch.tensor(value, device=self.root_device) for name, value in values[0].items()
        }

    def _sum_gradients(self) -> None:
        """All-reduce to the gradients of the mean over the replicas; a parameter that no process
        used keeps none."""
        parameters = self._parameters
        used = torch.tensor(
            [parameter.grad is not None for parameter in parameters],
            dtype=torch.int32,
            device=self.root_device,
        )
        dist.all_reduce(used, dist.ReduceOp.MAX)
        pending = [p for p, is_used in zip(parameters, used.tolist(), strict=True) if is_used]
        while pending:
            bucket = [pending.pop()]
            while pending and sum(p.numel() for p in bucket) + pending[-1].numel() <= BUCKET_SIZE:
                bucket.append(pending.pop())
            flat = torch.cat(
                [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in bucket]
            )
            dist.all_reduce(flat)
            flat /= self.shape[0] * self.shape[2]
            pieces = torch.split(flat, [p.numel() for p in bucket])
            for parameter, piece in zip(bucket, pieces, strict=True):
                parameter.grad = piece.view_as(parameter)

    def _copy_statistics(self) -> None:
        """Broadcast each stage's batch-norm statistics from its first process: process 0, which
        saves and validates, has updated only those of its own stage."""
        assert self._mesh is not None
        if len(self._stages) == 1:
            return
        for rank, parts in zip(self._mesh.mesh[0, :, 0].tolist(), self._stages, strict=True):
            norms = [
                norm
                for part in parts
                for module in part.modules
                for norm in module.modules()
                if isinstance(norm, _BatchNorm) and norm.training
            ]
            for dtype in (torch.float32, torch.int64):
                buffers = [b for norm in norms for b in norm.buffers() if b.dtype == dtype]
                if buffers:
                    flat = torch.cat([buffer.flatten() for buffer in buffers])
                    dist.broadcast(flat, src=rank)
                    pieces = torch.split(flat, [buffer.numel() for buffer in buffers])
                    for buffer, piece in zip(buffers, pieces, strict=True):
                        buffer.copy_(piece.view_as(buffer))
