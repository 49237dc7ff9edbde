"""One of two processes that train with DeepSpeed on the CPU; started by test_zero.

Lightning refuses DeepSpeed on a CPU, so that the engine is made here as Lightning makes it.
"""

import json
import os
import sys
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch

from bev_lightning.config.compose import load_config
from bev_lightning.config.resolve import resolve
from bev_lightning.hardware.machine import Machine
from bev_lightning.parallel.deepspeed import (
    ZeroStrategy,
    gather_optimizer_state,
    gather_weights,
    scatter_optimizer_state,
)

job = json.loads(sys.argv[1])
torch.set_num_threads(1)
# gloo alone: an extension for shared memory would be compiled on its first use, for minutes.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("gloo")
rank = torch.distributed.get_rank()

overrides = ["hardware=4x4090", "strategy=deepspeed", f"strategy.stage={job['stage']}"]
settings = dict(resolve(load_config("train", overrides), Machine()).trainer.strategy)
assert settings.pop("_target_").endswith("ZeroStrategy")
config = ZeroStrategy(**settings).config
assert isinstance(config, dict)
# What Lightning adds from the trainer.
config |= {"gradient_accumulation_steps": 2, "gradient_clipping": 0.5}
config |= {"train_micro_batch_size_per_gpu": 1}


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(7, 9), torch.nn.ReLU(), torch.nn.Linear(9, 3))


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    weights = [value for value in model.parameters() if value.ndim > 1]
    biases = [value for value in model.parameters() if value.ndim == 1]
    groups = [{"params": weights, "weight_decay": 0.01}, {"params": biases, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.05)


def samples(step: int, process: int) -> torch.Tensor:
    return torch.randn(5, 7, generator=torch.Generator().manual_seed(10 * step + process))


model = build()
optimizer = optimizer_of(model)
groups = [list(group["params"]) for group in optimizer.param_groups]
stored = torch.load(job["resume"], weights_only=True) if job.get("resume") else None
if stored:
    model.load_state_dict(stored["state_dict"])
engine, zero, _, _ = deepspeed.initialize(
    model=model, optimizer=optimizer, config=config, dist_init_required=False
)
if stored:
    scatter_optimizer_state(zero, groups, stored["optimizer"])
for step in range(job["begin"], job["end"]):
    engine.backward(engine(samples(step, rank)).square().mean())
    engine.step()
state = {"state_dict": gather_weights(model), "optimizer": gather_optimizer_state(zero, groups)}
if rank == 0:
    torch.save(state, job["out"])
    # The same in one process of torch alone.
    model = build()
    optimizer = optimizer_of(model)
    for step in range(job["end"]):
        for process in range(2):
            (model(samples(step, process)).square().mean() / 4).backward()
        if step % 2:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    content = {"state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(content, Path(job["out"]).with_suffix(".one"))
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)
