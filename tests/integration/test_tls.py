"""The service behind TLS with a certificate from an authority: parts, polls and refusals cross encrypted.

What a server does by itself, with tokens and a certificate of its own, is in test_secure.py
and test_secure_certificates.py."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator

import pytest
import torch
import trustme

from outerstep.digest import part_hash, part_range
from outerstep.errors import TlsRequired, UntrustedServer
from outerstep.server import DiLoCoServer
from outerstep.types import GetPart, Poll
from outerstep.wire.http_server import HttpServer
from outerstep.wire.http_transport import HttpTransport
from support import HandClient, make_frame, params_of, tiny_model, wait_until

BIG = 700_000  # values: several TLS records and slices


class Secured:
    """A server's service on a TLS port of its own, and how to reach it."""

    def __init__(self, server: DiLoCoServer) -> None:
        self.server = server
        self.authority = trustme.CA()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.authority.issue_cert("127.0.0.1").configure_cert(context)
        self.http = HttpServer(server.service.routes, "127.0.0.1", 0, tls=context)
        self.http.start()
        self.address = f"127.0.0.1:{self.http.port}"

    def transport(self) -> HttpTransport:
        trusting = ssl.create_default_context()
        self.authority.configure_trust(trusting)
        return HttpTransport(self.address, tls=trusting)


@pytest.fixture
def secured() -> Iterator[Secured]:
    state = {**tiny_model().state_dict(), "wide": torch.zeros(BIG)}
    server = DiLoCoServer(state, num_workers=1, port=0, codec="fp32", part_size_bytes=1 << 20)
    server.service.start()
    made = Secured(server)
    yield made
    made.http.stop()
    server.service.stop()


def test_a_round_crosses_encrypted(secured: Secured) -> None:
    client = HandClient(secured.transport())
    client.join()
    deltas = {name: torch.ones_like(p) for name, p in params_of(tiny_model()).items()} | {"wide": torch.ones(BIG)}
    payload = make_frame(deltas)
    client.contribute(payload)
    wait_until(lambda: secured.server.sync_round == 1)
    [full] = client.transport.call(Poll(**client.session.head, fragment=0, after=0)).agreement.payloads
    begin, end = part_range(0, full.size_bytes, 1 << 20)
    part = memoryview(bytearray(end - begin))
    answer = client.transport.call(GetPart(**client.session.head, fragment=0, version=1, part=0), into=part)
    assert part_hash(part) == answer.hash


def test_a_certificate_of_somebody_else_is_refused(secured: Secured) -> None:
    with pytest.raises(UntrustedServer, match="not one that this machine trusts: unable to get local issuer"):
        HttpTransport(secured.address, tls=ssl.create_default_context()).status()


def test_who_speaks_plainly_gets_nothing(secured: Secured) -> None:
    with pytest.raises(TlsRequired, match="this port speaks TLS"):
        HttpTransport(f"http://{secured.address}").status()


def test_a_connection_that_never_shakes_hands_keeps_nobody_waiting(secured: Secured) -> None:
    host, port = secured.address.split(":")
    with socket.create_connection((host, int(port))):
        assert secured.transport().status()["failure"] == ""


def test_stopping_ends_connections_that_are_idle(secured: Secured) -> None:
    transport = secured.transport()
    transport.status()
    secured.http.stop()
    wait_until(lambda: not secured.http._connections.open)
