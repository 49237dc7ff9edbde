"""The convert verb: files in, files out, refusals. In this process, with a small BEVFusion."""

import argparse
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from bev_lightning import convert
from bev_lightning.checkpointing.weights import read_state
from bev_lightning.config.compose import compose_job, load_config, read_overrides
from bev_lightning.errors import InputError
from bev_lightning.runtime.build import (
    build_module,
    load_matching_weights,
    load_weights,
    read_trained_inputs,
)

SMALL = [
    "hardware=cpu",
    "model=bevfusion",
    "model.network.camera.backbone.width=8",
    "model.network.camera.backbone.depths=[1,1,1,1]",
    "model.network.camera.backbone.num_heads=[1,1,2,2]",
    "model.network.camera.neck.in_channels=[16,32,64]",
    "model.network.camera.neck.out_channels=16",
    "model.network.camera.lift.in_channels=16",
    "model.network.camera.lift.out_channels=8",
    "model.network.lidar.encoder.base_channels=4",
    "model.network.lidar.encoder.stage_channels=[[4,8],[8,8],[8,8],[8]]",
    "model.network.lidar.encoder.out_channels=8",
    "model.network.fuser.in_channels=[8,16]",
    "model.network.fuser.out_channels=8",
    "model.network.backbone.in_channels=8",
    "model.network.backbone.out_channels=[8,8]",
    "model.network.neck.in_channels=[8,8]",
    "model.network.neck.out_channels=[8,8]",
    "model.network.head.in_channels=16",
    "model.network.head.channels=16",
    "model.network.head.num_heads=2",
]
Convert = Callable[..., tuple[int, str, Path | None]]


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Convert:
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> tuple[int, str, Path | None]:
        """Exit code, what was said, run directory."""
        monkeypatch.setattr("sys.argv", ["convert", *words])
        code = 0
        try:
            convert.main()
        except SystemExit as end:
            code = int(end.code or 0)
        out, err = capsys.readouterr()
        last = out.strip().splitlines()[-1] if out.strip() else ""
        place = tmp_path / last.removeprefix("Results: ") if "Results: " in last else None
        return code, out + err, place

    return call


@pytest.fixture(scope="module")
def own() -> dict[str, Tensor]:
    """Seeded weights of the small model, by our names."""
    state = build_module(load_config("convert", SMALL)).state_dict()
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(value.shape, generator=generator)
        if value.is_floating_point()
        else value + 3
        for name, value in state.items()
    }


def test_there_and_back(run: Convert, own: dict[str, Tensor], tmp_path: Path) -> None:
    save_file(own, tmp_path / "own.safetensors")
    code, said, place = run(f"source={tmp_path / 'own.safetensors'}", "to=official", *SMALL)
    assert code == 0 and place is not None, said
    official = torch.load(place / "weights.pth", weights_only=True)["state_dict"]
    assert official.keys() == load_file(place / "weights.safetensors").keys()
    assert "encoders.camera.vtransform.frustum" in official

    code, said, place = run(f"source={place / 'weights.pth'}", *SMALL)
    assert code == 0 and place is not None, said
    assert f"{len(own)} matched, names of mit" in said and "0 missing\n0 unexpected" in said
    path = place / "weights.safetensors"
    back = load_file(path)
    assert back.keys() == own.keys() and all(back[name].equal(own[name]) for name in own)
    report = json.loads((place / "convert.json").read_text())
    assert report["counts"] == {
        "matched": len(own),
        "missing": 0,
        "unexpected": 0,
        "reshaped": 0,
    }
    with safe_open(path, "pt") as file:
        told = file.metadata()
    assert told["model"] == "bevfusion" and told["to"] == "ours" and told["names"] == "mit"

    # The file is a checkpoint: it knows its model, and what it was trained with.
    assert read_overrides(path) == SMALL[1:]
    cfg = compose_job("evaluate", ["hardware=cpu", f"ckpt={path}"]).cfg
    assert cfg.model.network.camera.backbone.width == 8
    module = build_module(load_config("evaluate", [f"ckpt={path}", "hardware=cpu"]))
    load_weights(module, path)
    assert module.state_dict()["network.fuser.0.weight"].equal(own["network.fuser.0.weight"])
    assert read_trained_inputs(path)["lidar"]["sweeps"] == 9
    fewer = load_config("evaluate", [f"ckpt={path}", "hardware=cpu", "model.inputs.lidar.sweeps=3"])
    with pytest.warns(UserWarning, match="trained with model.inputs.lidar.sweeps=9 but read 3"):
        load_weights(build_module(fewer), path)


