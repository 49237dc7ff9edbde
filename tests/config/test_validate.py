"""Accepted and refused configurations, and the values that replace `auto`."""

import itertools
import random
import re
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from bev_lightning.config.compose import config_dir, load_config
from bev_lightning.config.resolve import plan_batch, resolve
from bev_lightning.config.validate import check_config, check_machine
from bev_lightning.errors import InputError
from bev_lightning.hardware.machine import Machine

AXES = ("hardware", "precision", "accumulation", "strategy")
CPU = Machine(num_cpus=8)
FOUR_3090 = Machine(4, "NVIDIA GeForce RTX 3090", 23.6, 8.6, num_cpus=32)
TWO_2080 = Machine(2, "NVIDIA GeForce RTX 2080 Ti", 10.7, 7.5, num_cpus=16)


def axis(group: str) -> dict[str, DictConfig]:
    files = sorted((config_dir() / group).glob("*.yaml"))
    return {path.stem: OmegaConf.load(path) for path in files}  # type: ignore[misc]


def leaves(node: Any, prefix: str = "") -> set[str]:
    if not isinstance(node, dict):
        return {prefix}
    return set().union(*(leaves(value, f"{prefix}.{key}") for key, value in node.items()))


def written_by(group: str) -> set[str]:
    return set().union(
        *(leaves(OmegaConf.to_container(file, resolve=False)) for file in axis(group).values())
    )


def test_the_speed_axes_write_disjoint_keys() -> None:
    for one, other in itertools.combinations(AXES, 2):
        assert written_by(one) & written_by(other) == set(), (one, other)
    for group in AXES:
        assert (config_dir() / group).is_dir()
        for path in (config_dir() / group).glob("*.yaml"):
            assert path.read_text().startswith("# @package _global_\n"), path


def test_each_choice_composes_to_the_base_plus_its_own_file() -> None:
    # With this and disjoint keys, merging the files is what Hydra would compose for the product.
    base = load_config("train")
    OmegaConf.set_struct(base, False)  # a strategy brings keys of its own
    for group in AXES:
        for choice, file in axis(group).items():
            composed = load_config("train", [f"{group}={choice}"])
            with_file = OmegaConf.merge(base, file)
            assert OmegaConf.to_container(composed) == OmegaConf.to_container(with_file), choice


def test_the_full_product_is_accepted_or_refused_with_one_sentence() -> None:
    base = load_config("train")
    nodes = ["verb", "seed", "trainer", "hardware", "cluster", "precision", "optim"]
    base = OmegaConf.masked_copy(base, nodes)
    OmegaConf.set_struct(base, False)
    accepted, refused = 0, 0
    product = itertools.product(*(axis(group).items() for group in AXES))
    for (hw, hardware), (pr, precision), (_, accumulation), (st, strategy) in product:
        cfg = OmegaConf.merge(base, hardware, precision, accumulation, strategy)
        assert isinstance(cfg, DictConfig)
        several = hw in ("4x3090", "4x4090", "4n1x4090")
        impossible = (st == "single" and several) or (st == "fsdp" and pr == "16")
        impossible = impossible or (pr == "fp8" and hw in ("cpu", "1x3090", "4x3090"))
        impossible = impossible or (pr == "fp8" and st not in ("auto", "single", "ddp"))
        impossible = impossible or (st == "deepspeed" and hw == "cpu")
        impossible = impossible or (st in ("pipeline", "hybrid") and not several and hw != "auto")
        try:
            check_config(cfg)
        except InputError as error:
            assert impossible, (hw, pr, st)
            assert re.search(r"; (use|set) ", str(error)), error
            assert "\n" not in str(error)
            refused += 1
        else:
            assert not impossible, (hw, pr, st)
            accepted += 1
    assert accepted + refused == 8 * 5 * 4 * 7
    assert accepted > 200


