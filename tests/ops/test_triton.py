"""The GPU kernels without a GPU: tests of the operators again, in a process where Triton interprets
its kernels, so that the operators take them."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = {
    "test_bev_pool.py": "gradients_equal or other_sizes or under_autocast",
    "test_deform_attention.py": "views_and_their_gradients or one_view or half or nothing",
    # The interpreter multiplies bfloat16 matrices wrongly.
    "test_sparse_conv.py": "other_sizes or summed_in_float32 and not bfloat16",
}


@pytest.mark.parametrize("file", sorted(TESTS))
def test_interpreted_kernels_equal_the_reference(file: str) -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", TESTS[file]]
    done = subprocess.run(
        [*command, str(Path(__file__).parent / file)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


# Types of the pointers; all other arguments are int32.
VALUES = {"locations": "*fp32", "weights": "*fp32", "anchors": "*fp32", "seen": "*u8"}
INDEX = {"depth": "*fp32", "points": "*i32", "pixels": "*i32", "starts": "*i32", "cells": "*i32"}
SOURCES = {
    ("bev_pool", "_sum_points"): INDEX | {"rows": "*bf16", "out": "*bf16"},
    ("bev_pool", "_backward"): INDEX
    | {"rows": "*bf16", "grad": "*bf16", "grad_depth": "*fp32", "grad_rows": "*bf16"},
    ("deform_attention", "_attend"): VALUES | {"value": "*bf16", "out": "*fp32"},
    ("deform_attention", "_attend_backward"): VALUES
    | {"value": "*bf16", "grad": "*bf16"}
    | {f"grad_{name}": "*fp32" for name in ("value", "locations", "weights")},
}


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source[1])
def test_kernels_compile_for_a_gpu(source: tuple[str, str], monkeypatch, tmp_path: Path) -> None:
    triton = pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(f"bev_lightning.ops.{source[0]}.triton"), source[1])
    sizes = {"POINTS": 16, "QUERIES": 32, "CHANNELS": 32, "ACCUMULATE": triton.language.float32}
    types = SOURCES[source]
    signature = {
        name: "constexpr" if name in sizes else types.get(name, "i32") for name in kernel.arg_names
    }
    constants = {(i,): sizes[name] for i, name in enumerate(kernel.arg_names) if name in sizes}
    target = GPUTarget("cuda", 86, 32)  # an RTX 3090
    compiled = triton.compile(ASTSource(kernel, signature, constants), target=target)
    assert ".target sm_86" in compiled.asm["ptx"] and compiled.asm["cubin"]
