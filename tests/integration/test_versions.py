"""Ends of different versions in one run: of today, pretending to be older, and of release 0.2 itself (slow)."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import outerstep
from outerstep.errors import BadRequest, ProtocolMismatch, TransportError
from outerstep.types import Control, Heartbeat, Join, Wishes
from outerstep.versions import PROTOCOL_VERSION, SPOKEN_HERE
from outerstep.wire.http_transport import HttpTransport
from outerstep.wire.messages import PROTOCOL_HEADER, PROTOCOLS_HEADER
from outerstep.worker import DiLoCoWorker
from ports import free_port
from sites import Site
from support import tiny_model, train_steps, wait_until


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.server.stop()


JOIN = Join(protocol=1, worker_id="w", instance="a" * 8, hostname="test")


def older_server(headers: Mapping[str, str]) -> int:
    """How a server that speaks 1 alone takes a request."""
    named = int(headers.get(PROTOCOL_HEADER.lower(), "1"))
    if named != 1:
        raise ProtocolMismatch(f"the sender speaks protocol {named}; understood: 1-1")
    return 1


class TestTheLine:
    def test_an_answer_says_what_is_spoken_and_only_to_who_has_a_token(self, site: Site) -> None:
        assert site.post("/v1/leave", b"{}").headers[PROTOCOLS_HEADER] == SPOKEN_HERE
        assert site.call(JOIN).headers[PROTOCOLS_HEADER] == SPOKEN_HERE
        stranger = site.say(b"GET /status HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (stranger.status, stranger.headers[PROTOCOLS_HEADER]) == (401, None)

    def test_a_request_in_another_protocol_is_refused_whatever_it_asks(self, site: Site) -> None:
        said = site.post("/status", b"", f"{PROTOCOL_HEADER}: 9", method="GET")
        assert (said.status, said.body["code"]) == (426, "protocol_mismatch")
        assert "understood: 1-2" in said.body["message"]
        assert site.post("/status", b"", f"{PROTOCOL_HEADER}: new", method="GET").status == 400

    def test_both_ends_speak_the_newest(self, site: Site) -> None:
        transport = site.transport()
        transport.call(JOIN)
        assert transport.protocol == PROTOCOL_VERSION
        assert site.server.typed_status().workers["w"].protocol == PROTOCOL_VERSION

    def test_with_an_older_server_a_worker_speaks_what_that_does(
        self, site: Site, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("outerstep.wire.http_server.protocol_of", older_server)
        monkeypatch.setattr("outerstep.wire.http_server.SPOKEN_HERE", "1-1")
        transport = site.transport()
        answer = transport.call(JOIN)
        assert transport.protocol == 1
        assert site.server.typed_status().workers["w"].protocol == 1
        monkeypatch.undo()  # the server is restarted as a newer version
        head = {"run_id": site.server.run_id, "worker_id": "w", "incarnation": answer.incarnation}  # type: ignore[union-attr]
        transport.call(Heartbeat(**head, step=1, steps_per_second=1.0))  # type: ignore[arg-type]
        assert transport.protocol == PROTOCOL_VERSION

    def test_what_is_wrong_in_every_protocol_is_tried_in_one(self, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[str] = []

        def protocol_of(headers: Mapping[str, str]) -> int:
            asked.append(headers[PROTOCOL_HEADER.lower()])
            return int(asked[-1])

        monkeypatch.setattr("outerstep.wire.http_server.protocol_of", protocol_of)
        with pytest.raises(BadRequest):
            site.transport().call(Join(protocol=1, worker_id="-", instance="a" * 8))
        assert asked == [str(PROTOCOL_VERSION)]


def test_a_worker_trains_with_an_older_server(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outerstep.wire.http_server.protocol_of", older_server)
    monkeypatch.setattr("outerstep.wire.http_server.SPOKEN_HERE", "1-1")
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    folder = str(site.credentials.folder)
    with DiLoCoWorker(model, optimizer, site.address, worker_id="a", sync_every=2, credentials=folder):
        train_steps(model, optimizer, 4, seed=0)
        assert site.server.typed_status().workers["a"].protocol == 1
    assert site.server.typed_status().sync_round == 2


# --- release 0.2 itself ---------------------------------------------------------------------------------------------

REPOSITORY = Path(__file__).parents[2]
JOB = Path(__file__).with_name("version_job.py")
PATIENCE_S = 120.0
ROUNDS = 4  # as in the job


@pytest.fixture(scope="session")
def release_0_2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to import it from: its wheel, built from this repository's own history."""
    page = (REPOSITORY / "docs" / "reference" / "wire.md").read_text()
    named = re.search(r"^\| 0\.2 \| `([0-9a-f]{7,40})`", page, re.MULTILINE)
    assert named is not None, "wire.md says which commit release 0.2 is"
    made = tmp_path_factory.mktemp("release-0.2")

    def do(*command: str) -> None:
        try:
            subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True, timeout=180)
        except (OSError, subprocess.SubprocessError) as error:
            said = str(getattr(error, "stderr", "") or error).strip().splitlines()[-1]
            pytest.skip(f"release 0.2 ({named[1]}) cannot be built here: {' '.join(command[:4])}: {said}")

    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    do("git", "archive", "--format=tar", f"--output={made / 'source.tar'}", named[1])
    shutil.unpack_archive(made / "source.tar", made / "source")
    do(*pip, "wheel", "--no-deps", "--wheel-dir", str(made), str(made / "source"))
    wheel = next(made.glob("outerstep-*.whl"))
    do(*pip, "install", "--no-deps", "--no-compile", "--target", str(made / "packages"), str(wheel))
    return made / "packages"


