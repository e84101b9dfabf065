"""A model on disk: `model.safetensors`, or shards with their `model.safetensors.index.json` (the Hugging Face layout).

Nothing is unpickled: a folder from a stranger can hold wrong numbers, but no code.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from .errors import ModelError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def save_model(model: nn.Module, folder: str | os.PathLike[str]) -> Path:
    """Write `model`'s state as `folder/model.safetensors`; tied tensors once, under their first name. Atomic."""
    return save_state_dict(model.state_dict(), folder)


def save_state_dict(state: dict[str, Tensor], folder: str | os.PathLike[str]) -> Path:
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    kept: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first_name: dict[tuple[object, ...], str] = {}
    taken: set[int] = set()
    for name, tensor in state.items():
        storage = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        if tensor.numel() and storage in first_name:
            tied[name] = first_name[storage]
            continue
        first_name[storage] = name
        kept[name] = _standing_alone(tensor, taken)
    temporary = place / f".{WEIGHTS}.{os.getpid()}.tmp"
    save_file(kept, temporary, metadata={"format": "pt", **tied})
    target = place / WEIGHTS
    os.replace(temporary, target)
    return target


def load_state_dict(folder: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The tensors of a model folder, or of one `.safetensors` file."""
    place = Path(folder)
    if place.is_file() and place.suffix == ".safetensors":
        return _load(place)
    if not place.is_dir():
        raise ModelError(f"no model at {place}: it must be a folder with {WEIGHTS}; outerstep.save_model writes one")
    if (place / WEIGHTS).is_file():
        return _load(place / WEIGHTS)
    if (place / INDEX).is_file():
        return _load_shards(place)
    raise ModelError(f"{place} has neither {WEIGHTS} nor {INDEX}; outerstep.save_model writes the first")


def load_model(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Put the saved state into `model`, tied names included; missing or unknown names are an error."""
    state = load_state_dict(folder)
    own = model.state_dict()
    by_storage = {own[name].untyped_storage().data_ptr(): name for name in state if name in own}
    missing = [n for n, t in own.items() if n not in state and t.untyped_storage().data_ptr() not in by_storage]
    unknown = [n for n in state if n not in own]
    if missing or unknown:
        raise ModelError(f"{folder} is another model's: missing {missing[:3]}, unknown {unknown[:3]}")
    for name, tensor in state.items():
        if own[name].shape != tensor.shape:
            raise ModelError(f"{name!r}: the folder has {list(tensor.shape)}, the model {list(own[name].shape)}")
        if own[name].is_meta:
            raise ModelError(f"{name!r} is on the meta device: give the model real memory first (to_empty)")
    with torch.no_grad():
        for name, tensor in state.items():
            own[name].copy_(tensor)


def _standing_alone(tensor: Tensor, taken: set[int]) -> Tensor:
    """In host memory that it shares with nobody: safetensors refuses several views into one storage."""
    tensor = tensor.detach().cpu().contiguous()
    storage = tensor.untyped_storage()
    if storage.nbytes() != tensor.numel() * tensor.element_size() or storage.data_ptr() in taken:
        return tensor.clone()
    taken.add(storage.data_ptr())
    return tensor


def _load(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} cannot be read as safetensors: {error}") from error


def _load_shards(place: Path) -> dict[str, Tensor]:
    try:
        weight_map = json.loads((place / INDEX).read_text())["weight_map"]
        shards = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{place / INDEX} is not an index of shards: {error!r}") from error
    state: dict[str, Tensor] = {}
    for shard in shards:
        name = str(shard)
        if Path(name).name != name or name in ("", "..") or "\0" in name or len(name.encode(errors="replace")) > 255:
            raise ModelError(f"{place / INDEX} points outside its folder: {name[:80]!r}")
        file = place / name
        if not file.is_file():
            raise ModelError(f"{place / INDEX} names {shard!r}, which is missing")
        state.update(_load(file))
    absent = [name for name in weight_map if name not in state]
    if absent:
        raise ModelError(f"{place / INDEX} names tensors that no shard holds: {absent[:3]}")
    return state
