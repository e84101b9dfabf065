"""One torch thread per test process: several on few cores stall each other, and sums keep one order. And one folder for
the credentials of all servers of a session: they make their certificate once, and their clients find it there, as those
of one user on one machine do. Signals are as they were after each test, and drawn cases the same each time, unless a
profile says otherwise. With `-n 2` all of this holds for each of the two processes."""

import functools
import gc
import http.server
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from outerstep.worker import DiLoCoWorker

torch.set_num_threads(1)

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # Whoever starts the tests in the background has Ctrl-C ignored, and what the tests start would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("ci", derandomize=True, print_blob=True)
settings.register_profile("quick", parent=settings.get_profile("ci"), max_examples=20)  # as `make quick` says
settings.register_profile("deep", max_examples=10_000, print_blob=True)  # by hand: --hypothesis-profile deep
settings.load_profile("ci")


# torchft's checkpoint server writes a line on stderr for each request, into the output of whichever test runs then.
http.server.BaseHTTPRequestHandler.log_message = lambda *_: None  # type: ignore[method-assign]


def pytest_collection_finish() -> None:
    """Modules and tests stay: the collector need not go through them again and again. That took a third of the time of
    tests that make much garbage, such as thousands of schedules."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Where the browser's tests have left what the page looked like."""
    if any("test_page_in_browser" in report.nodeid for report in terminalreporter.getreports("passed")):
        terminalreporter.write_line(f"screenshots of the page: {Path(__file__).parents[1] / 'build' / 'screenshots'}")


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


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """A worker that a test leaves running must not go on taking this process's signals."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _nobody_beats_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A test may leave a worker as it is, as if its process had been killed. But its thread would go on sending
    heartbeats, into whatever the tests after it put in the place of the transport: now and then one of those failed."""
    begun: list[DiLoCoWorker] = []
    start = DiLoCoWorker.start

    @functools.wraps(start)  # a page of the reference is compared with what the class says of itself
    def note(self: DiLoCoWorker) -> DiLoCoWorker:
        begun.append(self)
        return start(self)

    monkeypatch.setattr(DiLoCoWorker, "start", note)
    yield
    for worker in begun:
        worker._ending.set()
        worker._beat_now.set()
    for worker in begun:
        if worker._heart is not None:
            worker._heart.join(60.0)  # it may be in the middle of a beat
            assert not worker._heart.is_alive(), "its heartbeat does not end"


@pytest.fixture(scope="session", autouse=True)
def _no_run_is_left_here() -> Iterator[None]:
    """A server from the command line keeps its run in the working directory: tests start theirs in a folder of their
    own, so that none goes on with another's run."""
    place = Path.cwd() / "outerstep-run"
    was_there = place.exists()
    yield
    assert place.exists() == was_there
