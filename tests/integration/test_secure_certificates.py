"""A server as it starts by itself, with TLS: which certificates are trusted, and that nothing is said before; how a
server is found.

Every row of the table of bad inputs that concerns fingerprints and plain HTTP, against a live server."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import trustme

from outerstep.errors import (
    ConfigError,
    NoCredentials,
    ProtocolMismatch,
    TlsRequired,
    TransportError,
    UntrustedServer,
)
from outerstep.security import Access, Credentials, parse_address
from outerstep.security.tls import pinning_context
from outerstep.security.tokens import new_token
from outerstep.server import DiLoCoServer
from outerstep.wire.http_transport import HttpTransport
from outerstep.worker import DiLoCoWorker
from sites import Site, answer
from support import Ledger, count, in_threads, tiny_model, wait_until


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.server.stop()


# --- certificates and plain text ------------------------------------------------------------------------------------


@pytest.mark.row("B03")
def test_another_certificate_is_refused_with_both_fingerprints_before_a_byte_is_sent(
    site: Site, tmp_path: Path
) -> None:
    expected, shown = "ab" * 32, site.server.access.fingerprint
    transport = HttpTransport(Access(*parse_address(site.address), site.run_token, expected).join_string)
    with pytest.raises(UntrustedServer, match=f"expected sha256 {expected}, got {shown}") as refused:
        transport.status()
    assert "outerstep join -" in str(refused.value)
    assert site.run_token not in str(refused.value)
    assert not site.events("refused")  # it has heard nothing that it could have refused


def test_a_worker_says_so_at_once(site: Site) -> None:
    access = Access(*parse_address(site.address), site.run_token, "ab" * 32)
    model = tiny_model()
    worker = DiLoCoWorker(model, torch.optim.SGD(model.parameters(), lr=0.1), access.join_string)
    with pytest.raises(UntrustedServer, match="another certificate"):
        worker.start()


@pytest.mark.row("F26")
def test_a_certificate_that_changes_under_a_running_worker_is_an_outage_not_a_trap(tmp_path: Path) -> None:
    """Somebody puts another server in its place: nothing goes to it, and the worker trains on to its limit."""
    site = Site(tmp_path, sync_every=2)
    port = int(site.address.split(":")[1])
    known = Credentials(tmp_path / "elsewhere")
    known.remember(site.server.access)
    transport = HttpTransport(site.address, credentials=known.folder)
    transport.status()
    site.server.stop()
    other = tmp_path / "other"
    with DiLoCoServer(tiny_model().state_dict(), 1, port=port, credentials=str(other), event_log=str(other / "events")):
        with pytest.raises(TransportError, match=r"another certificate.*outerstep join -"):
            transport.status()
        assert "refused" not in (other / "events").read_text()


@pytest.mark.row("B03")
def test_plain_http_to_the_tls_port_is_told_so_in_the_clear(site: Site) -> None:
    with socket.create_connection(parse_address(site.address), timeout=20) as sock:
        sock.sendall(b"GET /status HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\n\r\n")
        status, body = answer(sock)
        assert sock.recv(1) == b""
    assert (status, body["error"]["code"]) == (400, "tls_required")
    assert "this port speaks TLS" in body["error"]["message"]
    assert body["error"]["request_id"]
    with pytest.raises(TlsRequired, match="use the join string"):
        HttpTransport(f"http://{site.address}").status()


@pytest.mark.parametrize("garbage", [b"\x00" * 32, b"\x16\x03\x01\x00\x05hello", b"\xff", b"\x16"])
def test_garbage_on_the_tls_port_is_closed_and_harms_nobody(site: Site, garbage: bytes) -> None:
    address = parse_address(site.address)
    with contextlib.suppress(OSError), socket.create_connection(address, timeout=20) as sock:
        sock.sendall(garbage)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(4096):  # an alert, perhaps; or it has hung up already
            pass
    assert site.transport().status()["num_workers"] == 1


def test_an_older_tls_is_not_spoken(site: Site) -> None:
    context = pinning_context()
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    with socket.create_connection(parse_address(site.address), timeout=20) as sock, pytest.raises(ssl.SSLError):
        context.wrap_socket(sock)


@pytest.mark.row("F26")
def test_a_server_in_plain_text_is_not_spoken_with_unless_asked_by_name() -> None:
    with DiLoCoServer(tiny_model().state_dict(), 1, port=0, insecure=True) as server:
        access = Access(*parse_address(server.address), new_token("run"), "ab" * 32)
        with pytest.raises(UntrustedServer, match=r"does not speak TLS\. Nothing was sent.*write http://"):
            HttpTransport(access.join_string).status()
        assert HttpTransport(f"http://{server.address}").status()["num_workers"] == 1
        with pytest.raises(ConfigError, match="started insecure has no join string"):
            _ = server.access


@pytest.mark.row("F26")
def test_who_listens_in_plain_text_hears_a_handshake_and_no_token() -> None:
    token, heard = new_token("run"), []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def listen() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.settimeout(20)
                heard.append(sock.recv(65536))
                sock.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
                with contextlib.suppress(OSError):
                    while data := sock.recv(65536):
                        heard.append(data)

        def speak() -> None:
            transport = HttpTransport(Access("127.0.0.1", listener.getsockname()[1], token, "ab" * 32).join_string)
            with pytest.raises(UntrustedServer, match="does not speak TLS"):
                transport.status()

        in_threads(listen, speak)
    everything = b"".join(heard)
    assert everything[:1] == b"\x16"
    assert b"HTTP/1.1" not in everything
    assert token.encode() not in everything


def test_plain_text_beyond_the_loopback_is_loud(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.WARNING),
        DiLoCoServer(tiny_model().state_dict(), 1, host="0.0.0.0", port=0, insecure=True),
    ):
        assert "INSECURE: listening on 0.0.0.0 without authentication or encryption" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING), DiLoCoServer(tiny_model().state_dict(), 1, port=0, insecure=True):
        assert "INSECURE" not in caplog.text


def test_a_certificate_from_an_authority_is_pinned_or_checked_as_browsers_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    issued.private_key_pem.write_to_path(str(key))
    site = Site(tmp_path, tls_cert=str(cert), tls_key=str(key))
    try:
        assert site.transport().status()["num_workers"] == 1  # this machine's user knows which one it shows
        pinned = site.server.access
        assert HttpTransport(pinned.join_string).status()["num_workers"] == 1
        unpinned = Access(pinned.host, pinned.port, pinned.token).join_string
        assert "#" not in unpinned
        with pytest.raises(UntrustedServer, match=r"not one that this machine trusts.*was it cut off"):
            HttpTransport(unpinned).status()
        with authority.cert_pem.tempfile() as trusted:
            monkeypatch.setenv("SSL_CERT_FILE", trusted)
            assert HttpTransport(unpinned).status()["num_workers"] == 1
            elsewhere = Access("localhost", pinned.port, pinned.token).join_string  # another name than it was issued to
            with pytest.raises(UntrustedServer, match="not one that this machine trusts"):
                HttpTransport(elsewhere).status()
    finally:
        site.server.stop()


@pytest.mark.row("F26")
@pytest.mark.parametrize("ahead", ["server", "worker"])
def test_another_version_of_the_protocol_is_refused_saying_what_to_do(
    site: Site, ahead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is none that both speak."""

    def refuse(headers: dict[str, str]) -> int:
        raise ProtocolMismatch(
            f"the sender speaks protocol {headers['outerstep-protocol']}; understood: 8-9",
            hint="update outerstep at the older end",
        )

    if ahead == "server":
        monkeypatch.setattr("outerstep.wire.http_server.SPOKEN_HERE", "8-9")
        monkeypatch.setattr("outerstep.wire.http_server.protocol_of", refuse)
    else:
        monkeypatch.setattr("outerstep.wire.http_transport.PROTOCOL_VERSION", 9)
        monkeypatch.setattr("outerstep.wire.http_transport.highest_common", lambda shown: None)
    model = tiny_model()
    worker = DiLoCoWorker(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        site.address,
        credentials=str(site.credentials.folder),
    )
    with pytest.raises(ProtocolMismatch, match=r"speaks protocol \d; understood: \d-\d") as refused:
        worker.start()
    assert refused.value.hint == "update outerstep at the older end"
    assert site.server.status()["workers"] == {}


