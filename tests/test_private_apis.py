"""Every private API of another package that this one uses still exists and does what it did."""

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.demos.boring_classes import BoringModel
from omegaconf import OmegaConf

from bev_lightning import private_apis
from bev_lightning.config.compose import compose_jobs


@pytest.mark.parametrize("name", private_apis.IMPORTS)
def test_private_imports(name: str) -> None:
    assert getattr(private_apis, name).__name__ == name


def test_a_missing_api_is_named() -> None:
    with pytest.raises(
        AttributeError, match=r"Gone\._x is gone after an upgrade; adapt .*private_a"
    ):
        private_apis.require(type("Gone", (), {})(), "_x")
    with pytest.raises(AttributeError, match="no attribute"):
        _ = private_apis.nothing


def test_hydra_parser_separates_flags_and_overrides() -> None:
    args = private_apis.hydra_argument_parser().parse_intermixed_args(["-m", "a=1", "--cfg", "job"])
    assert args.multirun and args.cfg == "job" and args.overrides == ["a=1"]


def test_hydra_splits_sweeps() -> None:
    _, jobs = compose_jobs("train", ["seed=1,2"], multirun=True)
    assert [job.cfg.seed for job in jobs] == [1, 2]


def test_config_key() -> None:
    assert private_apis.config_key(OmegaConf.create({"a": {"b": {"c": 1}}}).a.b) == "a.b"


def test_exit_functions_exist() -> None:
    import atexit

    assert callable(private_apis.require(atexit, "_run_exitfuncs"))


def test_process_group(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        private_apis.set_collective_timeout(timedelta(seconds=77))
        own = private_apis.rendezvous_store()
        own.set("key", "value")
        assert own.get("key") == b"value"
    finally:
        dist.destroy_process_group()


def test_fused_optimizers_leave_scaling_to_the_scaler() -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], fused=True)
    assert optimizer._step_supports_amp_scaling, "torch has renamed or removed the attribute"
    private_apis.unscale_by_scaler(optimizer)
    assert not optimizer._step_supports_amp_scaling


def test_storage_keys_tell_fake_tensors_apart() -> None:
    with private_apis.FakeTensorMode():
        one, other = torch.empty(3), torch.empty(3)
    keys = [private_apis.storage_key(tensor.untyped_storage()) for tensor in (one, one[:2], other)]
    assert keys[0] == keys[1] != keys[2]


def test_lightning_loops(tmp_path: Path) -> None:
    seen = []

    class Recorder(L.Callback):
        def on_train_batch_end(self, trainer, *args) -> None:
            due = private_apis.validation_is_due(trainer)
            seen.append((trainer.global_step, due, private_apis.epoch_is_done(trainer)))

    trainer = L.Trainer(
        accelerator="cpu",
        callbacks=[Recorder()],
        max_steps=3,
        val_check_interval=2,
        check_val_every_n_epoch=None,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(BoringModel())
    assert seen == [(1, False, False), (2, True, False), (3, False, True)]


def test_deepspeed_states_are_linked_again() -> None:
    calls = []
    optimizer = SimpleNamespace(
        _hp_optimizer_states_linked=True,
        _lazy_init_hp_params_optimizer_state=lambda: calls.append("linked"),
    )
    private_apis.link_deepspeed_states(optimizer)
    assert calls == ["linked"] and not optimizer._hp_optimizer_states_linked
    private_apis.link_deepspeed_states(SimpleNamespace())  # stage 3
