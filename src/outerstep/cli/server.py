"""`outerstep server`: hold the global model and take contributions."""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape

from ..config import (
    SERVER,
    SHIPPED,
    ServerCommand,
    ServerConfig,
    Sourced,
    make_command,
    make_config,
    naming_sources,
    values_of,
    warnings_about,
)
from ..durable.run_folder import DEFAULT_PLACE, RUN_FILE
from ..errors import ConfigError
from ..observe.log_lines import PrintableFormatter
from ..security import Credentials, is_loopback, redact
from .options import Found, takes_settings
from .stopping import Stopping

if TYPE_CHECKING:
    from torch import Tensor

    from ..server import DiLoCoServer

log = logging.getLogger(__name__)

RESUME_HERE = "save_dir"  # what --resume means by itself


@takes_settings(SERVER)
def server(found: Found) -> None:
    """Hold the global model and take the workers' contributions.

    It needs no GPU. Start it on a machine that all workers can reach, then start the workers. Ctrl-C or SIGTERM stop it
    when what was decided is finished and saved (exit code 0); a second Ctrl-C at once (130).
    Every flag can also be an environment variable or a line in outerstep.toml:
    [bold]outerstep config show server[/bold] says what holds and why.
    """
    found = with_run_folder(found)
    command: ServerCommand = make_command(SERVER, found)
    found = inside_a_cluster(found, command)
    config: ServerConfig = make_config(SERVER, found)
    has_run = config.save_dir is not None and (Path(config.save_dir) / RUN_FILE).is_file()
    if command.model is None and config.resume is None and not has_run:
        raise ConfigError("no model to train: give -m MODEL_DIR, or --resume with a saved state")
    console = Console(stderr=True)
    _show_log(console)
    for warning in warnings_about(SERVER, found):
        log.warning("%s", warning)
    with Stopping() as stopping:
        made = _make(found, config, command)
        stopping.gently(made.request_stop)
        try:
            _serve(made, config, command, console)
        finally:
            made.stop()
    _check_end(made)


def _check_end(made: DiLoCoServer) -> None:
    """A server that stopped with something left undone says so by its exit code too."""
    status = made.status()
    saved = str(status["last_save"])
    if status["failure"] or saved.startswith("failed"):
        _say(f"error: {status['failure'] or f'the last save {saved}'}")
        raise typer.Exit(1)


def with_run_folder(found: Found) -> Found:
    """What is said, with the folder that a run is kept in unless somebody says otherwise; `--resume` by itself means
    that one."""
    place, resume = found["save_dir"], found["resume"]
    if not place.is_said and found["durability"].value != "none":
        place = Sourced(DEFAULT_PLACE, place.source)
    if resume.value == RESUME_HERE:
        if place.value is None:
            raise ConfigError("--resume without a value resumes the run in save_dir, and there is none: name the state")
        resume = Sourced(place.value, resume.source)
    return {**found, "save_dir": place, "resume": resume}


def spelled_out(arguments: Sequence[str]) -> list[str]:
    """`--resume` may stand by itself, which the parser of flags cannot be told."""
    ends = [*arguments[1:], "-"]
    return [
        f"{argument}={RESUME_HERE}" if argument == "--resume" and after.startswith("-") else argument
        for argument, after in zip(arguments, ends, strict=True)
    ]


def inside_a_cluster(found: Found, command: ServerCommand) -> Found:
    """Under another layer a cluster averages, unless somebody says otherwise: momentum belongs to one level
    (docs/concepts/hierarchy.md#measured)."""
    if command.above is None:
        return found
    if found["compat_port"].value is not None:
        raise ConfigError(
            "above and compat_port do not go together: what is trained must be known before a cluster joins, and the "
            "older protocol's clients do not say it; leave one of the two out"
        )
    lr, momentum, named = found["outer_lr"], found["outer_momentum"], found["outer_optimizer"].value
    if named != SHIPPED and not command.inner_momentum:
        raise ConfigError(
            f"outer_optimizer must be {SHIPPED} in a cluster, got {named!r}: it may have momentum, and the layer above "
            "has some; leave it out, or say --inner-momentum if the run above has none"
        )
    if named != SHIPPED:
        return found
    if momentum.is_said and momentum.value and not command.inner_momentum:
        raise ConfigError(
            f"outer_momentum must be 0 in a cluster, got {momentum.value:g}: with momentum in the layer above, too, "
            "the model is ruined; leave it out, or say --inner-momentum if the run above has none"
        )
    return {
        **found,
        "outer_lr": lr if lr.is_said else Sourced(1.0, lr.source),
        "outer_momentum": momentum if momentum.is_said else Sourced(0.0, momentum.source),
    }


