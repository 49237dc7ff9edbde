"""Timing and peak memory of functions."""

import time

import numpy as np

from bev_lightning.benchmarks.timing import peak_extra_mib, time_all


def test_times_are_medians_of_interleaved_calls() -> None:
    order = []

    def slow() -> None:
        order.append("slow")
        time.sleep(0.02)

    timings = time_all({"slow": slow, "fast": lambda: order.append("fast")}, repeats=3)
    assert order == ["slow", "fast"] * 4  # one call each to warm up
    assert timings["slow"].ms >= 20 > timings["fast"].ms
    assert timings["slow"].cpu_ms < 20  # sleeping takes no CPU time


def test_peak_memory_counts_freed_memory() -> None:
    extra = peak_extra_mib(lambda: np.ones(8 * 2**20).sum())
    assert extra is None or 60 < extra < 80
