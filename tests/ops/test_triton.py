"""The GPU kernels without a GPU: tests of the operators again, in a process where Triton interprets
its kernels, so that the operators take them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = {
    "test_bev_pool.py": "gradients_equal or other_sizes or under_autocast",
    "test_deform_attention.py": "views_and_their_gradients or one_view or half or nothing",
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
