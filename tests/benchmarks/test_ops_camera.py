import pytest
import torch

from bev_lightning.benchmarks import ops_camera
from bev_lightning.benchmarks.ops_camera import (
    measure_attention,
    measure_bev_pool,
    measure_deform_attention,
)
from bev_lightning.benchmarks.report import Row

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _compare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Implementations whose times are compared must agree in results and gradients."""
    measure = ops_camera.measure_backward

    def check(group, functions, leaves, grad, repeats, counted) -> list[Row]:
        results = []
        for function in functions.values():
            out = function()
            results.append([out, *torch.autograd.grad(out, leaves, grad)])
        for other in results[1:] if "dropout" not in group else ():
            # A running sum over all points loses digits.
            torch.testing.assert_close(other, results[0], atol=1e-2, rtol=1e-2)
        return measure(group, functions, leaves, grad, repeats, counted)

    monkeypatch.setattr(ops_camera, "measure_backward", check)


def test_bev_pool() -> None:
    rows = measure_bev_pool(CPU, image_size=(64, 176), channels=4, cell_m=2.0, repeats=1)
    names = ["cumsum trick", "reference (index_add_)", "bev_pool", "cumsum trick", "bev_pool"]
    assert [row.name for row in rows] == names
    for row in rows:
        assert row.cpu_ms and row.more["forward_cpu_ms"] < row.cpu_ms
        assert row.more["gflop"] > 0 and row.more["least_mib"] > 0


def test_deform_attention() -> None:
    rows = measure_deform_attention(CPU, sides=(12,), repeats=1)
    assert len(rows) == 6
    assert rows[0].name == "grid_sample as published"
    assert rows[3].group.endswith("12 x 12 queries to 6 images")
    assert rows[3].name == "grid_sample of the visible queries"


def test_attention() -> None:
    rows = measure_attention(CPU, queries=(9, 3), cells=16, repeats=1)
    assert [row.name for row in rows] == ["reference (scaled_dot_product)", "attention"] * 2
    assert rows[2].group == "attention with dropout, 3 queries to 16"


def test_visible_queries_of_each_view() -> None:
    rows = ops_camera.find_visible_queries(
        torch.tensor([[[False, True, True], [False, False, True]]])
    )
    assert rows.tolist() == [[1, 2], [2, 0]]
