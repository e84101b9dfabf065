"""`outerstep.attach(model, optimizer)`: a worker from the environment that `outerstep worker` sets."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError
from .worker import DiLoCoWorker


def attach(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, environ: Mapping[str, str] | None = None, **settings: Any
) -> DiLoCoWorker:
    """`with outerstep.attach(model, optimizer): …` joins the server that the environment names.

    Keywords win over the environment; what neither says follows the run's plan.
    """
    found = {**read_environment(os.environ if environ is None else environ), **settings}
    if not found.get("server_addr"):
        raise ConfigError(
            "no server to join: DILOCO_SERVER is not set. Start this script with "
            "`outerstep worker --server HOST:PORT -- python …`, or pass attach(…, server_addr='HOST:PORT')"
        )
    _show_log()
    return DiLoCoWorker(model, optimizer, **found)


def _show_log() -> None:
    """Joining, rounds and waiting are worth a line on the terminal, unless the script has its own idea of logging."""
    ours = logging.getLogger("outerstep")
    if not ours.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("outerstep: %(message)s"))
        ours.addHandler(handler)
        ours.setLevel(logging.INFO)


def read_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """The documented DILOCO_* variables as settings of a worker."""
    if environ.get("DILOCO_DYLU", "0") not in ("", "0"):
        raise ConfigError("DILOCO_DYLU is set, but dynamic local updates are not available in this version; unset it")
    found: dict[str, Any] = {}
    for variable, (name, parse) in _VARIABLES.items():
        text = environ.get(variable, "")
        if not text:
            continue
        try:
            found[name] = parse(text)
        except ValueError as error:
            raise ConfigError(f"{variable}={text!r} is not a valid {name}: {error}") from error
    return found


def _flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("must be 0 or 1")
    return text == "1"


_VARIABLES: dict[str, tuple[str, Callable[[str], Any]]] = {
    "DILOCO_SERVER": ("server_addr", str),
    "DILOCO_SYNC_EVERY": ("sync_every", int),
    "DILOCO_BF16_COMM": ("bf16_comm", _flag),
    "DILOCO_HEARTBEAT_INTERVAL": ("heartbeat_interval", float),
    "DILOCO_NUM_FRAGMENTS": ("num_fragments", int),
    "DILOCO_WORKER_ID": ("worker_id", str),
}
