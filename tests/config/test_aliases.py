"""Names of older checkpoints, run directories and YAML files."""

import importlib
import json
from pathlib import Path

import pytest
import torch
from hydra.utils import get_class, get_object
from omegaconf import OmegaConf

from bev_lightning.config.aliases import (
    CLASSES,
    KEYS,
    MODULES,
    rename_key,
    rename_override,
    rename_overrides,
    rename_target,
    rename_targets,
)
from bev_lightning.config.compose import compose_job, config_dir, load_config, read_overrides
from bev_lightning.config.resolve import resolve
from bev_lightning.config.resume import find_runs
from bev_lightning.config.validate import check_config
from bev_lightning.errors import InputError
from bev_lightning.hardware.machine import Machine

# Every `_target_` that a configuration could hold before the packages were rearranged.
FORMER_TARGETS = [
    "bev_lightning.accelerate.fsdp.ShardedStrategy",
    "bev_lightning.accelerate.hybrid.HybridStrategy",
    "bev_lightning.accelerate.zero.ZeroStrategy",
    "bev_lightning.benches.axes.measure_axes",
    "bev_lightning.benches.axes.measure_scaling",
    "bev_lightning.benches.gpu.check_gpu",
    "bev_lightning.benches.loading.measure_loading",
    "bev_lightning.benches.ops.measure_ops",
    "bev_lightning.benches.plan.measure",
    "bev_lightning.benches.prepare.run",
    "bev_lightning.benches.step.measure_step",
    "bev_lightning.callbacks.checkpoint.StepCheckpoint",
    "bev_lightning.callbacks.ema.EMA",
    "bev_lightning.callbacks.health.FiniteLoss",
    "bev_lightning.callbacks.health.SameWeights",
    "bev_lightning.callbacks.monitor.SpeedMonitor",
    "bev_lightning.callbacks.pictures.PredictionPictures",
    "bev_lightning.callbacks.progress.ProgressBar",
    "bev_lightning.callbacks.watch.ProcessWatch",
    "bev_lightning.data.augment.Augment",
    "bev_lightning.data.dali.DaliLoader",
    "bev_lightning.data.datamodule.DetectionDataModule",
    "bev_lightning.data.paste.Paste",
    "bev_lightning.data.reader.TorchLoader",
    "bev_lightning.data.rig.Rig",
    "bev_lightning.data.synthetic.SyntheticSpec",
    "bev_lightning.data.zero_copy.ZeroCopyLoader",
    "bev_lightning.models.bev.ConvFuser",
    "bev_lightning.models.bev.SECOND",
    "bev_lightning.models.bev.SECONDFPN",
    "bev_lightning.models.bev_encoder.BEVEncoder",
    "bev_lightning.models.bevformer.BEVFormer",
    "bev_lightning.models.bevformer_head.BEVFormerHead",
    "bev_lightning.models.bevfusion.BEVFusion",
    "bev_lightning.models.box_choice.BoxChoice",
    "bev_lightning.models.heads.CentreHead",
    "bev_lightning.models.heads.TransFusionHead",
    "bev_lightning.models.image.FPN",
    "bev_lightning.models.image.LiftFPN",
    "bev_lightning.models.image.ResNet",
    "bev_lightning.models.lidar.LidarPillarBranch",
    "bev_lightning.models.lidar.LidarVoxelBranch",
    "bev_lightning.models.lidar.MeanVoxels",
    "bev_lightning.models.lift.CameraBranch",
    "bev_lightning.models.lift.LiftSplat",
    "bev_lightning.models.perspective.PerspectiveHead",
    "bev_lightning.models.radar.RadarBranch",
    "bev_lightning.models.sparse_encoder.SparseEncoder",
    "bev_lightning.models.swin.Swin",
    "bev_lightning.modules.bevformer.BEVFormerModule",
    "bev_lightning.modules.detection.DetectionModule",
    "bev_lightning.modules.optimizer.AdamW",
    "bev_lightning.modules.tta.TestTimeAugmentation",
    "bev_lightning.objectives.losses.BEVFusionObjective",
    "bev_lightning.objectives.losses.CentreObjective",
    "bev_lightning.objectives.losses.TransFusionObjective",
    "bev_lightning.objectives.nuscenes.NuScenesEvaluator",
    "bev_lightning.objectives.set_prediction.SetPredictionObjective",
    "bev_lightning.structures.BevGrid",
    "bev_lightning.structures.CameraInput",
    "bev_lightning.structures.Inputs",
    "bev_lightning.structures.LidarInput",
    "bev_lightning.structures.RadarInput",
]


@pytest.mark.parametrize("former", FORMER_TARGETS)
def test_former_targets_import(former: str) -> None:
    if ".dali" not in former:  # DALI need not be installed
        get_object(rename_target(former))


def test_every_present_module_exists() -> None:
    for former, present in MODULES.items():
        assert former not in MODULES.values()
        while present in MODULES:
            present = MODULES[present]
        try:
            importlib.import_module(present)
        except ImportError as error:  # DALI and the like
            assert not str(error.name).startswith("bev_lightning")


def test_present_names_stay() -> None:
    """No shipped `_target_` is taken for a former name."""
    for path in config_dir().rglob("*.yaml"):
        cfg = OmegaConf.load(path)
        assert rename_targets(cfg) == {}, path
    for name in CLASSES.values():
        assert name not in CLASSES or CLASSES[name] not in CLASSES


