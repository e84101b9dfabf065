"""One torch thread per test process: several on few cores stall each other, and sums keep one order. And one folder for
the credentials of all servers of a session: they make their certificate once, and their clients find it there, as those
of one user on one machine do."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _credentials() -> Iterator[None]:
    """By the standard variable, which the tests that clear ours for their processes leave alone."""
    before = os.environ.get("XDG_CONFIG_HOME")
    with tempfile.TemporaryDirectory(prefix="outerstep-credentials-") as folder:
        os.environ["XDG_CONFIG_HOME"] = folder
        yield
    if before is None:
        del os.environ["XDG_CONFIG_HOME"]
    else:
        os.environ["XDG_CONFIG_HOME"] = before


@pytest.fixture(scope="session", autouse=True)
def _no_run_is_left_here() -> Iterator[None]:
    """A server from the command line keeps its run in the working directory: tests start theirs in a folder of their
    own, so that none goes on with another's run."""
    place = Path.cwd() / "outerstep-run"
    was_there = place.exists()
    yield
    assert place.exists() == was_there
