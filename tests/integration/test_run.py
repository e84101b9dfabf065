"""`outerstep run`: a whole run in one command on each PC."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from outerstep.cli.qr import qr_code
from outerstep.demo.sites import UNSHARE
from outerstep.model_folder import load_state_dict
from outerstep.security import parse_join_string
from pcs import Pc
from ports import free_port
from support import assert_same, wait_until

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "two_pcs.py"
BIN = str(Path(sys.executable).parent)

SCRIPT = """
import pathlib, sys, time
import torch, outerstep

torch.manual_seed(len(sys.argv[1]))
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with outerstep.attach(model, optimizer, sync_every=5) as worker:
    pathlib.Path("first-weights").write_text(str(model.weight.tolist()))
    while not worker.should_stop and not pathlib.Path("enough").exists():
        model(torch.ones(1, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.01)
        if pathlib.Path("fail").exists():
            sys.exit(7)
outerstep.save_model(model, "trained")
"""


def type_on_two_pcs(folder: Path, mode: str, *options: str) -> tuple[str, str]:
    """The line, and what the first PC's terminal showed, without its colours."""
    for name in ("first", "second"):
        (folder / name).mkdir()
    driver = Path(__file__).with_name("two_pcs.py")
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{BIN}:{os.environ['PATH']}"}
    words = [*UNSHARE, sys.executable, str(driver), str(folder), mode, str(EXAMPLE), *options]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=800)
    assert "first 0 second 0" in done.stdout, (done.stdout, done.stderr, _logs(folder))
    shown = (folder / "first.log").read_text()
    return (folder / "line.txt").read_text(), re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", shown)


@pytest.mark.timeout(900)
def test_two_pcs_on_a_cable_without_a_default_route_train_one_model(tmp_path: Path) -> None:
    """Two commands after the installation; the second is a line to paste."""
    line, first = type_on_two_pcs(tmp_path, "paste", "--steps", "100")
    assert "@10.88.0.1:8512#" in line
    assert re.search(r"round \d+ · \S+ \+ \S+ · ", first), first  # both were in one
    trained = [load_state_dict(tmp_path / name / "trained") for name in ("first", "second")]
    assert_same(*trained)
    assert_same(trained[0], load_state_dict(tmp_path / "first" / "outerstep-run" / "latest"))
    assert "The model of round" in first
    assert "▀" not in first, "a terminal without room for a QR code shows none"


@pytest.mark.timeout(900)
def test_a_pc_that_knows_the_run_finds_it_on_the_cable_and_no_frame_holds_the_token(tmp_path: Path) -> None:
    line, first = type_on_two_pcs(tmp_path, "discover", "--steps", "60")
    join_string = shlex.split(line)[3]
    access = parse_join_string(join_string)
    assert "This network is told where the server is" in first
    assert "found 10.88.0.1:8512, which is known here" in (tmp_path / "second.log").read_text()

    frames = (tmp_path / "frames.bin").read_bytes()
    assert b"_outerstep" in frames
    assert str(access.fingerprint).encode() in frames, "the announcement was heard"
    assert access.token is not None
    secrets = {access.token.encode(), access.token.removeprefix("run-").encode()}
    assert not any(secret in frames for secret in secrets), "neither announced nor sent in the clear"

    drawn = qr_code(line, (120, 80))
    assert drawn
    shown = [row.rstrip() for row in first.splitlines()]
    expected = [row.rstrip() for row in re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", drawn).splitlines()]
    at = shown.index(next(row for row in expected if row))
    assert shown[at : at + 10] == [row for row in expected if row][:10], "the code of the very line"


def _logs(folder: Path) -> list[str]:
    return [file.read_text() for file in folder.glob("*.log")]


@pytest.fixture
def pcs(tmp_path: Path) -> Iterator[tuple[Pc, Pc]]:
    port = free_port()
    made = [Pc(tmp_path / name, port, SCRIPT, name) for name in ("first", "the-second")]
    yield made[0], made[1]
    for pc in made:
        pc.end()


def test_ctrl_c_ends_both_and_saves_and_the_same_command_resumes_also_after_a_crash(pcs: tuple[Pc, Pc]) -> None:
    pc, other = pcs
    first = pc.run()
    second = other.join(pc)
    other.await_said("round 2 ·", second)
    first.send_signal(signal.SIGINT)
    assert first.wait(120) == 0, pc.said()  # the script's own: its loop looks at should_stop
    assert second.wait(120) == 0, other.said()
    latest = pc.folder / "outerstep-run" / "latest"
    saved = load_state_dict(latest)
    trained = [load_state_dict(each.folder / "trained") for each in pcs]
    assert any(torch.equal(one["weight"], saved["weight"]) for one in trained)  # whoever was in the last round
    assert f"is in {Path('outerstep-run') / 'latest'}. The same command resumes the run." in pc.said()
    begun = [(each.folder / "first-weights").read_text() for each in pcs]
    assert begun[0] == begun[1]  # the first script's, though the second had made others

    pc.log.unlink()
    resumed = pc.run()
    pc.await_said(" · ", resumed)
    assert "The run goes on at round" in pc.said()
    given = str(saved["weight"].tolist())  # the run goes on, and `latest` with it
    assert (pc.folder / "first-weights").read_text() == given  # and not those that the script made
    resumed.kill()  # a crash: the script is told, and ends by itself
    wait_until(lambda: not pc.script_pids())

    pc.log.unlink()
    (pc.folder / "fail").touch()
    third = pc.run()
    assert third.wait(120) == 7, pc.said()  # the script's own code
    assert "The script here ended with exit code 7" in pc.said()
    assert "goes on at round" in pc.said()
