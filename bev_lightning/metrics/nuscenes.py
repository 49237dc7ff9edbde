"""The nuScenes detection metric: mAP, NDS and true-positive errors, by the devkit's own functions.

The devkit's ``DetectionEval`` reads all tables itself and knows only official splits and whole
submissions. Here its functions (range, filter, matching, averaging) score any samples against given
ground truth; on an official split the numbers are equal.
Metric: Caesar et al., nuScenes, CVPR 2020, section 3.1.
"""

import math
import statistics
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from bev_lightning.classes import ATTRIBUTES, BICYCLE_RACK, DETECTION_CLASSES, map_detection_names
from bev_lightning.errors import InputError
from bev_lightning.metrics.submission import Entry, clean
from bev_lightning.structures.ground_truth import GroundTruth

ERRORS = {
    "trans_err": "ATE",
    "scale_err": "ASE",
    "orient_err": "AOE",
    "vel_err": "AVE",
    "attr_err": "AAE",
}
"""Short name of each true-positive error of the devkit."""

_UNDEFINED_ERRORS = {
    "traffic_cone": ("orient_err", "vel_err", "attr_err"),
    "barrier": ("vel_err", "attr_err"),
}


@dataclass(frozen=True)
class Scores:
    """Result of an evaluation.

    Attributes:
        mAP: mean of ``AP`` over all classes; a class without ground truth counts 0, as officially.
        NDS: nuScenes detection score.
        mAP_present: mean of ``AP`` over the classes that have evaluable ground truth; 0 if none
            has.
        AP: detection class -> mean over the matching distances 0.5, 1, 2 and 4 m.
        mATE, mASE, mAOE, mAVE, mAAE: translation [m], scale [1 - IoU], orientation [rad], velocity
            [m/s] and attribute [1 - accuracy] error of true positives within 2 m, mean over the
            classes that define it; a class without true positives counts 1.
        errors: class -> ATE, ASE, AOE, AVE, AAE; None where the metric does not define it.
        frames: number of evaluated samples.
        left_out: evaluated samples without results, e.g. for want of files; they count as empty.
        truth_per_frame: evaluable annotations (in class range, with points) a sample, on average.
        truth, predictions: class -> number of evaluable annotations and predictions.
        invalid, over_limit: predictions left out, see :class:`Refused`.
    """

    mAP: float
    NDS: float
    mAP_present: float
    AP: dict[str, float]
    mATE: float
    mASE: float
    mAOE: float
    mAVE: float
    mAAE: float
    errors: dict[str, dict[str, float | None]]
    frames: int
    truth_per_frame: float
    truth: dict[str, int]
    predictions: dict[str, int]
    invalid: int = 0
    over_limit: int = 0
    left_out: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain containers for JSON, without NaN."""
        return asdict(self)

    def __str__(self) -> str:
        """A text table: the means, then a line for each class."""
        means = f"mAP {self.mAP:.3f}   NDS {self.NDS:.3f}   " + "   ".join(
            f"m{name} {getattr(self, f'm{name}'):.3f}" for name in ERRORS.values()
        )
        names = "".join(f"{name:>7}" for name in ("AP", *ERRORS.values()))
        lines = [means, f"{'class':22}{names}{'truth':>8}{'predicted':>11}"]
        for name, ap in self.AP.items():
            values = [ap, *self.errors[name].values()]
            shown = "".join(f"{'-' if value is None else f'{value:.3f}':>7}" for value in values)
            lines.append(f"{name:22}{shown}{self.truth[name]:8}{self.predictions[name]:11}")
        lines.append(
            f"{self.frames} samples, {self.truth_per_frame:.1f} evaluable annotations a sample; "
            f"over the classes that have any mAP is {self.mAP_present:.3f}"
        )
        if self.left_out:
            lines.append(f"{self.left_out} of the samples have no results and count as empty")
        return "\n".join(lines)

    def to_log(self) -> dict[str, float]:
        """Flat numbers for a logger: ``mAP``, ``NDS``, ``mATE`` ..., ``AP/car`` ..."""
        names = ("mAP", "NDS", "mAP_present", "mATE", "mASE", "mAOE", "mAVE", "mAAE")
        return {name: getattr(self, name) for name in names} | {
            f"AP/{name}": value for name, value in self.AP.items()
        }


class NuScenesEvaluator:
    """Scores detections with the nuScenes metric.

    Classes with own names are scored as the nuScenes detection class that ``detection_names`` maps
    them to, with its range and its errors. Classes without one are left out, which is logged.

    Args:
        classes: names of the model's classes. The means go over the detection classes that they map
            to; with all ten it is the official metric.
        detection_names: nuScenes detection class of own classes.

    Attributes:
        detection_names: detection class of each class that is scored.

    Raises:
        InputError: no class is a detection class, or ``detection_names`` has an unknown one.
    """

    def __init__(
        self,
        classes: Sequence[str],
        detection_names: Mapping[str, str] | None = None,
    ) -> None:
        self.classes = tuple(classes)
        self.detection_names = map_detection_names(classes, detection_names)
        left_out = [name for name in classes if name not in self.detection_names]
        if not self.detection_names:
            raise InputError(
                f"the nuScenes metric knows none of data.classes={list(classes)}: map some in "
                f"model.evaluator.detection_names, or set model.evaluator=null"
            )
        if left_out:
            rank_zero_warn(
                f"the nuScenes metric leaves out {', '.join(left_out)}: map them in "
                f"model.evaluator.detection_names to score them"
            )

    def evaluate(
        self, results: Mapping[str, Sequence[Entry]], ground_truth: Mapping[str, GroundTruth]
    ) -> Scores:
        """Score the predictions of the samples that ``ground_truth`` holds.

        Args:
            results: sample token -> entries as of :func:`to_entries`; a missing sample counts as
                one without predictions. Invalid boxes and those beyond 500 a sample are left out.
            ground_truth: annotated boxes of each sample to evaluate, by token.

        Raises:
            InputError: there is no ground truth, or ``results`` holds other samples.
        """
        from nuscenes.eval.common.config import config_factory
        from nuscenes.eval.common.data_classes import EvalBoxes
        from nuscenes.eval.common.loaders import add_center_dist, filter_eval_boxes
        from nuscenes.eval.detection.data_classes import DetectionBox

        if not ground_truth:
            raise InputError(
                "there is no sample to evaluate: choose a data.val_split that has scenes in "
                "data.version"
            )
        others = [token for token in results if token not in ground_truth]
        if others:
            raise InputError(
                f"{len(others)} of the {len(results)} predicted samples, such as {others[0]}, are "
                f"not evaluated: predict and evaluate the same data.val_split"
            )
        config = config_factory("detection_cvpr_2019")
        classes = tuple(dict.fromkeys(self.detection_names.values()))
        config.class_names = classes
        cleaned, refused = clean(results)
        truth, predictions = EvalBoxes(), EvalBoxes()
        for token, boxes in ground_truth.items():
            truth.add_boxes(token, self._truth_boxes(token, boxes))
            entries = [
                DetectionBox.deserialize({**entry, "detection_name": name})
                for entry in cleaned.get(token, ())
                if (name := self._detection_name(entry["detection_name"])) is not None
            ]
            predictions.add_boxes(token, entries)
        tables = _Tables(ground_truth)
        for boxes_of in (truth, predictions):
            # The devkit's filter fails where all samples together have no box.
            if boxes_of.all:
                filter_eval_boxes(tables, add_center_dist(tables, boxes_of), config.class_range)

        metrics = _measure(truth, predictions, config)
        ap = {name: float(metrics.mean_dist_aps[name]) for name in classes}
        num_truth = Counter(box.detection_name for box in truth.all)
        num_predictions = Counter(box.detection_name for box in predictions.all)
        with warnings.catch_warnings():
            # The mean of an error that none of the classes defines.
            warnings.filterwarnings("ignore", "Mean of empty slice", RuntimeWarning)
            means = {
                name: 1.0 if math.isnan(mean) else mean for name, mean in metrics.tp_errors.items()
            }
            nds = float(metrics.nd_score)
        return Scores(
            mAP=float(metrics.mean_ap),
            NDS=nds,
            mAP_present=statistics.fmean([ap[n] for n in classes if num_truth[n]] or [0.0]),
            AP=ap,
            **{f"m{ours}": means[theirs] for theirs, ours in ERRORS.items()},
            errors={
                name: {
                    ours: _none_if_nan(metrics.get_label_tp(name, theirs))
                    for theirs, ours in ERRORS.items()
                }
                for name in classes
            },
            frames=len(ground_truth),
            truth_per_frame=len(truth.all) / len(ground_truth),
            truth={name: num_truth[name] for name in classes},
            predictions={name: num_predictions[name] for name in classes},
            invalid=refused.invalid,
            over_limit=refused.over_limit,
            left_out=sum(token not in results for token in ground_truth),
        )

    def _detection_name(self, name: str) -> str | None:
        """Detection class of a box's class, which need not be one of the model's; None: none."""
        return self.detection_names.get(name, name if name in DETECTION_CLASSES else None)

    def _truth_boxes(self, token: str, boxes: GroundTruth) -> list[Any]:
        """The devkit's boxes, as its ``load_gt`` makes them."""
        from nuscenes.eval.detection.data_classes import DetectionBox

        return [
            DetectionBox(
                sample_token=token,
                translation=boxes.centre[row].tolist(),
                size=boxes.size[row, [1, 0, 2]].tolist(),
                rotation=boxes.rotation[row].tolist(),
                velocity=boxes.velocity[row],
                num_pts=int(boxes.num_points[row]),
                detection_name=detection,
                # Attributes of other data sets are none to the metric.
                attribute_name=attribute if attribute in ATTRIBUTES else "",
            )
            for row, (name, attribute) in enumerate(
                zip(boxes.class_name, boxes.attribute, strict=True)
            )
            if (detection := self._detection_name(name)) is not None
        ]