@pytest.mark.parametrize(
    ("former", "present"),
    [
        ("data/paste=published", "data/gt_sampling=published"),
        ("+data/paste@data.paste=published", "+data/gt_sampling@data.gt_sampling=published"),
        ("data.paste=null", "data.gt_sampling=null"),
        ("~data.paste", "~data.gt_sampling"),
        ("data.paste.min_points=3", "data.gt_sampling.min_points=3"),
        ("data.pasted=3", "data.pasted=3"),
        ("model.objective.centre.box_weight=1", "model.loss.centre.box_weight=1"),
        ("++callbacks.watch.collective_s=9", "++callbacks.stragglers.collective_s=9"),
        (
            "loader._target_=bev_lightning.data.zero_copy.ZeroCopyLoader",
            "loader._target_=bev_lightning.data.loaders.shared_memory.SharedMemoryLoader",
        ),
        (
            "+a={b: {_target_: bev_lightning.data.rig.Rig}}",
            "+a={b: {_target_: bev_lightning.data.nuscenes.sensor_rig.SensorRig}}",
        ),
        ("optim.schedule=onecycle", "scheduler.shape=onecycle"),
        ("optim.warmup=0.1", "scheduler.warmup=0.1"),
        ("optim.lr=0.1", "optim.lr=0.1"),
        ("model=bevfusion_toy", "model=bevfusion_toy"),
        ("data.root=/data/paste", "data.root=/data/paste"),
        ("--multirun", "--multirun"),
    ],
)
def test_overrides_get_present_names(former: str, present: str) -> None:
    assert rename_override(former) == present
    assert rename_override(present) == present


def test_every_present_key_composes() -> None:
    models = (["model=bevfusion_lidar", "data/gt_sampling=published"], ["model=bevformer_tiny"])
    configs = [load_config("train", overrides) for overrides in models]
    for former in KEYS:
        if "/" not in former:
            found = [OmegaConf.select(cfg, rename_key(former)) for cfg in configs]
            assert any(value is not None for value in found), former


def test_a_former_checkpoint_composes(tmp_path: Path) -> None:
    """The checkpoint's overrides hold former keys and a former import path."""
    path = tmp_path / "best.ckpt"
    stored = [
        "model=bevfusion_lidar_toy",
        "data/paste=published",
        "data.paste.min_points=7",
        "model.objective.detection.min_radius_cells=2",
        "callbacks.watch.collective_s=77",
        "++model.evaluator._target_=bev_lightning.objectives.nuscenes.NuScenesEvaluator",
    ]
    torch.save({"state_dict": {}, "bev_lightning": {"overrides": stored, "config": {}}}, path)
    assert "data/gt_sampling=published" in read_overrides(path)
    job = compose_job("evaluate", [f"ckpt={path}"])
    assert job.cfg.data.gt_sampling.min_points == 7
    get_class(job.cfg.model.evaluator._target_)
    resumed = compose_job("train", [f"resume={path}"])
    assert resumed.cfg.callbacks.stragglers.collective_s == 77
    check_config(resumed.cfg)


def test_a_former_run_directory_is_found(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    reported = {"overrides": ["data/paste=published"], "started": "2026-01-01T00:00:00"}
    (tmp_path / "old" / "run.json").write_text(json.dumps(reported))
    assert find_runs(tmp_path, ["data/gt_sampling=published"]) == [tmp_path / "old"]


def test_a_users_yaml_with_former_targets_resolves(tmp_path: Path) -> None:
    (tmp_path / "callbacks").mkdir()
    target = "bev_lightning.callbacks.monitor.SpeedMonitor"
    (tmp_path / "callbacks" / "mine.yaml").write_text(f"speed:\n  _target_: {target}\n")
    cfg = compose_job("train", ["callbacks=mine", "hardware=cpu"], str(tmp_path)).cfg
    present = "bev_lightning.callbacks.speed.SpeedMonitor"
    assert cfg.callbacks.speed._target_ == present
    cfg.callbacks.speed._target_ = target
    assert resolve(cfg, Machine()).callbacks.speed._target_ == present


def test_a_users_yaml_with_former_keys_is_refused(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    content = "# @package _global_\ndata:\n  paste: null\n"
    (tmp_path / "experiment" / "mine.yaml").write_text(content)
    cfg = compose_job("train", ["experiment=mine"], str(tmp_path)).cfg
    with pytest.raises(InputError, match=r"data.paste is now data.gt_sampling"):
        check_config(cfg)


def test_former_arguments_are_renamed_or_dropped() -> None:
    assert rename_override("model.network.head.choice.range_m=null") == (
        "model.network.head.selection.range_m=null"
    )
    assert rename_overrides(["+model.evaluator.root=x", "seed=1"]) == ["seed=1"]
    cfg = OmegaConf.create(
        {
            "head": {
                "_target_": "bev_lightning.models.heads.CentreHead",
                "choice": {"score_threshold": 0.1},
                "selection": {"_target_": "bev_lightning.models.selection.BoxSelection"},
            },
            "evaluator": {
                "_target_": "bev_lightning.objectives.nuscenes.NuScenesEvaluator",
                "root": "${nothing.here}",
                "classes": ["car"],
            },
        }
    )
    OmegaConf.set_struct(cfg, True)
    rename_targets(cfg)
    assert cfg == {
        "head": {
            "_target_": "bev_lightning.models.heads.CentreHead",
            "selection": {
                "_target_": "bev_lightning.models.selection.BoxSelection",
                "score_threshold": 0.1,
            },
        },
        "evaluator": {
            "_target_": "bev_lightning.metrics.nuscenes.NuScenesEvaluator",
            "classes": ["car"],
        },
    }
