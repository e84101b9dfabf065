"""One simulated fleet: it starts, fails, comes and goes until the time is over; then every step is accounted for."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..agenda import Agenda
from .booked_lines import BookedLine
from .cluster import FleetLeader
from .ledger import LayerLedger, Promises
from .member import Clocks, FleetHost, FleetMember
from .report import FleetReport, Moment, report_of
from .scenario import FleetClusters, FleetScenario
from .server import FleetServer, ServerTerms

MOMENTS = 240  # of the run, for the plot
PIECES = 8 * MOMENTS  # of the run, for the progress


def run_fleet(scenario: FleetScenario, **options: Any) -> FleetReport:
    """Options: those of `FleetWorld`."""
    return FleetWorld(scenario, **options).run()


class FleetWorld:
    """`progress`: told now and then which share of the time is over."""

    def __init__(
        self,
        scenario: FleetScenario,
        *,
        member_type: type[FleetMember] = FleetMember,
        server_type: type[FleetServer] = FleetServer,
        leader_type: type[FleetLeader] = FleetLeader,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        self.scenario, self._member_type, self._server_type = scenario, member_type, server_type
        self._leader_type, self._progress = leader_type, progress
        self.rng = random.Random(f"fleet {scenario.seed}")
        self.agenda, self.promises, self.clocks = Agenda(), Promises(), Clocks()
        self.failures = self.leaves = 0
        self.moments: list[Moment] = []
        self.leaders: list[FleetLeader] = []
        self.lines: list[tuple[BookedLine, BookedLine]] = []  # up and down, of each cluster
        self._starts: dict[int, int] = {}
        self._names: dict[int, str] = {}
        self._hosts: list[FleetHost] = []
        self._servers_of: dict[int, FleetServer] = {}
        self._empty_since: dict[int, float] = {}
        self._number = 0
        self._members: dict[int, FleetMember] = {}
        is_flat = scenario.topology == "server"
        clusters = sum(each.count for each in scenario.clusters)
        self.top = self._server(
            "top",
            scenario.workers if is_flat else clusters,
            rates=(scenario.server_in_bytes_per_s, scenario.server_out_bytes_per_s),
            across=True,
        )
        self.places = [self.top] if is_flat else []
        for each in scenario.clusters:
            for number in range(each.count):
                self._build(each, each.name if each.count == 1 else f"{each.name}{number}", is_flat=is_flat)
        for host in self._hosts:
            self._start(host)

    # --- building -----------------------------------------------------------------------------------------------------

    def _server(self, name: str, members: int, *, rates: tuple[float, float], across: bool) -> FleetServer:
        scenario = self.scenario
        setting = scenario.across if across else scenario.leaf
        terms = ServerTerms(
            setting,
            members,
            scenario.parameters,
            scenario.heartbeat_timeout_s,
            scenario.start_deadline_s,
            scenario.pool_bytes,
            scenario.at_the_servers,
        )
        is_above = across and scenario.topology == "hierarchy"
        ledger = LayerLedger(name, setting.num_fragments, 1, self.promises, keeps_versions=is_above)
        return self._server_type(name, terms, self.agenda, ledger, in_bytes_per_s=rates[0], out_bytes_per_s=rates[1])

    def _build(self, kind: FleetClusters, name: str, *, is_flat: bool) -> None:
        up, down = BookedLine.of_rate(kind.up_bytes_per_s), BookedLine.of_rate(kind.down_bytes_per_s)
        self.lines.append((up, down))
        if is_flat:
            self._add_workers(kind, name, self.top, ((up,), (down,)), kind.round_trip_s)
            return
        rate = kind.server_local_bytes_per_s
        below = self._server(name, kind.workers, rates=(rate, rate), across=False)
        self.places.append(below)
        host = self._make_host(name, kind.step_s, ((up,), (down,)), kind.round_trip_s, "")
        wait_s = self.scenario.wait_above_s
        self.leaders.append(self._leader_type(host, below, self.top, self.agenda, self.rng, wait_s=wait_s))
        self._add_workers(kind, name, below, None, 2 * kind.local.latency_s)

    def _add_workers(
        self,
        kind: FleetClusters,
        name: str,
        server: FleetServer,
        shared: tuple[tuple[BookedLine], tuple[BookedLine]] | None,
        round_trip_s: float,
    ) -> None:
        """The workers of a cluster. `shared`: their lines, if they share them."""
        for number in range(kind.workers):
            lines = shared
            if lines is None:
                rate = kind.local.bytes_per_s
                lines = (BookedLine.of_rate(rate),), (BookedLine.of_rate(rate),)
            step_s = kind.step_s * self.rng.uniform(1.0 - kind.spread, 1.0 + kind.spread)
            lies = self.rng.random() < self.scenario.liars.share
            lie = self.scenario.liars.lie if lies else ""
            host = self._make_host(f"{name}.{number}", step_s, lines, round_trip_s, lie)
            self._hosts.append(host)
            self._servers_of[host.number] = server

    def _make_host(
        self,
        name: str,
        step_s: float,
        lines: tuple[tuple[BookedLine], tuple[BookedLine]],
        round_trip_s: float,
        lie: str,
    ) -> FleetHost:
        scenario = self.scenario
        self._number += 1
        return FleetHost(
            self._number, name, step_s, *lines, round_trip_s, scenario.heartbeat_s, scenario.overheads, lie
        )

    # --- life ---------------------------------------------------------------------------------------------------------

    def _start(self, host: FleetHost) -> None:
        self._starts[host.number] = start = self._starts.get(host.number, 0) + 1
        self._down(host, -1)
        member = self._member_type(
            host,
            start,
            self._servers_of[host.number],
            self.agenda,
            self.rng,
            self.clocks,
            name=self._names.get(host.number, host.name),
        )
        self._members[host.number] = member
        failures, churn = self.scenario.failures, self.scenario.churn
        if failures.per_hour:
            self.agenda.after(self.rng.expovariate(failures.per_hour / 3600.0), lambda: self._fail(host, member))
        if churn.per_hour:
            self.agenda.after(self.rng.expovariate(churn.per_hour / 3600.0), lambda: self._leave(host, member))

    def _down(self, host: FleetHost, change: int) -> None:
        """The host has no worker from now on (1), or has one again (−1)."""
        since = self._empty_since.pop(host.number, None)
        if change > 0:
            self._empty_since[host.number] = self.agenda.now
            self.clocks.now["down"] += 1
        elif since is not None:
            self.clocks.now["down"] -= 1
            self.clocks.seconds["down"] += self.agenda.now - since

    def _fail(self, host: FleetHost, member: FleetMember) -> None:
        if member.alive:
            self.failures += 1
            member.kill()
            self._down(host, 1)
            self.agenda.after(self.scenario.failures.restart_s, lambda: self._start(host))

    def _leave(self, host: FleetHost, member: FleetMember) -> None:
        if member.alive and not member.is_leaving:
            self.leaves += 1
            member.on_left = lambda: self._left(host)
            member.leave_when_done()

    def _left(self, host: FleetHost) -> None:
        """Another one comes, under a name of its own."""
        self._down(host, 1)
        self._names[host.number] = f"{host.name}-{self._starts[host.number]}"
        self.agenda.after(self.scenario.churn.away_s, lambda: self._start(host))

    # --- the run ------------------------------------------------------------------------------------------------------

    def run(self) -> FleetReport:
        with _seldom_collected():
            for number in range(PIECES + 1):
                moment_s = self.scenario.duration_s * number / PIECES
                self.agenda.run_until(_never, limit_s=moment_s)
                self.agenda.now = moment_s
                if number % (PIECES // MOMENTS) == 0:
                    self._look()
                if self._progress is not None:
                    self._progress(number / PIECES)
        self._settle()
        return report_of(self)

    def _look(self) -> None:
        in_model = sum(sum(place.ledger.steps_of[0].values()) for place in self.places)
        sent = sum(line.carried_bytes for pair in self.lines for line in pair)
        self.moments.append(Moment(self.agenda.now, dict(self.clocks.now), in_model, sent))  # type: ignore[arg-type]

    def _settle(self) -> None:
        for host in self._hosts:
            self._down(host, -1)
        for member in self._members.values():
            if member.alive:
                member.kill()
                member.ledger.books[member.life].is_over = False
        for leader in self.leaders:
            leader.settle()
        for server in {id(one): one for one in (self.top, *self.places)}.values():
            server.ledger.settle()


@contextmanager
def _seldom_collected() -> Iterator[None]:
    """Half a million objects live as long as the run, and to look through them again and again takes longer than they
    do anything."""
    usual = gc.get_threshold()
    gc.set_threshold(100_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*usual)


def _never() -> bool:
    return False
