"""One process of a training in several; tests start it with runpy in processes of a forkserver.

Reads ``job`` (see ``main``) and leaves what process 0 saw in ``job["out"]``.
"""

import math
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import nn

from bev_lightning.config.compose import load_config
from bev_lightning.config.resolve import resolve
from bev_lightning.config.validate import check_config
from bev_lightning.hardware.machine import Machine
from bev_lightning.runtime.build import build_module, build_trainer
from bev_lightning.structures import Batch, Boxes3D, Cameras, Points

RANGE = [-12.8, -12.8, -5.0, 12.8, 12.8, 3.0]
BEVFUSION = [
    "model=bevfusion_toy",
    f"model.inputs.lidar.range={RANGE}",
    "model.inputs.camera.size=[32,64]",
    "model.network.camera.backbone.width=4",
    "model.network.camera.neck={in_channels:[8,16],out_channels:8}",
    "model.network.camera.lift={in_channels:8,out_channels:6,depth_bins:[2.0,14.0,1.0]}",
    "model.network.lidar.out_channels=6",
    "model.network.fuser={in_channels:[6,6],out_channels:8}",
    "model.network.backbone={in_channels:8,out_channels:[8,8,8],layer_nums:[1,1,1]}",
    "model.network.neck={in_channels:[8,8,8],out_channels:[4,4,4]}",
    "model.network.head={in_channels:12,channels:8,num_boxes:20}",
]
BEVFORMER = [
    "model=bevformer_toy",
    "model.inputs.camera.size=[32,64]",
    "model.network.backbone.width=4",
    "model.network.neck={in_channels:[8,16],out_channels:16}",
    "model.network.encoder={channels:16,num_layers:2,num_heads:2,ffn_channels:32}",
    "model.network.encoder.grid.cell=[6.4,6.4]",
    "model.network.head={channels:16,num_queries:20,num_heads:2,ffn_channels:32,max_boxes:20}",
    "model.network.head.num_denoising=0",
    "model.network.perspective.channels=16",
]
MODELS = {
    "bevfusion": BEVFUSION,
    "bevformer": BEVFORMER,
    "bevfusion_toy": ["model=bevfusion_toy"],
    "bevformer_toy": ["model=bevformer_toy", "model.network.head.num_denoising=0"],
}


def make_sample(number: int, model: str, targets: bool = True) -> Batch:
    """Six cameras around the car, points and three boxes, all drawn from the number."""
    rng = torch.Generator().manual_seed(number)
    reach = 10.0 if model == "bevfusion" else 40.0
    height, width = (96, 256) if model.endswith("_toy") else (32, 64)
    image_from_lidar = torch.zeros(6, 4, 4)
    for camera in range(6):
        yaw = camera * math.pi / 3
        forward = torch.tensor([math.cos(yaw), math.sin(yaw), 0.0])
        right = torch.tensor([math.sin(yaw), -math.cos(yaw), 0.0])
        down = torch.tensor([0.0, 0.0, -1.0])
        intrinsics = torch.tensor([[50.0, 0, width / 2], [0, 50.0, height / 2], [0, 0, 1]])
        image_from_lidar[camera, :3, :3] = intrinsics @ torch.stack([right, down, forward])
        image_from_lidar[camera, 3, 3] = 1.0
    centre = (2 * torch.rand(3, 3, generator=rng) - 1) * torch.tensor([reach, reach, 0.5])
    boxes = Boxes3D(
        centre=centre,
        size=torch.tensor([[4.0, 2.0, 1.5]]).repeat(3, 1),
        yaw=torch.rand(3, generator=rng) * 6 - 3,
        velocity=torch.rand(3, 2, generator=rng),
        label=torch.randint(0, 10, (3,), generator=rng),
        valid=torch.ones(3, dtype=torch.bool),
    )
    points = torch.rand(400, 5, generator=rng) * torch.tensor([2 * reach, 2 * reach, 3, 255, 0.2])
    points = points - torch.tensor([reach, reach, 2.0, 0, 0])
    pose = torch.eye(4, dtype=torch.float64)[None]
    moved = torch.eye(4)[None].clone()
    moved[0, 1, 3] = -1.0
    history = ()
    if targets and model.startswith("bevformer"):
        history = (make_sample(1000 + number, model, targets=False),)
    return Batch(
        sample_tokens=(f"sample-{number}",),
        scene_tokens=("scene",),
        timestamps=torch.tensor([number]),
        global_from_lidar=pose,
        global_from_ego=pose.clone(),
        lidar_from_previous_lidar=moved,
        has_previous=torch.tensor([number % 3 != 0]),
        cameras=Cameras(
            torch.randn(1, 6, 3, height, width, generator=rng), image_from_lidar[None].clone()
        ),
        points=Points(points[None], torch.tensor([400])),
        targets=Boxes3D.stack([boxes]) if targets else None,
        history=history,
    ).validate()


