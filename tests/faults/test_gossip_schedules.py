"""A thousand seeded schedules of peers without a server: loss, partitions, crashes, lost disks, and in most a liar.

What is checked, and how: outerstep/simulate/gossip.py. A failure names its seed; `python -m outerstep.simulate --gossip
SEED` replays it and tells what happens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from amounts import mostly_schedules
from outerstep.coordination.gossip import chain
from outerstep.coordination.gossip.blocks import Blocks
from outerstep.coordination.gossip.book import Book
from outerstep.simulate.gossip import SimPeer, run_gossip
from outerstep.simulate.gossip_scenario import KINDS, LIES, GossipScenario
from outerstep.statements import AnyStatement

QUICK, FULL, AT_ONCE = 60, 1_000, 188


def check_seeds(seeds: range) -> Counter[str]:
    violations: list[str] = []
    faults: Counter[str] = Counter()
    rounds = 0
    for seed in seeds:
        history = run_gossip(GossipScenario.drawn(seed), seed)
        violations += [f"python -m outerstep.simulate --gossip {seed}: {line}" for line in history.violations]
        faults += history.faults
        rounds += history.round_count
    assert not violations, "\n".join(violations[:10])
    assert rounds > 2 * len(seeds)
    return faults


@pytest.mark.row("F13", "F28")
def test_sixty_schedules_of_gossip_keep_every_promise() -> None:
    faults = check_seeds(range(QUICK))
    expected = {*KINDS, *(f"lie: {lie}" for lie in LIES), "nonsense"}
    assert faults.keys() >= expected, f"never fired: {expected - faults.keys()}"


@pytest.mark.slow
@pytest.mark.parametrize("first", mostly_schedules(range(QUICK, FULL, AT_ONCE)))
def test_a_thousand_schedules_of_gossip_keep_every_promise(first: int) -> None:
    check_seeds(range(first, min(first + AT_ONCE, FULL)))


@pytest.mark.parametrize("lie", ["offers", "votes", "proposals"])
def test_who_says_two_things_is_expelled(lie: str) -> None:
    """In a calm run, so that everybody hears both."""
    scenario = GossipScenario(liar=2, lie=lie, round_deadline_s=20.0, calm_after_s=120.0)
    history = run_gossip(scenario, 0)
    assert not history.violations
    assert history.faults[f"lie: {lie}"] > 0
    assert history.expelled == 1


def test_rubbish_and_withheld_bytes_stop_nobody() -> None:
    for lie in ("rubbish", "withholds", "frames"):
        history = run_gossip(GossipScenario(liar=1, lie=lie, round_deadline_s=20.0, calm_after_s=120.0), 1)
        assert not history.violations
        assert history.round_count > 3


def plant_small_quorum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half is enough."""

    def half(count: int, attackers: int) -> int:
        return max(1, count // 2)

    monkeypatch.setattr(chain, "quorum_of", half)
    monkeypatch.setattr("outerstep.coordination.gossip.ballot.quorum_of", half)


def plant_amnesia(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was said before a crash is forgotten, though the key is kept."""
    original = SimPeer.start

    def start(self: SimPeer, **how: Any) -> None:
        if self.keepsake is not None:
            kept = self.keepsake
            self.keepsake = type(kept)(run_id=kept.run_id, state=kept.state, incarnation=kept.incarnation)
        original(self, **how)

    monkeypatch.setattr(SimPeer, "start", start)


def plant_credulity(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proof is believed unread."""
    monkeypatch.setattr(Book, "proves", lambda self, proof: True)


def plant_panic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that are no statement end whoever reads them."""
    decoder = msgspec.msgpack.Decoder(AnyStatement)
    monkeypatch.setattr("outerstep.coordination.gossip.book.statement_of", decoder.decode)


def plant_faith(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a block says is taken to be possible."""
    monkeypatch.setattr("outerstep.coordination.gossip.peer.wrong_with_block", lambda *said: "")
    monkeypatch.setattr("outerstep.coordination.gossip.blocks.wrong_with_block", lambda *said: "")


def plant_blindness(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contributions are voted for before they are here."""
    monkeypatch.setattr(Blocks, "_condition_of", lambda self, says: "good")
    monkeypatch.setattr(Blocks, "has_all_of", lambda self, block: True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "first"),
    [
        (plant_small_quorum, 0),
        (plant_amnesia, 0),
        (plant_credulity, 0),
        (plant_panic, 0),
        (plant_faith, 0),
        (plant_blindness, 350),
    ],
    ids=lambda given: getattr(given, "__name__", ""),
)
def test_a_planted_mistake_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the schedules would prove nothing. `first`: where to begin, as some are found late."""
    plant(monkeypatch)
    for seed in range(first, first + 100):
        if run_gossip(GossipScenario.drawn(seed), seed).violations:
            return
    pytest.fail("no schedule noticed it")
