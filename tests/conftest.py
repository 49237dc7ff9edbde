"""Fixtures that tests of several packages share."""

import fcntl
import math
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from bev_lightning.config.compose import load_config
from bev_lightning.modules.detection import DetectionModule
from bev_lightning.structures import Batch, Boxes3D, Cameras, Points
from bev_lightning.structures.geometry import make_transform


@pytest.fixture(scope="session")
def parity_dir() -> Path:
    """Recorded inputs, weights and outputs of the published models; skips where there are none."""
    return _folder("BEV_PARITY_DIR", "the recordings of the published models")


@pytest.fixture(scope="session")
def nuscenes_dir() -> Path:
    """A nuScenes data set with real frames; skips where there is none."""
    return _folder("BEV_NUSCENES_DIR", "real nuScenes frames")


@pytest.fixture(autouse=True)
def _single_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning leaves the rank of its last run in the environment."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def _folder(variable: str, content: str) -> Path:
    value = os.environ.get(variable)
    if not value:
        pytest.skip(f"{variable} is not set; it names the folder with {content}")
    return Path(value)


RANGE = [-12.8, -12.8, -5.0, 12.8, 12.8, 3.0]
OVERRIDES = {
    "bevfusion": [
        "model=bevfusion_toy",
        "model.inputs.camera.size=[32,64]",
        f"model.inputs.lidar.range={RANGE}",
        "model.network.camera.backbone.width=4",
        "model.network.camera.neck={in_channels:[8,16],out_channels:8}",
        "model.network.camera.lift={in_channels:8,out_channels:8,depth_bins:[2.0,14.0,2.0]}",
        "model.network.lidar.out_channels=8",
        "model.network.fuser={in_channels:[8,8],out_channels:8}",
        "model.network.backbone={in_channels:8,out_channels:[8,8,8],layer_nums:[1,1,1]}",
        "model.network.neck={in_channels:[8,8,8],out_channels:[8,8,8]}",
        "model.network.head={in_channels:24,channels:8,num_boxes:20}",
    ],
    "bevformer": [
        "model=bevformer_toy",
        "model.inputs.camera.size=[32,64]",
        "model.network.backbone.width=4",
        "model.network.neck={in_channels:[8,16],out_channels:16}",
        f"model.network.encoder.grid={{range:{RANGE},cell:[1.6,1.6]}}",
        "model.network.encoder={channels:16,num_heads:2,ffn_channels:32}",
        "model.network.head={channels:16,num_heads:2,ffn_channels:32}",
        "model.network.head={num_queries:12,max_boxes:12}",
        "model.network.perspective.channels=16",
    ],
}
OVERRIDES["learned"] = [
    *OVERRIDES["bevformer"],
    "model.network.head={heatmap_start:false,num_denoising:0}",
]


@pytest.fixture
def make_module() -> Callable[..., DetectionModule]:
    """``make_module(name, *overrides)``: a model, its weights a function of its name."""

    def make(name: str, *overrides: str, **arguments: Any) -> DetectionModule:
        cfg = load_config("train", [*OVERRIDES[name], *overrides])
        node = OmegaConf.to_container(cfg.model, resolve=True)
        assert isinstance(node, dict)
        node["evaluator"] = None
        torch.manual_seed(0)
        return instantiate(node, _convert_="all", **arguments)

    return make


@pytest.fixture
def make_batch() -> Callable[..., Batch]:
    """``make_batch(seed, boxes)``: a frame for each number of boxes, with cameras, lidar, history
    and annotations."""
    return _make_batch


def _make_batch(seed: int, boxes: Sequence[int] = (2, 3)) -> Batch:
    rng = torch.Generator().manual_seed(seed)
    size, most = len(boxes), max(1, *boxes)

    def draw(*shape: int, low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(shape, generator=rng)

    rotation = torch.zeros(6, 3, 3)
    for camera in range(6):
        angle = camera * math.pi / 3
        right = torch.tensor([math.sin(angle), -math.cos(angle), 0.0])
        ahead = torch.tensor([math.cos(angle), math.sin(angle), 0.0])
        rotation[camera] = torch.stack([right, torch.tensor([0.0, 0.0, -1.0]), ahead])
    intrinsic = torch.tensor([[40.0, 0.0, 32.0], [0.0, 40.0, 16.0], [0.0, 0.0, 1.0]])
    view = make_transform(intrinsic @ rotation, torch.zeros(6, 3)).expand(size, -1, -1, -1)
    pose = torch.eye(4, dtype=torch.float64).repeat(size, 1, 1)
    pose[:, :2, 3] = 900.0
    centre = draw(size, most, 3, low=-12.0, high=12.0)
    centre[..., 2] = 0.0
    targets = Boxes3D(
        centre=centre,
        size=torch.tensor([4.0, 2.0, 1.5]).expand(size, most, 3),
        yaw=draw(size, most, low=-3.0, high=3.0),
        velocity=torch.ones(size, most, 2),
        label=torch.randint(0, 10, (size, most), generator=rng),
        valid=torch.arange(most) < torch.tensor(boxes).unsqueeze(1),
    )
    points = draw(size, 300, 5, low=-12.0, high=12.0)
    points[..., 2:] = draw(size, 300, 3, low=0.0, high=1.0)
    frame = Batch(
        sample_tokens=tuple(f"sample-{seed}-{row}" for row in range(size)),
        scene_tokens=("scene",) * size,
        timestamps=torch.arange(size),
        global_from_lidar=pose,
        global_from_ego=pose.clone(),
        lidar_from_previous_lidar=torch.eye(4).repeat(size, 1, 1),
        has_previous=torch.ones(size, dtype=torch.bool),
        cameras=Cameras(draw(size, 6, 3, 32, 64, low=-1.0, high=1.0), view),
        points=Points(points, torch.full((size,), 300)),
        can_bus=torch.zeros(size, 18),
    )
    return replace(frame, targets=targets, history=(frame,))


def _run_on_terminal(code: str) -> tuple[str, list[str]]:
    """Run a program on a pseudo terminal: all that it writes, and the lines that stay there."""
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=terminal, stderr=terminal, close_fds=True
    )
    os.close(terminal)
    output = b""
    while True:
        try:
            data = os.read(controller, 4096)
        except OSError:  # the other end is closed
            break
        if not data:
            break
        output += data
    os.close(controller)
    assert process.wait() == 0, output.decode()
    return output.decode(), _screen(output.decode())


def _screen(output: str) -> list[str]:
    """The lines that stay on a terminal, without trailing blanks."""
    lines = [""]
    for character in output:
        if character == "\r":
            lines[-1] = "\r" + lines[-1].removeprefix("\r")
        elif character == "\n":
            lines[-1] = lines[-1].removeprefix("\r")
            lines.append("")
        elif lines[-1].startswith("\r"):
            lines[-1] = character
        else:
            lines[-1] += character
    return [line.removeprefix("\r").rstrip() for line in lines if line.strip("\r ")]


@pytest.fixture
def run_on_terminal() -> Callable[[str], tuple[str, list[str]]]:
    """Runs a program on a pseudo terminal."""
    return _run_on_terminal
