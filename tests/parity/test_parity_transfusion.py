"""The TransFusion head against outputs of the official BEVFusion code (fixtures F and H).

The official maps are (X, Y): inputs, maps, flattened indices and BEV kernels are transposed here.
Its boxes are ``[x, y, z_bottom, w, l, h, -yaw - pi / 2, vx, vy]``. Targets and losses read them
plainly (``height_shift=0``), decoding as our default does (see ``to_official``).
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parity_files import needs_parity_files, parity_folders, read_arrays, recorded_outputs
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bev_lightning.checkpointing.official import convert_module
from bev_lightning.losses.heatmap import gaussian_heatmap
from bev_lightning.losses.iou import pairwise_iou
from bev_lightning.losses.matching import TransFusionMatcher, distance_cost, focal_cost
from bev_lightning.losses.transfusion import TransFusionLoss
from bev_lightning.models.heads import TransFusionHead
from bev_lightning.models.selection import BoxSelection
from bev_lightning.ops.nms import circle_nms
from bev_lightning.structures import BevGrid, Boxes3D
from bev_lightning.structures.geometry import wrap_angle
from bev_lightning.structures.predictions import TransFusionPredictions

pytestmark = needs_parity_files
Check = Callable[[np.ndarray], None]
OFFICIAL_CIRCLE_RADIUS = 0.175  # in square metres, of classes 8 and 9


def make_grid(config: Mapping[str, Any]) -> BevGrid:
    train = config["train_cfg"]
    cell = [size * train["out_size_factor"] for size in train["voxel_size"][:2]]
    return BevGrid(tuple(train["point_cloud_range"]), (cell[0], cell[1]))


def make_head(
    config: Mapping[str, Any], height_shift: float = 0.0, circle_radius_m: float | None = None
) -> TransFusionHead:
    coder = config["bbox_coder"]
    return TransFusionHead(
        grid=make_grid(config),
        in_channels=config["in_channels"],
        num_classes=config["num_classes"],
        channels=config["hidden_channel"],
        num_queries=config["num_proposals"],
        num_layers=config["num_decoder_layers"],
        num_heads=config["num_heads"],
        ffn_channels=config["ffn_channel"],
        dropout=config["dropout"],
        height_shift=height_shift,
        selection=BoxSelection(
            score_threshold=coder["score_threshold"] or None,
            range_m=coder["post_center_range"],
            circle_radius_m=circle_radius_m,
            circle_classes=(8, 9),
        ),
    ).eval()


def make_objective(config: Mapping[str, Any]) -> TransFusionLoss:
    train = config["train_cfg"]
    costs = train["assigner"]
    assert train["gaussian_overlap"] == 0.1
    return TransFusionLoss(
        class_weight=config["loss_cls"]["loss_weight"],
        box_weight=config["loss_bbox"]["loss_weight"],
        heatmap_weight=config["loss_heatmap"]["loss_weight"],
        code_weights=train["code_weights"],
        matcher=TransFusionMatcher(
            costs["cls_cost"]["weight"], costs["reg_cost"]["weight"], costs["iou_cost"]["weight"]
        ),
        min_radius_cells=train["min_radius"],
    )


def from_official(boxes: np.ndarray, labels: np.ndarray) -> Boxes3D:
    rows = torch.from_numpy(boxes)
    centre = rows[:, :3].clone()
    centre[:, 2] += 0.5 * rows[:, 5]
    return Boxes3D(
        centre=centre,
        size=rows[:, [4, 3, 5]],
        yaw=wrap_angle(-rows[:, 6] - math.pi / 2),
        velocity=rows[:, 7:9],
        label=torch.from_numpy(labels),
        valid=torch.ones(len(rows), dtype=torch.bool),
    )


def to_official(boxes: Boxes3D) -> np.ndarray:
    """``(K, 9)`` with the angle in (-pi, pi]. The published data has the annotated centre for the
    bottom of a box, so what its decode calls bottom z is the centre of our box."""
    columns = [
        boxes.centre,
        boxes.size[:, [1, 0, 2]],
        wrap_angle(-boxes.yaw - math.pi / 2)[:, None],
        boxes.velocity,
    ]
    return torch.cat(columns, dim=1).detach().numpy()


def swap_map(value: Tensor) -> np.ndarray:
    """(Y, X) to the official (X, Y)."""
    return value.transpose(-1, -2).numpy()


def flat_layers(value: Tensor) -> np.ndarray:
    """``(L, B, Q, C)`` to ``(B, C, L * Q)``."""
    return value.permute(1, 3, 0, 2).flatten(2).numpy()


def close(actual: Any, expected: np.ndarray, atol: float, rtol: float = 0.0) -> None:
    actual = actual.detach().numpy() if isinstance(actual, Tensor) else np.asarray(actual)
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, atol=atol, rtol=rtol, equal_nan=False)


def same_boxes(actual: np.ndarray, expected: np.ndarray) -> None:
    close(actual[:, :2], expected[:, :2], 2e-3)
    close(actual[:, 2:6], expected[:, 2:6], 2e-4)
    turn = (actual[:, 6] - expected[:, 6] + math.pi) % (2 * math.pi) - math.pi
    assert np.abs(turn).max(initial=0.0) < 1e-3
    close(actual[:, 7:], expected[:, 7:], 1e-4)


class HeadRun:
    """One forward, loss and backward of a folder: what the outputs are checked against."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())["head"]
        inputs = read_arrays(folder, "inputs.npz")
        self.outputs = read_arrays(folder, "outputs.npz")
        self.head = make_head(self.config)
        weights = load_file(folder / "weights.safetensors")
        state = convert_module(self.head, weights, "heads.object.")
        self.head.load_state_dict(state)
        self.inter: dict[str, Tensor] = {}
        self._record()
        bev = torch.from_numpy(inputs["feat"]).transpose(-1, -2).contiguous()
        self.predictions = self.head(bev)
        self.samples = [
            from_official(inputs[f"gt_boxes_bottom_center{b}"], inputs[f"gt_labels{b}"])
            for b in range(bev.shape[0])
        ]
        self.targets = Boxes3D.stack(self.samples)
        self.loss = make_objective(self.config)
        self.assignment = self.loss.match(self.predictions, self.targets).finish()
        self.by_class, self.by_box = self.loss.layer_terms(
            self.predictions, self.targets, self.assignment
        )
        self.terms = self.loss(self.predictions, self.targets)
        sum(self.loss(self.at_stored_code(), self.targets).values()).backward()

    def at_stored_code(self) -> TransFusionPredictions:
        """Our predictions with the values of the stored ones and our gradient. The sizes of some
        boxes were made equal to the predicted ones, so that the sign of a difference of 1e-7
        decides the gradient of the L1 term: it has to be the official difference."""
        parts = [
            self.outputs[f"forward/{name}"] for name in ("center", "height", "dim", "rot", "vel")
        ]
        code = self.predictions.code
        stored = torch.from_numpy(np.concatenate(parts, axis=1)).unflatten(2, (code.shape[0], -1))
        return replace(self.predictions, code=stored.permute(2, 0, 3, 1) + (code - code.detach()))

    def _record(self) -> None:
        def keep(name: str) -> Callable[..., None]:
            return lambda module, args, output: self.inter.__setitem__(name, output.detach())

        self.head.shared_conv.register_forward_hook(keep("shared_conv"))
        self.head.class_encoding.register_forward_hook(keep("class_encoding"))
        for number, layer in enumerate(self.head.decoder):
            layer.register_forward_hook(keep(f"decoder{number}_out"))
            layer.register_forward_pre_hook(self._keep_inputs(number))

    def _keep_inputs(self, number: int) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: tuple[Tensor, ...]) -> None:
            self.inter[f"decoder{number}_in_query"] = args[0].detach()
            self.inter[f"decoder{number}_in_query_pos"] = args[2].detach()

        return hook

    def check(self, name: str, expected: np.ndarray) -> None:
        """Compare one stored output. Fails on a name that is not known."""
        part, _, rest = name.partition("/")
        methods: dict[str, Callable[[str, np.ndarray], None]] = {
            "forward": self.check_forward,
            "targets": self.check_targets,
            "assign": self.check_assign,
            "loss": self.check_loss,
            "gradnorm": lambda rest, value: close(self.gradient(rest).norm(), value, 1e-5, 1e-4),
            "grad": self.check_gradient,
            "get_bboxes": self.check_boxes,
        }
        if name == "bev_pos":
            positions = self.head.positions.view(1, *self.head.codec.grid.shape, 2)
            close(positions.transpose(1, 2).flatten(1, 2), expected, 0.0)
        elif part in methods:
            methods[part](rest, expected)
        else:
            pytest.fail(f"no test knows the output {name}")

    def check_forward(self, name: str, expected: np.ndarray) -> None:
        p = self.predictions
        code = flat_layers(p.code.detach())
        columns = {"center": (0, 2), "height": (2, 3), "dim": (3, 6), "rot": (6, 8), "vel": (8, 10)}
        if name in columns:
            close(code[:, slice(*columns[name])], expected, 1e-4)
        elif name == "heatmap":
            close(flat_layers(p.logits.detach()), expected, 1e-4)
        elif name == "query_heatmap_score":
            close(p.query_score, expected, 1e-5)
        elif name == "dense_heatmap":
            close(swap_map(p.heatmap.detach()), expected, 1e-4)
        elif name == "query_labels":
            close(p.query_label, expected, 0.0)
        elif name.removeprefix("inter/") in self.inter:
            value = self.inter[name.removeprefix("inter/")]
            close(swap_map(value) if value.dim() == 4 else value, expected, 1e-4)
        else:
            pytest.fail(f"no test knows the output forward/{name}")

    def check_targets(self, name: str, expected: np.ndarray) -> None:
        a, codec = self.assignment, self.predictions.codec
        positive = a.positive
        labels = torch.where(positive, a.gather(self.targets.label), self.head.num_classes)
        by_sample = {
            "labels": labels,
            "label_weights": torch.ones_like(labels),
            "ious": a.overlap.clamp(0, 1),
        }
        if name in by_sample:
            close(by_sample[name].transpose(0, 1).flatten(1), expected, 1e-4)
        elif name in ("bbox_targets", "bbox_weights"):
            code = a.gather(codec.encode(self.targets))
            code = code if name == "bbox_targets" else positive[..., None].expand_as(code).float()
            close(code.transpose(0, 1).flatten(1, 2), expected, 1e-4)
        elif name == "num_pos":
            assert int(positive.sum()) == int(expected)
        elif name == "matched_ious":
            close(self.matched_overlap(), expected, 1e-4)
        elif name == "heatmap":
            train = self.config["train_cfg"]
            drawn = gaussian_heatmap(
                self.targets,
                codec.grid,
                self.head.num_classes,
                train["gaussian_overlap"],
                train["min_radius"],
            )
            close(swap_map(drawn), expected, 1e-5)
        else:
            pytest.fail(f"no test knows the output targets/{name}")

    def matched_overlap(self) -> float:
        positive = self.assignment.positive.sum((0, 2)).clamp(min=1)
        return float((self.assignment.overlap.sum((0, 2)) / positive).mean())

    def check_assign(self, name: str, expected: np.ndarray) -> None:
        match = re.fullmatch(
            r"sample(\d+)/layer(\d+)/(iou3d|cls_cost|reg_cost|assigned_gt_inds)", name
        )
        if match is None:
            pytest.fail(f"no test knows the output assign/{name}")
        sample, layer, kind = int(match[1]), int(match[2]), match[3]
        p, codec, boxes = self.predictions, self.predictions.codec, self.samples[sample]
        code = p.code[layer, sample].detach()
        footprints = codec.footprints(code)
        wanted = codec.footprints(codec.encode(boxes))
        if kind == "iou3d":
            close(pairwise_iou(footprints, wanted), expected, 1e-4)
        elif kind == "cls_cost":
            logits = p.logits[layer, sample][None, None].detach()
            cost = focal_cost(logits, boxes.label[None])[0, 0]
            close(self.loss.matcher.class_weight * cost, expected, 1e-4)
        elif kind == "reg_cost":
            cost = distance_cost(footprints[None, None, :, :2], wanted[None, :, :2], codec.grid)[
                0, 0
            ]
            close(self.loss.matcher.distance_weight * cost, expected, 1e-4)
        else:
            close(self.assignment.box[layer, sample] + 1, expected, 0.0)

    def check_loss(self, name: str, expected: np.ndarray) -> None:
        layers = len(self.by_class)
        values: dict[str, Any] = {
            "loss_heatmap": self.terms["heatmap"],
            "matched_ious": self.matched_overlap(),
            "total": sum(self.terms.values()),
        }
        for number in range(layers):
            prefix = "layer_-1" if number == layers - 1 else f"layer_{number}"
            values[f"{prefix}_loss_cls"] = self.by_class[number]
            values[f"{prefix}_loss_bbox"] = self.by_box[number]
        if name not in values:
            pytest.fail(f"no test knows the output loss/{name}")
        close(values[name], expected, atol=1e-6, rtol=1e-4)

    def gradient(self, official: str) -> Tensor:
        name = next(iter(convert_module(self.head, {official: torch.zeros(())}, "heads.object.")))
        gradient = self.head.get_parameter(name).grad
        assert gradient is not None, official
        return gradient.transpose(-1, -2) if gradient.dim() == 4 else gradient

    def check_gradient(self, name: str, expected: np.ndarray) -> None:
        close(self.gradient(name), expected, atol=1e-4 * float(np.abs(expected).max()))

    def check_boxes(self, name: str, expected: np.ndarray) -> None:
        match = re.fullmatch(r"nms_(None|circle)/sample(\d+)/(boxes|scores|labels)", name)
        if match is None:
            pytest.fail(f"no test knows the output get_bboxes/{name}")
        check_decoded(self.config, self.predictions, match[1], int(match[2]), match[3], expected)