def test_choices_of_all_axes_and_models_compose_or_are_refused_with_one_sentence() -> None:
    models = sorted(path.stem for path in (config_dir() / "model").glob("[!_]*.yaml"))
    choices = {group: sorted(axis(group)) for group in AXES} | {"model": models}
    draw = random.Random(4)
    reported = []
    for _ in range(30):
        overrides = [f"{group}={draw.choice(names)}" for group, names in choices.items()]
        try:
            check_config(load_config("train", overrides))
        except InputError as error:
            assert re.search(r"; (use|set) ", str(error)) and "\n" not in str(error), overrides
            reported.append(str(error))
    assert 5 < len(reported) < 25 and len(set(reported)) > 3


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["precision=fp8", "hardware=4x3090"],
            "the RTX 3090 has 8.6; use precision=bf16, or precision.emulate=true",
        ),
        (
            ["precision=fp8", "hardware=cpu"],
            "and a CPU has none; use precision=32, or precision.em",
        ),
        (["precision=fp8", "precision.recipe=row"], "precision.recipe=row is unknown; use"),
        (["precision=16", "precision.loss_scale=0"], "precision.loss_scale=0 must be dynamic or a"),
        (
            ["precision.tf32=yes_please"],
            "precision.tf32=yes_please is unknown; use precision.tf32=true or false",
        ),
        (["optim.lr=inf"], "optim.lr=inf must be a positive number"),
        (["scheduler.start_factor=-1"], "scheduler.start_factor=-1 must be a number of at least 0"),
        (
            ["optim.scale_lr=cubic"],
            "optim.scale_lr=cubic is unknown; use optim.scale_lr=null, linear",
        ),
        (["optim.scale_lr=linear"], "needs optim.base_batch=None to be a whole number"),
        (["auto_batch=maybe"], "auto_batch=maybe is unknown; use auto_batch=true or false"),
        (["auto_batch=true", "resume=a.ckpt"], "auto_batch=true would change the batches of the"),
        (["auto_batch=true", "hardware=4n1x4090"], "tries on one machine and hardware.nodes=4"),
        (["strategy=single", "hardware.devices=2"], "strategy=single is one process"),
        (["trainer.devices=2"], "set hardware.devices and hardware.nodes alone"),
        (["trainer.precision=8"], "trainer.precision=8 is unknown"),
        (["trainer.strategy=fsdp1"], "trainer.strategy=fsdp1 is unknown"),
        (["hardware=1x3090", "strategy=fsdp", "precision=16"], "does not scale the loss"),
        (
            ["hardware=1x4090", "strategy=fsdp", "precision=fp8"],
            "strategy=fsdp does not support precision=fp8",
        ),
        (["strategy=fsdp", "callbacks=ema"], "callbacks=ema averages whole weights"),
        (["trainer.accumulate_grad_batches=0"], "must be a whole number of at least 1"),
        (["seed=4294967296"], "seed=4294967296 must be below 2^32"),
        (["cluster.collective_s=0"], "cluster.collective_s=0 must be a number of at least 1"),
        (["data.batch_size=two"], "data.batch_size=two must be a whole number"),
        (["data.batch_size=1.5"], "data.batch_size=1.5 must be a whole number"),
        (["data.batch_size=null"], "data.batch_size=null must be a whole number of at least 1"),
        (["data.val_batch_size=auto"], "data.val_batch_size=auto must be a whole number"),
        (["trainer.max_steps=null"], "trainer.max_steps=null must be a whole number"),
        (["trainer.val_check_interval=0.5"], "trainer.val_check_interval=0.5 must be a whole"),
        (["trainer.gradient_clip_val=nan"], "trainer.gradient_clip_val=nan must be a number"),
        (["trainer.max_steps=-1"], "leave nothing to train"),
        (["trainer.max_epochs=3"], "both end the training; set trainer.max_steps=-1 to train"),
        (["optim.lr=nan"], "optim.lr=nan must be a positive number"),
        (["optim.lr=fast"], "optim.lr=fast must be a positive number"),
        (["data.on_missing=ignore"], "use data.on_missing=error or skip"),
        (["data.classes=[car,cat]"], "data.classes holds cat"),
        (["data.classes=[car,car]"], "names a class twice"),
        (["paths.cache=data/synthetic/cache"], "lies inside data.root=data/synthetic"),
        (["init_from=a.ckpt", "resume=b.ckpt"], "init_from and resume are both set"),
    ],
)
def test_meaning_is_checked_without_a_machine(overrides: list[str], sentence: str) -> None:
    with pytest.raises(InputError, match=re.escape(sentence)) as refusal:
        check_config(load_config("train", overrides))
    assert "\n" not in str(refusal.value)


