"""BEVFormer against outputs of the official code (fixtures A, B and H_nmsfree).

Cases ``bs1*`` are compared number by number. In cases ``bs2*`` the official code mixes the rows of
a batch (its queries look at row 0's cameras and history): there each of our rows must equal our run
of that row alone, and what the official code computes row by row is compared.
"""

import functools
import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parity_files import needs_parity_files, parity_folders, read_arrays, recorded_outputs
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from bev_lightning.checkpointing.key_map import translate_to_ours
from bev_lightning.checkpointing.official import bevformer_head_parts
from bev_lightning.losses.set_prediction import SetPredictionLoss
from bev_lightning.models.attention import ImageAttention, VisibleQueries
from bev_lightning.models.bev_encoder import BEVEncoder, PreviousBev
from bev_lightning.models.bevformer_head import BEVFormerHead
from bev_lightning.models.ego_motion import rotate_map
from bev_lightning.structures import BevGrid, Boxes3D
from bev_lightning.structures.geometry import wrap_angle
from bev_lightning.structures.predictions import (
    BEVFormerPredictions,
    MetricBoxCodec,
    QueryPredictions,
)

pytestmark = needs_parity_files
OFFICIAL_CENTRE = (100.0, 100.0)  # of the rotation, where a case does not set it


def close(actual: Any, expected: np.ndarray, atol: float, rtol: float = 0.0) -> None:
    actual = actual.detach().numpy() if isinstance(actual, Tensor) else np.asarray(actual)
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, atol=atol, rtol=rtol, equal_nan=False)


def make_grid(config: Mapping[str, Any]) -> BevGrid:
    low_high = config["transformer"]["encoder"]["pc_range"]
    cell = (
        (low_high[3] - low_high[0]) / config["bev_w"],
        (low_high[4] - low_high[1]) / config["bev_h"],
    )
    return BevGrid(tuple(low_high), cell)


