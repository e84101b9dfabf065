"""The script beside the server of `outerstep run`: told to stop at any moment, it does not outlive the command."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from outerstep.cli.first_pc import FirstScript

SAYS_SO = "import sys, time; open(sys.argv[1], 'w').close(); time.sleep(60)"


@pytest.fixture
def script(tmp_path: Path) -> Iterator[FirstScript]:
    made = FirstScript(sys.executable, ["python", "-c", SAYS_SO, str(tmp_path / "began")])
    yield made
    made.end()


def awaited(script: FirstScript) -> int:
    for _ in range(3000):
        if script.code is not None:
            return script.code
        time.sleep(0.01)
    raise AssertionError("it runs on")


def test_one_that_was_told_to_stop_before_it_was_started_is_not_started(script: FirstScript, tmp_path: Path) -> None:
    """The server of a resumed run is up before its script is: a stop in between would leave the script looking for a
    server that is gone."""
    script.send(signal.SIGTERM)
    script.start(dict(os.environ))
    assert awaited(script) == 128 + signal.SIGTERM
    assert not (tmp_path / "began").exists()


def test_one_that_runs_hears_it(script: FirstScript, tmp_path: Path) -> None:
    script.start(dict(os.environ))
    while not (tmp_path / "began").exists():
        assert script.code is None
        time.sleep(0.01)
    script.send(signal.SIGTERM)
    assert awaited(script) == 128 + signal.SIGTERM
