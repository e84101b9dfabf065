"""`outerstep run --join LINE -- COMMAND`: join the run of the first PC, and become the training script."""

from __future__ import annotations

import sys
import time

import typer

from ..config import WORKER, Sourced, WorkerConfig, make_config, resolve
from ..errors import ConfigError, ServerUnreachable
from ..security import Credentials, is_join_string, mended, parse_address, parse_join_string
from .join import LONGEST_CHARS
from .reaching import check_server, way_to
from .worker import become, script_environment
from .worker_names import take_name

WAIT_S = 600.0  # for the first PC
ASK_EVERY_S = 2.0
NOBODY = ": is `outerstep run` running there, and does its firewall let this port in?"


def join_run(line: str, command: list[str], program: str, worker_id: str | None, config_file: str | None) -> None:
    """Does not return: this process becomes the script."""
    server = _read(line)
    said = {"server_addr": Sourced(server, "flag --join")}
    if worker_id is not None:
        said["worker_id"] = Sourced(worker_id, "flag --worker-id")
    found = resolve(WORKER, said, file=config_file)
    config: WorkerConfig = make_config(WORKER, found)
    if config.worker_id is None:
        said["worker_id"] = Sourced(take_name(config.credentials, keep=True), "`outerstep run`")
        found = resolve(WORKER, said, file=config_file)
        config = make_config(WORKER, found)
    assert config.worker_id is not None
    _await_server(server, config.credentials, config.worker_id)
    reached = way_to(server, config.credentials)
    if is_join_string(server):
        known = parse_join_string(server).at(*parse_address(reached))
        Credentials(config.credentials).remember(known)
        found = {**found, "server_addr": Sourced(known.join_string, "flag --join")}
    typer.secho(f"{reached}: joining as {config.worker_id}", err=True)
    become(program, command, script_environment(found, config_file), place=reached)


def _read(line: str) -> str:
    """A join string, or the address of a server that is known here."""
    text = sys.stdin.read(LONGEST_CHARS) if line.strip() == "-" else line
    mend = mended(text)
    if is_join_string(mend):
        return parse_join_string(mend).join_string
    if not mend:
        raise ConfigError(
            '--join is empty: paste the line that `outerstep run` printed on the first PC, "outerstep://…"'
        )
    parse_address(mend)
    return mend


def _await_server(server: str, credentials: str | None, worker_id: str) -> None:
    """Until the run takes workers: the second PC may be started first. What no waiting mends is raised at once."""
    said, give_up_at = "", time.monotonic() + WAIT_S
    while silence := check_server(server, credentials, worker_id):
        if time.monotonic() > give_up_at:
            raise ServerUnreachable(f"{silence}. Given up after {WAIT_S:g} s; the same command tries again")
        if silence != said:
            doubt = NOBODY if silence.startswith("no answer") else ""
            typer.secho(f"{silence}. Waiting up to {WAIT_S:g} s for the first PC{doubt}", fg="yellow", err=True)
            said = silence
        time.sleep(ASK_EVERY_S)
