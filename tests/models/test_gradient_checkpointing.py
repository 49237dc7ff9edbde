"""Gradient checkpointing under DDP, where a wrong kind fails with "marked ready twice"."""

import os
import socket
import subprocess
import sys

PROGRAM = """
import os
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from bev_lightning.models.image import ResNet
from bev_lightning.models.swin import Swin

torch.set_num_threads(1)
rank = int(sys.argv[1])
dist.init_process_group("gloo", f"tcp://127.0.0.1:{sys.argv[2]}", rank=rank, world_size=2)


def make(name, recompute):
    torch.manual_seed(0)
    if name == "resnet":
        return ResNet(18, width=4, out_stages=(1, 2), gradient_checkpointing=recompute)
    return Swin(8, (2, 2), (1, 2), 4, out_stages=(0, 1), gradient_checkpointing=recompute)


for name in ("resnet", "swin"):
    results = []
    for recompute in (False, True):
        net = DistributedDataParallel(make(name, recompute))
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        for step in range(2):
            torch.manual_seed(10 * step + rank)
            images = torch.randn(2, 3, 32, 48)
            torch.manual_seed(step)  # drop path
            optimizer.zero_grad()
            sum(x.square().mean() for x in net(images)).backward()
            optimizer.step()
        results.append({k: v.clone() for k, v in net.module.state_dict().items()})
    for key, value in results[0].items():
        torch.testing.assert_close(results[1][key], value, msg=f"{name} {key}")
    weights = torch.nn.utils.parameters_to_vector(net.parameters()).detach()
    first = weights.clone()
    dist.broadcast(first, src=0)
    assert torch.equal(weights, first)
dist.barrier()
dist.destroy_process_group()
print("equal", flush=True)
# Gloo's threads now and then abort the interpreter's own end, when everything has been shown.
os._exit(0)
"""


def test_recomputed_blocks_train_alike_in_two_processes() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), port],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        texts = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(texts)
    assert all(text.strip().endswith("equal") for text in texts)
