"""`outerstep data`: how far the leased data is, who trains it, and which samples are in the model by whom."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import typer
from msgspec import MsgspecError, convert, to_builtins
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table

from ..errors import ConfigError, TransportError
from ..events import DataLeased, UnitsDone, UnitsUnseen
from ..observe.quantities import counted, duration
from ..observe.status import DataStatus, PeerStatus, ServerStatus, read_status
from ..printable import printable
from ..ranges import NONE, Ranges
from ..types import Dataset
from ..wire.http_transport import HttpTransport
from .which_server import CredentialsFolder, ServerAddress, credentials_folder, server_address

COLUMNS = ("dataset", "epoch", "sample", "worker", "version")


def data(
    server: ServerAddress = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the server's answer as JSON.")] = False,
    export: Annotated[
        str | None,
        typer.Option(
            "--export",
            metavar="FILE",
            help="Write which sample came into the model by whom and in which version, as CSV. Needs --events, and no "
            "server if those are a server's.",
        ),
    ] = None,
    events: Annotated[
        list[str] | None,
        typer.Option(
            "--events",
            metavar="LOG",
            help="The file that --event-log wrote: the server's; or a peer's, and those of others that fill its gaps.",
        ),
    ] = None,
    credentials: CredentialsFolder = None,
) -> None:
    """Show the data that a run leases to its workers: what is done, leased, given back and lost."""
    if (export is None) != (not events):
        raise ConfigError("--export and --events belong together: --events is the file that --event-log wrote")
    if export is not None and events:
        logs = [Path(log) for log in events]
        known = [] if say_all(logs) else _ask_of_datasets(server, credentials)
        rows, nameless = write_export(Path(export), logs, known)
        typer.echo(f"{rows} samples in {export}")
        if nameless:
            typer.echo(
                f"of {nameless} of them these logs do not say by whom: the peers that wrote them were not there; "
                "give the logs of others, too (--events LOG --events LOG)"
            )
        return
    status = _ask(server, credentials)
    found = status.data
    if as_json:
        typer.echo(json.dumps(to_builtins(found), indent=2))
    else:
        clusters = status.clusters if isinstance(status, ServerStatus) else {}
        Console().print(render(found, {name: one.size for name, one in clusters.items() if one.members}))


def _ask_of_datasets(server: str | None, credentials: str | None) -> Sequence[DataStatus]:
    try:
        return _ask(server, credentials).data
    except TransportError as error:
        raise ConfigError(
            f"these logs do not say what the dataset is, and nobody else did ({error}); give the whole log of a server "
            "of this release, or do it while it, or a peer, is there (--server)"
        ) from error


def _ask(server: str | None, credentials: str | None) -> ServerStatus | PeerStatus:
    transport = HttpTransport(server_address(server), timeout_s=10.0, credentials=credentials_folder(credentials))
    return read_status(transport.status())


def render(found: Sequence[DataStatus], clusters: Mapping[str, int] = MappingProxyType({})) -> RenderableType:
    """`clusters`: how many members each of those workers has that are clusters."""
    if not found:
        return "this run leases no data (docs/concepts/data.md)"
    parts: list[RenderableType] = []
    for one in found:
        of = f" of {one.units} units ({one.done / one.units:.1%})" if one.units else " units, without an end"
        left_s = (one.units - one.done) / one.units_per_second if one.units and one.units_per_second else None
        end = f", about {duration(left_s)} left" if left_s else ""
        parts.append(f"[bold]{_escaped(one.name)}[/bold]: {one.done}{of} done{end}")
        parts.append(
            f"  {one.samples} samples in units of {one.unit_samples}, "
            f"{counted(one.epochs, 'epoch') if one.epochs else 'any number of epochs'}; "
            f"leased {one.leased}, given back {one.free}"
        )
        odd = {"lost": one.lost, "spent without counting": one.spent, "trained more than once": one.repeated}
        told = ", ".join(f"{what} {count}" for what, count in odd.items() if count)
        parts += [f"  [yellow]{told}[/yellow]"] if told else []
        if one.granted is not None:
            waits = f"; waiting for {_escaped(one.waiting_for)}" if one.waiting_for else ""
            parts.append(f"  leased from the layer above, and not done here: {one.granted}{waits}")
        table = Table("worker", "done", "leased")
        for name in sorted({*one.done_by, *one.leased_to}):
            size = f" (a cluster of {clusters[name]})" if name in clusters else ""
            table.add_row(_escaped(name) + size, str(one.done_by.get(name, 0)), str(one.leased_to.get(name, 0)))
        parts.append(table)
    return Group(*parts)


def say_all(logs: Sequence[Path]) -> bool:
    """Do these logs say what each dataset is of which they say more? A server's does, from its start on."""
    known: set[str] = set()
    for _, event in chain.from_iterable(_lines(log) for log in logs):
        if event.get("event") == DataLeased.kind:
            known.add(str(event.get("dataset")))
        elif event.get("event") in (UnitsDone.kind, UnitsUnseen.kind) and str(event.get("dataset")) not in known:
            return False
    return bool(known)


