"""The likeliest mistakes of somebody who types `outerstep run` for the first time: each is answered in one line, or is
none any more."""

from __future__ import annotations

import http.server
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import outerstep
from outerstep.cli import second_pc
from outerstep.cli.worker_names import take_name
from outerstep.errors import ManifestMismatch, OuterstepError
from outerstep.security import Credentials, parse_address
from outerstep.server.waiting import WaitingRoom
from outerstep.wire.http_transport import HttpTransport
from outerstep.worker.attach import _last_words
from ports import free_port
from sites import Site
from support import wait_until
from typed import typed

HERE = [sys.executable, "train.py"]


class Became(Exception):
    """This process would have become the script."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    made = Site(tmp_path_factory.mktemp("site"))
    yield made
    made.server.stop()


@pytest.fixture(autouse=True)
def _second_pc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a script, credentials of its own, and an end of every wait."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('no worker in here')\n")
    monkeypatch.setenv("OUTERSTEP_CREDENTIALS", str(tmp_path / "credentials"))
    for name in ("DILOCO_SERVER", "DILOCO_WORKER_ID", "OUTERSTEP_JOIN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(second_pc, "WAIT_S", 0.0)
    monkeypatch.setattr(second_pc, "ASK_EVERY_S", 0.01)

    def become(program: str, words: list[str], environ: dict[str, str]) -> None:
        Path(environ["OUTERSTEP_ATTACHED_FILE"]).unlink()
        raise Became(program, words, environ)

    monkeypatch.setattr(os, "execve", become)


def told(*words: str) -> str:
    """The one line that answers `outerstep run …`."""
    result = typed(["run", *words], env={"NO_COLOR": "1"})
    assert isinstance(result.exception, OuterstepError), (result.exception, result.output)
    assert "\n" not in str(result.exception)
    return str(result.exception)


def joined(line: str) -> dict[str, str]:
    """The script's environment."""
    result = typed(["run", "--join", line, "--", *HERE])
    assert isinstance(result.exception, Became), (result.exception, result.output)
    environ: dict[str, str] = result.exception.args[2]
    return environ


class TestTheLine:
    def test_pasted_with_line_breaks_and_quotes_it_joins_all_the_same(self, site: Site, tmp_path: Path) -> None:
        line = site.server.access.join_string
        environ = joined(f"“{line[:60]}\n   {line[60:]}”")
        assert environ["DILOCO_SERVER"] == site.address
        assert environ["OUTERSTEP_JOIN"] == line
        assert site.address in Credentials(tmp_path / "credentials").known()  # for `outerstep status`

    def test_cut_off(self, site: Site) -> None:
        line = site.server.access.join_string
        assert "64 hexadecimal digits, got 44 characters: was it cut off?" in told("--join", line[:-20], "--", *HERE)

    def test_empty(self) -> None:
        assert "--join is empty: paste the line" in told("--join", "", "--", *HERE)

    def test_old_because_the_token_was_replaced(self, site: Site) -> None:
        line = replace(site.server.access, token="run-" + "x" * 43).join_string
        assert "this token is not valid here, or no longer" in told("--join", line, "--", *HERE)

    def test_old_because_the_server_was_set_up_again(self, site: Site) -> None:
        line = replace(site.server.access, fingerprint="ab" * 32).join_string
        assert "shows another certificate than the one known here" in told("--join", line, "--", *HERE)

    def test_of_a_port_that_is_something_elses(self, site: Site) -> None:
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler) as web:
            threading.Thread(target=web.serve_forever, daemon=True).start()
            line = replace(site.server.access, port=web.server_port).join_string
            assert "does not speak TLS" in told("--join", line, "--", *HERE)
            web.shutdown()

    def test_with_settings_of_the_first_pc(self, site: Site) -> None:
        line = site.server.access.join_string
        said = told("-n", "2", "--join", line, "--", *HERE)
        assert said.startswith("--num-workers is for the first PC")


