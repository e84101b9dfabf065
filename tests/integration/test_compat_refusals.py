"""The compatibility port: everything that is refused, by name, and nothing of it is counted."""

from __future__ import annotations

import io
import json
import socket
import struct
import zipfile
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from integration.old_clients import (
    Answered,
    OldClient,
    head_of,
    like,
    one_client,
    response_of,
    saved,
    submission,
)
from outerstep.server import DiLoCoServer
from support import params_of, tiny_model


def good(client: OldClient) -> dict[str, Tensor]:
    return like(params_of(tiny_model()), 1.0)


def changed(**tensors: Tensor | None) -> Callable[[OldClient], bytes]:
    def make(client: OldClient) -> bytes:
        made = {**good(client), **{name.replace("_", "."): tensor for name, tensor in tensors.items()}}
        return client.whole({name: tensor for name, tensor in made.items() if tensor is not None})

    return make


def raw(payload: Callable[[], bytes]) -> Callable[[OldClient], bytes]:
    return lambda client: submission({"worker_id": client.worker_id}, payload())


def bomb() -> bytes:
    sink = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(saved(like(params_of(tiny_model()), 1.0)))) as source,
        zipfile.ZipFile(sink, "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for entry in source.infolist():
            target.writestr(entry.filename, bytes(50 << 20) if "/data/0" in entry.filename else source.read(entry))
    return sink.getvalue()


class RunsCode:
    def __reduce__(self) -> tuple[object, ...]:
        return exec, ("raise SystemExit('code of a stranger was run')",)


NAN = torch.full((5,), float("nan"))
BAD: list[tuple[str, int, str, Callable[[OldClient], bytes]]] = [
    ("nothing", 400, "too few", lambda c: b""),
    ("too short for a header", 400, "too few", lambda c: b"\0\0"),
    ("header longer than the body", 400, "at most", lambda c: struct.pack(">I", 999) + b"{}"),
    ("huge header", 400, "at most", lambda c: struct.pack(">I", 2**32 - 1) + bytes(100_000)),
    ("header not JSON", 400, "JSON", lambda c: struct.pack(">I", 3) + b"{a}" + saved(good(c))),
    ("header not UTF-8", 400, "JSON", lambda c: struct.pack(">I", 2) + b"\xff\xfe" + saved(good(c))),
    ("header without id", 400, "worker_id", lambda c: submission({}, saved(good(c)))),
    ("id not text", 400, "worker_id", lambda c: submission({"worker_id": 3}, saved(good(c)))),
    ("id too long", 400, "worker_id", lambda c: submission({"worker_id": "a" * 257}, saved(good(c)))),
    ("id with a slash", 404, "'a_b-", lambda c: submission({"worker_id": "a/b"}, saved(good(c)))),
    ("key twice", 400, "twice", lambda c: struct.pack(">I", 33) + b'{"worker_id":"a","worker_id":"a"}'),
    ("unregistered", 404, "/register", lambda c: submission({"worker_id": "stranger"}, saved(good(c)))),
    ("no payload", 400, "payload", lambda c: submission({"worker_id": c.worker_id}, b"")),
    ("not torch.save", 415, "torch.save", raw(lambda: b"hello, world")),
    ("a pickle of before", 415, "before 1.6", raw(lambda: saved({}, _use_new_zipfile_serialization=False))),
    ("code", 415, "exec", raw(lambda: saved({"0.weight": RunsCode()}))),
    ("zip bomb", 413, "unpacked", raw(bomb)),
    ("a list", 415, "torch.save", raw(lambda: saved([torch.ones(2)]))),
    ("truncated archive", 415, "torch.save", raw(lambda: saved({"a": torch.ones(9)})[:-30])),
    ("NaN", 422, "'0.bias'", changed(**{"0_bias": NAN})),
    ("missing", 422, "'0.bias' is missing", changed(**{"0_bias": None})),
    ("unknown", 422, "'9.bias' is not in", changed(**{"9_bias": torch.ones(3)})),
    ("wrong shape", 422, "got [6], run has [5]", changed(**{"0_bias": torch.ones(6)})),
    ("wrong dtype", 422, "got float64", changed(**{"0_bias": torch.ones(5, dtype=torch.float64)})),
    ("sparse", 422, "'0.bias' is sparse", changed(**{"0_bias": torch.ones(5).to_sparse()})),
    ("meta", 422, "'0.bias' is on the meta", changed(**{"0_bias": torch.ones(5, device="meta")})),
]


@pytest.fixture(scope="module")
def run() -> Iterator[tuple[DiLoCoServer, OldClient]]:
    with one_client() as (server, client, _):
        yield server, client


@pytest.mark.parametrize(("status", "says", "make"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_a_bad_submission_is_refused_by_name_and_nothing_is_counted(
    run: tuple[DiLoCoServer, OldClient], status: int, says: str, make: Callable[[OldClient], bytes]
) -> None:
    server, client = run
    with pytest.raises(Answered) as caught:
        client.call("POST", "/submit_pseudograd", make(client))
    assert caught.value.status == status
    assert caught.value.error.keys() == {"error", "code", "message", "hint", "request_id", "retry_after_s"}
    assert says in caught.value.error["message"] + caught.value.error["hint"]
    assert server.sync_round == 0
    assert server.status()["total_submissions"] == 0
    assert server.service.failure == ""


def fragment_body(client: OldClient, fragment: object) -> bytes:
    return submission({"worker_id": client.worker_id, "fragment_id": fragment}, saved(good(client)))


REQUESTS: list[tuple[str, str, str, Callable[[OldClient], bytes | None], dict[str, str], int, str]] = [
    ("unknown path", "POST", "/v1/join", lambda c: b"{}", {}, 404, "/register"),
    ("wrong method", "GET", "/register", lambda c: None, {}, 405, "POST"),
    ("wrong method", "PUT", "/status", lambda c: b"", {}, 405, "GET"),
    ("bad JSON", "POST", "/register", lambda c: b"{", {}, 400, "JSON"),
    ("deep JSON", "POST", "/register", lambda c: b"[" * 100_000, {}, 400, "nested"),
    ("no id", "POST", "/register", lambda c: b'{"hostname": "x"}', {}, 400, "worker_id"),
    ("empty id", "POST", "/deregister", lambda c: b'{"worker_id": ""}', {}, 400, "worker_id"),
    ("infinite speed", "POST", "/heartbeat", lambda c: b'{"worker_id":"a","steps_per_second":1e999}', {}, 400, "range"),
    ("no speed", "POST", "/heartbeat", lambda c: b'{"worker_id":"a","steps_per_second":NaN}', {}, 400, "NaN"),
    ("backwards", "POST", "/heartbeat", lambda c: b'{"worker_id":"a","steps_per_second":-1}', {}, 400, ">= 0"),
    ("stranger's heart", "POST", "/heartbeat", lambda c: b'{"worker_id":"stranger"}', {}, 404, "/register"),
    ("compressed", "POST", "/register", lambda c: b"{}", {"Content-Encoding": "gzip"}, 415, "compressed"),
    ("chunked", "POST", "/register", lambda c: b"{}", {"Transfer-Encoding": "chunked"}, 411, "Content-Length"),
    ("two lengths", "POST", "/register", lambda c: b"{}", {"Content-length": "5, 6"}, 400, "one number"),
    ("signed length", "POST", "/register", lambda c: b"{}", {"Content-Length": "+2"}, 400, "one number"),
    ("large JSON", "POST", "/register", lambda c: b"{}", {"Content-Length": str(2 << 20)}, 413, "1048576"),
    ("no such fragment", "POST", "/submit_fragment_pseudograd", lambda c: fragment_body(c, 1), {}, 400, "plan has 1"),
    ("fragment −1", "POST", "/submit_fragment_pseudograd", lambda c: fragment_body(c, -1), {}, 400, "fragment_id"),
    ("fragment true", "POST", "/submit_fragment_pseudograd", lambda c: fragment_body(c, True), {}, 400, "fragment_id"),
    ("fragment none", "POST", "/submit_fragment_pseudograd", lambda c: c.whole(good(c)), {}, 400, "fragment_id"),
]


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status", "says"),
    [row[1:] for row in REQUESTS],
    ids=[row[0] for row in REQUESTS],
)
def test_a_bad_request_is_refused_by_name(
    run: tuple[DiLoCoServer, OldClient],
    method: str,
    path: str,
    body: Callable[[OldClient], bytes | None],
    headers: dict[str, str],
    status: int,
    says: str,
) -> None:
    _, client = run
    with pytest.raises(Answered) as caught:
        client.call(method, path, body(client), **headers)
    assert caught.value.status == status
    assert says in str(caught.value.error) + str(caught.value.headers)


def test_a_length_is_required(run: tuple[DiLoCoServer, OldClient]) -> None:
    _, client = run
    with client.connection() as sock:
        sock.sendall(b"POST /register HTTP/1.1\r\nHost: x\r\n\r\n")
        assert response_of(sock)[0] == 411


def test_a_body_over_the_limit_is_refused_before_a_byte_of_it_is_sent(run: tuple[DiLoCoServer, OldClient]) -> None:
    _, client = run
    with client.connection() as sock:
        sock.sendall(head_of(99_999_999_999))
        status, data = response_of(sock)
    assert status == 413
    assert "at most" in json.loads(data)["message"]


def test_a_client_that_asks_first_is_told_to_go_on_only_if_its_body_is_acceptable(
    run: tuple[DiLoCoServer, OldClient],
) -> None:
    _, client = run
    body = json.dumps({"worker_id": "a", "steps_per_second": 1.0}).encode()
    with client.connection() as sock:
        sock.sendall(head_of(len(body), "/heartbeat", "Expect: 100-continue"))
        assert sock.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(body)
        assert response_of(sock)[0] == 200
    with client.connection() as sock:
        sock.sendall(head_of(1 << 30, "/heartbeat", "Expect: 100-continue"))
        assert response_of(sock)[0] == 413


def test_a_body_shorter_than_announced_is_refused(run: tuple[DiLoCoServer, OldClient]) -> None:
    server, client = run
    body = client.whole(good(client))
    with client.connection() as sock:
        sock.sendall(head_of(len(body)))
        sock.sendall(body[:-10])
        sock.shutdown(socket.SHUT_WR)
        status, data = response_of(sock)
    assert status == 400
    assert "10 bytes short" in json.loads(data)["message"]
    assert server.status()["total_submissions"] == 0


@pytest.mark.parametrize(
    "head", [b"hello\r\n\r\n", b"\x16\x03\x01\x02\r\n\r\n", b"GET " + b"x" * 20_000, b"GET / HTTP/9.9\r\n\r\n"]
)
def test_what_is_not_http_gets_an_answer_in_the_same_form(run: tuple[DiLoCoServer, OldClient], head: bytes) -> None:
    _, client = run
    with client.connection() as sock:
        sock.sendall(head)
        status, data = response_of(sock)
    assert status in (400, 431)
    assert json.loads(data)["code"] == "bad_request"
