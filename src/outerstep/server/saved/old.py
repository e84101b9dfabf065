"""The old layout of a saved state: one file of `torch.save`, a dict with

    global_params       name → tensor
    outer_optimizer     state_dict of a torch optimizer, its state by position in param_names
    sync_round          int                                  (optional: 0)
    param_names         names in the optimizer's order       (optional: the order of global_params)
    total_submissions   int                                  (optional)
    num_workers, async_mode                                  (optional; settings, not imported)

Read without running code (torch_file.py). It has no fragments, manifest or ledger: the first worker to join fixes
those, and every fragment starts at version `sync_round`.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...core.outer import State
from ...errors import ModelError
from ...torch_file import is_plain, read_torch_file
from .state import OptimizerState, ServerState

log = logging.getLogger(__name__)


def import_old(path: str | os.PathLike[str]) -> ServerState:
    """A state of the old layout, as a run of its own. Momentum is kept; `facts` of the optimizer has its settings."""
    file = Path(path)
    held = read_torch_file(file)
    if not isinstance(held, dict) or "global_params" not in held:
        got = f"a dict with {list(held)[:5]}" if isinstance(held, dict) else f"a {type(held).__name__}"
        raise _unfit(file, f"it must be a dict with global_params, got {got}")
    tensors = _tensors(file, held["global_params"])
    params = {name: tensor.to(torch.float32) for name, tensor in tensors.items() if tensor.is_floating_point()}
    round_ = _count(file, held, "sync_round")
    names = held.get("param_names", list(tensors))
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise _unfit(file, "param_names must be a list of names")
    optimizer = _optimizer(file, held.get("outer_optimizer"), list(names), params)
    log.info(
        "imported %s: round %d, %d tensors, momentum of %d; its settings were num_workers=%r, async_mode=%r",
        file,
        round_,
        len(tensors),
        len(optimizer.by_name),
        held.get("num_workers"),
        held.get("async_mode"),
    )
    return ServerState(
        run_id=secrets.token_hex(8),
        params=params,
        rest={name: tensor for name, tensor in tensors.items() if name not in params},
        versions=(round_,),
        optimizer=optimizer,
        totals={"total_submissions": _count(file, held, "total_submissions")},
    )


def _tensors(file: Path, held: object) -> dict[str, Tensor]:
    if not isinstance(held, dict) or not held:
        raise _unfit(file, f"global_params must map names to tensors, got a {type(held).__name__}")
    for name, tensor in held.items():
        if not isinstance(name, str) or not is_plain(tensor, file):
            raise _unfit(file, f"global_params[{name!r}] must be a dense tensor, got a {type(tensor).__name__}")
    return {name: tensor.detach() for name, tensor in held.items()}


def _optimizer(file: Path, held: object, names: list[str], params: Mapping[str, Tensor]) -> OptimizerState:
    """Position i in the optimizer is the i-th parameter of its groups, one after the other, and so names[i]."""
    if held is None:
        return OptimizerState("old")
    try:
        groups = [dict(group) for group in held["param_groups"]]  # type: ignore[index]
        positions = [position for group in groups for position in group.pop("params")]
        states = dict(held["state"])  # type: ignore[index]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _unfit(file, f"outer_optimizer must be the state_dict of a torch optimizer: {error!r}") from error
    if len(positions) != len(names):
        raise _unfit(file, f"outer_optimizer has {len(positions)} parameters, param_names {len(names)}")
    by_position = dict(zip(positions, names, strict=True))
    by_name: State = {}
    for position, entry in states.items():
        name = by_position.get(position, "")
        if name not in params or not isinstance(entry, dict):
            raise _unfit(file, f"outer_optimizer has a state at {position!r}, where no parameter is")
        remembered = dict(_remembered(file, name, entry, params[name]))
        if remembered:
            by_name[name] = remembered
    return OptimizerState("old", by_name, {"param_groups": [_plain(group) for group in groups]})


def _remembered(file: Path, name: str, entry: dict[Any, Any], param: Tensor) -> Iterator[tuple[str, Any]]:
    """What the optimizer has of one parameter. None (momentum that was never used) is nothing."""
    for key, value in entry.items():
        if value is None:
            continue
        if isinstance(value, Tensor):
            if not is_plain(value, file) or value.shape not in (param.shape, torch.Size()):
                raise _unfit(file, f"{key!r} of {name!r} is {list(value.shape)}, the parameter {list(param.shape)}")
            yield str(key), value.detach().to(torch.float32) if value.is_floating_point() else value
        elif _is_number(value):
            yield str(key), value
        else:
            raise _unfit(file, f"{key!r} of {name!r} must be a tensor or a number, got a {type(value).__name__}")


def _plain(group: dict[Any, Any]) -> dict[str, Any]:
    """The settings that JSON can hold."""
    simple = (str, bool, type(None))
    return {str(key): value for key, value in group.items() if _is_number(value) or isinstance(value, simple)}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) < 2**63  # false for nan and inf


def _count(file: Path, held: Mapping[Any, Any], key: str) -> int:
    value = held.get(key, 0)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 2**53:
        raise _unfit(file, f"{key} must be a whole number ≥ 0, got {value!r}")
    return value


def _unfit(file: Path, reason: str) -> ModelError:
    return ModelError(f"{file} was not imported: {reason[:300]}")
