"""What a fleet is: clusters and their lines, the settings of each layer, what fails, who comes and goes, who lies.

Every value is checked here, wherever it came from: rule, value, remedy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final, Literal

from ...coordination.cost import NOMINAL, Line, Overheads, bytes_per_value, down_recipe
from ...coordination.failures import NEVER, Failures, RoundClosing
from ...coordination.planning import Choice, Option, PlannedSite, Situation, propose
from ...coordination.planning.situation import HEARTBEAT_TIMEOUT_S, LOCAL_NETWORK, MOST_WORKERS
from ...errors import ConfigError

FleetTopology = Literal["server", "hierarchy"]
TOPOLOGIES: Final[tuple[str, ...]] = ("server", "hierarchy")
Lie = Literal["nan", "huge", "boast"]
LIES: Final[tuple[Lie, ...]] = ("nan", "huge", "boast")

MOST_HOURS = 24.0 * 31
MOST_KINDS = 1000
MOST_WORKER_STEPS = 2e9  # workers · hours · 3600 / step: a month of a thousand workers
LEAST_PARAMETERS = 1_000_000
MOST_EXCHANGES = 5e7  # of all workers: some hours of processor time
MOST_POOL_BYTES = 1 << 50
DEFAULT_POOL_BYTES = (128 << 20) + (16 << 30)  # what a server has in memory and on its disk for contributions


def must(holds: bool, rule: str, got: object, remedy: str = "") -> None:
    if not holds:
        raise ConfigError(f"{rule}, got {got}" + (f"; {remedy}" if remedy else ""))


@dataclass(frozen=True)
class FleetClusters:
    """`count` places that are alike, of so many workers each. Their line to the top is theirs together; inside, each
    worker has one of `local` to its cluster's server, which has one of `server_local_bytes_per_s`. `spread`: the
    speeds of the workers lie evenly between (1 ± spread) times the usual one."""

    name: str
    count: int
    workers: int
    up_bytes_per_s: float
    down_bytes_per_s: float
    round_trip_s: float
    step_s: float
    spread: float = 0.0
    local: Line = LOCAL_NETWORK
    server_local_bytes_per_s: float = 0.0

    def __post_init__(self) -> None:
        of = f"clusters {self.name!r}"
        must(1 <= len(self.name) <= 64, "the name of clusters must have 1 to 64 characters", repr(self.name))
        must(1 <= self.count <= MOST_WORKERS, f"{of}: count must be from 1 to {MOST_WORKERS}", self.count)
        must(1 <= self.workers <= MOST_WORKERS, f"{of}: workers must be from 1 to {MOST_WORKERS}", self.workers)
        must(0.0 <= self.spread <= 0.9, f"{of}: spread must be from 0 to 90 %", self.spread)
        for what, rate in (("lan", self.local.bytes_per_s), ("server_lan", self.server_local_bytes_per_s)):
            must(0.0 <= rate < math.inf, f"{of}: {what} must be a finite rate", rate)


@dataclass(frozen=True)
class LayerSetting:
    """Of one server's run. `sync_every` counts steps; above clusters, their rounds."""

    sync_every: int
    codec: str
    num_fragments: int = 1
    delay: int = 0
    quorum: float | None = None  # the share of the members that closes a round; None = all
    grace_s: float = 0.0
    round_deadline_s: float | None = None

    def check(self, of: str) -> None:
        bytes_per_value(self.codec)
        must(1 <= self.sync_every <= 100_000, f"{of}: sync_every must be from 1 to 100000", self.sync_every)
        must(1 <= self.num_fragments <= 64, f"{of}: fragments must be from 1 to 64", self.num_fragments)
        must(
            self.num_fragments <= self.sync_every,
            f"{of}: there must be no more fragments than steps between two exchanges ({self.sync_every})",
            self.num_fragments,
        )
        must(0 <= self.delay < self.sync_every, f"{of}: delay must be below sync_every ({self.sync_every})", self.delay)
        must(
            self.quorum is None or 0.0 < self.quorum <= 1.0,
            f"{of}: quorum must be a share above 0 and at most 100 %",
            self.quorum,
            'e.g. "75%"',
        )
        must(0.0 <= self.grace_s <= 86_400.0, f"{of}: grace must be at most a day", self.grace_s)
        deadline_s = self.round_deadline_s
        must(deadline_s is None or 0.0 <= deadline_s <= 86_400.0, f"{of}: deadline must be at most a day", deadline_s)

    @property
    def down_codec(self) -> str:
        return down_recipe(self.codec)


