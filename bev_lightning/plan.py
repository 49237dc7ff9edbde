"""Forecasts the memory of a training: ``python -m bev_lightning.plan [GROUP=CHOICE ...]``."""

from omegaconf import DictConfig

from bev_lightning.config.program import entry
from bev_lightning.config.run_directory import write_json


@entry("plan")
def main(cfg: DictConfig) -> None:
    """Print the plan and write plan.json to the run directory; any verdict exits with 0."""
    from pathlib import Path

    from bev_lightning.runtime.memory_forecast import make_plan

    plan = make_plan(cfg)
    print(plan.to_text())
    write_json(Path(cfg.paths.run) / "plan.json", plan.to_json())


if __name__ == "__main__":
    main()
