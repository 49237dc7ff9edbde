"""Where a training step on a GPU makes the host wait, without a GPU: the step runs with tensors
that say they are on one, and every operation that would wait is written down."""

import traceback
from collections import Counter
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from bev_lightning.benchmarks.random_batches import make_batch
from bev_lightning.config.compose import load_config
from bev_lightning.losses import matching
from bev_lightning.losses.bevfusion import BEVFusionLoss
from bev_lightning.losses.transfusion import TransFusionLoss
from bev_lightning.models.heads import TransFusionHead

ATEN = torch.ops.aten
PACKAGE = "/bev_lightning/"


class Waits(TorchDispatchMode):
    """Writes down ``kind file`` of what waits; what depends on values gets an answer."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = self._kind(func, args, kwargs)
        if kind is not None:
            frames = [f.filename for f in traceback.extract_stack() if PACKAGE in f.filename]
            place = frames[-1].split(PACKAGE)[-1] if frames else "?"
            self.found[f"{kind} {place}"] += 1
        if func is ATEN.nonzero.default:
            rows = max(1, args[0].numel() // 4)
            return torch.empty(rows, args[0].dim(), dtype=torch.int64, device=args[0].device)
        if func is ATEN.bincount.default:
            return torch.empty(args[2], dtype=torch.int64, device=args[0].device)
        if func is ATEN._local_scalar_dense.default:
            return args[0].dtype != torch.bool and 7
        return func(*args, **kwargs)

    def _kind(self, func: Any, args: Any, kwargs: Any) -> str | None:
        if func is ATEN._to_copy.default:
            device = kwargs.get("device")
            if device is None or torch.device(device).type == args[0].device.type:
                return None
            way = "to host" if args[0].is_cuda else "from host"
            # Not waited for here, but counted: the losses may cross once each way.
            return f"queued {way}" if kwargs.get("non_blocking") else f"copy {way}"
        if func is ATEN.copy_.default and args[0].device.type != args[1].device.type:
            return "copy_"
        if func in (ATEN.index.Tensor, ATEN.index_put_.default, ATEN.index_put.default):
            return "mask" if any(i is not None and i.dtype == torch.bool for i in args[1]) else None
        names = ("_local_scalar_dense", "nonzero", "bincount", "masked_select", "_unique2")
        name = func.overloadpacket.__name__
        return name if name in names else None


def find_waits(name: str, head: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    monkeypatch.setattr(matching, "solve", lambda cost, box: None)
    monkeypatch.setattr(torch.cuda, "Event", Mock)
    model = OmegaConf.to_container(
        load_config("train", [f"model={name}", "hardware=cpu"]).model, resolve=True
    )
    model["evaluator"] = None
    inputs = instantiate(model["inputs"], _convert_="all")
    batch = make_batch(inputs, num_classes=10, size=2, num_boxes=5)
    waits = Waits()
    with FakeTensorMode(allow_non_fake_inputs=True):
        with torch.device("cuda"), Waits():
            module = instantiate(model, _convert_="all")
            batch = batch.to("cuda")
            if head == "transfusion":
                grid = module.network.head.codec.grid
                module.network.head = TransFusionHead(grid, 96, num_queries=50, num_layers=2)
                module.loss = BEVFusionLoss(TransFusionLoss())
        with waits:
            module.compute_loss(module(batch), batch)
    return dict(waits.found)


@pytest.mark.parametrize(
    ("name", "head", "crossings"),
    [("bevformer_toy", "", 1), ("bevfusion_toy", "", 0), ("bevfusion_lidar_toy", "transfusion", 1)],
)
def test_a_step_waits_only_where_a_comment_says_why(
    name: str, head: str, crossings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = find_waits(name, head, monkeypatch)
    waits = {key: count for key, count in found.items() if "queued" not in key}
    # The points kept by the pillars; the heatmap of the toys matches nothing.
    own = {key: count for key, count in waits.items() if " ops/" not in key}
    assert own == ({} if name.startswith("bevformer") else {"nonzero models/pillars.py": 1})
    assert sum(waits.values()) <= 7
    assert found.get("queued to host losses/matching.py", 0) == crossings
    assert found.get("queued from host losses/matching.py", 0) == crossings


def test_what_waits_is_written_down() -> None:
    with FakeTensorMode(), Waits() as waits:
        x = torch.empty(4, device="cuda")
        x[x > 0] = 1.0
        x.new_tensor([1.0])
        x.to("cpu", non_blocking=True)
        float(x.cpu()[0])
    kinds = Counter(key.rsplit(" ", 1)[0] for key in waits.found.elements())
    assert kinds == {
        "mask": 1,
        "copy from host": 1,
        "queued to host": 1,
        "copy to host": 1,
        "_local_scalar_dense": 1,
    }
