"""A token holder says to real peers what nobody would: none of them stops, and what it said is held against it.

The attacker has the run's token, and in most of these the key of a member too (`d`, whose own node goes on as if
nothing was). What each attack did to peers of release 0.2 is in its docstring.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from outerstep.coordination.gossip.ballot import Ballots
from outerstep.errors import ConfigError, OuterstepError, Refused
from outerstep.events import ContributionRefused
from outerstep.security.signing import SigningKey, make_key
from outerstep.statements import (
    Beat,
    ChainState,
    Change,
    Converse,
    Decision,
    Member,
    Offered,
    Proof,
    Proposed,
    Round,
    Signed,
    Voted,
    body_of,
)
from outerstep.topology.gossip.node.records import PeerFolder
from outerstep.topology.gossip.node.repair import repair
from outerstep.wire.http_transport import HttpTransport
from outerstep.wire.peers import AskSnapshot, AskTerms, OfferedSnapshot, PartList, PeerAnswer, PeerRequest, Terms
from outerstep.wire.routes import Reply
from peers import RULES, SHORT, SIZES, Peer, agree, start_peers, stop_peers
from support import intercept, wait_until

NESTED = 100_000
DEEP = b"\x82\xa1x" + b"\x91" * NESTED + b"\xc0" + b"\xa4says\xa4beat"  # a key before the tag: it has to be skipped
HASH = "0" * 32


PROMPT = replace(RULES, round_deadline_s=1.0)  # who says nothing of use is not waited for


@pytest.fixture
def peers() -> Iterator[list[Peer]]:
    found = start_peers(4, rules=PROMPT)
    yield found
    stop_peers(found)


class Attacker:
    """Speaks with the run's token. `key`: of a member, or of nobody."""

    def __init__(self, peers: list[Peer], key: SigningKey | None = None, name: str = "d") -> None:
        self.peers, self.name = peers, name
        self.key = key or peers[-1].node._key
        with peers[0].node.lock:
            self.run_id = peers[0].node.peer.run_id

    def signs(self, body: bytes) -> Signed:
        return Signed(author=self.key.public, body=body, signature=self.key.sign(body))

    def forges(self, body: bytes, author: str | None = None) -> Signed:
        return Signed(author=author or self.key.public, body=body, signature=bytes(64))

    def tells(self, *statements: Signed, **more: Any) -> None:
        """All honest peers, at the height where each of them is."""
        for peer in self.peers:
            with peer.node.lock:
                height = peer.node.peer.state.height
            told = Converse(run_id=self.run_id, sender=self.name, height=height, statements=statements, **more)
            try:
                HttpTransport(peer.node.join_string).ask(told)
            except OuterstepError as error:
                self.refused = str(error)

    def beat(self, **facts: Any) -> Beat:
        usual: dict[str, Any] = {"address": "127.0.0.1:9", "fingerprint": "0" * 64, "incarnation": 1, "number": 1}
        return Beat(run_id=self.run_id, **{"peer_id": self.name, **usual, **facts})

    def offer(self, **facts: Any) -> Offered:
        usual: dict[str, Any] = {"fragment": 0, "version": 1, "sequence": 99, "digest": "e" * 64, "steps": 1}
        usual |= {"size_bytes": SIZES[0], "base_hash": HASH}
        return Offered(run_id=self.run_id, **{**usual, **facts})


def check_unharmed(peers: list[Peer], *, names: str = "abcd") -> None:
    """They go on: none has stopped, and two more rounds are decided, with everybody in them."""
    for fragment in (0, 1):
        decided = agree(peers, fragment)
        assert [peer_id for peer_id, _, _ in decided[0].contributions] == list(names[: len(peers)])
    assert [peer.node.failure for peer in peers] == [""] * len(peers)


def refused(peer: Peer, who: str) -> int:
    """How often something of this peer's was refused, as the status says."""
    return peer.node.status().refused.get(who, 0)


# --- statements ---------------------------------------------------------------------------------------------------

BODIES = {
    "not UTF-8": b"\x81\xa4says\xa4b\xff\xfet",
    "nested deeply": DEEP,
    "empty": b"",
    "a number": b"\x01",
    "half a map": b"\x8f\xa4says",
    "an extension": b"\xc7\x01\x05\x00",
    "a million of something": b"\xdd\x00\x0f\xff\xff",
    "four billion keys": b"\xdf\xff\xff\xff\xff",
    "an unknown kind": msgspec.msgpack.encode({"says": "surrender", "run_id": "r"}),
    "NaN": b"\x81\xa4says\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00",
}


