"""`outerstep page`: a link that shows the run in a browser."""

from __future__ import annotations

import webbrowser
from typing import Annotated

import typer

from ..dashboard.logins import CODE_S, link_to
from ..errors import Forbidden, MethodNotAllowed, NotFound
from ..wire.http_transport import HttpTransport
from .which_server import CredentialsFolder, ServerAddress, credentials_folder, server_address

PATIENCE_S = 10.0


def page(
    server: ServerAddress = None,
    opens: Annotated[bool, typer.Option("--open", help="Open it in this machine's browser, too.")] = False,
    tunnel: Annotated[
        bool,
        typer.Option(
            "--tunnel",
            help="Serve it on 127.0.0.1 of this machine until Ctrl-C. This command checks the server's certificate "
            "for the browser, which then has nothing to warn of.",
        ),
    ] = False,
    credentials: CredentialsFolder = None,
) -> None:
    """Print a link that shows a run in a browser. It logs in one browser, once.

    Rounds, losses, workers, links: what [bold]outerstep status[/bold] shows, live. It needs a token that may read.
    """
    address, folder = server_address(server), credentials_folder(credentials)
    transport = HttpTransport(address, timeout_s=PATIENCE_S, credentials=folder)
    try:
        made = transport.page_link()
    except (NotFound, MethodNotAllowed) as error:
        raise Forbidden(
            f"{transport.address} has no page", hint="it was started with --no-page, or is older than 0.3"
        ) from error
    if not tunnel:
        _show(link_to(transport.address, made.code, plain=transport.is_plain), opens=opens, code=made.code)
        return
    from ..dashboard.tunnel import Tunnel

    with Tunnel(transport) as through:
        _show(link_to(through.address, made.code, plain=True), opens=opens, code=made.code)
        typer.echo("Ctrl-C ends it.", err=True)
        through.wait()


def _show(link: str, *, opens: bool, code: str) -> None:
    typer.echo(link)
    if code:
        typer.echo(f"It works once, within {CODE_S / 60:.0f} minutes.", err=True)
    if opens and not webbrowser.open(link):
        typer.echo("No browser was found here: copy the link.", err=True)
