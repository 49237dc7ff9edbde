"""Benchmarks this machine: ``python -m bev_lightning.bench bench=NAME [KEY=VALUE ...]``."""

from omegaconf import DictConfig

from bev_lightning.config.program import entry


@entry("bench")
def main(cfg: DictConfig) -> None:
    """Measure, print the table and leave bench.json, bench.md and bench.png in the run
    directory."""
    from pathlib import Path

    from hydra.core.hydra_config import HydraConfig
    from hydra.utils import instantiate

    from bev_lightning.benchmarks.report import write_report
    from bev_lightning.hardware.machine import detect_machine

    machine = detect_machine()
    name = str(HydraConfig.get().runtime.choices["bench"])
    # FUNCTION(cfg, ...): its rows, and notes printed below them.
    rows, notes = instantiate(cfg.bench, _partial_=True)(cfg)
    print(f"bench={name} on {machine}\n")
    print(write_report(Path(cfg.paths.run), name, machine.to_dict(), rows, notes))


if __name__ == "__main__":
    main()
