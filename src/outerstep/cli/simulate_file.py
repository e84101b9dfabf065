"""A file that describes a fleet, as `outerstep simulate` reads it. What it leaves out is as `outerstep plan` says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from ..coordination.cost import NOMINAL, NONE, Line
from ..coordination.failures import Failures
from ..coordination.planning import Choice
from ..coordination.planning.situation import HEARTBEAT_TIMEOUT_S, LOCAL_NETWORK
from ..errors import ConfigError
from ..simulate.fleet.scenario import (
    DEFAULT_POOL_BYTES,
    Churn,
    FleetClusters,
    FleetScenario,
    LayerSetting,
    Liars,
    recommended,
)
from . import units
from .plan_sources import check_keys, read_toml

T = TypeVar("T")
TOP_KEYS: Final = frozenset(
    {"params", "hours", "seed", "topology", "target", "ideal", "heartbeat", "heartbeat_timeout", "start_deadline"}
    | {"wait_above", "plan", "inside", "server", "clusters", "failures", "churn", "liars"}
)
PLAN_KEYS: Final = frozenset({"sync_every", "codec", "fragments", "delay", "quorum", "grace", "deadline"})
INSIDE_KEYS: Final = PLAN_KEYS - {"fragments"}
SERVER_KEYS: Final = frozenset({"link", "up", "down", "speed", "pool"})
CLUSTER_KEYS: Final = frozenset(
    {"name", "count", "workers", "link", "up", "down", "latency", "step_time", "spread", "lan", "lan_latency"}
    | {"server_lan"}
)

LEAST_BARE_BYTES: Final = 1 << 20  # of a size without a unit: below it, people mean gigabytes


def read_scenario(name: str, *, seed: int | None = None, hours: float | None = None) -> FleetScenario:
    """`seed`, `hours`: instead of the file's."""
    said = read_toml(name, otherwise="outerstep plan … --scenario FILE writes one")
    given = Table(said, name, TOP_KEYS)
    clusters = tuple(_clusters(given, name))
    server, plan, inside = (
        given.table("server", SERVER_KEYS),
        given.table("plan", PLAN_KEYS),
        given.table("inside", INSIDE_KEYS),
    )
    speed = server.number("speed", 1.0, least=0.01, most=1000.0)
    out = server.read("up", units.rate) or server.read("link", units.rate) or 0.0
    into = server.read("down", units.rate) or server.read("link", units.rate) or 0.0
    parameters = given.read("params", units.parameters)
    if parameters is None:
        raise ConfigError(f'{name} must have params, the size of the model; e.g. params = "1B"')
    heartbeat_s = given.seconds("heartbeat", 30.0)
    noticed_s = given.seconds("heartbeat_timeout", max(HEARTBEAT_TIMEOUT_S, 3.0 * heartbeat_s))
    failures, topology = _failures(given), given.text("topology")
    overheads = NONE if given.flag("ideal") else NOMINAL
    chosen = recommended(
        parameters,
        clusters,
        Choice(
            plan.whole("sync_every", None),
            plan.text("codec"),
            plan.whole("fragments", None),
            plan.whole("delay", None) if topology != "hierarchy" else None,
            inside_every=inside.whole("sync_every", None),
            inside_codec=inside.text("codec"),
            rounds_delay=plan.whole("delay", None),
        ),
        overheads.with_servers(speed),
        server_in_bytes_per_s=into,
        server_out_bytes_per_s=out,
        target=given.read("target", units.share) or 0.95,
        topology=topology,
        failures=failures,
        noticed_s=noticed_s,
    )
    return FleetScenario(
        parameters=parameters,
        clusters=clusters,
        topology=chosen.topology,
        across=_setting(plan, chosen.across),
        inside=None if chosen.inside is None else _setting(inside, chosen.inside),
        hours=given.number("hours", 1.0, least=0.0, most=1e6) if hours is None else hours,
        seed=(given.whole("seed", 0) or 0) if seed is None else seed,
        heartbeat_s=heartbeat_s,
        heartbeat_timeout_s=noticed_s,
        start_deadline_s=given.seconds("start_deadline", 600.0),
        wait_above_s=given.seconds("wait_above", 60.0),
        server_in_bytes_per_s=into,
        server_out_bytes_per_s=out,
        overheads=overheads,
        server_speed=speed,
        pool_bytes=server.read("pool", size_bytes) or DEFAULT_POOL_BYTES,
        failures=failures,
        churn=_churn(given),
        liars=_liars(given),
        why=chosen.why,
        planned=chosen.utilization,
    )


