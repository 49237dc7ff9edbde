"""Generates the configuration and reference pages from conf/ and the package; run by mkdocs."""

import re
from pathlib import Path

import mkdocs_gen_files

ROOT = Path(__file__).resolve().parents[1]
CONF = ROOT / "conf"
PACKAGE = ROOT / "bev_lightning"
SUBGROUPS = {"data": ("sensors", "gt_sampling")}
INTRODUCTIONS = {
    "accumulation": "Micro-steps per optimizer step. Axis 3 of the machine.",
    "bench": "What `python -m bev_lightning.bench bench=NAME` measures.",
    "callbacks": "Checkpoints, progress, speed, pictures and checks during a training.",
    "data": "Data set, splits, classes, augmentation. `data/sensors` is the sensor rig, "
    "`data/gt_sampling` pastes objects of other scenes.",
    "debug": "Shortcuts to find out whether a configuration runs at all.",
    "experiment": "Whole recipes: each sets groups and keys of the others and beats them.",
    "hardware": "Devices and their memory. Axis 1 of the machine: `auto`, `cpu`, or "
    "`{nodes}n{cards}x{card}`.",
    "loader": "How files become batches; all give the same samples in the same order.",
    "logger": "Where metrics go. For any other Lightning logger see [Extending](../extending.md).",
    "model": "Detectors. Files that begin with `_` are shared parts.",
    "optim": "Optimizer: any `torch.optim` class, and how its rate follows the batch.",
    "paths": "Folders for data, caches and results.",
    "precision": "Number format of the training. Axis 2 of the machine.",
    "scheduler": "Learning-rate schedule, stepped after each optimizer step.",
    "strategy": "How processes share the work. Axis 4 of the machine.",
    "sweep": "Sets of runs started with `-m`.",
    "tta": "Test-time augmentation of `evaluate` and `predict`.",
}


def write(page: str, lines: list[str]) -> None:
    with mkdocs_gen_files.open(page, "w") as file:
        file.write("\n".join(lines) + "\n")


def summary(text: str) -> str:
    """The comment at the top of a YAML file, on one line."""
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith("# @package"):
            continue
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("# "))
    return " ".join(lines)


def describe(group: str, level: str) -> list[str]:
    """Table of a group's choices and the files themselves, with their comments."""
    files = sorted((CONF / group).glob("*.yaml"), key=lambda path: (path.stem[0] == "_", path.stem))
    choices = [path for path in files if path.stem[0] != "_"]
    lines = [f"| `{group}=` | |", "|---|---|"]
    lines += [
        f"| `{path.stem}` | {summary(path.read_text()).replace('|', '/')} |" for path in choices
    ]
    for path in files:
        lines += ["", f"{level} {path.stem}", "", f"`conf/{group}/{path.name}`", "", "```yaml"]
        lines += [path.read_text().rstrip(), "```"]
    return lines


groups = sorted(p.name for p in CONF.iterdir() if p.is_dir() and p.name not in ("hydra", "local"))
for group in groups:
    page = [f"# {group}", "", INTRODUCTIONS.get(group, ""), "", *describe(group, "##")]
    for name in SUBGROUPS.get(group, ()):
        page += ["", f"## {group}/{name}", "", *describe(f"{group}/{name}", "###")]
    write(f"config/{group}.md", page)

index = [
    "# Configuration",
    "",
    (
        "One file for each command lists its groups, with the choices beside them. On the command "
        "line `GROUP=CHOICE` replaces a group and `KEY=VALUE` a value; `--cfg job` shows the "
        "result without running it. Precedence: command line, `experiment=`, other groups. This "
        "machine's own values go to `conf/local/default.yaml`, which git ignores."
    ),
    "",
    "Groups: " + ", ".join(f"[{group}]({group}.md)" for group in groups) + ".",
]
for path in sorted(CONF.glob("*.yaml"), key=lambda path: (path.stem != "train", path.stem)):
    index += ["", f"## {path.name}", "", "```yaml", path.read_text().rstrip(), "```"]
write("config/index.md", index)

for package in sorted(p for p in PACKAGE.iterdir() if (p / "__init__.py").exists()):
    if package.name == "benchmarks":
        continue
    page = [f"# bev_lightning.{package.name}", ""]
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
            if not re.search(r"^(def|class) ", path.read_text(), re.M):
                continue
        page += [f"::: {'.'.join(parts)}", ""]
    write(f"reference/{package.name}.md", page)
write("reference/api.md", ["# Python API", "", "::: bev_lightning.runtime.api", ""])
