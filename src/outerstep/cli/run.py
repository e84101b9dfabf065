"""`outerstep run`: the whole of a run in one command on each PC.

outerstep run -n 2 -- COMMAND                  first_pc.py: a server, and the script as its first worker
outerstep run --join "outerstep://…" -- COMMAND    second_pc.py: the line that the first one printed
"""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from ..config import SERVER, WORKER, OwnDefaults
from ..config import resolve as resolve_settings
from ..errors import ConfigError
from .discovery import find_known
from .first_pc import FirstPc
from .options import ConfigFile, Found, takes_settings
from .second_pc import join_run
from .training_scripts import check_command

WORKERS = 2  # two PCs,
EVERYWHERE = "0.0.0.0"  # which reach each other
NOT_FOR_RUN = frozenset(
    ("above", "via", "relay", "cluster", "above_every", "above_wait_s", "inner_momentum", "compat_port", "compat_host")
)
RUN = dataclasses.replace(
    SERVER,
    without=NOT_FOR_RUN,
    own=OwnDefaults(
        "`outerstep run`", {"num_workers": WORKERS, "host": EVERYWHERE}, unset={"model": "the script's own model"}
    ),
)
FIRST, SECOND = "First PC", "Second PC"


@takes_settings(RUN)
def run(
    found: Found,
    command: Annotated[
        list[str], typer.Argument(metavar="COMMAND…", help="The training command, after --: python train.py …")
    ],
    join: Annotated[
        str | None,
        typer.Option(
            "--join",
            metavar="LINE",
            rich_help_panel=SECOND,
            help="Join the run on another PC: the line that it printed; - = read it from standard input.",
        ),
    ] = None,
    discover: Annotated[
        bool,
        typer.Option(
            "--discover",
            rich_help_panel=SECOND,
            help="Join the run that announces itself on this network, if its line was pasted here before.",
        ),
    ] = False,
    announce: Annotated[
        bool,
        typer.Option(
            "--announce",
            rich_help_panel=FIRST,
            help="Tell this network where the server is, for --discover; never the token.",
        ),
    ] = False,
    qr: Annotated[
        bool,
        typer.Option(
            "--qr/--no-qr",
            rich_help_panel=FIRST,
            help="Show the line as a QR code too, if the terminal has room and the extra lan is installed.",
        ),
    ] = True,
    worker_id: Annotated[
        str | None,
        typer.Option(
            "--worker-id",
            metavar="NAME",
            help="This PC's worker. [dim]Default: this machine's name, and four digits of yours.[/dim]",
        ),
    ] = None,
    config_file: ConfigFile = None,
) -> None:
    """Train on two PCs, with one command on each.

    Example: [bold]outerstep run -n 2 -- python SCRIPT[/bold]

    On the first PC this starts a server, and the script beside it as the first worker. All workers start from the
    weights that the script's model has when it reaches [bold]with outerstep.attach(model, optimizer):[/bold]. The
    command prints one line: paste it on the second PC, in a folder with the same script. Ctrl-C on the first PC ends
    the run on both, saves it and says where the model is; the same command resumes it.
    """
    program = check_command(command)
    if join is not None or discover:
        _refuse_server_flags(found, announce=announce)
        if join is None:
            access = find_known(resolve_settings(WORKER, {}, file=config_file)["credentials"].value)
            typer.echo(f"found {access.address}, which is known here", err=True)
            join = access.join_string
        join_run(join, command, program, worker_id, config_file)
        return
    said = {field: value for field, value in found.items() if value.is_said}
    settings = resolve_settings(SERVER, said, file=config_file)
    code = FirstPc(settings, command, program, worker_id, config_file, announce=announce, qr=qr).run()
    if code:
        raise typer.Exit(code)


def _refuse_server_flags(found: Found, *, announce: bool) -> None:
    said = [RUN.by_field[field].flag for field, value in found.items() if value.is_of_this_start]
    said += ["--announce"] if announce else []
    if said:
        raise ConfigError(
            f"{', '.join(said)} {'is' if len(said) == 1 else 'are'} for the first PC, which has the server: leave "
            "it out here, --join follows what the run does"
        )