def check_decoded(
    config: Mapping[str, Any],
    predictions: TransFusionPredictions,
    nms: str,
    sample: int,
    column: str,
    expected: np.ndarray,
) -> None:
    """Decode with our radius in metres, the root of the official one, and compare the rest."""
    radius = math.sqrt(OFFICIAL_CIRCLE_RADIUS) if nms == "circle" else None
    head = make_head(config, 0.5, radius)
    with torch.no_grad():
        boxes = head.decode(replace(predictions, codec=head.codec))[sample]
    boxes = boxes[boxes.valid]
    if column == "boxes":
        official = to_official(boxes)
        assert official.shape == expected.shape
        same_boxes(official, expected)
    elif column == "scores":
        close(boxes.score, expected, 1e-4)
    else:
        close(boxes.label, expected, 0.0)


@pytest.fixture(scope="module")
def runs() -> Iterator[dict[Path, HeadRun]]:
    """Each folder is run once."""
    # The fused attention of the CPU is 50 times less exact in its backward than the plain formula.
    with sdpa_kernel(SDPBackend.MATH):
        yield {folder: HeadRun(folder) for folder in parity_folders("F_transfusion_head*")}


@pytest.mark.parametrize(("folder", "name"), recorded_outputs("F_transfusion_head*"))
def test_transfusion_head(runs: dict[Path, HeadRun], folder: Path, name: str) -> None:
    runs[folder].check(name, runs[folder].outputs[name])


