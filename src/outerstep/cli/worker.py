"""`outerstep worker`: start a training script as a worker."""

from __future__ import annotations

import os
import shutil
from enum import StrEnum
from typing import Annotated

import typer

from ..config import (
    ALLREDUCE,
    CONFIG_VARIABLE,
    TORCHFT,
    WORKER,
    Sourced,
    WorkerCommand,
    environment_for,
    make_command,
    make_config,
)
from ..errors import ConfigError
from ..security import is_join_string, parse_address, parse_join_string
from .options import ConfigFile, Found, takes_settings

TRAINER = "forgather"
SCRIPT = "Training script"
JOINING = "Joining"


class Among(StrEnum):
    """Who agrees without a server."""

    ALLREDUCE = ALLREDUCE
    TORCHFT = TORCHFT


@takes_settings(WORKER)
def worker(
    found: Found,
    command: Annotated[
        list[str],
        typer.Argument(metavar="COMMAND…", help="The training command, after --: python train.py …"),
    ],
    project: Annotated[
        str | None,
        typer.Option("-p", metavar="DIR", rich_help_panel=SCRIPT, help="Project of a `forgather` training command."),
    ] = None,
    template: Annotated[
        str | None,
        typer.Option("-t", metavar="FILE", rich_help_panel=SCRIPT, help="Its configuration template."),
    ] = None,
    topology: Annotated[
        Among | None,
        typer.Option(
            rich_help_panel=JOINING,
            help="With whom to agree, if not through a server: short for --server allreduce, --server torchft.",
        ),
    ] = None,
    config_file: ConfigFile = None,
) -> None:
    """Start a training script as a worker of a run.

    The script itself joins, with two lines: [bold]with outerstep.attach(model, optimizer):[/bold] around its loop.
    This command only tells it where and how, through environment variables. With -p or -t, or if the command is the
    word [bold]train[/bold], what is run is [bold]forgather … train[/bold].
    """
    if topology is not None:
        found = {**found, "server_addr": _instead_of_a_server(topology, found["server_addr"])}
    server = make_config(WORKER, found).server_addr
    parse_join_string(server) if is_join_string(server) else parse_address(server)
    own: WorkerCommand = make_command(WORKER, found)
    environ = environment_for(WORKER, found, os.environ)
    if config_file is not None:  # the script must not find another one in its folder
        environ[CONFIG_VARIABLE] = os.path.abspath(config_file)
    if own.devices is not None:
        environ["CUDA_VISIBLE_DEVICES"] = own.devices
    words = training_command(command, project, template)
    program = shutil.which(words[0])
    if program is None:
        raise ConfigError(_not_found(words, command))
    # The script takes this process's place, so there is nobody in between to pass signals on and exit codes back, or to
    # forget to: SLURM, systemd and Kubernetes speak with the script itself.
    os.execve(program, words, environ)


def _instead_of_a_server(topology: Among, said: Sourced) -> Sourced:
    if said.source.startswith("flag") and said.value != topology.value:
        raise ConfigError(f"--topology {topology.value} needs no server, got --server too: leave one of the two out")
    return Sourced(topology.value, "flag --topology")


def training_command(command: list[str], project: str | None, template: str | None) -> list[str]:
    """`-p P -t T train` and a lone `train` are forgather's; anything else is run as it stands."""
    if project is None and template is None and command != ["train"]:
        return command
    chosen = [
        word for flag, value in (("-p", project), ("-t", template)) if value is not None for word in (flag, value)
    ]
    return [TRAINER, *chosen, *command]


def _not_found(words: list[str], command: list[str]) -> str:
    if words is command:
        return f"command not found: {words[0]!r}; write the training command after --"
    return (
        f"command not found: {TRAINER!r}, which -p, -t and `train` stand for; "
        "for a script of your own write `-- python train.py` instead"
    )