# --- finding a server -----------------------------------------------------------------------------------------------


def test_an_unknown_server_is_an_error_before_anything_is_sent() -> None:
    model = tiny_model()
    with pytest.raises(NoCredentials, match=r"nothing is known here about 192\.0\.2\.7:8512.*outerstep join -"):
        DiLoCoWorker(model, torch.optim.SGD(model.parameters(), lr=0.1), "192.0.2.7:8512")


def test_a_worker_may_start_before_the_first_server_ever(tmp_path: Path) -> None:
    model = Ledger()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    worker = DiLoCoWorker(model, optimizer, f"127.0.0.1:{port}", credentials=str(tmp_path / "none-yet"))
    server = DiLoCoServer(Ledger().state_dict(), 1, port=port, sync_every=2, credentials=str(tmp_path / "none-yet"))

    def late() -> None:
        wait_until(lambda: asked)
        server.start()

    asked: list[bool] = []
    find = worker._topology._link._transport._find  # type: ignore[attr-defined]

    def looking() -> Access | None:
        asked.append(True)
        return find()  # type: ignore[no-any-return]

    worker._topology._link._transport._find = looking  # type: ignore[attr-defined]

    def work() -> None:
        with worker:
            count(model, optimizer, 0, 2)

    in_threads(late, work)
    assert server.sync_round == 1
    server.stop()


def test_a_server_on_all_addresses_is_found_under_its_own(tmp_path: Path) -> None:
    site = Site(tmp_path, host="0.0.0.0")
    try:
        access = site.server.access
        assert access.host != "0.0.0.0"
        for host in (access.host, "127.0.0.1", "localhost"):
            address = f"{host}:{access.port}"
            assert HttpTransport(address, credentials=site.credentials.folder).status()["num_workers"] == 1
    finally:
        site.server.stop()


def test_the_join_string_names_what_the_operator_says(tmp_path: Path) -> None:
    site = Site(tmp_path, advertise="gpu.example.org:9000")
    assert site.server.access.address == "gpu.example.org:9000"
    site.server.stop()
    site = Site(tmp_path, advertise="gpu.example.org")
    assert site.server.access.address == f"gpu.example.org:{site.address.split(':')[1]}"
    site.server.stop()


def test_the_join_string_stays_valid_over_restarts(tmp_path: Path) -> None:
    first = Site(tmp_path)
    port, before = int(first.address.split(":")[1]), first.server.access.join_string
    first.server.stop()
    with DiLoCoServer(tiny_model().state_dict(), 1, port=port, credentials=str(first.credentials.folder)) as again:
        assert again.access.join_string == before
        assert HttpTransport(before).status()["num_workers"] == 1
