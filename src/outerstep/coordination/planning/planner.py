"""Which settings suit a situation, and what they cost.

For every topology that makes sense, and every way to exchange there (a codec; blocking or streaming), the shortest
interval that meets the target is an *option*. The search, its bounds and its order of what is gentle are the
controller's (autoconfig/search.py), and so is the cost of a setting (cost.py): what this recommends is what a server
with `--target-utilization` would choose if it measured these links. Added here: what the option takes on each machine
(capacity.py), and which topology.

    server       every worker talks to one server
    hierarchy    the workers of a site agree among themselves, one contribution for each site goes up
    all-reduce   no server; one job, equal machines
    gossip       no server; peers vote, each sends to each
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import replace as replace_core
from typing import Any, Final, Literal

from msgspec.structs import replace

from ...errors import ConfigError
from ..autoconfig.controller import outer_lr
from ..autoconfig.routes import OnlyRoute
from ..autoconfig.search import Core, Search
from ..autoconfig.state import (
    HYSTERESIS,
    LONG_INTERVAL,
    ControllerState,
    LayerBounds,
    LayerState,
    check_state,
    usual_bounds,
)
from ..autoconfig.trust import view_of
from ..cost import Overheads, RoundCost, RouteCost, allreduce_route, mesh_route, split_target, star
from ..failures import ALL, Losses, RoundClosing
from ..server.plan import CARRY_BEYOND
from .capacity import (
    ServerNeeds,
    Sizing,
    Staleness,
    WorkerNeeds,
    server_needs,
    staleness,
    worker_needs,
)
from .guide import loss_ratio
from .situation import Choice, Engine, PlannedSite, Situation, layer_of

Topology = Literal["server", "hierarchy", "all-reduce", "gossip"]

INNER_INTERVALS: Final = (10, 25, 50, 100, 250, LONG_INTERVAL)  # steps between two rounds inside a site
INNER_CODEC: Final = "bf16"
MOST_PEERS: Final = 16  # without a server everybody needs a line to everybody
ALLREDUCE_ROUND_TRIPS: Final = 1.0
GOSSIP_ROUND_TRIPS: Final = 3.0  # fetch, propose, two votes
WORTH_A_LEVEL: Final = 1.5  # how much shorter an interval must get for one more level
NEARLY_EQUAL: Final = 1.05  # speeds: below, nobody need take fewer steps


@dataclass(frozen=True)
class Inside:
    """The rounds inside each site, in a hierarchy, by a server there or as one job. `above_every` of them are one
    interval between the sites."""

    sync_every: int
    above_every: int
    codec: str
    engine: Engine
    utilization: float
    closing: RoundClosing


@dataclass(frozen=True)
class Option:
    """`sync_every`: steps of the middle worker between two exchanges with the other sites. Times are of one such round;
    bytes are those of one member (a worker, or in a hierarchy a site) over its line. `utilization`: the share of all
    workers' time whose steps come into the model. `closing`: when rounds of that server close."""

    topology: Topology
    sync_every: int
    codec: str
    down_codec: str
    num_fragments: int
    delay: int
    outer_lr: float
    utilization: float
    meets_target: bool
    round_s: float
    compute_s: float
    up_bytes: float
    down_bytes: float
    staleness: Staleness
    members: int
    inside: Inside | None
    closing: RoundClosing
    not_planned_for: tuple[str, ...]
    server: ServerNeeds | None
    worker: WorkerNeeds
    loss_ratio: float | None

    @property
    def waiting_s(self) -> float:
        """Of a round: for exchanges, and what their arithmetic takes from training."""
        return self.round_s - self.compute_s

    @property
    def lost_share(self) -> float:
        """Of all workers' time: they are away after a failure, or take steps that die with them."""
        return self.compute_s / self.round_s - self.utilization

    @property
    def is_streamed(self) -> bool:
        return self.delay > 0


@dataclass(frozen=True)
class Proposal:
    """`options`: the recommended one first, then the others, those that meet the target before the rest."""

    situation: Situation
    options: tuple[Option, ...]
    reasons: tuple[str, ...]

    @property
    def recommended(self) -> Option:
        return self.options[0]