def attention_config(layer: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    return next(attention for attention in layer["attn_cfgs"] if attention["type"] == kind)


class Network(nn.Module):
    """Encoder and head of a config: all but backbone and neck."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        transformer = config["transformer"]
        encoder, decoder = transformer["encoder"], transformer["decoder"]
        layer = encoder["transformerlayers"]
        temporal = attention_config(layer, "TemporalSelfAttention")
        spatial = attention_config(layer, "SpatialCrossAttention")["deformable_attention"]
        grid = make_grid(config)
        centre = transformer.get("rotate_center", OFFICIAL_CENTRE)
        self.encoder = BEVEncoder(
            grid,
            channels=transformer["embed_dims"],
            num_layers=encoder["num_layers"],
            num_heads=spatial.get("num_heads", 8),
            num_levels=transformer["num_feature_levels"],
            num_cameras=transformer["num_cams"],
            num_anchors=encoder["num_points_in_pillar"],
            num_points=spatial.get("num_points", 8),
            num_temporal_points=temporal.get("num_points", 4),
            ffn_channels=layer["feedforward_channels"],
            dropout=layer["ffn_dropout"],
            motion="can_bus",
            use_can_bus=transformer["use_can_bus"],
            rotation_centre=(float(centre[0]), float(centre[1])),
        )
        layer, coder = decoder["transformerlayers"], config["bbox_coder"]
        attention = attention_config(layer, "CustomMSDeformableAttention")
        self.head = BEVFormerHead(
            grid,
            channels=transformer["embed_dims"],
            num_classes=config["num_classes"],
            num_queries=config["num_query"],
            num_layers=decoder["num_layers"],
            num_heads=attention_config(layer, "MultiheadAttention")["num_heads"],
            num_points=attention.get("num_points", 4),
            ffn_channels=layer["feedforward_channels"],
            dropout=layer["ffn_dropout"],
            max_boxes=coder["max_num"],
            score_threshold=coder.get("score_threshold"),
            range_m=coder["post_center_range"],
        )


def from_official(boxes: np.ndarray, labels: np.ndarray, z_shift: float) -> Boxes3D:
    """Boxes ``[x, y, z, w, l, h, -yaw - pi / 2, vx, vy]``; z_shift heights from z to the centre."""
    rows = torch.from_numpy(boxes)
    centre = rows[:, :3].clone()
    centre[:, 2] += z_shift * rows[:, 5]
    return Boxes3D(
        centre=centre,
        size=rows[:, [4, 3, 5]],
        yaw=wrap_angle(-rows[:, 6] - math.pi / 2),
        velocity=rows[:, 7:9],
        label=torch.from_numpy(labels),
        valid=torch.ones(len(rows), dtype=torch.bool),
    )


def same_boxes(boxes: Boxes3D, expected: np.ndarray, z_shift: float) -> None:
    """Compare valid boxes with official rows, whose z lies z_shift heights below the centre."""
    boxes = boxes[boxes.valid]
    z = boxes.centre[:, 2:] - z_shift * boxes.size[:, 2:]
    actual = torch.cat([boxes.centre[:, :2], z, boxes.size[:, [1, 0, 2]], boxes.velocity], dim=1)
    close(actual, expected[:, [0, 1, 2, 3, 4, 5, 7, 8]], atol=2e-3, rtol=1e-4)
    turn = wrap_angle(-boxes.yaw - math.pi / 2).numpy() - expected[:, 6]
    assert np.abs((turn + math.pi) % (2 * math.pi) - math.pi).max(initial=0.0) < 2e-3


class Case:
    """One run of a case, and of each of its rows alone where it has several."""

    def __init__(self, folder: Path, name: str) -> None:
        everything = json.loads((folder / "config.json").read_text())
        self.name, self.config = name, everything["head"]
        self.code_weights = everything.get("code_weights", [1.0] * 8 + [0.2] * 2)
        match = re.fullmatch(r"bs(\d+)(b?)_(noprev|prev)(_center(\d+))?(_OFFICIAL_QUIRK)?", name)
        if match is None:
            pytest.fail(f"no test knows the case {name}")
        self.rows = [1] if match[2] else list(range(int(match[1])))
        self.has_previous = match[3] == "prev"
        self.network = Network(self.config).eval()
        if match[5]:
            self.network.encoder.rotation_centre = (float(match[5]), float(match[5]))
        weights = load_file(folder / "weights.safetensors")
        self.network.load_state_dict(translate_to_ours(weights, bevformer_head_parts("")).state)
        self.inputs = read_arrays(folder, "inputs.npz")
        self.inter: dict[str, Tensor] = {}
        self._record()
        self.bev = self.encode(self.rows)
        self.alone: list[Tensor] = []
        if len(self.rows) > 1:
            recorded = dict(self.inter)
            with torch.no_grad():
                self.alone = [self.encode([row]) for row in self.rows]
            self.inter = recorded

    def rows_of(self, name: str, rows: list[int]) -> Tensor:
        return torch.from_numpy(self.inputs[name][rows])

    def encode(self, rows: list[int]) -> Tensor:
        encoder = self.network.encoder
        levels = self.config["transformer"]["num_feature_levels"]
        maps = [self.rows_of(f"mlvl_feats{level}", rows) for level in range(levels)]
        previous = None
        if self.has_previous:
            bev = self.rows_of("prev_bev", rows).transpose(1, 2)
            bev = bev.unflatten(2, encoder.grid.shape)
            previous = PreviousBev(bev, torch.ones(len(rows), dtype=torch.bool))
        bev: Tensor = encoder(
            maps,
            self.rows_of("lidar2img", rows).float(),
            tuple(int(side) for side in self.inputs["img_shape"][:2]),
            self.rows_of("can_bus", rows).float(),
            torch.eye(4).expand(len(rows), 4, 4),
            previous,
        )
        return bev

    def _record(self) -> None:
        def keep(name: str) -> Callable[..., None]:
            return lambda module, args, output: self.inter.__setitem__(name, output.detach())

        for number, layer in enumerate(self.network.encoder.layers):
            layer.register_forward_hook(keep(f"enc_layer{number}"))
            layer.temporal.register_forward_hook(keep(f"enc_layer{number}_tsa"))
            layer.spatial.register_forward_hook(keep(f"enc_layer{number}_sca"))
            layer.spatial.deformable_attention.register_forward_hook(
                self._keep_views(f"enc_layer{number}_msda3d")
            )

    def _keep_views(self, name: str) -> Callable[..., None]:
        """The official attention gives each camera's part; ours their sum. One camera alone is its
        part."""

        def keep(module: ImageAttention, args: tuple[Any, ...], output: Tensor) -> None:
            query, features, shapes, visible = args
            batch, num_cameras = visible.seen.shape[:2]
            parts = []
            for n in range(num_cameras):
                seen, anchors = visible.seen[:, n : n + 1], visible.anchors[:, n : n + 1]
                alone = VisibleQueries(seen, anchors, visible.num_cameras)
                image = features.unflatten(0, (batch, num_cameras))[:, n]
                parts.append(module.forward(query, image, shapes, alone).detach())
            assert torch.allclose(sum(parts), output, atol=1e-5)
            self.inter[name] = torch.stack(parts, dim=1)
            self.seen = visible.seen

        return keep

    def flat_bev(self) -> Tensor:
        return self.bev.flatten(2).transpose(1, 2)

    @functools.cached_property
    def rows_are_independent(self) -> bool:
        """Each row of the batch equals its own run; raises where not."""
        assert len(self.alone) == len(self.rows)
        for row, alone in enumerate(self.alone):
            close(self.bev[row : row + 1], alone.numpy(), atol=2e-5)
        return True


class EncoderCase(Case):
    def check(self, output: str, expected: np.ndarray) -> None:
        """Compare one stored output of fixture A. Fails on a name that is not known."""
        encoder = self.network.encoder
        can_bus = self.rows_of("can_bus", self.rows).float()
        motion = encoder.ego_motion(can_bus, torch.eye(4).expand(len(self.rows), 4, 4))
        quirk = len(self.rows) > 1
        if output == "bev_embed" or output in self.inter:
            if quirk:
                assert self.rows_are_independent
                if self.has_previous or output != "bev_embed":
                    return
                # Without history row 0 is as if alone in the official code too.
                close(self.flat_bev()[:1], expected[:1], 1e-4, 1e-4)
                return
            if output.endswith("_msda3d"):
                # Rows of each camera's queries, then padding.
                for rows, seen, wanted in zip(
                    self.inter[output][0], self.seen[0], expected, strict=True
                ):
                    close(rows[seen], wanted[: int(seen.sum())], 1e-4, 1e-4)
                return
            actual = self.flat_bev() if output == "bev_embed" else self.inter[output]
            close(actual, expected, 1e-4, 1e-4)
        elif output == "can_bus_mlp":
            close(encoder.can_bus_mlp(can_bus), expected, 1e-4, 1e-4)
        elif output == "shift":
            close(encoder.shift(motion), expected, 1e-6, 1e-5)
        elif output == "prev_bev_rotated":
            previous = self.rows_of("prev_bev", self.rows).transpose(1, 2)
            previous = previous.unflatten(2, encoder.grid.shape)
            rotated = rotate_map(previous, motion.rotation, encoder.rotation_centre)
            close(rotated.flatten(2).permute(2, 0, 1), expected, 0.0)
        elif output in ("reference_points_cam", "bev_mask"):
            size = tuple(int(side) for side in self.inputs["img_shape"][:2])
            fractions, seen = encoder.project_anchors(
                self.rows_of("lidar2img", self.rows).float(), size
            )
            seen = seen.transpose(0, 1)
            if output == "bev_mask":
                close(seen, expected, 0.0)
            else:  # it means nothing where nothing is seen
                assert fractions.transpose(0, 1).shape == expected.shape
                close(fractions.transpose(0, 1)[seen], expected[seen.numpy()], 1e-4, 1e-4)
        else:
            pytest.fail(f"no test knows the output {self.name}/{output}")


def check_constant(case: Case, output: str, expected: np.ndarray) -> None:
    encoder = case.network.encoder
    low, high = torch.tensor(encoder.grid.range).view(2, 3)
    values = {
        "ref_3d": ((encoder.anchors - low) / (high - low)).transpose(0, 1).unsqueeze(0),
        "ref_2d": encoder.cell_centres[None, :, None],
        "bev_pos": encoder.positions().T.unflatten(1, encoder.grid.shape).unsqueeze(0),
    }
    if output not in values:
        pytest.fail(f"no test knows the output {output}")
    close(values[output], expected, 1e-5)


class HeadCase(Case):
    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(folder, name)
        self.predictions = self.network.head(self.bev)
        self.targets = self.samples(self.rows)
        self.criterion = SetPredictionLoss(
            class_weight=self.config["loss_cls"]["loss_weight"],
            box_weight=self.config["loss_bbox"]["loss_weight"],
            code_weights=self.code_weights,
            skip_unknown_rows=True,
        )
        self.assignment = self.criterion.match(self.predictions, self.targets).finish()
        self.by_class, self.by_box = self.criterion.layer_terms(
            self.predictions, self.targets, self.assignment
        )
        if not self.alone:
            (self.by_class.sum() + self.by_box.sum()).backward()
            return
        with torch.no_grad():
            self.heads_alone = [self.network.head(bev) for bev in self.alone]

    def samples(self, rows: list[int]) -> Boxes3D:
        return Boxes3D.stack(
            [
                from_official(
                    self.inputs[f"gt_boxes_bottom_center{row}"], self.inputs[f"gt_labels{row}"], 0.5
                )
                for row in rows
            ]
        )

    def check(self, output: str, expected: np.ndarray) -> None:
        """Compare one stored output of fixture B. Fails on a name that is not known."""
        kind, _, rest = output.partition("/")
        checks: dict[str, Callable[[str, np.ndarray], None]] = {
            "bev_embed": lambda rest, value: close(
                self.bev.flatten(2).permute(2, 0, 1), value, 1e-4
            ),
            "all_cls_scores": lambda rest, value: close(
                self.predictions.queries.logits, value, 1e-3
            ),
            "all_bbox_preds": lambda rest, value: close(self.predictions.queries.code, value, 2e-3),
            "loss": self.check_loss,
            "gradnorm": self.check_gradient_norm,
            "grad": self.check_gradient,
            "assigned_gt_inds": self.check_assignment,
            "decode": self.check_boxes,
            "get_bboxes": self.check_boxes,
        }
        if kind not in checks:
            pytest.fail(f"no test knows the output {self.name}/{output}")
        if self.alone:
            self.check_quirk(kind, output, expected)
        else:
            checks[kind](rest, expected)

    @functools.cached_property
    def queries_are_independent(self) -> bool:
        """The same of predictions and assignments; and the loss of a batch is that of its rows,
        each weighed by its number of boxes."""
        total, count = torch.zeros(()), 0
        for row, alone in enumerate(self.heads_alone):
            queries = self.predictions.queries
            close(queries.logits[:, row : row + 1], alone.queries.logits.numpy(), 1e-4)
            close(queries.code[:, row : row + 1], alone.queries.code.numpy(), 1e-3)
            targets = self.samples([self.rows[row]])
            assignment = self.criterion.match(alone, targets).finish()
            close(self.assignment.box[:, row : row + 1], assignment.box.numpy(), 0.0)
            by_class, by_box = self.criterion.layer_terms(alone, targets, assignment)
            total = total + (by_class.sum() + by_box.sum()) * targets.num
            count += targets.num
        close(total / count, self.loss("total").detach().numpy(), 1e-5, 1e-5)
        return True

    def check_quirk(self, kind: str, output: str, expected: np.ndarray) -> None:
        """Of a batch whose rows the official code mixes."""
        assert self.rows_are_independent and self.queries_are_independent
        if kind == "loss":
            self.loss(output.removeprefix("loss/"))
        elif kind in ("gradnorm", "grad"):
            self.parameter(output.partition("/")[2])
        elif kind in ("decode", "get_bboxes", "assigned_gt_inds") and "sample0" in output:
            # Row 0 is right in the official code.
            {
                "decode": self.check_boxes,
                "get_bboxes": self.check_boxes,
                "assigned_gt_inds": self.check_assignment,
            }[kind](output.partition("/")[2], expected)

    def loss(self, name: str) -> Tensor:
        last = len(self.by_class) - 1
        match = re.fullmatch(r"(?:d(\d+)\.)?loss_(cls|bbox)", name)
        if name == "total":
            return self.by_class.sum() + self.by_box.sum()
        if match is None:
            pytest.fail(f"no test knows the output {self.name}/loss/{name}")
        terms = self.by_class if match[2] == "cls" else self.by_box
        return terms[last if match[1] is None else int(match[1])]

    def check_loss(self, name: str, expected: np.ndarray) -> None:
        close(self.loss(name).reshape(expected.shape), expected, 1e-6, 1e-4)

    def parameter(self, official: str) -> nn.Parameter:
        names = translate_to_ours({official: torch.zeros(())}, bevformer_head_parts("")).state
        return self.network.get_parameter(next(iter(names), official))

    def gradient(self, official: str) -> Tensor:
        parameter = self.parameter(official)
        return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad

    def check_gradient_norm(self, name: str, expected: np.ndarray) -> None:
        close(self.gradient(name).norm(), expected, 1e-6, 1e-3)

    def check_gradient(self, name: str, expected: np.ndarray) -> None:
        close(self.gradient(name), expected, 1e-4 * float(np.abs(expected).max()))

    def check_assignment(self, name: str, expected: np.ndarray) -> None:
        match = re.fullmatch(r"layer(\d+)/sample(\d+)", name)
        if match is None:
            pytest.fail(f"no test knows the output {self.name}/assigned_gt_inds/{name}")
        close(self.assignment.box[int(match[1]), int(match[2])] + 1, expected, 0.0)

    def check_boxes(self, name: str, expected: np.ndarray) -> None:
        with torch.no_grad():
            boxes = self.network.head.decode(self.predictions)
        check_decoded(boxes, name, expected)


def check_decoded(boxes: Boxes3D, name: str, expected: np.ndarray) -> None:
    match = re.fullmatch(r"sample(\d+)/(bboxes|boxes_tensor|scores|labels)", name)
    if match is None:
        pytest.fail(f"no test knows the output {name}")
    boxes = boxes[int(match[1])]
    if match[2] in ("bboxes", "boxes_tensor"):
        same_boxes(boxes, expected, 0.0 if match[2] == "bboxes" else 0.5)
    elif match[2] == "scores":
        assert boxes.score is not None
        close(boxes.score[boxes.valid], expected, 1e-5)
    else:
        close(boxes.label[boxes.valid], expected, 0.0)


@pytest.fixture(scope="module")
def cases() -> Callable[[type[Case], Path, str], Any]:
    """Each case is run once."""
    runs: dict[tuple[type[Case], Path, str], Case] = {}

    def run(kind: type[Case], folder: Path, name: str) -> Case:
        key = (kind, folder, name)
        if key not in runs:
            # The CPU's fused attention is 50 times less exact in its backward than the plain one.
            with sdpa_kernel(SDPBackend.MATH):
                runs[key] = kind(folder, name)
        return runs[key]

    return run


@pytest.mark.parametrize(("folder", "name"), recorded_outputs("A_bevformer_encoder*"))
def test_bevformer_encoder(cases: Any, folder: Path, name: str) -> None:
    expected = read_arrays(folder, "outputs.npz")[name]
    case, _, output = name.partition("/")
    if not output:
        check_constant(cases(EncoderCase, folder, "bs1_noprev"), name, expected)
    else:
        cases(EncoderCase, folder, case).check(output, expected)


@pytest.mark.parametrize(("folder", "name"), recorded_outputs("B_bevformer_head*"))
def test_bevformer_head(cases: Any, folder: Path, name: str) -> None:
    case, _, output = name.partition("/")
    cases(HeadCase, folder, case).check(output, read_arrays(folder, "outputs.npz")[name])


@pytest.mark.parametrize(
    "folder", parity_folders("B_bevformer_head*"), ids=lambda folder: folder.name
)
def test_targets_are_read_as_the_official_code_reads_them(folder: Path) -> None:
    inputs = read_arrays(folder, "inputs.npz")
    for row in range(len(inputs["can_bus"])):
        labels = inputs[f"gt_labels{row}"]
        ours = from_official(inputs[f"gt_boxes_bottom_center{row}"], labels, 0.5)
        gravity = torch.from_numpy(inputs[f"gt_boxes_gravity{row}"][:, :3])
        torch.testing.assert_close(ours.centre, gravity)


@pytest.mark.parametrize(("folder", "name"), recorded_outputs("H_nmsfree_decode*"))
def test_nms_free_decode(folder: Path, name: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    inputs, expected = read_arrays(folder, "inputs.npz"), read_arrays(folder, "outputs.npz")[name]
    case, _, output = name.partition("/")
    if case not in config["cases"]:
        pytest.fail(f"no test knows the case {case}")
    low_high = config["pc_range"]
    grid = BevGrid(tuple(low_high), (low_high[3] - low_high[0], low_high[4] - low_high[1]))
    head = BEVFormerHead(
        grid,
        channels=8,
        num_classes=config["num_classes"],
        num_queries=1,
        num_layers=1,
        max_boxes=config["max_num"],
        score_threshold=config["cases"][case]["score_threshold"] or None,
        range_m=config["cases"][case]["post_center_range"],
    )
    predictions = BEVFormerPredictions(
        torch.zeros(0),
        QueryPredictions(
            torch.from_numpy(inputs["all_cls_scores"]), torch.from_numpy(inputs["all_bbox_preds"])
        ),
        MetricBoxCodec(grid),
    )
    check_decoded(head.decode(predictions), output, expected)


def test_unknown_names_fail(cases: Any) -> None:
    for kind, part in ((EncoderCase, "A_bevformer_encoder*"), (HeadCase, "B_bevformer_head*")):
        folder = parity_folders(part)[0]
        case = cases(kind, folder, "bs1_noprev")
        with pytest.raises(pytest.fail.Exception, match="no test knows"):
            case.check("other", np.zeros(1))
        with pytest.raises(pytest.fail.Exception, match="no test knows"):
            kind(folder, "bs1_other")
    with pytest.raises(pytest.fail.Exception, match="no test knows"):
        case.check("loss/other", np.zeros(1))
    with pytest.raises(pytest.fail.Exception, match="no test knows"):
        check_decoded(Boxes3D.empty(1, 1), "sample0/other", np.zeros(1))
