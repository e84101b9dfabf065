"""What a worker tells of itself: its machine and accelerator, what it can speak, where its data are.

`OUTERSTEP_ACCELERATOR` declares an accelerator ("nvidia:H100", "huawei:910B"; "none" for none), for tests and for what
torch does not know. `OUTERSTEP_DATA_LOCATION` says where the data lie.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping

import torch
import torch.distributed as dist

from ..coordination.autoconfig.collected import ACCELERATOR, BACKENDS, DATA, MACHINE
from ..printable import printable
from ..types import LONGEST_INFO, InfoValue

ACCELERATOR_VARIABLE = "OUTERSTEP_ACCELERATOR"
DATA_VARIABLE = "OUTERSTEP_DATA_LOCATION"
OWN_BACKEND = {"nvidia": "nccl", "amd": "nccl", "huawei": "hccl"}  # of a vendor that was declared


def about_this_machine(environ: Mapping[str, str] = os.environ) -> dict[str, InfoValue]:
    """For `Join.info`: what stays while the process lives."""
    declared = environ.get(ACCELERATOR_VARIABLE)
    accelerator = _found() if declared is None else "" if declared.lower() == "none" else declared
    told = {
        ACCELERATOR: accelerator,
        BACKENDS: ",".join(_backends(accelerator, is_declared=declared is not None)),
        MACHINE: f"{platform.system()} {platform.machine()}, {os.cpu_count() or 1} cores",
        DATA: environ.get(DATA_VARIABLE, ""),
    }
    return {name: printable(text[:LONGEST_INFO])[:LONGEST_INFO] for name, text in told.items() if text}


def _found() -> str:
    if not torch.cuda.is_available():
        return ""
    name = torch.cuda.get_device_name()
    return f"amd:{name}" if getattr(torch.version, "hip", None) and not name.lower().startswith("amd") else name


def _backends(accelerator: str, *, is_declared: bool) -> list[str]:
    if is_declared:
        own = OWN_BACKEND.get(accelerator.partition(":")[0].lower())
        return [own, "gloo"] if own else ["gloo"]
    if not dist.is_available():
        return []
    found = ["nccl"] if accelerator and dist.is_nccl_available() else []
    return [*found, "gloo"] if dist.is_gloo_available() else found
