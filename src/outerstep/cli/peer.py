"""`outerstep peer`: start a training script as a peer of a run without a server."""

from __future__ import annotations

import dataclasses
import os
import shutil
from typing import Annotated

import typer

from ..config import CONFIG_VARIABLE, GOSSIP, WORKER, Sourced, WorkerCommand, environment_for, make_command, make_config
from ..config import resolve as resolve_settings
from ..errors import ConfigError
from .options import ConfigFile, Found, takes_settings

PEER_DIR = "outerstep-peer"
# What is a server's, a group's or an all-reduce's.
NOT_FOR_PEERS = {
    "server_addr", "dylu", "down_codec", "group", "connections", "offline_after_s", "offline_rounds", "give_up_after_s",
    "peer_timeout_s", "on_divergence",
}  # fmt: skip
PEER = dataclasses.replace(
    WORKER, settings=tuple(setting for setting in WORKER.settings if setting.field not in NOT_FOR_PEERS)
)


@takes_settings(PEER)
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
    said["server_addr"] = Sourced(GOSSIP, "`outerstep peer`")
    said.setdefault("peer_dir", Sourced(PEER_DIR, "`outerstep peer`"))
    said.setdefault("announce", Sourced(True, "`outerstep peer`"))
    everything = resolve_settings(WORKER, said, file=config_file)
    make_config(WORKER, everything)
    own: WorkerCommand = make_command(WORKER, everything)
    environ = environment_for(WORKER, everything, os.environ)
    if config_file is not None:  # the script must not find another one in its folder
        environ[CONFIG_VARIABLE] = os.path.abspath(config_file)
    if own.devices is not None:
        environ["CUDA_VISIBLE_DEVICES"] = own.devices
    program = shutil.which(command[0])
    if program is None:
        raise ConfigError(f"command not found: {command[0]!r}; write the training command after --")
    os.execve(program, command, environ)  # as in worker.py: nobody in between
