"""A state machine that stumbles over one thing still hears the rest, and whoever told it is blamed."""

from __future__ import annotations

from typing import Any

from outerstep.coordination.gossip import GossipPeer, GossipRules, Keepsake, chain
from outerstep.events import Event, MessageRefused
from outerstep.simulate.gossip import Registry
from outerstep.statements import Beat, Converse, Member, Signed, body_of
from outerstep.topology.gossip.node.hearing import hear
from outerstep.topology.gossip.node.shared import Shared

RUN = "a-run"


def test_what_makes_the_machine_stumble_is_left_out_and_the_rest_is_heard() -> None:
    registry, events = Registry(), list[Event]()
    key, sign = registry.enter("p")
    member = Member(peer_id="p", key=key)
    keepsake = Keepsake(run_id=RUN, state=chain.found(member, 1))
    peer = GossipPeer(RUN, member, sign, registry.verify, GossipRules(), keepsake, [100], 0.0)
    greet = peer._others.greet

    def stumble(signed: Signed, beat: Beat, now: float) -> None:
        if beat.peer_id == "b":
            raise KeyError("a mistake in here")
        greet(signed, beat, now)

    peer._others.greet = stumble  # type: ignore[method-assign]

    def beat_of(name: str) -> Signed:
        author, signs = registry.enter(name)
        body = body_of(Beat(run_id=RUN, peer_id=name, incarnation=1, number=1, address="h:1"))
        return Signed(author=author, body=body, signature=signs(body))

    def collect(event: Any) -> None:
        events.append(event)

    shared = Shared(lambda: 1.0, collect)
    shared.begin(peer)
    told = Converse(run_id=RUN, sender="teller", height=0, statements=tuple(map(beat_of, "abc")))
    with shared.lock:
        hear(shared, told)
    assert sorted(beat.peer_id for beat in peer.contacts.values()) == ["a", "c"]
    assert peer.refusals.counts == {"teller": 1}
    why = "said something that cannot be heard: KeyError: 'a mistake in here'"
    assert events == [MessageRefused("converse", "teller", "nonsense", why)]
    assert not shared.failure
