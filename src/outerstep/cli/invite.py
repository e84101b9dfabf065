"""`outerstep invite`: let a peer belong to a run that was founded with --invite-only."""

from __future__ import annotations

from typing import Annotated

import typer

from ..errors import ServerUnreachable
from .peer import PEER_DIR


def invite(
    peer: Annotated[str, typer.Argument(metavar="PEER", help="Its id (--worker-id).")],
    key: Annotated[str, typer.Argument(metavar="KEY", help="Its public key, which it says when it is refused.")],
    folder: Annotated[
        str, typer.Option("--peer-dir", metavar="DIR", help="The folder of the peer that founded the run.")
    ] = PEER_DIR,
    withdraw: Annotated[
        bool, typer.Option("--withdraw", help="Take the invitation back: the peer is expelled by the next block.")
    ] = False,
) -> None:
    """Invite a peer to the run that was founded in a folder, and print its invitation.

    It is good for that id with that key, so it need not be kept secret; the peer takes it as
    [bold]--invitation[/bold]. The founder may be running or not. To take it back, a member of the run must be
    reachable: it tells the others.
    """
    from ..topology.gossip.node import invitations

    if not withdraw:
        typer.echo(invitations.invite(folder, peer, key))
        return
    heard = invitations.withdraw(folder, peer, key)
    if not heard:
        raise ServerUnreachable(
            f"no member of the run could be told that {peer!r} is not invited any more: run this again when one is up, "
            "where it can be reached"
        )
    typer.echo(f"{peer} is expelled by the next block; told: {', '.join(heard)}")
