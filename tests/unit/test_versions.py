"""What belongs to which protocol: the marks, what they do to a message, and that nobody forgets one."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, ClassVar, get_args, get_type_hints

import msgspec
import pytest
from msgspec import UNSET, field

from outerstep.errors import BadRequest, ProtocolMismatch
from outerstep.statements import (
    AnyStatement,
    Beat,
    Change,
    Member,
    Offered,
    Proof,
    Proposed,
    Round,
    Signed,
    Voted,
    body_of,
    digest_of_block,
)
from outerstep.topology.gossip.node.records import PeerRunFacts
from outerstep.topology.gossip.terms import GossipTerms
from outerstep.types import Control, Join, Plain
from outerstep.versions import (
    OLDEST_PROTOCOL,
    PROTOCOL_VERSION,
    SPOKEN_HERE,
    Since2,
    as_spoken,
    check_spoken,
    fields_of,
    highest_common,
    kinds_in,
    needs,
    newest_in,
)
from outerstep.wire.messages import (
    PLACES,
    ErrorAnswer,
    ProbeAnswer,
    check_written,
    encode_json,
    protocol_of,
    written_in,
)

PROTOCOL_1 = json.loads((Path(__file__).parent / "protocol_1.json").read_text())
"""Every message of release 0.2 and its fields, as 63d03f7 writes them. It never changes."""

ORDERS_1 = {"save", "kick", "pardon", "drain", "sync", "plan", "budget", "shutdown"}
"""Likewise, what an operator could order."""

MESSAGES = kinds_in(
    *PLACES, *(answer for _, _, answer in PLACES.values()), ErrorAnswer, ProbeAnswer, AnyStatement, GossipTerms,
    PeerRunFacts,
)  # fmt: skip


class Leaf(Plain, frozen=True):
    name: str
    note: Since2[str] = UNSET


class Later(Plain, frozen=True):
    SINCE: ClassVar[int] = 2

    name: str = ""


class Tree(Plain, frozen=True):
    leaves: tuple[Leaf | Later, ...] = ()
    by_name: dict[str, Leaf] = field(default_factory=dict)
    count: int = 0


class Bush(Plain, frozen=True):
    count: int = 0


OLD = Tree(leaves=(Leaf(name="a"),), by_name={"b": Leaf(name="b")}, count=3)
NEW = Tree(leaves=(Leaf(name="a", note="x"),), by_name={"b": Leaf(name="b", note="")}, count=3)


class TestOneMessage:
    def test_what_is_unset_is_written_nowhere_and_comes_back_unset(self) -> None:
        assert encode_json(OLD) == b'{"leaves":[{"name":"a"}],"by_name":{"b":{"name":"b"}},"count":3}'
        assert msgspec.json.decode(b'{"name":"a"}', type=Leaf) == Leaf(name="a")
        assert msgspec.msgpack.encode(Leaf(name="a")) == msgspec.msgpack.encode({"name": "a"})

    @pytest.mark.parametrize(
        ("message", "protocol"),
        [(OLD, 1), (NEW, 2), (Tree(by_name=NEW.by_name), 2), (Later(), 2), (Tree(leaves=(Later(),)), 2), (Bush(), 1)],
        ids=repr,
    )
    def test_it_needs_the_protocol_of_the_newest_thing_in_it(self, message: Plain, protocol: int) -> None:
        assert needs(message) == protocol

    def test_an_older_protocol_leaves_later_fields_out_however_deep(self) -> None:
        assert as_spoken(NEW, 1) == OLD
        assert as_spoken(NEW, 2) is NEW
        assert as_spoken(Bush(count=1), 1) == Bush(count=1)

    @pytest.mark.parametrize("message", [Later(), Tree(leaves=(Later(),))], ids=repr)
    def test_what_an_older_protocol_does_not_have_is_not_said_in_it(self, message: Plain) -> None:
        with pytest.raises(ProtocolMismatch, match="Later belongs to protocol 2, and the other end speaks 1"):
            as_spoken(message, 1)

    @pytest.mark.parametrize("kind", ["release", "forget", "lead"])
    def test_an_order_that_an_older_server_does_not_have_is_not_given_to_it(self, kind: Any) -> None:
        assert needs(Control(kind=kind)) == 2
        with pytest.raises(
            ProtocolMismatch, match=f"Control '{kind}' belongs to protocol 2, and the .* speaks 1"
        ) as no:
            as_spoken(Control(kind=kind), 1)
        assert no.value.hint == "update outerstep there"
        with pytest.raises(BadRequest, match="this Control has what belongs to protocol 2"):
            check_written(Control(kind=kind), 1)
        assert as_spoken(Control(kind="kick"), 1) == Control(kind="kick")

    def test_a_later_field_in_a_message_of_an_older_protocol_is_refused_like_an_unknown_one(self) -> None:
        check_written(NEW, 2)
        check_written(OLD, 1)
        with pytest.raises(BadRequest, match="this Tree has what belongs to protocol 2, and is said in 1"):
            check_written(NEW, 1)

    def test_a_request_says_the_protocol_that_was_agreed(self) -> None:
        join = Join(protocol=PROTOCOL_VERSION, worker_id="w", instance="a" * 8)
        assert written_in(join, 1) == Join(protocol=1, worker_id="w", instance="a" * 8)


class TestTwoEnds:
    @pytest.mark.parametrize(
        ("shown", "common"),
        [
            (None, 1),
            ("1-1", 1),
            ("1-2", 2),
            ("1-7", 2),
            ("2-7", 2),
            ("3-7", None),
            ("", None),
            ("2", None),
            ("x-y", None),
        ],
    )
    def test_they_speak_the_highest_that_both_do(self, shown: str | None, common: int | None) -> None:
        assert highest_common(shown) == common

    def test_a_request_that_names_no_protocol_is_of_release_0_2(self) -> None:
        assert protocol_of({}) == 1
        assert protocol_of({"outerstep-protocol": "2"}) == 2

    @pytest.mark.parametrize("named", ["", "x", "1, 2", "-1", "1.0", "²", "9999999"])
    def test_a_protocol_is_a_number(self, named: str) -> None:
        with pytest.raises(BadRequest, match="Outerstep-Protocol must be a number"):
            protocol_of({"outerstep-protocol": named})

    @pytest.mark.parametrize("protocol", [0, PROTOCOL_VERSION + 1])
    def test_another_is_refused_saying_which_there_are_and_what_to_update(self, protocol: int) -> None:
        with pytest.raises(ProtocolMismatch, match=f"w speaks protocol {protocol}; understood: {SPOKEN_HERE}") as no:
            check_spoken(protocol, "w")
        assert no.value.hint == "update outerstep at the older end"


class TestNothingIsForgotten:
    def test_release_0_2_still_finds_all_its_messages(self) -> None:
        assert PROTOCOL_1.keys() <= {kind.__name__ for kind in MESSAGES}

    @pytest.mark.parametrize("kind", sorted(MESSAGES, key=lambda kind: kind.__name__), ids=lambda kind: kind.__name__)
    def test_whatever_release_0_2_does_not_know_is_marked_and_may_be_absent(self, kind: type[Plain]) -> None:
        if kind.__name__ not in PROTOCOL_1:
            assert kind.SINCE > OLDEST_PROTOCOL, f"{kind.__name__} is new: say SINCE: ClassVar[int] = 2"
            return
        assert kind.SINCE == OLDEST_PROTOCOL
        said_as = dict(zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True))
        of_old = [said_as[name] for name, since in fields_of(kind).items() if since == OLDEST_PROTOCOL]
        assert of_old == PROTOCOL_1[kind.__name__], "a new field is Since2[…] = UNSET, and an old one stays"
        later = [one for one in msgspec.structs.fields(kind) if fields_of(kind)[one.name] > OLDEST_PROTOCOL]
        assert all(one.default is UNSET for one in later), "absent when nobody says it"

    def test_an_order_that_release_0_2_does_not_know_is_marked(self) -> None:
        kinds = get_args(get_type_hints(Control)["kind"])
        assert set(kinds) - Control.SINCE_KIND.keys() == ORDERS_1

    def test_refusals_are_the_same_in_all_protocols(self) -> None:
        """They are written before it is known who asks."""
        assert newest_in(ErrorAnswer) == OLDEST_PROTOCOL


RUN, KEY, TIP, HASH = "a-run", "a" * 64, "b" * 64, "0" * 32
SIGNED = Signed(author=KEY, body=b"said", signature=b"s" * 64)
ROUND = Round(height=3, parent=TIP, fragment=0, version=2, base_hash=HASH, offers=(SIGNED,))
CHANGE = Change(
    height=3, parent=TIP, members=(Member(peer_id="p", key=KEY),), applied=(SIGNED,),
    proofs=(Proof(first=SIGNED, second=SIGNED),),
)  # fmt: skip
SAID_IN_0_2: dict[str, AnyStatement] = {
    "3b8492e8e2d37f57dd8a9d2dd8284cb2": Offered(
        run_id=RUN, fragment=0, version=2, sequence=1, digest=TIP, size_bytes=8, base_hash=HASH, steps=5, tokens=7
    ),
    "cb162015328e03fb3fa59eb68b472c84": Proposed(run_id=RUN, height=3, turn=0, block=ROUND),
    "de8f7a54dff1d8b7dea7d0d259c68f81": Proposed(run_id=RUN, height=3, turn=1, block=CHANGE, valid_turn=0),
    "6f8e3a3a32d0cbf3c1fc3a030b3dbd65": Voted(run_id=RUN, height=3, turn=0, kind="prevote", block=TIP),
    "89902e63cfa87cf2934b2da6e2182e94": Beat(
        run_id=RUN, peer_id="p", incarnation=1, number=4, address="h:1", held=((2, HASH),), step=3,
        steps_per_second=0.5, loss=1.25,
    ),
}  # fmt: skip
"""By the beginning of the SHA-256 of what 63d03f7 signs for it."""


@pytest.mark.parametrize("digest", SAID_IN_0_2, ids=lambda digest: type(SAID_IN_0_2[digest]).__name__)
def test_what_peers_sign_in_protocol_1_has_the_bytes_of_release_0_2(digest: str) -> None:
    said = SAID_IN_0_2[digest]
    assert needs(said) == 1
    assert hashlib.sha256(body_of(said)).hexdigest().startswith(digest)


def test_a_block_of_protocol_1_has_the_digest_of_release_0_2() -> None:
    assert digest_of_block(ROUND).startswith("855d548d8cb6fa14571e37751aa54987")
    assert digest_of_block(CHANGE).startswith("d87e16598cbc200173007d3e22ba16c8")
