"""`outerstep doctor` against live servers, and against what is not one."""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from outerstep.cli import app
from outerstep.errors import BadRequest, MethodNotAllowed, TooLarge, Unauthorized
from outerstep.security import Access, Credentials
from outerstep.security.tokens import new_token
from outerstep.server import DiLoCoServer
from outerstep.wire.http_transport import HttpTransport
from outerstep.wire.pages import MAX_BYTES
from outerstep.worker import DiLoCoWorker
from support import tiny_model


@pytest.fixture
def server() -> Iterator[DiLoCoServer]:
    with DiLoCoServer(tiny_model().state_dict(), num_workers=1, port=0, sync_every=50) as made:
        yield made


class Report:
    """What `outerstep doctor … --json` says."""

    def __init__(self, line: str, stdin: str | None = None) -> None:
        done = CliRunner().invoke(app, ["doctor", "--json", *shlex.split(line)], input=stdin)
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        self.code, self.text = done.exit_code, done.output
        said = json.loads(done.stdout)
        assert said["ok"] == (self.code == 0)
        self.by_check = {finding["check"]: finding for finding in said["findings"]}
        self.failed = [finding["check"] for finding in said["findings"] if finding["level"] == "fail"]
        self.last = said["findings"][-1]

    def found(self, check: str) -> str:
        return str(self.by_check[check]["found"])


def joined(access: Access, folder: Path) -> str:
    """The credentials folder of a user elsewhere who has joined with this."""
    Credentials(folder).remember(access)
    return f"{access.address} --credentials {folder}"


def test_a_healthy_way_is_looked_at_from_end_to_end(server: DiLoCoServer, tmp_path: Path) -> None:
    model = tiny_model()
    worker = DiLoCoWorker(model, torch.optim.SGD(model.parameters(), lr=0.1), server.address, worker_id="left").start()
    report = Report(f"{server.access.join_string} --save-dir {tmp_path}")
    worker.abandon("over")
    assert report.code == 0, report.text
    assert list(report.by_check) == [
        "software", "GPU", "CPU", "open files", "save_dir", "spool", "credentials", "secrets",
        "address", "port", "certificate", "token", "server", "clock", "latency", "bandwidth", "exchange",
    ]  # fmt: skip
    assert "the one known here" in report.found("certificate")
    assert report.found("token").startswith("the run's")
    assert f"run {server.run_id}, round 0, 1 worker" in report.found("server")
    assert "128 B up (bf16)" in report.found("exchange")  # 64 parameters
    assert server.access.token not in report.text


def test_before_the_first_worker_no_exchange_is_estimated(server: DiLoCoServer) -> None:
    report = Report(server.address)
    assert report.code == 0
    assert report.found("exchange").startswith("unknown until the first worker")


def test_a_join_string_can_come_on_standard_input(server: DiLoCoServer) -> None:
    assert Report("-", server.access.join_string + "\n").by_check["token"]["level"] == "ok"


def test_without_a_server_this_machine_alone_is_looked_at() -> None:
    report = Report("")
    assert report.code == 0
    assert report.last["check"] == "secrets"


