"""The codecs' inner loops as machine code, where numba is installed (the extra `fast`).

The torch expressions of a codec go through a block some fifteen times, and each call holds the interpreter for
microseconds, so that few threads can encode at once. A compiled loop goes through it once and without the interpreter.
The bits are the same (docs/adr/0036-codecs-compiled-where-numba-is.md); everything works without it.

A kernel is compiled for this processor when it is first needed, which takes a second or two, and kept on disk by numba.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from . import kernels

Kernel = Callable[..., Any]

SCALED = "int64, int64, boolean"  # block, lanes, powers


class CompiledKernels:
    """kernels.py, each function by its name and compiled when it is first asked for."""

    def __init__(self, numba: Any) -> None:
        self._numba = numba
        for helper in kernels.HELPERS:
            numba.extending.register_jitable(helper)

    @cached_property
    def encode_scaled(self) -> Kernel:
        return self._compiled(kernels.encode_scaled, f"void(float32[::1], uint8[::1], {SCALED}, float32, float32)")

    @cached_property
    def decode_scaled(self) -> Kernel:
        return self._compiled(kernels.decode_scaled, f"void(uint8[::1], float32[::1], {SCALED})")

    @cached_property
    def add_scaled(self) -> Kernel:
        return self._compiled(kernels.add_scaled, f"void(uint8[::1], float32[::1], {SCALED}, float32)")

    @cached_property
    def encode_sparse(self) -> Kernel:
        return self._compiled(kernels.encode_sparse, "void(float32[::1], uint8[::1], int64)")

    @cached_property
    def add_sparse(self) -> Kernel:
        return self._compiled(kernels.add_sparse, "void(uint8[::1], float32[::1], int64, float32, boolean)")

    @cached_property
    def unordered_sparse(self) -> Kernel:
        return self._compiled(kernels.unordered_sparse, "int64(uint8[::1], int64, int64)")

    def _compiled(self, function: Kernel, signature: str) -> Kernel:
        # No fastmath: nothing is reordered or fused, so that every processor gives the same bits.
        options = {"nogil": True, "error_model": "numpy"}
        try:
            made = self._numba.njit(signature, cache=True, **options)(function)
        except RuntimeError:  # no folder can be written to: this process compiles for itself
            made = self._numba.njit(signature, **options)(function)
        return made  # type: ignore[no-any-return]


@cache
def all_kernels() -> CompiledKernels | None:
    """None: numba is not there."""
    if importlib.util.find_spec("numba") is None:
        return None
    try:
        numba = importlib.import_module("numba")
        importlib.import_module("numba.extending")
    except ImportError as error:  # it does not go with this numpy, for example
        warnings.warn(f"numba cannot be used, codecs are slower without it: {error}", RuntimeWarning, stacklevel=2)
        return None
    return None if numba.config.DISABLE_JIT else CompiledKernels(numba)


def kernels_for(*tensors: Tensor) -> CompiledKernels | None:
    """None: numba is not there, or one of these is nothing that it can work on."""
    if torch.compiler.is_compiling():
        return None
    fits = all(t.device.type == "cpu" and t.is_contiguous() for t in tensors)
    return all_kernels() if fits else None