class _Tables:
    """The records that the devkit's range and bicycle rack filters look up, from ground truth."""

    def __init__(self, ground_truth: Mapping[str, GroundTruth]) -> None:
        self.ground_truth = ground_truth

    def get(self, table: str, token: Any) -> dict[str, Any]:
        if table == "sample":
            num_racks = len(self.ground_truth[token].rack_centre)
            racks = [(token, row) for row in range(num_racks)]
            return {"data": {"LIDAR_TOP": token}, "anns": racks}
        if table == "sample_data":
            return {"ego_pose_token": token}
        if table == "ego_pose":
            return {"translation": self.ground_truth[token].ego_position.tolist()}
        sample, row = token
        boxes = self.ground_truth[sample]
        return {
            "category_name": BICYCLE_RACK,
            "translation": boxes.rack_centre[row].tolist(),
            "size": boxes.rack_size[row, [1, 0, 2]].tolist(),
            "rotation": boxes.rack_rotation[row].tolist(),
        }


def _none_if_nan(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


def _measure(truth: Any, predictions: Any, config: Any) -> Any:
    """The devkit's ``DetectionMetrics``: the body of ``DetectionEval.evaluate``."""
    from nuscenes.eval.detection.algo import accumulate, calc_ap, calc_tp
    from nuscenes.eval.detection.data_classes import DetectionMetrics

    metrics = DetectionMetrics(config)
    for name in config.class_names:
        for distance in config.dist_ths:
            curve = accumulate(truth, predictions, name, config.dist_fcn_callable, distance)
            ap = calc_ap(curve, config.min_recall, config.min_precision)
            metrics.add_label_ap(name, distance, ap)
            if distance == config.dist_th_tp:
                for error in ERRORS:
                    defined = error not in _UNDEFINED_ERRORS.get(name, ())
                    value = calc_tp(curve, config.min_recall, error) if defined else math.nan
                    metrics.add_label_tp(name, error, value)
    return metrics
