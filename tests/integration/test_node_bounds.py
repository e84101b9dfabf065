"""What one holder of the run's token can cost real peers: places, memory, threads; they go on, and forget it."""

from __future__ import annotations

import gc
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from outerstep.coordination.gossip import bounds, heard
from outerstep.errors import RunFull, TransportError
from outerstep.security.signing import SigningKey, make_key
from outerstep.statements import AnyStatement, Beat, Converse, Offered, Proof, Signed, body_of
from outerstep.topology.gossip.node import contributions, speeds
from outerstep.wire import answers
from outerstep.wire.http_transport import HttpTransport
from outerstep.wire.peers import AskParts, GetHeld, PeerAnswer, PeerRequest
from peers import SHORT, SIZES, Peer, agree, start_peers, stop_peers
from support import wait_until

Started = Callable[..., list[Peer]]
MIB = 1 << 20


@pytest.fixture
def started() -> Iterator[Started]:
    """Starts peers that are stopped after the test, those too that the test adds to the list."""
    lists: list[list[Peer]] = []

    def start(count: int, folder: Path | None = None, **settings: object) -> list[Peer]:
        lists.append(start_peers(count, folder, **settings))
        return lists[-1]

    yield start
    for peers in lists:
        stop_peers(peers)


def ids(peer: Peer) -> list[str]:
    with peer.node.lock:
        return [member.peer_id for member in peer.node.peer.state.members]


def sign(key: SigningKey, statement: AnyStatement) -> Signed:
    body = body_of(statement)
    return Signed(author=key.public, body=body, signature=key.sign(body))


def tell(peer: Peer, *statements: Signed, proofs: tuple[Proof, ...] = ()) -> None:
    """As anybody can who holds the run's token."""
    with peer.node.lock:
        run_id, height = peer.node.peer.run_id, peer.node.peer.state.height
    transport = HttpTransport(peer.node.join_string)
    transport.ask(Converse(run_id=run_id, sender="x", height=height, statements=statements, proofs=proofs))
    transport.close()


def offered(peer: Peer, digest: str) -> Offered:
    return Offered(
        run_id=peer.node.peer.run_id,
        fragment=0,
        version=1,
        sequence=1,
        digest=digest * 64,
        size_bytes=SIZES[0],
        base_hash="0" * 32,
        steps=1,
    )


