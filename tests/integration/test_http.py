"""The HTTP service against raw sockets: strict heads, limits before reading, errors in one form, connections reused.

In plain HTTP, so that the bytes can be said by hand; test_secure.py has what TLS and tokens add."""

from __future__ import annotations

import dataclasses
import http.client
import json
import os
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

from outerstep.digest import part_hash
from outerstep.errors import Refused
from outerstep.server import DiLoCoServer
from outerstep.types import Answer, Leave, Offer, PutPart, PutPartAnswer
from outerstep.wire.http_server import LEAST_AT_WORK, ServiceLimits
from outerstep.wire.http_transport import HttpTransport
from outerstep.wire.messages import SESSION_HEADER, address_of
from outerstep.wire.routes import Presented, UnreadBody
from outerstep.worker import DiLoCoWorker
from support import HandClient, Ledger, count, intercept, make_frame, params_of, tiny_model, wait_until


@pytest.fixture
def server() -> Iterator[DiLoCoServer]:
    with DiLoCoServer(tiny_model().state_dict(), num_workers=1, port=0, codec="fp32", insecure=True) as made:
        yield made


def transport_to(server: DiLoCoServer) -> HttpTransport:
    return HttpTransport(f"http://{server.address}")


def raw(server: DiLoCoServer, data: bytes, *, half_close: bool = False) -> tuple[int, dict[str, object], bytes]:
    """Send bytes, read one response: status, error (or whole) body, head."""
    host, port = server.address.split(":")
    with socket.create_connection((host, int(port)), timeout=20) as sock:
        sock.sendall(data)
        if half_close:
            sock.shutdown(socket.SHUT_WR)
        response = http.client.HTTPResponse(sock)
        response.begin()
        body = json.loads(response.read())
        head = str(response.headers).encode()
        return response.status, body.get("error", body), head


def begun_upload(server: DiLoCoServer, name: str = "by-hand") -> tuple[HandClient, memoryview, bytes]:
    """A joined client that has offered a contribution of one part, the payload, and the head of the request for it."""
    client = HandClient(transport_to(server), name)
    session = f"{SESSION_HEADER}: {client.join().session}\r\n"
    payload = make_frame({name: torch.ones_like(p) for name, p in params_of(tiny_model()).items()})
    client.sequence = 1
    client.offer(len(payload))
    put = PutPart(**client.session.head, fragment=0, sequence=1, part=0, hash=part_hash(payload))
    method, target, _ = address_of(put)
    head = f"{method} {target} HTTP/1.1\r\nHost: x\r\n{session}Content-Length: {len(payload)}\r\n\r\n"
    return client, payload, head.encode()


