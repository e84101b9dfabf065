"""The page over HTTP: who may see what, what a stream is, and that no other site's page gets anything."""

from __future__ import annotations

import contextlib
import http.client
import io
import itertools
import json
import pty
import re
import socket
import ssl
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from typer.testing import CliRunner

from outerstep.cli import app
from outerstep.cli.server import page_line
from outerstep.dashboard.streams import MOST_STREAMS
from outerstep.dashboard.tunnel import Tunnel
from outerstep.events import WorkerJoined
from outerstep.security import Credentials
from outerstep.server import DiLoCoServer
from outerstep.topology.gossip.node import Node, NodeSettings
from outerstep.wire.http_server import HttpServer
from outerstep.wire.http_transport import HttpTransport
from outerstep.wire.limits import ServiceLimits
from support import tiny_model, wait_until

JSON = {"Content-Type": "application/json"}
ELSEWHERE = [{"Origin": "https://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}]


def serve(**settings: Any) -> DiLoCoServer:
    return DiLoCoServer(tiny_model().state_dict(), num_workers=1, port=0, codec="fp32", **settings)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DiLoCoServer]:
    with serve(credentials=str(tmp_path_factory.mktemp("credentials")), remote_control=True) as made:
        yield made


@pytest.fixture(scope="module")
def plain() -> Iterator[DiLoCoServer]:
    with serve(insecure=True) as made:
        yield made


def connect(address: str, *, tls: bool = True) -> http.client.HTTPConnection:
    if not tls:
        return http.client.HTTPConnection(address, timeout=60)
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return http.client.HTTPSConnection(address, timeout=60, context=context)


def ask(
    server: DiLoCoServer | str,
    method: str,
    path: str,
    body: str | None = None,
    headers: Mapping[str, str] | None = None,
    *,
    tls: bool = True,
) -> tuple[int, http.client.HTTPMessage, bytes]:
    connection = connect(server if isinstance(server, str) else server.address, tls=tls)
    with contextlib.closing(connection):
        connection.request(method, path, body=body, headers=dict(headers or {}))
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()


def log_in(server: DiLoCoServer) -> dict[str, str]:
    """The cookie of a browser that has opened the server's link."""
    code = server.page_link().partition("#")[2]
    status, headers, _ = ask(server, "POST", "/page/login", json.dumps({"code": code}), JSON)
    assert status == 200
    return {"Cookie": headers["Set-Cookie"].partition(";")[0]}


def events(sock: socket.socket) -> Iterator[tuple[str, Any]]:
    """The server-sent events of a stream, as they come."""
    file = sock.makefile("rb")
    kind = ""
    for line in file:
        name, _, value = line.decode().rstrip("\n").partition(": ")
        if name == "event":
            kind = value
        elif name == "data":
            yield kind, json.loads(value)


def open_stream(
    server: DiLoCoServer | str, cookie: Mapping[str, str], *, tls: bool = True
) -> tuple[int, socket.socket]:
    address = server if isinstance(server, str) else server.address
    connection = connect(address, tls=tls)
    connection.connect()
    assert connection.sock is not None
    sock = connection.sock
    head = "".join(f"{name}: {value}\r\n" for name, value in {"Host": address, **cookie}.items())
    sock.sendall(f"GET /page/live HTTP/1.1\r\n{head}\r\n".encode())
    status = b""
    while not status.endswith(b"\r\n\r\n"):
        status += sock.recv(1)
    return int(status.split()[1]), sock


def test_the_page_itself_is_for_everybody_and_has_nothing_of_the_run_in_it(server: DiLoCoServer) -> None:
    status, headers, body = ask(server, "GET", "/page")
    assert status == 200
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert server.run_id.encode() not in body
    for path in (
        "/page/page.js",
        "/page/page.css",
        "/page/charts.js",
        "/page/map.js",
        "/page/words.js",
        "/page/icon.svg",
        "/page/uplot.js",
        "/page/uplot.css",
    ):
        status, headers, body = ask(server, "GET", path)
        assert (status, b"http://" in body.replace(b"http://www.w3.org", b"")) == (200, False)
        assert ask(server, "GET", path, headers={"If-None-Match": headers["ETag"]})[0] == 304


def test_a_slash_too_many_leads_to_the_page(server: DiLoCoServer) -> None:
    status, headers, _ = ask(server, "GET", "/page/")
    assert (status, headers["Location"]) == (303, "/page")


def test_a_stranger_sees_nothing_of_the_run(server: DiLoCoServer) -> None:
    for path in ("/page/state", "/page/live", "/page/model"):
        assert ask(server, "GET", path)[0] == 401
        assert ask(server, "GET", path, headers={"Cookie": "outerstep=run~0~9~0"})[0] == 401
    assert ask(server, "POST", "/page/link", "{}")[0] == 401
    assert ask(server, "POST", "/page/login", json.dumps({"code": "a" * 32}), JSON)[0] == 401
    assert ask(server, "POST", "/page/login", "x" * 5000, JSON)[0] == 413
    assert ask(server, "POST", "/page/login", "[" * 900, JSON)[0] == 400


def test_a_link_opens_the_page_and_reads_the_model_and_nothing_else(server: DiLoCoServer) -> None:
    cookie = log_in(server)
    status, headers, body = ask(server, "GET", "/page/state", headers=cookie)
    assert (status, headers["Cache-Control"]) == (200, "no-store")
    assert json.loads(body)["status"]["run_id"] == server.run_id
    status, headers, model = ask(server, "GET", "/page/model", headers=cookie)
    assert status == 200
    assert headers["Content-Disposition"] == 'attachment; filename="model.safetensors"'
    assert HttpTransport(server.access.join_string).read("/v1/model")[1] == model  # type: ignore[index]
    for method, path in (("GET", "/status"), ("GET", "/v1/model"), ("POST", "/v1/control"), ("POST", "/page/link")):
        assert ask(server, method, path, "{}" if method == "POST" else None, cookie)[0] == 401


@pytest.mark.parametrize("headers", ELSEWHERE)
def test_no_other_sites_page_gets_anything(server: DiLoCoServer, headers: dict[str, str]) -> None:
    cookie = log_in(server)
    for path in ("/page/state", "/page/live", "/page/model"):
        assert ask(server, "GET", path, headers={**cookie, **headers})[0] == 403
    code = server.page_link().partition("#")[2]
    assert ask(server, "POST", "/page/login", json.dumps({"code": code}), {**JSON, **headers})[0] == 403
    assert ask(server, "POST", "/page/login", json.dumps({"code": code}), JSON)[0] == 200, "it was not used up"


@pytest.mark.parametrize("headers", [*ELSEWHERE, {"Host": "evil.example"}])
def test_no_other_sites_page_gets_anything_of_a_port_without_tokens(
    plain: DiLoCoServer, headers: dict[str, str]
) -> None:
    for path in ("/page/state", "/page/live", "/page/model"):
        assert ask(plain, "GET", path, headers=headers, tls=False)[0] == 403
    assert ask(plain, "POST", "/v1/control", '{"kind": "sync"}', {**JSON, **headers}, tls=False)[0] == 403


def test_a_port_without_tokens_shows_its_own_page_without_a_login(plain: DiLoCoServer) -> None:
    assert plain.page_link() == f"http://{plain.address}/page"
    own = {"Sec-Fetch-Site": "same-origin", "Origin": f"http://{plain.address}"}
    status, _, body = ask(plain, "GET", "/page/state", headers=own, tls=False)
    assert status == 200
    assert json.loads(body)["open"] is True


def test_the_page_gives_orders_only_where_the_operator_said_so(server: DiLoCoServer, plain: DiLoCoServer) -> None:
    identity = Credentials(server.config.credentials).tokens.load()
    order = json.dumps({"kind": "budget", "tokens": 5})
    admin = {**JSON, "Authorization": f"Bearer {identity.admin}"}
    own = {"Origin": f"https://{server.address}", "Sec-Fetch-Site": "same-origin"}
    assert ask(server, "POST", "/v1/control", order, {**admin, **own})[0] == 200
    for elsewhere in ELSEWHERE:
        assert ask(server, "POST", "/v1/control", order, {**admin, **elsewhere})[0] == 403
    reader = {**JSON, "Authorization": f"Bearer {identity.run}"}
    assert ask(server, "POST", "/v1/control", order, {**reader, **own})[0] == 403
    own = {"Origin": f"http://{plain.address}", "Sec-Fetch-Site": "same-origin"}
    status, _, body = ask(plain, "POST", "/v1/control", order, {**JSON, **own}, tls=False)
    assert (status, "--remote-control" in body.decode()) == (403, True)
    assert ask(plain, "POST", "/v1/control", order, JSON, tls=False)[0] == 200, "a command of this machine may"


def test_a_stream_tells_what_happens_and_is_no_connection_of_the_port(server: DiLoCoServer) -> None:
    status, sock = open_stream(server, log_in(server))
    with sock:
        assert status == 200
        told = events(sock)
        kind, hello = next(told)
        assert (kind, hello["status"]["run_id"]) == ("hello", server.run_id)
        server.service.events(WorkerJoined("left", "<img src=x onerror=alert(1)>", 1))
        heard = (event for _, update in told for event in update.get("told", []) if event["kind"] == "join")
        assert next(heard)["host"] == "<img src=x onerror=alert(1)>"
        assert server.dashboard is not None
        assert len(server.dashboard.streams) == 1
        with contextlib.closing(connect(server.address)) as looking:
            token = {"Authorization": f"Bearer {server.access.token}"}
            looking.request("GET", "/status", headers=token)
            assert json.loads(looking.getresponse().read())["connections"]["open"] == 1, "the one that asks"
        sock.shutdown(socket.SHUT_RDWR)  # closing alone does nothing while somebody reads it as a file
    wait_until(lambda: len(server.dashboard.streams) == 0)  # type: ignore[union-attr]


def test_a_stream_lives_on_where_the_guard_closes_whoever_is_slow(plain: DiLoCoServer) -> None:
    """A quiet page takes a comment in a quarter of a minute. A guard that is hasty by a hundred times spares it."""
    hasty = ServiceLimits(window_s=0.2, idle_s=0.2, stranger_s=0.2)
    assert plain.dashboard is not None
    port = HttpServer(plain.service.routes, "127.0.0.1", 0, limits=hasty)
    port.start()
    try:
        status, sock = open_stream(f"127.0.0.1:{port.port}", {}, tls=False)
        with sock:
            assert status == 200
            told = events(sock)
            assert next(told)[0] == "hello"
            for _ in range(3):  # it has looked at everybody, several times
                with socket.create_connection(("127.0.0.1", port.port), timeout=60.0) as slow:
                    slow.sendall(b"GET /page HTTP/1.1\r\nHost:")
                    assert slow.recv(1) == b"", "the guard is at work"
            plain.service.events(WorkerJoined("later", "host", 1))
            heard = (event for _, update in told for event in update.get("told", []) if event["kind"] == "join")
            assert "later" in [event["worker"] for event in itertools.islice(heard, 1)]
            sock.shutdown(socket.SHUT_RDWR)
        wait_until(lambda: len(plain.dashboard.streams) == 0)  # type: ignore[union-attr]
    finally:
        port.stop()


def test_a_page_too_many_is_told_to_come_back(plain: DiLoCoServer) -> None:
    with contextlib.ExitStack() as opened:
        for _ in range(MOST_STREAMS):
            status, sock = open_stream(plain, {}, tls=False)
            opened.enter_context(sock)
            assert status == 200
        status, sock = open_stream(plain, {}, tls=False)
        opened.enter_context(sock)
        assert status == 503
        assert ask(plain, "GET", "/page/state", tls=False)[0] == 200
    wait_until(lambda: len(plain.dashboard.streams) == 0)  # type: ignore[union-attr]


def test_a_stream_ends_with_the_token_of_its_session(server: DiLoCoServer) -> None:
    tokens = Credentials(server.config.credentials).tokens
    token = tokens.give("board", rights=("read",))
    made = json.loads(ask(server, "POST", "/page/link", "{}", {"Authorization": f"Bearer {token}"})[2])
    _, headers, _ = ask(server, "POST", "/page/login", json.dumps({"code": made["code"]}), JSON)
    cookie = {"Cookie": headers["Set-Cookie"].partition(";")[0]}
    _, sock = open_stream(server, cookie)
    with sock:
        tokens.revoke("board")
        assert [kind for kind, _ in events(sock)][:1] == ["hello"], "and then it ends"
    assert ask(server, "GET", "/page/state", headers=cookie)[0] == 401


def test_a_server_without_a_page_has_none(tmp_path: Any) -> None:
    with serve(insecure=True, page=False) as server:
        assert ask(server, "GET", "/page", tls=False)[0] == 404
        said = CliRunner().invoke(app, ["page", "--server", f"http://{server.address}"])
        assert "has no page" in str(said.exception)


def test_the_command_prints_a_link_that_logs_in(server: DiLoCoServer) -> None:
    folder = str(server.config.credentials)
    said = CliRunner().invoke(app, ["page", "--server", server.address, "--credentials", folder])
    assert said.exit_code == 0, said.output
    link, _, code = said.stdout.strip().partition("#")
    assert link == f"https://{server.address}/page"
    assert server.access.token not in said.output
    assert ask(server, "POST", "/page/login", json.dumps({"code": code}), JSON)[0] == 200
    assert ask(server, "POST", "/page/login", json.dumps({"code": code}), JSON)[0] == 401, "it works once"


def test_a_server_prints_a_link_at_its_start_to_a_terminal_and_to_nothing_else(
    server: DiLoCoServer, plain: DiLoCoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever opens the link is logged in: a log file is told how to get one instead."""
    ours, theirs = pty.openpty()
    with open(ours, "rb", buffering=0), open(theirs, "w") as terminal:
        monkeypatch.setattr("sys.stderr", terminal)
        said = page_line(server, server.config, as_json=False)
        for_programs = page_line(server, server.config, as_json=True)
    link = re.search(rf"https://{re.escape(server.address)}/page#([A-Za-z0-9_-]{{32}})", said)
    assert link is not None, said
    assert ask(server, "POST", "/page/login", json.dumps({"code": link[1]}), JSON)[0] == 200
    monkeypatch.setattr("sys.stderr", io.StringIO())
    how = f"In a browser: `outerstep page --server {server.address}` prints a link."
    assert for_programs == page_line(server, server.config, as_json=False) == how
    assert page_line(plain, plain.config, as_json=False) == f"In a browser: http://{plain.address}/page"


def test_a_tunnel_lets_a_browser_in_without_a_certificate(server: DiLoCoServer) -> None:
    transport = HttpTransport(server.access.join_string)
    with Tunnel(transport) as tunnel:
        own = {"Origin": f"http://{tunnel.address}", "Sec-Fetch-Site": "same-origin"}
        assert ask(tunnel.address, "GET", "/page", tls=False)[0] == 200
        said = json.dumps({"code": transport.page_link().code})
        status, headers, _ = ask(tunnel.address, "POST", "/page/login", said, {**JSON, **own}, tls=False)
        assert status == 200
        assert "Secure" not in headers["Set-Cookie"]
        cookie = {"Cookie": headers["Set-Cookie"].partition(";")[0]}
        assert ask(tunnel.address, "GET", "/page/state", headers={**cookie, **own}, tls=False)[0] == 200
        assert ask(tunnel.address, "GET", "/page/model", headers={**cookie, **own}, tls=False)[0] == 200


def test_a_peer_has_a_page_too(tmp_path: Any) -> None:
    with Node(NodeSettings("left", "127.0.0.1:0", credentials=str(tmp_path))) as node:
        link, _, code = node.page_link().partition("#")
        assert link == f"https://{node.address}/page"
        status, headers, _ = ask(node.address, "POST", "/page/login", json.dumps({"code": code}), JSON)
        assert status == 200
        cookie = {"Cookie": headers["Set-Cookie"].partition(";")[0]}
        said = json.loads(ask(node.address, "GET", "/page/state", headers=cookie)[2])
        assert (said["status"]["peer_id"], said["model"], said["orders"]) == ("left", False, False)
        assert ask(node.address, "GET", "/page/state")[0] == 401
