"""The choice of loader=auto, as a factory that Hydra can call."""

import pytest

from bev_lightning.data.loaders import auto
from bev_lightning.data.loaders.auto import choose_loader, choose_loader_name
from bev_lightning.data.loaders.shared_memory import SharedMemoryLoader


def test_dali_is_chosen_on_cuda_without_an_image_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "_has_dali", lambda: True)
    assert choose_loader_name(on_cuda=True) == "dali_prefetch"
    assert choose_loader_name(on_cuda=True, image_cache="ram") == "zero_copy"
    assert choose_loader_name(on_cuda=False) == "zero_copy"
    monkeypatch.setattr(auto, "_has_dali", lambda: False)
    assert choose_loader_name(on_cuda=True) == "zero_copy"


def test_the_factory_builds_its_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    loader = choose_loader(3, 4, False, "ram")
    assert isinstance(loader, SharedMemoryLoader)
    assert (loader.num_workers, loader.prefetch) == (3, 4)


def test_the_queues_are_those_of_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nvidia.dali")
    from omegaconf import OmegaConf

    from bev_lightning.config.compose import config_dir

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    cfg = OmegaConf.load(config_dir() / "loader" / "dali_prefetch.yaml")
    loader = choose_loader(1, 2, False)
    assert (loader.image_queue, loader.cloud_queue) == (cfg.image_queue, cfg.cloud_queue)
