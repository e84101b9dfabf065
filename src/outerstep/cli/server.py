"""`outerstep server`: hold the global model and take contributions."""

from __future__ import annotations

import contextlib
import gc
import logging
import socket
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from ..config import (
    SERVER,
    SHIPPED,
    ServerCommand,
    ServerConfig,
    Sourced,
    check_momentum_inside,
    make_command,
    make_config,
    naming_sources,
    values_of,
    warnings_about,
)
from ..defaults import OUTER_PATIENCE
from ..durable.run_folder import DEFAULT_PLACE, RUN_FILE
from ..errors import ConfigError
from ..security import Credentials, is_loopback, redact
from .options import Found, takes_settings
from .stopping import Stopping

if TYPE_CHECKING:
    from torch import Tensor

    from ..server import DiLoCoServer

log = logging.getLogger(__name__)

RESUME_HERE = "save_dir"  # what --resume means by itself


@takes_settings(SERVER, example="outerstep server -m MODEL_DIR -n 2 --host 0.0.0.0")
def server(found: Found) -> None:
    """Hold the global model and take the workers' contributions.

    It needs no GPU. Start it on a machine that all workers can reach, then start the workers. Ctrl-C or SIGTERM
    stops it once every decided round is finished and saved (exit code 0); a second Ctrl-C stops it at once (130).
    Every flag can also be an environment variable or a line in outerstep.toml:
    [bold]outerstep config show server[/bold] shows the value in force and where it comes from.
    """
    found = with_run_folder(found)
    command: ServerCommand = make_command(SERVER, found)
    found = inside_a_cluster(found, command)
    config: ServerConfig = make_config(SERVER, found)
    has_run = config.save_dir is not None and (Path(config.save_dir) / RUN_FILE).is_file()
    if command.model is None and config.resume is None and not has_run:
        raise ConfigError("no model to train: give -m MODEL_DIR, or --resume with a saved state")
    console = None if command.log_json else Console(stderr=True)
    show_log(as_json=command.log_json)
    for warning in warnings_about(SERVER, found):
        log.warning("%s", warning)
    with Stopping(partial(say, as_json=command.log_json)) as stopping:
        made = make_server(found, config, command)
        if command.above is not None:
            made.expect_layer_above()
        stopping.gently(made.request_stop)
        try:
            _serve(made, config, command, console)
        finally:
            made.stop()
    _check_end(made, as_json=command.log_json)


def _check_end(made: DiLoCoServer, *, as_json: bool) -> None:
    """A server that stopped with something left undone says so by its exit code too."""
    status = made.status()
    saved = str(status["last_save"])
    if status["failure"] or saved.startswith("failed"):
        say(f"error: {status['failure'] or f'the last save {saved}'}", as_json=as_json)
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
    """Under another layer a cluster averages, and gives a silent worker up before that layer gives up the cluster,
    unless somebody says otherwise (coordination/layers/between.py)."""
    if command.above is None:
        return found
    if found["compat_port"].value is not None:
        raise ConfigError(
            "above and compat_port do not go together: what is trained must be known before a cluster joins, and the "
            "older protocol's clients do not say it; leave one of the two out"
        )
    usual = {"heartbeat_timeout_s": found["heartbeat_timeout_s"].value / OUTER_PATIENCE}
    usual |= {"outer_lr": 1.0, "outer_momentum": 0.0} if found["outer_optimizer"].value == SHIPPED else {}
    inside = {name: Sourced(value, found[name].source) for name, value in usual.items() if not found[name].is_said}
    found = {**found, **inside}
    check_momentum_inside(make_config(SERVER, found), insists=command.inner_momentum)
    return found


