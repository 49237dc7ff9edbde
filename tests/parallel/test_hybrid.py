"""Pipelines and the mesh on gloo: the gradients of one process in every layout."""

import itertools
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import nn

from bev_lightning.config.compose import load_config
from bev_lightning.config.resolve import resolve
from bev_lightning.config.validate import check_config
from bev_lightning.errors import InputError
from bev_lightning.hardware.machine import Machine
from bev_lightning.models.protocol import ModelPartition, PipelinePart
from bev_lightning.modules.detection import DetectionModule
from bev_lightning.parallel.partition import partition_model, split_stages

# data x pipeline x model
LAYOUTS = [(1, 2, 2), (2, 1, 2), (2, 2, 1), (1, 4, 1), (1, 1, 4)]
slow = pytest.mark.slow


def train(launch, model: str, shape: tuple[int, int, int], schedule: str, **more: Any) -> Any:
    """Four optimizer steps of two micro-steps, a batch of as many micro-batches as stages."""
    data, pipeline, row_parallel = shape
    overrides = [
        "strategy=hybrid",
        f"hardware.devices={data * pipeline * row_parallel}",
        f"strategy.data={data}",
        f"strategy.pipeline={pipeline}",
        f"strategy.model={row_parallel}",
        f"strategy.schedule={schedule}",
        f"strategy.micro_batches={pipeline}",
        "trainer.gradient_clip_val=0.5",
        "scheduler=constant",
        *more.pop("overrides", []),
    ]
    replica = [
        i * row_parallel + j
        for i in range(data)
        for _ in range(pipeline)
        for j in range(row_parallel)
    ]
    return launch(model, overrides, replica, batch=pipeline, **more)


def cases() -> list[Any]:
    every = itertools.product(["bevfusion", "bevformer"], LAYOUTS, ["1f1b", "gpipe"])
    quick = ((1, 2, 2), "1f1b")
    return [
        pytest.param(model, *rest, marks=[] if rest == quick else [slow], id=f"{model} {rest}")
        for model, *more in every
        for rest in [tuple(more)]
    ]


@pytest.mark.parametrize(("model", "shape", "schedule"), cases())
def test_every_layout_gives_the_gradients_of_one_process(
    model: str, shape: tuple[int, int, int], schedule: str, launch, reference, deviation
) -> None:
    num_micro = 2 * shape[0] * shape[1] * shape[2]
    seen = train(launch, model, shape, schedule)
    found = deviation(reference(model, num_micro), seen)
    print(f"deviation {model} {shape} {schedule} {found:.1e}")
    assert found < 1e-5


@slow
@pytest.mark.parametrize("model", ["bevfusion", "bevformer"])
def test_the_effective_batch_is_one_batch(model: str, launch, deviation) -> None:
    effective = ["loss_norm=effective", "trainer.gradient_clip_val=0.5"]
    whole = launch(model, ["strategy=single", *effective], [0], batch=8, accumulation=1)
    cut = train(launch, model, (1, 2, 2), "1f1b", overrides=effective)
    assert deviation(whole, cut) < 1e-5
    for strategy in ("ddp", "fsdp"):
        overrides = [f"strategy={strategy}", "hardware.devices=2", *effective]
        assert deviation(whole, launch(model, overrides, [0, 1], batch=2)) < 1e-5


@slow
def test_checkpoints_are_portable(tmp_path: Path, launch, reference, deviation) -> None:
    path, final = tmp_path / "half.ckpt", reference("bevfusion", 8, "adamw")
    train(launch, "bevfusion", (1, 2, 2), "1f1b", optimizer="adamw", save=str(path))
    for overrides, replica, accumulation in (
        (["strategy=single"], [0], 8),
        (["strategy=fsdp", "hardware.devices=2"], [0, 1], 4),
    ):
        overrides += ["trainer.gradient_clip_val=0.5", "scheduler=constant"]
        seen = launch(
            "bevfusion",
            overrides,
            replica,
            accumulation=accumulation,
            optimizer="adamw",
            begin=2 * accumulation,
            resume=str(path),
        )
        assert deviation({**final, "gradients": final["gradients"][2:]}, seen) < 2e-4
    seen = train(
        launch, "bevfusion", (2, 2, 1), "gpipe", optimizer="adamw", begin=4, resume=str(path)
    )
    assert deviation({**final, "gradients": final["gradients"][2:]}, seen) < 2e-4


@slow
def test_batch_norms_move_in_their_stage_and_arrive_everywhere(launch) -> None:
    seen = train(launch, "bevfusion", (1, 2, 1), "1f1b", moving_norms=True)
    counted = [int(v) for k, v in seen["weights"].items() if k.endswith("num_batches_tracked")]
    # Two micro-batches, two micro-steps, four steps; of the head too, on process 0.
    assert len(counted) > 10 and set(counted) == {16}


