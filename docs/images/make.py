"""The pictures of the page and of the terminal in the documentation, taken of real runs on this machine.

    python docs/images/make.py page        page-light, page-top, page-phone and page-dark: three workers train the
                                           demo's model, and one of them falls silent
    python docs/images/make.py terminal    terminal: `outerstep run` on two PCs, each a network namespace

They need Chromium and its driver, the packages of the tests, and for the terminal a Linux that lets users make
namespaces. Look at what they made.
"""

from __future__ import annotations

import contextlib
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "integration")]

from two_pcs import make_second_pc  # noqa: E402

from browser import Browser, open_browser  # noqa: E402
from outerstep.demo.model import build_model  # noqa: E402
from outerstep.demo.processes import Process, free_port, python_module, wait_for_server  # noqa: E402
from outerstep.model_folder import save_model  # noqa: E402
from outerstep.security import JOIN_VARIABLE, Credentials  # noqa: E402
from outerstep.wire.http_transport import HttpTransport  # noqa: E402
from support import wait_until  # noqa: E402

WORKERS = ("berlin", "osaka", "lima")
ROUNDS = 12
PATIENCE_S = 1800.0
COLUMNS, ROWS = 100, 45
WHITE = (222, 224, 228)
COLOURS = [
    (29, 31, 36),
    (235, 105, 100),
    (126, 200, 120),
    (226, 188, 95),
    (110, 165, 240),
    (200, 140, 220),
    (95, 195, 200),
]
THEME = TerminalTheme(COLOURS[0], WHITE, [*COLOURS, WHITE])
PAGE = """<!doctype html><meta charset="utf-8"><style>
body {{ margin: 0; padding: 14px; background: #fff; width: 892px; }}
figure {{ margin: 0 0 14px; padding: 10px 16px 12px; border-radius: 10px; background: #1d1f24; color: #dee0e4; }}
figure:last-child {{ margin: 0; }}
figcaption {{ font: bold 13px sans-serif; color: #9aa0aa; margin-bottom: 6px; }}
pre {{ font: 13.6px/19.2px "DejaVu Sans Mono", monospace; margin: 0; white-space: pre-wrap; word-break: break-all; }}
</style>{figures}"""


# --- the page ---------------------------------------------------------------------------------------------------------


def show_page(folder: Path) -> None:
    with a_run(folder) as (transport, workers):
        certificate = (Credentials(folder / "credentials").server_folder / "certificate.pem").read_bytes()
        with open_browser(folder / "profile", certificate) as browser:
            code = transport.page_link().code
            browser.driver.get(f"https://{transport.address}/page#{code}")
            wait_until(lambda: int(browser.text("#tiles dd") or 0) >= ROUNDS, PATIENCE_S)
            wait_until(lambda: "1 of 3" in browser.text("#fragments"), PATIENCE_S)
            rounds = "section[aria-labelledby=rounds-title]"
            browser.take_picture("page-light", HERE)
            browser.take_picture("page-top", HERE, until=rounds)
            take_phone(browser, "section[aria-labelledby=who-title]")
            browser.emulate(dark=True)
            silence(browser, workers[-1])
            browser.take_picture("page-dark", HERE, until=rounds)


@contextlib.contextmanager
def a_run(folder: Path) -> Iterator[tuple[HttpTransport, list[Process]]]:
    save_model(build_model(0), folder / "initial")
    credentials, port = folder / "credentials", free_port()
    command = python_module(
        "outerstep", "server", "-m", folder / "initial", "-n", len(WORKERS), "--port", port, "--sync-every", 10,
        "--save-dir", "run", "--remote-control", "--heartbeat-timeout", 60, "--outer-momentum", 0.5,
        "--outer-lr", 1.0,
    )  # fmt: skip
    server = Process("server", command, folder / "server.log", environ={"OUTERSTEP_CREDENTIALS": str(credentials)})
    workers = []
    try:
        transport = wait_for_server(server.start(), f"127.0.0.1:{port}", credentials)
        access = Credentials(credentials).find(f"127.0.0.1:{port}")
        assert access is not None
        for shard, name in enumerate(WORKERS):
            progress = ("--progress", folder / f"{name}.jsonl")
            command = python_module("outerstep.demo.train", "--shards", shard, "--steps", 1000, *progress)
            environ = {JOIN_VARIABLE: access.join_string, "OUTERSTEP_WORKER_ID": name}
            workers.append(Process(name, command, folder / f"{name}.log", environ=environ).start())
        yield transport, workers
    finally:
        for process in (*workers, server):
            process.kill()


def take_phone(browser: Browser, until: str) -> None:
    browser.emulate(phone=True)
    wait_until(lambda: browser.run("return innerWidth") == 390)
    time.sleep(1.0)  # until the charts have the new width
    browser.take_picture("page-phone", HERE, until=until)


