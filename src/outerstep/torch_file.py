"""A file that `torch.save` wrote, read without running anything that is in it.

Such a file is a pickle. It is read in one place, here, and only for models and states that other programs wrote;
outerstep itself writes safetensors. `weights_only=True` builds tensors and plain values and refuses everything else;
the checks around it keep a small file from expanding in memory.
"""

from __future__ import annotations

import logging
import math
import os
import zipfile
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint

from .errors import ModelError

log = logging.getLogger(__name__)


def read_torch_file(file: Path, *, mmap: bool = False) -> Any:
    """What the file holds, tensors in host memory; `mmap` leaves them in the file until they are read."""
    is_zip = _check_size(file)
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap and is_zip)
    except UnpicklingError as error:
        raise ModelError(_needs_code(file, is_zip)) from error
    except Exception as error:  # a file from a stranger can make the parser fail in any way
        raise ModelError(f"{file} cannot be read as a file of torch.save: {_first_line(error)}") from error


def is_plain(tensor: object, file: Path) -> bool:
    """Whether the tensor's values really are in the file: dense, and no larger than the file (with a stride of 0 a few
    bytes look like any number of them)."""
    return (
        isinstance(tensor, Tensor)
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_meta
        and math.prod(tensor.shape) * tensor.element_size() <= file.stat().st_size
    )


def _check_size(file: Path) -> bool:
    """Refuse a file that would not fit, before reading it. Returns whether it is a zip, as torch writes since 1.6."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    unpacked = 0
    try:
        size = file.stat().st_size
        is_zip = zipfile.is_zipfile(file)
        if is_zip:
            with zipfile.ZipFile(file) as archive:
                unpacked = sum(entry.file_size for entry in archive.infolist())
    except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise ModelError(f"{file} cannot be read as a file of torch.save: {_first_line(error)}") from error
    if size > memory:
        raise ModelError(f"{file} has {size} bytes, more than this machine's memory ({memory})")
    if unpacked > size:  # torch.save stores without compressing
        raise ModelError(f"{file} has {size} bytes but claims {unpacked} when unpacked: torch.save never does that")
    return is_zip


def _needs_code(file: Path, is_zip: bool) -> str:
    names: list[str] = []
    if is_zip:
        try:
            names = sorted(get_unsafe_globals_in_checkpoint(file))
        except Exception as error:  # noqa: BLE001 - the names are for the message only
            log.debug("%s: %s", file, error)
    found = f" ({', '.join(names[:3])})"[:200] if names else ""
    return (
        f"{file} was not imported: it is damaged, or holds objects other than tensors and plain values{found}; nothing "
        "in it was run. Load it where you trust it, and save only its tensors"
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
