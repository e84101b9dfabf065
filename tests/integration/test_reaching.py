"""`outerstep worker` looks at address, token and port before it starts the script: each mistake is one line."""

from __future__ import annotations

import asyncio
import http.server
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from outerstep.cli.reaching import check_server, is_old_port
from outerstep.compat import CompatServer
from outerstep.errors import Busy, OuterstepError, ProtocolMismatch
from outerstep.wire.http_transport import HttpTransport
from ports import free_port
from sites import Site
from typed import typed


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    made = Site(tmp_path_factory.mktemp("site"))
    yield made
    made.server.stop()


@pytest.fixture(scope="module")
def compat(site: Site) -> Iterator[str]:
    with CompatServer(site.server, 0) as made:
        yield made.address


@pytest.fixture(scope="module")
def web() -> Iterator[str]:
    """Somebody else's."""

    class Page(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{made.server_port}"
        made.shutdown()


def join_string(site: Site, **changes: object) -> str:
    return replace(site.server.access, **changes).join_string  # type: ignore[arg-type]


def at(site: Site, place: str) -> str:
    """The server's join string with another port in it."""
    return join_string(site, port=int(place.rpartition(":")[2]))


def told(server: str, credentials: Path | None = None) -> str:
    with pytest.raises(OuterstepError) as refusal:
        check_server(server, str(credentials) if credentials else None)
    assert "\n" not in str(refusal.value)
    return f"{type(refusal.value).__name__}: {refusal.value}"


def test_a_server_that_lets_us_in_has_nothing_to_say(site: Site) -> None:
    assert check_server(site.address, str(site.credentials.folder)) == ""
    assert check_server(site.server.access.join_string, None) == ""


def test_a_token_that_may_join_and_not_look_is_enough(site: Site) -> None:
    assert check_server(join_string(site, token=site.tokens.give("site", rights=["join"])), None) == ""


def test_a_token_that_may_not_join(site: Site) -> None:
    said = told(join_string(site, token=site.tokens.give("reader", rights=["read"])))
    assert "the token 'reader' does not have the right to join" in said


def test_a_token_of_another_worker(site: Site) -> None:
    server = join_string(site, token=site.tokens.give_worker("left"))
    assert check_server(server, None, "left") == ""
    assert "start with --worker-id left" in told(server)


def test_a_server_of_an_older_release_is_one(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def older(headers: Mapping[str, str]) -> int:
        if headers.get("outerstep-protocol", "1") != "1":
            raise ProtocolMismatch("understood: 1-1")
        return 1

    monkeypatch.setattr("outerstep.wire.http_server.protocol_of", older)
    monkeypatch.setattr("outerstep.wire.http_server.SPOKEN_HERE", "1-1")
    assert check_server(site.server.access.join_string, None) == ""


def test_a_server_that_is_busy_is_waited_for(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(self: HttpTransport, worker_id: str) -> None:
        raise Busy("too many connections", retry_after_s=1.0)

    monkeypatch.setattr(HttpTransport, "ask_nonce", busy)
    assert check_server(site.server.access.join_string, None) == "too many connections"


def test_a_wrong_token(site: Site) -> None:
    said = told(join_string(site, token=f"run-{'x' * 43}"))
    assert "this token is not valid here, or no longer" in said
    assert "`outerstep token show`" in said


def test_another_certificate(site: Site) -> None:
    said = told(join_string(site, fingerprint="0" * 64))
    assert said.startswith("UntrustedServer")
    assert "shows another certificate" in said


def test_plain_http_to_a_port_with_tls(site: Site) -> None:
    assert "this port speaks TLS" in told(f"http://{site.address}")


def test_no_join_string_names_the_ports_of_that_host_that_are_known(tmp_path: Path) -> None:
    from outerstep.security import Access, Credentials

    said = told("192.0.2.7:8600", tmp_path)
    assert "nothing is known here about 192.0.2.7:8600" in said
    assert "outerstep join" in said
    Credentials(tmp_path).remember(Access("192.0.2.7", 8512, f"run-{'x' * 43}", "0" * 64))
    assert told("192.0.2.7:8600", tmp_path).endswith("Known on that host: 192.0.2.7:8512")


def test_a_server_of_another_user_of_this_machine_wants_a_join_string(site: Site, tmp_path: Path) -> None:
    said = told(site.address, tmp_path)
    assert said.startswith(
        f"NoCredentials: {site.address} answers, and is no server of this user: give the join string"
    )
    assert "has not started a server" in check_server(f"127.0.0.1:{free_port()}", str(tmp_path)), "it may yet"


@pytest.mark.parametrize("plain", [False, True], ids=["secure", "http"])
def test_the_port_of_the_older_protocol(site: Site, compat: str, plain: bool) -> None:
    said = told(f"http://{compat}" if plain else at(site, compat))
    assert said.startswith(f"ConfigError: {compat} is a port of the older protocol (--compat-port)")
    assert "give the server's own port" in said


def test_the_original_is_told_which_port_it_needs(
    site: Site, compat: str, web: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_old_port(compat)
    for other in (site.address, site.server.access.join_string, web, f"127.0.0.1:{free_port()}"):
        assert not is_old_port(other)
    started = []
    (tmp_path / "forgather").write_text("")
    (tmp_path / "forgather").chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr("os.execve", lambda program, words, environ: started.append(environ["DILOCO_SERVER"]))
    for server, said in ((compat, False), (site.server.access.join_string, True)):
        done = typed(["worker", "--server", server, "-p", "project", "-t", "train.yaml", "train"])
        assert done.exit_code == 0, done.output
        assert ("needs the port for that: start the server with --compat-port 8513" in done.output) == said
        assert started.pop() in server


def test_a_port_of_something_else(site: Site, web: str) -> None:
    assert f"{web} does not speak TLS" in told(at(site, web))
    assert f"{web} is not the port of an outerstep server, it answered" in told(f"http://{web}")


def test_a_peer_is_no_server(tmp_path: Path) -> None:
    from outerstep import GradientGossip

    peer = GradientGossip("a", listen="127.0.0.1:0", insecure=True)
    try:
        said = told(peer.join_string)
        assert "is a peer of a run without a server" in said
        assert "outerstep peer --join" in said
    finally:
        asyncio.run(peer.close())


def test_a_server_that_is_not_there_yet_is_waited_for_by_the_script(site: Site) -> None:
    place = f"127.0.0.1:{free_port()}"
    assert f"no answer from {place}" in check_server(at(site, place), None)
    assert "Connection refused" in check_server(f"http://{place}", None)
    assert "Name or service not known" in check_server("http://nobody.invalid:8512", None)


def test_a_port_that_takes_calls_and_says_nothing(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outerstep.cli.reaching.PATIENCE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert "timed out" in check_server(at(site, f"127.0.0.1:{silent.getsockname()[1]}"), None)


# --- as processes -----------------------------------------------------------------------------------------------------


def worker(server: str, script: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "outerstep", "worker", "--server", server, "--", sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env={**os.environ, "COLUMNS": "200", "OUTERSTEP_CREDENTIALS": str(tmp_path / "credentials")},
    )


def test_a_missing_join_is_one_line_and_the_script_is_not_started(tmp_path: Path) -> None:
    done = worker("192.0.2.7:8512", "print('started')", tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("error: nothing is known here about 192.0.2.7:8512")


def test_a_script_that_never_attached_says_so_at_its_end_and_keeps_its_exit_code(site: Site, tmp_path: Path) -> None:
    done = worker(site.server.access.join_string, "print('training'); raise SystemExit(3)", tmp_path)
    assert (done.returncode, done.stdout) == (3, "training\n")
    assert done.stderr.startswith("outerstep: the command ended and took no part in the run (")
    assert "with outerstep.attach(model, optimizer):" in done.stderr
    assert site.run_token not in done.stderr


def test_a_script_whose_child_attached_says_nothing(site: Site, tmp_path: Path) -> None:
    """As under torchrun: what the command starts may be what trains."""
    child = "from outerstep.attached import note_attached; note_attached()"
    script = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    done = worker(site.server.access.join_string, script, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
