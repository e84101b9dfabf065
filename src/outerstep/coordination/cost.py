"""What a setting costs: bytes, seconds and the share of time that is left for training. Plain arithmetic.

    T       = up_bytes·(s/byte up) + down_bytes·(s/byte down) + round trips·latency + slow starts
              + own work of server and worker
    waiting = P · max(0, T/P − min(τ, H/P)·t)                 P fragments, each adopted τ steps of t seconds later
    utilization = compute / (compute + waiting + the worker's own arithmetic + what failures take),       compute = H·t

τ = 0 is the blocking exchange. Between two fragments lie H/P steps, so a longer delay hides no more than that: the next
fragment queues behind this one. In a hierarchy the round of one level is the step of the next, and the utilizations
multiply.

The controller (autoconfig/) and a planner ask the same functions. All rates are bytes per second, never bits.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ..errors import ConfigError
from ..lanes import FEWEST, part_size
from ..types import MOST_CARRIED_BYTES
from .failures import Losses
from .windows import Transfer, felt_s

# --- bytes ------------------------------------------------------------------------------------------------------------

_SCALE_BYTES: Final = 2  # of a block, as bf16
BYTES_PER_VALUE: Final[Mapping[str, float]] = {
    "fp32": 4.0,
    "bf16": 2.0,
    "int8": 1.0 + _SCALE_BYTES / 4096,
    "int4": 0.5 + _SCALE_BYTES / 256,
    "e3m0": 0.5 + _SCALE_BYTES / 256,
    "control-2bit": 0.25 + _SCALE_BYTES / 256,
}
"""Of a tensor of whole blocks. core/codecs/ is where these numbers come from; it needs tensors, and who plans has none.
A test compares them."""


def bytes_per_value(recipe: str) -> float:
    """Of the recipe's first codec, the one for all tensors without a rule of their own: "int8+feedback,norms=fp32" is
    int8. (The kinds with rules of their own are small in most models; a manifest would tell exactly.)"""
    name = recipe.split(",")[0].split("+")[0]
    if sparse := re.fullmatch(r"sparse([1-9][0-9]{0,2})", name):
        kept = int(sparse[1])
        return (8 + 3 * math.ceil(kept / 2) + math.ceil(kept / 4)) / 4096
    if name not in BYTES_PER_VALUE:
        raise ConfigError(f"the size of codec {name!r} is not known; known: {', '.join(BYTES_PER_VALUE)}, sparseK")
    return BYTES_PER_VALUE[name]


def down_recipe(recipe: str) -> str:
    """What goes down if nobody chooses: the same codec; bf16 where a sparse one goes up."""
    name = recipe.split(",")[0].split("+")[0]
    return "bf16" if name.startswith("sparse") else name


# --- seconds of our own -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Overheads:
    """What the two ends add to the link: measured with 103 million parameters, bf16 both ways, on two cores
    (docs/results/speed.md). `worker_s_per_parameter` is in the training thread, whatever the delay: difference,
    encoding, adoption. `round_trips`: offer, parts, commit, poll, parts. `carried_bytes`: a contribution of at most so
    many travels with its offer, which saves parts and commit; an update with the answer to a poll, which saves parts.
    `connections`: that parts travel on at a time, where there are so many; 0 = no slow start is counted."""

    worker_s_per_parameter: float = 2.0e-9
    worker_s_per_byte: float = 0.25e-9
    server_s_per_parameter: float = 1.8e-9
    server_s_per_byte: float = 0.6e-9
    round_trips: float = 5.0
    carried_bytes: float = MOST_CARRIED_BYTES
    connections: float = 0.0

    def trips(self, up_bytes: float, down_bytes: float) -> float:
        """Of one fragment."""
        saved = 2 * (up_bytes <= self.carried_bytes) + (down_bytes <= self.carried_bytes)
        return max(self.round_trips - saved, 0.0)

    def with_servers(self, speed: float) -> Overheads:
        """With servers that are so many times as fast as the one that was measured."""
        return replace(
            self,
            server_s_per_parameter=self.server_s_per_parameter / speed,
            server_s_per_byte=self.server_s_per_byte / speed,
        )


MEASURED: Final = Overheads()  # with rates that were measured: slow starts are in them
NOMINAL: Final = Overheads(connections=FEWEST)  # with those that a line is said to have
NONE: Final = Overheads(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


# --- links and routes -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """One direction of a link, as achieved."""

    bytes_per_s: float
    latency_s: float = 0.0


Lines = Mapping[tuple[str, str], Line]
"""By (from, to)."""
Parents = Mapping[str, str]
"""Whom each cluster sends to. A star: everybody to the centre."""


def achieved_bytes_per_s(capacity_bytes_per_s: float, round_trip_s: float, streams: int, window_bytes: int) -> float:
    """A connection carries at most its window per round trip: on a long link it takes several to fill it."""
    if round_trip_s <= 0.0:
        return capacity_bytes_per_s
    return min(capacity_bytes_per_s, streams * window_bytes / round_trip_s)


@dataclass(frozen=True)
class RouteCost:
    """Of a round over one route, for its slowest member. `latency_s`: there and back once."""

    up_s_per_byte: float
    down_s_per_byte: float
    latency_s: float

    def transfer_s(self, up_bytes: float, down_bytes: float, round_trips: float) -> float:
        return up_bytes * self.up_s_per_byte + down_bytes * self.down_s_per_byte + round_trips * self.latency_s


def star(clusters: Iterable[str], centre: str) -> dict[str, str]:
    return dict.fromkeys(sorted(clusters), centre)


def route_cost(
    parents: Parents,
    lines: Lines,
    centre: str,
    *,
    centre_in_bytes_per_s: float = 0.0,
    centre_out_bytes_per_s: float = 0.0,
) -> RouteCost:
    """A relay passes bytes on and knows nothing of them (wire/relay.py). So contributions are not added up, and updates
    are not copied there: a line carries one of each for every cluster behind it. Parts follow each other, so the
    slowest line of a way sets its time, and latencies add up. `centre_…`: what the centre's own access carries in all
    (0: more than the lines do)."""
    behind = dict.fromkeys(parents, 1)
    for cluster in parents:
        for above in _above(cluster, parents, centre):
            behind[above] += 1
    up = max(behind[c] / lines[c, parents[c]].bytes_per_s for c in parents)
    down = max(behind[c] / lines[parents[c], c].bytes_per_s for c in parents)
    if centre_in_bytes_per_s > 0.0:
        up = max(up, len(parents) / centre_in_bytes_per_s)
    if centre_out_bytes_per_s > 0.0:
        down = max(down, len(parents) / centre_out_bytes_per_s)
    latency_s = max(
        sum(
            lines[c, parents[c]].latency_s + lines[parents[c], c].latency_s
            for c in (cluster, *_above(cluster, parents, centre))
        )
        for cluster in parents
    )
    return RouteCost(up, down, latency_s)


def _above(cluster: str, parents: Parents, centre: str) -> list[str]:
    """The clusters that relay for this one, the nearest first. Bounded: a circle is refused by its length."""
    way: list[str] = []
    while (cluster := parents[cluster]) != centre:
        way.append(cluster)
        if len(way) > len(parents):
            raise ConfigError(f"a route must lead to {centre!r}, got the circle {' → '.join(way[:8])}")
    return way


def ring_s(size_bytes: float, members: int, slowest: Line) -> float:
    """An all-reduce in a ring, without a centre: 2(n−1)/n·S/B + 2(n−1)·L."""
    hops = 2 * (members - 1)
    return hops / members * size_bytes / slowest.bytes_per_s + hops * slowest.latency_s


def allreduce_route(members: int, up_bytes_per_s: float, down_bytes_per_s: float, round_trip_s: float) -> RouteCost:
    """Reduce-scatter and all-gather among peers, by the slowest of them: each sends and receives 2(n−1)/n·S, both at
    the same time, in two hops of half a round trip each."""
    return RouteCost(2 * (members - 1) / members / min(up_bytes_per_s, down_bytes_per_s), 0.0, round_trip_s)


def mesh_route(members: int, up_bytes_per_s: float, down_bytes_per_s: float, round_trip_s: float) -> RouteCost:
    """Gossip to all, by the slowest of them: each sends its contribution to n − 1 others and receives theirs, both at
    the same time: (n−1)·S."""
    return RouteCost((members - 1) / min(up_bytes_per_s, down_bytes_per_s), 0.0, round_trip_s)


# --- one round, and rounds of rounds ----------------------------------------------------------------------------------


def exchange_s(
    parameters: float, codec: str, down_codec: str, route: RouteCost, members: int, overheads: Overheads = MEASURED
) -> float:
    """What bytes take in an exchange of everything, on the line and at both ends."""
    up_bytes, down_bytes = parameters * bytes_per_value(codec), parameters * bytes_per_value(down_codec)
    moving = route.transfer_s(up_bytes, down_bytes, 0.0)
    worker = overheads.worker_s_per_byte * (up_bytes + down_bytes)
    server = members * overheads.server_s_per_byte * (up_bytes + down_bytes)
    return moving + worker + server + overheads.server_s_per_parameter * parameters


def fragment_s(
    parameters: float,
    codec: str,
    down_codec: str,
    route: RouteCost,
    members: int,
    overheads: Overheads = MEASURED,
    *,
    num_fragments: int = 1,
    between_s: float = math.inf,
    hidden_s: float = 0.0,
    slower: float = 1.0,
) -> float:
    """The exchange of one fragment: its share of the bytes' time, its round trips and its slow starts. `between_s`:
    training between two of them, H/P·t; `hidden_s`: how much of that an exchange may take; `slower`: with exchanges
    that take so many times as long."""
    up_bytes = parameters * bytes_per_value(codec) / num_fragments
    down_bytes = parameters * bytes_per_value(down_codec) / num_fragments
    moving_s = exchange_s(parameters, codec, down_codec, route, members, overheads) / num_fragments
    trip_s, most, part_bytes = slower * route.latency_s, overheads.connections, part_size(math.ceil(up_bytes))
    up, down = (
        Transfer.of(size_bytes, slower * s_per_byte, trip_s, most, part_bytes)
        for size_bytes, s_per_byte in ((up_bytes, route.up_s_per_byte), (down_bytes, route.down_s_per_byte))
    )
    plain_s = slower * moving_s + overheads.trips(up_bytes, down_bytes) * trip_s
    return felt_s(plain_s, up, down, trip_s=trip_s, between_s=between_s, hidden_s=hidden_s)


@dataclass(frozen=True)
class RoundCost:
    """`lost_s`: in which the mean member was away, or took steps that died with it; the round took no longer for it."""

    compute_s: float
    waiting_s: float  # for the exchange
    own_s: float  # arithmetic of the exchange in the training thread
    lost_s: float = 0.0

    @property
    def wall_s(self) -> float:
        return self.compute_s + self.waiting_s + self.own_s

    @property
    def utilization(self) -> float:
        spent_s = self.wall_s + self.lost_s
        return self.compute_s / spent_s if spent_s > 0.0 else 1.0


def round_cost(
    *, compute_s: float, hidden_s: float, num_fragments: int, fragment_s: float, own_s: float = 0.0
) -> RoundCost:
    """`hidden_s`: how long training goes on while a fragment travels, min(τ, H/P)·t; 0 = blocking."""
    return RoundCost(compute_s, num_fragments * max(0.0, fragment_s - hidden_s), own_s)


def with_failures(cost: RoundCost, losses: Losses, hidden_s: float) -> RoundCost:
    """Training that goes on for so long hides waiting for those that died, too."""
    waiting_s = cost.waiting_s + max(0.0, losses.waiting_s(cost.wall_s) - hidden_s)
    return replace(cost, waiting_s=waiting_s, lost_s=losses.lost_s(cost.wall_s))


def hidden_s(sync_every: int, num_fragments: int, delay: int, step_s: float) -> float:
    return min(delay, sync_every / num_fragments) * step_s


@dataclass(frozen=True)
class Level:
    """One level of a hierarchy. `interval` counts rounds of the level below; the innermost counts steps."""

    interval: int
    fragment_s: float  # one exchange of one fragment
    num_fragments: int = 1
    delay: int = 0
    own_s: float = 0.0


def rounds_of(step_s: float, levels: Sequence[Level]) -> list[RoundCost]:
    """Rounds inside rounds, the innermost level first. `total_utilization` of them is that of the whole."""
    made: list[RoundCost] = []
    for level in levels:
        hidden = hidden_s(level.interval, level.num_fragments, level.delay, step_s)
        made.append(
            round_cost(
                compute_s=level.interval * step_s,
                hidden_s=hidden,
                num_fragments=level.num_fragments,
                fragment_s=level.fragment_s,
                own_s=level.own_s,
            )
        )
        step_s = made[-1].wall_s
    return made


def total_utilization(rounds: Iterable[RoundCost]) -> float:
    return math.prod(each.utilization for each in rounds)


def split_target(utilization: float, count: int) -> float:
    """The target of each of `count` levels that together give `utilization`: they multiply."""
    return math.pow(utilization, 1.0 / max(count, 1))
