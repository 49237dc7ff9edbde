"""Converts published weights to this package's names, or back.

``python -m bev_lightning.convert source=FILE model=CHOICE [to=official]``.
"""

from omegaconf import DictConfig

from bev_lightning.config.program import entry
from bev_lightning.config.run_directory import write_json

# Attribute of the network in its module.
_NETWORK = "network."


@entry("convert")
def main(cfg: DictConfig) -> None:
    """Write weights.safetensors (with official names also weights.pth, which the official code
    reads) and convert.json; print what matched and what did not."""
    from pathlib import Path

    import torch
    from safetensors.torch import save_file

    from bev_lightning.checkpointing.official import convert_to_official, convert_to_ours
    from bev_lightning.checkpointing.weights import read_state
    from bev_lightning.errors import InputError
    from bev_lightning.runtime.build import build_module

    module = build_module(cfg)
    state = read_state(cfg.source)
    names = None if cfg.names == "auto" else cfg.names
    if cfg.to == "ours":
        fit, names = convert_to_ours(module.network, state, names)
        weights = {_NETWORK + name: value for name, value in fit.state.items()}
    else:
        camera = module.inputs.camera
        state = {name.removeprefix(_NETWORK): value for name, value in state.items()}
        size = None if camera is None else camera.size
        fit, names = convert_to_official(module.network, state, names, size)
        weights = fit.state
    lists = {"missing": fit.missing, "unexpected": fit.unexpected, "reshaped": fit.reshaped}
    print(f"{cfg.source}: {len(fit.state)} matched, names of {names}")
    for kind, entries in lists.items():
        print(f"{len(entries)} {kind}" + "".join(f"\n  {name}" for name in entries))
    if cfg.strict and not fit.is_whole:
        kind = next(kind for kind, entries in lists.items() if entries)
        more = f" and {len(lists[kind]) - 1} more" if len(lists[kind]) > 1 else ""
        raise InputError(
            f"{cfg.source} does not fit the model: {kind} {lists[kind][0]}{more}; give the model= "
            "it was made for, or strict=false to write what matches"
        )
    run = Path(cfg.paths.run)
    path = run / "weights.safetensors"
    save_file(weights, path, _describe(cfg, names))
    if cfg.to == "official":
        torch.save({"state_dict": weights}, run / "weights.pth")
    counts = {"matched": len(weights), **{kind: len(entries) for kind, entries in lists.items()}}
    result = {"source": str(cfg.source), "to": cfg.to, "names": names, "counts": counts, **lists}
    write_json(run / "convert.json", result)
    print(f"written: {path}")


def _describe(cfg: DictConfig, names: str) -> dict[str, str]:
    """Metadata of the file, from which ``evaluate ckpt=FILE`` composes its model."""
    import json
    from pathlib import Path

    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    choice = str(HydraConfig.get().runtime.choices["model"])
    metadata = {"model": choice, "to": str(cfg.to), "names": names}
    if cfg.to == "official":
        return metadata
    overrides = json.loads((Path(cfg.paths.run) / "run.json").read_text())["overrides"]
    kept = [one for one in overrides if one.lstrip("+~").startswith(("model.", "data.classes"))]
    shift = "model.network.head.height_shift"
    if names == "mmdetection3d" and not any(one.startswith(shift) for one in kept):
        # mmdetection3d uses the annotated centre, see BoxCodec.
        kept.append(f"{shift}=0")
    return {
        **metadata,
        "overrides": json.dumps([f"model={choice}", *kept]),
        "inputs": json.dumps(OmegaConf.to_container(cfg.model.inputs, resolve=True)),
    }


if __name__ == "__main__":
    main()