@dataclass(frozen=True)
class Churn:
    """Of each worker, at random times: it contributes what it has and leaves; another one comes `away_s` later."""

    per_hour: float = 0.0
    away_s: float = 600.0

    def __post_init__(self) -> None:
        must(0.0 <= self.per_hour <= 60.0, "churn: per_hour must be from 0 to 60, of each worker", self.per_hour)
        must(0.0 <= self.away_s <= 7 * 86_400.0, "churn: away must be at most a week", self.away_s)


@dataclass(frozen=True)
class Liars:
    """So large a part of the workers sends what it should not: NaN, a Δ a million times too large, or an honest one
    with a thousand times the work that is in it."""

    share: float = 0.0
    lie: Lie = "nan"

    def __post_init__(self) -> None:
        must(0.0 <= self.share <= 1.0, "liars: share must be from 0 to 100 %", self.share)
        must(self.lie in LIES, f"liars: kind must be one of {', '.join(LIES)}", repr(self.lie))


@dataclass(frozen=True)
class FleetScenario:
    """`across`: of the top; `inside`: of each cluster's server, if the topology is a hierarchy. `server_…`: what the
    top's own access carries in all, 0 = no limit. `server_speed`: of every server's processors, in machines of two
    cores as the overheads were measured on. `pool_bytes`: what a server has room for of contributions under way."""

    parameters: int
    clusters: tuple[FleetClusters, ...]
    topology: FleetTopology
    across: LayerSetting
    inside: LayerSetting | None = None
    hours: float = 1.0
    seed: int = 0
    heartbeat_s: float = 30.0
    heartbeat_timeout_s: float = 120.0
    start_deadline_s: float = 600.0
    wait_above_s: float = 60.0
    server_in_bytes_per_s: float = 0.0
    server_out_bytes_per_s: float = 0.0
    overheads: Overheads = NOMINAL
    server_speed: float = 1.0
    pool_bytes: int = DEFAULT_POOL_BYTES
    failures: Failures = NEVER
    churn: Churn = Churn()
    liars: Liars = Liars()
    why: tuple[str, ...] = ()  # the setting is as it is, if the planner chose it
    planned: float | None = None  # utilization

    def __post_init__(self) -> None:
        names = [each.name for each in self.clusters]
        must(bool(names), "a scenario needs at least one table [[clusters]]", "none")
        must(len(names) <= MOST_KINDS, f"a scenario has at most {MOST_KINDS} tables [[clusters]]", len(names))
        must(len(set(names)) == len(names), "clusters must have different names", ", ".join(names))
        must(self.workers <= MOST_WORKERS, f"a scenario has at most {MOST_WORKERS} workers", self.workers)
        must(LEAST_PARAMETERS <= self.parameters <= 10**13, "params must be from 1M to 10T", self.parameters)
        must(0.0 < self.hours <= MOST_HOURS, f"hours must be above 0 and at most {MOST_HOURS:g}", self.hours)
        must(0 <= self.seed < 2**63, "seed must be a whole number from 0", self.seed)
        must(1.0 <= self.heartbeat_s <= 3600.0, "heartbeat must be from 1 s to an hour", self.heartbeat_s)
        must(
            2.0 * self.heartbeat_s <= self.heartbeat_timeout_s <= 86_400.0,
            f"heartbeat_timeout must be at least twice the heartbeat ({self.heartbeat_s:g} s) and at most a day",
            f"{self.heartbeat_timeout_s:g} s",
        )
        must(0.0 <= self.start_deadline_s <= 86_400.0, "start_deadline must be at most a day", self.start_deadline_s)
        must(0.0 <= self.wait_above_s <= 600.0, "wait_above must be at most 600 s", self.wait_above_s)
        must(0.01 <= self.server_speed <= 1000.0, "speed must be from 0.01 to 1000 machines", self.server_speed)
        must(2 <= self.pool_bytes <= MOST_POOL_BYTES, "pool must be from 2 bytes to 1 PiB", self.pool_bytes)
        must(self.topology in ("server", "hierarchy"), "topology must be server or hierarchy", repr(self.topology))
        self.across.check("plan")
        if self.topology == "hierarchy":
            must(self.inside is not None, "a hierarchy needs settings [inside] the clusters", "none")
            assert self.inside is not None
            self.inside.check("inside")
            must(
                self.across.num_fragments == self.inside.num_fragments == 1,
                "a hierarchy is simulated with one fragment in each layer",
                f"{self.across.num_fragments} and {self.inside.num_fragments}",
            )
        total = sum(each.count * each.workers / each.step_s for each in self.clusters) * self.hours * 3600.0
        must(total <= MOST_WORKER_STEPS, f"all workers together may take {MOST_WORKER_STEPS:g} steps", f"{total:.3g}")
        exchanges = total / self.leaf.sync_every * self.leaf.num_fragments
        must(
            exchanges <= MOST_EXCHANGES,
            f"all workers together may exchange {MOST_EXCHANGES:g} times",
            f"{exchanges:.3g}",
            "raise sync_every, or use fewer fragments, workers or hours",
        )

    @property
    def workers(self) -> int:
        return sum(each.count * each.workers for each in self.clusters)

    @property
    def leaf(self) -> LayerSetting:
        """Of the layer whose members train."""
        return self.inside if self.inside is not None and self.topology == "hierarchy" else self.across

    @property
    def duration_s(self) -> float:
        return self.hours * 3600.0

    @property
    def at_the_servers(self) -> Overheads:
        """What the ends add, with servers as fast as they are here."""
        return self.overheads.with_servers(self.server_speed)


