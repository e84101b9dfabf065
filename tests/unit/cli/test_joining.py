"""`outerstep join`, `outerstep token`, and what the other commands do with a join string: never show it, pass it on."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from outerstep.errors import ConfigError, TransportError, Unauthorized
from outerstep.security import Access, Credentials, TokenGuard, parse_join_string
from outerstep.security.tokens import new_token
from outerstep.server import DiLoCoServer
from outerstep.topology.gossip.node import Node, NodeSettings
from support import tiny_model
from typed import typed

PIN = "ab" * 32
TOKEN = new_token("run")
GPU = Access("gpu", 8512, TOKEN, PIN)


@pytest.fixture(autouse=True)
def _nothing_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    for name in os.environ:
        if name.startswith(("DILOCO_", "OUTERSTEP_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "elsewhere"))


def run(line: str, stdin: str | None = None) -> str:
    result = typed(shlex.split(line), input=stdin, env={"COLUMNS": "200", "NO_COLOR": "1"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def server(tmp_path: Path) -> Iterator[DiLoCoServer]:
    with DiLoCoServer(tiny_model().state_dict(), 1, port=0, credentials=str(tmp_path / "here")) as made:
        yield made


class TestJoin:
    def test_it_checks_keeps_and_says_what_to_type_next(self, server: DiLoCoServer) -> None:
        address = server.address
        said = run("join -", server.access.join_string + "\n")
        assert f"{address} answers: run {server.run_id}, round 0" in said
        assert f"outerstep worker --server {address} -- python train.py" in said
        assert server.access.token not in said
        assert f"run {server.run_id}" in run(f"status --server {address}")

    def test_a_peers_string_is_taken_too(self, tmp_path: Path) -> None:
        with Node(NodeSettings("first", "127.0.0.1:0", credentials=str(tmp_path / "here"))) as node:
            said = run("join -", node.join_string + "\n")
        assert f"{node.address} answers: peer first of a run that has not begun" in said
        assert f"outerstep peer --join {node.address} -- python train.py" in said

    @pytest.mark.parametrize("nothing", ["''", "' '"])
    def test_a_peer_that_is_to_join_nothing_does_not_found_a_run_instead(self, nothing: str) -> None:
        with pytest.raises(ConfigError, match=r"--join is empty: .* leave it out to found a run"):
            run(f"peer --join {nothing} -- {sys.executable} -c pass")

    @pytest.mark.parametrize("how", ["argument", "variable", "standard input"])
    def test_the_string_comes_as_one_likes(self, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
        if how == "argument":
            run(f"join --no-check '{GPU.join_string}'")
        elif how == "variable":
            monkeypatch.setenv("OUTERSTEP_JOIN", GPU.join_string)
            run("join --no-check")
            monkeypatch.delenv("OUTERSTEP_JOIN")
        else:
            run("join --no-check -", f"{GPU.join_string}\n")
        assert Credentials().find("gpu") == GPU

    def test_without_any_it_says_how(self) -> None:
        with pytest.raises(ConfigError, match="no join string: pass `-`"):
            run("join", "")

    def test_what_the_server_refuses_is_not_kept(self, server: DiLoCoServer) -> None:
        old = server.access.join_string
        server._credentials.tokens.rotate("run")
        with pytest.raises(Unauthorized, match="not valid here, or no longer"):
            run("join -", old)
        assert Credentials().known() == {}

    def test_a_server_that_is_not_there_is_not_kept_unless_one_insists(self, server: DiLoCoServer) -> None:
        string = server.access.join_string
        server.stop()
        with pytest.raises(TransportError, match="Nothing was stored; --no-check stores it"):
            run("join -", string)
        assert Credentials().known() == {}
        run("join --no-check -", string)
        assert list(Credentials().known()) == [server.address]

    def test_a_mangled_string_is_refused_without_showing_it(self) -> None:
        with pytest.raises(ConfigError, match="was it cut off") as refused:
            run("join -", GPU.join_string[:-5])
        assert TOKEN[4:] not in str(refused.value)


class TestToken:
    @pytest.fixture
    def here(self, tmp_path: Path) -> Credentials:
        credentials = Credentials(tmp_path / "here")
        identity = credentials.server_identity()
        access = Access("10.0.0.1", 8600, identity.tokens.load().run, identity.fingerprint)
        credentials.write_join_file(access)
        return credentials

    def token(self, here: Credentials, line: str) -> str:
        return run(f"token {line} --credentials {here.folder}")

    def test_show_prints_the_join_string_of_each_port(self, here: Credentials) -> None:
        [(_, access)] = here.join_files()
        assert self.token(here, "show") == f"{access.join_string}\n"
        other = parse_join_string(self.token(here, "show --address gpu:9000"))
        assert (other.address, other.token, other.fingerprint) == ("gpu:9000", access.token, access.fingerprint)
        admin = parse_join_string(self.token(here, "show --admin"))
        assert (admin.token, admin.admin) == ("", here.tokens.load().admin)

    def test_rotate_replaces_the_string_everywhere(self, here: Credentials) -> None:
        before = here.tokens.load()
        printed = parse_join_string(self.token(here, "rotate"))
        after = here.tokens.load()
        assert printed.token == after.run != before.run
        assert after.admin == before.admin
        assert here.join_files()[0][1] == printed
        admin = parse_join_string(self.token(here, "rotate --admin"))
        assert admin.admin == here.tokens.load().admin != before.admin
        assert here.tokens.load().run == after.run

    def test_a_worker_gets_one_of_its_own_and_loses_it(self, here: Credentials) -> None:
        said = self.token(here, "new --worker left").splitlines()
        assert parse_join_string(said[0]).token.startswith("worker-")
        assert "--worker-id left" in said[1]
        assert self.token(here, "list") == "left  join,read  for worker left\n"
        assert "is revoked" in self.token(here, "revoke --worker left")
        assert self.token(here, "list") == ""
        with pytest.raises(ConfigError, match="no token of the name 'left'"):
            self.token(here, "revoke --worker left")

    def test_a_named_one_has_rights_and_an_end(self, here: Credentials) -> None:
        [line] = self.token(here, "new dashboard --rights read --expires 30d").splitlines()
        assert parse_join_string(line).token.startswith("run-")
        assert re.fullmatch(r"dashboard  read  until \d{4}-\d\d-\d\d \d\d:\d\d UTC\n", self.token(here, "list"))
        [orders] = self.token(here, "new shift --rights control").splitlines()
        assert parse_join_string(orders).admin.startswith("admin-")

    def test_a_rotation_may_overlap(self, here: Credentials) -> None:
        before = here.tokens.load().run
        self.token(here, "rotate --overlap 2h")
        assert TokenGuard(here.tokens).admit({"authorization": f"Bearer {before}"}).name == "run"
        assert "run  replaced, valid until" in self.token(here, "list")
        self.token(here, "new guest")
        assert parse_join_string(self.token(here, "rotate guest")).token.startswith("run-")

    @pytest.mark.parametrize(
        ("line", "why"),
        [
            ("new", "needs a NAME"),
            ("new guest --rights write", "a right is join, read or control, got 'write'"),
            ("new guest --expires tomorrow", "--expires must be a number with s, m, h or d"),
            ("rotate guest", "no token of the name 'guest'"),
            ("rotate guest --admin", "one token at a time"),
            ("rotate --overlap 1", "--overlap must be a number"),
            ("revoke", "which one"),
        ],
    )
    def test_what_it_cannot_do_it_says(self, here: Credentials, line: str, why: str) -> None:
        with pytest.raises(ConfigError, match=re.escape(why)):
            self.token(here, line)

    def test_where_no_server_was_started_it_says_so(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="no server has been started with the credentials in"):
            run("token show")


class TestJoinStringsElsewhere:
    def test_config_show_shows_no_token(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OUTERSTEP_JOIN", GPU.join_string)
        for line in ("config show", "config show --json", "config show worker", "config show worker --json"):
            said = run(line)
            assert TOKEN[4:] not in said
            assert "gpu:8512" in said
        assert "OUTERSTEP_JOIN" in run("config show worker")

    @pytest.mark.parametrize("how", ["flag", "variable", "file"])
    def test_a_worker_passes_it_on_under_a_name_of_its_own(self, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
        handed: dict[str, str] = {}
        typed: list[str] = []

        def execve(program: str, words: list[str], environ: dict[str, str]) -> None:
            typed.extend(words)
            handed.update(environ)

        monkeypatch.setattr("os.execve", execve)
        monkeypatch.setattr("outerstep.cli.worker.check_server", lambda server, credentials, worker_id: "")
        monkeypatch.setattr("outerstep.cli.worker.promise", lambda message: "")
        flag = ""
        if how == "flag":
            flag = f"--server '{GPU.join_string}'"
        elif how == "variable":
            monkeypatch.setenv("OUTERSTEP_JOIN", GPU.join_string)
        else:
            Path("outerstep.toml").write_text(f'[worker]\nserver_addr = "{GPU.join_string}"\n')
        run(f"worker {flag} -- {sys.executable} train.py")
        assert handed["DILOCO_SERVER"] == "gpu:8512"
        assert handed["OUTERSTEP_JOIN"] == GPU.join_string
        assert TOKEN not in " ".join(typed)
        assert Credentials(environ=handed).find(handed["DILOCO_SERVER"]) == GPU  # what attach() does in the script

    def test_two_variables_that_contradict_each_other_are_named_without_the_token(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("DILOCO_SERVER", GPU.join_string)
        monkeypatch.setenv("OUTERSTEP_SERVER_ADDR", "gpu:8513")
        with pytest.raises(ConfigError, match="contradict each other") as refused:
            run("config show worker")
        assert TOKEN[4:] not in str(refused.value)
        assert "gpu:8513" in str(refused.value)
