"""The codecs' inner loops on a GPU, where Triton is (device_kernels.py): which of them may be used.

Triton comes with torch for CUDA, but it needs a C compiler, and its kernels are compiled for the GPU at hand. So each
is tried once per device on a small input, and compared with the torch expressions there. One that cannot be compiled or
that gives other bits is not used, and that is said once; torch does the work instead, some ten times slower
(docs/adr/0048-a-workers-gpu-path.md). A codec asks by itself. A worker asks when it joins, which spares the training
the seconds of the compiler.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

Check = Callable[[ModuleType, torch.device], bool]
"""Do the kernels give the bits of torch there?"""

_verdicts: dict[tuple[str, torch.device], bool] = {}


@cache
def all_kernels() -> Any:
    """None: Triton is not there."""
    if find_spec("triton") is None:
        return None
    from . import device_kernels

    return device_kernels


def kernels_on(name: str, check: Check, *tensors: Tensor) -> Any:
    """Those for the codec of this name; None: torch must do it."""
    device = tensors[0].device
    if device.type != "cuda" or torch.compiler.is_compiling():
        return None
    if not all(t.device == device and t.is_contiguous() for t in tensors):
        return None
    return all_kernels() if may_use(name, check, device) else None


def may_use(name: str, check: Check, device: torch.device) -> bool:
    """What came of the trial, which is made now if nobody has asked before."""
    key = name, device
    if key not in _verdicts:
        _verdicts[key] = _try(name, check, device)
    return _verdicts[key]


def _try(name: str, check: Check, device: torch.device) -> bool:
    kernels = all_kernels()
    if kernels is None:
        return False
    try:
        wrong = "" if check(kernels, device) else "Triton's kernels give other bits there"
    except Exception as error:  # noqa: BLE001 - a compiler that does not work here must not stop a training
        wrong = str(error) or type(error).__name__
    if wrong:
        slowly = f"codec {name} works by torch's operations on {device}, which is slower: {wrong}"
        warnings.warn(slowly, RuntimeWarning, stacklevel=2)
    return not wrong