def test_unknown_name_fails(runs: dict[Path, HeadRun]) -> None:
    run = next(iter(runs.values()))
    for name in (
        "other",
        "forward/other",
        "targets/other",
        "assign/sample0/layer0/other",
        "loss/other",
    ):
        with pytest.raises(pytest.fail.Exception, match="no test knows"):
            run.check(name, np.zeros(1))


@pytest.mark.parametrize(("folder", "name"), recorded_outputs("H_transfusion_decode*"))
def test_transfusion_decode(folder: Path, name: str) -> None:
    config = json.loads((folder / "config.json").read_text())["head"]
    inputs = read_arrays(folder, "inputs.npz")
    expected = read_arrays(folder, "outputs.npz")[name]
    circle = re.fullmatch(r"circle_nms/thresh([\d.]+)/keep", name)
    decoded = re.fullmatch(r"nms_(None|circle)/(boxes|scores|labels)", name)
    if circle:
        rows = torch.from_numpy(inputs["circle_nms_dets"])
        keep = circle_nms(rows[:, :2], rows[:, 2], math.sqrt(float(circle[1])))
        kept = keep.nonzero().squeeze(1)
        kept = kept[rows[kept, 2].argsort(descending=True)]
        official_cap = 83
        close(kept[:official_cap], expected, 0.0)
    elif decoded:
        columns = ("center", "height", "dim", "rot", "vel")
        code = np.concatenate([inputs[f"pred/{column}"] for column in columns], axis=1)
        queries = inputs["query_labels"].shape[1]
        predictions = TransFusionPredictions(
            heatmap=torch.zeros(0),
            query_label=torch.from_numpy(inputs["query_labels"]),
            query_score=torch.from_numpy(inputs["pred/query_heatmap_score"])[..., :queries],
            logits=torch.from_numpy(inputs["pred/heatmap"]).transpose(1, 2)[None],
            code=torch.from_numpy(code).transpose(1, 2)[None],
            codec=make_head(config).codec,
        )
        check_decoded(config, predictions, decoded[1], 0, decoded[2], expected)
    else:
        pytest.fail(f"no test knows the output {name}")