class Batches:
    """The batches of one process from micro-step ``begin`` on; a data module without files."""

    def __init__(self, job: dict[str, Any], own: int) -> None:
        self.job, self.own = job, own
        self.window: list[Batch] = []

    def __len__(self) -> int:
        return self.job["steps"] * self.job["accumulation"]

    def __iter__(self) -> Any:
        job = self.job
        for step in range(job.get("begin", 0), len(self), job["accumulation"]):
            self.window = [self.batch(step + i) for i in range(job["accumulation"])]
            yield from self.window

    def batch(self, step: int) -> Batch:
        job = self.job
        first = (step * job["replicas"] + self.own) * job["batch"]
        return Batch.stack([make_sample(first + i, job["model"]) for i in range(job["batch"])])


class Record(L.Callback):
    """Gradients before clipping and the loss of every micro-step; a checkpoint half way."""

    def __init__(self, save: str | None, begin: int) -> None:
        self.save, self.begin = save, begin
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.losses: list[float] = []

    def on_load_checkpoint(self, trainer, module, checkpoint) -> None:
        """Count in this run's micro-steps, as the data module does where there is one."""
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        for kind in ("total", "current"):
            difference = self.begin - progress[kind]["ready"]
            progress[kind] = {name: old + difference for name, old in progress[kind].items()}

    def on_before_optimizer_step(self, trainer, module, optimizer) -> None:
        self.gradients.append(
            {n: whole(p.grad) for n, p in module.named_parameters() if p.grad is not None}
        )

    def on_train_batch_end(self, trainer, module, outputs, batch, number) -> None:
        self.losses.append(float(sum(outputs["terms"].values())))
        if self.save and trainer.global_step == trainer.max_steps // 2:
            trainer.save_checkpoint(self.save, weights_only=False)
            self.save = None


class Kept:
    """Counts the bytes that autograd keeps for backward passes, each storage once.

    Attributes:
        peak: the most at a time [bytes].
    """

    def __init__(self, module: nn.Module) -> None:
        self.weights = {value.untyped_storage().data_ptr() for value in module.parameters()}
        self.users: dict[int, int] = {}
        self.now = self.peak = 0

    def pack(self, value: torch.Tensor) -> "Kept.Hold":
        return Kept.Hold(self, value.detach())

    class Hold:
        def __init__(self, kept: "Kept", value: torch.Tensor) -> None:
            self.kept, self.value = kept, value
            storage = value.untyped_storage()
            self.pointer, self.size = storage.data_ptr(), storage.nbytes()
            if self.pointer in kept.weights:
                self.size = 0
            kept.users[self.pointer] = kept.users.get(self.pointer, 0) + 1
            if kept.users[self.pointer] == 1:
                kept.now += self.size
                kept.peak = max(kept.peak, kept.now)

        def __del__(self) -> None:
            self.kept.users[self.pointer] -= 1
            if self.kept.users[self.pointer] == 0:
                self.kept.now -= self.size


def whole(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()


def freeze_norms(module: nn.Module) -> None:
    """Batch norms keep their statistics, whatever mode the trainer sets."""
    for part in module.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            part.eval()
            part.train = lambda mode=True, part=part: part  # type: ignore[method-assign]


def run(job: dict[str, Any], rank: int) -> None:
    """
    Args:
        job: ``model``; ``overrides`` of the command line; ``batch`` samples of a replica and
            micro-step; ``steps`` optimizer steps; ``accumulation``; ``replicas`` columns of the
            mesh, of which ``replica[rank]`` is the process's own; ``optimizer`` sgd or adamw;
            ``resume``, ``save`` checkpoint files, the latter of half of the steps; ``begin``
            micro-step to begin with; ``out``.
    """
    torch.set_num_threads(1)
    overrides = [*MODELS[job["model"]], *job["overrides"], "data=synthetic", "logger=none"]
    overrides += ["callbacks=none", "trainer.enable_progress_bar=false", "hardware=cpu"]
    overrides += [f"accumulation={job['accumulation']}", f"trainer.max_steps={job['steps']}"]
    overrides += [f"data.batch_size={job['batch']}", f"paths.output={Path(job['out']).parent}"]
    cfg = load_config("train", overrides)
    check_config(cfg)
    cfg = resolve(cfg, Machine(num_cpus=2), Path(job["out"]).parent)
    check_config(cfg)
    module = build_module(cfg)
    if not job.get("moving_norms"):
        freeze_norms(module)
    if job["optimizer"] == "sgd":
        module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.02)
    record = Record(job.get("save"), job.get("begin", 0))
    trainer = build_trainer(cfg, callbacks=[record], enable_checkpointing=False)
    batches = Batches(job, job["replica"][rank])
    kept = Kept(module)
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda hold: hold.value):
        trainer.fit(module, batches, ckpt_path=job.get("resume"), weights_only=True)
    Path(f"{job['out']}.{rank}.kept").write_text(str(kept.peak))
    weights = {name: whole(value) for name, value in module.state_dict().items()}
    if rank == 0:
        content = {"gradients": record.gradients, "losses": record.losses, "weights": weights}
        torch.save(content, job["out"])


def main(job: dict[str, Any], rank: int) -> None:
    log = open(f"{job['out']}.{rank}.log", "w")  # noqa: SIM115
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(job["port"]), NODE_RANK="0", LOCAL_RANK=str(rank)
    )
    code = 1
    try:
        run(job, rank)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # The threads of gloo may abort the teardown of the interpreter.
        os._exit(code)


if "job" in globals():
    main(globals()["job"], globals()["rank"])
