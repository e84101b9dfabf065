"""`outerstep worker`: start a training script as a worker."""

from __future__ import annotations

import os
import shutil
import time
from typing import Annotated

import typer

from ..attached import ATTACHED_VARIABLE
from ..config import (
    CONFIG_VARIABLE,
    WORKER,
    WorkerCommand,
    WorkerConfig,
    environment_for,
    make_command,
    make_config,
)
from ..defaults import METRICS_FOLDER
from ..errors import ConfigError
from ..printable import json_line
from .last_word import promise
from .options import ConfigFile, Found, takes_settings
from .reaching import check_server, is_old_port
from .script_file import check_script

TRAINER = "forgather"
NEVER_ATTACHED = (
    "outerstep: the command ended and took no part in the run ({place}): it never called outerstep.attach or "
    "DiLoCoWorker. Put `with outerstep.attach(model, optimizer):` around its training loop"
)
OLD_PROTOCOL = (
    "forgather's own worker speaks the older protocol and needs the port for that: start the server with --compat-port "
    "8513, and give --server HOST:8513. The server's own port is for training code that uses outerstep"
)
SCRIPT = "Training script"


@takes_settings(WORKER, example="outerstep worker --server 192.168.1.100:8512 --worker-id left -- python train.py")
def worker(
    found: Found,
    command: Annotated[
        list[str],
        typer.Argument(metavar="COMMAND…", help="The training command, after --: python train.py …"),
    ],
    project: Annotated[
        str | None,
        typer.Option(
            "-p", metavar="DIR", hidden=True, rich_help_panel=SCRIPT, help="Project of a `forgather` training command."
        ),
    ] = None,
    template: Annotated[
        str | None,
        typer.Option("-t", metavar="FILE", hidden=True, rich_help_panel=SCRIPT, help="Its configuration template."),
    ] = None,
    config_file: ConfigFile = None,
) -> None:
    """Start a training script as a worker of a run.

    The script itself joins, with two lines: [bold]with outerstep.attach(model, optimizer):[/bold] around its loop.
    This command tells it where and how, through environment variables, once it has seen that the server is the right
    one and lets this machine in. With -p or -t, or if the command is the word [bold]train[/bold], what is run is
    [bold]forgather … train[/bold]; forgather's own worker needs the server's [bold]--compat-port[/bold].
    """
    config: WorkerConfig = make_config(WORKER, found)
    words = training_command(command, project, template)
    environ, program = script_environment(found, config_file), find_program(words, command)
    if config.server_addr is not None:
        is_old = words is not command and is_old_port(config.server_addr)
        if words is not command and not is_old:
            _say(f"note: {OLD_PROTOCOL}", as_json=config.log_json)
        silence = "" if is_old else check_server(config.server_addr, config.credentials, config.worker_id)
        if silence:
            _say(
                f"warning: {silence}. Is the server running, and may this machine reach it (--host)? The script is "
                f"started all the same; it waits {config.join_timeout_s:g} s for the server (--join-timeout)",
                as_json=config.log_json,
            )
    become(program, words, environ, place=config.place if words is command else "", as_json=config.log_json)


def _say(text: str, *, as_json: bool) -> None:
    """A remark of the form "warning: …"."""
    level, _, message = text.partition(": ")
    if as_json:
        typer.echo(_as_json(level, message), err=True)
    else:
        typer.secho(text, fg="yellow" if level == "warning" else None, err=True)


def _as_json(level: str, message: str) -> str:
    return json_line({"time": round(time.time(), 3), "level": level, "logger": __name__, "message": message})


def script_environment(found: Found, config_file: str | None) -> dict[str, str]:
    """In which the training command finds `found`."""
    own: WorkerCommand = make_command(WORKER, found)
    environ = environment_for(WORKER, found, os.environ)
    if not found["metrics_dir"].is_said and not found["peer_dir"].value:
        environ[WORKER.variables("metrics_dir")[0]] = METRICS_FOLDER
    if config_file is not None:  # the script must not find another one in its folder
        environ[CONFIG_VARIABLE] = os.path.abspath(config_file)
    if own.devices is not None:
        environ["CUDA_VISIBLE_DEVICES"] = own.devices
    return environ


def become(program: str, words: list[str], environ: dict[str, str], *, place: str, as_json: bool = False) -> None:
    """Replace this process by the training command. So nothing stands in between that would have to pass signals on and
    exit codes back: SLURM, systemd and Kubernetes speak with the script itself. If it ends and has not joined the run
    at `place`, that is said ("" = it joins by other means)."""
    message = NEVER_ATTACHED.format(place=place)
    file = promise(_as_json("error", message) if as_json else message) if place else ""
    os.execve(program, words, {**environ, ATTACHED_VARIABLE: file})


def training_command(command: list[str], project: str | None, template: str | None) -> list[str]:
    """`-p P -t T train` and a lone `train` are forgather's; anything else is run as it stands."""
    if project is None and template is None and command != ["train"]:
        return command
    chosen = [
        word for flag, value in (("-p", project), ("-t", template)) if value is not None for word in (flag, value)
    ]
    return [TRAINER, *chosen, *command]


def find_program(words: list[str], typed: list[str]) -> str:
    program = shutil.which(words[0])
    if program is None:
        raise ConfigError(_not_found(words, typed))
    check_script(words)
    return program


def _not_found(words: list[str], typed: list[str]) -> str:
    if words is typed:
        return f"command not found: {words[0]!r}; write the training command after --"
    return (
        f"command not found: {TRAINER!r}, which -p, -t and `train` stand for; "
        f"for a script of your own write `-- python train.py` instead. ({OLD_PROTOCOL})"
    )
