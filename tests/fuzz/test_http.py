"""Any bytes to a live service, and any messages to a live run: every answer is one of the documented ones, never a 500,
and the run goes on."""

from __future__ import annotations

import contextlib
import json
import re
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fuzz.cases import altered, cases, spoiled
from outerstep.digest import part_count, part_hash, part_range, payload_hash
from outerstep.errors import BY_CODE, Refused, TransportError
from outerstep.server import DiLoCoServer
from outerstep.types import Commit, GetPart, Heartbeat, Join, Leave, Offer, Poll, PutPart, Request
from outerstep.wire.http_transport import HttpTransport
from outerstep.wire.memory import MemoryTransport
from outerstep.wire.messages import PLACES, PROBE_PATH, STATUS_PATH
from support import HandClient, Ledger, make_frame, wait_until

PAYLOAD = make_frame({"cells": torch.ones(2)})
STATUSES = {200, 431} | {kind.status for kind in BY_CODE.values()} - {500}


@pytest.fixture(scope="module")
def server() -> Iterator[DiLoCoServer]:
    """In plain text: the bytes are what the service reads."""
    settings: dict[str, Any] = {"codec": "fp32", "sync_every": 1, "heartbeat_timeout": 0.0}
    with DiLoCoServer(Ledger().state_dict(), num_workers=1, port=0, insecure=True, **settings) as made:
        HandClient(HttpTransport(f"http://{made.address}")).join()
        yield made
        assert made.service.failure == ""
        assert HttpTransport(f"http://{made.address}").status()["failure"] == ""


def say(server: DiLoCoServer, data: bytes) -> list[tuple[int, bytes]]:
    """These bytes, and no more; every answer that comes back, as status and body."""
    host, port = server.address.split(":")
    heard = b""
    with socket.create_connection((host, int(port)), timeout=20) as sock, contextlib.suppress(ConnectionError):
        with contextlib.suppress(OSError):  # it may have heard enough
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
        while piece := sock.recv(65536):
            heard += piece
    answers = []
    while heard:
        head, _, heard = heard.partition(b"\r\n\r\n")
        status, length = re.match(rb"HTTP/1\.1 (\d{3}) ", head), re.search(rb"(?i)content-length: (\d+)", head)
        assert status is not None, head
        size = int(length[1]) if length else 0
        if status[1] != b"100":
            answers.append((int(status[1]), heard[:size]))
        heard = heard[size:]
    return answers


def check(answers: list[tuple[int, bytes]]) -> None:
    for status, body in answers:
        assert status in STATUSES, (status, body)
        if status != 200 and body:
            error = json.loads(body)["error"]
            assert error["message"]
            assert error["request_id"]


def request(method: str, path: str, body: bytes) -> bytes:
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


METHODS = st.sampled_from(["GET", "POST", "PUT", "HEAD", "OPTIONS", "BREW", "get"])
PATHS = st.sampled_from(
    [
        *(path for _, path, _ in PLACES.values()),
        STATUS_PATH,
        "/healthz",
        PROBE_PATH,
        "/",
        "*",
        "/v1/part?part=0",
        "/v1/../status",
        "http://x/",
    ]
)
HEADERS = st.sampled_from(
    [
        b"Expect: 100-continue",
        b"Transfer-Encoding: chunked",
        b"Content-Encoding: gzip",
        b"Content-Length: 5",
        b"Content-Length: -1",
        b"Connection: close",
        b"Upgrade: h2c",
        b"Host: y",
        b"Authorization: Bearer x",
        b" folded",
        b":",
        b"\xff",
        b"X: " + b"y" * 9000,
    ]
)


@st.composite
def heads(draw: st.DrawFn) -> bytes:
    lines = [f"{draw(METHODS)} {draw(PATHS)} HTTP/1.1".encode(), b"Host: x", *draw(st.lists(HEADERS, max_size=3))]
    return draw(st.sampled_from([b"\r\n", b"\r\n", b"\n"])).join(lines) + b"\r\n\r\n"


@cases(800)
@given(heads() | heads().flatmap(spoiled) | st.binary(max_size=200), st.binary(max_size=20))
def test_a_head_of_any_bytes_is_answered_or_hung_up_on(server: DiLoCoServer, head: bytes, beyond: bytes) -> None:
    check(say(server, head + beyond))


@cases(200)
@given(st.lists(st.tuples(METHODS, PATHS, st.binary(max_size=30)), min_size=1, max_size=4), st.integers(0, 30))
def test_requests_one_after_the_other_are_answered_in_order(
    server: DiLoCoServer, requests: list[tuple[str, str, bytes]], missing: int
) -> None:
    sent = b"".join(request(*one) for one in requests)
    answers = say(server, sent[: len(sent) - missing])
    check(answers)
    assert len(answers) <= len(requests)


# --- messages -------------------------------------------------------------------------------------------------------


def facts_of(server: DiLoCoServer) -> dict[str, dict[str, Any]]:
    """By path: a message that is right, or nearly."""
    head = {"run_id": server.run_id, "worker_id": "by-hand", "incarnation": 1}
    of_one = {**head, "fragment": 0, "sequence": 1}
    return {
        "/v1/join": {"protocol": 1, "worker_id": "by-hand", "instance": "c" * 16, "hostname": "test"},
        "/v1/heartbeat": {**head, "step": 1, "steps_per_second": 1.0},
        "/v1/offer": {
            **of_one, "base_version": 0, "oldest_base": 0, "steps": 1, "codec": "fp32", "size_bytes": len(PAYLOAD),
        },
        "/v1/commit": {**of_one, "payload_hash": "0" * 32},
        "/v1/poll": {**head, "fragment": 0, "after": -1},
        "/v1/leave": {**head, "incarnation": 7},
        "/v1/control": {"kind": "sync", "worker_id": "nobody"},
    }  # fmt: skip


