"""`outerstep peer`: start a training script as a peer of a run without a server."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Annotated

import typer

from ..config import OF_PEERS, WORKER, OwnDefaults, Sourced, WorkerConfig, make_config
from ..config import resolve as resolve_settings
from ..errors import ConfigError
from .options import ConfigFile, Found, takes_settings
from .worker import become, find_program, script_environment

PEER_DIR = "outerstep-peer"
NOT_FOR_PEERS = frozenset(
    setting.field
    for setting in WORKER.settings
    if setting.field in ("topology", "server_addr", "group")
    or (setting.needs is not None and not setting.needs.holds(SimpleNamespace(topology="gossip")))
)
PEER = dataclasses.replace(
    WORKER,
    without=NOT_FOR_PEERS,
    essential=OF_PEERS,
    own=OwnDefaults("`outerstep peer`", {"peer_dir": PEER_DIR, "announce": True}),
)


@takes_settings(PEER, example="outerstep peer --sync-every 500 -- python train.py")
def peer(
    found: Found,
    command: Annotated[
        list[str],
        typer.Argument(metavar="COMMAND…", help="The training command, after --: python train.py …"),
    ],
    config_file: ConfigFile = None,
) -> None:
    """Start a training script as a peer: no server, the peers agree among themselves.

    The first one founds the run and prints what to type on each other machine: this command with
    [bold]--join[/bold]. The script itself has two lines: [bold]with outerstep.attach(model, optimizer):[/bold] around
    its loop. What a joiner leaves out is as the run has it.
    """
    said = {field: value for field, value in found.items() if value.is_said}
    if "peers" in said and not said["peers"].value:  # "$(cat …)" of a file that is not there
        raise ConfigError("--join is empty: give the join string of a peer, or leave it out to found a run")
    said["topology"] = Sourced("gossip", "`outerstep peer`")
    everything = resolve_settings(WORKER, said, file=config_file)
    config: WorkerConfig = make_config(WORKER, everything)
    environ = script_environment(everything, config_file)
    become(find_program(command, command), command, environ, place="gossip", as_json=config.log_json)
