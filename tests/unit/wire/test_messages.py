"""Which message travels on which path, and how errors do."""

from typing import get_args
from urllib.parse import urlsplit

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from amounts import cases
from outerstep.errors import BY_CODE, BadRequest, Busy, Refused, ServerError, StaleRound
from outerstep.statements import Converse, Decision, Proof, Round, Signed
from outerstep.types import (
    MOST_CARRIED_BYTES,
    AskNonce,
    Commit,
    CompleteOffer,
    Control,
    Dataset,
    GetPart,
    Heartbeat,
    Join,
    JoinProof,
    Lease,
    Leave,
    Manifest,
    Offer,
    ParameterSpec,
    Poll,
    PutPart,
    Request,
    Wishes,
)
from outerstep.wire.messages import (
    PLACES,
    AnyAnswer,
    AnyRequest,
    address_of,
    decode_error,
    decode_json,
    encode_error,
    encode_json,
    parse_query,
    place_of,
)
from outerstep.wire.peers import AskParts, AskSnapshot, AskTerms, GetHeld

FUZZ = cases(200)

counts = st.integers(0, 2**53)
positives = st.integers(1, 2**53)
labels = st.text(max_size=40)
tensor_names = st.text(min_size=1, max_size=40)
run_ids = st.from_regex(r"[A-Za-z0-9_\-]{1,64}", fullmatch=True)
seconds = st.floats(0.0, 1e9)
part_hashes = st.from_regex(r"[0-9a-f]{16}", fullmatch=True)
digests = st.from_regex(r"[0-9a-f]{64}", fullmatch=True)
signatures = st.binary(min_size=64, max_size=64).map(bytes.hex)
peer_ids = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.:\-]{0,60}", fullmatch=True)
signed = st.builds(Signed, author=digests, body=st.binary(max_size=40), signature=st.binary(min_size=64, max_size=64))
some_signed = st.lists(signed, min_size=1, max_size=3).map(tuple)
rounds = st.builds(
    Round,
    height=positives,
    parent=digests,
    fragment=counts,
    version=positives,
    base_hash=st.from_regex(r"[0-9a-f]{32}", fullmatch=True),
    offers=some_signed,
)

member = {
    "run_id": run_ids,
    "worker_id": st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.:\-]{0,60}", fullmatch=True),
    "incarnation": positives,
}
contribution = {**member, "fragment": counts, "sequence": positives}
parameters = st.builds(
    ParameterSpec,
    name=tensor_names,
    shape=st.lists(counts, max_size=4).map(tuple),
    dtype=labels,
    block=labels,
    embedding=st.booleans(),
)
manifests = st.builds(
    Manifest,
    parameters=st.lists(parameters, max_size=3).map(tuple),
    aliases=st.dictionaries(tensor_names, tensor_names, max_size=2),
    buffers=st.lists(tensor_names, max_size=2).map(tuple),
    frozen=st.lists(tensor_names, max_size=2).map(tuple),
)
wishes = st.builds(
    Wishes,
    sync_every=st.none() | positives,
    codec=st.none() | labels,
    num_fragments=st.none() | positives,
    delay=st.none() | counts,
    alpha=st.none() | st.floats(0.0, 1.0),
    carry=st.none() | st.booleans(),
)

