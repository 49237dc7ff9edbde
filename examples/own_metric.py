"""A metric of your own: the nuScenes metric, with the number of confident boxes printed."""

from collections.abc import Mapping, Sequence
from typing import Any

from bev_lightning.metrics.nuscenes import NuScenesEvaluator, Scores


class CountingEvaluator(NuScenesEvaluator):
    """Reports how many boxes score above a threshold beside the nuScenes metric."""

    def __init__(self, threshold: float, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.threshold = threshold

    def evaluate(
        self, results: Mapping[str, Sequence[Any]], ground_truth: Mapping[str, Any]
    ) -> Scores:
        """Score the predictions of the samples that ``ground_truth`` holds."""
        scores = [box["detection_score"] for boxes in results.values() for box in boxes]
        confident = sum(score > self.threshold for score in scores)
        print(f"{confident} of {len(scores)} boxes score above {self.threshold}", flush=True)
        return super().evaluate(results, ground_truth)