def _clusters(given: Table, name: str) -> list[FleetClusters]:
    tables = given.said.get("clusters")
    if not isinstance(tables, list) or not tables or not all(isinstance(each, dict) for each in tables):
        raise ConfigError(f"{name} must have at least one table [[clusters]]")
    made = []
    for number, said in enumerate(tables, 1):
        each = Table(said, f"{name}, clusters {number}", CLUSTER_KEYS)
        up, down = (each.read(key, units.rate) or each.read("link", units.rate) for key in ("up", "down"))
        if up is None or down is None:
            raise ConfigError(f"{each.where}: clusters must have a link: link, or up and down; e.g. 200mbit")
        step_s = each.seconds("step_time", 0.0)
        if not step_s:
            raise ConfigError(f"{each.where}: clusters must have a step_time above 0, e.g. 3s")
        local = Line(
            each.read("lan", units.rate) or LOCAL_NETWORK.bytes_per_s,
            each.seconds("lan_latency", 2 * LOCAL_NETWORK.latency_s) / 2,
        )
        made.append(
            FleetClusters(
                name=each.text("name") or f"cluster{number}",
                count=each.whole("count", 1) or 0,
                workers=each.whole("workers", 1) or 0,
                up_bytes_per_s=up,
                down_bytes_per_s=down,
                round_trip_s=each.seconds("latency", 0.0),
                step_s=step_s,
                spread=each.read("spread", _share) or 0.0,
                local=local,
                server_local_bytes_per_s=each.read("server_lan", units.rate) or local.bytes_per_s,
            )
        )
    return made


def _setting(table: Table, chosen: LayerSetting) -> LayerSetting:
    """What the planner chose, unless the file says otherwise."""
    sync_every, codec = chosen.sync_every, table.text("codec") or chosen.codec
    fragments = table.whole("fragments", None) or chosen.num_fragments
    delay = table.whole("delay", None)
    is_planned = not {"quorum", "deadline"} & table.said.keys()  # when rounds close
    waits_for_all = table.said.get("quorum", "all") == "all"
    return LayerSetting(
        sync_every,
        codec,
        fragments,
        chosen.delay if delay is None else delay,
        quorum=chosen.quorum if is_planned else None if waits_for_all else table.read("quorum", _share),
        grace_s=table.seconds("grace", chosen.grace_s if is_planned else 0.0),
        round_deadline_s=table.seconds("deadline", 0.0) if "deadline" in table.said else None,
    )


def _failures(given: Table) -> Failures:
    table = given.table("failures", frozenset({"per_hour", "restart"}))
    return Failures(table.read("per_hour", _share) or 0.0, table.seconds("restart", 600.0))


def _churn(given: Table) -> Churn:
    table = given.table("churn", frozenset({"per_hour", "away"}))
    return Churn(table.read("per_hour", _share) or 0.0, table.seconds("away", 600.0))


def _liars(given: Table) -> Liars:
    table = given.table("liars", frozenset({"share", "kind"}))
    return Liars(table.read("share", _share) or 0.0, table.text("kind") or "nan")  # type: ignore[arg-type]


def _share(text: str, what: str) -> float:
    """ "5%" or "0.05"; 0 too."""
    return units.share(text, what, zero=True)


def size_bytes(text: str, what: str) -> int:
    """ "64GB", "68719476736"."""
    number = text.strip().upper().removesuffix("B")
    found = units.count(number.replace("G", "B"), what)
    if found < LEAST_BARE_BYTES and number.isdecimal():
        raise ConfigError(
            f"{what} without a unit must be at least {LEAST_BARE_BYTES} bytes, got {text!r}; did you mean {number}GB?"
        )
    return found


class Table:
    """One table of the file. Every value is checked by its type, and named where it is wrong."""

    def __init__(self, said: Mapping[str, Any], where: str, known: frozenset[str]) -> None:
        check_keys(said, known, where)
        self.said, self.where = said, where

    def table(self, key: str, known: frozenset[str]) -> Table:
        value = self.said.get(key, {})
        if not isinstance(value, dict):
            raise ConfigError(f"{self.where}: {key} must be a table [{key}], got {value!r}"[:300])
        return Table(value, f"{self.where}, [{key}]", known)

    def text(self, key: str) -> str | None:
        value = self.said.get(key)
        if value is not None and not isinstance(value, str):
            raise ConfigError(f"{self.where}: {key} must be text, got {value!r}; put it between quotes"[:300])
        return value

    def read(self, key: str, read: Callable[[str, str], T]) -> T | None:
        """A number with its unit."""
        text = self.text(key)
        return None if text is None else read(text, f"{self.where}: {key}")

    def seconds(self, key: str, default: float) -> float:
        found = self.read(key, units.seconds)
        return default if found is None else found

    def whole(self, key: str, default: int | None) -> int | None:
        value = self.said.get(key, default)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63):
            shown = repr(value)[:40]
            raise ConfigError(f"{self.where}: {key} must be a whole number from 0 to 2^63, got {shown}")
        return value

    def number(self, key: str, default: float, *, least: float, most: float) -> float:
        value = self.said.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            shown = repr(value)[:40]
            raise ConfigError(f"{self.where}: {key} must be a number from {least:g} to {most:g}, got {shown}")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.said.get(key, False)
        if not isinstance(value, bool):
            raise ConfigError(f"{self.where}: {key} must be true or false, got {value!r}"[:300])
        return value
