"""Peers without a server, over TLS on this machine: they found, join, agree, fail, lie, come back and leave."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from rich.console import Console

from outerstep.cli.status import render
from outerstep.coordination.gossip import GossipRules
from outerstep.coordination.gossip import peer as gossip_peer
from outerstep.errors import (
    ConfigError,
    ExchangeFailed,
    Forbidden,
    NotFound,
    OtherRun,
    ProtocolMismatch,
    ServerUnreachable,
    Unauthorized,
)
from outerstep.events import ContributionRefused, PeerStopped, RoundDecided, WorkerJoined, WorkerLeft
from outerstep.security import Access, Credentials, parse_address
from outerstep.security.signing import make_key
from outerstep.security.tokens import new_token
from outerstep.server import DiLoCoServer
from outerstep.statements import Converse, Offered, Proof, Signed, body_of
from outerstep.topology.gossip.node import Node, NodeSettings
from outerstep.types import GetPart, Leave
from outerstep.wire.http_transport import HttpTransport
from outerstep.wire.peers import AskParts, AskTerms, GetHeld, HeldAnswer, PeerAnswer, PeerRequest, Terms
from peers import RULES, SHORT, SIZES, Adding, Peer, agree, start_peers, stop_peers
from support import in_threads, intercept, tiny_model, wait_until

Started = Callable[..., list[Peer]]


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


def transport_to(peer: Peer) -> HttpTransport:
    return HttpTransport(peer.node.join_string)


def ids(peer: Peer) -> list[str]:
    with peer.node.lock:
        return [member.peer_id for member in peer.node.peer.state.members]


def convene(peers: list[Peer], tell: Callable[[Peer, str, int], Converse]) -> None:
    """Tell each of them something; `tell` is given the peer, the run and its height."""
    for peer in peers:
        with peer.node.lock:
            run_id, height = peer.node.peer.run_id, peer.node.peer.state.height
        transport_to(peer).ask(tell(peer, run_id, height))


class TestARun:
    def test_rounds_are_the_same_for_all_whoever_they_joined_through(self, started: Started) -> None:
        peers = started(4)
        for fragment in (0, 1, 0):
            decided = agree(peers, fragment)
            assert len({round_.block for round_ in decided}) == 1
            assert [peer_id for peer_id, _, _ in decided[0].contributions] == ["a", "b", "c", "d"]
            for _, says, data in decided[3].contributions:
                assert bytes(data) in {bytes([i + 1]) * SIZES[fragment] for i in range(4)}
                assert says.fragment == fragment
        assert len({tuple(peer.topology.anchors) for peer in peers}) == 1
        assert peers[0].topology.anchors[0] == bytes([20]) * SIZES[0]

    def test_who_joins_later_begins_with_the_newest_version(self, started: Started) -> None:
        peers = started(2)
        agree(peers)
        peers.append(Peer("late", join=(peers[0].node.join_string,)).join())
        assert peers[2].topology.anchors[0] == bytes([3]) * SIZES[0]
        assert [peer_id for peer_id, _, _ in agree(peers)[0].contributions] == ["a", "b", "late"]

    def test_a_contribution_from_a_newer_anchor_than_the_blocks_lead_to_waits_for_them(self, started: Started) -> None:
        """As with a peer that was away: it has fetched the newest anchor, and the blocks come a little later."""
        a, b = started(2)
        with ThreadPoolExecutor(1) as thread:
            data = memoryview(bytes([7]) * SIZES[0])
            early = thread.submit(b.node.offer, 0, data, base_version=1, base_hash="0" * 32, steps=1)
            for peer in (a, b):
                peer.offer(0, 1)
            says = early.result(SHORT)
        assert says is not None
        assert says.version == 2

    def test_a_contribution_that_comes_after_its_round_was_decided_is_not_offered(self, started: Started) -> None:
        peers = started(2)
        agree(peers)
        late = peers[0].node.offer(0, memoryview(bytes(SIZES[0])), base_version=0, base_hash="0" * 32, steps=1)
        assert late is None

    def test_a_contribution_that_cannot_be_used_is_left_out(self, started: Started) -> None:
        peers = started(3)
        for peer in peers[:2]:
            peer.topology.refuse = lambda data: "it is the third's" if data[0] == 3 else ""
        for i, peer in enumerate(peers):
            peer.offer(0, i + 1)
        assert [peer_id for peer_id, _, _ in peers[0].take(0).contributions] == ["a", "b"]

    def test_bytes_of_old_rounds_are_given_up(self, started: Started) -> None:
        peers = started(2)
        for value in range(6):
            for peer in peers:
                peer.offer(0, 10 * value + ord(peer.name) - ord("a"))
            for peer in peers:
                peer.take(0)
        wait_until(lambda: peers[0].node.payloads.memory_bytes <= 2 * 2 * SIZES[0])
        assert peers[0].node.is_lost(0, 4)
        assert not peers[0].node.is_lost(0, 5)
        assert not peers[0].node.is_lost(0, 7)

    def test_who_leaves_is_no_longer_waited_for(self, started: Started) -> None:
        peers = started(3)
        agree(peers)
        peers[1].node.leave("the test wants it", patience_s=SHORT)
        assert ids(peers[0]) == ["a", "c"]
        assert [peer_id for peer_id, _, _ in agree([peers[0], peers[2]])[0].contributions] == ["a", "c"]

    def test_all_may_leave_at_once(self, started: Started) -> None:
        peers = started(3)
        agree(peers)
        in_threads(*[lambda peer=peer: peer.node.leave("the end", patience_s=SHORT) for peer in peers])  # type: ignore[misc]
        assert not any(peer.node.failure for peer in peers)

    def test_peers_without_encryption_find_each_other_too(self, started: Started) -> None:
        peers = started(2, insecure=True)
        assert peers[0].node.join_string == f"http://{peers[0].node.address}"
        agree(peers)


class TestFailures:
    @pytest.mark.slow
    def test_the_others_go_on_without_a_dead_peer_and_it_heals_from_its_folder(
        self, started: Started, tmp_path: Path
    ) -> None:
        peers = started(4, tmp_path)
        agree(peers)
        dead, others = peers.pop(), list(peers)
        key, address = dead.node.key, dead.node.address
        dead.node.stop()
        for _ in range(2):
            assert [peer_id for peer_id, _, _ in agree(others)[0].contributions] == ["a", "b", "c"]

        again = Peer("d", folder=str(tmp_path / "d")).join()
        peers.append(again)
        assert again.node.key == key
        assert again.node.address != address
        assert again.node.peer.incarnation == 2
        wait_until(lambda: all("d" in ids(peer) for peer in peers))
        assert [peer_id for peer_id, _, _ in agree(peers)[3].contributions] == ["a", "b", "c", "d"]
        assert len({tuple(peer.topology.anchors) for peer in peers}) == 1

    def test_all_start_again_from_their_folders_and_the_run_goes_on(self, tmp_path: Path) -> None:
        peers = start_peers(3, tmp_path)
        agree(peers)
        listen = {peer.name: peer.node.address for peer in peers}
        states = [(peer.topology.versions, peer.topology.anchors) for peer in peers]
        stop_peers(peers)
        again = [Peer(name, folder=str(tmp_path / name), listen=listen[name]) for name in "abc"]
        try:
            for peer, (versions, anchors) in zip(again, states, strict=True):
                terms = peer.node.ask_terms(SHORT)
                assert terms is not None
                peer.begin(terms)
                peer.topology.versions, peer.topology.anchors = versions, anchors
                peer.hold_all()
                peer.node.belong()
            assert [peer_id for peer_id, _, _ in agree(again)[0].contributions] == ["a", "b", "c"]
        finally:
            stop_peers(again)

    @pytest.mark.slow
    def test_who_was_away_for_longer_than_blocks_are_remembered_leaps(
        self, started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(gossip_peer, "REMEMBERED_DECISIONS", 3)
        peers = started(4, tmp_path)
        peers.pop().node.stop()
        for _ in range(5):
            agree(peers)
        with peers[0].node.lock:
            height = peers[0].node.peer.state.height
        again = Peer("d", folder=str(tmp_path / "d")).join()
        peers.append(again)
        wait_until(lambda: again.node.peer.state.height > height and again.node.peer.is_member)
        assert again.topology.versions[0] == 5
        wait_until(lambda: again.node.is_lost(0, 4))
        agree(peers)

    def test_what_is_not_written_down_is_not_said(self, started: Started, tmp_path: Path) -> None:
        peers = started(2, tmp_path)
        folder = peers[0].node._folder
        assert folder is not None
        keep, full = folder.keep, threading.Event()

        def keep_if_there_is_room(keepsake: gossip_peer.Keepsake) -> None:
            if not full.is_set():
                raise OSError(28, "No space left on device")
            keep(keepsake)

        folder.keep = keep_if_there_is_room  # type: ignore[method-assign]
        peers[0].offer(0, 1)
        peers[1].offer(0, 2)
        wait_until(lambda: "No space left" in peers[0].node.shared.trouble)
        with peers[1].node.lock:
            heard = [says.digest for says, _ in peers[1].node.peer.missing().values()]
        assert heard == []
        assert peers[0].node.round_of(0, 1) is None
        full.set()
        assert peers[0].take(0).block == peers[1].take(0).block
        assert peers[0].node.shared.trouble == ""

    @pytest.mark.slow
    def test_a_neighbour_that_swallows_everything_keeps_the_others_from_nothing(self, started: Started) -> None:
        peers = started(4)
        deaf = peers.pop()
        host, port = parse_address(deaf.node.address)
        deaf.node.stop()
        with socket.create_server((host, port)) as swallows:
            agree(peers)
            agree(peers)
            swallows.setblocking(False)
            swallows.accept()[0].close()  # somebody did call
        assert ids(peers[0]) == ["a", "b", "c"]

    def test_a_round_whose_bytes_nobody_gives_is_lost_and_the_whole_taken_instead(self, started: Started) -> None:
        peers = started(3)
        for value, peer in enumerate(peers[:2]):
            answer = peer.node.service.answer

            def deny(request: PeerRequest, answer: Callable[[PeerRequest], PeerAnswer] = answer) -> PeerAnswer:
                if isinstance(request, AskParts) and request.sender == "c":
                    raise NotFound("not for you")
                return answer(request)

            intercept(peer.node.service, answer, deny)
            peer.offer(0, value)
        peers[2].offer(0, 2)
        for peer in peers[:2]:
            peer.take(0)
        wait_until(lambda: peers[2].node.is_lost(0, 1))
        assert peers[2].node.round_of(0, 1) is None
        peers[2].heal()
        assert len({tuple(peer.topology.anchors) for peer in peers}) == 1

    @pytest.mark.parametrize(
        ("error", "cause", "says"),
        [
            (RuntimeError("a wrong turn"), "bug", r"a wrong turn \(this is a mistake in outerstep: please report it"),
            (OSError(5, "Input/output error"), "machine", r"Input/output error \(its disk, its memory or its system"),
        ],
    )
    def test_a_thread_that_ends_ends_the_node_which_says_whose_fault_it_was(
        self, started: Started, error: Exception, cause: str, says: str
    ) -> None:
        peers = started(2)

        def fail(needed: object) -> None:
            raise error

        peers[0].node.payloads.keep_only = fail  # type: ignore[method-assign]
        wait_until(lambda: peers[0].node.failure)
        assert re.search(f"peer-housekeeping: {type(error).__name__}: .*{says}", peers[0].node.failure)
        with pytest.raises(ExchangeFailed, match=says):
            peers[0].node.watch(timeout_s=SHORT)
        assert [(e.cause, e.why) for e in peers[0].events if isinstance(e, PeerStopped)] == [
            (cause, peers[0].node.failure)
        ]

    def test_no_thread_is_left_when_a_node_has_stopped(self, started: Started, tmp_path: Path) -> None:
        before = set(threading.enumerate())
        peers = started(3, tmp_path)
        agree(peers)
        stop_peers(peers)
        wait_until(lambda: set(threading.enumerate()) <= before)


class TestLiars:
    def test_a_part_that_a_holder_altered_is_fetched_elsewhere(self, started: Started) -> None:
        peers = started(4)
        honest = peers[0].node.service.get_part

        def lie_to_d(request: GetHeld) -> tuple[HeldAnswer, memoryview]:
            answer, data = honest(request)
            return answer, memoryview(b"\xff" * len(data)) if request.sender == "d" else data

        intercept(peers[0].node.service, honest, lie_to_d)
        decided = agree(peers)
        assert [peer_id for peer_id, _, _ in decided[3].contributions] == ["a", "b", "c", "d"]
        assert bytes(decided[3].contributions[0][2]) == bytes([1]) * SIZES[0]
        assert peers[3].node.counts["wrong"] >= 1

    def test_who_offers_two_things_under_one_key_is_expelled_by_all(self, started: Started) -> None:
        peers = started(4)
        liar, others = peers[3], peers[:3]
        with liar.node.lock:
            book, run_id = liar.node.peer.book, liar.node.peer.run_id
            facts = {"run_id": run_id, "fragment": 0, "version": 1, "sequence": 1, "size_bytes": SIZES[0], "steps": 1}
            said = [book.write(Offered(**facts, digest=d * 64, base_hash="0" * 32)) for d in "ab"]  # type: ignore[arg-type]
        told = iter([said[0], said[1], said[0]])
        convene(
            others,
            lambda peer, run_id, height: Converse(
                run_id=run_id, sender="d", height=height, statements=(next(told),), proofs=(), decisions=()
            ),
        )
        wait_until(lambda: all(ids(peer) == ["a", "b", "c"] for peer in others))
        for peer in others:
            assert [member.peer_id for member in peer.node.peer.state.expelled] == ["d"]
        wait_until(lambda: liar.node.peer.is_expelled)
        agree(others)
        assert all(ids(peer) == ["a", "b", "c"] for peer in others)

    def test_a_proof_that_does_not_hold_is_ignored(self, started: Started) -> None:
        peers = started(4)
        victim, forger = peers[3], make_key()
        with victim.node.lock:
            book, run_id = victim.node.peer.book, victim.node.peer.run_id
            facts = {"run_id": run_id, "fragment": 0, "version": 1, "size_bytes": SIZES[0], "steps": 1}
            offered = [Offered(**facts, sequence=s, digest="a" * 64, base_hash="0" * 32) for s in (7, 8)]  # type: ignore[arg-type]
            first, second = (book.write(says) for says in offered)
        body = body_of(Offered(**facts, sequence=7, digest="b" * 64, base_hash="0" * 32))  # type: ignore[arg-type]
        forged = Signed(author=victim.node.key, body=body, signature=forger.sign(body))
        proofs = (
            Proof(first=first, second=forged),
            Proof(first=first, second=second),
            Proof(first=first, second=first),
        )
        convene(
            peers[:3],
            lambda peer, run_id, height: Converse(run_id=run_id, sender="b", height=height, proofs=proofs),
        )
        assert [peer_id for peer_id, _, _ in agree(peers)[0].contributions] == ["a", "b", "c", "d"]
        assert not any(peer.node.peer.book.proofs for peer in peers)


class TestTheDoor:
    def test_a_wrong_token_is_refused(self, started: Started) -> None:
        peers = started(2)
        own = peers[0].node._listener.access
        wrong = Access(own.host, own.port, new_token("run"), own.fingerprint)
        with pytest.raises(Unauthorized):
            HttpTransport(wrong.join_string).ask(AskTerms(sender="x", protocol=1))
        stranger = Peer("x", join=(wrong.join_string,))
        with pytest.raises(Unauthorized):
            stranger.node.ask_terms(SHORT)
        stranger.node.stop()
        assert ids(peers[0]) == ["a", "b"]

    def test_a_peer_on_another_machine_takes_the_runs_token_from_the_join_string(
        self, started: Started, tmp_path: Path
    ) -> None:
        peers = started(1)
        elsewhere = Peer("b", join=(peers[0].node.join_string,), credentials=str(tmp_path)).join()
        peers.append(elsewhere)
        assert (
            Credentials(tmp_path).tokens.load().run != elsewhere.node._listener.token == peers[0].node._listener.token
        )
        assert isinstance(transport_to(elsewhere).ask(AskTerms(sender="x", protocol=1)), Terms)
        peers.append(Peer("c", join=(elsewhere.node.join_string,)).join())
        agree(peers)

    def test_the_users_own_admin_token_shows_the_status_and_no_more(self, started: Started) -> None:
        peer = started(1)[0]
        own = peer.node._listener.access
        admin = Access(own.host, own.port, "", own.fingerprint, admin=Credentials().tokens.load().admin)
        transport = HttpTransport(admin.join_string)
        assert transport.status()["run_id"] == peer.node.peer.run_id
        with pytest.raises(Forbidden):
            transport.ask(AskTerms(sender="x", protocol=1))

    def test_a_peer_that_does_not_speak_the_runs_protocol_is_told_so(
        self, started: Started, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("outerstep.wire.http_transport.highest_common", lambda shown: 1)
        transport = transport_to(started(1)[0])
        transport.protocol = 1
        with pytest.raises(ProtocolMismatch, match="this run speaks protocol 2, the peer that asks 1") as refused:
            transport.ask(AskTerms(sender="x", protocol=1))
        assert "found the run with --protocol 1" in refused.value.hint

    def test_a_run_of_an_older_protocol_takes_peers_of_both(self, tmp_path: Path) -> None:
        rules = dataclasses.replace(RULES, protocol=1)
        first = Peer("a", rules=rules, folder=str(tmp_path / "a")).found()
        try:
            transport = transport_to(first)
            transport.protocol = 1
            assert isinstance(transport.ask(AskTerms(sender="x", protocol=1)), Terms)
            assert transport.protocol == 2, "the line is another matter: both ends of it are new"
            assert isinstance(transport.ask(AskTerms(sender="x", protocol=1)), Terms)
            assert first.node.protocol == 1
            assert "protocol" not in json.loads((tmp_path / "a" / "run.json").read_text())  # release 0.2 reads it
        finally:
            first.node.stop()

    def test_what_belongs_to_another_run_is_refused(self, started: Started) -> None:
        with pytest.raises(OtherRun):
            transport_to(started(1)[0]).ask(Converse(run_id="another", sender="x", height=0))

    def test_a_server_has_no_path_of_a_peer_and_a_peer_none_of_a_server(self, started: Started) -> None:
        peer = started(1)[0]
        with pytest.raises(NotFound, match="no such path"):
            transport_to(peer).call(Leave(run_id="r", worker_id="w", incarnation=1))
        with pytest.raises(NotFound, match="no such path"):
            transport_to(peer).call(
                GetPart(run_id="r", worker_id="w", incarnation=1, fragment=0, version=0, part=0), into=memoryview(b"")
            )
        with DiLoCoServer(tiny_model().state_dict(), num_workers=1, port=0, host="127.0.0.1") as server:
            stranger = Peer("x", join=(server.access.join_string,))
            with pytest.raises(NotFound, match="no such path"):
                stranger.node.ask_terms(SHORT)
            stranger.node.stop()

    def test_the_status_says_who_is_there(self, started: Started) -> None:
        peers = started(2)
        agree(peers)
        peers[1].node.note_progress(7, 2.0, 0.5)
        wait_until(lambda: transport_to(peers[0]).status()["members"][1]["step"] == 7)  # type: ignore[index]
        status = transport_to(peers[0]).status()
        assert status["versions"] == [1, 0]
        assert [member["peer_id"] for member in status["members"]] == ["a", "b"]  # type: ignore[attr-defined]
        assert status["failure"] == ""
        console = Console(width=160, record=True)
        console.print(render(status, peers[0].node.address))
        shown = console.export_text()
        assert "peer a" in shown
        assert "fragment 0: version 1; waiting for a, b" in shown
        assert re.search(r"│ b +│ 127\.0\.0\.1:\d+ │ 7 +│ 2\.00 +│ 0\.5000", shown)
        assert status["losses"] == [], "nobody had reported one when the first round was decided"
        peers[0].node.note_progress(7, 2.0, 1.5)
        agree(peers)
        losses = transport_to(peers[0]).status()["losses"]
        assert losses == [1.0], "the mean of its own and of the other's last beat"

    def test_events_say_who_joins_what_is_decided_what_is_refused_and_who_leaves(self, started: Started) -> None:
        peers = started(3)
        a, b, c = peers
        a.topology.refuse = lambda data: "it is the third's" if data[0] == 3 else ""
        for i, peer in enumerate(peers):
            peer.offer(0, i + 1)
        for peer in peers:
            peer.take(0)
        wait_until(lambda: ContributionRefused("c", 0, "it is the third's") in a.events)
        c.node.leave("done", SHORT)
        wait_until(lambda: WorkerLeft("c", "it left the run") in a.events)
        joined = [(event.worker, event.host) for event in a.events if isinstance(event, WorkerJoined)]
        assert joined == [("b", b.node.address), ("c", c.node.address)]
        [decided] = [event for event in a.events if isinstance(event, RoundDecided)]
        assert (decided.fragment, decided.version) == (0, 1)
        assert {"a", "b"} <= set(decided.workers)
        assert [event for event in b.events if isinstance(event, RoundDecided)] == [decided]

    def test_the_status_of_a_peer_that_has_not_begun_can_be_asked_too(self) -> None:
        with Peer("a").node as node:
            assert "has not joined a run yet" in str(render(HttpTransport(node.join_string).status(), node.address))

    def test_nobody_there_is_said_after_the_patience(self) -> None:
        gone = Peer("gone")
        join = gone.node.join_string
        gone.node.stop()
        lonely = Peer("lonely", join=(join,))
        with pytest.raises(ServerUnreachable, match="no run could be joined in"):
            lonely.node.ask_terms(0.2)
        lonely.node.stop()

    def test_a_folder_belongs_to_one_running_peer_of_one_run(self, started: Started, tmp_path: Path) -> None:
        first, other = started(1, tmp_path)[0], started(1)[0]
        folder = str(tmp_path / "a")
        with pytest.raises(ConfigError, match="belongs to a peer that is running"):
            Node(NodeSettings(peer_id="a", folder=folder))
        first.node.stop()
        with pytest.raises(ConfigError, match="is that of peer 'a'"):
            Node(NodeSettings(peer_id="b", folder=folder))
        again = Peer("a", folder=folder, join=(other.node.join_string,))
        with pytest.raises(ConfigError, match=r"holds run .*, the peers to join run"):
            again.node.ask_terms(SHORT)
        again.node.stop()

    def test_a_forked_process_keeps_neither_the_port_nor_the_folder(self, tmp_path: Path) -> None:
        node = Peer("a", folder=str(tmp_path)).node
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            try:
                has_let_go = node._listener._http._listener.fileno() == -1 and node._folder._lock is None  # type: ignore[union-attr]
                os.write(writer, b"yes" if has_let_go else b"no")
            finally:
                os._exit(0)
        assert os.read(reader, 3) == b"yes"
        os.waitpid(child, 0)
        assert isinstance(HttpTransport(node.join_string).status(), dict)  # it is still the parent's
        with pytest.raises(ConfigError, match="belongs to a peer that is running"):
            Peer("a", folder=str(tmp_path))
        node.stop()

    def test_a_run_of_one_agrees_with_itself(self) -> None:
        alone = Peer("alone", rules=GossipRules(min_peers=1, pace=RULES.pace)).found()
        assert [peer_id for peer_id, _, _ in agree([alone])[0].contributions] == ["alone"]
        assert isinstance(alone.topology, Adding)
        alone.node.leave("done", patience_s=SHORT)
