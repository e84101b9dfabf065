"""`outerstep export`: the newest agreed model as a folder of its own."""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from ..errors import ConfigError, ModelError, NotFound
from ..observe.quantities import size
from ..printable import printable
from ..wire.http_transport import HttpTransport
from .status import count
from .which_server import CredentialsFolder, ServerAddress, credentials_folder, server_address

if TYPE_CHECKING:
    import torch

DTYPES = {
    **dict.fromkeys(("float32", "fp32"), "float32"),
    **dict.fromkeys(("bfloat16", "bf16"), "bfloat16"),
    **dict.fromkeys(("float16", "fp16"), "float16"),
}
TIMEOUT_S = 60.0


def export(
    folder: Annotated[str, typer.Argument(metavar="MODEL_DIR", help="The folder to write.")],
    server: ServerAddress = None,
    run: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="RUN_DIR",
            help="Read a run's folder (outerstep-run) or one of its states, instead of asking a server.",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            metavar="DTYPE",
            help="float32, bfloat16 or float16, for all weights. [dim]Default: as the workers' model has them.[/dim]",
        ),
    ] = None,
    model_files: Annotated[
        str | None,
        typer.Option(
            "--model-files",
            metavar="DIR",
            help="Take configuration and tokenizer from here. [dim]Default: what lies beside the run's model.[/dim]",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the model that is in MODEL_DIR.")] = False,
    credentials: CredentialsFolder = None,
) -> None:
    """Write the newest agreed model as a folder that from_pretrained loads.

    From a running server, with a token that may read: nobody is registered, and no round waits. Or, with
    [bold]--from[/bold], from the folder of a run, whether its server is running or not: its newest state, and the
    rounds in the journal after it.
    """
    if run is not None and server is not None:
        raise ConfigError(f"one source at a time: --server {server} or --from {run}")
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"--dtype must be float32, bfloat16 or float16, got {dtype!r}")
    if model_files is not None and not Path(model_files).is_dir():
        raise ConfigError(f"--model-files {model_files!r} must be a folder")
    from ..server.saved.export import check_target, how_to_load, new_folder, restate_dtype
    from ..server.saved.folder import copy_model_files

    target = Path(folder)
    check_target(target, force=force)
    with new_folder(target, force=force) as place:
        if model_files is not None:
            copy_model_files(Path(model_files), place)
        chosen = _torch_dtype(dtype)
        if run is not None:
            told = _from_folder(Path(run), place, chosen)
        else:
            address, known = server_address(server), credentials_folder(credentials)
            told = _from_server(HttpTransport(address, timeout_s=TIMEOUT_S, credentials=known), place, chosen)
        if chosen is not None:
            restate_dtype(place, chosen)
    typer.echo(printable(f"{folder}: {told}; {how_to_load(target)}"))
    if not (target / "config.json").is_file():
        typer.echo("it has no config.json, which from_pretrained needs: --model-files DIR brings one", err=True)


def _torch_dtype(name: str | None) -> torch.dtype | None:
    import torch

    return None if name is None else getattr(torch, DTYPES[name])


def _from_folder(run: Path, place: Path, dtype: torch.dtype | None) -> str:
    from ..model_folder import STATE, WEIGHTS, without_ties
    from ..server.resuming import newest_state
    from ..server.saved import has_states, load_state
    from ..server.saved.export import all_floats, write_weights
    from ..server.saved.folder import as_dtypes, copy_model_files, kept_dtypes
    from ..server.server import optimizer_of_settings

    if not (run / STATE).is_file() and not has_states(run):
        raise ModelError(f"{run} holds no run: it must be a server's save_dir (outerstep-run), or one state in it")
    state = load_state(run) if (run / STATE).is_file() else newest_state(run, optimizer_of_settings)
    tensors, tied = without_ties({**state.params, **state.rest})
    dtypes = all_floats(tensors, dtype) if dtype is not None else as_dtypes(kept_dtypes(state.manifest))
    aliases = {**tied, **(state.manifest.aliases if state.manifest else {})}
    write_weights(place / WEIGHTS, tensors, aliases, dtypes)
    if state.place is not None:
        copy_model_files(state.place, place)
    return _told(state.run_id, state.round, sum(t.numel() for t in tensors.values()), place / WEIGHTS)


def _from_server(transport: HttpTransport, place: Path, dtype: torch.dtype | None) -> str:
    """Straight into a file: the model need not fit into this machine's memory, unless it is converted."""
    from ..model_folder import WEIGHTS
    from ..server.saved.export import all_floats, write_weights
    from ..server.saved.folder import as_dtypes
    from ..topology.server.reading import read_files, read_model

    arriving = place / f".{WEIGHTS}.arriving"
    with _bar() as progress:
        try:
            model = read_model(transport, make_room=lambda size_bytes: _room(arriving, size_bytes), progress=progress)
        except NotFound as error:
            raise ConfigError(
                f"{transport.address} does not give out its model ({error.message}): is it a server, of 0.3 or later?"
            ) from error
    assert model is not None
    facts = model.header.facts
    tensors = model.stored()
    dtypes = all_floats(tensors, dtype) if dtype is not None else as_dtypes(facts.dtypes)
    dtypes = {name: wanted for name, wanted in dtypes.items() if name in tensors and tensors[name].dtype != wanted}
    if dtypes:
        write_weights(place / WEIGHTS, tensors, facts.aliases, dtypes)
        arriving.unlink()
    else:
        os.rename(arriving, place / WEIGHTS)
    for name, data in read_files(transport).items():
        if not (place / name).exists():
            (place / name).write_bytes(data)
    return _told(facts.run_id, facts.round, sum(t.numel() for t in tensors.values()), place / WEIGHTS)


def _room(file: Path, size_bytes: int) -> memoryview:
    """A file of that size, in memory as it is written. The disk must have room for it now: later there would be no way
    to say that it has not."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
        return memoryview(mmap.mmap(descriptor, size_bytes))
    except OSError as error:
        raise ModelError(f"there is no room for the model's {size(size_bytes)} in {file.parent}: {error}") from error
    finally:
        os.close(descriptor)


@contextmanager
def _bar() -> Iterator[Callable[[int, int], None]]:
    console = Console(stderr=True)
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    columns = (TextColumn("the model"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("model")
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _told(run_id: str, round_: int, values: int, file: Path) -> str:
    return f"round {round_} of run {run_id}, {count(values)} parameters, {size(file.stat().st_size)}"