class Ends:
    """Processes of both versions that share a folder."""

    def __init__(self, folder: Path, old: Path) -> None:
        self.folder, self._old = folder, old
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def environ(self, version: str) -> dict[str, str]:
        place = self._old if version == "old" else Path(outerstep.__file__).parents[1]
        return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(place)}

    def start(self, version: str, role: str, name: str, **settings: Any) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, str(JOB), role, name, str(self.folder), json.dumps(settings)],
                stdout=log, stderr=subprocess.STDOUT, env=self.environ(version), cwd=self.folder,
            )  # fmt: skip

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def hashes(self, name: str) -> list[tuple[int, str]]:
        """Of what it held after each of its rounds."""
        file = self.folder / f"{name}.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        notes = [json.loads(line) for line in lines if line.endswith("\n")]
        return [(note["version"], note["hash"]) for note in notes]

    def await_rounds(self, *names: str, rounds: int = ROUNDS) -> None:
        def is_over() -> bool:
            for name in names:
                assert self.processes[name].poll() in (None, 0), self.log(name)
            return all(len(self.hashes(name)) >= rounds for name in names)

        try:
            wait_until(is_over, PATIENCE_S)
        except AssertionError:
            raise AssertionError("\n".join(f"== {name}\n{self.log(name)[-3000:]}" for name in self.processes)) from None

    def tell(self, word: str) -> None:
        (self.folder / word).touch()

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].wait(60)

    def await_end(self, *names: str) -> None:
        for name in names:
            assert self.processes[name].wait(PATIENCE_S) == 0, self.log(name)

    def transport(self) -> HttpTransport:
        wait_until((self.folder / "join").exists, PATIENCE_S)
        return HttpTransport((self.folder / "join").read_text(), credentials=self.folder / "credentials")

    def doctor(self, version: str) -> dict[str, Any]:
        """What it says of the server; it exits with 0 unless something is wrong."""
        command = [sys.executable, "-m", "outerstep", "doctor", (self.folder / "join").read_text(), "--json"]
        said = subprocess.run(command, env=self.environ(version), cwd=self.folder, capture_output=True, text=True)
        assert said.returncode == 0, said.stdout + said.stderr
        found: dict[str, Any] = next(f for f in json.loads(said.stdout)["findings"] if f["check"] == "server")
        return found

    def close(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
                process.wait(60)


def told(server: HttpTransport, order: Control) -> bool:
    """Has it heard? It may not be up yet."""
    try:
        server.call(order)
    except TransportError:
        return False
    return True


@pytest.fixture
def ends(tmp_path: Path, release_0_2: Path) -> Iterator[Ends]:
    made = Ends(tmp_path, release_0_2)
    yield made
    made.close()


@pytest.mark.row("F30")
@pytest.mark.slow
@pytest.mark.parametrize("server", ["old", "new"])
def test_workers_of_both_releases_train_with_a_server_of_either(ends: Ends, server: str) -> None:
    ends.start(server, "server", "server")
    ends.start("old", "worker", "old")
    ends.start("new", "worker", "new")
    ends.await_rounds("old", "new")
    transport = ends.transport()
    status = transport.status()
    assert transport.protocol == (1 if server == "old" else PROTOCOL_VERSION)
    assert status["sync_round"] == ROUNDS
    workers: Any = status["workers"]
    spoken = {"old": 1, "new": PROTOCOL_VERSION} if server == "new" else {"old": None, "new": None}
    assert {name: worker.get("protocol") for name, worker in workers.items()} == spoken
    assert ("speaks protocol 1" in ends.log("new")) == (server == "old")
    other = {"old": "new", "new": "old"}[server]
    found = ends.doctor(other)
    if other == "new":
        assert found["level"] == "warn"
        assert "protocol 1" in found["found"]
        assert f"the newest is protocol {PROTOCOL_VERSION}" in found["found"]
    for word in ("leave", "stop"):
        ends.tell(word)
    ends.await_end("old", "new", "server")
    assert ends.hashes("old") == ends.hashes("new")
    assert [version for version, _ in ends.hashes("old")] == list(range(1, ROUNDS + 1))
    assert "release-0.2" in ends.log("old")
    assert "release-0.2" not in ends.log("new")


@pytest.mark.row("F30")
@pytest.mark.slow
@pytest.mark.parametrize("founder", ["old", "new"])
def test_peers_of_both_releases_agree_in_a_run_that_either_founded(ends: Ends, founder: str) -> None:
    rules: dict[str, Any] = {"sync_every": 2, "codec": "int8", "min_peers": 3, "heartbeat_timeout": 20.0}
    ends.start(founder, "peer", "a", **rules, **({"protocol": 1} if founder == "new" else {}))
    ends.start("new", "peer", "b")
    ends.start("old", "peer", "c")
    said = ends.transport().status().get("protocol")
    assert said == (1 if founder == "new" else None)
    ends.await_rounds(*"abc")
    ends.await_end(*"abc")
    assert ends.hashes("a") == ends.hashes("b") == ends.hashes("c")
    assert [version for version, _ in ends.hashes("a")] == list(range(1, ROUNDS + 1))
    assert "release-0.2" in ends.log("c")


@pytest.mark.slow
def test_a_peer_of_release_0_2_is_told_why_it_cannot_join_a_run_of_protocol_2(ends: Ends) -> None:
    ends.start("new", "peer", "a", sync_every=2, min_peers=2)
    ends.start("old", "peer", "c")
    assert ends.processes["c"].wait(PATIENCE_S) != 0
    assert "this run speaks protocol 2, the peer that asks 1" in ends.log("c")
    assert "found the run with --protocol 1" in ends.log("c")
    assert ends.processes["a"].poll() is None


@pytest.mark.row("F30")
@pytest.mark.slow
def test_a_server_of_release_0_2_is_killed_and_restarted_as_todays_while_its_workers_wait(ends: Ends) -> None:
    """Its folder opens, and its workers go on: the old one in protocol 1, the new one in the newest from here on. When
    the codec changes, the old one keeps the one that it joined with."""
    place = {"port": free_port(), "save_dir": str(ends.folder / "run")}
    ends.tell("pause")
    ends.start("old", "server", "server", **place)
    ends.start("old", "worker", "old")
    ends.start("new", "worker", "new")
    ends.await_rounds("old", "new", rounds=2)
    ends.kill("server")
    ends.start("new", "server", "server", **place)
    operator = HttpTransport(f"127.0.0.1:{place['port']}", credentials=ends.folder / "server-credentials")
    wait_until(lambda: told(operator, Control(kind="plan", changes=Wishes(codec="int8"))), PATIENCE_S)
    (ends.folder / "pause").unlink()
    ends.await_rounds("old", "new")
    assert ends.transport().status()["plan"]["codec"] == "int8"  # type: ignore[index]
    assert ends.transport().status()["sync_round"] == ROUNDS
    for word in ("leave", "stop"):
        ends.tell(word)
    ends.await_end("old", "new", "server")
    assert ends.hashes("old") == ends.hashes("new")
    assert [version for version, _ in ends.hashes("old")] == list(range(1, ROUNDS + 1))
    spoken = re.findall(r"speaks protocol (\d), this end up to 2", ends.log("new"))
    assert spoken == ["1", "2"], ends.log("new")


@pytest.mark.row("F30")
@pytest.mark.slow
def test_a_peer_of_release_0_2_is_killed_and_restarted_as_todays_from_its_folder(ends: Ends) -> None:
    ends.tell("pause")
    ends.start("old", "peer", "a", sync_every=2, codec="int8", min_peers=3, heartbeat_timeout=60.0)
    ends.start("old", "peer", "b")
    ends.start("old", "peer", "c")
    ends.await_rounds(*"abc", rounds=2)
    ends.kill("c")
    ends.start("new", "peer", "c")
    (ends.folder / "pause").unlink()
    ends.await_rounds(*"abc")
    ends.await_end(*"abc")
    assert ends.hashes("a") == ends.hashes("b") == ends.hashes("c")
    assert [version for version, _ in ends.hashes("c")] == list(range(1, ROUNDS + 1))


# --- docs/howto/upgrade.md, in its order ------------------------------------------------------------------------------

SCRIPT = """
import hashlib, json, sys, time
import torch, outerstep
torch.manual_seed(1)
model = torch.nn.Linear(6, 5)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
print("outerstep from", outerstep.__file__, flush=True)
with open(sys.argv[1], "a", buffering=1) as notes, outerstep.attach(model, optimizer) as worker:
    noted = worker.sync_metrics["versions"][0]
    while not worker.should_stop:
        model(torch.randn(8, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        version = worker.sync_metrics["versions"][0]
        if version > noted:
            noted = version
            with worker.global_weights():
                weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
            notes.write(json.dumps({"version": version, "hash": hashlib.sha256(weights).hexdigest()}) + "\\n")
        time.sleep(0.01)
"""


class Upgrade(Ends):
    """A server and two workers, each started by the command that the page means, with either release."""

    def __init__(self, folder: Path, old: Path) -> None:
        super().__init__(folder, old)
        outerstep.save_model(torch.nn.Linear(6, 5), folder / "model")
        (folder / "train.py").write_text(SCRIPT)
        self.address = f"127.0.0.1:{free_port()}"
        self.run = folder / "outerstep-run"

    def environ(self, version: str) -> dict[str, str]:
        return {**super().environ(version), "OUTERSTEP_CREDENTIALS": str(self.folder / "credentials")}

    def begin(self, version: str, name: str, *words: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "outerstep", *words],
                stdout=log, stderr=subprocess.STDOUT, env=self.environ(version), cwd=self.folder,
            )  # fmt: skip

    def serve(self, version: str, *more: str) -> None:
        port = self.address.rpartition(":")[2]
        self.begin(version, "server", "server", "-m", "model", "-n", "2", "--sync-every", "4", "--port", port, *more)

    def train(self, version: str, name: str) -> None:
        place = ["--server", self.address, "--worker-id", name]
        self.begin(version, name, "worker", *place, "--", sys.executable, "train.py", f"{name}.jsonl")

    def stop(self, name: str) -> None:
        self.processes[name].send_signal(signal.SIGTERM)
        self.await_end(name)

    def type(self, version: str, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "outerstep", *words[:1], "--server", self.address, *words[1:]]
        return subprocess.run(
            command, env=self.environ(version), cwd=self.folder, capture_output=True, text=True, timeout=PATIENCE_S
        )

    def do(self, version: str, *words: str) -> str:
        done = self.type(version, *words)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def status(self, version: str) -> dict[str, Any]:
        shown: dict[str, Any] = json.loads(self.do(version, "status", "--json"))
        return shown

    def await_more(self, *names: str) -> None:
        """Two more rounds of each."""
        for name, there in [(name, len(self.hashes(name))) for name in names]:
            self.await_rounds(name, rounds=there + 2)

    def contents(self) -> dict[str, bytes]:
        files = [file for file in self.run.rglob("*") if file.is_file() and file.name != "lock"]
        return {str(file.relative_to(self.run)): file.read_bytes() for file in files}


