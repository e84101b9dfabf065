"""What is to happen to peers without a server: how many there are, who lies and how, and the faults, from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

from ..versions import OLDEST_PROTOCOL, PROTOCOL_VERSION

KINDS = ("crash", "crash", "disk_lost", "cut", "one_way", "partition", "partition", "bad_weather")
LIES = ("offers", "votes", "proposals", "withholds", "frames", "rubbish")


@dataclass(frozen=True)
class GossipFault:
    """At `at_s`, for `lasts_s`: crash (its disk survives), disk_lost (it does not), cut (one peer from all), one_way
    (some do not hear one peer), partition, bad_weather."""

    kind: str
    at_s: float
    lasts_s: float
    peer: int = 0


@dataclass(frozen=True)
class GossipScenario:
    """`liar`: the number of the peer that lies, and `lie` how (gossip_liars.py); None = nobody does."""

    peers: int = 4
    fragments: int = 1
    min_peers: int = 2
    attackers: int = 1
    liar: int | None = None
    lie: str = ""
    round_s: tuple[float, ...] = (6.0, 6.0, 6.0, 6.0)
    starts_s: tuple[float, ...] = (0.0, 1.0, 1.0, 1.0)
    round_deadline_s: float | None = None
    loss: float = 0.0
    repeat: float = 0.0
    faults: tuple[GossipFault, ...] = ()
    calm_after_s: float = 60.0
    protocol: int = PROTOCOL_VERSION

    @staticmethod
    def drawn(seed: int) -> GossipScenario:
        rng = random.Random(f"gossip scenario {seed}")
        lies = rng.random() < 0.6
        peers = rng.randint(4, 6) if lies else rng.randint(2, 6)
        storm_s = rng.uniform(30.0, 90.0)
        faults = tuple(
            GossipFault(rng.choice(KINDS), rng.uniform(5.0, storm_s), rng.uniform(2.0, 40.0), rng.randrange(peers))
            for _ in range(rng.randint(1, 4))
        )
        return GossipScenario(
            peers=peers,
            fragments=rng.choice([1, 1, 2, 3]),
            min_peers=rng.choice([1, 2, 2, min(3, peers - 1)]) or 1,
            liar=rng.randrange(1, peers) if lies else None,
            lie=rng.choice(LIES) if lies else "",
            round_s=tuple(rng.choice([4.0, 6.0, 6.0, 15.0]) for _ in range(peers)),
            starts_s=(0.0, *(rng.choice([0.5, 2.0, 20.0]) for _ in range(peers - 1))),
            # Who lies may offer what nobody can use, for ever: only a deadline ends such a round.
            round_deadline_s=20.0 if lies else rng.choice([None, 10.0, 20.0]),
            loss=rng.choice([0.0, 0.05, 0.2]),
            repeat=rng.choice([0.0, 0.1, 0.5]),
            faults=faults,
            calm_after_s=max(fault.at_s + fault.lasts_s for fault in faults),
            protocol=OLDEST_PROTOCOL + seed % (PROTOCOL_VERSION - OLDEST_PROTOCOL + 1),
        )