def silence(browser: Browser, worker: Process) -> None:
    assert worker.child is not None
    worker.child.send_signal(signal.SIGSTOP)
    wait_until(lambda: f"{worker.name} has been silent for" in browser.text("#alerts"), PATIENCE_S)
    time.sleep(5.0)


# --- the terminal -----------------------------------------------------------------------------------------------------


class Screen:
    """A terminal of its own for one command, and all that it shows."""

    def __init__(self, shown: str, command: list[str], folder: Path) -> None:
        ours, theirs = pty.openpty()
        os.set_blocking(ours, True)
        folder.mkdir()
        environ = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(ROWS)}
        environ |= {"OUTERSTEP_CREDENTIALS": str(folder / "credentials"), "OMP_NUM_THREADS": "1"}
        environ["PATH"] = f"{Path(sys.executable).parent}:{environ['PATH']}"
        environ.pop("NO_COLOR", None)
        self.said = f"$ {shown}\r\n"
        self.child = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder, env=environ)
        os.close(theirs)
        self._ours = ours
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def wait(self) -> None:
        assert self.child.wait(PATIENCE_S) == 0, self.said
        self._reader.join()
        os.close(self._ours)

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # its other end is closed
            while data := os.read(self._ours, 65536):
                self.said += data.decode(errors="replace")

    def figure(self, title: str) -> str:
        """What stands there at the end. A line that was written over shows what came last."""
        plain = re.sub(r"\x1b\[[0-9;?]*[A-LN-Zac-ln-z]", "", self.said)  # colours stay; other orders go
        lines = [line.rstrip("\r").rpartition("\r")[2] for line in f"{plain.rstrip()}\n$ ".split("\n")]
        console = Console(record=True, width=10_000, file=open(os.devnull, "w"), color_system="truecolor")  # noqa: SIM115
        for line in lines:
            console.print(Text.from_ansi(line), soft_wrap=True, highlight=False)
        text = console.export_html(theme=THEME, inline_styles=True, code_format="{code}")
        return f"<figure><figcaption>{title}</figcaption><pre>{text}</pre></figure>"


def show_terminal(folder: Path) -> None:
    """Inside a namespace of its own."""
    script = ["python", "train.py", "--steps", "240"]
    (folder / "train.py").write_text((ROOT / "examples" / "two_pcs.py").read_text())
    keeper, enter = make_second_pc()
    words = ["outerstep", "run", "-n", "2", "--no-qr", "--worker-id", "den", "--", *script]
    one = Screen(shlex.join(words), ["sh", "-c", f"cp ../train.py . && exec {shlex.join(words)}"], folder / "first")
    pattern = re.compile(r'outerstep run --join "([^"]+)" -- ')
    wait_until(lambda: "waiting for 2 workers" in one.said, PATIENCE_S)
    found = pattern.search(one.said)
    assert found is not None
    words = ["outerstep", "run", "--join", found[1], "--worker-id", "loft", "--", *script]
    shown = shlex.join(words).replace(shlex.quote(found[1]), f'"{found[1]}"')
    command = [*enter, "sh", "-c", f"cp ../train.py . && exec {shlex.join(words)}"]
    two = Screen(shown, command, folder / "second")
    one.wait()
    two.wait()
    keeper.terminate()
    keeper.wait()
    (folder / "page.html").write_text(PAGE.format(figures=one.figure("first PC") + two.figure("second PC")))


def photograph(folder: Path) -> None:
    """Outside of it: Chromium wants a network."""
    identity = Credentials(folder / "credentials").server_identity()
    assert identity.fingerprint
    certificate = (Credentials(folder / "credentials").server_folder / "certificate.pem").read_bytes()
    with open_browser(folder / "profile", certificate) as browser:
        browser.driver.get((folder / "page.html").as_uri())
        browser.driver.set_window_size(920, 900)
        browser.take_picture("terminal", HERE, until="figure:last-of-type")


def main() -> None:
    what = sys.argv[1] if len(sys.argv) > 1 else ""
    if what == "inside":
        show_terminal(Path(sys.argv[2]))
        return
    with tempfile.TemporaryDirectory() as name:
        if what == "page":
            with contextlib.chdir(name):  # the page says where the run is saved
                show_page(Path(name))
        elif what == "terminal":
            inside = ["unshare", "--user", "--map-root-user", "--net", sys.executable, __file__, "inside", name]
            subprocess.run(inside, check=True)
            photograph(Path(name))
        else:
            sys.exit(f"say what to take: page or terminal, got {what!r}")


if __name__ == "__main__":
    main()