@pytest.mark.parametrize("by", ["nobody", "a member"])
def test_a_statement_that_is_none_stops_nobody(peers: list[Peer], by: str) -> None:
    """0.2: one body that is not UTF-8, or nests deeply, ended every peer, and it needed no signature."""
    attacker = Attacker(peers)
    for body in BODIES.values():
        attacker.tells(attacker.forges(body) if by == "nobody" else attacker.signs(body))
    check_unharmed(peers)
    assert refused(peers[0], "d") >= len(BODIES)


def spoiled(statement: Any, **fields: object) -> bytes:
    """A statement with some fields as no honest peer writes them."""
    facts = msgspec.msgpack.decode(body_of(statement))
    assert fields.keys() <= facts.keys()
    return msgspec.msgpack.encode({**facts, **fields})


ODD: list[object] = [
    None,
    True,
    -1,
    2**53 + 1,
    2**63,
    1.5,
    float("nan"),
    float("inf"),
    "",
    "x" * 100_000,
    b"\xff",
    [],
    {},
]


def test_a_field_of_any_type_and_value_stops_nobody(peers: list[Peer]) -> None:
    attacker = Attacker(peers)
    with peers[0].node.lock:
        state = peers[0].node.peer.state
    statements = [
        attacker.beat(held=((0, HASH), (0, HASH)), loss=1.0),
        attacker.offer(),
        Voted(run_id=attacker.run_id, height=state.height + 1, turn=0, kind="prevote", block=""),
        Proposed(run_id=attacker.run_id, height=state.height + 1, turn=0, block=change(state, *state.members)),
    ]
    spoils = [
        attacker.signs(spoiled(statement, **{name: value}))
        for statement in statements
        for name in msgspec.msgpack.decode(body_of(statement))
        for value in ODD
    ]
    attacker.tells(*spoils)
    assert [peer.node.failure for peer in peers] == [""] * 4
    # (A vote and a beat with other values may be honest ones; nothing that is left of `d` can be relied on.)
    decided = agree(peers[:3])
    assert {"a", "b", "c"} <= {peer_id for peer_id, _, _ in decided[0].contributions}


# --- beats --------------------------------------------------------------------------------------------------------

PLACES: dict[str, dict[str, Any]] = {
    "no fingerprint": {"fingerprint": None},
    "a fingerprint that is none": {"fingerprint": "z" * 64},
    "half a fingerprint": {"fingerprint": "0" * 63},
    "an endless fingerprint": {"fingerprint": "0" * 256},
    "no port": {"address": "127.0.0.1:none"},
    "a port that is none": {"address": "127.0.0.1:99999"},
    "two ports": {"address": "127.0.0.1:1:2"},
    "a scheme": {"address": "http://http://h:1"},
    "a null": {"address": "a\0b:1"},
    "a line break": {"address": "127.0.0.1:9\r\nX: y"},
    "an escape": {"address": "\x1b[31m:9"},
    "an empty bracket": {"address": "[]:9"},
    "a token": {"address": "me@host:1"},
    "an endless label": {"address": "a" * 250 + ":1"},
    "half a character": {"address": "\udc80:1".encode("utf-8", "surrogatepass").decode("utf-8", "replace")},
}


@pytest.mark.parametrize("place", PLACES)
def test_who_names_a_place_that_cannot_be_called_is_not_let_in(place: str) -> None:
    """0.2: voted in, and every peer ended as soon as it wanted to call; and again at each restart."""
    peers = start_peers(2)
    try:
        stranger = Attacker(peers, make_key(), "stranger")
        for number in range(1, 4):
            stranger.tells(stranger.signs(body_of(stranger.beat(number=number, **PLACES[place]))))
        check_unharmed(peers)
        assert [member.peer_id for member in peers[0].node.peer.state.members] == ["a", "b"]
        assert refused(peers[0], stranger.key.public[:16]) or refused(peers[0], "stranger")
    finally:
        stop_peers(peers)


def test_a_member_that_moves_to_a_place_that_cannot_be_called_stops_nobody(peers: list[Peer]) -> None:
    attacker = Attacker(peers)
    for number, place in enumerate(PLACES.values()):
        attacker.tells(attacker.signs(body_of(attacker.beat(incarnation=9, number=number, **place))))
    check_unharmed(peers)
    assert refused(peers[0], "d") >= len(PLACES)


# --- proposals ----------------------------------------------------------------------------------------------------


def change(state: ChainState, *members: Member, **more: Any) -> Change:
    return Change(height=state.height + 1, parent=state.tip, members=members, **more)