@slow
def test_what_autograd_keeps(launch) -> None:
    """Of a global batch of four samples, the most loaded process of 1 x 2 x 2 against ddp."""
    kept = {}
    once = {"steps": 1, "accumulation": 1}
    for cuts in ("[fusion]", "[transform]"):
        overrides = [f"strategy.cuts={cuts}"]
        kept[cuts] = train(launch, "bevfusion_toy", (1, 2, 2), "1f1b", overrides=overrides, **once)[
            "kept"
        ]
    overrides = ["strategy=ddp", "hardware.devices=4"]
    kept["ddp"] = launch("bevfusion_toy", overrides, [0, 1, 2, 3], **once)["kept"]
    print({name: [round(own / 2**20, 1) for own in each] for name, each in kept.items()})
    assert max(kept["[transform]"]) < 0.75 * max(kept["ddp"])
    assert max(kept["[transform]"]) < max(kept["[fusion]"])


def partition(model: str, size: int = 1) -> Any:
    cfg = load_config("train", [f"model={model}"])
    module = instantiate(OmegaConf.to_container(cfg.model, resolve=True), _convert_="all")
    return partition_model(module, SimpleNamespace(size=size, rank=0))  # type: ignore[arg-type]


def test_stages_begin_where_the_network_allows() -> None:
    def names(stages: list[Any]) -> list[list[str]]:
        return [[part.name for part in stage] for stage in stages]

    fusion = partition("bevfusion_toy")
    assert names(split_stages(fusion, 2)) == [["images"], ["transform", "fusion", "head"]]
    assert names(split_stages(fusion, 2, ["fusion"])) == [
        ["images", "transform"],
        ["fusion", "head"],
    ]
    assert len(split_stages(fusion, 4)) == 4
    former = partition("bevformer_toy")
    assert names(split_stages(former, 2)) == [["images", "neck"], ["transform", "head"]]
    with pytest.raises(InputError, match=r"strategy.pipeline=5 and this model has 4 parts .*; set"):
        split_stages(former, 5)
    with pytest.raises(
        InputError, match=r"must name 1 of this model's parts .*; change it, or set strategy"
    ):
        split_stages(former, 2, ["images"])
    with pytest.raises(InputError, match="this model has no camera; set strategy.model=1"):
        partition("bevfusion_lidar_toy", 2)
    with pytest.raises(
        InputError, match="does not divide the 40 rows of model.network.encoder.grid"
    ):
        partition("bevformer_toy", 3)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["hardware=cpu", "hardware.devices=3"],
            "strategy.data=auto x strategy.pipeline=2 x strategy.model=2",
        ),
        (["hardware=4x4090", "strategy.data=2"], "mesh of 4 processes (hardware.nodes=1 x"),
        (["strategy.pipeline=0"], "strategy.pipeline=0 must be a whole number"),
        (["strategy.schedule=2f2b"], "use strategy.schedule=gpipe or 1f1b"),
        (["strategy.micro_batches=1"], "set strategy.micro_batches=2 or strategy.schedule=gpipe"),
        (["data.batch_size=3"], "strategy.micro_batches=2 does not divide data.batch_size=3"),
        (["trainer.sync_batchnorm=true"], "set trainer.sync_batchnorm=false"),
    ],
)
def test_refusals(overrides: list[str], sentence: str) -> None:
    with pytest.raises(InputError, match=re.escape(sentence)):
        check_config(load_config("train", ["strategy=hybrid", "data.batch_size=2", *overrides]))


def test_four_machines_or_four_cards() -> None:
    for hardware in ("4x4090", "4n1x4090"):
        cfg = load_config("train", [f"hardware={hardware}", "strategy=hybrid", "strategy.model=3"])
        with pytest.raises(InputError, match="do not make up that mesh"):
            check_config(cfg)
        cfg = load_config("train", [f"hardware={hardware}", "strategy=hybrid"])
        check_config(cfg)
        plain = resolve(cfg, Machine())
        check_config(plain)
        assert plain.trainer.strategy["_target_"].endswith("HybridStrategy")
        assert [plain.trainer.strategy[key] for key in ("data", "pipeline", "model")] == [1, 2, 2]


class Plain(nn.Module):
    def decode(self, predictions: Any) -> Any:
        return predictions


class TwoParts(Plain):
    def pipeline_parts(self, row_parallel: Any) -> ModelPartition:
        parts = [PipelinePart(name, lambda batch, *values: values, ()) for name in ("a", "b")]
        return ModelPartition(parts, ("b",))


def test_a_network_of_your_own_lists_its_parts() -> None:
    loss, inputs, alone = nn.Identity(), SimpleNamespace(), SimpleNamespace(size=1, rank=0)
    with pytest.raises(InputError, match=r"need Plain.pipeline_parts; implement it"):
        partition_model(DetectionModule(Plain(), loss, inputs, ("car",)), alone)
    found = partition_model(DetectionModule(TwoParts(), loss, inputs, ("car",)), alone)
    assert [[p.name for p in stage] for stage in split_stages(found, 2)] == [["a"], ["b"]]