def _serve(made: DiLoCoServer, config: ServerConfig, command: ServerCommand, console: Console | None) -> None:
    gc.collect()
    gc.freeze()  # what was imported lives as long as this process: to look through it stops every thread for a while
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
        line = f"outerstep worker --server http://{made.address} -- python train.py"
        say(f"On each worker:\n\n    {line}\n", as_json=command.log_json)
    else:
        _invite(made, config, as_json=command.log_json)
    if config.page:
        say(page_line(made, config, as_json=command.log_json), as_json=command.log_json)
    from .countdown import Countdown

    with contextlib.ExitStack() as around:
        around.enter_context(Countdown(made.silence))
        if config.compat_port is not None:
            from ..compat import CompatServer

            compat = around.enter_context(CompatServer(made, config.compat_port, config.compat_host))
            _tell(console, f"The older protocol on [bold]{escape(compat.address)}[/bold].\n")
        if command.above is not None:
            from ..hierarchy import Cluster
            from ..hierarchy.ways_up import addresses

            name = command.cluster or socket.gethostname()
            _tell(console, f"Cluster [bold]{escape(name)}[/bold] of {escape(redact(command.above))}.\n")
            above = Cluster(
                made,
                command.above,
                name,
                every=command.above_every,
                wait_s=command.above_wait_s,
                via=addresses(command.via),
                relay=command.relay,
                inner_momentum=command.inner_momentum,
                credentials=config.credentials,
            )
            around.enter_context(above)
        made.wait()


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"


def _invite(made: DiLoCoServer, config: ServerConfig, *, as_json: bool) -> None:
    """What to type on each worker. The join string is for the operator's eyes: a terminal shows it, anything else may
    become a log file, and is told where it lies."""
    access = made.access
    file = Credentials(config.credentials).write_join_file(access)
    alone = " (Only this machine can reach it: --host 0.0.0.0 lets others in.)" if is_loopback(access.host) else ""
    line = f"outerstep worker --server {access.address} -- python train.py"
    say(f"On each worker:{alone}\n\n    {line}\n", as_json=as_json)
    if sys.stderr.isatty() and not as_json:
        say(f"On another machine first, once: `outerstep join`, and paste this line:\n\n{access.join_string}\n")
    else:
        say(f"On another machine first, once: `outerstep join -`, and send it the line in {file}", as_json=as_json)


def page_line(made: DiLoCoServer, config: ServerConfig, *, as_json: bool) -> str:
    """Where the page is. A link logs whoever opens it in, so a log file is told how to get one instead."""
    if config.insecure:
        return f"In a browser: {made.page_link()}"
    if sys.stderr.isatty() and not as_json:
        link = made.page_link()
        return f"In a browser, once and within 15 minutes (`outerstep page` prints another):\n\n    {link}\n"
    return f"In a browser: `outerstep page --server {made.access.address}` prints a link."


def _tell(console: Console | None, text: str) -> None:
    """If nobody reads it, or the disk under a log file is full, that is no reason to stop. None: the log is JSON."""
    if console is None:
        say(Text.from_markup(text).plain, as_json=True)
        return
    with contextlib.suppress(OSError, SystemExit):  # rich would end the program
        console.print(text, highlight=False)


def say(text: str, *, as_json: bool = False) -> None:
    """Not through rich, which would break a long line in two."""
    if as_json:
        log.info("%s", " ".join(text.split()))
        return
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def make_server(found: Found, config: ServerConfig, command: ServerCommand) -> DiLoCoServer:
    from ..server import DiLoCoServer

    settings = values_of(config)
    settings |= {"compat_port": None, "compat_host": None}  # opened here, around the server
    state, folder = _load(command.model, checkpoint=command.from_checkpoint)
    if settings["model_files"] is None and folder is not None:
        settings["model_files"] = str(folder)
    if ":" in config.outer_optimizer or config.policy is not None:
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


def show_log(*, as_json: bool) -> None:
    from ..observe.terminal import level_for, make_handler

    handler = make_handler(as_json=as_json, plain="%(asctime)s %(levelname)s %(message)s")
    logging.basicConfig(level=level_for(handler), handlers=[handler])
    if as_json:
        logging.captureWarnings(True)  # so that they are lines of JSON, too