class TestPlaces:
    def test_the_peer_that_is_one_too_many_is_refused_by_name_and_the_others_go_on(
        self, started: Started, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Sixty-four in earnest."""
        monkeypatch.setattr(bounds, "MOST_MEMBERS", 3)
        peers = started(3)
        late = Peer("late", join=(peers[1].node.join_string,))
        with pytest.raises(RunFull, match="the run has 3 members, the most there can be: there is no place for 'late'"):
            late.node.ask_terms(SHORT)
        late.node.stop()
        agree(peers)
        assert ids(peers[0]) == ["a", "b", "c"]

    def test_those_that_come_at_once_fill_the_places_and_one_waits_until_another_leaves(
        self, started: Started, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(bounds, "MOST_MEMBERS", 3)
        peers = started(2)
        rivals = [Peer(name, join=(peers[0].node.join_string,)) for name in ("y", "z")]
        for rival in rivals:
            terms = rival.node.ask_terms(SHORT)
            rival.begin(terms)
        for rival in rivals:
            rival.heal()
            rival.node.belong()
        peers += rivals
        wait_until(lambda: any(rival.node.peer.is_member for rival in rivals))
        waits = next(rival for rival in rivals if not rival.node.peer.is_member)
        comes = next(rival for rival in rivals if rival is not waits)
        agree([*peers[:2], comes])
        wait_until(lambda: "a place: the run has 3 members" in waits.node.status().fragments[0].waiting_for)
        assert len(ids(peers[0])) == 3
        peers[1].node.leave("to make room", patience_s=2.0)
        wait_until(lambda: waits.node.peer.is_member)

    def test_guests_that_have_left_are_forgotten_and_a_newcomer_is_admitted(
        self, started: Started, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(heard, "STRANGERS", 3)
        peers = started(2)
        come_and_go(peers, 6)
        peers.append(Peer("newcomer", join=(peers[0].node.join_string,)).join())
        agree(peers)

    @pytest.mark.slow
    def test_two_hundred_guests_in_a_row_then_a_newcomer(self, started: Started) -> None:
        peers = started(3)
        agree(peers)
        come_and_go(peers, 200)
        peers.append(Peer("newcomer", join=(peers[0].node.join_string,)).join())
        agree(peers)
        wait_until(lambda: all(len(peer.node.peer.contacts) < heard.STRANGERS for peer in peers))


def come_and_go(peers: list[Peer], count: int) -> None:
    for i in range(count):
        guest = Peer(f"guest{i}", join=(peers[i % len(peers)].node.join_string,)).join()
        guest.node.leave("a short visit", patience_s=SHORT)


class Dripping:
    """A line to a peer that answers everything but gives no contribution away: it comes for ever, bit by bit."""

    def __init__(self, line: HttpTransport, over: threading.Event) -> None:
        self._line, self._over, self.address = line, over, line.address

    def ask(self, request: PeerRequest, **how: Any) -> PeerAnswer:
        if not isinstance(request, AskParts | GetHeld):
            return self._line.ask(request, **how)
        limit_s = answers.WATCH._mine.until - time.monotonic()
        self._over.wait(limit_s)
        raise TransportError("it dripped until its time was over")

    def close(self) -> None:
        self._line.close()


def drip_from(liar: Peer, to: Peer, over: threading.Event) -> None:
    reach = to.node._contacts.transport

    def transport(key: str) -> HttpTransport | Dripping | None:
        line = reach(key)
        return Dripping(line, over) if key == liar.node.key and line is not None else line

    to.node._contacts.transport = transport  # type: ignore[method-assign,assignment]


class TestDrips:
    def test_a_peer_that_drips_does_not_keep_all_fetching_threads(
        self, started: Started, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(contributions, "FETCHING_THREADS", 2)
        peers, over = started(4), threading.Event()
        liar = peers[3]
        for honest in peers[:3]:
            drip_from(liar, honest, over)
        try:
            for fragment in (0, 1, 0, 1):
                liar.offer(fragment, 9)  # as many as there are threads
            wait_until(lambda: all(len(peer.node.peer.missing()) >= 2 for peer in peers[:3]))
            for fragment in (0, 1):
                decided = agree(peers[:3], fragment)
                assert [peer_id for peer_id, _, _ in decided[0].contributions] == ["a", "b", "c"]
        finally:
            over.set()

    def test_what_its_author_drips_is_fetched_from_others(
        self, started: Started, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """To one of them alone it drips; the others have it, and decide."""
        monkeypatch.setattr(speeds, "GRACE_S", 0.3)
        peers, over = started(4), threading.Event()
        victim, liar = peers[2], peers[3]
        drip_from(liar, victim, over)
        decided = agree(peers)
        assert [peer_id for peer_id, _, _ in decided[2].contributions] == ["a", "b", "c", "d"]
        assert victim.node._contacts.speeds.expected(liar.node.key) < speeds.FASTEST
        over.set()


class TestWhatIsKept:
    def test_proofs_against_keys_that_nobody_has_silence_nobody(self, started: Started) -> None:
        peers = started(3)
        for _ in range(3):
            proofs = []
            for key in (make_key() for _ in range(60)):
                first, second = (sign(key, offered(peers[0], digest)) for digest in "ab")
                proofs.append(Proof(first=first, second=second))
            for peer in peers:
                tell(peer, proofs=tuple(proofs))
        agree(peers)
        assert not any(peer.node.peer.book.proofs for peer in peers)

    def test_garbage_and_large_statements_do_not_stay_in_memory(self, started: Started) -> None:
        """More than a hundred mebibytes of them, some signed by a member."""
        peers, stranger = started(3), make_key()
        run_id = peers[0].node.peer.run_id
        long = ((0, "0" * 32),) * 20_000
        tell(peers[0], Signed(author=stranger.public, body=bytes(MIB), signature=bytes(64)))
        gc.collect()
        tracemalloc.start()
        try:
            before, sent = tracemalloc.get_traced_memory()[0], 0
            for i in range(1, 8):
                beats = [
                    Beat(run_id=run_id, peer_id="x", incarnation=1, number=n, address="x:1", held=long)
                    for n in (2 * i, 2 * i + 1)
                ]
                garbage = [Signed(author=f"{n:064x}", body=bytes([n]) * MIB, signature=bytes(64)) for n in range(12)]
                signed = [sign(key, beat) for key in (stranger, peers[2].node._key) for beat in beats]
                tell(peers[0], *garbage, *signed)
                sent += sum(len(one.body) for one in (*garbage, *signed))
            del garbage, signed, beats
            gc.collect()
            assert sent > 100 * MIB
            assert tracemalloc.get_traced_memory()[0] - before < 8 * MIB
        finally:
            tracemalloc.stop()
        agree(peers)
