"""The status of a node, in the words of a server's status where both have the same fact."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from ....coordination.gossip import GossipPeer
from ....coordination.gossip.chain import leased_data
from ....observe.status import DataStatus, FragmentStatus, PeerMemberStatus, PeerStatus


def with_run(
    status: PeerStatus, peer: GossipPeer, own: PeerMemberStatus, troubles: Mapping[str, str], now: float
) -> PeerStatus:
    """The status of a node that has begun, with everything that its state machine knows. `own`: the node itself as a
    member. `troubles`: key of a member → why the last call to it failed."""
    members = {member.key: member.peer_id for member in peer.state.members}
    own = replace(own, height=peer.state.height)
    return replace(
        status,
        begun=True,
        run_id=peer.run_id,
        protocol=peer.rules.protocol,
        height=peer.state.height,
        is_member=peer.is_member,
        versions=list(peer.state.versions),
        members=[
            own if key == peer.member.key else _another(peer, key, peer_id, troubles.get(key, ""), now)
            for key, peer_id in members.items()
        ],
        silent=[peer_id for key, peer_id in members.items() if peer.is_silent(key, now)],
        expelled=[member.peer_id for member in peer.state.expelled],
        refused=dict(peer.refusals.counts),
        proven_to_lie=sorted(members.get(key, key) for key in peer.book.proofs),
        is_short_of_peers=peer.is_short_of_peers(now),
        fragments=[
            FragmentStatus(version=version, waiting_for=peer.waiting_for(fragment, now))
            for fragment, version in enumerate(peer.state.versions)
        ],
        data=[DataStatus(**one) for one in leased_data(peer.state)],
    )


def _another(peer: GossipPeer, key: str, peer_id: str, trouble: str, now: float) -> PeerMemberStatus:
    """Another member, as this peer knows it."""
    known = PeerMemberStatus(peer_id=peer_id, trouble=trouble)
    beat = peer.contacts.get(key)
    if beat is None:
        return known
    return replace(
        known,
        address=beat.address,
        height=beat.height,
        wants=beat.wants,
        step=beat.step,
        steps_per_second=beat.steps_per_second,
        loss=beat.loss,
        last_seen_s=peer.silent_s(key, now),
    )
