"""The codecs' kernels for a GPU give the bits of the torch expressions. Triton's interpreter runs them here; a GPU in
test_cuda.py. And a kernel that gives others, or cannot be compiled, is not used."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outerstep.core.codecs import on_device
from outerstep.core.codecs.on_device import may_use

HERE = torch.device("cpu")

PROGRAM = """
import torch
from outerstep.core.codecs import E3M0, INT4, INT8, compiled, device_kernels
from outerstep.core.codecs.scaled import ScaledCodec

compiled.all_kernels = lambda: None
source = torch.Generator().manual_seed(0)
for codec in (INT8, INT4, E3M0):
    assert codec._gives_torchs_bits(device_kernels, torch.device("cpu")), codec.name
    count = codec.block_values * (35 if codec.bits == 4 else 3)
    size = codec.encoded_bytes(count)
    for magnitude in (1e-45, 1e-38, 1e-37, 1.0, 1e30, 3.4e38):
        x = (torch.rand(count, generator=source) * 2 - 1) * magnitude
        x[:300], x[300] = 0.0, -0.0
        ours, theirs = torch.empty(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
        device_kernels.encode_scaled(x, ours, *codec._shape, *codec._limits)
        codec._encode_by_torch(x, theirs)
        assert torch.equal(ours, theirs), (codec.name, magnitude)
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=source)
    mine, its = torch.empty(count), torch.empty(count)
    device_kernels.decode_scaled(data, mine, *codec._shape)
    codec._decode_by_torch(data, its)
    assert torch.equal(mine.nan_to_num(3.0), its.nan_to_num(3.0)), codec.name
    assert torch.equal(mine.isnan(), its.isnan()), codec.name
    for odd in (float("nan"), float("inf")):
        x[1] = odd
        device_kernels.encode_scaled(x, ours, *codec._shape, *codec._limits)
        device_kernels.decode_scaled(ours, mine, *codec._shape)
        assert mine[: codec.block_values].isnan().all() and mine[codec.block_values :].isfinite().all()
    honest, device_kernels.MIN_SCALE = device_kernels.MIN_SCALE, 1.0
    assert not codec._gives_torchs_bits(device_kernels, torch.device("cpu"))  # the trial finds a kernel that is wrong
    device_kernels.MIN_SCALE = honest
print("equal")
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton comes with torch for CUDA: pip install triton")
def test_the_kernels_give_the_bits_of_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout == "equal\n", done.stderr


@pytest.fixture
def trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are there, and none was tried."""
    monkeypatch.setattr(on_device, "_verdicts", {})
    monkeypatch.setattr(on_device, "all_kernels", lambda: SimpleNamespace())


def test_a_kernel_is_tried_once(trial: None) -> None:
    tried: list[torch.device] = []

    def check(kernels: Any, device: torch.device) -> bool:
        tried.append(device)
        return True

    assert may_use("int4", check, HERE)
    assert may_use("int4", check, HERE)
    assert tried == [HERE]


def test_a_kernel_that_gives_other_bits_is_not_used_and_that_is_said_once(trial: None) -> None:
    with pytest.warns(RuntimeWarning, match="int4 works by torch's operations on cpu.*: Triton's kernels give other"):
        assert not may_use("int4", lambda kernels, device: False, HERE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not may_use("int4", lambda kernels, device: True, HERE)


def test_a_compiler_that_does_not_work_stops_nobody(trial: None) -> None:
    def check(kernels: Any, device: torch.device) -> bool:
        raise RuntimeError("no C compiler")

    with pytest.warns(RuntimeWarning, match="no C compiler"):
        assert not may_use("int4", check, HERE)


def test_without_triton_torch_does_the_work_and_nothing_is_said(monkeypatch: pytest.MonkeyPatch, trial: None) -> None:
    monkeypatch.setattr(on_device, "all_kernels", lambda: None)
    assert not may_use("int4", lambda kernels, device: True, HERE)
