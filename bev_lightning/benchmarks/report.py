"""Writes the rows of a benchmark to bench.json, bench.md and bench.png."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bev_lightning.config.run_directory import write_json


@dataclass(frozen=True)
class Row:
    """One row of a benchmark.

    Attributes:
        name: the variant measured.
        group: rows of a group are compared with its first row, the baseline.
        ms: wall time of a call, batch or step [ms].
        cpu_ms: CPU time of a call, batch or step [ms].
        samples_per_s: throughput, if samples are counted.
        peak_mib: peak memory [MiB].
        ratio: baseline / this by CPU time, otherwise by wall time: above 1 is better.
        more: further columns, named with their unit.
    """

    name: str
    group: str = ""
    ms: float | None = None
    cpu_ms: float | None = None
    samples_per_s: float | None = None
    peak_mib: float | None = None
    ratio: float | None = None
    more: dict[str, float | str | None] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        content = {name: value for name, value in vars(self).items() if name != "more"}
        return {
            name: float(f"{value:.4g}") if isinstance(value, float) else value
            for name, value in (content | self.more).items()
        }


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """The rows with their ratio to the first row of their group."""
    first: dict[str, Row] = {}
    result = []
    for row in rows:
        baseline = first.setdefault(row.group, row)
        key = "cpu_ms" if baseline.cpu_ms is not None and row.cpu_ms is not None else "ms"
        was, now = getattr(baseline, key), getattr(row, key)
        result.append(replace(row, ratio=was / now if was and now else None))
    return result


def write_report(
    folder: Path, bench: str, machine: dict[str, Any], rows: Sequence[Row], notes: Sequence[str]
) -> str:
    """Write the three files.

    Returns:
        The content of bench.md.
    """
    content = {
        "bench": bench,
        "machine": machine,
        "rows": [row.to_json() for row in rows],
        "notes": list(notes),
    }
    write_json(folder / "bench.json", content)
    text = "\n".join([_to_markdown(rows), *(f"\n{note}" for note in notes)]) + "\n"
    (folder / "bench.md").write_text(text)
    _draw(folder / "bench.png", bench, rows)
    return text


def _to_markdown(rows: Sequence[Row]) -> str:
    cells = [row.to_json() for row in rows]
    columns = [
        name
        for name in dict.fromkeys(name for row in cells for name in row)
        if any(row.get(name) not in (None, "") for row in cells)
    ]
    lines = [columns, ["---"] * len(columns)]
    for row in cells:
        values = ["" if row.get(name) is None else row[name] for name in columns]
        lines.append([f"{v:.4g}" if isinstance(v, float) else str(v) for v in values])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _draw(path: Path, bench: str, rows: Sequence[Row]) -> None:
    """Draw a bar chart of the ratios, or of the times if nothing is compared."""
    # Imported late, because it takes a second. matplotlib.pyplot would look for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    compared = any(row.ratio is not None and row.ratio != 1 for row in rows)
    values = [(row.ratio if compared else row.ms) or 0.0 for row in rows]
    labels = [f"{row.group}: {row.name}" if row.group else row.name for row in rows]
    figure = Figure(figsize=(9, 1.2 + 0.28 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    bars = axes.barh(labels, values, color=["#9aa5b1" if v == 1 else "#2f6fb0" for v in values])
    axes.bar_label(bars, [f"{value:.3g}" if value else "" for value in values], padding=3)
    axes.invert_yaxis()
    if compared:
        axes.axvline(1.0, color="black", linewidth=0.8)
        positive = [value for value in values if value > 0]
        if max(positive) > 20 * statistics.median(positive):
            axes.set_xscale("log")
    axes.set_xlabel("times faster than the baseline" if compared else "ms")
    axes.set_title(f"bench={bench}")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