def test_a_missing_weight_is_refused_and_named(
    run: Convert, own: dict[str, Tensor], tmp_path: Path
) -> None:
    save_file(own, tmp_path / "own.safetensors")
    code, said, place = run(
        f"source={tmp_path / 'own.safetensors'}", "to=official", "names=mmdetection3d", *SMALL
    )
    assert code == 0 and place is not None, said
    official = load_file(place / "weights.safetensors")
    del official["pts_neck.deblocks.1.0.weight"]
    save_file(official, tmp_path / "partial.safetensors")
    words = [f"source={tmp_path / 'partial.safetensors'}", *SMALL]
    code, said, _ = run(*words)
    assert code == 2
    assert "1 missing\n  pts_neck.deblocks.1.0.weight -> neck.deblocks.1.0.weight" in said
    assert "does not fit the model: missing pts_neck.deblocks.1.0.weight" in said
    assert "strict=false" in said

    code, said, place = run(*words, "strict=false")
    assert code == 0 and place is not None, said
    path = place / "weights.safetensors"
    # The port's boxes have their true height.
    assert read_overrides(path)[-1] == "model.network.head.height_shift=0"
    module = build_module(load_config("train", SMALL))
    names = load_matching_weights(module, path)
    assert names["missing"] == ["network.neck.deblocks.1.0.weight"]
    assert len(names["loaded"]) == len(own) - 1


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "convert needs a file of weights; give source=FILE"),
        (["source=nowhere.pth"], "source=nowhere.pth does not exist"),
        (["source=FILE", "to=theirs"], "to=theirs is unknown; use to=ours or official"),
        (["source=FILE", "names=mmdet"], "names=mmdet is unknown"),
        (["source=FILE"], "in no published format"),
    ],
)
def test_refusals(run: Convert, tmp_path: Path, words: list[str], sentence: str) -> None:
    torch.save({"network.weight": torch.zeros(2)}, tmp_path / "FILE")
    code, said, _ = run(*words, "hardware=cpu")
    assert code == 2 and sentence in said


def test_a_file_that_holds_code_is_refused_with_the_mend(run: Convert, tmp_path: Path) -> None:
    content = {"state_dict": {"fuser.0.weight": torch.zeros(2)}, "meta": argparse.Namespace(a=1)}
    torch.save(content, tmp_path / "mmcv.pth")
    code, said, _ = run(f"source={tmp_path / 'mmcv.pth'}", "hardware=cpu", "model=bevfusion_lidar")
    assert code == 2
    assert "holds objects of the class argparse.Namespace" in said
    assert "torch.save({'state_dict': c['state_dict']}, 'weights.pth')" in said


def test_a_file_that_holds_a_command_is_refused_without_leave_to_run_it(tmp_path: Path) -> None:
    (tmp_path / "evil.pth").write_bytes(pickle.dumps(os.system, protocol=2))
    with pytest.raises(InputError, match=r"holds objects of the class posix\.system") as refusal:
        read_state(tmp_path / "evil.pth")
    assert "\n" not in str(refusal.value)


def test_read_state_takes_every_kind_of_file(tmp_path: Path) -> None:
    weights = {"a": torch.arange(3.0)}
    save_file(weights, tmp_path / "a.safetensors")
    torch.save(weights, tmp_path / "flat.pth")
    torch.save({"model": weights, "epoch": 3}, tmp_path / "model.pth")
    torch.save({"state_dict": weights, "meta": {"epoch": 3, "config": "text"}}, tmp_path / "s.pth")
    old = tmp_path / "old.pth"
    torch.save(weights, old, _use_new_zipfile_serialization=False)
    assert read_trained_inputs(old) == {}
    for name in ("a.safetensors", "flat.pth", "model.pth", "s.pth", "old.pth"):
        state = read_state(tmp_path / name)
        assert list(state) == ["a"] and state["a"].equal(weights["a"])
    (tmp_path / "text.ckpt").write_text("hello")
    (tmp_path / "text.safetensors").write_text("hello")
    (tmp_path / "list.pkl").write_bytes(pickle.dumps([1, 2]))
    for name in ("text.ckpt", "text.safetensors", "list.pkl"):
        with pytest.raises(InputError, match=f"{name} is no readable checkpoint"):
            read_state(tmp_path / name)
    with pytest.raises(InputError, match="there is no checkpoint"):
        read_state(tmp_path / "absent.safetensors")
