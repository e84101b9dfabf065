"""The choice of a cluster's way to the layer above: direct, or through another cluster that relays.

A *way* is an address of the server above and an optional relay ("" = none). Every real transfer measures its way, and
now and then a small probe does. The rules:

- Take the way that the plan of the layer above names, unless that way is cut, or another way measures twice as fast.
  The plan knows what all clusters send; a cluster knows that its own call has just failed.
- If no plan names a way, go direct, unless the direct way is cut, or another way is a quarter faster.
- Return to the first choice as soon as the reason for the change is gone.
- A way is cut when a call on it gets no answer. It works again after two answers in a row.
- After a change for speed, keep the way for a while: two similar links must not alternate.
- Several addresses stand for one server that may have moved. Try the next address only when no way reaches the current
  one, and return only for the same reason: the old address may still serve an older copy of the run.

Nothing here waits, calls or reads a clock. Ask `best` before a call, and report afterwards how the call went.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from ..autoconfig.meter import SMALLEST_BYTES, LinkMeter
from ..autoconfig.state import HYSTERESIS
from ..backoff import Backoff
from ..cost import RouteCost

PLANNED: Final = 2.0  # a planned way may be slower by this factor
ANSWERS: Final = 2  # in a row, until a cut way works again
KEPT_S: Final = 60.0  # how long a way is kept after a change for speed
PROBE_S: Final = 60.0  # between probes of a working way
CUT_PROBES: Final = Backoff(1.0, 30.0)  # of a cut way
LEAST_BYTES: Final = 1 << 20  # the smallest exchange that ways are compared by
UP, DOWN = "up", "down"


@dataclass(frozen=True)
class WayUp:
    """A way to the layer above. `relay`: "" = direct."""

    server: str
    relay: str = ""

    def __str__(self) -> str:
        return f"{self.server} via {self.relay}" if self.relay else self.server


@dataclass
class _State:
    """The recent calls on a way. `failures`: in a row. `answers`: in a row since the last failure. `tried_at`:
    -inf = never."""

    failures: int = 0
    answers: int = 0
    probe_at: float = 0.0
    tried_at: float = -math.inf

    @property
    def is_whole(self) -> bool:
        return self.failures == 0 or self.answers >= ANSWERS


@dataclass(frozen=True)
class WayView:
    """The state of a way, for a status. An unknown rate is 0."""

    way: WayUp
    is_used: bool
    is_whole: bool
    up_bytes_per_s: float
    down_bytes_per_s: float
    latency_s: float
    is_ordered: bool = False


@dataclass(frozen=True)
class MeasuredWay:
    """A way with the seconds since the last measurement of each direction."""

    view: WayView
    up_age_s: float
    down_age_s: float


class Routing:
    """All ways of one cluster to the layer above. `servers`: in the order of the attempts. `relays`: in any order."""

    def __init__(self, servers: Sequence[str], relays: Iterable[str] = ()) -> None:
        relays = list(dict.fromkeys(relays))
        self.ways = [WayUp(server, relay) for server in dict.fromkeys(servers) for relay in ("", *relays)]
        self.current = self.ways[0]
        self.reason = ""  # why this way was taken, if it is not the first choice
        self._states = {way: _State() for way in self.ways}
        self._meter = LinkMeter("cluster")
        self._size_bytes = LEAST_BYTES
        self._changed_at = -math.inf
        self.ordered: str | None = None  # the relay that the plan names; "" = direct; None = there is no plan

    def order(self, relay: str | None) -> None:
        """Follow the current plan: a relay's address, "" for direct, None for no choice. A relay that we do not know
        counts as no choice."""
        known = relay if relay is None or any(way.relay == relay for way in self.ways) else None
        if known != self.ordered:
            self.ordered, self._changed_at = known, -math.inf

    def best(self, now: float, avoid: Collection[WayUp] = ()) -> WayUp | None:
        """The way for the next call. `avoid`: the ways on which this call has just failed. None = no way is left."""
        if self.current not in avoid and self._states[self.current].is_whole:
            self._change_for_speed(now)
        else:
            self._change_for_need(now, avoid)
        return self.current if self.current not in avoid else None

    def failed(self, way: WayUp, now: float, since: float = math.inf) -> None:
        """A call got no answer. `since`: when it began. Calls that were cut together count as one failure."""
        state = self._states[way]
        if state.failures and state.tried_at >= since:
            return
        state.probe_at = now + CUT_PROBES.longest_pause_s(state.failures)
        state.failures, state.answers, state.tried_at = state.failures + 1, 0, now

    def answered(self, way: WayUp, now: float, latency_s: float | None = None) -> None:
        """A call got an answer of any kind. `latency_s`: if the other end answers such a call at once."""
        state = self._states[way]
        state.answers, state.tried_at = state.answers + 1, now
        if state.is_whole:
            state.failures = 0
        else:
            state.probe_at = min(state.probe_at, now + CUT_PROBES.first_s)
        if latency_s is not None:
            self._meter.answered(str(way), UP, latency_s / 2)
            self._meter.answered(DOWN, str(way), latency_s / 2)

    def moved(self, way: WayUp, now: float, seconds: float, *, up_bytes: int = 0, down_bytes: int = 0) -> None:
        """This many bytes took this long, without latency. Enough bytes for a measurement postpone the next probe."""
        self._size_bytes = max(self._size_bytes, up_bytes, down_bytes)
        if max(up_bytes, down_bytes) >= SMALLEST_BYTES and self._states[way].is_whole:
            self._states[way].probe_at = now + PROBE_S
        if up_bytes:
            self._meter.transferred(str(way), UP, up_bytes, seconds, now)
        if down_bytes:
            self._meter.transferred(DOWN, str(way), down_bytes, seconds, now)

    def probed_in_vain(self, way: WayUp, now: float) -> None:
        """The other end refused a probe, so nothing was measured."""
        self.answered(way, now)
        self._states[way].probe_at = now + PROBE_S

    def due(self, now: float) -> list[WayUp]:
        """The ways to probe now: cut ways, and those to the current server."""
        return [
            way
            for way, state in self._states.items()
            if now >= state.probe_at and (way.server == self.current.server or not state.is_whole)
        ]

    def latency_s(self, way: WayUp) -> float:
        return self._view(way, self._rates()).latency_s

    def views(self) -> list[WayView]:
        rates = self._rates()
        return [self._view(way, rates) for way in self.ways]

    def measured(self, now: float) -> list[MeasuredWay]:
        """The ways to the current server with both directions measured, for the plan of the layer above."""
        ages = {(each.source, each.target): each.age_s for each in self._meter.reports(now)}
        found = []
        for view in self.views():
            up_age, down_age = ages.get((str(view.way), UP)), ages.get((DOWN, str(view.way)))
            if view.way.server == self.current.server and view.is_whole and up_age is not None and down_age is not None:
                found.append(MeasuredWay(view, up_age, down_age))
        return found

    # --- inside -------------------------------------------------------------------------------------------------------

    def _change_for_speed(self, now: float) -> None:
        """Compare the working ways to the current server."""
        rates = self._rates()
        costs = {
            way: self._seconds(self._view(way, rates))
            for way in self.ways
            if way.server == self.current.server and self._states[way].is_whole
        }
        usual = WayUp(self.current.server, self.ordered or "")
        limit = PLANNED if self.ordered is not None else HYSTERESIS  # slower by at most this factor is good enough
        fastest = min(costs, key=lambda way: costs[way])
        was_cut = self._changed_at == -math.inf
        if not was_cut and now - self._changed_at < KEPT_S:
            return
        if self.current == usual:
            if limit * costs[fastest] < costs[usual] < math.inf:  # unknown does not mean slow
                name = usual.relay or "the direct way"
                self._take(fastest, f"{name} takes {costs[usual] / costs[fastest]:.1f} times as long", now)
        elif usual in costs and (
            costs[usual] <= (limit if was_cut else math.sqrt(limit)) * costs[fastest] or costs[usual] == math.inf
        ):
            self._take(usual, "the plan says so" if self.ordered else "", now)
        elif costs[self.current] > HYSTERESIS * costs[fastest]:
            self._take(fastest, f"{self.current} takes {costs[self.current] / costs[fastest]:.1f} times as long", now)

    def _change_for_need(self, now: float, avoid: Collection[WayUp]) -> None:
        """The current way is cut. Take another to the same server, else one to the next: working ways first, then in
        turn."""
        place = {way: number for number, way in enumerate(self.ways)}
        here = self.current.server
        others = [way for way in self.ways if way not in avoid]
        if not others:
            return
        whole = [way for way in others if self._states[way].is_whole]
        of_here = [way for way in whole if way.server == here]
        rates = self._rates()
        if of_here:
            chosen = min(of_here, key=lambda way: (self._seconds(self._view(way, rates)), place[way]))
        else:
            chosen = min(whole or others, key=lambda way: (self._states[way].tried_at, place[way]))
        if chosen != self.current:
            self._take(chosen, f"no answer on {self.current}", -math.inf)

    def _take(self, way: WayUp, reason: str, changed_at: float) -> None:
        self.current, self._changed_at = way, changed_at
        self.reason = reason

    def _seconds(self, view: WayView) -> float:
        """The duration of an exchange of the usual size; inf = unknown."""
        if not view.up_bytes_per_s and not view.down_bytes_per_s:
            return math.inf
        up = view.up_bytes_per_s or view.down_bytes_per_s
        down = view.down_bytes_per_s or view.up_bytes_per_s
        return RouteCost(1.0 / up, 1.0 / down, view.latency_s).transfer_s(self._size_bytes, self._size_bytes, 1.0)

    def _rates(self) -> dict[tuple[str, str], tuple[float, float]]:
        return {(each.source, each.target): (each.bytes_per_s, each.latency_s) for each in self._meter.reports(0.0)}

    def _view(self, way: WayUp, rates: dict[tuple[str, str], tuple[float, float]]) -> WayView:
        up, down = rates.get((str(way), UP), (0.0, 0.0)), rates.get((DOWN, str(way)), (0.0, 0.0))
        is_ordered = self.ordered is not None and way.relay == self.ordered
        whole = self._states[way].is_whole
        return WayView(way, way == self.current, whole, up[0], down[0], up[1] + down[1], is_ordered)