def propose(situation: Situation) -> Proposal:
    found = list(_options(situation))
    best = _recommended(situation, found)
    others = sorted((each for each in found if each is not best), key=_rank)
    return Proposal(situation, (best, *others), tuple(_reasons(situation, best, found)))


def _options(situation: Situation) -> Iterator[Option]:
    sites = situation.sites
    layer = _layer(situation, sites, situation.bounds(situation.workers), grouped=False)
    losses = _losses(situation, situation.workers)
    yield from (
        _option(situation, "server", search, core) for search, core in _settings(situation, layer, losses=losses)
    )
    if situation.choice.delay:
        return  # what follows blocks
    if situation.is_grouped:
        yield from _hierarchies(situation)
    elif 2 <= len(sites) <= MOST_PEERS:
        slowest = _slowest(sites)
        if situation.slowest_step_s <= NEARLY_EQUAL * situation.fastest_step_s:
            route = allreduce_route(len(sites), *slowest)
            yield from _among_peers(situation, layer, "all-reduce", route, ALLREDUCE_ROUND_TRIPS)
        yield from _among_peers(situation, layer, "gossip", mesh_route(len(sites), *slowest), GOSSIP_ROUND_TRIPS)


def _slowest(sites: tuple[PlannedSite, ...]) -> tuple[float, float, float]:
    return (
        min(site.up_bytes_per_s for site in sites),
        min(site.down_bytes_per_s for site in sites),
        max(site.round_trip_s for site in sites),
    )


# --- the settings of one layer, as the controller would choose them ---------------------------------------------------


def _layer(situation: Situation, sites: tuple[PlannedSite, ...], bounds: LayerBounds, *, grouped: bool) -> LayerState:
    layer = layer_of(situation, "plan", sites, bounds, grouped=grouped)
    check_state(ControllerState((layer,)))
    return layer


def _losses(situation: Situation, members: int, **how: Any) -> Losses | None:
    if not situation.expects_failures:
        return None
    return Losses(situation.failures, members, situation.noticed_s, **how)


def _settings(
    situation: Situation,
    layer: LayerState,
    routes: OnlyRoute | None = None,
    overheads: Overheads | None = None,
    losses: Losses | None = None,
) -> Iterator[tuple[Search, Core]]:
    """One for each codec, blocking and streaming: the gentlest that meets the target, or the fastest if none does."""
    view, bounds, said = view_of(layer), layer.bounds, situation.choice
    if not view.counted:
        raise ConfigError(f"these numbers cannot be planned with: {'; '.join(view.not_believed)}")
    blocking = (0, (said.num_fragments or 1,))
    streaming = (bounds.most_delay, bounds.fragments)
    ways = [blocking] if not bounds.most_delay else [streaming] if said.delay else [blocking, streaming]
    for codec in bounds.codecs:
        for most_delay, fragments in ways:
            narrow = replace(bounds, codecs=(codec,), most_delay=most_delay, fragments=fragments)
            search = Search(replace(layer, bounds=narrow), view, overheads or situation.overheads, routes, losses)
            core = search.gentlest() or search.fastest()
            if said.delay is not None:
                core = replace_core(core, delay=min(said.delay, core.sync_every - 1))
            if core.delay > 0 or most_delay == 0:  # a delay of 0 is the blocking one, seen before
                yield search, core