REQUESTS: dict[type[Request], st.SearchStrategy[Request]] = {
    Join: st.builds(
        Join,
        protocol=counts,
        worker_id=member["worker_id"],
        instance=st.from_regex(r"[A-Za-z0-9_\-]{8,64}", fullmatch=True),
        hostname=labels,
        manifest=st.none() | manifests,
        wishes=wishes,
        run_id=st.none() | run_ids,
        proof=st.just(UNSET) | st.builds(JoinProof, key=digests, nonce=digests, signature=signatures),
    ),
    AskNonce: st.builds(AskNonce, worker_id=member["worker_id"]),
    Heartbeat: st.builds(
        Heartbeat,
        **member,
        step=counts,
        steps_per_second=seconds,
        loss=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    ),
    Leave: st.builds(Leave, **member, reason=labels),
    Offer: st.builds(
        Offer,
        **contribution,
        base_version=counts,
        oldest_base=counts,
        samples=st.integers(0, 10**12),
        tokens=st.integers(0, 10**12),
        steps=counts,
        codec=labels,
        size_bytes=positives,
    ),
    CompleteOffer: st.builds(
        CompleteOffer,
        **contribution,
        base_version=counts,
        oldest_base=counts,
        steps=counts,
        codec=labels,
        size_bytes=st.integers(1, MOST_CARRIED_BYTES),
        loss=st.just(UNSET) | st.floats(allow_nan=False, allow_infinity=False),
        hash=part_hashes,
    ),
    PutPart: st.builds(PutPart, **contribution, part=counts, hash=part_hashes),
    Commit: st.builds(Commit, **contribution, payload_hash=st.from_regex(r"[0-9a-f]{32}", fullmatch=True)),
    Poll: st.builds(
        Poll,
        **member,
        fragment=counts,
        after=st.integers(-1, 2**53),
        wait_s=seconds,
        takes_bytes=st.just(UNSET) | st.integers(1, MOST_CARRIED_BYTES),
    ),
    Lease: st.builds(
        Lease,
        **member,
        dataset=st.builds(Dataset, name=st.just("train"), samples=st.integers(1, 2**53), unit_samples=st.just(3)),
        number=st.integers(1, 2**53),
        want=st.integers(0, 100),
        holds=st.lists(st.tuples(counts, counts), max_size=3).map(tuple),
        untrained=counts,
        waits=st.booleans(),
        pace=st.floats(0.0, 1e9),
    ),
    Control: st.builds(
        Control,
        kind=st.sampled_from(["save", "kick", "release", "drain", "sync", "plan", "budget", "shutdown"]),
        worker_id=st.none() | member["worker_id"],
        reason=labels,
        changes=wishes,
        tokens=counts,
    ),
    GetPart: st.builds(GetPart, **member, fragment=counts, version=counts, part=counts),
    AskTerms: st.builds(AskTerms, sender=peer_ids, protocol=counts),
    Converse: st.builds(
        Converse,
        run_id=run_ids,
        sender=peer_ids,
        height=counts,
        statements=st.lists(signed, max_size=3).map(tuple),
        proofs=st.lists(st.builds(Proof, first=signed, second=signed), max_size=2).map(tuple),
        decisions=st.lists(st.builds(Decision, block=rounds, votes=some_signed), max_size=2).map(tuple),
    ),
    AskSnapshot: st.builds(AskSnapshot, sender=peer_ids, run_id=run_ids, fragment=counts),
    AskParts: st.builds(AskParts, sender=peer_ids, run_id=run_ids, digest=digests),
    GetHeld: st.builds(GetHeld, sender=peer_ids, run_id=run_ids, digest=digests, part=counts),
}
GOOD_QUERY = "run_id=r&worker_id=w&incarnation=1&fragment=0&version=2&part=3&kind=full"


def as_received(request: AnyRequest) -> AnyRequest:
    """The way of a request over HTTP: method and target, then the query string or a JSON body."""
    method, target, _ = address_of(request)
    url = urlsplit(target)
    kind = next(kind for kind in PLACES if place_of(kind) == (method, url.path))
    if url.query:
        return parse_query(url.query, kind)
    return decode_json(encode_json(request), kind)


class TestRequests:
    @pytest.mark.parametrize("kind", get_args(AnyRequest), ids=lambda kind: kind.__name__)
    @FUZZ
    @given(data=st.data())
    def test_every_request_arrives_as_it_left(self, kind: type[AnyRequest], data: st.DataObject) -> None:
        request = data.draw(REQUESTS[kind])
        assert as_received(request) == request

    def test_every_request_has_a_place_of_its_own_and_every_answer_one_request(self) -> None:
        assert set(PLACES) == set(get_args(AnyRequest))
        assert len(set(map(place_of, PLACES))) == len(PLACES)
        answers = [answer.__name__ for _, _, answer in PLACES.values()]
        assert sorted(answers) == sorted(kind.__name__ for kind in get_args(AnyAnswer))
        for kind in get_args(Request):
            assert PLACES[kind][2].__name__ == f"{kind.__name__}Answer"

    def test_only_part_requests_put_their_facts_into_the_target(self) -> None:
        head = {"run_id": "r", "worker_id": "w:1", "incarnation": 1}
        assert address_of(Leave(**head))[:2] == ("POST", "/v1/leave")
        _, target, _ = address_of(GetPart(**head, fragment=0, version=2, part=3))
        assert target == "/v1/part?run_id=r&worker_id=w%3A1&incarnation=1&fragment=0&version=2&part=3&kind=full"