def test_each_model_goes_with_each_choice() -> None:
    models = sorted(path.stem for path in (config_dir() / "model").glob("[!_]*.yaml"))
    composed = {model: load_config("train", [f"model={model}"]) for model in models}
    for cfg, group in itertools.product(composed.values(), AXES):
        OmegaConf.set_struct(cfg, False)
        for choice, file in axis(group).items():
            if choice != "fp8":
                check_config(OmegaConf.merge(cfg, file))
    # Each axis alone was accepted, so a refusal of the product is one of the axes together.
    assert len(models) > 12


def test_evaluation_needs_a_checkpoint() -> None:
    with pytest.raises(
        InputError, match="evaluate needs a checkpoint and got nothing; give ckpt=FILE"
    ):
        check_config(load_config("evaluate"))


def test_a_profile_that_the_machine_lacks_is_refused() -> None:
    overrides = ["hardware=4x3090"]
    with pytest.raises(InputError, match="needs 4 CUDA devices, this machine has 0; use hardware="):
        check_machine(load_config("train", overrides), CPU)
    check_machine(load_config("train", overrides), FOUR_3090)
    check_machine(load_config("train", ["hardware=1x3090"]), FOUR_3090)
    with pytest.raises(InputError, match=r"needs compute capability 8.9, the NVIDIA GeForce RTX 3"):
        check_machine(load_config("train", ["hardware=4x4090"]), FOUR_3090)
    with pytest.raises(InputError, match="needs cards of 139 GiB"):
        check_machine(load_config("train", ["hardware=1xh200"]), Machine(1, "H100", 79.1, 9.0))
    one = Machine(1, "NVIDIA GeForce RTX 3090", 23.6, 8.6, num_cpus=32)
    with pytest.raises(InputError, match=r"^hardware.devices=8 needs 8 .* hardware.devices=auto"):
        check_machine(load_config("train", ["hardware.devices=8"]), one)
    for overrides in ([], ["hardware=cpu", "hardware.devices=2"]):
        check_machine(load_config("train", overrides), CPU)


def test_data_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"data.root=/nowhere does not exist; set data.root to"):
        check_machine(load_config("train", ["data=nuscenes", "data.root=/nowhere"]), CPU)
    (tmp_path / "v1.0-mini").mkdir()
    (tmp_path / "v1.0-mini" / "sample.json").write_text("[]")
    overrides = ["data=nuscenes", f"data.root={tmp_path}"]
    with pytest.raises(
        InputError, match=r"has no tables v1.0-trainval/.*; set data.version=v1.0-mini"
    ):
        check_machine(load_config("train", overrides), CPU)
    check_machine(load_config("train", [*overrides, "data.version=v1.0-mini"]), CPU)
    with pytest.raises(InputError, match=r"resume=no.ckpt does not exist"):
        check_machine(load_config("train", ["resume=no.ckpt"]), CPU)


def autos(node: Any) -> bool:
    if isinstance(node, dict):
        return any(map(autos, node.values()))
    return any(map(autos, node)) if isinstance(node, list) else node == "auto"


def test_auto_on_a_cpu() -> None:
    cfg = load_config("train")
    before = OmegaConf.to_container(cfg)
    plain = resolve(cfg, CPU, Path("somewhere"))
    assert OmegaConf.to_container(cfg) == before
    assert not autos(OmegaConf.to_container(plain))
    assert plain.trainer.accelerator == "cpu"
    assert plain.trainer.devices == 1
    assert plain.trainer.precision == "32-true"
    assert plain.trainer.strategy.device == "cpu"
    assert plain.loader == plain.data.loader
    assert plain.loader._target_ == "bev_lightning.data.loaders.shared_memory.SharedMemoryLoader"
    assert (plain.loader.num_workers, plain.loader.pin_memory) == (2, False)
    assert plain.paths.run == "somewhere"
    assert OmegaConf.is_readonly(plain)
    check_config(plain)