def _option(
    situation: Situation,
    topology: Topology,
    search: Search,
    core: Core,
    *,
    inside: Inside | None = None,
) -> Option:
    """`inside`: the rounds inside each site; then `core` counts these, not steps."""
    layer = search.layer
    cost, members, bounds = search.cost(core), len(layer.clusters), layer.bounds
    unit_steps = inside.sync_every if inside else 1
    steps = core.sync_every * unit_steps
    utilization = cost.utilization * (inside.utilization if inside else 1.0)
    among_peers = topology in ("all-reduce", "gossip")
    run = Sizing(
        situation.parameters,
        members,
        core.codec,
        bounds.down_for(core.codec),
        core.num_fragments,
        core.delay,
        situation.weights,
        carries=core.delay > CARRY_BEYOND * core.sync_every,
    )
    sent = _sent_by_a_peer(topology, members) * run.up_bytes if among_peers else run.up_bytes
    return Option(
        topology=topology,
        sync_every=steps,
        codec=core.codec,
        down_codec=core.codec if among_peers else run.down_codec,
        num_fragments=core.num_fragments,
        delay=core.delay,
        outer_lr=outer_lr(bounds, steps),
        utilization=utilization,
        meets_target=utilization >= situation.target_utilization,
        round_s=cost.wall_s,
        compute_s=cost.compute_s if inside is None else steps * situation.middle_step_s,
        up_bytes=sent,
        down_bytes=sent if among_peers else run.down_bytes,
        staleness=staleness(steps, core.delay * unit_steps, members),
        members=members,
        inside=inside,
        closing=search.closing(core),
        not_planned_for=search.view.not_planned_for,
        server=None if among_peers else server_needs(run),
        worker=worker_needs(run),
        loss_ratio=loss_ratio(steps, core.codec, core.delay),
    )


# --- other topologies -------------------------------------------------------------------------------------------------


def _sent_by_a_peer(topology: Topology, members: int) -> float:
    """Contributions' worth of bytes, up and as many down: as cost.py has them."""
    return 2 * (members - 1) / members if topology == "all-reduce" else members - 1


def _of_a_peer(overheads: Overheads, topology: Topology, members: int, round_trips: float) -> Overheads:
    """Every peer does a server's work: in an all-reduce of its slice, in gossip of all contributions, but of nothing
    that goes down (exchange_s counts both directions)."""
    share = 1.0 / members if topology == "all-reduce" else 0.5
    return replace_core(
        overheads,
        round_trips=min(round_trips, overheads.round_trips),
        carried_bytes=0.0,
        server_s_per_byte=share * overheads.server_s_per_byte,
    )


def _among_peers(
    situation: Situation, layer: LayerState, topology: Topology, cost: RouteCost, round_trips: float
) -> Iterator[Option]:
    """Blocking: gossip decides one round after the other, and an all-reduce has everybody in step."""
    one = replace(layer, bounds=replace(layer.bounds, most_delay=0, fragments=(1,)))
    parents = star((cluster.name for cluster in layer.clusters), layer.centre)
    overheads = _of_a_peer(situation.overheads, topology, len(layer.clusters), round_trips)
    losses = _losses(
        situation, len(layer.clusters), is_one_job=topology == "all-reduce", may_close_early=topology == "server"
    )
    for search, core in _settings(situation, one, OnlyRoute(parents, cost), overheads, losses):
        yield _option(situation, topology, search, core)


