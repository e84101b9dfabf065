"""What a planner is told: a model, sites, their links and speeds, and what it may choose from."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median_high
from typing import Final, Literal

from ...errors import ConfigError
from ..autoconfig.state import ClusterState, LayerBounds, LayerState, LinkReport, usual_bounds
from ..autoconfig.trust import (
    FASTEST_BYTES_PER_S,
    LONGEST_LATENCY_S,
    LONGEST_STEP_S,
    SHORTEST_STEP_S,
    SLOWEST_BYTES_PER_S,
)
from ..cost import NOMINAL, Line, Overheads
from ..failures import NEVER, Failures
from .capacity import WEIGHT_BYTES

CENTRE: Final = "the server"
Engine = Literal["server", "allreduce"]
FRAGMENTS: Final = (1, 2, 4, 8, 16)
MOST_WORKERS: Final = 20_000
HEARTBEAT_TIMEOUT_S: Final = 120.0  # ServerConfig.heartbeat_timeout_s
LOCAL_NETWORK: Final = Line(10e9 / 8, 0.0001)  # 10 Gbit/s, 0.2 ms there and back


@dataclass(frozen=True)
class PlannedSite:
    """A place with a line to the server that its `workers` share. `round_trip_s`: there and back, as ping shows it.
    `step_s`: one optimizer step of one worker."""

    name: str
    up_bytes_per_s: float
    down_bytes_per_s: float
    round_trip_s: float
    step_s: float
    workers: int = 1


@dataclass(frozen=True)
class Choice:
    """What the planner may choose from; None = as the controller would. One value fixes a setting. `delay`: in steps,
    of a server; `rounds_delay`: in rounds of a site, between sites. `engine`, `inside_…`: of the rounds inside a
    site, by what, every how many steps, and in which codec; None = that of `codec`."""

    sync_every: int | None = None
    codec: str | None = None
    num_fragments: int | None = None
    delay: int | None = None
    engine: Engine | None = None
    inside_every: int | None = None
    inside_codec: str | None = None
    rounds_delay: int | None = None


@dataclass(frozen=True)
class Situation:
    """`server_…`: what the server's own access carries in all; 0 = as much as all sites together send it.
    `server_local_bytes_per_s`: the same of a site's own server, on the local network; 0 = as a worker's. `overheads`:
    NOMINAL with rates that lines are said to have, MEASURED with those that were measured. `failures`: of each worker;
    `noticed_s`: after so long a server counts one that is silent as dead."""

    parameters: int
    sites: tuple[PlannedSite, ...]
    server_in_bytes_per_s: float = 0.0
    server_out_bytes_per_s: float = 0.0
    local: Line = LOCAL_NETWORK  # between the workers of a site
    server_local_bytes_per_s: float = 0.0
    weights: str = "bf16"
    target_utilization: float = 0.95
    choice: Choice = Choice()
    overheads: Overheads = NOMINAL
    failures: Failures = NEVER
    noticed_s: float = HEARTBEAT_TIMEOUT_S

    def __post_init__(self) -> None:
        def must(holds: bool, rule: str, got: object) -> None:
            if not holds:
                raise ConfigError(f"{rule}, got {got}")

        names = [site.name for site in self.sites]
        must(self.parameters >= 1, "a model must have at least one parameter", self.parameters)
        must(bool(names), "a plan needs at least one site", "none")
        must(len(set(names)) == len(names), "sites must have different names", ", ".join(names))
        must(CENTRE not in names, f"no site may be called {CENTRE!r}", ", ".join(names))
        must(self.workers <= MOST_WORKERS, f"a plan has at most {MOST_WORKERS} workers", self.workers)
        must(self.weights in WEIGHT_BYTES, f"the dtype must be one of {', '.join(WEIGHT_BYTES)}", repr(self.weights))
        must(0.0 < self.target_utilization < 1.0, "the target must lie between 0 and 1", self.target_utilization)
        said = self.choice
        must(
            said.inside_every is None or said.sync_every is None or said.sync_every % said.inside_every == 0,
            "the interval must be a multiple of the one inside the sites",
            f"{said.sync_every} and {said.inside_every}",
        )
        if said.sync_every is not None and said.delay is not None:
            must(said.delay < said.sync_every, "the delay must be shorter than the interval", said.delay)
        if said.sync_every is not None and said.num_fragments is not None:
            must(
                1 <= said.num_fragments <= said.sync_every,
                f"there must be no more fragments than steps between two exchanges ({said.sync_every}), and at least 1",
                said.num_fragments,
            )
        for site in self.sites:
            must(site.workers >= 1, f"site {site.name!r} must have at least one worker", site.workers)
            for what, value, least, most in (
                ("line up, in bytes a second,", site.up_bytes_per_s, SLOWEST_BYTES_PER_S, FASTEST_BYTES_PER_S),
                ("line down, in bytes a second,", site.down_bytes_per_s, SLOWEST_BYTES_PER_S, FASTEST_BYTES_PER_S),
                ("round trip, in seconds,", site.round_trip_s, 0.0, LONGEST_LATENCY_S),
                ("step, in seconds,", site.step_s, SHORTEST_STEP_S, LONGEST_STEP_S),
            ):
                must(least <= value <= most, f"the {what} of {site.name!r} must be from {least:g} to {most:g}", value)

    @property
    def workers(self) -> int:
        return sum(site.workers for site in self.sites)

    @property
    def is_grouped(self) -> bool:
        """Has a site several workers, so that one contribution for all of them would save bytes?"""
        return any(site.workers > 1 for site in self.sites)

    @property
    def middle_step_s(self) -> float:
        """Of the middle site; of two, the slower: as the controller has it (autoconfig/trust.py)."""
        return median_high(site.step_s for site in self.sites)

    @property
    def slowest_step_s(self) -> float:
        return max(site.step_s for site in self.sites)

    @property
    def fastest_step_s(self) -> float:
        return min(site.step_s for site in self.sites)

    @property
    def expects_failures(self) -> bool:
        return self.failures.per_hour > 0.0

    def bounds(self, members: int) -> LayerBounds:
        """The controller's own, unless the choice says more."""
        usual, said = usual_bounds(self.parameters, members), self.choice
        # H is counted in steps of the middle worker; the fastest takes more, and keeps within bounds, too.
        most = max(int(usual.most_sync_every * self.fastest_step_s / self.middle_step_s), usual.least_sync_every)
        most = most if said.sync_every is None else said.sync_every
        return LayerBounds(
            least_sync_every=usual.least_sync_every if said.sync_every is None else said.sync_every,
            most_sync_every=most,
            codecs=usual.codecs if said.codec is None else (said.codec,),
            fragments=tuple(count for count in FRAGMENTS if count <= most)
            if said.num_fragments is None
            else (said.num_fragments,),
            most_delay=usual.most_delay if said.delay is None else said.delay,
        )


def layer_of(
    situation: Situation, name: str, members: tuple[PlannedSite, ...], bounds: LayerBounds, *, grouped: bool
) -> LayerState:
    """As the controller is told of a layer: the members, each with its line to the centre. `grouped`: one member for a
    whole site. Otherwise its workers share the line: all of them send at the same time."""
    clusters: list[ClusterState] = []
    links: list[LinkReport] = []
    for site in members:
        count = 1 if grouped else site.workers
        for number in range(count):
            member = site.name if count == 1 else f"{site.name}-{number}"
            clusters.append(ClusterState(name=member, step_s=site.step_s))
            for source, target, rate in (
                (member, CENTRE, site.up_bytes_per_s),
                (CENTRE, member, site.down_bytes_per_s),
            ):
                links.append(LinkReport(source, target, CENTRE, rate / count, site.round_trip_s / 2))
    return LayerState(
        name=name,
        round=0,
        parameters=situation.parameters,
        clusters=tuple(clusters),
        links=tuple(links),
        centre=CENTRE,
        centre_in_bytes_per_s=situation.server_in_bytes_per_s,
        centre_out_bytes_per_s=situation.server_out_bytes_per_s,
        bounds=bounds,
        target_utilization=situation.target_utilization,
    )
