"""A peer's name belongs to its bearer, here or away. An attacker with the run's token wants the name of a peer that is
away: to bear it, or to have it banned. Real peers over TLS; in release 0.2 both succeeded within a second."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import UNSET

from outerstep.coordination.gossip.names import vouched
from outerstep.errors import ConfigError
from outerstep.security.signing import SigningKey, make_key
from outerstep.statements import Beat, Converse, Name, Offered, Ownership, Proof, Signed, body_of
from outerstep.versions import Since2
from outerstep.wire.http_transport import HttpTransport
from peers import RULES, SHORT, Peer, agree, start_peers, stop_peers
from support import wait_until


@pytest.fixture
def peers() -> Iterator[list[Peer]]:
    found = start_peers(4)
    yield found
    stop_peers(found)


def names(peer: Peer) -> list[str]:
    with peer.node.lock:
        return [member.peer_id for member in peer.node.peer.state.members]


def go_away(peers: list[Peer]) -> Peer:
    """The last one dies, and the others go on without it."""
    gone = peers.pop()
    gone.node.stop()
    wait_until(lambda: all(gone.name not in names(peer) for peer in peers))
    return gone


class Impostor:
    """Says to everybody that it is `name`, and wants to belong."""

    def __init__(self, peers: list[Peer], name: str, owner: SigningKey | None = None) -> None:
        self.peers, self.name, self.key, self.number = peers, name, make_key(), 0
        self.run_id = peers[0].node.peer.run_id
        self.owner: Since2[Ownership] = UNSET
        if owner is not None:
            body = vouched(self.run_id, name, self.key.public)
            self.owner = Ownership(key=owner.public, signature=owner.sign(body))

    def sign(self, body: bytes) -> Signed:
        return Signed(author=self.key.public, body=body, signature=self.key.sign(body))

    def beat(self) -> Signed:
        self.number += 1
        place = self.peers[0].node
        said = Beat(
            run_id=self.run_id,
            peer_id=self.name,
            incarnation=9,
            number=self.number,
            address=place._listener.address,
            fingerprint=place._listener.fingerprint,
            owner=self.owner,
        )
        return self.sign(body_of(said))

    def tell(self, *proofs: Proof) -> None:
        for peer in self.peers:
            with peer.node.lock:
                height = peer.node.peer.state.height
            said = Converse(
                run_id=self.run_id, sender=self.name, height=height, statements=(self.beat(),), proofs=proofs
            )
            HttpTransport(peer.node.join_string).ask(said)

    @property
    def is_in(self) -> bool:
        return any(m.key == self.key.public for peer in self.peers for m in peer.node.peer.state.members)


@pytest.mark.parametrize("claims", ["no owner", "an owner of its own", "the true owner, by its own signature"])
def test_the_name_of_a_peer_that_is_away_cannot_be_taken(peers: list[Peer], claims: str) -> None:
    gone = go_away(peers)
    impostor = Impostor(peers, gone.name, make_key() if claims == "an owner of its own" else None)
    if claims.startswith("the true owner"):
        known = next(name for name in _names(peers[0]) if name.peer_id == gone.name)
        assert known.owner is not None
        forged = make_key().sign(vouched(impostor.run_id, gone.name, impostor.key.public))
        impostor.owner = Ownership(key=known.owner, signature=forged)
    newcomer = Impostor(peers, "newcomer")
    for _ in range(200):  # until somebody else who asks in the same way has been let in
        impostor.tell()
        newcomer.tell()
        if newcomer.is_in:
            break
    assert newcomer.is_in
    assert not impostor.is_in
    back = Peer(gone.name, join=(peers[0].node.join_string,)).join()  # without a folder: it has another key than before
    peers.append(back)
    assert not impostor.is_in


def test_the_name_of_a_peer_that_is_away_cannot_be_banned(peers: list[Peer]) -> None:
    gone = go_away(peers)
    impostor = Impostor(peers, gone.name)
    two = [
        impostor.sign(
            body_of(
                Offered(
                    run_id=impostor.run_id,
                    fragment=0,
                    version=1,
                    sequence=1,
                    digest=digit * 64,
                    size_bytes=64,
                    base_hash="0" * 32,
                    steps=1,
                )
            )
        )
        for digit in "ab"
    ]
    for _ in range(20):
        impostor.tell(Proof(first=two[0], second=two[1]))
    agree(peers)
    assert not any(peer.node.peer.state.expelled for peer in peers)
    back = Peer(gone.name, join=(peers[0].node.join_string,)).join()
    peers.append(back)
    agree(peers)


def test_an_honest_peer_under_anothers_name_is_told_at_once(peers: list[Peer], tmp_path: Path) -> None:
    for name in ("a", go_away(peers).name):
        other = Peer(name, join=(peers[0].node.join_string,), credentials=str(tmp_path / name))
        try:
            with pytest.raises(ConfigError, match=f"the name '{name}' belongs to another peer, here or away"):
                other.begin(other.node.ask_terms(SHORT))
        finally:
            other.node.stop()


def test_a_peer_that_brings_its_folder_needs_no_owner(tmp_path: Path) -> None:
    """It was moved to another machine, where its user's key is not."""
    peers = start_peers(3, tmp_path)
    try:
        gone = go_away(peers)
        folder, elsewhere = str(tmp_path / gone.name), str(tmp_path / "elsewhere")
        back = Peer(gone.name, join=(peers[0].node.join_string,), folder=folder, credentials=elsewhere)
        peers.append(back.join())
        assert back.node.key == gone.node.key
    finally:
        stop_peers(peers)


def test_a_run_of_protocol_1_has_no_owners_and_goes_on_as_before() -> None:
    peers = start_peers(3, rules=replace(RULES, protocol=1))
    try:
        gone = go_away(peers)
        assert peers[0].node.peer.state.names is UNSET
        peers.append(Peer(gone.name, join=(peers[0].node.join_string,), rules=peers[0].rules).join())
    finally:
        stop_peers(peers)


def _names(peer: Peer) -> tuple[Name, ...]:
    with peer.node.lock:
        found = peer.node.peer.state.names
    assert found is not UNSET
    return found