class TestTheOtherPc:
    def test_not_running_yet_or_behind_a_firewall(self, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
        line = replace(site.server.access, port=free_port()).join_string
        monkeypatch.setattr(second_pc, "WAIT_S", 0.05)
        result = typed(["run", "--join", line, "--", *HERE])
        assert "is `outerstep run` running there, and does its firewall let this port in?" in result.output
        assert "the same command tries again" in str(result.exception)

    def test_started_but_its_script_has_not_attached_yet(self, site: Site, tmp_path: Path) -> None:
        identity = site.credentials.server_identity()
        with WaitingRoom("127.0.0.1", 0, identity, "the run has not begun: …") as room:
            line = replace(site.server.access, port=room.port).join_string
            assert "the run has not begun" in told("--join", line, "--", *HERE)
            wrong = replace(site.server.access, port=room.port, token="run-" + "x" * 43).join_string
            assert "this token is not valid here" in told("--join", wrong, "--", *HERE)
            stored = typed(["join", line])
            assert stored.exit_code == 0, stored.output
            assert "answers: the run has not begun" in stored.output
            transport = HttpTransport(line)
            with pytest.raises(OuterstepError, match="has not begun"):
                transport.status()
            transport.close()

    def test_another_model_is_named_in_one_line(self, site: Site, capsys: pytest.CaptureFixture[str]) -> None:
        model = torch.nn.Linear(3, 2)
        worker = outerstep.DiLoCoWorker(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            site.address,
            credentials=str(site.credentials.folder),
        )
        with pytest.raises(ManifestMismatch) as refusal:
            worker.start()
        _last_words(ManifestMismatch, refusal.value, None)
        [line] = capsys.readouterr().err.splitlines()
        assert "'weight': got [2, 3], run has [5, 6]" in line

    def test_two_workers_on_one_pc_have_two_names_and_a_restart_its_own(self, tmp_path: Path) -> None:
        names = [take_name(str(tmp_path / "c"), keep=False) for _ in range(2)]
        assert names[0].startswith(f"{socket.gethostname()}-")
        assert names[1] == f"{names[0]}-2"
        ask = f"from outerstep.cli.worker_names import take_name; print(take_name({str(tmp_path / 'd')!r}, keep=False))"
        asked = [subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True) for _ in range(2)]
        assert asked[0].stdout == asked[1].stdout != ""
        assert asked[0].stdout.strip() not in names  # another user's


