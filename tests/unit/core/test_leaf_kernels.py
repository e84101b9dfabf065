"""The kernels that hash leaves on a GPU make XXH3-64. Triton's interpreter runs them here; a GPU in test_cuda.py."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

PROGRAM = """
import torch
from outerstep.core.leaf_kernels import finish, leaf_accumulators
from outerstep.core.state import bytes_of
from outerstep.digest import LEAF_VALUES, leaves_of

drawn = torch.randn(3 * LEAF_VALUES, generator=torch.Generator().manual_seed(0))
odd = torch.tensor([float("nan"), -0.0, float("inf"), 1e-45]).repeat(LEAF_VALUES // 4)
for values in (drawn, odd, torch.zeros(LEAF_VALUES)):
    assert finish(leaf_accumulators(values).numpy()) == leaves_of(bytes_of(values))
print("equal")
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton comes with torch for CUDA: pip install triton")
def test_a_leafs_hash_is_that_of_the_host() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout == "equal\n", done.stderr
