"""Where `outerstep plan` has its numbers from: a TOML file, or a server that has measured them."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final, TypeVar

from ..coordination.autoconfig.meter import SMALLEST_BYTES
from ..coordination.planning import Choice, PlannedSite
from ..errors import ConfigError
from ..observe.status import PeerStatus, ServerStatus
from ..types import THE_SERVER
from . import units

SITE_KEYS: Final = frozenset({"name", "workers", "link", "up", "down", "latency", "step_time"})
KEYS: Final = frozenset(
    {"params", "dtype", "target", "server_link", "lan", "failures_per_hour", "restart_after"} | SITE_KEYS | {"sites"}
)
MOST_FILE_BYTES: Final = 1 << 20
COMMAND_LINE: Final = "the command line"
FLAGS: Final = {"up": "--link-up", "down": "--link-down"}  # the others are called as the keys of a file
T = TypeVar("T")


@dataclass(frozen=True)
class Source:
    """What was found; None = it says nothing of it. `now`: the setting in force, of a server that runs."""

    parameters: int | None = None
    sites: tuple[PlannedSite, ...] = ()
    dtype: str | None = None
    target: float | None = None
    server_bytes_per_s: float | None = None
    local_bytes_per_s: float | None = None
    failures_per_hour: float | None = None
    restart_s: float | None = None
    now: Choice | None = None
    assumed: tuple[str, ...] = ()
    is_measured: bool = False


# --- a file -----------------------------------------------------------------------------------------------------------


def from_file(name: str, otherwise: Mapping[str, Any]) -> Source:
    """`otherwise`: by key of a site, what the command line says; the file's own table wins, its top level too."""
    said = read_toml(name, otherwise="docs/operating/planning.md shows one")
    check_keys(said, KEYS, name)
    tables = said.pop("sites", None)
    if not isinstance(tables, list) or not tables or not all(isinstance(each, dict) for each in tables):
        raise ConfigError(f"{name} must have at least one table [[sites]]")
    common = {**otherwise, **{key: value for key, value in said.items() if key in SITE_KEYS}}
    sites = []
    for number, table in enumerate(tables, 1):
        check_keys(table, SITE_KEYS, f"{name}, site {number}")
        sites.append(site({"name": f"site{number}", **common, **table}, f"{name}, site {number}"))
    return Source(
        parameters=_read(said, "params", units.parameters, name),
        sites=tuple(sites),
        dtype=_text(said, "dtype", name),
        target=_read(said, "target", units.share, name),
        server_bytes_per_s=_read(said, "server_link", units.rate, name),
        local_bytes_per_s=_read(said, "lan", units.rate, name),
        failures_per_hour=_read(said, "failures_per_hour", partial(units.share, zero=True), name),
        restart_s=_read(said, "restart_after", units.seconds, name),
    )


def site(said: Mapping[str, Any], where: str) -> PlannedSite:
    """From `link` or `up` and `down`, `latency`, `step_time` and `workers`."""
    up, down = (_read(said, key, units.rate, where) or _read(said, "link", units.rate, where) for key in ("up", "down"))
    step_s = _read(said, "step_time", units.seconds, where)
    if up is None or down is None:
        raise ConfigError(f"{where}: a site must have a link: link, or up and down; e.g. 200mbit")
    if step_s is None:
        raise ConfigError(f"{where}: a site must have a step_time, e.g. 3s")
    if not step_s:
        raise ConfigError(f"{_called(where, 'step_time')} must be above 0, got {said['step_time']!r}; e.g. 3s")
    workers = said.get("workers", 1)
    if not isinstance(workers, int) or isinstance(workers, bool) or workers < 1:
        raise ConfigError(f"{where}: workers must be a whole number from 1 up, got {workers!r}")
    latency_s = _read(said, "latency", units.seconds, where) or 0.0
    return PlannedSite(str(said["name"]), up, down, latency_s, step_s, workers)


def check_keys(said: Mapping[str, Any], known: frozenset[str], where: str) -> None:
    if unknown := sorted(said.keys() - known):
        near = difflib.get_close_matches(unknown[0], known, n=1)
        meant = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"{where}: {unknown[0]!r} is not known; {meant}known: {', '.join(sorted(known))}")