@dataclass(frozen=True)
class Recommended:
    """What the planner says of such sites, as settings of each layer."""

    topology: FleetTopology
    across: LayerSetting
    inside: LayerSetting | None
    why: tuple[str, ...]
    utilization: float


def recommended(
    parameters: int,
    clusters: tuple[FleetClusters, ...],
    choice: Choice,
    overheads: Overheads,
    *,
    server_in_bytes_per_s: float,
    server_out_bytes_per_s: float,
    target: float,
    topology: str | None = None,
    failures: Failures = NEVER,
    noticed_s: float = HEARTBEAT_TIMEOUT_S,
) -> Recommended:
    """What `outerstep plan` recommends for these clusters, each with a server of its own if it has several workers.
    `topology`: only this one."""
    must(topology in (None, *TOPOLOGIES), f"topology must be one of {', '.join(TOPOLOGIES)}", repr(topology))
    must(bool(clusters), "a scenario needs at least one table [[clusters]]", "none")
    total = sum(each.count * each.workers for each in clusters)
    must(total <= MOST_WORKERS, f"a scenario has at most {MOST_WORKERS} workers", total)
    sites = tuple(
        PlannedSite(
            each.name if each.count == 1 else f"{each.name}{number}",
            each.up_bytes_per_s,
            each.down_bytes_per_s,
            each.round_trip_s,
            each.step_s,
            each.workers,
        )
        for each in clusters
        for number in range(each.count)
    )
    largest = max(clusters, key=lambda each: each.workers)
    proposal = propose(
        Situation(
            parameters,
            sites,
            server_in_bytes_per_s,
            server_out_bytes_per_s,
            local=largest.local,
            server_local_bytes_per_s=largest.server_local_bytes_per_s,
            target_utilization=target,
            choice=replace(choice, engine="server"),
            overheads=overheads,
            failures=failures,
            noticed_s=noticed_s,
        )
    )
    wanted = TOPOLOGIES if topology is None else (topology,)
    best = next((each for each in proposal.options if each.topology in wanted), None)
    if best is None:
        raise ConfigError(
            f"nothing can be planned with topology {topology!r}; a hierarchy takes clusters of several workers, and an "
            "interval that is a multiple of the one inside; leave topology out, or change [plan] and [inside]"
        )
    return Recommended(*_settings_of(best, largest.workers), proposal.reasons, best.utilization)


def _settings_of(option: Option, workers: int) -> tuple[FleetTopology, LayerSetting, LayerSetting | None]:
    """`workers`: of a cluster."""
    inside = option.inside
    sync_every = option.sync_every if inside is None else inside.above_every
    closing = _closing(option.closing, option.members)
    across = LayerSetting(sync_every, option.codec, option.num_fragments, option.delay, *closing)
    if inside is None:
        return "server", across, None
    return "hierarchy", across, LayerSetting(inside.sync_every, inside.codec, 1, 0, *_closing(inside.closing, workers))


def _closing(closing: RoundClosing, members: int) -> tuple[float | None, float]:
    return (None if closing.quorum is None else closing.quorum / members), closing.grace_s
