"""Which interval, codec, fragments and delay give the target utilization, from the gentlest on.

What each costs in loss, as measured (docs/concepts/autoconfig.md): a smaller codec nothing that can be seen, a delay of
up to five steps 0.2 %, a doubled interval about 3 %. So the order is: codec, then delay, then interval. A *way* is a
codec, a number of fragments, and whether training waits for an exchange; for each way there is a smallest interval that
meets the target. The first way is taken whose interval is at most a quarter longer than the shortest of all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from ..cost import (
    MEASURED,
    Overheads,
    Parents,
    RoundCost,
    bytes_per_value,
    fragment_s,
    hidden_s,
    round_cost,
    with_failures,
)
from ..failures import ALL, Losses, RoundClosing
from .routes import Routed, Routes
from .state import HYSTERESIS, LayerState
from .trust import LayerView


@dataclass(frozen=True)
class Core:
    """The part of a plan that the link decides about."""

    sync_every: int
    codec: str
    num_fragments: int
    delay: int
    parents: Parents


class PossibleRoutes(Protocol):
    def knows(self, parents: Parents) -> bool: ...
    def routed(self, parents: Parents) -> Routed: ...
    def best(self, up_bytes: float, down_bytes: float, round_trips: float, *, strict: bool) -> Routed: ...


class Search:
    """Over one layer at one moment, with something to plan with (`view.counted`)."""

    def __init__(
        self,
        layer: LayerState,
        view: LayerView,
        overheads: Overheads = MEASURED,
        routes: PossibleRoutes | None = None,
        losses: Losses | None = None,
    ) -> None:
        """`routes`: other ways than to a centre; `losses`: to failures that are to be expected. Both for a planner."""
        self._layer, self._view, self._overheads, self._losses = layer, view, overheads, losses
        self._step_s = view.reference_step_s
        self._routes: PossibleRoutes = Routes(layer, view) if routes is None else routes
        self._chosen: dict[tuple[str, int, bool], Routed] = {}

    @property
    def layer(self) -> LayerState:
        return self._layer

    @property
    def view(self) -> LayerView:
        return self._view

    # --- what a setting costs ----------------------------------------------------------------------------------------

    def cost(self, core: Core, *, slower: float = 1.0) -> RoundCost:
        """`slower`: with exchanges that take so many times as long as measured."""
        hidden = hidden_s(core.sync_every, core.num_fragments, core.delay, self._step_s)
        between_s = core.sync_every / core.num_fragments * self._step_s
        how: dict[str, float] = {"between_s": between_s, "hidden_s": hidden, "slower": slower}
        travels_s = self._fragment_s(core.codec, core.num_fragments, self._routes.routed(core.parents), **how)
        return self._round(core.sync_every, core.num_fragments, core.delay, travels_s)

    def closing(self, core: Core) -> RoundClosing:
        """When rounds close, with the failures that are to be expected."""
        return ALL if self._losses is None else self._losses.closing(self.cost(core).wall_s)

    def exchange_s(self, core: Core) -> float:
        """All fragments one after the other."""
        routed = self._routes.routed(core.parents)
        return core.num_fragments * self._fragment_s(core.codec, core.num_fragments, routed)

    def meets(self, cost: RoundCost) -> bool:
        return cost.utilization >= self._layer.target_utilization

    def misses_by_far(self, cost: RoundCost) -> bool:
        """It waits more than twice as long as the target allows."""
        allowed = cost.compute_s * (1.0 / self._layer.target_utilization - 1.0)
        return cost.waiting_s + cost.own_s > 2.0 * allowed

    def can_route(self, core: Core) -> bool:
        return self._routes.knows(core.parents)

    def _round(self, sync_every: int, num_fragments: int, delay: int, travels_s: float) -> RoundCost:
        hidden = hidden_s(sync_every, num_fragments, delay, self._step_s)
        cost = round_cost(
            compute_s=sync_every * self._step_s,
            hidden_s=hidden,
            num_fragments=num_fragments,
            fragment_s=travels_s,
            own_s=self._overheads.worker_s_per_parameter * self._layer.parameters,
        )
        return cost if self._losses is None else with_failures(cost, self._losses, hidden)

    def _fragment_s(self, codec: str, num_fragments: int, routed: Routed, **how: float) -> float:
        """Unless `how` says how soon another one follows, it begins slowly. A choice rests on that, and not on
        connections that stay open wide: kernels differ in when they close them."""
        members, parameters, down = len(self._view.clusters), self._layer.parameters, self._down(codec)
        counted = {"num_fragments": num_fragments, **how}
        return fragment_s(parameters, codec, down, routed.cost, members, self._overheads, **counted)  # type: ignore[arg-type]

    def _down(self, codec: str) -> str:
        return self._layer.bounds.down_for(codec)

    def _route_for(self, codec: str, num_fragments: int, strict: bool) -> Routed:
        """Each fragment pays for its round trips."""
        key = codec, num_fragments, strict
        if key not in self._chosen:
            up_bytes = self._layer.parameters * bytes_per_value(codec)
            down_bytes = self._layer.parameters * bytes_per_value(self._down(codec))
            round_trips = num_fragments * self._overheads.trips(up_bytes / num_fragments, down_bytes / num_fragments)
            self._chosen[key] = self._routes.best(up_bytes, down_bytes, round_trips, strict=strict)
        return self._chosen[key]

    # --- which one ---------------------------------------------------------------------------------------------------

    def gentlest(self) -> Core | None:
        """With room for exchanges that take a quarter longer, if there is such a setting; else without. None: no
        setting within the bounds meets the target."""
        return self.meeting(HYSTERESIS) or self.meeting(1.0) or self.meeting(1.0, strict=True)

    def meeting(self, slower: float, *, strict: bool = False) -> Core | None:
        found = [core for way in self._ways() if (core := self._shortest(*way, slower, strict)) is not None]
        shortest = min((core.sync_every for core in found), default=0)
        return next((core for core in found if core.sync_every <= HYSTERESIS * shortest), None)

    def fastest(self) -> Core:
        """The highest utilization within the bounds, whether it is enough or not."""
        made: list[tuple[float, Core]] = []
        for codec, fragments, streamed in self._ways():
            routed, sync_every = self._route_for(codec, fragments, True), self.intervals(fragments)[-1]
            travels_s = self._fragment_s(codec, fragments, routed)
            delay = self._delay(sync_every, fragments, travels_s) if streamed else 0
            cost = self._round(sync_every, fragments, delay, travels_s)
            made.append((cost.utilization, Core(sync_every, codec, fragments, delay, routed.parents)))
        return max(made, key=lambda each: each[0])[1]

    def order(self, core: Core) -> int:
        """Of its way: the smaller, the gentler."""
        ways = list(self._ways())
        way = core.codec, core.num_fragments, core.delay > 0
        return ways.index(way) if way in ways else len(ways)

    def _ways(self) -> Iterator[tuple[str, int, bool]]:
        bounds = self._layer.bounds
        now = self._layer.plan.num_fragments if self._layer.plan else 0
        fragments = sorted(set(bounds.fragments), key=lambda count: (count != now, count))
        for streamed in (False, True) if bounds.most_delay > 0 else (False,):
            for num_fragments in fragments:
                for codec in bounds.codecs:
                    yield codec, num_fragments, streamed

    def _shortest(self, codec: str, fragments: int, streamed: bool, slower: float, strict: bool) -> Core | None:
        routed = self._route_for(codec, fragments, strict)
        travels_s = self._fragment_s(codec, fragments, routed, slower=slower)
        for sync_every in self.intervals(fragments):
            delay = self._delay(sync_every, fragments, travels_s) if streamed else 0
            if self.meets(self._round(sync_every, fragments, delay, travels_s)):
                return Core(sync_every, codec, fragments, delay, routed.parents)
        return None

    def _delay(self, sync_every: int, num_fragments: int, travels_s: float) -> int:
        """As long as a fragment travels, within bounds."""
        longest = self._layer.bounds.longest_delay(sync_every)
        return min(longest, sync_every // num_fragments, math.ceil(travels_s / self._step_s))

    # --- intervals ---------------------------------------------------------------------------------------------------

    def intervals(self, num_fragments: int) -> list[int]:
        """Those to choose from, a quarter apart, so that a plan does not change for a step more or less. A global batch
        fixes the interval: it is how long all clusters together take for so many samples, with batches as they are."""
        bounds = self._layer.bounds
        least, most = max(bounds.least_sync_every, num_fragments), bounds.most_sync_every
        if self._layer.global_batch:
            per_s = sum(cluster.batch_size / cluster.step_s for cluster in self._view.clusters)
            return [min(max(round(self._layer.global_batch / per_s / self._step_s), least), most)]
        return _a_quarter_apart(least, most)


def _a_quarter_apart(least: int, most: int) -> list[int]:
    found = [least]
    while (following := max(found[-1] + 1, round(found[-1] * HYSTERESIS))) < most:
        found.append(following)
    return found if most == least else [*found, most]
