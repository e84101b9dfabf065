"""A server as it starts by itself, with TLS and tokens: who is let in, what the others hear, what is written down.

Every row of the table of bad inputs that concerns tokens, fingerprints and plain HTTP, against a live server."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import socket
import ssl
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import trustme

from outerstep.coordination.exchange import Patience
from outerstep.errors import (
    ConfigError,
    Forbidden,
    NoCredentials,
    ProtocolMismatch,
    TlsRequired,
    TransportError,
    Unauthorized,
    UntrustedServer,
)
from outerstep.security import Access, Credentials, parse_address
from outerstep.security.tls import pinning_context
from outerstep.security.tokens import new_token
from outerstep.server import DiLoCoServer
from outerstep.types import Control, Wishes
from outerstep.wire.http_transport import HttpTransport
from outerstep.worker import DiLoCoWorker
from sites import Site, answer
from support import HandClient, Ledger, count, in_threads, make_frame, params_of, tiny_model, wait_until


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.server.stop()


def ones() -> memoryview:
    return make_frame({name: torch.ones_like(p) for name, p in params_of(tiny_model()).items()})


# --- tokens ---------------------------------------------------------------------------------------------------------


def test_with_the_token_a_round_is_made(site: Site) -> None:
    client = HandClient(site.transport())
    client.join()
    assert client.contribute(ones()).version == 1
    wait_until(lambda: site.server.sync_round == 1)


WRONG = {
    "none": None,
    "empty": "Bearer ",
    "only the word": "Bearer",
    "wrong": f"Bearer {new_token('run')}",
    "another scheme": "Basic cnVuOnJ1bg==",
    "long": "Bearer " + "x" * 12_000,
    "huge": "Bearer " + "x" * 300_000,
    "not ASCII": "Bearer schlüssel-ключ".encode(),
    "not UTF-8": b"Bearer \xff\xfe\x80",
}


@pytest.mark.row("B01")
@pytest.mark.parametrize("authorization", WRONG.values(), ids=WRONG.keys())
def test_without_a_valid_token_the_answer_is_401_and_says_what_to_do(
    site: Site, authorization: str | bytes | None
) -> None:
    status, body = site.ask("GET", "/status", authorization)
    assert (status, body["error"]["code"]) == (401, "unauthorized")
    assert "outerstep join -" in body["error"]["hint"]


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "OPTIONS", "BREW"])
@pytest.mark.parametrize("path", ["/", "/status", "/v1/join", "/v1/part?x=1", "/v1/control", "/nothing", "/healthz/x"])
def test_a_stranger_does_not_learn_which_paths_there_are(site: Site, method: str, path: str) -> None:
    status, body = site.ask(method, path, WRONG["wrong"])
    body["error"].pop("request_id")
    assert (status, body) == (
        401,
        {
            "error": {
                "code": "unauthorized",
                "message": "this token is not valid here, or no longer",
                "hint": "get the join string from the server (`outerstep token show` on its machine) and give it to "
                "`outerstep join -` here",
                "retry_after_s": 0.0,
            }
        },
    )


def test_anybody_may_ask_whether_it_is_well_and_learns_no_more(site: Site) -> None:
    assert site.ask("GET", "/healthz") == (200, {"status": "ok"})
    site.server.service.failure = "the disk is full"
    assert site.ask("GET", "/healthz") == (503, {"status": "failing"})
    site.server.service.failure = ""


def test_a_token_given_twice_is_none(site: Site) -> None:
    value = f"Bearer {site.run_token}\r\nAuthorization: Bearer {site.run_token}"
    assert site.ask("GET", "/status", value)[0] == 401
    assert site.ask("GET", "/status", f"Bearer {site.run_token}")[0] == 200


@pytest.mark.row("B02")
def test_a_token_of_one_worker_does_not_speak_for_another(site: Site) -> None:
    transport = site.with_token(site.tokens.give_worker("left"))
    left, right = HandClient(transport, "left"), HandClient(transport, "right")
    left.join()
    with pytest.raises(Forbidden, match="belongs to worker 'left', the request speaks for 'right'"):
        right.join()
    right.session.answer = left.session.answer
    payload = ones()
    for request in (
        lambda: right.offer(len(payload)),
        lambda: right.put(payload, 0),
        lambda: right.commit(payload),
    ):
        right.sequence = 1
        with pytest.raises(Forbidden, match="belongs to worker 'left'"):
            request()
    with pytest.raises(Forbidden, match="'left' has a token of its own"):
        HandClient(site.transport(), "left").join()
    assert left.contribute(payload).version == 1


def test_status_is_for_every_token_and_control_for_the_admins(site: Site) -> None:
    tokens = site.tokens.load()
    for token in (tokens.run, tokens.admin, site.tokens.give_worker("left")):
        assert site.with_token(token).status()["num_workers"] == 1
    order = Control(kind="budget", tokens=5)
    with pytest.raises(Forbidden, match=r"no admin token of .* is known here") as here:
        site.with_token(tokens.run).call(order)
    assert "outerstep token show --admin" in here.value.hint
    assert site.ask("POST", "/v1/control", f"Bearer {tokens.run}")[0] == 403
    assert site.server.service.coordinator.budget.limit is None
    with pytest.raises(Forbidden, match="workers do not join with it"):
        HandClient(site.with_token(tokens.admin)).join()
    site.transport().call(order)  # on the server's machine the admin's token is found
    assert site.server.service.coordinator.budget.limit == 5


# --- rotation -------------------------------------------------------------------------------------------------------


@pytest.mark.row("F26")
def test_a_rotated_token_is_refused_without_a_restart(site: Site) -> None:
    old = site.with_token(site.run_token)
    old.status()
    site.tokens.rotate("run")
    with pytest.raises(Unauthorized, match="not valid here, or no longer"):
        site.with_token(parse_token(old)).status()
    with pytest.raises(TransportError, match=r"no longer.*outerstep join -"):  # it knew us: worth another try
        old.status()
    assert site.with_token(site.run_token).status()["num_workers"] == 1


def parse_token(transport: HttpTransport) -> str:
    assert transport._access is not None
    return transport._access.token


@pytest.mark.row("F26")
def test_a_running_worker_goes_on_when_its_machine_has_been_told_the_new_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere: another credentials folder, which `outerstep join` filled; after a rotation it is filled again."""
    site, elsewhere = Site(tmp_path, sync_every=2, num_workers=1), Credentials(tmp_path / "elsewhere")
    elsewhere.remember(site.server.access)
    eager = partial(Patience, first_backoff_s=0.01, longest_backoff_s=0.05)
    monkeypatch.setattr("outerstep.worker.connect.Patience", eager)
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    said: list[str] = []
    handler = Listener(said)
    logging.getLogger("outerstep.topology.courier").addHandler(handler)
    try:
        with DiLoCoWorker(
            model, optimizer, site.address, worker_id="w", credentials=str(elsewhere.folder), offline_after_s=600.0
        ) as worker:
            train(model, optimizer, 2)
            site.tokens.rotate("run")

            def help_it() -> None:
                wait_until(lambda: any("outerstep join -" in text for text in said))
                elsewhere.remember(site.server.access)

            in_threads(help_it, lambda: train(model, optimizer, 2))
            assert worker.sync_metrics["sync_count"] == 2
    finally:
        logging.getLogger("outerstep.topology.courier").removeHandler(handler)
        site.server.stop()
    assert site.server.sync_round == 2
    assert site.run_token not in "".join(said)