class TestTheCommand:
    def test_a_script_that_is_not_there(self) -> None:
        said = told("--", sys.executable, "trian.py")
        assert "there is no 'trian.py' in" in said
        assert "did you mean 'train.py'?" in said

    def test_a_script_without_its_python(self) -> None:
        assert told("--", "train.py", "--lr", "3") == "'train.py' is no program: write `-- python train.py --lr 3`"

    def test_a_program_that_is_not_there(self) -> None:
        assert "command not found: 'pyton'" in told("-n", "2", "pyton", "train.py")  # and the -- may be forgotten

    def test_a_python_that_has_no_outerstep(self, tmp_path: Path) -> None:
        other = tmp_path / "python"
        other.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
        other.chmod(0o755)
        said = told("--", str(other), "train.py")
        assert f"is {other}, which has no outerstep: write `-- {sys.executable} train.py`" in said

    def test_a_folder_in_which_a_run_is_running(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "temporary").mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
        running = Site(tmp_path / "other", save_dir=str(tmp_path / "outerstep-run"))
        try:
            assert "belongs to a server that is running" in told("--", *HERE)
        finally:
            running.server.stop()
        assert list((tmp_path / "temporary").iterdir()) == [], "it leaves nothing behind"

    def test_the_same_command_once_more_while_the_first_waits_for_its_script(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """The second would take away the folder that the first one's script puts the model into."""
        once_more = "from pathlib import Path; from outerstep.durable.run_folder import RunFolder"
        (tmp_path / "train.py").write_text(f"{once_more}\nRunFolder(Path('outerstep-run'))\n")
        result = typed(["run", "--host", "127.0.0.1", "--port", str(free_port()), "--", *HERE])
        assert result.exit_code == 1  # the script's own
        assert "belongs to a server that is running" in capfd.readouterr().err

    def test_a_port_that_is_taken(self, site: Site) -> None:
        port = parse_address(site.address)[1]
        said = told("--host", "127.0.0.1", "--port", str(port), "--", *HERE)
        assert "Address already in use; choose another host or port" in said

    def test_a_script_that_never_attaches(self, capfd: pytest.CaptureFixture[str]) -> None:
        result = typed(["run", "-n", "3", "--host", "127.0.0.1", "--port", str(free_port()), "--", *HERE])
        said = result.output + capfd.readouterr().err
        assert result.exit_code == 0  # the script's own
        assert "never came to outerstep.attach, which brings the model: no run was begun" in said
        assert "The first round waits for 2 more (-n 3)." in said  # and what -n means


@pytest.mark.slow
class TestOnTheTerminal:
    """The installed command, as a process: what it writes to stderr is one line, and a hint at most."""

    COMMAND = os.path.join(os.path.dirname(sys.executable), "outerstep")

    def type(self, *words: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "NO_COLOR": "1", "COLUMNS": "60"}  # narrow: the line is not broken in two
        words = (self.COMMAND, "run", *words)
        return subprocess.run(words, env=env, capture_output=True, text=True, timeout=120, check=False)

    def told(self, *words: str) -> str:
        done = self.type(*words)
        lines = done.stderr.splitlines()
        assert (done.returncode, done.stdout) == (2, ""), done
        assert [line.partition(": ")[0] for line in lines] in (["error"], ["error", "hint"]), done.stderr
        return done.stderr

    def test_a_line_that_is_cut_off_empty_or_old(self, site: Site) -> None:
        access = site.server.access
        old_token = replace(access, token="run-" + "x" * 43).join_string
        old_certificate = replace(access, fingerprint="ab" * 32).join_string
        for line, said in (
            (access.join_string[:-20], "was it cut off?"),
            ("", "--join is empty"),
            (old_token, "this token is not valid here, or no longer"),
            (old_certificate, "shows another certificate than the one known here"),
        ):
            shown = self.told("--join", line, "--", *HERE)
            assert said in shown
            assert "run-" not in shown, "no token is shown"

    def test_a_line_with_flags_of_the_first_pc(self, site: Site) -> None:
        line = site.server.access.join_string
        assert "--num-workers is for the first PC" in self.told("-n", "2", "--join", line, "--", *HERE)

    def test_a_port_of_something_else(self, site: Site) -> None:
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler) as web:
            threading.Thread(target=web.serve_forever, daemon=True).start()
            line = replace(site.server.access, port=web.server_port).join_string
            assert "does not speak TLS" in self.told("--join", line, "--", *HERE)
            web.shutdown()

    def test_a_first_pc_that_is_not_there_is_one_line_and_ctrl_c_ends_the_wait(
        self, site: Site, tmp_path: Path
    ) -> None:
        line = replace(site.server.access, port=free_port()).join_string
        with (tmp_path / "stderr").open("wb") as out:
            waiting = subprocess.Popen([self.COMMAND, "run", "--join", line, "--", *HERE], stdout=out, stderr=out)
        wait_until(lambda: b"let this port in?" in (tmp_path / "stderr").read_bytes() or waiting.poll() is not None)
        waiting.send_signal(signal.SIGINT)
        assert waiting.wait(60) == 130
        [said] = (tmp_path / "stderr").read_text().splitlines()
        assert "Waiting up to 600 s for the first PC: is `outerstep run` running there, and does its" in said

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (("--", sys.executable, "trian.py"), "did you mean 'train.py'?"),
            (("--", "train.py"), "'train.py' is no program: write `-- python train.py`"),
            (("-n", "2", "pyton", "train.py"), "command not found: 'pyton'"),
            (("--", "outerstep", "run"), "the training command is missing: after -- comes yours"),
        ],
    )
    def test_a_training_command_that_is_none(self, words: tuple[str, ...], said: str) -> None:
        assert said in self.told(*words)

    def test_a_python_without_outerstep(self, tmp_path: Path) -> None:
        other = tmp_path / "python"
        other.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
        other.chmod(0o755)
        assert "which has no outerstep" in self.told("--", str(other), "train.py")

    def test_a_folder_or_a_port_that_is_in_use(self, site: Site, tmp_path: Path) -> None:
        port = parse_address(site.address)[1]
        said = self.told("--host", "127.0.0.1", "--port", str(port), "--", *HERE)
        assert "Address already in use; choose another host or port" in said
        running = Site(tmp_path / "other", save_dir=str(tmp_path / "outerstep-run"))
        try:
            assert "belongs to a server that is running" in self.told("--", *HERE)
        finally:
            running.server.stop()

    def test_a_script_that_never_attaches(self) -> None:
        done = self.type("--host", "127.0.0.1", "--port", str(free_port()), "--", *HERE)
        assert done.returncode == 0, "the script's own"
        assert done.stdout == "no worker in here\n"
        waits, ended = done.stderr.splitlines()
        assert waits.startswith("The first round waits for one more (-n 2).")
        assert ended.startswith("The script ended (exit code 0) and never came to outerstep.attach")