def round_of(state: ChainState, *offers: Signed) -> Round:
    facts = {"fragment": 0, "version": state.versions[0] + 1, "base_hash": HASH}
    return Round(height=state.height + 1, parent=state.tip, offers=offers, **facts)  # type: ignore[arg-type]


def blocks_of(attacker: Attacker, state: ChainState) -> dict[str, Round | Change]:
    beat, nobody = attacker.signs(body_of(attacker.beat())), make_key()
    others = [member for member in state.members if member.peer_id != "d"]
    guest = Member(peer_id="guest", key=nobody.public)
    came = Attacker(attacker.peers, nobody, "guest")
    lost = came.signs(body_of(came.beat(fingerprint="z" * 64)))
    return {
        "beats for offers": round_of(state, beat, beat),
        "garbage for offers": round_of(state, *[attacker.signs(body) for body in BODIES.values()]),
        "forged offers": round_of(state, *[attacker.forges(body_of(attacker.offer()), m.key) for m in state.members]),
        "one offer many times": round_of(state, *[attacker.signs(body_of(attacker.offer()))] * 64),
        "an offer to another fragment": round_of(state, attacker.signs(body_of(attacker.offer(fragment=2**40)))),
        "members out of order": change(state, *reversed(state.members)),
        "a member twice": change(state, *state.members, state.members[0]),
        "two names for one key": change(state, *state.members, Member(peer_id="z", key=state.members[0].key)),
        "a guest without a beat": change(state, *others, guest),
        "a guest that nobody can call": change(state, *state.members, guest, applied=(lost,)),
        "garbage for beats": change(state, *others, applied=tuple(map(attacker.signs, BODIES.values()))),
        "garbage for proofs": change(state, *others, proofs=(Proof(first=attacker.signs(DEEP), second=beat),)),
    }  # fmt: skip


def test_a_proposal_that_cannot_be_carried_out_stops_nobody_and_is_not_voted_for(peers: list[Peer]) -> None:
    """0.2: a round whose offers are beats ended the thread that looks for what is missing, and the peer with it."""
    attacker = Attacker(peers)
    with peers[0].node.lock:
        state = peers[0].node.peer.state
        ballot = peers[0].node.peer._ballot
        turns = [turn for turn in range(200) if ballot.proposer(turn) == attacker.key.public]
    blocks = blocks_of(attacker, state)
    for turn, block in zip(turns, blocks.values(), strict=False):
        proposed = Proposed(run_id=attacker.run_id, height=state.height + 1, turn=turn, block=block)
        attacker.tells(attacker.signs(body_of(proposed)))
    check_unharmed(peers)
    for peer in peers:
        assert [member.peer_id for member in peer.node.peer.state.members] == list("abcd")


def test_a_decision_that_nobody_took_is_not_followed(peers: list[Peer]) -> None:
    attacker = Attacker(peers)
    with peers[0].node.lock:
        state = peers[0].node.peer.state
    votes = tuple(attacker.signs(body) for body in BODIES.values())
    for block in blocks_of(attacker, state).values():
        attacker.tells(decisions=(Decision(block=block, votes=votes),))
    check_unharmed(peers)


def test_proofs_of_every_wrong_kind_convict_nobody(peers: list[Peer]) -> None:
    attacker, victim = Attacker(peers), peers[0].node.key
    statements = [attacker.signs(body) for body in BODIES.values()]
    statements += [attacker.forges(body, victim) for body in BODIES.values()]
    attacker.tells(proofs=tuple(Proof(first=one, second=two) for one in statements[:7] for two in statements[-7:]))
    check_unharmed(peers)
    assert not any(peer.node.peer.book.proofs for peer in peers)


# --- answers ------------------------------------------------------------------------------------------------------

ANSWERS: dict[str, bytes] = {
    "nothing": b"",
    "null": b"null",
    "not JSON": b"{",
    "not UTF-8": b'{"run_id": "\xff\xfe"}',
    "half a character": b'{"run_id": "\\ud800"}',
    "nested deeply": b"[" * NESTED,
    "nested deeply in a field": b'{"run_id":' + b"[" * NESTED,
    "a number": b"1e999",
    "huge numbers": b'{"run_id":"r","sender":"d","height":' + b"9" * 5000 + b"}",
    "negative": b'{"run_id":"r","sender":"d","height":-1}',
    "an unknown field": b'{"run_id":"r","sender":"d","height":1,"surprise":1}',
    "wrong types": b'{"run_id":1,"sender":[],"height":"x","statements":{}}',
    "no base64": b'{"run_id":"r","sender":"d","height":1,"statements":[{"author":"' + b"0" * 64
    + b'","body":"\\u0001","signature":"="}]}',
}  # fmt: skip