def test_for_people_it_is_one_line_each_and_names_no_token(server: DiLoCoServer) -> None:
    done = CliRunner().invoke(app, ["doctor", server.access.join_string], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert done.exit_code == 0
    words = [line.split()[0] for line in done.output.splitlines() if line[:1] != " "]
    assert set(words) <= {"ok", "warn"}
    assert len(words) == 16
    assert server.access.token not in done.output


# --- what can be wrong ----------------------------------------------------------------------------------------------


def test_a_wrong_port_or_a_server_that_is_down_refuses(server: DiLoCoServer, tmp_path: Path) -> None:
    server.stop()
    report = Report(joined(server.access, tmp_path))
    assert (report.code, report.failed) == (1, ["port"])
    assert report.last["check"] == "port"  # nothing after it could work
    assert "nobody listens there" in report.found("port")


def test_another_certificate_shows_both_fingerprints(server: DiLoCoServer, tmp_path: Path) -> None:
    report = Report(joined(replace(server.access, fingerprint="0" * 64), tmp_path))
    assert (report.code, report.failed) == (1, ["certificate"])
    assert "0" * 64 in report.found("certificate")
    assert str(server.access.fingerprint) in report.found("certificate")
    assert report.last["check"] == "certificate"  # no token was sent there


def test_a_wrong_token_is_refused(server: DiLoCoServer, tmp_path: Path) -> None:
    wrong = new_token("run")
    report = Report(joined(replace(server.access, token=wrong), tmp_path))
    assert (report.code, report.failed) == (1, ["token"])
    assert "not valid here" in report.found("token")
    assert wrong not in report.text


def test_a_workers_and_an_admins_token_are_told_apart(server: DiLoCoServer, tmp_path: Path) -> None:
    tokens = Credentials().tokens
    own = replace(server.access, token=tokens.give_worker("left"))
    assert Report(joined(own, tmp_path / "worker")).found("token").startswith("a worker's own")
    admin = replace(server.access, token="", admin=tokens.load().admin)
    assert Report(joined(admin, tmp_path / "admin")).by_check["token"]["level"] == "warn"
    tokens.revoke("left")


def test_a_server_that_is_not_known_here_shows_its_certificate_and_says_join(
    server: DiLoCoServer, tmp_path: Path
) -> None:
    host = socket.gethostbyname(socket.gethostname())
    if not host.startswith("127."):
        pytest.skip("this machine's name is not a loopback address, and the server listens there alone")
    Credentials(tmp_path).remember(replace(server.access, host="elsewhere"))
    report = Report(f"{socket.gethostname()}:{server.access.port} --credentials {tmp_path}")
    assert report.failed == ["token"]
    assert "not checked" in report.found("certificate")
    assert "outerstep join" in report.by_check["token"]["remedy"]


def test_a_plain_server_is_told_from_a_secure_one(server: DiLoCoServer, tmp_path: Path) -> None:
    with DiLoCoServer(tiny_model().state_dict(), num_workers=1, port=0, insecure=True) as plain:
        port = int(plain.address.split(":")[1])
        report = Report(joined(replace(server.access, port=port), tmp_path))
        assert (report.code, report.failed) == (1, ["certificate"])
        assert "does not speak TLS" in report.found("certificate")
        by_name = Report(f"http://{plain.address}")
        assert by_name.code == 0
        assert by_name.by_check["certificate"]["level"] == "warn"
        assert by_name.by_check["bandwidth"]["level"] == "ok"
    turned = Report(f"http://{server.address}")
    assert turned.failed == ["token"]
    assert "leave http:// out" in turned.by_check["token"]["remedy"]


def test_what_is_no_outerstep_server_is_not_mistaken_for_one(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def serve() -> None:
            for _ in range(2):
                with listener.accept()[0] as client:
                    if client.recv(4096):
                        client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        report = Report(f"http://127.0.0.1:{port}")
        thread.join(30)
    assert report.failed == ["token"]
    assert "is this the address of an outerstep server?" in report.by_check["token"]["remedy"]


def test_a_malformed_address_is_a_usage_error() -> None:
    with pytest.raises(AssertionError, match="host:port"):
        Report("nonsense:port")


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A disk of one page that is in use already."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting needs root")
    (folder / "data").write_bytes(bytes(4096))
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.row("F11")
def test_a_full_disk_fails(full: Path) -> None:
    report = Report(f"--save-dir {full}")
    assert (report.code, report.failed) == (1, ["save_dir"])
    assert "the disk is full" in report.by_check["save_dir"]["remedy"]


def test_a_read_only_disk_fails(full: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(full)], check=True)
    report = Report(f"--save-dir {full}")
    assert (report.code, report.failed) == (1, ["save_dir"])
    assert "read-only" in report.by_check["save_dir"]["remedy"]


# --- what it measures with ------------------------------------------------------------------------------------------


def test_a_probe_needs_a_token_and_keeps_to_its_size(server: DiLoCoServer) -> None:
    line = HttpTransport(server.address)
    assert line.probe_up(memoryview(bytes(1000))).received_bytes == 1000
    into = memoryview(bytearray(1000))
    line.probe_down(into)
    assert bytes(into) != bytes(1000)
    with pytest.raises(TooLarge, match=str(MAX_BYTES)):
        line.probe_up(memoryview(bytearray(MAX_BYTES + 1)))
    with pytest.raises(TooLarge, match=str(MAX_BYTES)):
        line.probe_down(memoryview(bytearray(MAX_BYTES + 1)))
    stranger = HttpTransport(replace(server.access, token=new_token("run")).join_string)
    with pytest.raises(Unauthorized):
        stranger.probe_down(into)


@pytest.mark.parametrize(("method", "query"), [("GET", ""), ("GET", "bytes=-1"), ("GET", "bytes=1&x=2"), ("POST", "")])
def test_a_probe_that_is_none_is_refused(server: DiLoCoServer, method: str, query: str) -> None:
    line = HttpTransport(server.address)
    with pytest.raises(MethodNotAllowed if method == "POST" else BadRequest):
        line._ask(method, f"/v1/probe?{query}", memoryview(b""), "application/json", None, 10.0)
