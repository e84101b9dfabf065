"""A process that was forked off with its imports done is one like any other: it does, says and ends the same."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import nursery
from support import wait_until

pytestmark = pytest.mark.slow

PROGRAMS = {
    "says where it is": "import os, sys; print(sys.argv[1:], __name__, os.getcwd(), os.environ['GREETING'])",
    "to stderr": "import sys; print('a mistake', file=sys.stderr)",
    "with a code": "raise SystemExit(7)",
    "with words": "raise SystemExit('no')",
    "at once": "import os; os._exit(3)",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "interrupted": "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(60)",
    "behind its threads": (
        "import atexit, threading, time\natexit.register(print, 'last')\n"
        "threading.Thread(target=lambda: (time.sleep(0.1), print('first'))).start()"
    ),
}


@pytest.mark.parametrize("how", PROGRAMS)
def test_it_ends_as_it_would_from_scratch(how: str, tmp_path: Path) -> None:
    script, file, folder = tmp_path / "program.py", tmp_path / "log", tmp_path / "folder"
    folder.mkdir()
    script.write_text(PROGRAMS[how])
    environ = {**os.environ, "GREETING": "hello"}
    with file.open("wb") as log:
        child = nursery.start([script, "one", "two"], log=log, env=environ, cwd=folder)
    code = child.wait(60)
    usual = subprocess.run([sys.executable, script, "one", "two"], env=environ, cwd=folder, capture_output=True)
    assert code == child.poll() == usual.returncode
    said = (usual.stdout + usual.stderr).decode().splitlines()
    assert file.read_text().splitlines()[-1:] == said[-1:]  # before it a traceback has lines of the nursery's


def test_an_exception_is_told_and_is_exit_code_1(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("{}['luck']")
    with (tmp_path / "log").open("wb") as log:
        assert nursery.start([tmp_path / "program.py"], log=log, env=os.environ).wait(60) == 1
    assert (tmp_path / "log").read_text().endswith("KeyError: 'luck'\n")


def test_a_module_is_found_by_its_name(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        assert nursery.start(["-m", "outerstep", "--version"], log=log, env=os.environ).wait(60) == 0
    assert (tmp_path / "log").read_text().startswith("outerstep 0.")


def test_it_can_be_stopped_awaited_and_ended_by_signals(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import time\nwhile True: print('.', flush=True) or time.sleep(0.01)")
    with (tmp_path / "log").open("wb") as log:
        child = nursery.start([tmp_path / "program.py"], log=log, env=os.environ)
    wait_until((tmp_path / "log").read_text)
    child.send_signal(signal.SIGSTOP)
    wait_until(lambda: "\nState:\tT" in Path(f"/proc/{child.pid}/status").read_text())
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.01)
    child.send_signal(signal.SIGCONT)
    child.terminate()
    assert child.wait(60) == -signal.SIGTERM
    child.kill()  # it is gone, and nobody else gets the signal