@pytest.fixture
def upgrade(tmp_path: Path, release_0_2: Path) -> Iterator[Upgrade]:
    made = Upgrade(tmp_path, release_0_2)
    yield made
    made.close()


@pytest.mark.row("F30")
@pytest.mark.slow
def test_a_run_is_upgraded_machine_by_machine_while_it_trains(upgrade: Upgrade) -> None:
    """As docs/howto/upgrade.md says, with each row of its table that is about a server."""
    upgrade.serve("old")
    wait_until((upgrade.folder / "credentials" / "server" / f"join-{upgrade.address[10:]}.txt").exists, PATIENCE_S)
    for name in "ab":
        upgrade.train("old", name)
    upgrade.await_more("a", "b")
    run_id = upgrade.status("new")["run_id"]
    upgrade.do("new", "control", "plan", "--sync-every", "5")
    refused = upgrade.type("new", "control", "release", "a")
    assert refused.returncode == 2
    assert "Control 'release' belongs to protocol 2, and the other end speaks 1" in refused.stderr
    upgrade.await_more("a", "b")

    upgrade.stop("server")
    shutil.copytree(upgrade.run, upgrade.folder / "copy")
    upgrade.serve("new")
    upgrade.await_more("a", "b")
    shown = upgrade.status("old")
    assert shown["run_id"] == run_id
    assert shown["plan"]["sync_every"] == 5
    upgrade.do("old", "control", "plan", "--sync-every", "4")

    unknown = None  # of a worker that joined before the server was restarted
    for name, other, then in (("a", "b", {"a": 2, "b": unknown}), ("b", "a", {"a": 2, "b": 2})):
        upgrade.stop(name)
        upgrade.await_more(other)
        upgrade.train("new", name)
        upgrade.await_more(name, other)
        shown = upgrade.status("new")
        assert {name: worker["protocol"] for name, worker in shown["workers"].items()} == then
    assert (shown["run_id"], shown["plan"]["sync_every"]) == (run_id, 4)
    for name in "ab":
        assert ["release-0.2" in line for line in upgrade.log(name).splitlines() if "outerstep from" in line] == [1, 0]
        upgrade.stop(name)
    upgrade.stop("server")
    held = {name: dict(upgrade.hashes(name)) for name in "ab"}
    both = held["a"].keys() & held["b"].keys()
    assert len(both) >= 8
    assert {version: held["a"][version] for version in both} == {version: held["b"][version] for version in both}
    for name in "ab":
        versions = [version for version, _ in upgrade.hashes(name)]
        assert versions == sorted(set(versions)), "no round twice, and none undone"

    before = upgrade.contents()
    upgrade.serve("old")
    assert upgrade.processes["server"].wait(PATIENCE_S) == 2
    assert "use the version that wrote it" in upgrade.log("server")
    assert upgrade.contents() == before
    upgrade.serve("old", "--save-dir", "copy")  # the folder that was copied is one of 0.2
    wait_until(lambda: f"copy holds run {run_id}" in upgrade.log("server"), PATIENCE_S)
    wait_until(lambda: upgrade.type("old", "control", "save").returncode == 0, PATIENCE_S)
    upgrade.stop("server")
