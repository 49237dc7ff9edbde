"""Trainings in several processes, and what one process makes of the same samples; the toy models in
a width that half precision on a CPU can afford, and frames for them."""

import math
import multiprocessing
import runpy
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from bev_lightning.config.program import load
from bev_lightning.modules.detection import DetectionModule
from bev_lightning.structures import Batch, Boxes3D, Cameras, Points
from bev_lightning.structures.geometry import make_transform

WORKER = Path(__file__).parent / "parallel_worker.py"
PRELOADED = ["torch", "lightning", "bev_lightning.runtime.build", "bev_lightning.config.program"]
# Longer than a rendezvous needs on a busy machine.
TIMEOUT_S = 400.0

Launch = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """Train ``model`` in as many processes as ``replica`` has entries; see ``parallel_worker.run``
    for the rest. Returns what process 0 saw."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)

    def start(model: str, words: list[str], replica: list[int], **more: Any) -> dict[str, Any]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        out = tmp_path_factory.mktemp("training") / "seen.pt"
        job = {"model": model, "words": words, "replica": replica, "port": port, "out": str(out)}
        job |= {"replicas": max(replica) + 1, "batch": 1, "steps": 4, "accumulation": 2}
        job |= {"optimizer": "sgd", **more}
        processes = [
            context.Process(target=runpy.run_path, args=(str(WORKER), {"job": job, "rank": rank}))
            for rank in range(len(replica))
        ]
        for process in processes:
            process.start()
        end = time.monotonic() + TIMEOUT_S
        try:
            while any(process.is_alive() for process in processes):
                failed = any(process.exitcode for process in processes)
                if failed or time.monotonic() > end:
                    break
                time.sleep(0.1)
        finally:
            time.sleep(0.5)  # the others tell of the first one's end
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
        logs = [Path(f"{out}.{rank}.log").read_text()[-1500:] for rank in range(len(processes))]
        assert [process.exitcode for process in processes] == [0] * len(processes), logs
        seen: dict[str, Any] = torch.load(out, weights_only=True)
        ranks = range(len(processes))
        seen["kept"] = [int(Path(f"{out}.{rank}.kept").read_text()) for rank in ranks]
        return seen

    return start


@pytest.fixture(scope="session")
def reference(launch: Launch) -> Launch:
    """One process that takes the micro-batches of all replicas one after the other."""

    @cache
    def start(model: str, num_micro: int, optimizer: str = "sgd") -> dict[str, Any]:
        words = ["strategy=single", *CLIP, *CONSTANT]
        return launch(model, words, [0], accumulation=num_micro, optimizer=optimizer)

    return start


# Far below the norm of the gradients of these models, and a rate that knows nothing of the length.
CLIP = ["trainer.gradient_clip_val=0.5"]
CONSTANT = ["optim.schedule=constant"]


@pytest.fixture(scope="session")
def deviation() -> Callable[[dict[str, Any], dict[str, Any]], float]:
    """Largest difference of two trainings, of gradients as a share of the largest gradient of the
    step, and of weights."""

    def compare(one: dict[str, Any], other: dict[str, Any]) -> float:
        worst = 0.0
        for own, theirs in zip(one["gradients"], other["gradients"], strict=True):
            assert own.keys() == theirs.keys()
            largest = max(float(value.abs().max()) for value in own.values())
            assert largest > 0
            for name, value in own.items():
                worst = max(worst, float((value - theirs[name]).abs().max()) / largest)
        for name, value in one["weights"].items():
            difference = value.float() - other["weights"][name].float()
            worst = max(worst, float(difference.abs().max()))
        return worst

    return compare


RANGE = [-12.8, -12.8, -5.0, 12.8, 12.8, 3.0]
WORDS = {
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
WORDS["learned"] = [
    *WORDS["bevformer"],
    "model.network.head={heatmap_start:false,num_denoising:0}",
]


@pytest.fixture
def make_module() -> Callable[..., DetectionModule]:
    """``make_module(name, *words)``: a model with weights that depend on nothing but its name."""

    def make(name: str, *words: str, **arguments: Any) -> DetectionModule:
        cfg = load("train", [*WORDS[name], *words])
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
