"""Draws predictions and annotations of some validation samples."""

import math
from bisect import bisect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import lightning as L
import numpy as np
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from PIL import Image
from torch import Tensor

from bev_lightning.callbacks.drawing import (
    BACKGROUND,
    GRID,
    MUTED,
    PANEL,
    PREDICTION,
    TEXT,
    TRUTH,
    TextLayer,
    TopView,
    box_vertices,
    denormalise,
    draw_lines,
    project_lines,
)
from bev_lightning.structures import Batch, Boxes3D, CameraInput, Cameras

CELL_WIDTH = 480
"""Width of one camera's image in the picture [pixels]."""
TOP_VIEW = 760
"""Side of the bird's eye view [pixels]."""
GAP = 6
WIDTH = 3 * CELL_WIDTH + 2 * GAP


class PredictionPictures(L.Callback):
    """Draws the same validation samples each time, as PNG files and into TensorBoard.

    The samples are spread over rank 0's share of the split. ``validation_step`` must return the
    decoded boxes as ``{"boxes": Boxes3D}``; images are denormalised with the module's ``inputs``.

    Args:
        classes: names in the order of the labels.
        num_samples: pictures per validation.
        min_score: predictions below are not drawn.
        radius_m: what the bird's eye view shows to each side [m].
        folder: of the PNG files; by default ``pictures`` in the trainer's root directory.
    """

    def __init__(
        self,
        classes: Sequence[str],
        num_samples: int = 2,
        min_score: float = 0.2,
        radius_m: float = 55.0,
        folder: str | Path | None = None,
    ) -> None:
        self.classes = tuple(classes)
        self.num_samples = num_samples
        self.min_score = min_score
        self.radius_m = radius_m
        self.folder = None if folder is None else Path(folder)

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: Any,
        outputs: Any,
        batch: Batch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if trainer.sanity_checking or not trainer.is_global_zero:
            return
        num_batches = trainer.num_val_batches[dataloader_idx]
        boxes, camera = outputs["boxes"], pl_module.inputs.camera
        for number, b in self._chosen(num_batches, batch_idx, batch.size):
            picture = draw_sample(
                batch, b, boxes, self.classes, camera, self.min_score, self.radius_m
            )
            folder = self.folder or Path(trainer.default_root_dir) / "pictures"
            folder.mkdir(parents=True, exist_ok=True)
            name = f"step_{trainer.global_step:06d}_{number}.png"
            Image.fromarray(picture).save(folder / name, compress_level=3)
            for logger in trainer.loggers:
                if isinstance(logger, TensorBoardLogger):
                    logger.experiment.add_image(
                        f"val/sample_{number}", picture, trainer.global_step, dataformats="HWC"
                    )

    def _chosen(self, num_batches: int | float, batch_idx: int, size: int) -> list[tuple[int, int]]:
        """Pictures of this batch: the number of each among all pictures, and its sample's index."""
        if math.isinf(num_batches):
            batches = [i // size for i in range(self.num_samples)]
        else:
            batches = [i * int(num_batches) // self.num_samples for i in range(self.num_samples)]
        numbers = [number for number, index in enumerate(batches) if index == batch_idx]
        return list(zip(numbers, range(size), strict=False))


def draw_sample(
    batch: Batch,
    b: int,
    predictions: Boxes3D | None,
    classes: Sequence[str],
    camera: CameraInput | None,
    min_score: float = 0.2,
    radius_m: float = 55.0,
) -> np.ndarray:
    """One sample as a picture: its cameras with boxes, a bird's eye view and a table of counts.

    Cameras, points, annotations and predictions are drawn if there are any.

    Args:
        batch: of which the sample ``b`` is drawn.
        predictions: ``(B, M)`` in the model frame; those below ``min_score`` are left out.
        camera: how the images were normalised; None for a model without cameras.
        classes, min_score, radius_m: as for :class:`PredictionPictures`.

    Returns:
        RGB ``(H, W, 3)`` uint8.
    """
    truth = _pick(batch.targets, b, -1.0)
    found = _pick(predictions, b, min_score)
    pose = batch.global_from_lidar[b].double().cpu()
    lidar_from_ego = torch.linalg.inv(pose) @ batch.global_from_ego[b].double().cpu()
    text_layer = TextLayer()
    top = 0
    rows: list[np.ndarray] = []
    if batch.cameras is not None and camera is not None:
        cameras = Cameras(batch.cameras.images[b].cpu(), batch.cameras.image_from_lidar[b].cpu())
        mosaic = _draw_cameras(cameras, truth, found, classes, lidar_from_ego, camera, text_layer)
        rows.append(mosaic)
        top = mosaic.shape[0] + GAP
        rows.append(np.full((GAP, WIDTH, 3), BACKGROUND, np.uint8))

    view = TopView(TOP_VIEW, radius_m, lidar_from_ego)
    if batch.points is not None:
        points = batch.points.features[b, : int(batch.points.count[b])]
        view.draw_points(points.float().cpu().numpy())
    view.draw_rings(text_layer, (0, top))
    view.draw_boxes(truth, TRUTH, 2)
    view.draw_boxes(found, PREDICTION, 1)
    origin, token = (TOP_VIEW + GAP, top), batch.sample_tokens[b]
    table = _draw_table(origin, token, truth, found, classes, min_score, text_layer)
    gap = np.full((TOP_VIEW, GAP, 3), BACKGROUND, np.uint8)
    rows.append(np.concatenate([view.image, gap, table], axis=1))
    return text_layer.write(np.concatenate(rows))


def _pick(boxes: Boxes3D | None, b: int, min_score: float) -> Boxes3D:
    """The boxes ``(M,)`` of one sample that are drawn: finite, valid, scored high enough."""
    if boxes is None:
        return Boxes3D.empty(0)
    sample = boxes[b].to("cpu", dtype=torch.float32)
    keep = sample.valid & sample.corners().isfinite().flatten(1).all(dim=1)
    if sample.score is not None:
        keep &= sample.score >= min_score
    return sample[keep]


def _draw_cameras(
    cameras: Cameras,
    truth: Boxes3D,
    found: Boxes3D,
    classes: Sequence[str],
    lidar_from_ego: Tensor,
    camera: CameraInput,
    text_layer: TextLayer,
) -> np.ndarray:
    """All cameras of one sample as a mosaic: forward ones in the upper rows, each row from left to
    right.

    Names and order come from the viewing directions, not from the order in the batch.
    """
    num, _, height, width = cameras.images.shape
    scale = CELL_WIDTH / width
    cell = (round(height * scale), CELL_WIDTH)
    # The third row of image_from_lidar is the optical axis; depth grows along it.
    axes = cameras.image_from_lidar[:, 2, :3].double() @ lidar_from_ego[:3, :3]
    # Counter-clockwise from forward.
    azimuth = torch.atan2(axes[:, 1], axes[:, 0]).rad2deg().tolist()
    ahead = sorted((i for i in range(num) if abs(azimuth[i]) <= 90), key=lambda i: -azimuth[i])
    behind = sorted((i for i in range(num) if abs(azimuth[i]) > 90), key=lambda i: azimuth[i] % 360)
    grid = [row[i : i + 3] for row in (ahead, behind) for i in range(0, len(row), 3)]
    mosaic = np.full((len(grid) * (cell[0] + GAP) - GAP, WIDTH, 3), BACKGROUND, np.uint8)
    # Pixel centres are whole numbers: enlarging moves them by half a pixel each way.
    enlarge = torch.eye(4, dtype=torch.float64)
    enlarge[0, 0] = enlarge[1, 1] = scale
    enlarge[0, 2] = enlarge[1, 2] = 0.5 * scale - 0.5
    drawn = ((box_vertices(truth), TRUTH), (box_vertices(found), PREDICTION))
    interpolation = cv2.INTER_AREA if scale < 1 else cv2.INTER_CUBIC
    for row, members in enumerate(grid):
        for column, i in enumerate(members):
            image = denormalise(cameras.images[i], camera.mean, camera.std)
            image = cv2.resize(image, cell[::-1], interpolation=interpolation)
            matrix = enlarge @ cameras.image_from_lidar[i].double()
            v, u = row * (cell[0] + GAP), column * (CELL_WIDTH + GAP)
            for vertices, colour in drawn:
                lines, owner = project_lines(vertices, matrix, cell)
                draw_lines(image, lines, colour)
            _label_boxes(lines, owner, found, classes, (u, v), text_layer)
            mosaic[v : v + cell[0], u : u + CELL_WIDTH] = image
            text_layer.add((u + 8, v + 7), _direction(azimuth[i]), TEXT, 13, "la", boxed=True)
    return mosaic


def _label_boxes(
    lines: np.ndarray,
    owner: np.ndarray,
    boxes: Boxes3D,
    classes: Sequence[str],
    origin: tuple[int, int],
    text_layer: TextLayer,
) -> None:
    """Class and score above the boxes, the largest in the image first, where they overlap no other
    text."""
    extents = []
    for box in np.unique(owner):
        ends = lines[owner == box].reshape(-1, 2)
        low, high = ends.min(axis=0), ends.max(axis=0)
        extents.append((float((high - low).max()), int(box), float(low[0]), float(low[1])))
    taken = [(0.0, 0.0, 96.0, 26.0)]  # the camera's name
    for extent, box, left, top in sorted(extents, reverse=True):
        if extent < 24:
            break
        score = "" if boxes.score is None else f" {float(boxes.score[box]):.2f}"
        text = f"{classes[int(boxes.label[box])].replace('_', ' ')}{score}"
        width = 6.0 * len(text)
        left, top = min(left, CELL_WIDTH - width), max(top - 13.0, 2.0)
        right, bottom = left + width, top + 12.0
        if any(left < r and x < right and top < b and y < bottom for x, y, r, b in taken):
            continue
        taken.append((left, top, right, bottom))
        text_layer.add((origin[0] + left, origin[1] + top + 11.0), text, PREDICTION, 11, "ls")


def count_found(truth: Boxes3D, found: Boxes3D, distance_m: float = 2.0) -> int:
    """Number of annotations ``(M,)`` matched by predictions ``(N,)`` of the same class: in order of
    score each takes the nearest free one within the distance [m], as the nuScenes metric does."""
    distance = torch.cdist(truth.centre[:, :2], found.centre[:, :2])
    score = torch.ones(found.num) if found.score is None else found.score
    hits = 0
    for guess in score.argsort(descending=True, stable=True).tolist() if truth.num else []:
        nearest = int(distance[:, guess].argmin())
        if distance[nearest, guess] < distance_m:
            distance[nearest] = math.inf
            hits += 1
    return hits


def _direction(azimuth: float) -> str:
    """``front left`` and the like for degrees counter-clockwise from forward."""
    names = "front", "front left", "left", "back left", "back", "back right", "right", "front right"
    # Side cameras look at 55 and 110 degrees; equal sectors would call those at 110 "left".
    limits = (22.5, 85.0, 95.0, 157.5, 202.5, 265.0, 275.0, 337.5)
    return names[bisect(limits, azimuth % 360) % 8]


def _draw_table(
    origin: tuple[int, int],
    token: str,
    truth: Boxes3D,
    found: Boxes3D,
    classes: Sequence[str],
    min_score: float,
    text_layer: TextLayer,
) -> np.ndarray:
    """Legend and counts by class, beside the bird's eye view; texts go to ``text_layer``."""
    image = np.full((TOP_VIEW, WIDTH - TOP_VIEW - GAP, 3), PANEL, np.uint8)
    u, v = origin
    text_layer.add((u + 24, v + 22), f"sample {token}", MUTED, 14)
    y = 70
    predicted = f"prediction, score at least {min_score:g}"
    for colour, thickness, text in ((TRUTH, 2, "annotation"), (PREDICTION, 1, predicted)):
        cv2.rectangle(image, (24, y - 7), (56, y + 7), colour, thickness, cv2.LINE_AA)
        cv2.line(image, (40, y), (56, y), colour, thickness, cv2.LINE_AA)
        text_layer.add((u + 70, v + y), text, TEXT, 15, "lm")
        y += 30
    lines = "line: heading      arrow: motion in one second"
    text_layer.add((u + 24, v + y), lines, MUTED, 13, "lm")
    y += 56
    text_layer.add((u + 24, v + y), "class", MUTED, 14, "lm")
    columns = (330, 460, 640)
    for x, text in zip(columns, ("annotated", "predicted", "found within 2 m"), strict=True):
        text_layer.add((u + x, v + y), text, MUTED, 14, "rm")
    y += 20
    totals = np.zeros(3, int)
    for label, name in enumerate(classes):
        own, guess = truth[truth.label == label], found[found.label == label]
        counts = (own.num, guess.num, count_found(own, guess))
        totals += counts
        cv2.line(image, (24, y), (640, y), GRID, 1)
        y += 19
        shade = TEXT if any(counts) else MUTED
        text_layer.add((u + 24, v + y), name.replace("_", " "), shade, 15, "lm")
        for x, count, colour in zip(columns, counts, (TRUTH, PREDICTION, TEXT), strict=True):
            text_layer.add((u + x, v + y), str(count), colour if count else GRID, 15, "rm")
        y += 19
    cv2.line(image, (24, y), (640, y), MUTED, 1)
    y += 22
    text_layer.add((u + 24, v + y), "all", TEXT, 15, "lm")
    for x, count in zip(columns, totals, strict=True):
        text_layer.add((u + x, v + y), str(count), TEXT, 15, "rm")
    return image
