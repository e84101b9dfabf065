"""`outerstep.attach(model, optimizer)`: a worker from the settings that `outerstep worker` hands over."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..config import (
    WORKER,
    Sourced,
    make_config,
    naming_sources,
    resolve,
    unknown,
    values_of,
    warnings_about,
    with_current_names,
)
from ..errors import ConfigError
from ..events import EventSink
from ..observe.log_lines import PrintableFormatter
from ..topology.protocol import Topology
from .worker import CUSTOM, DiLoCoWorker, RoundObserver

log = logging.getLogger(__name__)


def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    environ: Mapping[str, str] | None = None,
    topology: Topology | str | None = None,
    event_sink: EventSink | None = None,
    on_round: RoundObserver | None = None,
    **settings: Any,
) -> DiLoCoWorker:
    """`with outerstep.attach(model, optimizer): …` joins the server that the environment names.

    Keywords (the fields of `WorkerConfig`) win over the environment (DILOCO_*, OUTERSTEP_*), that over the [worker]
    table of outerstep.toml; what nobody says follows the run's plan. `event_sink`, `on_round`: as for `DiLoCoWorker`.
    """
    given = None if isinstance(topology, str) else topology
    if topology is not None:
        settings["topology"] = topology if given is None else CUSTOM
    settings = with_current_names(WORKER.config, settings)
    for name in settings:
        if name not in WORKER.config_fields:
            raise ConfigError(unknown("setting", name, WORKER.config_fields))
    said = {name: Sourced(value, f"keyword {name}") for name, value in settings.items()}
    found = resolve(WORKER, said, environ=environ)
    if found["topology"].value == "server" and not found["server_addr"].value:
        raise ConfigError(
            "no server to join: DILOCO_SERVER is not set. Start this script with "
            "`outerstep worker --server HOST:PORT -- python …`, or pass attach(…, server_addr='HOST:PORT'), or name "
            "another topology"
        )
    config = make_config(WORKER, found)
    _show_log()
    for warning in warnings_about(WORKER, found):
        log.warning("%s", warning)
    with naming_sources(found):
        values = values_of(config)
        values["topology"] = given or values["topology"]
        return DiLoCoWorker(model, optimizer, event_sink=event_sink, on_round=on_round, **values)


def _show_log() -> None:
    """Joining, rounds and waiting are worth a line on the terminal, unless the script has its own idea of logging."""
    ours = logging.getLogger("outerstep")
    if not ours.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(PrintableFormatter("outerstep: %(message)s"))
        ours.addHandler(handler)
        first = os.environ.get("RANK", "0") == "0"  # of a torchrun job, one process is enough to say so
        ours.setLevel(logging.INFO if first else logging.WARNING)
