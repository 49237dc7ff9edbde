"""A user's own data set: a SampleIndex of some lines, own classes, and a lidar frame x forward."""

from dataclasses import dataclass
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from PIL import Image

from bev_lightning.data.datamodule import DetectionDataModule
from bev_lightning.data.loaders.shared_memory import SharedMemoryLoader
from bev_lightning.data.loaders.torch import TorchLoader
from bev_lightning.data.nuscenes.sample import Annotations, Readings, Sample
from bev_lightning.data.nuscenes.sensor_rig import SensorRig
from bev_lightning.structures import CameraInput, Inputs, LidarInput

CAMERAS = ("left", "right")
CLASSES = ("forklift", "person")
IDENTITY = (0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0)


@dataclass
class Warehouse:
    """One drive of four samples along x at 1 m a step; an object 10 m ahead of the lidar."""

    root: Path
    stamp: str = "1"
    has_distorted_images: bool = False
    scenes_without_can_bus: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ("0", "1", "2", "3")

    @property
    def path(self) -> Path:
        return self.root.parent / "warehouse-index"

    def __contains__(self, token: object) -> bool:
        return token in self.tokens

    def scene(self, token: str) -> str:
        return "drive"

    def split(self, name: str) -> list[str]:
        return list(self.tokens)

    def sample(self, token: str) -> Sample:
        number, channels = int(token), (*CAMERAS, "roof")
        # Optical axis along the car's x: camera x is its -y, camera y its -z.
        camera = (1.0, 0.0, 1.5, 0.5, -0.5, 0.5, -0.5)
        matrix = np.array([[60.0, 0, 31.5], [0, 60, 15.5], [0, 0, 1]])
        readings = Readings(
            channel=channels,
            sweep=np.zeros(3, np.int64),
            token=tuple(f"{token}-{channel}" for channel in channels),
            path=(f"{token}-left.jpg", f"{token}-right.jpg", f"{token}.bin"),
            timestamp=np.full(3, number * 500_000),
            ego_from_sensor=np.array([camera, camera, (0, 0, 2.0, *IDENTITY[3:])]),
            global_from_ego=np.array([(float(number), *IDENTITY[1:])] * 3),
            intrinsic=np.stack([matrix, matrix, np.zeros((3, 3))]),
            size=np.array([[32, 64], [32, 64], [0, 0]]),
            camera_model=np.zeros(3, np.int64),
            distortion=np.zeros((3, 8)),
        )
        annotations = Annotations(
            token=(f"{token}-a",),
            instance=("a",),
            category=("vehicle.forklift",),
            class_name=("forklift",),
            attribute=("",),
            centre=np.array([[number + 10.0, 0.0, 2.0]]),
            size=np.array([[2.0, 1.0, 2.0]]),
            rotation=np.array([IDENTITY[3:]]),
            velocity=np.zeros((1, 3)),
            num_lidar_pts=np.array([5]),
            num_radar_pts=np.array([0]),
            visibility=np.array([4]),
        )
        previous = str(number - 1) if number else ""
        following = str(number + 1) if number < 3 else ""
        identity = (token, "drive", "drive", number * 500_000, previous, following)
        return Sample(*identity, readings, annotations, np.zeros(18), False, reference="roof")


class WarehouseDataModule(DetectionDataModule):
    def open_index(self) -> Warehouse:
        return Warehouse(Path(self.root))


class Recorder(L.LightningModule):
    """Keeps its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.batches: list = []

    def training_step(self, batch, batch_idx: int) -> torch.Tensor:  # type: ignore[no-untyped-def]
        self.batches.append(batch.to("cpu"))
        return self.weight * batch.cameras.images.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize("loader", [TorchLoader(), SharedMemoryLoader(num_workers=1)])
def test_an_own_data_set_trains(tmp_path: Path, loader: object) -> None:
    root = tmp_path / "data"
    root.mkdir()
    rng = np.random.default_rng(0)
    for number in range(4):
        for channel in CAMERAS:
            pixels = rng.integers(0, 256, (32, 64, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / f"{number}-{channel}.jpg")
        points = rng.uniform(-9, 9, (50, 5)).astype(np.float32)
        points[0, :3] = 10.0, 0.0, 0.0  # inside the object
        points.tofile(root / f"{number}.bin")
    data = WarehouseDataModule(
        root=str(root),
        version="none",
        train_split="all",
        val_split="all",
        batch_size=2,
        val_batch_size=2,
        on_missing="error",
        classes=CLASSES,
        num_workers=0,
        inputs=Inputs(
            camera=CameraInput((32, 64), CAMERAS),
            lidar=LidarInput((-20, -20, -20, 20, 20, 20), 0, channel="roof", min_distance=0.0),
        ),
        augment=None,
        loader=loader,  # type: ignore[arg-type]
        cache_dir=str(tmp_path / "cache"),
        seed=0,
        sensors=SensorRig(cameras=CAMERAS, lidar="roof", radars=(), reference="roof"),
        class_of_category={"vehicle.forklift": "forklift", "human": "person"},
    )
    module = Recorder()
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=2,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=data)
    assert len(module.batches) == 2
    for batch in module.batches:
        assert batch.validate().cameras.images.shape == (2, 2, 3, 32, 64)
        boxes = batch.targets
        assert boxes.label.tolist() == [[0], [0]]
        torch.testing.assert_close(boxes.centre, torch.tensor([[[10.0, 0, 0]]] * 2))
        assert boxes.yaw.abs().max() < 1e-6  # x forward
        # The object is at the image centre, at the height of the camera, 0.5 m below the lidar.
        seen = batch.cameras.image_from_lidar @ torch.tensor([10.0, 0, -0.5, 1])
        torch.testing.assert_close(
            seen[..., :2] / seen[..., 2:3], torch.tensor([31.5, 15.5]).expand(2, 2, 2)
        )
        assert (batch.points.features[:, :, :3] == torch.tensor([10.0, 0, 0])).all(-1).any(1).all()
