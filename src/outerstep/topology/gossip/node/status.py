"""What a node says of itself when it is asked; in the words of a server's status where there are such."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .node import Node


def build_status(node: Node) -> dict[str, object]:
    """With the lock held."""
    common: dict[str, object] = {
        "mode": "gossip",
        "peer_id": node.peer_id,
        "address": node.address,
        "uptime_s": node.clock() - node.started_at,
        "failure": node.failure,
        "trouble": node.shared.trouble,
        "bytes_sent": node.service.bytes_sent,
        "bytes_received": node.counts.get("fetched_bytes", 0),
    }
    if not node.shared.has_begun:
        return {**common, "run_id": "", "begun": False}
    peer, now = node.peer, node.clock()
    members = {member.key: member.peer_id for member in peer.state.members}
    return {
        **common,
        "begun": True,
        "run_id": peer.run_id,
        "height": peer.state.height,
        "is_member": peer.is_member,
        "versions": list(peer.state.versions),
        "members": [_member(node, key, peer_id, now) for key, peer_id in members.items()],
        "silent": [peer_id for key, peer_id in members.items() if peer.is_silent(key, now)],
        "expelled": [member.peer_id for member in peer.state.expelled],
        "proven_to_lie": sorted(members.get(key, key) for key in peer.book.proofs),
        "is_short_of_peers": peer.is_short_of_peers(now),
        "fragments": [
            {"version": version, "waiting_for": peer.waiting_for(fragment, now)}
            for fragment, version in enumerate(peer.state.versions)
        ],
        "held_bytes": node.holdings.memory_bytes,
        "spooled_bytes": node.holdings.spooled_bytes,
        "fetches": node.counts,
        "conversations": node.talk.conversations,
    }


def _member(node: Node, key: str, peer_id: str, now: float) -> dict[str, object]:
    """One member, as this peer knows it."""
    if key == node.key:
        step, steps_per_second, loss = node.progress
        facts = {"step": step, "steps_per_second": steps_per_second, "loss": loss}
        return {"peer_id": peer_id, "address": node.address, "height": node.peer.state.height, "self": True, **facts}
    beat = node.peer.contacts.get(key)
    known: dict[str, object] = {"peer_id": peer_id, "trouble": node.talk.troubles().get(key, "")}
    if beat is None:
        return known
    return {
        **known,
        "address": beat.address,
        "height": beat.height,
        "wants": beat.wants,
        "step": beat.step,
        "steps_per_second": beat.steps_per_second,
        "loss": beat.loss,
        "last_seen_s": node.peer.silent_s(key, now),
    }


__all__ = ["build_status"]
