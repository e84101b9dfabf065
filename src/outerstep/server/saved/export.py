"""A model folder of its own: what `outerstep export` writes, and `from_pretrained` or `load_model` reads.

with new_folder(Path("my-model"), force=False) as place:      # there whole or not at all
    write_weights(place / WEIGHTS, tensors, aliases, dtypes)
    copy_model_files(state, place)
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from ...durable.disk import sync
from ...durable.run_folder import RUN_FILE
from ...errors import ConfigError, ModelError
from ...model_folder import INDEX, STATE, WEIGHTS, write_tensors
from .folder import as_kept

CONFIG = "config.json"
_DTYPE_KEYS = ("dtype", "torch_dtype")  # as newer and older configurations have it


@contextmanager
def new_folder(target: Path, *, force: bool) -> Iterator[Path]:
    """A folder to fill under another name; when the block ends it is synced and renamed. `force`: in the place of the
    model that is there."""
    check_target(target, force=force)
    place = target.parent / f".{target.name}.{os.getpid()}.exporting"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        yield place
        for file in place.iterdir():
            sync(file)
        sync(place)
        _put(place, target)
    except OSError as error:
        shutil.rmtree(place, ignore_errors=True)
        raise ModelError(f"{target} was not written: {error}") from error
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        raise


def check_target(target: Path, *, force: bool) -> None:
    """Said before anything is fetched. What is replaced must be a model and nothing else: a folder of other things is
    not deleted, whatever it is called."""
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise ConfigError(f"{target} must be a folder, or not there yet; choose another name")
    entries = list(target.iterdir()) if target.is_dir() else []
    if not entries:
        return
    if not force:
        raise ConfigError(f"{target} is there already; choose another name, or --force to replace the model in it")
    is_model = any((target / name).is_file() for name in (WEIGHTS, INDEX))
    is_run = any((target / name).exists() for name in (RUN_FILE, STATE))
    if is_run or not is_model or any(entry.is_dir() and not entry.is_symlink() for entry in entries):
        raise ConfigError(
            f"{target} is not a model folder (weights and small files, nothing else), so --force does not replace it; "
            "choose another name, or move it away"
        )


def _put(place: Path, target: Path) -> None:
    before = target.parent / f".{target.name}.{os.getpid()}.replaced"
    if target.exists():
        os.rename(target, before)
    os.rename(place, target)
    sync(target.parent)
    shutil.rmtree(before, ignore_errors=True)


def write_weights(
    file: Path, tensors: Mapping[str, Tensor], aliases: Mapping[str, str], dtypes: Mapping[str, torch.dtype]
) -> None:
    """Each tensor once, in its dtype if one is named; under which other names they are known goes into the file."""
    made = {name: as_kept(t, dtypes[name]) if name in dtypes else t for name, t in tensors.items()}
    write_tensors(file, made, names=aliases)


def all_floats(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, torch.dtype]:
    return {name: dtype for name, tensor in tensors.items() if tensor.is_floating_point()}


def restate_dtype(place: Path, dtype: torch.dtype) -> None:
    """In the configuration, if it names one: `from_pretrained` may go by it."""
    file = place / CONFIG
    if not file.is_file():
        return
    try:
        held = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ModelError(f"the model's {CONFIG} cannot be read: {error}") from error
    named = [key for key in _DTYPE_KEYS if isinstance(held, dict) and key in held]
    if named:
        file.write_text(json.dumps({**held, **dict.fromkeys(named, str(dtype).removeprefix("torch."))}, indent=2))


def how_to_load(place: Path) -> str:
    if (place / CONFIG).is_file():
        return f"from_pretrained({str(place)!r}) loads it"
    return f"outerstep.load_model(model, {str(place)!r}) loads it"