def test_auto_on_cards() -> None:
    plain = resolve(load_config("train"), FOUR_3090)
    assert (plain.trainer.accelerator, plain.trainer.devices) == ("gpu", 4)
    assert plain.trainer.precision == "bf16-mixed"
    strategy = plain.trainer.strategy
    assert strategy._target_.endswith(".DDPStrategy") and not strategy.find_unused_parameters
    assert (plain.hardware.card, plain.hardware.capability) == (FOUR_3090.card, 8.6)
    assert (plain.loader.num_workers, plain.loader.pin_memory) == (7, True)
    assert resolve(load_config("train"), TWO_2080).trainer.precision == "16-mixed"
    single = resolve(load_config("train", ["strategy=single"]), FOUR_3090)
    assert single.trainer.devices == 1
    assert single.trainer.strategy.device == "cuda:0"


def test_a_home_directory_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "x" / "v1.0-trainval").mkdir(parents=True)
    (tmp_path / "x" / "v1.0-trainval" / "sample.json").write_text("[]")
    cfg = load_config("train", ["data=nuscenes", "data.root=~/x"])
    check_machine(cfg, CPU)
    plain = resolve(cfg, CPU)
    assert plain.data.root == str(tmp_path / "x")


def test_given_hardware_beats_an_experiment() -> None:
    for hardware, processes in (("cpu", 1), ("4n1x4090", 4), ("4x4090", 4), ("1x3090", 1)):
        overrides = ["experiment=bevformer_base_4x24gib", f"hardware={hardware}", "precision=32"]
        plan = plan_batch(resolve(load_config("train", overrides), CPU))
        assert plan.num_processes == processes
        assert plan.effective_batch == 2 * processes


def test_given_values_are_kept() -> None:
    overrides = ["hardware=cpu", "hardware.devices=2", "loader=auto", "loader.num_workers=0"]
    plain = resolve(load_config("train", [*overrides, "cluster.rendezvous_s=30"]), FOUR_3090)
    assert (plain.trainer.accelerator, plain.trainer.devices) == ("cpu", 2)
    strategy = plain.trainer.strategy
    assert strategy._target_.endswith(".DDPStrategy") and strategy.find_unused_parameters
    assert strategy.timeout.seconds == 30
    assert plain.loader.num_workers == 0
    assert resolve(load_config("train", ["loader=torch"]), CPU).loader._target_.endswith(
        "TorchLoader"
    )