@cases(700)
@given(data=st.data())
def test_a_body_of_any_kind_is_answered(server: DiLoCoServer, data: st.DataObject) -> None:
    facts = facts_of(server)
    path = data.draw(st.sampled_from(sorted(facts)))
    message = data.draw(altered(facts[path]))
    # Waiting is not what is tested, and these two would end or change the run.
    message.pop("wait_s", None)
    if message.get("kind") in ("shutdown", "kick"):
        message["kind"] = "drain"
    body = json.dumps(message).encode()
    if data.draw(st.booleans()):
        body = data.draw(spoiled(body))
    if b"wait_s" in body:
        return
    answers = say(server, request("POST", path, body))
    check(answers)
    assert len(answers) == 1


PART_BYTES = 64
PARTS = [PAYLOAD[slice(*part_range(i, len(PAYLOAD), PART_BYTES))] for i in range(part_count(len(PAYLOAD), PART_BYTES))]
WHOLE = payload_hash([part_hash(part) for part in PARTS])
SMALL = st.integers(0, 3)
SEQUENCES = st.integers(1, 3)


def words(run_id: str) -> st.SearchStrategy[Request]:
    """Anything that two workers who have joined, or somebody who has not, might say."""
    head = {"run_id": st.just(run_id), "worker_id": st.sampled_from(["a", "b", "stranger"])}
    head["incarnation"] = st.integers(1, 2)
    fragment = st.integers(0, 1)
    of_one = {**head, "fragment": fragment, "sequence": SEQUENCES}
    instances = st.sampled_from(["x" * 16, "y" * 16])
    return st.one_of(
        st.builds(Join, protocol=st.just(1), worker_id=head["worker_id"], instance=instances, hostname=st.just("test")),
        st.builds(Heartbeat, **head, step=SMALL, steps_per_second=st.just(1.0), acknowledged=st.just((1,))),
        st.builds(
            Offer,
            **of_one,
            base_version=SMALL,
            oldest_base=SMALL,
            steps=SMALL,
            codec=st.just("fp32"),
            size_bytes=st.sampled_from([len(PAYLOAD), len(PAYLOAD), 1, 9000]),
        ),
        st.integers(0, len(PARTS) - 1).flatmap(
            lambda part: st.builds(PutPart, **of_one, part=st.just(part), hash=st.just(part_hash(PARTS[part])))
        ),
        st.builds(Commit, **of_one, payload_hash=st.sampled_from([WHOLE, WHOLE, "0" * 32])),
        st.builds(Poll, **head, fragment=fragment, after=st.integers(-1, 3), held=SMALL),
        st.builds(GetPart, **head, fragment=fragment, version=SMALL, part=SMALL),
        st.builds(Leave, **head),
    )


def in_order(run_id: str, worker_id: str, sequence: int, base: int) -> list[Request]:
    """A contribution as a worker sends it, so that something of all this gets through."""
    of_one: dict[str, Any] = {"run_id": run_id, "worker_id": worker_id, "incarnation": 1, "fragment": 0}
    of_one["sequence"] = sequence
    size, facts = len(PAYLOAD), {"base_version": base, "oldest_base": base, "steps": 1, "codec": "fp32"}
    parts: list[Request] = [PutPart(**of_one, part=i, hash=part_hash(part)) for i, part in enumerate(PARTS)]
    return [Offer(**of_one, **facts, size_bytes=size), *parts, Commit(**of_one, payload_hash=WHOLE)]


@cases(150)
@given(st.data())
def test_a_conversation_in_any_order_is_answered_word_by_word(data: st.DataObject) -> None:
    """The model moves only by whole contributions, each counted once, whatever else is said in between."""
    settings: dict[str, Any] = {"codec": "fp32", "sync_every": 1, "part_size_bytes": PART_BYTES, "quorum": 1}
    server = DiLoCoServer(Ledger().state_dict(), num_workers=2, port=0, **settings)
    server.service.start()
    transport = MemoryTransport(server.service)
    for name in "ab":
        HandClient(transport, name).join()
    said = data.draw(st.lists(words(server.run_id), max_size=12))
    for message in in_order(server.run_id, "a", data.draw(SEQUENCES), data.draw(st.integers(0, 1))):
        said.insert(data.draw(st.integers(0, len(said))) if data.draw(st.booleans()) else len(said), message)
    accepted: set[tuple[str, int, int]] = set()
    for message in said:
        body = PARTS[message.part] if isinstance(message, PutPart) else None
        into = memoryview(bytearray(PART_BYTES)) if isinstance(message, GetPart) else None
        try:
            transport.call(message, body=body, into=into)
        except (Refused, TransportError) as error:
            assert getattr(error, "status", 0) != 500, error
        else:
            if isinstance(message, Commit):
                accepted.add((message.worker_id, message.fragment, message.sequence))
    server.service.stop()
    assert server.service.failure == ""
    assert server.status()["total_submissions"] == len(accepted)


def test_the_run_still_takes_a_contribution(server: DiLoCoServer) -> None:
    """After everything above."""
    client = HandClient(HttpTransport(f"http://{server.address}"), "afterwards")
    client.join()
    before = server.sync_round
    newest = server.service.stores[0].newest.agreement.version
    client.contribute(PAYLOAD, base_version=newest, oldest_base=newest)
    wait_until(lambda: server.sync_round >= before + 1 or server.status()["pending_submissions"])
