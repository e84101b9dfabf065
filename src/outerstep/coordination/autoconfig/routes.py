"""Who sends to whom: straight to the centre (a star), or some through another cluster (a tree), by the measured lines.

A relay passes bytes on as they are; it does not add contributions up. So screens, weights and hashes stay the centre's
business, and the price is that the relay's own line carries one exchange more for each cluster behind it. A tree
has one relay on a way at most: each more is one more machine whose death cuts others off.

Up to `EXACT` clusters every such tree is looked at. Above that, the star is improved move by move: the cluster behind
the slowest line goes elsewhere as long as that helps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Final

from ..cost import Lines, Parents, RouteCost, route_cost, star
from .state import HYSTERESIS, LayerState
from .trust import LayerView

EXACT: Final = 4
MOST_MOVES: Final = 256
SLOW_COUNTS: Final = 8.0


@dataclass(frozen=True)
class Routed:
    """A possible route of the counted clusters."""

    parents: Parents
    cost: RouteCost


class Routes:
    """Those of one layer, at one moment. Not empty if any cluster counts."""

    def __init__(self, layer: LayerState, view: LayerView) -> None:
        self._layer, self._view = layer, view
        names = view.counted
        trees = _every_tree(names, layer.centre) if len(names) <= EXACT else self._improved_star()
        self._found = [self._routed(tree) for tree in trees if _exists(tree, view.lines)]
        self._star = next((each for each in self._found if set(each.parents.values()) == {layer.centre}), None)
        now = layer.plan.parents if layer.plan else {}
        self._now = self.routed(now) if self.knows(now) else None

    def knows(self, parents: Parents) -> bool:
        """Whether this route leads every counted cluster to the centre, over lines that are known."""
        counted = self._counted(parents)
        leads_up = all(to == self._layer.centre or counted.get(to) == self._layer.centre for to in counted.values())
        return counted.keys() == set(self._view.counted) and leads_up and _exists(counted, self._view.lines)

    def routed(self, parents: Parents) -> Routed:
        """What a known route costs the counted clusters."""
        return self._routed(self._counted(parents))

    def _counted(self, parents: Parents) -> Parents:
        return {cluster: to for cluster, to in parents.items() if cluster in self._view.counted}

    def best(self, up_bytes: float, down_bytes: float, round_trips: float, *, strict: bool) -> Routed:
        """For an exchange of this size. A route that works is kept, and a star preferred to a tree, unless another is
        faster by the hysteresis; `strict` takes the fastest."""

        def seconds(each: Routed) -> float:
            return each.cost.transfer_s(up_bytes, down_bytes, round_trips)

        fastest = min([*self._found, *([self._now] if self._now else [])], key=seconds)
        for usual in () if strict else (self._now, self._star):
            if usual is not None and seconds(usual) <= HYSTERESIS * seconds(fastest):
                return usual
        return fastest

    def _routed(self, parents: Parents) -> Routed:
        layer = self._layer
        cost = route_cost(
            parents,
            self._view.lines,
            layer.centre,
            centre_in_bytes_per_s=layer.centre_in_bytes_per_s,
            centre_out_bytes_per_s=layer.centre_out_bytes_per_s,
        )
        return Routed(parents, cost)

    def _improved_star(self) -> Iterator[Parents]:
        """The star, if it exists, and each route on the way to one that no move improves."""
        lines, centre, names = self._view.lines, self._layer.centre, self._view.counted
        direct = [name for name in names if (name, centre) in lines and (centre, name) in lines]
        now = {name: centre if name in direct else _nearest(name, direct, lines) for name in names}
        if len(direct) == len(names):
            yield star(names, centre)
        yield now
        for _ in range(MOST_MOVES):
            moves = [(_relief(now, name, to, lines, centre), name, to) for name, to in _moves(now, lines, centre)]
            relief, name, to = max(moves, default=(0.0, "", ""))
            if relief <= 0.0:
                return
            now = {**now, name: to}
            yield now


@dataclass(frozen=True)
class OnlyRoute:
    """Nothing to choose: everybody exchanges with everybody, at this cost."""

    parents: Parents
    cost: RouteCost

    def knows(self, parents: Parents) -> bool:
        return parents == self.parents

    def routed(self, parents: Parents) -> Routed:
        return Routed(parents, self.cost)

    def best(self, up_bytes: float, down_bytes: float, round_trips: float, *, strict: bool) -> Routed:
        return Routed(self.parents, self.cost)


def whole_route(routed: Parents, layer: LayerState) -> dict[str, str]:
    """For every cluster of the layer: one that is not counted goes as before. A relay that has left, or does not send
    to the centre itself, is none: then straight to the centre."""
    before = layer.plan.parents if layer.plan else {}
    whole = {c.name: routed.get(c.name, before.get(c.name, layer.centre)) for c in layer.clusters}
    return {name: to if whole.get(to) == layer.centre else layer.centre for name, to in sorted(whole.items())}


def _exists(parents: Parents, lines: Lines) -> bool:
    return bool(parents) and all((c, p) in lines and (p, c) in lines for c, p in parents.items())


def _every_tree(names: Sequence[str], centre: str) -> Iterator[Parents]:
    """The star first, then those with fewer relayed clusters first."""
    for count in range(len(names)):
        for relayed in combinations(names, count):
            relays = [name for name in names if name not in relayed]
            for chosen in product(relays, repeat=count):
                yield {**star(relays, centre), **dict(zip(relayed, chosen, strict=True))}


def _nearest(name: str, relays: Sequence[str], lines: Lines) -> str:
    """A counted cluster without a line of its own has a relay that has one (trust.py)."""
    known = [relay for relay in relays if (name, relay) in lines and (relay, name) in lines]
    return max(known, key=lambda relay: (min(lines[name, relay].bytes_per_s, lines[relay, name].bytes_per_s), relay))


def _moves(parents: Parents, lines: Lines, centre: str) -> Iterator[tuple[str, str]]:
    """(Who, to whom): all that take a cluster off the slowest line up or down, or from behind it."""
    load = _load(parents)
    slow_up = max(parents, key=lambda c: (load[c] / lines[c, parents[c]].bytes_per_s, c))
    slow_down = max(parents, key=lambda c: (load[c] / lines[parents[c], c].bytes_per_s, c))
    for name in sorted({slow_up, slow_down, *(c for c, parent in parents.items() if parent in (slow_up, slow_down))}):
        if load[name] > 1:
            continue  # it relays itself: those behind it move first
        for to in (centre, *(c for c, parent in parents.items() if parent == centre and c != name)):
            if to != parents[name] and (name, to) in lines and (to, name) in lines:
                yield name, to


def _relief(parents: Parents, name: str, to: str, lines: Lines, centre: str) -> float:
    """By how much a move lowers Σ (seconds per byte of a line)^`SLOW_COUNTS`. The slowest line alone would not do: of
    several that are equally slow each must go, one after the other."""
    load, old = _load(parents), parents[name]

    def pressure(source: str, target: str, count: int) -> float:
        return math.pow(count / lines[source, target].bytes_per_s, SLOW_COUNTS)

    before = pressure(name, old, 1) + pressure(old, name, 1)
    after = pressure(name, to, 1) + pressure(to, name, 1)
    if old != centre:
        before += pressure(old, centre, load[old]) + pressure(centre, old, load[old])
        after += pressure(old, centre, load[old] - 1) + pressure(centre, old, load[old] - 1)
    if to != centre:
        before += pressure(to, centre, load[to]) + pressure(centre, to, load[to])
        after += pressure(to, centre, load[to] + 1) + pressure(centre, to, load[to] + 1)
    return before - after


def _load(parents: Parents) -> dict[str, int]:
    """How many exchanges pass each cluster's line."""
    load = dict.fromkeys(parents, 1)
    for parent in parents.values():
        if parent in load:
            load[parent] += 1
    return load