def read_toml(name: str, *, otherwise: str) -> dict[str, Any]:
    """`otherwise`: what to do if there is no such file."""
    path = Path(name)
    try:
        if path.stat().st_size > MOST_FILE_BYTES:
            raise ConfigError(f"{name} must be a TOML file of at most {MOST_FILE_BYTES >> 20} MiB")
        return tomllib.loads(path.read_text())
    except FileNotFoundError as error:
        raise ConfigError(f"there is no file {name}; {otherwise}") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{name} cannot be read as TOML: {error}") from error


def _text(said: Mapping[str, Any], key: str, where: str) -> str | None:
    value = said.get(key)
    if value is not None and not isinstance(value, str):
        raise ConfigError(f'{where}: {key} must be text with a unit, e.g. "200mbit", got {value!r}')
    return value


def _read(said: Mapping[str, Any], key: str, read: Callable[[str, str], T], where: str) -> T | None:
    text = _text(said, key, where)
    return None if text is None else read(text, _called(where, key))


def _called(where: str, key: str) -> str:
    """What the user would change."""
    return FLAGS.get(key, f"--{key.replace('_', '-')}") if where == COMMAND_LINE else f"{where}: {key}"


# --- a server ---------------------------------------------------------------------------------------------------------


def from_status(status: ServerStatus | PeerStatus, address: str) -> Source:
    """A site for each worker, with the links and the speed that were measured. Of what is missing the median counts."""
    if isinstance(status, PeerStatus):
        raise ConfigError(f"{address} is a peer, and measures no links; give --params, --sites and the rest instead")
    if not status.num_parameters:
        raise ConfigError(f"{address} has no model yet; ask again when the first worker has joined")
    steps = {
        name: known.step_s
        for name, known in status.clusters.items()
        if known.step_s is not None and known.step_s > 0.0 and name in status.workers
    }
    for name, worker in status.workers.items():
        if worker.steps_per_second:
            steps.setdefault(name, 1.0 / worker.steps_per_second)
    best = sorted(
        status.links, key=lambda one: (one.measured_by == one.target, -one.age_s)
    )  # who receives measures best
    links = {(one.source, one.target): one.bytes_per_s for one in best}
    latency_s = {(one.source, one.target): one.latency_s for one in best}
    up = {source: rate for (source, target), rate in links.items() if target == THE_SERVER}
    down = {target: rate for (source, target), rate in links.items() if source == THE_SERVER}
    measured = sorted(steps.keys() & (up.keys() | down.keys()) & status.workers.keys())
    if not measured:
        raise ConfigError(
            f"{address} must have measured the speed and the link of one worker at least, and has not; ask again after "
            f"the first rounds. A link is measured by pieces of {SMALLEST_BYTES >> 10} KiB and more: for a smaller "
            "model take the rates that outerstep doctor measures, and give them with --link-up and --link-down"
        )
    usual_s = median(steps[name] for name in measured)
    usual_up, usual_down = (
        median(rates[name] for name in measured if name in rates) if rates.keys() & set(measured) else None
        for rates in (up, down)
    )
    assumed, sites = list[str](), list[PlannedSite]()
    for name in sorted(status.workers):
        missing = [what for what, known in (("speed", steps), ("way up", up), ("way down", down)) if name not in known]
        if missing:
            assumed.append(f"{name}: {', '.join(missing)} not measured yet")
        up_rate = up.get(name) or usual_up or down.get(name) or usual_down
        down_rate = down.get(name) or usual_down or up.get(name) or usual_up
        assert up_rate is not None  # of one of `measured`
        assert down_rate is not None
        there_s, back_s = latency_s.get((name, THE_SERVER)), latency_s.get((THE_SERVER, name))
        one_way_s = [each for each in (there_s, back_s) if each is not None]
        sites.append(
            PlannedSite(name, up_rate, down_rate, 2 * median(one_way_s) if one_way_s else 0.0, steps.get(name, usual_s))
        )
    if assumed:
        assumed.append("what was not measured is taken as the median of the others, or as the other direction")
    plan = status.plan
    now = None if plan is None else Choice(plan.sync_every, plan.codec, plan.num_fragments, plan.fragment_delay)
    return Source(status.num_parameters, tuple(sites), now=now, assumed=tuple(assumed), is_measured=True)