def test_auto_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bev_lightning.data.loaders.auto._has_dali", lambda: True)
    loader = resolve(load_config("train"), FOUR_3090).loader
    assert (loader._target_, loader.image_queue) == (
        "bev_lightning.data.loaders.dali.DaliLoader",
        8,
    )
    cached = resolve(load_config("train", ["data.cache=disk"]), FOUR_3090)
    assert cached.loader._target_.endswith("SharedMemoryLoader")
    monkeypatch.setattr("bev_lightning.data.loaders.auto._has_dali", lambda: False)
    assert resolve(load_config("train"), FOUR_3090).loader._target_.endswith("SharedMemoryLoader")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["loader.pin_memory=banana"],
            "loader.pin_memory=banana is unknown; use loader.pin_memory=auto, true or",
        ),
        (["loader=zero_copy", "loader.full_decode=1"], "loader.full_decode=1 is unknown; use"),
        (["data.cache=tape"], "data.cache=tape is unknown; use data.cache=none, ram or disk"),
        (["data.cache=ram", "loader=dali"], "data.cache=ram stores images .* use loader=zero_copy"),
        (["data.cache_gib=-1"], "data.cache_gib=-1 must be a number of at least 0"),
        (["loader=dali_prefetch", "loader.image_queue=0"], "loader.image_queue=0 must be"),
    ],
)
def test_loaders_that_cannot_be(overrides: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_config(load_config("train", overrides))


def test_every_verb_resolves() -> None:
    for verb in ("prepare", "evaluate", "predict"):
        plain = resolve(load_config(verb, ["data.root=x", "++ckpt=x"]), CPU)
        assert not autos(OmegaConf.to_container(plain))
        assert plain.verb == verb


def test_lengths_that_are_accepted() -> None:
    check_config(load_config("train", ["trainer.max_epochs=3", "trainer.max_steps=-1"]))
    check_config(
        load_config("train", ["trainer.max_epochs=null", "trainer.gradient_clip_val=null"])
    )


def test_pasting_is_for_lidar_models() -> None:
    check_config(load_config("train", ["data/gt_sampling=published", "~model.inputs.camera"]))
    with pytest.raises(InputError, match=r"reads camera too.*; use data/gt_sampling with"):
        check_config(load_config("train", ["data/gt_sampling=published"]))
    with pytest.raises(InputError, match="use data/gt_sampling=published"):
        check_config(load_config("train", ["data.gt_sampling=published"]))


STILL = {
    "bev_rotate_deg": [0, 0],
    "bev_scale": [1, 1],
    "bev_flip_x": 0,
    "bev_flip_y": 0,
    "bev_translate_std_m": [0, 0, 0],
}


def test_the_can_bus_is_not_augmented() -> None:
    published = load_config("train", ["model=bevformer_tiny", "data=nuscenes"])

    def check_with(**changes: Any) -> None:
        cfg = published.copy()
        for key, value in changes.items():
            prefix = "data.augment." if key in STILL else "model.network.encoder."
            OmegaConf.update(cfg, prefix + key, value)
        check_config(cfg)

    pattern = (
        r"has motion=can_bus and use_can_bus=true, .*; set data.augment.bev_rotate_deg=\[0,0\] "
    )
    with pytest.raises(InputError, match=pattern):
        check_with()
    for key in STILL:
        others = {name: value for name, value in STILL.items() if name != key}
        with pytest.raises(InputError) as refusal:
            check_with(**others)
        assert f"; set data.augment.{key}=" in str(refusal.value)
        assert not any(name in str(refusal.value) for name in others)
    with pytest.raises(InputError, match=r"encoder has use_can_bus=true, and"):
        check_with(motion="pose")
    check_with(**STILL)
    check_with(motion="pose", use_can_bus=False)
    check_config(
        load_config("train", ["model=bevformer_tiny", "data=nuscenes", "data.augment=null"])
    )
    # Nothing is augmented there.
    check_config(load_config("evaluate", ["model=bevformer_tiny", "data=nuscenes", "ckpt=a.ckpt"]))


def test_bench_without_a_name_lists_the_names() -> None:
    with pytest.raises(InputError, match="give bench="):
        check_config(load_config("bench"))


def test_compile_and_layout_are_refused_where_they_do_not_work() -> None:
    for overrides, sentence in (
        (["compile=on"], "use compile=off, model or regions"),
        (["compile=regions", "strategy=fsdp"], "use compile=off with strategy=fsdp"),
        (["compile=model", "model=bevformer_small"], "gradient_checkpointing=true; set that to"),
        (["channels_last=yes"], "use channels_last=auto, true or false"),
        (["channels_last=true", "strategy=pipeline"], "use channels_last=auto with strategy=pip"),
    ):
        with pytest.raises(InputError, match=sentence):
            check_config(load_config("train", overrides))
    check_config(load_config("train", ["compile=off", "channels_last=false"]))
    card = Machine(num_cuda_devices=1, card="Card", memory_gib=80.0, capability=9.0)
    assert resolve(load_config("train"), card).channels_last is True
    assert resolve(load_config("train", ["strategy=fsdp"]), card).channels_last is False
    assert resolve(load_config("train"), Machine()).channels_last is False
