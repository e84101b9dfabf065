"""A model on disk: `model.safetensors`, or shards with their `model.safetensors.index.json` (the Hugging Face layout).

Only safetensors are written. `pytorch_model.bin` is read if there are none, and only its tensors (torch_file.py): a
folder from a stranger can hold wrong numbers, but cannot run code.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from .digest import file_hash
from .errors import ModelError
from .torch_file import is_plain, read_torch_file

log = logging.getLogger(__name__)

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
BIN_WEIGHTS = "pytorch_model.bin"
BIN_INDEX = "pytorch_model.bin.index.json"
STATE = "state.json"
"""Lies beside the model in a server's saved state (server/saved); it holds, among other things, the files' hashes."""
STATE_FORMAT = "outerstep-state"

_NUMBERED = re.compile(r"(?:checkpoint|state-round)-(\d{1,18})(?:-(\d{1,18}))?\Z")


def save_model(model: nn.Module, folder: str | os.PathLike[str]) -> Path:
    """Write `model`'s state as `folder/model.safetensors`; tied tensors once, under their first name. Atomic."""
    return save_state_dict(model.state_dict(), folder)


def save_state_dict(state: Mapping[str, Tensor], folder: str | os.PathLike[str]) -> Path:
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    kept, tied = without_ties(state)
    temporary = place / f".{WEIGHTS}.{os.getpid()}.tmp"
    write_tensors(temporary, kept, names=tied)
    target = place / WEIGHTS
    os.replace(temporary, target)
    return target


def without_ties(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Every tensor once, in its own host memory; and a map from each other name of a tensor to the kept name."""
    kept: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first_name: dict[tuple[object, ...], str] = {}
    taken: set[int] = set()
    for name, tensor in state.items():
        storage = (
            tensor.untyped_storage().data_ptr(),
            tensor.storage_offset(),
            tuple(tensor.shape),
            tensor.stride(),
            tensor.dtype,
        )
        if tensor.numel() and storage in first_name:
            tied[name] = first_name[storage]
            continue
        first_name[storage] = name
        kept[name] = _standing_alone(tensor, taken)
    return kept, tied


def write_tensors(file: Path, tensors: Mapping[str, Tensor], *, names: Mapping[str, str] | None = None) -> None:
    """One safetensors file; `names` (other name → the one it is kept under) goes into its metadata."""
    if "__metadata__" in tensors:
        raise ModelError(
            "a tensor named '__metadata__' cannot be written as safetensors, which reserves that name; rename it"
        )
    file.touch()
    mode = file.stat().st_mode  # the umask's; safetensors creates files that only their owner can read
    try:
        save_file(dict(tensors), file, metadata={**(names or {}), "format": "pt"})
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise ModelError(f"{file.name} cannot be written as safetensors: {type(error).__name__}: {error}") from error
    file.chmod(mode)


def read_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of one safetensors file."""
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} cannot be read as safetensors: {error}") from error


