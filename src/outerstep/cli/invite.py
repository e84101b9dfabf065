"""`outerstep invite`: let a peer belong to a run that was founded with --invite-only."""

from __future__ import annotations

from typing import Annotated

import typer

from .peer import PEER_DIR


def invite(
    peer: Annotated[str, typer.Argument(metavar="PEER", help="Its id (--worker-id).")],
    key: Annotated[str, typer.Argument(metavar="KEY", help="Its public key, which it says when it is refused.")],
    folder: Annotated[
        str, typer.Option("--peer-dir", metavar="DIR", help="The folder of the peer that founded the run.")
    ] = PEER_DIR,
) -> None:
    """Invite a peer to the run that was founded in a folder, and print its invitation.

    It is good for that id with that key, so it need not be kept secret; the peer takes it as
    [bold]--invitation[/bold]. The founder may be running or not.
    """
    from ..topology.gossip.node.invitations import invite as make_invitation

    typer.echo(make_invitation(folder, peer, key))