class Listener(logging.Handler):
    def __init__(self, said: list[str]) -> None:
        super().__init__()
        self._said = said

    def emit(self, record: logging.LogRecord) -> None:
        self._said.append(record.getMessage())


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


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
    ends = {"server": "outerstep.coordination.admission", "worker": "outerstep.topology.server"}
    monkeypatch.setattr(f"{ends[ahead]}.PROTOCOL_VERSION", 2)
    model = tiny_model()
    worker = DiLoCoWorker(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        site.address,
        credentials=str(site.credentials.folder),
    )
    with pytest.raises(ProtocolMismatch, match=r"this worker speaks protocol \d, the server speaks \d") as refused:
        worker.start()
    assert "the same version of outerstep on both" in refused.value.hint
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
    find = worker._topology._transport._find  # type: ignore[attr-defined]

    def looking() -> Access | None:
        asked.append(True)
        return find()  # type: ignore[no-any-return]

    worker._topology._transport._find = looking  # type: ignore[attr-defined]

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


# --- the account of it ----------------------------------------------------------------------------------------------


def test_every_refusal_is_written_down_with_who_and_what_and_no_secret(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    secret = new_token("run")
    with caplog.at_level(logging.DEBUG, logger="outerstep"):
        site.ask("GET", f"/v1/x?token={secret}", f"Bearer {secret}")
        with contextlib.suppress(TlsRequired):
            HttpTransport(f"http://{site.address}").status()
        site.ask("POST", "/nothing", f"Bearer {site.run_token}")
    events = site.events("refused")
    assert [(event["code"], event["peer"], event["path"]) for event in events] == [
        ("unauthorized", "127.0.0.1", "/v1/x"),
        ("tls_required", "127.0.0.1", ""),
        ("not_found", "127.0.0.1", "/nothing"),
    ]
    assert re.search(r"GET /v1/x from 127\.0\.0\.1 refused: unauthorized", caplog.text)
    for text in (caplog.text, site.events_file.read_text()):
        for token in (secret, site.run_token, site.tokens.load().admin):
            assert token[4:] not in text


def test_a_flood_of_strangers_does_not_fill_the_disk(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    flood = 200
    with caplog.at_level(logging.INFO, logger="outerstep"), site.connection() as sock:
        for _ in range(flood):
            sock.sendall(b"GET /status HTTP/1.1\r\nHost: x\r\n\r\n")
            assert answer(sock)[0] == 401
    assert caplog.text.count("refused: unauthorized") == 60
    assert len(site.events("refused")) == 60
    site.server.stop()
    assert site.events("refused")[-1]["count"] == flood - 60


def test_nothing_that_the_server_shows_holds_a_secret(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        client = HandClient(site.transport())
        client.join()
        client.contribute(ones())
        site.transport().call(Control(kind="plan", changes=Wishes(sync_every=20)))
    tokens = site.tokens.load()
    shown = [json.dumps(site.transport().status()), repr(site.server.config), repr(site.server.access), caplog.text]
    shown += [site.events_file.read_text(), repr(client.transport.__dict__), repr(site.server._identity)]
    for text in shown:
        assert tokens.run not in text
        assert tokens.admin not in text


def test_a_server_that_stops_lets_its_connections_go(site: Site) -> None:
    transport = site.transport()
    transport.status()
    site.server.stop()
    with pytest.raises(TransportError):
        transport.status()