def lies_with(peer: Peer, lie: Callable[[PeerRequest, Callable[[], PeerAnswer]], object]) -> None:
    honest = peer.node.service.answer
    intercept(peer.node.service, honest, lambda request: lie(request, lambda: honest(request)))


@pytest.mark.parametrize("status", [200, 500, 418])
def test_an_answer_of_any_bytes_is_that_peers_trouble(peers: list[Peer], status: int) -> None:
    liar, answers = peers[3], iter(list(ANSWERS.values()) * 10_000)
    lies_with(liar, lambda request, honest: Reply(next(answers), status=status))
    for _ in range(3):
        decided = agree(peers[:3])
        assert {"a", "b", "c"} <= {peer_id for peer_id, _, _ in decided[0].contributions}
    assert [peer.node.failure for peer in peers[:3]] == [""] * 3


def statement_answers(attacker: Attacker) -> list[tuple[Signed, ...]]:
    return [tuple(map(attacker.signs, BODIES.values())), tuple(map(attacker.forges, BODIES.values()))]


def test_an_answer_with_statements_that_are_none_stops_nobody(peers: list[Peer]) -> None:
    attacker = Attacker(peers)
    told = [statement for some in statement_answers(attacker) for statement in some]

    def lie(request: PeerRequest, honest: Callable[[], PeerAnswer]) -> object:
        answer = honest()
        return msgspec.structs.replace(answer, statements=tuple(told)) if isinstance(answer, Converse) else answer

    lies_with(peers[3], lie)
    wait_until(lambda: refused(peers[0], "d") >= len(BODIES))
    check_unharmed(peers)
    assert [peer.node.failure for peer in peers] == [""] * 4


PARTS: dict[str, PartList] = {
    "an endless size": PartList(size_bytes=2**53, part_size_bytes=16 << 20, digests=("0" * 64,)),
    "a terabyte in as many parts": PartList(size_bytes=1 << 40, part_size_bytes=16 << 20, digests=("0" * 64,) * 65536),
    "parts of one byte": PartList(size_bytes=64, part_size_bytes=1, digests=("0" * 64,) * 64),
    "too few parts": PartList(size_bytes=64, part_size_bytes=16 << 20, digests=("0" * 64,) * 2),
    "bytes that it does not have": PartList(size_bytes=64, part_size_bytes=16 << 20, digests=("0" * 64,)),
}


@pytest.mark.parametrize("parts", PARTS)
def test_who_joins_is_not_misled_by_a_snapshot_that_cannot_be(parts: str) -> None:
    """0.2: asked the system for as much memory as one peer named."""
    peers = start_peers(3)

    def lie(request: PeerRequest, honest: Callable[[], PeerAnswer]) -> object:
        return OfferedSnapshot(version=2**53, parts=PARTS[parts]) if isinstance(request, AskSnapshot) else honest()

    lies_with(peers[2], lie)
    try:
        agree(peers)
        peers.append(Peer("late", join=(peers[0].node.join_string,)).join())
        assert peers[3].topology.anchors[0] == peers[0].topology.anchors[0]
    finally:
        stop_peers(peers)


def states(good: ChainState) -> dict[str, ChainState]:
    replace = msgspec.structs.replace  # of a message
    stranger = Member(peer_id="zz", key=make_key().public)
    return {
        "nobody belongs": replace(good, members=()),
        "a member twice": replace(good, members=(*good.members, good.members[0])),
        "out of order": replace(good, members=tuple(reversed(good.members))),
        "too many": replace(good, members=(*good.members, *[replace(stranger, peer_id=f"z{i:03}") for i in range(99)])),
        "other fragments": replace(good, versions=(1,)),
        "no fragments": replace(good, versions=()),
    }


STATE = ChainState(height=1, tip="0" * 64, members=(Member(peer_id="a", key="0" * 64),), versions=(0, 0))


@pytest.mark.parametrize("what", sorted(states(STATE)))
def test_a_state_that_cannot_be_is_not_leapt_to(what: str) -> None:
    """Of two members one word is enough. 0.2: other fragments than the run has ended the peer that believed it."""
    peers = start_peers(2)
    try:
        with peers[1].node.lock:
            good = peers[1].node.peer.state
        bad = msgspec.structs.replace(states(good)[what], height=good.height + 1000)

        def lie(request: PeerRequest, honest: Callable[[], PeerAnswer]) -> object:
            answer = honest()
            if isinstance(request, AskTerms):
                return msgspec.structs.replace(answer, state=bad)
            if isinstance(answer, Converse):
                return msgspec.structs.replace(answer, height=bad.height, decisions=())
            return answer

        lies_with(peers[1], lie)
        wait_until(lambda: refused(peers[0], "b") > 0)
        assert peers[0].node.failure == ""
        assert peers[0].node.peer.state.height < bad.height
        late = Peer("late", join=(peers[1].node.join_string,))
        with pytest.raises((Refused, ConfigError), match=r"cannot be|the run has 1 fragments, got sizes for 2"):
            late.join()
        late.node.stop()
    finally:
        stop_peers(peers)