def _hierarchies(situation: Situation) -> Iterator[Option]:
    """Both levels together are to meet the target, so each gets its root of it. Inside: a server per site, on the local
    network. Between the sites the members wait for what comes from above; or, with a delay of some of their rounds, go
    on meanwhile."""
    part = split_target(situation.target_utilization, 2)
    fixed = situation.choice.inside_every
    said = situation.choice
    for inner in INNER_INTERVALS if fixed is None else (fixed,):
        engine, cost, closing = _inside(situation, inner)
        unit_s = cost.wall_s
        units = tuple(
            replace_core(site, step_s=unit_s * site.step_s / situation.middle_step_s) for site in situation.sites
        )
        usual = situation.bounds(len(units))
        least, most = usual.least_sync_every, usual.most_sync_every
        # Rounds inside between two exchanges. With one, a level only adds up what crosses the line: the last resort.
        fewest = 2 if fixed is None and inner < most else 1
        if said.sync_every is not None:
            least = most = said.sync_every
        if most < fewest * inner or (said.sync_every is not None and said.sync_every % inner):
            continue
        bounds = replace(
            usual,
            least_sync_every=max(-(-least // inner), fewest),
            most_sync_every=most // inner,
            fragments=(1,),
            most_delay=usual_bounds(situation.parameters, len(units)).most_delay
            if said.rounds_delay is None
            else said.rounds_delay,
        )
        losses = _losses(situation, len(units), ranks=_largest(situation)) if engine == "allreduce" else None
        between = replace_core(situation, choice=replace_core(said, delay=said.rounds_delay))
        layer = replace(_layer(situation, units, bounds, grouped=True), target_utilization=part)
        made = [
            _option(
                situation,
                "hierarchy",
                search,
                core,
                inside=Inside(inner, core.sync_every, inner_codec(situation), engine, cost.utilization, closing),
            )
            for search, core in _settings(between, layer, losses=losses)
        ]
        yield _gentlest(situation, made)


def inner_codec(situation: Situation) -> str:
    """Inside the sites: the one that was fixed, or the usual one."""
    return situation.choice.inside_codec or situation.choice.codec or INNER_CODEC


def _inside(situation: Situation, inner: int) -> tuple[Engine, RoundCost, RoundClosing]:
    """The rounds of the largest site: through a server there, or as one job, whichever leaves more for training."""
    largest = max(situation.sites, key=lambda site: site.workers)
    local, count = situation.local, largest.workers
    here = replace_core(
        largest,
        up_bytes_per_s=local.bytes_per_s * count,
        down_bytes_per_s=local.bytes_per_s * count,
        round_trip_s=2 * local.latency_s,
        step_s=situation.middle_step_s,
    )
    codecs = (inner_codec(situation),)
    bounds = LayerBounds(least_sync_every=inner, most_sync_every=inner, codecs=codecs, most_delay=0)
    server = situation.server_local_bytes_per_s or local.bytes_per_s
    inside = replace_core(situation, server_in_bytes_per_s=server, server_out_bytes_per_s=server, choice=Choice())
    layer = _layer(inside, (here,), bounds, grouped=False)
    ((search, core),) = _settings(inside, layer, losses=_losses(situation, count))
    made: tuple[Engine, RoundCost, RoundClosing] = "server", search.cost(core), search.closing(core)
    said = situation.choice.engine
    if count > 1 and said != "server":
        route = allreduce_route(count, local.bytes_per_s, local.bytes_per_s, 2 * local.latency_s)
        parents = star((cluster.name for cluster in layer.clusters), layer.centre)
        overheads = _of_a_peer(situation.overheads, "all-reduce", count, ALLREDUCE_ROUND_TRIPS)
        losses = _losses(situation, count, is_one_job=True)
        ((search, core),) = _settings(inside, layer, OnlyRoute(parents, route), overheads, losses)
        cost = search.cost(core)
        if cost.utilization > made[1].utilization or said == "allreduce":
            made = "allreduce", cost, ALL
    return made


# --- over the interval ------------------------------------------------------------------------------------------------


def utilization_by_interval(situation: Situation, option: Option) -> list[tuple[int, float]]:
    """(H, utilization) of a server's setting, at every interval of the controller's ladder."""
    bounds = replace(situation.bounds(situation.workers), least_sync_every=10, most_sync_every=LONG_INTERVAL)
    layer = _layer(situation, situation.sites, bounds, grouped=False)
    search = Search(layer, view_of(layer), situation.overheads, losses=_losses(situation, situation.workers))
    parents = star((cluster.name for cluster in layer.clusters), layer.centre)
    return [
        (h, search.cost(Core(h, option.codec, option.num_fragments, min(option.delay, h - 1), parents)).utilization)
        for h in search.intervals(option.num_fragments)
    ]


# --- which one, and why -----------------------------------------------------------------------------------------------


def _rank(option: Option) -> tuple[bool, int, float, float]:
    """Those that meet the target by their interval, the others by how near they come."""
    order = ("server", "hierarchy", "all-reduce", "gossip").index(option.topology)
    near = option.sync_every if option.meets_target else -option.utilization
    return not option.meets_target, order, near, -option.up_bytes


def _recommended(situation: Situation, found: list[Option]) -> Option:
    """A server, with what the controller would choose, unless it misses the target and a hierarchy does not, or needs
    an interval that is longer by half. Peers without a centre are somebody's wish, not a speed: they are not
    recommended, they are shown."""
    flat = _gentlest(situation, [each for each in found if each.topology == "server"])
    grouped = [each for each in found if each.topology == "hierarchy"]
    if not grouped:
        return flat
    across = _gentlest(situation, grouped)
    if across.meets_target and (not flat.meets_target or flat.sync_every > WORTH_A_LEVEL * across.sync_every):
        return across
    if not flat.meets_target and across.utilization > flat.utilization:
        return across
    return flat


def _gentlest(situation: Situation, found: list[Option]) -> Option:
    """The controller's rule: of the ways in their order (codec, then delay) the first whose interval is at most a
    quarter longer than the shortest. With room for slower exchanges, if a setting has it."""
    good = [each for each in found if each.meets_target]
    if not good:
        return max(found, key=lambda each: each.utilization)
    shortest = min(each.sync_every for each in good)
    codecs = situation.bounds(1).codecs
    near = [each for each in good if each.sync_every <= HYSTERESIS * shortest]
    return min(near, key=lambda each: (each.delay > 0, codecs.index(each.codec), each.sync_every))


def _reasons(situation: Situation, best: Option, found: list[Option]) -> Iterator[str]:
    target = f"{100 * situation.target_utilization:g} %"
    if best.meets_target:
        yield (
            f"H = {best.sync_every} is about the shortest interval that leaves {target} of the time for training; "
            "a shorter one learns more per step"
        )
    else:
        yield f"nothing within bounds leaves {target} for training; this is the best of them"
    exact = [each for each in found if each.topology == best.topology and each.codec == situation.bounds(1).codecs[0]]
    if exact and exact[0].codec != best.codec:
        first = min(exact, key=lambda each: (not each.meets_target, each.sync_every))
        needs = f"needs H = {first.sync_every}" if first.meets_target else f"reaches {100 * first.utilization:.0f} %"
        yield f"{best.codec}: {first.codec} {needs}, and a smaller codec costs less loss than a longer interval"
    if best.delay and best.inside:
        yield f"τ = {best.delay}: the workers of a site go on for {best.delay} of its rounds while what it sent travels"
    elif best.delay:
        yield (
            f"{best.num_fragments} fragment{'s' * (best.num_fragments > 1)}, τ = {best.delay}: training goes on for "
            f"{best.delay} steps while each piece travels"
        )
    if best.topology == "hierarchy":
        most = max(each.utilization for each in found if each.topology == "server")
        yield (
            "a hierarchy: one contribution per site crosses its line, not one per worker; one server for all "
            f"{situation.workers} workers reaches {100 * most:.0f} %"
        )
    if situation.expects_failures:
        yield from _reasons_of_failures(situation, best)
    if situation.is_grouped:
        yield "GPUs of one machine are one worker as a torchrun job (DDP, FSDP2): then count the job, not the GPUs"
    if situation.slowest_step_s > NEARLY_EQUAL * situation.fastest_step_s:
        times = situation.slowest_step_s / situation.fastest_step_s
        yield f"the slowest worker needs {times:.1f} times as long for a step; with --dylu it takes fewer"
    if best.not_planned_for:
        yield f"not planned for, their lines are too slow: {', '.join(best.not_planned_for)}; rounds close without them"


def _reasons_of_failures(situation: Situation, best: Option) -> Iterator[str]:
    failures = situation.failures
    yield (
        f"{100 * failures.per_hour:g} % of the workers fail in an hour, each is back after {failures.restart_s:g} s: "
        f"{100 * best.lost_share:.2g} % of all time is lost with them"
    )
    inside = best.inside
    for closing, members in ((best.closing, best.members), (inside.closing if inside else ALL, _largest(situation))):
        if closing.quorum is not None:
            yield (
                f"rounds close with {closing.quorum} of {members} and {closing.grace_s:g} s of grace: nobody waits "
                f"{situation.noticed_s:g} s until it is noticed that one has died"
            )
    if inside is not None and inside.engine == "server":
        yield (
            f"a server inside: as one job, the {_largest(situation)} workers of a site would all end and start again "
            f"about every {1.0 / (_largest(situation) * failures.per_s):.0f} s, whenever one of them dies"
        )


def _largest(situation: Situation) -> int:
    return max(site.workers for site in situation.sites)