def write_export(target: Path, logs: Sequence[Path], found: Sequence[DataStatus]) -> tuple[int, int]:
    """How many rows; and how many of them without a worker. `found`: datasets of which the logs do not say what they
    are."""
    specs = {
        one.name: Dataset(
            name=one.name,
            samples=one.samples,
            unit_samples=one.unit_samples,
            epochs=one.epochs,
            seed=one.seed,
            shuffle=one.shuffle,
        )
        for one in found
    }
    rows = nameless = 0
    with target.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for row in _rows(logs, specs):
            writer.writerow(row)
            rows, nameless = rows + 1, nameless + (not row[-2])
    return rows, nameless


def _rows(logs: Sequence[Path], specs: dict[str, Dataset]) -> Iterator[tuple[Any, ...]]:
    """Each sample once by the same worker in the same version, however many logs say so."""
    from ..data.order import epoch_of, samples_of  # numpy: only where it is needed

    specs = dict(specs)
    told: dict[tuple[str, str, int], Ranges] = {}
    named: dict[str, Ranges] = {}
    unseen: dict[str, Ranges] = {}
    for name, worker, version, places in chain.from_iterable(_events(log, specs) for log in logs):
        if not worker:
            unseen[name] = unseen.get(name, NONE) | places
            continue
        known = told.get((name, worker, version), NONE)
        told[name, worker, version] = known | places
        named[name] = named.get(name, NONE) | places
        for place in (places - known).numbers():
            for sample in samples_of(specs[name], place):
                yield name, epoch_of(specs[name], place), sample, worker, version
    for name, places in unseen.items():
        for place in (places - named.get(name, NONE)).numbers():
            for sample in samples_of(specs[name], place):
                yield name, epoch_of(specs[name], place), sample, "", ""


def _lines(log: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Numbered events."""
    try:
        lines = log.read_text().splitlines()
    except OSError as error:
        raise ConfigError(f"the event log {log} cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        try:
            event = json.loads(line)
        except ValueError as error:
            raise _no_event(log, number, error) from error
        if not isinstance(event, dict):
            raise _no_event(log, number, f"it holds {type(event).__name__}")
        yield number, event


def _no_event(log: Path, number: int, why: object) -> ConfigError:
    return ConfigError(f"line {number} of {log} is no event: {why}")


def _events(log: Path, specs: dict[str, Dataset]) -> Iterator[tuple[str, str, int, Ranges]]:
    """Dataset, worker, version, places. Without a worker: this log does not know. (What it says a dataset is goes into
    `specs`: an operator may have let the run forget it, and the next one of this name is another.)"""
    for number, event in _lines(log):
        try:
            if event.get("event") == DataLeased.kind:
                facts = {name: event[name] for name in ("samples", "unit_samples", "epochs", "seed", "shuffle")}
                specs[str(event["dataset"])] = convert({"name": event["dataset"], **facts}, Dataset)
            if event.get("event") not in (UnitsDone.kind, UnitsUnseen.kind):
                continue
            name, places = str(event["dataset"]), Ranges(event["places"])
            is_named = event["event"] == UnitsDone.kind
            worker, version = (str(event["worker"]), int(event["version"])) if is_named else ("", 0)
        except (MsgspecError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise _no_event(log, number, error) from error
        if name not in specs:
            raise ConfigError(f"line {number} of {log} is about {name!r}, which this run does not lease")
        yield name, worker, version, places


def _escaped(text: str) -> str:
    return escape(printable(text))
