"""A worker's state in one file, replaced atomically: plain values as JSON, tensors as safetensors."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as read_tensors
from safetensors.torch import save, save_file
from torch import Tensor

from ..durable.disk import sync
from ..errors import ModelError

TENSOR = "tensor"
PLAIN = "plain"  # the name of the plain values among packed tensors
FORMAT = "outerstep cluster 1"


def write_state(file: Path, state: Mapping[str, Any]) -> None:
    """Durable when this returns. Raises OSError if it cannot be written."""
    described, tensors = _apart_from_plain(state)
    unfinished = file.with_name(f".{file.name}.unfinished")
    os.close(os.open(unfinished, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600))  # it contains the session's secret
    try:
        save_file(tensors, unfinished, metadata={"format": FORMAT, "state": described})
    except SafetensorError as error:
        raise OSError(f"{unfinished}: {error}") from error
    sync(unfinished)
    os.replace(unfinished, file)
    sync(file.parent)


def pack(state: Mapping[str, Any]) -> bytes:
    """The same state as bytes."""
    described, tensors = _apart_from_plain(state)
    plain = torch.frombuffer(bytearray(described.encode()), dtype=torch.uint8)
    return save({**tensors, PLAIN: plain}, {"format": FORMAT})


def _apart_from_plain(state: Mapping[str, Any]) -> tuple[str, dict[str, Tensor]]:
    """The plain values as JSON, and the tensors that it names."""
    tensors: dict[str, Tensor] = {}

    def plain(value: Any) -> Any:
        if isinstance(value, Tensor):
            name = str(len(tensors))
            tensors[name] = value.detach().cpu().contiguous()
            return {TENSOR: name}
        if isinstance(value, Mapping):
            return {str(key): plain(one) for key, one in value.items()}
        return [plain(one) for one in value] if isinstance(value, list | tuple) else value

    return json.dumps(plain(state)), _apart(tensors)


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of tensors that share memory, which safetensors refuses."""
    seen: set[int] = set()
    made = {}
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        made[name] = (
            tensor.clone()
            if place in seen or tensor.numel() * tensor.element_size() < len(tensor.untyped_storage())
            else tensor
        )
        seen.add(place)
    return made


def read_state(file: Path) -> dict[str, Any] | None:
    """None: there is none."""
    if not file.exists():
        return None
    try:
        with safe_open(file, framework="pt") as opened:
            facts = opened.metadata() or {}
            if facts.get("format") != FORMAT:
                raise ModelError(f"{file} must have format {FORMAT!r}, got {facts.get('format')!r}")
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no mapping
        return _whole(facts["state"], tensors)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"{file} is not the state of a cluster: {error}; move it away to let the cluster join as a new one"
        ) from error


def unpack(data: bytes, what: str) -> dict[str, Any]:
    """The state that `pack` packed. `what` names it in errors."""
    try:
        tensors = read_tensors(data)
        return _whole(tensors.pop(PLAIN).numpy().tobytes().decode(), tensors)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{what} cannot be read: {error}") from error


def _whole(described: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    def whole(value: Any) -> Any:
        if isinstance(value, dict):
            if value.keys() == {TENSOR}:
                return tensors[value[TENSOR]]
            return {key: whole(one) for key, one in value.items()}
        return [whole(one) for one in value] if isinstance(value, list) else value

    state = whole(json.loads(described))
    if not isinstance(state, dict):
        raise TypeError(f"it must be a table, got {type(state).__name__}")
    return state
