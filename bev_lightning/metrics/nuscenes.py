"""The nuScenes detection metric: mAP, NDS and true-positive errors, by the devkit's own functions.

``DetectionEval`` of the devkit only knows the official splits and whole submissions. Here its
pieces (distance, filter, matching, averaging) are called on exactly the samples asked for, so that
custom splits and samples without predictions work; on an official split the numbers are the same.
Metric: Caesar et al., nuScenes, CVPR 2020, section 3.1.
"""

import json
import math
import statistics
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from bev_lightning.errors import InputError
from bev_lightning.metrics.submission import Entry, clean

ERRORS = {
    "trans_err": "ATE",
    "scale_err": "ASE",
    "orient_err": "AOE",
    "vel_err": "AVE",
    "attr_err": "AAE",
}
"""The devkit's names of the true-positive errors, and ours."""

_TABLES = (
    *("category", "attribute", "visibility", "instance", "sensor", "calibrated_sensor"),
    *("ego_pose", "log", "scene", "sample", "sample_data", "sample_annotation", "map"),
)

_MEANINGLESS = {
    "traffic_cone": ("orient_err", "vel_err", "attr_err"),
    "barrier": ("vel_err", "attr_err"),
}


@dataclass(frozen=True)
class Scores:
    """One evaluation.

    Attributes:
        mAP: mean of ``AP`` over all classes; a class without ground truth counts 0, as officially.
        NDS: nuScenes detection score.
        mAP_present: mean of ``AP`` over the classes that have evaluable ground truth; 0 if none
            has.
        AP: class -> mean over the matching distances 0.5, 1, 2 and 4 m.
        mATE, mASE, mAOE, mAVE, mAAE: translation [m], scale [1 - IoU], orientation [rad], velocity
            [m/s] and attribute [1 - accuracy] error of true positives within 2 m, mean over the
            classes that define it; a class without true positives counts 1.
        errors: class -> ATE, ASE, AOE, AVE, AAE; None where the metric does not define it.
        frames: evaluated samples.
        left_out: evaluated samples without results, which count as empty: their files are missing
            or cannot be read, or the submission lacks them.
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
        """Plain containers that JSON can hold: no NaN in them."""
        return asdict(self)

    def __str__(self) -> str:
        """A table for people: the means, then a line for each class."""
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
    """Score detections on any samples of a nuScenes tree.

    The tables are read at the first evaluation and kept for the process, one copy for each tree.

    Args:
        root: folder that holds the ``version`` folder.
        version: such as ``v1.0-mini``.
        classes: detection names that the model predicts; the means go over these. All ten: the
            official metric.
    """

    def __init__(self, root: Path, version: str, classes: Sequence[str]) -> None:
        self.root = Path(root)
        self.version = version
        self.classes = tuple(classes)

    def evaluate(self, results: Mapping[str, Sequence[Entry]], tokens: Sequence[str]) -> Scores:
        """Score the predictions of the samples ``tokens``.

        Args:
            results: sample token -> entries as of :func:`to_entries`; a sample that is missing
                counts as one without predictions. Invalid boxes and those beyond 500 a sample are
                left out.
            tokens: the samples to evaluate on; repeated ones count once.

        Raises:
            InputError: ``results`` holds samples that are not in ``tokens``, an unknown class, or
                there is nothing to evaluate on.
        """
        from nuscenes.eval.common.config import config_factory
        from nuscenes.eval.common.data_classes import EvalBoxes
        from nuscenes.eval.common.loaders import add_center_dist, filter_eval_boxes
        from nuscenes.eval.detection.data_classes import DetectionBox

        config = config_factory("detection_cvpr_2019")
        unknown = sorted(set(self.classes) - set(config.class_range))
        if unknown or not self.classes:
            raise InputError(
                "the nuScenes metric does not know the classes "
                f"{', '.join(unknown) or '(none given)'}; set data.classes "
                f"to names out of {', '.join(config.class_range)}"
            )
        config.class_names = self.classes
        tokens = list(dict.fromkeys(tokens))
        tables = _load_tables(str(self.root.resolve()), self.version)
        self._check_samples(tables, results, tokens)

        cleaned, refused = clean(results)
        truth, predictions = _load_truth(tables, tokens), EvalBoxes()
        for token in tokens:
            entries = [DetectionBox.deserialize(entry) for entry in cleaned.get(token, ())]
            predictions.add_boxes(token, entries)
        for boxes in (truth, predictions):
            # The devkit's filter raises when there is not one box in all samples.
            if boxes.all:
                filter_eval_boxes(tables, add_center_dist(tables, boxes), config.class_range)

        metrics = _measure(truth, predictions, config)
        ap = {name: float(metrics.mean_dist_aps[name]) for name in self.classes}
        num_truth = Counter(box.detection_name for box in truth.all)
        num_predictions = Counter(box.detection_name for box in predictions.all)
        with warnings.catch_warnings():
            # The mean over classes none of which has this error.
            warnings.filterwarnings("ignore", "Mean of empty slice", RuntimeWarning)
            means = {
                name: 1.0 if math.isnan(mean) else mean for name, mean in metrics.tp_errors.items()
            }
            nds = float(metrics.nd_score)
        return Scores(
            mAP=float(metrics.mean_ap),
            NDS=nds,
            mAP_present=statistics.fmean([ap[n] for n in self.classes if num_truth[n]] or [0.0]),
            AP=ap,
            **{f"m{ours}": means[theirs] for theirs, ours in ERRORS.items()},
            errors={
                name: {
                    ours: _none_if_nan(metrics.get_label_tp(name, theirs))
                    for theirs, ours in ERRORS.items()
                }
                for name in self.classes
            },
            frames=len(tokens),
            truth_per_frame=len(truth.all) / len(tokens),
            truth={name: num_truth[name] for name in self.classes},
            predictions={name: num_predictions[name] for name in self.classes},
            invalid=refused.invalid,
            over_limit=refused.over_limit,
            left_out=sum(token not in results for token in tokens),
        )

    def _check_samples(
        self, tables: Any, results: Mapping[str, Sequence[Entry]], tokens: Sequence[str]
    ) -> None:
        """Raise InputError unless the tokens are in the tables and hold those of the results."""
        if not tokens:
            raise InputError(
                f"there is no sample to evaluate on in {self.root / self.version}; choose a "
                "data.val_split that has scenes there"
            )
        known = {sample["token"] for sample in tables.sample}
        missing = [token for token in tokens if token not in known]
        if missing:
            raise InputError(
                f"{len(missing)} of the {len(tokens)} samples to evaluate on, such as "
                f"{missing[0]}, are not in the tables {self.root / self.version}; set data.root "
                "and data.version to the tree they were taken from"
            )
        asked = set(tokens)
        outside = [token for token in results if token not in asked]
        if outside:
            raise InputError(
                f"{len(outside)} of the {len(results)} predicted samples are not evaluated: the "
                f"predictions are of {_split_of(tables, outside)}, the evaluation is on "
                f"{_split_of(tables, tokens)}; predict and evaluate the same data.val_split"
            )


def _none_if_nan(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


@lru_cache(maxsize=2)
def _load_tables(root: str, version: str) -> Any:
    """The devkit's ``NuScenes`` without maps; for the full set this takes about 1.5 minutes and
    8 GiB.

    ``NuScenes`` itself opens the map masks and reads the lidarseg tables, files that the metric
    does not need and that a partial download lacks.

    Raises:
        InputError: there are no such tables, or one of them is missing or broken.
    """
    folder = Path(root) / version
    if not (folder / "sample.json").is_file():
        raise InputError(
            f"{folder} holds no nuScenes tables; set data.root and data.version to a folder that "
            "does"
        )
    from nuscenes import NuScenes

    class Tables(NuScenes):
        def __init__(self) -> None:
            self.version, self.dataroot, self.verbose = version, root, False
            self.table_names = list(_TABLES)
            for name in _TABLES:
                setattr(self, name, self.__load_table__(name))
            self.__make_reverse_index__(False)

    try:
        return Tables()
    except (OSError, ValueError, LookupError) as error:
        raise InputError(
            f"the tables in {folder} cannot be read ({type(error).__name__}: {error}); download "
            "the metadata again"
        ) from None


def _load_truth(tables: Any, tokens: Iterable[str]) -> Any:
    """Annotations of the samples as the devkit's ``EvalBoxes``.

    The same boxes as ``load_gt_of_sample_tokens``, which cannot be silenced.
    """
    from nuscenes.eval.common.data_classes import EvalBoxes
    from nuscenes.eval.detection.data_classes import DetectionBox
    from nuscenes.eval.detection.utils import category_to_detection_name

    truth = EvalBoxes()
    for token in tokens:
        boxes = []
        for annotation_token in tables.get("sample", token)["anns"]:
            annotation = tables.get("sample_annotation", annotation_token)
            name = category_to_detection_name(annotation["category_name"])
            if name is None:
                continue
            attributes = [
                tables.get("attribute", a)["name"] for a in annotation["attribute_tokens"]
            ]
            if len(attributes) > 1:
                raise InputError(
                    f"annotation {annotation_token} has {len(attributes)} attributes where the "
                    "nuScenes metric allows one; mend its attribute_tokens in "
                    "sample_annotation.json"
                )
            boxes.append(
                DetectionBox(
                    sample_token=token,
                    translation=annotation["translation"],
                    size=annotation["size"],
                    rotation=annotation["rotation"],
                    velocity=tables.box_velocity(annotation_token)[:2],
                    num_pts=annotation["num_lidar_pts"] + annotation["num_radar_pts"],
                    detection_name=name,
                    attribute_name=attributes[0] if attributes else "",
                )
            )
        truth.add_boxes(token, boxes)
    return truth


def _measure(truth: Any, predictions: Any, config: Any) -> Any:
    """The devkit's ``DetectionMetrics``: the body of ``DetectionEval.evaluate``."""
    from nuscenes.eval.detection.algo import accumulate, calc_ap, calc_tp
    from nuscenes.eval.detection.data_classes import DetectionMetrics

    metrics = DetectionMetrics(config)
    for name in config.class_names:
        for distance in config.dist_ths:
            curve = accumulate(truth, predictions, name, config.dist_fcn_callable, distance)
            metrics.add_label_ap(
                name, distance, calc_ap(curve, config.min_recall, config.min_precision)
            )
            if distance == config.dist_th_tp:
                for error in ERRORS:
                    defined = error not in _MEANINGLESS.get(name, ())
                    value = calc_tp(curve, config.min_recall, error) if defined else math.nan
                    metrics.add_label_tp(name, error, value)
    return metrics


def _split_of(tables: Any, tokens: Sequence[str]) -> str:
    """Name of the smallest split that holds the scenes of the samples, or the scenes themselves."""
    from nuscenes.utils.splits import create_splits_scenes

    known = {sample["token"]: sample["scene_token"] for sample in tables.sample}
    strangers = sum(token not in known for token in tokens)
    if strangers:
        return f"{strangers} samples that {tables.version} does not have"
    scenes = {tables.get("scene", known[token])["name"] for token in tokens}
    own = Path(tables.dataroot) / tables.version / "splits.json"
    splits: dict[str, list[str]] = json.loads(own.read_text()) if own.is_file() else {}
    for name, members in create_splits_scenes().items():
        if ("mini" in name) == tables.version.endswith("mini"):
            splits[name] = members
    holding = {name: members for name, members in splits.items() if scenes <= set(members)}
    if holding:
        return min(holding, key=lambda name: len(holding[name]))
    listed = sorted(scenes)
    return ", ".join(listed[:3]) + (
        f" and {len(listed) - 3} more scenes" if len(listed) > 3 else ""
    )