def request(method: str, path: str, body: bytes = b"", *headers: str) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: test", *headers]
    if body or method in ("POST", "PUT"):
        lines.append(f"Content-Length: {len(body)}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


@pytest.mark.parametrize(
    "head",
    [
        b"POST /v1/join HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        b"POST /v1/join HTTP/1.1\r\nHost: x\r\nContent-Length: -2\r\n\r\n{}",
        b"POST /v1/join HTTP/1.1\r\nHost: x\r\nContent-Length: 1_0\r\n\r\n{}",
        b"POST /v1/join HTTP/1.1\nHost: x\nContent-Length: 2\n\n{}",
        b"POST /v1/join HTTP/1.1\r\nHost: x\r\nX-Folded: a\r\n b\r\nContent-Length: 2\r\n\r\n{}",
        b"POST /v1/join HTTP/1.1\r\nHost: x\r\nX-Nul: a\x00b\r\nContent-Length: 2\r\n\r\n{}",
        b"GET /status\r\n\r\n",
        b"GET /status HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 64 + b"\r\n\r\n",
    ],
    ids=["two lengths", "negative", "underscore", "bare LF", "folded", "NUL", "HTTP/0.9", "no host", "TLS hello"],
)
def test_a_malformed_head_is_refused(server: DiLoCoServer, head: bytes) -> None:
    status, error, _ = raw(server, head, half_close=True)
    assert status == 400
    assert error["code"] == "bad_request"


def test_a_malformed_line_is_quoted_neither_in_the_answer_nor_in_the_log(
    server: DiLoCoServer, caplog: pytest.LogCaptureFixture
) -> None:
    """A token that was pasted with a line break stands on a line of its own."""
    with caplog.at_level("INFO"):
        head = b"GET /status HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer a\r\nrun-secret\r\n\r\n"
        _, error, _ = raw(server, head, half_close=True)
    assert str(error["message"]).endswith("illegal header line")
    assert "run-secret" not in str(error)
    assert "illegal header line" in caplog.text
    assert "run-secret" not in caplog.text


def test_a_huge_head_is_refused(server: DiLoCoServer) -> None:
    status, _, _ = raw(server, b"GET /status HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 200_000, half_close=True)
    assert status == 431


def test_transfer_encoding_is_refused(server: DiLoCoServer) -> None:
    head = b"POST /v1/join HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    assert raw(server, head, half_close=True)[0] == 411


@pytest.mark.parametrize(
    ("message", "status", "code"),
    [
        (request("GET", "/nothing"), 404, "not_found"),
        (request("DELETE", "/status"), 405, "method_not_allowed"),
        (request("GET", "/v1/offer"), 405, "method_not_allowed"),
        (b"POST /v1/offer HTTP/1.1\r\nHost: x\r\n\r\n", 411, "length_required"),
        (b"POST /v1/offer HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\n", 413, "too_large"),
        (b"PUT /v1/part?x=1 HTTP/1.1\r\nHost: x\r\nContent-Length: 17000000\r\n\r\n", 400, "bad_request"),
        (request("POST", "/v1/offer", b"{}", "Content-Encoding: gzip"), 415, "unsupported_media"),
        (request("POST", "/v1/offer", b"{"), 400, "bad_request"),
        (request("POST", "/v1/offer", b'{"a": NaN}'), 400, "bad_request"),
        (request("POST", "/v1/offer", b'{"a": 1, "a": 1}'), 400, "bad_request"),
        (request("POST", "/v1/offer", b"[" * 100_000), 400, "bad_request"),
        (request("POST", "/v1/offer", b'"\xff\xfe"'), 400, "bad_request"),
        (request("POST", "/v1/offer", b"\x80\x04\x95pickle"), 400, "bad_request"),
        (request("POST", "/v1/offer", b'{"surprise": 1}'), 400, "bad_request"),
        (request("GET", "/v1/part?fragment=0&fragment=0"), 400, "bad_request"),
        (request("GET", "/v1/part?fragment=abc"), 400, "bad_request"),
        (request("GET", "/v1/part"), 400, "bad_request"),
    ],
    ids=lambda value: value[:40].decode("latin-1") if isinstance(value, bytes) else "",
)
def test_bad_requests_get_an_error_in_one_form(server: DiLoCoServer, message: bytes, status: int, code: str) -> None:
    got, error, _ = raw(server, message, half_close=True)
    assert (got, error["code"]) == (status, code)
    assert error["message"]
    assert error["request_id"]
    assert server.status()["sync_round"] == 0


@pytest.mark.row("B16")
def test_a_wrong_method_names_the_right_ones(server: DiLoCoServer) -> None:
    _, _, head = raw(server, request("POST", "/v1/part", b"{}"))
    assert b"Allow: PUT, GET" in head


@pytest.mark.row("B05")
def test_a_body_shorter_than_announced_is_not_stored(server: DiLoCoServer) -> None:
    client, payload, head = begun_upload(server)
    status, error, _ = raw(server, head + bytes(payload[:-10]), half_close=True)
    assert status == 400
    assert "10 bytes short" in str(error["message"])
    assert client.offer(len(payload)).missing == (0,)
    client.put(payload, 0)
    assert client.commit(payload).version == 1


def test_a_second_try_takes_over_from_a_connection_that_hangs(server: DiLoCoServer) -> None:
    """The first sender stops in the middle and never closes; the same part on a new connection is taken at once."""
    client, payload, head = begun_upload(server)
    host, port = server.address.split(":")
    with socket.create_connection((host, int(port)), timeout=20) as hanging:
        hanging.sendall(head + bytes(payload[:20]))
        wait_until(lambda: server.service.intake.writing)
        client.put(payload, 0)
        assert client.commit(payload).version == 1
        hanging.settimeout(20)
        assert hanging.recv(1) in (b"", b"H")  # closed, or told so first


def test_bytes_for_a_dropped_upload_are_not_taken_for_its_successor(server: DiLoCoServer) -> None:
    """While a part is being read its worker leaves, comes back and offers the same key again: it is still missing."""
    client, payload, head = begun_upload(server)
    host, port = server.address.split(":")
    with socket.create_connection((host, int(port)), timeout=20) as slow:
        slow.sendall(head + bytes(payload[:20]))
        wait_until(lambda: server.service.intake.writing)
        client.transport.call(Leave(**client.session.head))
        client.join()
        client.sequence = 1
        assert client.offer(len(payload)).missing == (0,)
        slow.sendall(payload[20:])
        assert slow.recv(4096).startswith(b"HTTP/1.1 409 ")
    assert client.offer(len(payload)).missing == (0,)
    client.put(payload, 0)
    assert client.commit(payload).version == 1
    wait_until(lambda: server.sync_round == 1)
    moved = params_of(tiny_model())["0.weight"] - server.get_global_params()["0.weight"]
    assert bool((moved > 0.5).all())  # ones went in, not zeros


def test_expect_continue_is_answered(server: DiLoCoServer) -> None:
    host, port = server.address.split(":")
    with socket.create_connection((host, int(port)), timeout=20) as sock:
        sock.sendall(b"POST /v1/leave HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n")
        assert sock.recv(4096) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(b"{}")
        assert sock.recv(4096).startswith(b"HTTP/1.1 400 ")


def test_connections_are_reused_and_pipelining_keeps_order(server: DiLoCoServer) -> None:
    host, port = server.address.split(":")
    with socket.create_connection((host, int(port)), timeout=20) as sock:
        sock.sendall(request("GET", "/healthz") + request("GET", "/nothing") + request("GET", "/healthz"))
        received = b""
        while received.count(b"HTTP/1.1 ") < 3 or not received.endswith(b"}"):
            received += sock.recv(65536)
    assert re.findall(rb"HTTP/1\.1 (\d+)", received) == [b"200", b"404", b"200"]


def test_silent_connections_do_not_hinder_a_round(server: DiLoCoServer) -> None:
    host, port = server.address.split(":")
    silent = [socket.create_connection((host, int(port)), timeout=20) for _ in range(100)]
    try:
        client = HandClient(transport_to(server))
        client.join()
        payload = make_frame({name: torch.ones_like(p) for name, p in params_of(tiny_model()).items()})
        assert client.contribute(payload).version == 1
    finally:
        for sock in silent:
            sock.close()


def test_uploads_that_stand_still_do_not_hinder_a_round() -> None:
    """More of them than connections may work at a time: none of them holds a turn."""
    model, idle = tiny_model(), 3 * max(LEAST_AT_WORK, 2 * (os.cpu_count() or 1))
    payload = make_frame({name: torch.ones_like(p) for name, p in params_of(model).items()})
    with (
        DiLoCoServer(model.state_dict(), num_workers=1, port=0, insecure=True, codec="fp32") as server,
        ExitStack() as stack,
    ):
        host, port = server.address.split(":")
        for i in range(idle):
            client, _, head = begun_upload(server, f"idle-{i}")
            sock = stack.enter_context(socket.create_connection((host, int(port)), timeout=20))
            sock.sendall(head + payload[: len(payload) // 2])
            client.transport.close()
        wait_until(lambda: len(server.service.intake.writing) == idle)
        worker = HandClient(transport_to(server), "busy")
        worker.join()
        assert worker.contribute(payload).version == 1


def test_the_status_is_answered_while_everybody_else_waits_for_a_turn(server: DiLoCoServer) -> None:
    """All turns are taken by offers that somebody keeps from being answered."""
    turns, let_go, inside = max(LEAST_AT_WORK, 2 * (os.cpu_count() or 1)), threading.Event(), threading.Semaphore(0)
    assert server._http is not None
    server._http._limits = dataclasses.replace(server._http._limits, few_connections=0)
    client, payload, _ = begun_upload(server)
    answer = server.service.offer

    def hold(request: Offer, shown: Presented) -> Answer:
        inside.release()
        assert let_go.wait(20)
        return answer(request, shown)

    intercept(server.service, answer, hold)
    offers = [threading.Thread(target=client.offer, args=(len(payload),), daemon=True) for _ in range(2 * turns)]
    for thread in offers:
        thread.start()
    for _ in range(turns):
        assert inside.acquire(timeout=20)
    assert client.transport.status()["total_submissions"] == 0
    assert not inside.acquire(blocking=False), "more of them work than may"
    let_go.set()
    for thread in offers:
        thread.join(20)
        assert not thread.is_alive()


def test_as_many_parts_travel_at_a_time_as_the_worker_has_connections() -> None:
    """The first parts wait until `connections` of them are there at once."""
    connections, inside, most = 3, 0, 0
    all_there, lock = threading.Event(), threading.Lock()
    model = Ledger(cells=256)
    with DiLoCoServer(model.state_dict(), num_workers=1, port=0, codec="fp32", part_size_bytes=64) as server:
        put_part = server.service.put_part

        def wait_for_the_others(request: PutPart, body: UnreadBody) -> PutPartAnswer:
            nonlocal inside, most
            with lock:
                inside += 1
                most = max(most, inside)
                if inside == connections:
                    all_there.set()
            assert all_there.wait(20), f"only {inside} parts travel at a time"
            try:
                return put_part(request, body)
            finally:
                with lock:
                    inside -= 1

        intercept(server.service, put_part, wait_for_the_others)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with DiLoCoWorker(model, optimizer, server.address, sync_every=1, connections=connections) as worker:
            count(model, optimizer, 0, 1)
            assert worker.sync_metrics["sync_count"] == 1
    assert most == connections


def test_more_connections_than_allowed_are_closed() -> None:
    with DiLoCoServer(tiny_model().state_dict(), num_workers=1, port=0, max_connections=2) as server:
        host, port = server.address.split(":")
        held = [socket.create_connection((host, int(port)), timeout=20) for _ in range(2)]
        wait_until(lambda: len(server._http._connections.open) == 2)  # type: ignore[union-attr]
        with socket.create_connection((host, int(port)), timeout=20) as third:
            assert third.recv(1) == b""
        for sock in held:
            sock.close()
    assert ServiceLimits().max_connections >= 256


def test_a_foreign_http_server_is_recognised() -> None:
    """Whoever types the wrong port gets told so."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        sock, _ = listener.accept()
        sock.recv(65536)
        sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 15\r\nConnection: close\r\n\r\n<html>hi</html>")
        sock.close()

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    with pytest.raises(Refused, match="is this the address of an outerstep server"):
        HttpTransport(f"http://127.0.0.1:{listener.getsockname()[1]}").status()
    thread.join(20)
    listener.close()


def test_an_idle_server_does_not_spin(server: DiLoCoServer) -> None:
    ticks = 0
    tick = server.service.tick

    def counting(now: float) -> None:
        nonlocal ticks
        ticks += 1
        tick(now)

    server.service.monitor._tick = counting
    client = HandClient(transport_to(server))
    for _ in range(20):
        client.join()
    assert ticks <= 25, "the health monitor wakes itself up"


def test_two_servers_cannot_have_one_port(server: DiLoCoServer) -> None:
    port = int(server.address.split(":")[1])
    with pytest.raises(ValueError, match=f"cannot listen on 127.0.0.1:{port}: .*choose another host or port"):
        DiLoCoServer(tiny_model().state_dict(), num_workers=1, port=port).start()
