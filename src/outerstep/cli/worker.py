"""`outerstep worker`: start a training script as a worker."""

from __future__ import annotations

import os
import shutil
from typing import Annotated

import typer

from ..config import CONFIG_VARIABLE, WORKER, WorkerCommand, environment_for, make_command, make_config
from ..errors import ConfigError
from ..security import is_join_string, parse_address, parse_join_string
from .options import ConfigFile, Found, takes_settings

TRAINER = "forgather"
SCRIPT = "Training script"


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
    config_file: ConfigFile = None,
) -> None:
    """Start a training script as a worker of a run.

    The script itself joins, with two lines: [bold]with outerstep.attach(model, optimizer):[/bold] around its loop.
    This command only tells it where and how, through environment variables. With -p or -t, or if the command is the
    word [bold]train[/bold], what is run is [bold]forgather … train[/bold].
    """
    server = make_config(WORKER, found).server_addr
    if server is not None:
        parse_join_string(server) if is_join_string(server) else parse_address(server)
    words = training_command(command, project, template)
    become(words, command, found, config_file)


def become(words: list[str], typed: list[str], found: Found, config_file: str | None) -> None:
    """Replace this process by the training command, which finds `found` in its environment. So nothing stands in
    between that would have to pass signals on and exit codes back: SLURM, systemd and Kubernetes speak with the script
    itself."""
    own: WorkerCommand = make_command(WORKER, found)
    environ = environment_for(WORKER, found, os.environ)
    if config_file is not None:  # the script must not find another one in its folder
        environ[CONFIG_VARIABLE] = os.path.abspath(config_file)
    if own.devices is not None:
        environ["CUDA_VISIBLE_DEVICES"] = own.devices
    program = shutil.which(words[0])
    if program is None:
        raise ConfigError(_not_found(words, typed))
    os.execve(program, words, environ)


def training_command(command: list[str], project: str | None, template: str | None) -> list[str]:
    """`-p P -t T train` and a lone `train` are forgather's; anything else is run as it stands."""
    if project is None and template is None and command != ["train"]:
        return command
    chosen = [
        word for flag, value in (("-p", project), ("-t", template)) if value is not None for word in (flag, value)
    ]
    return [TRAINER, *chosen, *command]


def _not_found(words: list[str], typed: list[str]) -> str:
    if words is typed:
        return f"command not found: {words[0]!r}; write the training command after --"
    return (
        f"command not found: {TRAINER!r}, which -p, -t and `train` stand for; "
        "for a script of your own write `-- python train.py` instead"
    )
