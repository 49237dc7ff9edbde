"""A logger of your own: prints the metrics."""

from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only


class PrintLogger(Logger):
    """Prints the losses of training as they come."""

    name, version = "print", "0"

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """One line for each call with a training loss."""
        if "train/loss" in metrics:
            print(f"logged step {step}: train/loss {metrics['train/loss']:.3f}", flush=True)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to keep."""