class TestQueries:
    @pytest.mark.parametrize(
        ("query", "message"),
        [
            ("", "missing required field"),
            (GOOD_QUERY.replace("&part=3", ""), "missing required field `part`"),
            (GOOD_QUERY + "&part=3", "a key appears twice"),
            (GOOD_QUERY + "&extra=1", "unknown field `extra`"),
            (GOOD_QUERY + "&extra", "bad query string"),
            (GOOD_QUERY + "&&", "bad query string"),
            (GOOD_QUERY.replace("part=3", "part=-1"), r"\$\.part"),
            (GOOD_QUERY.replace("part=3", "part=three"), r"\$\.part"),
            (GOOD_QUERY.replace("part=3", "part="), r"\$\.part"),
            (GOOD_QUERY.replace("part=3", "part=" + "9" * 5000), r"\$\.part"),
            (GOOD_QUERY.replace("incarnation=1", "incarnation=0"), r"\$\.incarnation"),
            (GOOD_QUERY.replace("worker_id=w", "worker_id=" + "w" * 129), r"\$\.worker_id"),
            (GOOD_QUERY.replace("worker_id=w", "worker_id=.."), r"\$\.worker_id"),
            (GOOD_QUERY.replace("worker_id=w", "worker_id=a%2Fb"), r"\$\.worker_id"),
            (GOOD_QUERY.replace("worker_id=w", "worker_id=a%00"), r"\$\.worker_id"),
            (GOOD_QUERY.replace("worker_id=w", "worker_id=w%0A"), r"\$\.worker_id"),
            (GOOD_QUERY.replace("run_id=r", "run_id=r%0A"), r"\$\.run_id"),
            (GOOD_QUERY.replace("worker_id=w", "worker_id=%ff"), "utf-8"),
            ("&".join(f"a{i}=1" for i in range(33)), "bad query string"),
        ],
    )
    def test_a_query_that_is_not_the_request_is_refused(self, query: str, message: str) -> None:
        assert parse_query(GOOD_QUERY, GetPart)
        with pytest.raises(BadRequest, match=message):
            parse_query(query, GetPart)

    @pytest.mark.parametrize("bad", ["0" * 15, "0" * 17, "0" * 15 + "G", "0" * 15 + "A", "0" * 16 + "%0A", ""])
    def test_a_part_hash_is_sixteen_small_hex_digits(self, bad: str) -> None:
        good = f"run_id=r&worker_id=w&incarnation=1&fragment=0&sequence=1&part=0&hash={'0' * 16}"
        assert parse_query(good, PutPart)
        with pytest.raises(BadRequest, match=r"\$\.hash"):
            parse_query(good.replace("0" * 16, bad), PutPart)

    @FUZZ
    @given(st.text(max_size=200) | st.text(alphabet="runidworke_=&%1230+;#", max_size=100))
    def test_arbitrary_queries_raise_nothing_but_a_bad_request(self, query: str) -> None:
        with pytest.raises(BadRequest):
            parse_query(query, GetPart)


class TestErrors:
    @pytest.mark.parametrize("kind", BY_CODE.values(), ids=BY_CODE.keys())
    @FUZZ
    @given(message=st.text(max_size=100), hint=st.text(max_size=100), retry_after_s=st.floats(0.0, 1e6))
    def test_every_refusal_keeps_its_class_and_words_over_the_wire(
        self, kind: type[Refused], message: str, hint: str, retry_after_s: float
    ) -> None:
        sent = kind(message, hint=hint, retry_after_s=retry_after_s)
        got = decode_error(encode_error(sent, "req-1"), kind.status)
        assert type(got) is kind
        assert (got.message, got.hint, got.retry_after_s) == (message, hint, retry_after_s)
        assert str(got) == str(sent)

    def test_the_body_has_the_documented_form(self) -> None:
        body = msgspec.json.decode(encode_error(Busy("full", hint="wait", retry_after_s=2.5), "req-7"))
        assert body == {
            "error": {"code": "busy", "message": "full", "hint": "wait", "request_id": "req-7", "retry_after_s": 2.5}
        }

    def test_a_code_of_a_newer_server_is_still_a_refusal_with_its_words(self) -> None:
        got = decode_error(b'{"error": {"code": "too_tired", "message": "go away", "hint": "sleep"}}', 409)
        assert type(got) is Refused
        assert (got.message, got.hint) == ("go away", "sleep")

    def test_hint_request_id_and_retry_may_be_absent(self) -> None:
        got = decode_error(b'{"error": {"code": "stale_round", "message": "closed"}}', 409)
        assert type(got) is StaleRound
        assert (got.hint, got.retry_after_s) == ("", 0.0)

    @pytest.mark.parametrize(
        "body",
        [
            b"",
            b"<html><title>502 Bad Gateway</title></html>",
            b'{"detail": "Not Found"}',
            b'{"error": "nope"}',
            b'{"error": {"code": "busy"}}',
            b'{"error": {"code": 5, "message": "x"}}',
            b'{"error": {"code": "busy", "message": "x", "retry_after_s": NaN}}',
            b"\xff\xfe\x00",
            b"[" * 100_000,
        ],
        ids=lambda body: repr(body)[:40],
    )
    @pytest.mark.parametrize(("status", "kind"), [(404, Refused), (502, ServerError)])
    def test_an_answer_of_something_else_says_so_and_asks_about_the_address(
        self, body: bytes, status: int, kind: type[Refused]
    ) -> None:
        """A proxy's 502 is worth another try; a stranger's 404 is not."""
        got = decode_error(body, status)
        assert type(got) is kind
        assert f"HTTP status {status}" in got.message
        assert got.hint == "is this the address of an outerstep server?"
        assert len(got.message) < 500

    @FUZZ
    @given(st.binary(max_size=200), st.integers(400, 599))
    def test_arbitrary_bodies_become_a_refusal_and_never_an_exception(self, body: bytes, status: int) -> None:
        assert str(status) in decode_error(body, status).message
