"""Draws data_flow.svg and architecture.svg: python docs/figures/make_figures.py"""

from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.patches import FancyBboxPatch

FOLDER = Path(__file__).parent
DATA, MODEL, OUT, INK = "#d8e8f8", "#fde6c8", "#d9f0dc", "#1f2733"
plt.rcParams.update({"svg.hashsalt": "0", "svg.fonttype": "path", "font.size": 11})


def box(axes, x, y, width, title, text, colour, height=1.0):
    axes.add_patch(
        FancyBboxPatch(
            (x, y), width, height, boxstyle="round,pad=0.02,rounding_size=0.12", fc=colour, ec=INK
        )
    )
    middle = x + width / 2
    axes.text(middle, y + height * 0.66, title, ha="center", va="center", weight="bold", color=INK)
    axes.text(middle, y + height * 0.3, text, ha="center", va="center", fontsize=8.5, color=INK)


def arrow(axes, start, end):
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": INK, "lw": 1.4})


def figure(width, height):
    drawing, axes = plt.subplots(figsize=(width, height))
    axes.set_xlim(0, width)
    axes.set_ylim(0, height)
    axes.axis("off")
    drawing.subplots_adjust(0, 0, 1, 1)
    drawing.patch.set_facecolor("white")
    return drawing, axes


def save(drawing, name):
    drawing.savefig(FOLDER / f"{name}.svg", metadata={"Date": None})
    plt.close(drawing)


def data_flow():
    drawing, axes = figure(11, 1.6)
    parts = [
        ("nuScenes", "tables, JPEG,\nlidar, radar", DATA),
        ("Index", "one Arrow file,\nmemory-mapped", DATA),
        ("Loader", "decode, undistort,\naugment", DATA),
        ("Batch", "typed tensors\n(B, ...)", DATA),
        ("Network", "BEV features\n(B, C, Y, X)", MODEL),
        ("Boxes", "losses, or\ndecoded boxes", MODEL),
        ("Results", "submission,\nscore, pictures", OUT),
    ]
    width, gap = 1.36, 0.2
    for i, (title, text, colour) in enumerate(parts):
        x = 0.12 + i * (width + gap)
        box(axes, x, 0.3, width, title, text, colour)
        if i:
            arrow(axes, (x - gap, 0.8), (x, 0.8))
    save(drawing, "data_flow")


def architecture():
    drawing, axes = figure(9, 5.9)
    layers = [
        ("train  evaluate  predict  prepare  plan  bench  convert", "commands", OUT),
        ("runtime", "builds data, module and trainer; Python API; memory forecast", OUT),
        (
            "config  |  parallel",
            "compose, check, resolve  |  fsdp, deepspeed, pipeline, hybrid",
            OUT,
        ),
        (
            "modules  |  checkpointing",
            "the training step, optimizer, TTA  |  weights, published formats",
            MODEL,
        ),
        (
            "data  |  models  |  losses  |  metrics  |  callbacks",
            "what a training is made of",
            MODEL,
        ),
        (
            "hardware  |  structures  |  ops",
            "machine, precision  |  Batch, Boxes3D  |  CPU and GPU kernels",
            DATA,
        ),
    ]
    for i, (title, text, colour) in enumerate(layers):
        y = 5.0 - i * 0.95
        box(axes, 0.3, y, 8.4, title, text, colour, 0.72)
        if i:
            arrow(axes, (4.5, y + 0.95), (4.5, y + 0.74))
    save(drawing, "architecture")


if __name__ == "__main__":
    data_flow()
    architecture()
