"""`outerstep repair`: what is in a peer's folder, and take out of it what cannot be carried out."""

from __future__ import annotations

from typing import Annotated

import typer

from ..printable import printable
from .peer import PEER_DIR


def repair(
    folder: Annotated[
        str, typer.Argument(metavar="[PEER_DIR]", help="The folder of a peer that is stopped.")
    ] = PEER_DIR,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")] = False,
) -> None:
    """Look through a peer's folder, and take out what cannot be carried out.

    For a peer that stops at every start, and for folders of earlier versions. A repaired peer is the same peer as
    before, and contradicts nothing that it has said.
    """
    from ..topology.gossip.node.repair import repair as repair_folder

    found = repair_folder(folder, dry_run=dry_run)
    members = ", ".join(member.peer_id for member in found.state.members)
    typer.echo(f"peer {found.peer_id} of run {found.run_id}, after block {found.state.height}; members: {members}")
    for line in found.mended:
        typer.echo(printable(f"{'would be mended' if dry_run else 'mended'}: {line}"))
    for line in found.noted:
        typer.echo(printable(f"note: {line}"))
    if not found.mended:
        typer.echo("there is nothing to repair")
