"""Tells the operator what to type on the next machine."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from ....security.secret_files import write_secret
from .node import Node


def announce(node: Node) -> None:
    """Print the command that joins this peer. The join string holds the run's token: people may see it, log files may
    not, and are told where to find it."""
    folder, insecure = node.settings.folder, " --insecure" if node.settings.insecure else ""
    where, hint = shlex.quote(node.join_string), ""
    is_for_people = bool(insecure) or sys.stderr.isatty()
    if folder is not None:
        file = Path(folder).absolute() / "join"
        write_secret(file, f"{node.join_string}\n".encode())
        hint = (
            "" if is_for_people else f"JOIN_STRING is the line in {file} on this machine; it holds the run's token.\n"
        )
    elif not is_for_people:
        hint = "JOIN_STRING holds the run's token and is not for logs: with a peer_dir it is written there.\n"
    print(
        f"peer {node.peer_id} listens on {node.address}. On each other machine:\n\n"
        f"    outerstep peer{insecure} --join {where if is_for_people else 'JOIN_STRING'} -- python train.py\n\n{hint}"
        + _page(node, is_for_people=is_for_people),
        file=sys.stderr,
        flush=True,
    )


def _page(node: Node, *, is_for_people: bool) -> str:
    """The link to the page. It logs in whoever opens it, so while it works it is as private as the join string."""
    if node.dashboard is None:
        return ""
    if not is_for_people:
        return f"Watch it in a browser: `outerstep page --server {node.address}` prints a link.\n"
    once = "" if node.settings.insecure else " (once, within 15 minutes; `outerstep page` prints another)"
    return f"Watch it in a browser{once}:\n\n    {node.page_link()}\n"
