"""`outerstep control`: tell a running server to save, change its plan, drain workers, or shut down."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import typer

from ..errors import ConfigError
from ..printable import printable
from ..types import Control, ControlAnswer
from ..wire.http_transport import HttpTransport
from .which_server import CredentialsFolder, ServerAddress, credentials_folder, server_address

TIMEOUT_S = 120.0  # a save writes the whole model

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Tell a running server what to do.\n\n"
    "It needs the admin token, which the user who runs the server has. The server accepts orders from its own machine "
    "only, unless started with --remote-control.",
)

OneWorker = Annotated[str, typer.Argument(metavar="WORKER", help="Its id, as `outerstep status` shows it.")]
Worker = Annotated[str | None, typer.Argument(metavar="[WORKER]", help="Its id. Left out: all workers.")]
Reason = Annotated[str, typer.Option(help="Shown in logs, and to the workers.")]


@app.callback()
def choose(context: typer.Context, server: ServerAddress = None, credentials: CredentialsFolder = None) -> None:
    context.obj = server, credentials


@app.command()
def save(context: typer.Context) -> None:
    """Write the server's state now."""
    _send(context, kind="save")


@app.command()
def kick(context: typer.Context, worker: OneWorker, reason: Reason = "") -> None:
    """Remove a worker; it must be restarted to rejoin."""
    _send(context, kind="kick", worker_id=worker, reason=reason)


@app.command()
def pardon(context: typer.Context, worker: OneWorker, reason: Reason = "") -> None:
    """End a worker's quarantine and clear its offences."""
    _send(context, kind="pardon", worker_id=worker, reason=reason)


@app.command()
def release(context: typer.Context, worker: OneWorker, reason: Reason = "") -> None:
    """Forget the keys that a worker id belongs to: its key is lost, and the next start that brings one owns it."""
    _send(context, kind="release", worker_id=worker, reason=reason)


@app.command()
def forget(
    context: typer.Context,
    dataset: Annotated[str, typer.Argument(metavar="DATASET", help="Its name, as `outerstep data` shows it.")],
    reason: Reason = "",
) -> None:
    """Forget a leased dataset whose first description was wrong. The next worker that requests it describes it again,
    and its data begins at the start."""
    _send(context, kind="forget", dataset=dataset, reason=reason)


@app.command()
def drain(context: typer.Context, worker: Worker = None, reason: Reason = "") -> None:
    """Let a worker, or all, contribute what they have and leave."""
    _send(context, kind="drain", worker_id=worker, reason=reason)


@app.command()
def sync(context: typer.Context, worker: Worker = None, reason: Reason = "") -> None:
    """Let a worker, or all, contribute at their next step."""
    _send(context, kind="sync", worker_id=worker, reason=reason)


@app.command()
def lead(
    context: typer.Context,
    cluster: Annotated[str, typer.Argument(metavar="CLUSTER", help="Its name, as `outerstep status` shows it.")],
    member: Annotated[str, typer.Argument(metavar="MEMBER", help="The replica that is to speak for it.")],
    reason: Reason = "",
) -> None:
    """Let another replica lead a cluster that meets by torchft. Nothing is lost by it, and no round is."""
    _send(context, kind="lead", worker_id=cluster, leader=member, reason=reason)


@app.command()
def plan(
    context: typer.Context,
    sync_every: Annotated[int | None, typer.Option(min=1, help="H: local steps between two exchanges.")] = None,
    codec: Annotated[
        str | None, typer.Option(metavar="RECIPE", help="How contributions travel: fp32, bf16, int8, int4+feedback, …")
    ] = None,
    fragment_delay: Annotated[int | None, typer.Option(min=0, help="τ: steps until an agreement is adopted.")] = None,
    fragment_alpha: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="α: how much of the local copy is kept then.")
    ] = None,
    fragment_carry: Annotated[
        bool | None, typer.Option("--fragment-carry/--no-fragment-carry", help="Keep the steps taken in between.")
    ] = None,
) -> None:
    """Change the plan, from the next round on."""
    changes = {
        "sync_every": sync_every,
        "codec": codec,
        "delay": fragment_delay,
        "alpha": fragment_alpha,
        "carry": fragment_carry,
    }
    stated = {name: value for name, value in changes.items() if value is not None}
    if not stated:
        raise ConfigError(
            "nothing to change: pass --sync-every, --codec, --fragment-delay, --fragment-alpha or --fragment-carry"
        )
    _send(context, kind="plan", changes=stated)


@app.command()
def budget(
    context: typer.Context,
    tokens: Annotated[
        int, typer.Argument(min=0, help="The run ends when the model has been trained on this many tokens; 0 = no end.")
    ],
) -> None:
    """Change where the run ends."""
    _send(context, kind="budget", tokens=tokens)


@app.command()
def shutdown(context: typer.Context, reason: Reason = "") -> None:
    """Let all workers contribute and leave, save, stop the server."""
    _send(context, kind="shutdown", reason=reason)


def _send(context: typer.Context, **order: Any) -> None:
    """Validate the order as the server would, so that a typo fails without a connection, then send it."""
    try:
        message = msgspec.convert(order, Control)
    except msgspec.ValidationError as error:
        raise ConfigError(f"control {order['kind']}: {error}") from error
    server, credentials = context.obj
    transport = HttpTransport(server_address(server), timeout_s=TIMEOUT_S, credentials=credentials_folder(credentials))
    answer = transport.call(message)
    assert isinstance(answer, ControlAnswer)
    typer.echo(printable(answer.done))
