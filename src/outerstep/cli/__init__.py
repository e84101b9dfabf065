"""The command line. One file per command, imported when it is typed (catalogue.py); torch only by some of them."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from ..errors import OuterstepError, Refused, TransportError
from ..printable import printable
from .catalogue import CODES, CatalogueGroup

USAGE_ERROR: Any = typer.BadParameter.__mro__[1]  # typer has its own; older releases have click's

app = typer.Typer(
    name="outerstep",
    cls=CatalogueGroup,
    help="Train one PyTorch model on machines that are far apart.\n\n"
    "With two PCs: type [bold]outerstep run -n 2 -- python train.py[/bold] on the first, and the line that it prints "
    "on the second. With a server of its own: start [bold]outerstep server -m MODEL_DIR -n 2[/bold]; on each other "
    "machine, type [bold]outerstep join[/bold] once with the line that the server printed, then "
    "[bold]outerstep worker --server HOST:PORT -- python train.py[/bold]. "
    "To see it work on one machine: [bold]outerstep demo[/bold].",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=CODES,
)


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


def _spelled_out(words: list[str]) -> list[str]:
    if "server" not in words[:2]:
        return words
    from .server import spelled_out

    return spelled_out(words)


def main() -> None:
    """Expected errors are one line and a hint, exit code 2; `outerstep --debug …` shows the traceback."""
    try:
        code = app(args=_spelled_out(sys.argv[1:]), standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except USAGE_ERROR as error:
        said = error.format_message()
        if not said or "\n" in said:  # a group without a command: its help, which may have been printed
            typer.echo(said, err=True, nl=bool(said))
        else:
            from .usage import usage_line

            typer.secho(f"error: {printable(usage_line(error, sys.argv[1:]))}", fg="red", err=True)
        sys.exit(2)
    except typer.Abort:
        typer.echo("aborted", err=True)
        sys.exit(1)
    except OuterstepError as error:
        if "--debug" in sys.argv[1:2]:
            raise
        message, hint = (printable(error.message), error.hint) if isinstance(error, Refused) else (str(error), "")
        if isinstance(error, TransportError):
            from .usage import unreachable_line

            message = unreachable_line(message)
        typer.secho(f"error: {message}", fg="red", err=True)
        if hint:
            typer.echo(f"hint: {printable(hint)}", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
