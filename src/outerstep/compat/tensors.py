"""Named tensors to and from `torch.save` bytes, checked against the run's model."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.linalg import vector_norm

from ..errors import BadTensors, NotFinite
from ..types import Manifest
from .archive import Described, describe

SHOWN = 3
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Expected:
    """What a submission must bring (name → shape), and what it may bring besides, to be ignored: other names of those
    tensors, and entries of the state dict that nobody trains."""

    needed: Mapping[str, tuple[int, ...]]
    ignored: frozenset[str]
    what: str  # "the run's model" or "fragment 2"


def expect(manifest: Manifest, names: Sequence[str], state_names: Sequence[str], what: str) -> Expected:
    """For the fragment (or the whole model) that consists of `names`."""
    shapes = {spec.name: spec.shape for spec in manifest.parameters}
    trained = shapes.keys() | manifest.aliases.keys()
    here = set(names)
    aliases = {alias for alias, kept in manifest.aliases.items() if kept in here}
    untrained = {name for name in state_names if name not in trained}
    return Expected({name: shapes[name] for name in names}, frozenset(aliases | untrained), what)


def read_tensors(data: memoryview, expected: Expected, *, max_tensors: int) -> dict[str, Tensor]:
    """The needed tensors, as windows on `data`: nothing is copied."""
    described = describe(data, max_tensors=max_tensors)
    _check(described, expected)
    tensors = {name: _window(data, described[name]) for name in expected.needed}
    for name, tensor in tensors.items():
        # The server looks too. But a submission of several fragments must not be taken in part.
        if tensor.numel() and not math.isfinite(float(vector_norm(tensor, ord=math.inf))):
            raise NotFinite(
                f"tensor {name!r} holds NaN or Inf",
                hint="the contribution was not applied; lower the learning rate, or reload the model",
            )
    return tensors


def write_tensors(tensors: Mapping[str, Tensor]) -> memoryview:
    """`torch.save` of a plain dict."""
    sink = io.BytesIO()
    torch.save(dict(tensors), sink)
    return sink.getbuffer()


def _check(described: Mapping[str, Described], expected: Expected) -> None:
    needed = expected.needed
    wrong = [f"{name!r} is missing" for name in needed if name not in described]
    for name, found in described.items():
        if name not in needed:
            if name not in expected.ignored:
                wrong.append(f"{name[:128]!r} is not in {expected.what}")
        elif found.shape != needed[name]:
            wrong.append(f"{name!r}: got {list(found.shape)}, run has {list(needed[name])}")
        elif found.dtype not in DTYPES:
            wrong.append(f"{name!r}: got {found.dtype}, taken are {', '.join(DTYPES)}")
    if wrong:
        more = f"; and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        raise BadTensors(
            f"these are not the pseudo-gradients of {expected.what}: {'; '.join(wrong[:SHOWN])}{more}",
            hint="send one for every floating-point tensor of it that is trained (zeros where nothing changed); if the "
            "client cuts the model into fragments, start the server with --fragment-strategy counted",
        )


def _window(data: memoryview, at: Described) -> Tensor:
    dtype = getattr(torch, at.dtype)
    if 0 in at.shape:
        return torch.empty(at.shape, dtype=dtype)
    whole = torch.frombuffer(data, dtype=dtype, count=at.values, offset=at.begin)
    return whole.as_strided(at.shape, at.stride, at.offset)
