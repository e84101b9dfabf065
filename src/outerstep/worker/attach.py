"""`outerstep.attach(model, optimizer)`: a worker from the settings that `outerstep worker` hands over."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from types import TracebackType
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
from ..data.leased import Leased
from ..errors import ConfigError, Refused, ServerUnreachable, UntrustedServer
from ..events import EventSink
from ..observe.terminal import level_for, make_handler
from ..printable import printable
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
    data: Leased | Sequence[Leased] = (),
    data_part: tuple[int, int] | None = None,
    state: Mapping[str, Any] | None = None,
    **settings: Any,
) -> DiLoCoWorker:
    """`with outerstep.attach(model, optimizer): …` joins the server that the environment names.

    Keywords (the fields of `WorkerConfig`) win over the environment (DILOCO_*, OUTERSTEP_*), that over the [worker]
    table of outerstep.toml; what nobody says follows the run's plan. `event_sink`, `on_round`, `data`,
    `data_part`: as for `DiLoCoWorker`.
    `state`: what `worker.state_dict()` gave, of the checkpoint that model and optimizer were loaded from.
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
    _show_log(as_json=config.log_json)
    _say_briefly()
    for warning in warnings_about(WORKER, found):
        log.warning("%s", warning)
    with naming_sources(found):
        values = values_of(config)
        values["topology"] = given or values["topology"]
        worker = DiLoCoWorker(
            model, optimizer, event_sink=event_sink, on_round=on_round, data=data, data_part=data_part, **values
        )
    if state is not None:
        worker.load_state_dict(state)
    return worker


def _show_log(*, as_json: bool) -> None:
    """Joining, rounds and waiting are worth a line on the terminal, unless the script has its own idea of logging."""
    ours = logging.getLogger("outerstep")
    if not ours.handlers and not logging.getLogger().handlers:
        handler = make_handler(as_json=as_json, prefix="outerstep: ")
        ours.addHandler(handler)
        first = os.environ.get("RANK", "0") == "0"  # of a torchrun job, one process is enough to say so
        ours.setLevel(level_for(handler) if first else logging.WARNING)


def _say_briefly() -> None:
    """That no server answers, or that it says no, is no bug of the script's: if it does not care, one line says so
    instead of a traceback, unless the script has its own idea of last words."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _last_words


def _last_words(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if isinstance(error, ServerUnreachable):
        print(f"error: {printable(str(error))}; is the server running, and is its address right?", file=sys.stderr)
    elif isinstance(error, Refused | UntrustedServer):
        print(f"error: {printable(str(error))}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)
