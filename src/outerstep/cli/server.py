"""`outerstep server`: hold the global model and take contributions."""

from __future__ import annotations

import logging
import signal
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.logging import RichHandler

from ..config import DEFAULT_HOST, DEFAULT_PORT


def server(
    model: Annotated[
        Path,
        typer.Option(
            "-m",
            "--model",
            help="Folder with model.safetensors (or shards and their index); "
            "outerstep.save_model(model, folder) writes one.",
        ),
    ],
    num_workers: Annotated[int, typer.Option("-n", "--num-workers", help="Workers that the first round waits for.")],
    port: Annotated[int, typer.Option(help="Port to listen on; 0 = any free one.")] = DEFAULT_PORT,
    host: Annotated[
        str,
        typer.Option(
            help="Address to listen on. There is no authentication yet: other than 127.0.0.1 only "
            "on a network you trust."
        ),
    ] = DEFAULT_HOST,
    sync_every: Annotated[
        int | None, typer.Option(help="H: local steps between exchanges. Left out: the first worker's, else 500.")
    ] = None,
    fragments: Annotated[
        int | None,
        typer.Option("--fragments", "--num-fragments", help="Exchange the model in so many pieces. Left out: 1."),
    ] = None,
    codec: Annotated[str | None, typer.Option(help="How contributions travel: bf16 (default) or fp32.")] = None,
    fragment_strategy: Annotated[
        str,
        typer.Option(
            help="contiguous: neighbouring layers together; strided: layer i in fragment i mod P; "
            "counted: equally many tensors each, as clients of the older protocol do."
        ),
    ] = "contiguous",
    embeddings_apart: Annotated[bool, typer.Option(help="Give the embedding tables a fragment of their own.")] = False,
    min_workers: Annotated[int, typer.Option(help="No round closes with fewer contributions.")] = 1,
    heartbeat_timeout: Annotated[
        float, typer.Option(help="Seconds of silence until a worker counts as dead; 0 = never.")
    ] = 120.0,
    round_deadline: Annotated[
        float | None,
        typer.Option(help="Close a round so many seconds after its first contribution. Left out: wait for all alive."),
    ] = None,
    start_deadline: Annotated[
        float | None, typer.Option(help="Start without the missing workers after so many seconds. Left out: wait.")
    ] = None,
    outer_lr: Annotated[float, typer.Option(help="η of the outer step.")] = 0.7,
    outer_momentum: Annotated[float, typer.Option(help="μ of the outer step.")] = 0.9,
    nesterov: Annotated[bool, typer.Option("--nesterov/--no-nesterov", help="Nesterov or plain momentum.")] = True,
) -> None:
    """Hold the global model and take the workers' contributions.

    It needs no GPU. Start it on a machine that all workers can reach, then start the workers; stop it with Ctrl-C.
    """
    console = Console(stderr=True)
    if console.is_terminal:
        handler = RichHandler(console=console, show_path=False)
        logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[handler])
    else:  # a file: one line per event
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    from ..model_folder import load_state_dict
    from ..server import DiLoCoServer

    made = DiLoCoServer(
        load_state_dict(model),
        num_workers,
        port=port,
        host=host,
        sync_every=sync_every,
        num_fragments=fragments,
        codec=codec,
        fragment_strategy=fragment_strategy,
        embeddings_apart=embeddings_apart,
        min_workers=min_workers,
        heartbeat_timeout=heartbeat_timeout,
        round_deadline_s=round_deadline,
        start_deadline_s=start_deadline,
        outer_lr=outer_lr,
        outer_momentum=outer_momentum,
        nesterov=nesterov,
    )
    signal.signal(signal.SIGTERM, lambda *_: made.request_stop())
    made.start()
    port_now = made.address.rsplit(":", 1)[1]
    reach = f"ADDRESS-OF-THIS-MACHINE:{port_now}" if host in ("0.0.0.0", "::") else made.address
    console.print(
        f"[bold]{model}[/bold] on [bold]{made.address}[/bold], waiting for {num_workers} worker(s). On each:\n\n"
        f"    outerstep worker --server {reach} -- python train.py\n",
        highlight=False,
    )
    made.run()