def test_a_contribution_that_breaks_the_check_is_refused_and_its_authors_trouble(peers: list[Peer]) -> None:
    """Whatever the bytes of another do to the code that looks at them, it is not this peer's end."""
    for peer in peers[:3]:

        def check(data: memoryview) -> str:
            if data[0] == 4:
                raise IndexError("an index of d's points outside")
            return ""

        peer.topology.refuse = check
    for i, peer in enumerate(peers):
        peer.offer(0, i + 1)
    decided = [peer.take(0) for peer in peers[:3]]
    assert [peer_id for peer_id, _, _ in decided[0].contributions] == ["a", "b", "c"]
    assert [peer.node.failure for peer in peers] == [""] * 4
    told = [event for event in peers[0].events if isinstance(event, ContributionRefused)]
    assert told
    assert "an index of d's points outside" in told[0].reason
    assert refused(peers[0], "d") >= 1


# --- a folder from before -----------------------------------------------------------------------------------------


def brick(folder: Path, guest: SigningKey) -> None:
    """As a peer of 0.2 left its folder that had voted a guest in whom nobody can call: it stopped, and stopped again
    at each start."""
    kept_in = PeerFolder(folder)
    kept = kept_in.keepsake
    assert kept is not None
    beat = Beat(run_id=kept.run_id, peer_id="guest", incarnation=1, number=1, address="127.0.0.1:9", fingerprint="z")
    body = body_of(beat)
    signed = Signed(author=guest.public, body=body, signature=guest.sign(body))
    members = (*kept.state.members, Member(peer_id="guest", key=guest.public))
    state = msgspec.structs.replace(kept.state, members=members, height=kept.state.height + 1)
    kept_in.keep(msgspec.structs.replace(kept, state=state, ballots=Ballots()))
    kept_in.remember((*kept_in.beats, signed))
    kept_in.close()


@pytest.mark.parametrize("is_repaired", [False, True])
def test_folders_with_a_guest_that_nobody_can_call_are_opened_and_the_run_goes_on(
    tmp_path: Path, is_repaired: bool, caplog: pytest.LogCaptureFixture
) -> None:
    guest, before = make_key(), start_peers(3, tmp_path, rules=PROMPT)
    agree(before)
    stop_peers(before)
    for peer in before:
        brick(tmp_path / peer.name, guest)
        if is_repaired:
            assert "a beat of guest is left out" in repair(tmp_path / peer.name).mended[0]
    peers = [Peer(p.name, folder=str(tmp_path / p.name), listen=p.node.address, rules=PROMPT) for p in before]
    try:
        for peer, old in zip(peers, before, strict=True):
            peer.topology = old.topology
            peer.begin(peer.node.ask_terms(SHORT))
            peer.hold_all()
            peer.node.belong()
        assert "where guest can be called" in caplog.text
        check_unharmed(peers)
        wait_until(lambda: all(len(peer.node.peer.state.members) == 3 for peer in peers))
        assert bool(refused(peers[0], "guest")) != is_repaired
    finally:
        stop_peers(peers)


def test_who_starts_again_through_a_liar_believes_its_own_folder(tmp_path: Path) -> None:
    """0.2: took over whatever state the peer to join named, kept it, and never followed the others again."""
    peers = start_peers(3, tmp_path, rules=PROMPT)
    agree(peers)
    gone, liar = peers.pop(1), peers[-1]
    with liar.node.lock:
        far = msgspec.structs.replace(liar.node.peer.state, height=2**40, tip="f" * 64)

    def lie(request: PeerRequest, honest: Callable[[], PeerAnswer]) -> object:
        answer = honest()
        return msgspec.structs.replace(answer, state=far) if isinstance(answer, Terms) else answer

    gone.node.stop()
    lies_with(liar, lie)
    again = Peer("b", folder=str(tmp_path / "b"), join=(liar.node.join_string,), rules=PROMPT)
    peers.insert(1, again)
    try:
        again.join()
        assert again.node.peer.state.height < far.height
        check_unharmed(peers)
    finally:
        stop_peers(peers)
