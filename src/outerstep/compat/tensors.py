"""Named tensors to and from `torch.save` bytes, checked against the run's model."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.linalg import vector_norm

from ..errors import BadTensors, NotFinite
from ..types import Manifest
from .archive import Described

SHOWN = 3
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Expected:
    """What a submission must bring (name → shape); `buffers` that it may leave alone; and what it may bring besides, to
    be ignored: other names of those tensors, and entries of the state dict that nobody trains."""

    needed: Mapping[str, tuple[int, ...]]
    ignored: frozenset[str]
    what: str  # "the run's model" or "fragment 2"
    buffers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def expect(manifest: Manifest, names: Sequence[str], state_names: Sequence[str], what: str) -> Expected:
    """For the fragment (or the whole model) that consists of `names`."""
    specs = {spec.name: spec for spec in manifest.parameters}
    trained = specs.keys() | manifest.aliases.keys()
    here = set(names)
    aliases = {alias for alias, kept in manifest.aliases.items() if kept in here}
    untrained = {name for name in state_names if name not in trained}
    needed = {name: specs[name].shape for name in names if specs[name].role == "parameter"}
    buffers = {name: specs[name].shape for name in names if name not in needed}
    return Expected(needed, frozenset(aliases | untrained), what, buffers)


def read_tensors(data: memoryview, described: Mapping[str, Described], expected: Expected) -> dict[str, Tensor]:
    """The needed tensors, as windows on `data`: nothing is copied. A buffer that is not there has not moved."""
    _check(described, expected)
    sent = [name for name in (*expected.needed, *expected.buffers) if name in described]
    tensors = {name: _window(data, described[name]) for name in sent}
    for name, tensor in tensors.items():
        # The server looks too. But a submission of several fragments must not be taken in part.
        if tensor.numel() and not math.isfinite(float(vector_norm(tensor, ord=math.inf))):
            raise NotFinite(
                f"tensor {name!r} holds NaN or Inf",
                hint="the contribution was not applied; lower the learning rate, or reload the model",
            )
    return {**{name: torch.zeros(shape) for name, shape in expected.buffers.items()}, **tensors}


def write_tensors(tensors: Mapping[str, Tensor]) -> memoryview:
    """`torch.save` of a plain dict."""
    sink = io.BytesIO()
    torch.save(dict(tensors), sink)
    return sink.getbuffer()


def _check(described: Mapping[str, Described], expected: Expected) -> None:
    shapes = {**expected.needed, **expected.buffers}
    wrong = [f"{name!r} is missing" for name in expected.needed if name not in described]
    for name, found in described.items():
        if name not in shapes:
            if name not in expected.ignored:
                wrong.append(f"{name[:128]!r} is not in {expected.what}")
        elif found.shape != shapes[name]:
            wrong.append(f"{name!r}: got {list(found.shape)}, run has {list(shapes[name])}")
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
