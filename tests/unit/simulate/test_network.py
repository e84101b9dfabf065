"""Simulated links: bytes take time, in order and in each direction; without a limit everything is as it always was."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest

from outerstep.simulate import History, Scenario, run, world
from outerstep.simulate.agenda import Agenda
from outerstep.simulate.network import Conditions, Network

TINY = Conditions(delay_s=1e-9)


class Meeting:
    """A network, and when each message arrived."""

    def __init__(self, conditions: Conditions = TINY) -> None:
        self.agenda = Agenda()
        self.network = Network(self.agenda, random.Random(1))
        self.network.conditions = conditions
        self.arrived: dict[str, float] = {}

    def send(self, name: str, size_bytes: int, source: str = "a", target: str = "s") -> None:
        def deliver(damaged: bool) -> None:
            self.arrived[name] = self.agenda.now

        self.network.send(source, target, deliver, size_bytes=size_bytes)

    def run(self, until: float = 1e6) -> dict[str, float]:
        self.agenda.run_until(lambda: False, limit_s=until)
        return {name: round(at, 6) for name, at in self.arrived.items()}


def test_bytes_leave_in_order_at_the_links_pace() -> None:
    met = Meeting()
    met.network.limit("a", "s", 100.0)
    met.send("first", 1000)
    met.send("second", 500)
    assert met.run() == {"first": 10.0, "second": 15.0}


def test_each_direction_and_each_link_has_its_own() -> None:
    met = Meeting()
    met.network.limit("a", "s", 100.0)
    met.network.limit("s", "a", 1000.0)
    met.send("up", 1000)
    met.send("down", 1000, "s", "a")
    met.send("elsewhere", 10**9, "b", "s")
    assert met.run() == {"elsewhere": 0.0, "down": 1.0, "up": 10.0}


def test_all_that_a_node_gets_or_sends_can_share_a_limit() -> None:
    met = Meeting()
    met.network.limit("", "s", 100.0)
    for name in "abc":
        met.send(name, 1000, source=name)
    assert met.run() == {"a": 10.0, "b": 20.0, "c": 30.0}, "the last is there when a fair share would have it there"
    out = Meeting()
    out.network.limit("s", "", 100.0)
    out.network.limit("s", "b", 10.0)
    out.send("a", 1000, "s", "a")
    out.send("b", 1000, "s", "b")
    assert out.run() == {"a": 10.0, "b": 120.0}, "out of the server, then over its own link"


def test_what_has_no_size_does_not_queue() -> None:
    met = Meeting()
    met.network.limit("a", "s", 1.0)
    met.send("body", 1000)
    met.send("heartbeat", 0)
    assert met.run() == {"heartbeat": 0.0, "body": 1000.0}


def test_a_change_of_pace_holds_for_what_is_under_way() -> None:
    met = Meeting()
    met.network.limit("a", "s", 100.0)
    met.send("first", 1000)
    met.send("second", 1000)
    met.agenda.at(5.0, lambda: met.network.limit("a", "s", 10.0))
    met.agenda.at(30.0, lambda: met.network.limit("a", "s", 0.0))
    met.agenda.at(130.0, lambda: met.network.limit("a", "s", 1000.0))
    assert met.run(129.0) == {}
    # 500 bytes in 5 s, 250 in 25 s, nothing for 100 s, the other 250 in a quarter of a second
    assert met.run() == {"first": 130.25, "second": 131.25}


def test_the_delay_comes_after_the_bytes() -> None:
    met, same = Meeting(Conditions(delay_s=2.0)), random.Random(1)
    met.network.limit("a", "s", 100.0)
    met.send("first", 1000)
    for _ in range(3):  # repeated? lost? damaged?
        same.random()
    assert met.run() == {"first": round(10.0 + same.expovariate(0.5), 6)}


@pytest.mark.parametrize("rate", [-1.0, float("nan"), float("inf")])
def test_a_pace_is_a_number(rate: float) -> None:
    with pytest.raises(ValueError, match="bytes_per_s must be finite and not negative"):
        Meeting().network.limit("a", "s", rate)


def test_a_link_that_is_cut_meanwhile_delivers_nothing() -> None:
    met = Meeting()
    met.network.limit("a", "s", 100.0)
    met.send("first", 1000)
    met.agenda.at(5.0, lambda: met.network.cut.add(("a", "s")))
    assert met.run() == {}
    assert met.network.lost == 1


def test_every_byte_takes_its_time_whatever_happens_to_the_pace() -> None:
    """Against a sum over small slices of time."""
    for seed in range(30):
        rng = random.Random(f"pace {seed}")
        paces = [(5.0 * i, rng.choice([0.0, 10.0, 50.0, 200.0])) for i in range(40)] + [(200.0, 100.0)]
        sizes = [rng.randint(1, 900) for _ in range(6)]
        met = Meeting()
        for at, pace in paces:
            met.agenda.at(at, partial(met.network.limit, "a", "s", pace))
        met.network.limit("a", "s", 0.0)
        for number, size in enumerate(sizes):
            met.send(str(number), size)
        arrived = met.run()

        carried = 0.0
        left = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        expected: list[float] = []
        ends = [at for at, _ in paces[1:]] + [1e9]
        for (at, pace), end in zip(paces, ends, strict=True):
            while left and pace and carried + pace * (end - at) >= left[0]:
                at, carried = at + (left[0] - carried) / pace, float(left[0])
                expected.append(at)
                left.pop(0)
            carried += pace * (end - at) if left else 0.0
        assert list(arrived.values()) == pytest.approx(expected, abs=1e-4)


class NetworkBefore(Network):
    """As it was before links had a bandwidth."""

    def send(self, source: str, target: str, deliver: Callable[[bool], None], *, size_bytes: int = 0) -> None:
        rng, now = self._rng, self.conditions
        copies = 1
        if rng.random() < now.repeat:
            copies, self.repeated = 2, self.repeated + 1
        for _ in range(copies):
            if (source, target) in self.cut or rng.random() < now.loss:
                self.lost += 1
                continue
            damaged = rng.random() < now.damage
            self.damaged += damaged
            self._agenda.after(rng.expovariate(1.0 / now.delay_s), self._arrival(source, target, deliver, damaged))


def test_schedules_without_a_bandwidth_are_what_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    def facts(seed: int) -> tuple[object, ...]:
        log: list[str] = []
        history: History = run(Scenario.drawn(seed), seed, log=log)
        return log, history.applied, history.rounds, history.faults, history.virtual_s

    now = [facts(seed) for seed in range(12)]
    monkeypatch.setattr(world, "Network", NetworkBefore)
    assert now == [facts(seed) for seed in range(12)]
