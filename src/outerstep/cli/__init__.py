"""The command line. One file per command; torch is imported only by those that need it."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ..errors import OuterstepError, Refused
from ..printable import printable
from . import (
    config,
    control,
    data,
    demo,
    doctor,
    export,
    invite,
    join,
    layers,
    lighthouse,
    page,
    peer,
    repair,
    run,
    server,
    status,
    token,
    worker,
)

# The end of each --help; docs/reference/exit-codes.md says more.
MISTAKE = "2 = a mistake in the arguments or settings, or the server said no; 130 = Ctrl-C"
CODES = f"Exit codes: 0 = done; {MISTAKE}."
SERVER_CODES = (
    "Exit codes: 0 = stopped as it was told to (SIGTERM, Ctrl-C, shutdown, the budget's end), and saved; 1 = it had "
    "failed, or could not save; 2 = a mistake in the arguments or settings; 130 = a second Ctrl-C; 143 = SIGTERM "
    "before it listened."
)
WORKER_CODES = (
    "Exit codes: the script's own, whatever they are; 143 = SIGTERM and 130 = Ctrl-C, if its loop did not end by "
    "itself; 2 = it was not started: a mistake in the arguments or settings, or the server does not let it in."
)
RUN_CODES = (
    "Exit codes: the script's own, whatever they are; 1 = it ended well, and the server could not save; 2 = it was not "
    "started: a mistake in the arguments or settings, or the server does not let it in; 130 = a second Ctrl-C."
)
DOCTOR_CODES = f"Exit codes: 0 = nothing failed; 1 = something did; {MISTAKE}."

app = typer.Typer(
    name="outerstep",
    help="Train one PyTorch model on machines that are far apart.\n\n"
    "On one PC: [bold]outerstep run -n 2 -- python train.py[/bold]; on the second, the line that it prints. Or a "
    "server by itself: [bold]outerstep server -m MODEL_DIR -n 2[/bold]; on each other machine, once, "
    "[bold]outerstep join[/bold] with the line that it printed; then "
    "[bold]outerstep worker --server HOST:PORT -- python train.py[/bold]. "
    "To see it work: [bold]outerstep demo[/bold].",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=CODES,
)
app.command("run", epilog=RUN_CODES, context_settings={"allow_interspersed_args": False})(run.run)
app.command("server", epilog=SERVER_CODES)(server.server)
app.command("join", epilog=CODES)(join.join)
app.command("worker", epilog=WORKER_CODES, context_settings={"allow_interspersed_args": False})(worker.worker)
app.command("peer", epilog=WORKER_CODES, context_settings={"allow_interspersed_args": False})(peer.peer)
app.command("invite", epilog=CODES)(invite.invite)
app.command("repair", epilog=CODES)(repair.repair)
app.command("lighthouse", epilog=CODES)(lighthouse.lighthouse)
app.command("status", epilog=CODES)(status.status)
app.command("data", epilog=CODES)(data.data)
app.command("page", epilog=CODES)(page.page)
app.command("export", epilog=CODES)(export.export)
app.command("doctor", epilog=DOCTOR_CODES)(doctor.doctor)
app.add_typer(control.app, name="control")
app.add_typer(token.app, name="token")
app.add_typer(config.app, name="config")
app.add_typer(layers.app, name="layers")
app.command("demo")(demo.demo)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"outerstep {version('outerstep')}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks instead of one-line errors.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options that every command has."""


def main() -> None:
    """Expected errors are one line and a hint, exit code 2; `outerstep --debug …` shows the traceback."""
    try:
        app(args=server.spelled_out(sys.argv[1:]) if "server" in sys.argv[1:3] else None)
    except OuterstepError as error:
        if "--debug" in sys.argv[1:2]:
            raise
        message, hint = (printable(error.message), error.hint) if isinstance(error, Refused) else (str(error), "")
        typer.secho(f"error: {message}", fg="red", err=True)
        if hint:
            typer.echo(f"hint: {printable(hint)}", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
