"""What the package requires of a network, and the hooks that a network may implement.

A network of your own is an ``nn.Module`` that implements :class:`DetectionNetwork`; name it under
``model.network._target_``. Nothing else is needed for training, evaluation and prediction. Each of
the other protocols is optional and looked for by its method or attribute, never by class.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from bev_lightning.errors import InputError
from bev_lightning.structures import Batch, Boxes3D


class DetectionNetwork(Protocol):
    """A network that maps a batch to predictions and predictions to boxes."""

    def __call__(self, batch: Batch) -> Any:
        """Predictions, in the form that the loss under ``model.loss`` takes."""
        ...

    def decode(self, predictions: Any) -> Boxes3D:
        """Boxes ``(B, M)`` in the model frame, with scores."""
        ...


@runtime_checkable
class ReadsCanBus(Protocol):
    """A network that can depend on ``Batch.can_bus``; others are taken not to."""

    @property
    def reads_can_bus(self) -> bool:
        """Whether this configuration depends on it; if so, a data set without CAN bus is warned
        about."""
        ...


@runtime_checkable
class SupportsRegionalCompile(Protocol):
    """A network that ``compile=regions`` can compile."""

    def dense_regions(self) -> list[nn.Module]:
        """Submodules with most of the arithmetic, whose shapes do not change between steps and
        which compile without a graph break."""
        ...


@runtime_checkable
class SupportsFakeForward(Protocol):
    """A submodule whose output shape depends on values, such as a number of voxels.

    The memory forecast runs on fake tensors, which have no values, and calls ``fake_forward``
    instead of ``forward``.
    """

    def fake_forward(self, *inputs: Any) -> Any:
        """The forward pass with a typical, fixed number of rows."""
        ...


@runtime_checkable
class SupportsPretrained(Protocol):
    """A submodule that can start from published weights, see
    :func:`bev_lightning.checkpointing.pretrained.load_backbone`."""

    pretrained: str | None


@runtime_checkable
class SupportsCheckpointing(Protocol):
    """A submodule that recomputes its activations in the backward pass on request."""

    gradient_checkpointing: bool


@runtime_checkable
class HasOfficialWeights(Protocol):
    """A network whose weights the convert command translates from and to published formats; its
    parts are registered in :mod:`bev_lightning.checkpointing.official`.

    Attributes:
        official_formats: the formats' names, the default first.
    """

    official_formats: tuple[str, ...]


class RowParallel(Protocol):
    """Processes that split the rows of a BEV map between them; every method is differentiable."""

    @property
    def size(self) -> int:
        """G, the number of processes."""
        ...

    @property
    def rank(self) -> int:
        """Index of this process, and of its strip of rows."""
        ...

    def gather_samples(self, value: Tensor) -> Tensor:
        """The samples ``(B, ...)`` of every process, as ``(G * B, ...)``."""
        ...

    def gather_rows(self, value: Tensor) -> Tensor:
        """The rows ``(B, R, C)`` that every process has of the same samples: ``(B, G * R, C)``."""
        ...

    def rows_to_samples(self, value: Tensor, dim: int) -> Tensor:
        """From this process's rows of all samples ``(G * B, ..., R, ...)``, with R at ``dim``, to
        all rows of its own samples ``(B, ..., G * R, ...)``."""
        ...


@dataclass(frozen=True)
class PipelinePart:
    """One part of a network that a pipeline stage may begin with.

    Attributes:
        name: its name in ``strategy.cuts``.
        run: maps the batch and the previous part's outputs to a tuple of floating-point tensors,
            in the last part to the predictions.
        modules: those it calls, whose batch-norm statistics it therefore updates.
    """

    name: str
    run: Callable[..., Any]
    modules: tuple[nn.Module, ...]


@dataclass(frozen=True)
class ModelPartition:
    """A network as consecutive parts, for pipeline parallelism.

    Attributes:
        parts: in the order of the forward pass.
        cuts: parts that a stage may begin with, the best first.
    """

    parts: Sequence[PipelinePart]
    cuts: tuple[str, ...]


@runtime_checkable
class SupportsPipeline(Protocol):
    """A network that ``strategy=pipeline`` and ``hybrid`` can split."""

    def pipeline_parts(self, row_parallel: RowParallel) -> ModelPartition:
        """The network as consecutive parts.

        Args:
            row_parallel: the processes of ``strategy.model`` that share the network's BEV transform
                (more than one only if ``strategy.model`` is set above 1).

        Raises:
            InputError: the network cannot be split over that many processes.
        """
        ...


def check_rows(row_parallel: RowParallel, num_rows: int, key: str) -> None:
    """Raise InputError if the processes cannot share ``num_rows`` rows evenly.

    Args:
        key: configuration key of the grid that has these rows.
    """
    if num_rows % row_parallel.size:
        raise InputError(
            f"strategy.model={row_parallel.size} does not divide the {num_rows} rows of {key}; set "
            "strategy.model to a divisor"
        )