def _serve(made: DiLoCoServer, config: ServerConfig, command: ServerCommand, console: Console) -> None:
    made.start()
    what, then = str(command.model), f"the first round waits for {_workers(config.num_workers)} (-n)"
    later = f"A round goes on with the workers that are alive, at least {config.rules.floor} ({config.rules.floor_is})"
    if made.is_resumed:
        what, then = config.resume or str(config.save_dir), f"resuming at round {made.sync_round}"
    elif config.async_mode:
        then = "waiting for workers"
    if config.async_mode:
        later = "Each contribution is a round of its own (--async)"
    _tell(console, f"[bold]{escape(what)}[/bold] on [bold]{escape(made.address)}[/bold], {then}. {later}.")
    if config.insecure:
        _say(f"On each worker:\n\n    outerstep worker --server http://{made.address} -- python train.py\n")
    else:
        _invite(made, config)
    with contextlib.ExitStack() as around:
        if config.compat_port is not None:
            from ..compat import CompatServer

            compat = around.enter_context(CompatServer(made, config.compat_port, config.compat_host))
            _tell(console, f"The older protocol on [bold]{escape(compat.address)}[/bold].\n")
        if command.above is not None:
            from ..hierarchy import Cluster

            name = command.cluster or socket.gethostname()
            _tell(console, f"Cluster [bold]{escape(name)}[/bold] of {escape(redact(command.above))}.\n")
            above = Cluster(
                made,
                command.above,
                name,
                every=command.above_every,
                wait_s=command.above_wait_s,
                credentials=config.credentials,
            )
            around.enter_context(above)
        made.wait()


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"


def _invite(made: DiLoCoServer, config: ServerConfig) -> None:
    """What to type on each worker. The join string is for the operator's eyes: a terminal shows it, anything else may
    become a log file, and is told where it lies."""
    access = made.access
    file = Credentials(config.credentials).write_join_file(access)
    alone = " (Only this machine can reach it: --host 0.0.0.0 lets others in.)" if is_loopback(access.host) else ""
    _say(f"On each worker:{alone}\n\n    outerstep worker --server {access.address} -- python train.py\n")
    if sys.stderr.isatty():
        _say(f"On another machine first, once: `outerstep join`, and paste this line:\n\n{access.join_string}\n")
    else:
        _say(f"On another machine first, once: `outerstep join -`, and send it the line in {file}")


def _tell(console: Console, text: str) -> None:
    """If nobody reads it, or the disk under a log file is full, that is no reason to stop."""
    with contextlib.suppress(OSError, SystemExit):  # rich would end the program
        console.print(text, highlight=False)


def _say(text: str) -> None:
    """Not through rich, which would break a long line in two."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _make(found: Found, config: ServerConfig, command: ServerCommand) -> DiLoCoServer:
    from ..server import DiLoCoServer

    settings = values_of(config)
    settings |= {"compat_port": None, "compat_host": None}  # opened here, around the server
    state, folder = _load(command.model, checkpoint=command.from_checkpoint)
    if settings["model_files"] is None and folder is not None:
        settings["model_files"] = str(folder)
    if ":" in config.outer_optimizer:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` would: the user's module may lie here
    with naming_sources(found):
        return DiLoCoServer(state, **settings)


def _load(model: str | None, *, checkpoint: bool) -> tuple[dict[str, Tensor] | None, Path | None]:
    """The weights, and the folder that their configuration lies in. Nothing where --resume brings them."""
    from .. import model_folder

    if model is None:
        return None, None
    if checkpoint:
        return model_folder.load_checkpoint(model)
    folder = Path(model)
    return model_folder.load_state_dict(folder), folder if folder.is_dir() else folder.parent


def _show_log(console: Console) -> None:
    if console.is_terminal:
        handler: logging.Handler = RichHandler(console=console, show_path=False)
        handler.setFormatter(PrintableFormatter("%(message)s"))
    else:  # a file: one line per event
        handler = logging.StreamHandler()
        handler.setFormatter(PrintableFormatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