def load_state_dict(folder: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The tensors of a model folder, or of one `.safetensors` file; tied ones under each name that the file has for
    them, all of which are one tensor."""
    place = Path(folder)
    state, file = _load_kept(place), place if place.is_file() else place / WEIGHTS
    for other, kept in _other_names(file) if file.is_file() else ():
        if kept in state and other not in state:
            state[other] = state[kept]
    return state


def _other_names(file: Path) -> list[tuple[str, str]]:
    """Of its tensors, as `write_tensors` and `safetensors.torch.save_model` note them: other name → kept name."""
    try:
        with safe_open(file, framework="pt") as opened:
            return list((opened.metadata() or {}).items())
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} cannot be read as safetensors: {error}") from error


def _load_kept(place: Path) -> dict[str, Tensor]:
    """Each tensor under the name that it is kept under."""
    if place.is_file() and place.suffix == ".safetensors":
        return read_tensors(place)
    if not place.is_dir():
        raise ModelError(f"no model at {place}: it must be a folder with {WEIGHTS}; outerstep.save_model writes one")
    for name in (WEIGHTS, INDEX, BIN_WEIGHTS, BIN_INDEX):
        if (place / name).is_file():
            return _load_shards(place, name) if name in (INDEX, BIN_INDEX) else _load(place / name)
    raise ModelError(
        f"{place} has neither {WEIGHTS} nor {INDEX} (nor {BIN_WEIGHTS}); outerstep.save_model writes the first"
    )


def load_checkpoint(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], Path]:
    """The model of a training checkpoint, and the folder it was found in.

    `path` is a folder with the weights in it or in its `model` folder; or a folder of `checkpoint-N` folders, or of a
    server's saved states: then the newest readable one is used, and the log says which.
    """
    place = Path(path)
    if not place.is_dir():
        raise ModelError(f"no checkpoint at {place}: it must be a folder with {WEIGHTS}, or with checkpoint-N folders")
    found = _folder_of_weights(place)
    if found is not None:
        return _load_checked(found), found
    problems: list[str] = []
    for candidate in _numbered(place):
        try:
            found = _folder_of_weights(candidate)
            if found is None:
                raise ModelError(f"{candidate} holds no weights")
            state = _load_checked(found)
        except ModelError as error:
            log.warning("checkpoint %s is skipped: %s", candidate.name, error)
            problems.append(str(error))
            continue
        log.info("using checkpoint %s", found)
        return state, found
    if problems:
        raise ModelError(f"no checkpoint in {place} can be read: {'; '.join(problems)}")
    there = ", ".join(sorted(entry.name for entry in place.iterdir())[:5]) or "nothing"
    raise ModelError(
        f"{place} is not a checkpoint: it must hold {WEIGHTS}, {BIN_WEIGHTS} or checkpoint-N folders with one of them; "
        f"it holds {there}"
    )


def load_model(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Load the saved state into `model`, tied names included; missing or unknown names are an error."""
    state = _load_kept(Path(folder))
    own = model.state_dict()
    by_storage = {own[name].untyped_storage().data_ptr(): name for name in state if name in own}
    missing = [n for n, t in own.items() if n not in state and t.untyped_storage().data_ptr() not in by_storage]
    unknown = [n for n in state if n not in own]
    if missing or unknown:
        raise ModelError(f"{folder} holds another model: missing {missing[:3]}, unknown {unknown[:3]}")
    for name, tensor in state.items():
        if own[name].shape != tensor.shape:
            raise ModelError(f"{name!r}: the folder has {list(tensor.shape)}, the model {list(own[name].shape)}")
        if own[name].is_meta:
            raise ModelError(f"{name!r} is on the meta device: give the model real memory first (to_empty)")
    with torch.no_grad():
        for name, tensor in state.items():
            own[name].copy_(tensor)


def _standing_alone(tensor: Tensor, taken: set[int]) -> Tensor:
    """The tensor in host memory that no other tensor shares: safetensors refuses several views of one storage."""
    tensor = tensor.detach().cpu().contiguous()
    storage = tensor.untyped_storage()
    if storage.nbytes() != tensor.numel() * tensor.element_size() or storage.data_ptr() in taken:
        return tensor.clone()
    taken.add(storage.data_ptr())
    return tensor


def _load(file: Path) -> dict[str, Tensor]:
    """One file of weights, of either kind."""
    if file.suffix != ".bin":
        return read_tensors(file)
    held = read_torch_file(file, mmap=True)
    if not isinstance(held, dict):
        raise ModelError(f"{file} must map names to tensors, got a {type(held).__name__}; save only the state dict")
    for name, tensor in held.items():
        if not isinstance(name, str) or not is_plain(tensor, file):
            kind = type(tensor).__name__
            raise ModelError(f"{file} must map names to dense tensors, got a {kind} at {name!r}"[:400])
    return {name: tensor.detach() for name, tensor in held.items()}


def _load_shards(place: Path, index: str) -> dict[str, Tensor]:
    try:
        weight_map = json.loads((place / index).read_text())["weight_map"]
        shards = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{place / index} is not an index of shards: {error!r}") from error
    state: dict[str, Tensor] = {}
    for shard in shards:
        name = str(shard)
        if Path(name).name != name or name in ("", "..") or "\0" in name or len(name.encode(errors="replace")) > 255:
            raise ModelError(f"{place / index} points outside its folder: {name[:80]!r}")
        file = place / name
        if not file.is_file():
            raise ModelError(f"{place / index} names {shard!r}, which is missing")
        if index == INDEX and file.suffix == ".bin":
            raise ModelError(f"{place / index} names {shard!r}: an index of safetensors must not lead to a pickle")
        state.update(_load(file))
    absent = [name for name in weight_map if name not in state]
    if absent:
        raise ModelError(f"{place / index} names tensors that no shard holds: {absent[:3]}")
    return state


def _folder_of_weights(place: Path) -> Path | None:
    """The folder itself, or its `model` folder."""
    for folder in (place, place / "model"):
        if any((folder / name).is_file() for name in (WEIGHTS, INDEX, BIN_WEIGHTS, BIN_INDEX)):
            return folder
    return None


def _numbered(place: Path) -> Iterator[Path]:
    """The checkpoints in a folder, newest first: where `latest` points, then by number."""
    latest = place / "latest"
    found: dict[Path, tuple[int, int]] = {}
    for entry in place.iterdir():
        match = _NUMBERED.match(entry.name)
        if match and entry.is_dir():
            found[entry] = (int(match[1]), int(match[2] or 0))
    first = place / os.readlink(latest) if latest.is_symlink() else None
    if first in found:
        yield first
    yield from sorted(found.keys() - {first}, key=found.__getitem__, reverse=True)


def _load_checked(place: Path) -> dict[str, Tensor]:
    """The weights of one folder; if a server saved them, only if their hash is the one it wrote."""
    if (place / STATE).is_file() and (place / WEIGHTS).is_file():
        try:
            saved = json.loads((place / STATE).read_bytes())
            ours = isinstance(saved, dict) and saved.get("format") == STATE_FORMAT
            expected = saved["state"]["files"][WEIGHTS]["hash"] if ours else None
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ModelError(f"{place / STATE} is damaged: {error!r}") from error
        if ours and file_hash(place / WEIGHTS) != expected:
            raise ModelError(f"{place / WEIGHTS} is damaged: its hash is not the one in {STATE}")
    return load_state_dict(place)
