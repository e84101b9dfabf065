"""What does the page cost, open in ten browsers?

A server (a process, TLS and tokens as always) and two workers that train a small model and agree about once a second.
In turn nobody watches, and ten readers have the live stream open, each over TLS with a session of its own, and read all
that comes. Of each window: the CPU time of the server's process, by the kernel, and how many rounds closed. The turns
are interleaved, so that what else the machine does meanwhile falls on both.

    python bench/page.py                      # four turns of each kind, 30 s each
    python bench/page.py --quick              # one of each, 10 s
    python bench/page.py --json out.json      # all of it, with the machine and the commit
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from outerstep.wire.http_transport import HttpTransport
from provenance import provenance

SCRIPT = """
import sys, time, torch, outerstep
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
if len(sys.argv) > 1:
    outerstep.save_model(model, sys.argv[1])
    sys.exit()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with outerstep.attach(model, optimizer) as worker:
    while True:
        inputs = torch.randn(16, 64)
        loss = (model(inputs) - inputs.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        worker.last_loss = loss
        time.sleep(0.05)
"""
# The server as `python -m outerstep`, except that the kernel knows its threads by their names.
NAMED = """
import threading
run = threading.Thread.run
def named_run(self):
    with open(f"/proc/self/task/{threading.get_native_id()}/comm", "w") as comm:
        comm.write(self.name[:15])
    run(self)
threading.Thread.run = named_run
from outerstep.cli import main
main()
"""
PAGE_THREAD = "outerstep-page"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--readers", type=int, default=10)
    parser.add_argument("--turns", type=int, default=4, help="of each kind")
    parser.add_argument("--seconds", type=float, default=30.0, help="per turn")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    turns, seconds = (1, 10.0) if options.quick else (options.turns, options.seconds)
    about = provenance("torch")
    with tempfile.TemporaryDirectory() as name, a_run(Path(name)) as (server, transport):
        measured = [
            window(server, transport, readers, seconds) for _ in range(turns) for readers in (0, options.readers)
        ]
    for one in measured:
        print(
            f"{one['readers']:2d} readers: {one['cpu_share']:7.3%} of a core, {one['page_share']:7.3%} of it the "
            f"page's thread; {one['rounds_per_minute']:5.1f} rounds a minute, "
            f"{one['bytes_per_reader_s']:6.0f} bytes/s each"
        )
    alone, watched = (total(measured, readers) for readers in (0, options.readers))
    cost, of_thread = (watched[share] - alone[share] for share in ("cpu_share", "page_share"))
    print(
        f"{options.readers} readers cost the server {cost:.3%} of a core, by its page's thread alone {of_thread:.3%}; "
        f"rounds a minute: {alone['rounds_per_minute']:.1f} without, {watched['rounds_per_minute']:.1f} with them"
    )
    if options.json is not None:
        found = {"provenance": about, "alone": alone, "watched": watched, "windows": measured}
        options.json.write_text(json.dumps(found, indent=2) + "\n")


@contextlib.contextmanager
def a_run(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], HttpTransport]]:
    script, credentials = folder / "train.py", str(folder / "credentials")
    script.write_text(SCRIPT)
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "OUTERSTEP_CREDENTIALS": credentials}
    os.environ["OUTERSTEP_CREDENTIALS"] = credentials
    subprocess.run([sys.executable, script, str(folder / "model")], check=True, env=environ)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    flags = ["-m", str(folder / "model"), "-n", "2", "--sync-every", "20", "--port", address.split(":")[1]]
    children: list[subprocess.Popen[bytes]] = []

    def start(*arguments: str, **more: str) -> subprocess.Popen[bytes]:
        with (folder / "log").open("ab") as log:
            child = subprocess.Popen(
                [sys.executable, *arguments], stdout=log, stderr=log, cwd=folder, env={**environ, **more}
            )
        children.append(child)
        return child

    try:
        server = start("-c", NAMED, "server", *flags)
        for name in ("left", "right"):
            start(str(script), DILOCO_SERVER=address, DILOCO_WORKER_ID=name)
        transport = wait_for_rounds(address, folder / "log")
        yield server, transport
    finally:
        for child in reversed(children):
            child.terminate()
        for child in children:
            child.wait()


def wait_for_rounds(address: str, log: Path) -> HttpTransport:
    give_up_at = time.monotonic() + 300.0
    transport = None
    while time.monotonic() < give_up_at:
        with contextlib.suppress(Exception):
            transport = transport or HttpTransport(address)
            if rounds(transport) >= 3:
                return transport
        time.sleep(1.0)
    raise RuntimeError(f"the run did not begin:\n{log.read_text()[-4000:]}")


def rounds(transport: HttpTransport) -> int:
    return int(str(transport.status()["sync_round"]))


def window(
    server: subprocess.Popen[bytes], transport: HttpTransport, readers: int, seconds: float
) -> dict[str, float | int]:
    opened = [Reader(transport) for _ in range(readers)]
    time.sleep(3.0)  # past the greeting, which has the whole history
    began, cpu, page_cpu, done = time.monotonic(), cpu_s(server.pid), page_cpu_s(server.pid), rounds(transport)
    read = sum(reader.received for reader in opened)
    time.sleep(seconds)
    passed_s = time.monotonic() - began
    found = {
        "readers": readers,
        "seconds": passed_s,
        "cpu_s": cpu_s(server.pid) - cpu,
        "page_cpu_s": page_cpu_s(server.pid) - page_cpu,
        "rounds": rounds(transport) - done,
        "bytes_per_reader_s": (sum(reader.received for reader in opened) - read) / max(readers, 1) / passed_s,
    }
    for reader in opened:
        reader.close()
    return with_rates(found)


def with_rates(found: dict[str, Any]) -> dict[str, Any]:
    return {
        **found,
        "cpu_share": found["cpu_s"] / found["seconds"],
        "page_share": found["page_cpu_s"] / found["seconds"],
        "rounds_per_minute": 60.0 * found["rounds"] / found["seconds"],
    }


def total(measured: list[dict[str, Any]], readers: int) -> dict[str, Any]:
    those = [one for one in measured if one["readers"] == readers]
    return with_rates({name: sum(one[name] for one in those) for name in ("seconds", "cpu_s", "page_cpu_s", "rounds")})


def cpu_s(pid: int) -> float:
    """User and system time of a process, with all the threads that it has and had."""
    return time.clock_gettime(~pid << 3 | 2)  # the process's CPU clock, as clock_getcpuclockid(3) numbers it


def page_cpu_s(pid: int) -> float:
    """Of the thread that keeps open pages up to date."""
    (task,) = [
        comm.parent for comm in Path(f"/proc/{pid}/task").glob("*/comm") if comm.read_text().strip() == PAGE_THREAD
    ]
    return int((task / "schedstat").read_text().split()[0]) / 1e9


class Reader:
    """One open page, as far as the server can tell."""

    def __init__(self, transport: HttpTransport) -> None:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the server is this machine's own
        login = http.client.HTTPSConnection(transport.address, timeout=60, context=context)
        said = json.dumps({"code": transport.page_link().code})
        login.request("POST", "/page/login", said, {"Content-Type": "application/json"})
        cookie = login.getresponse().headers["Set-Cookie"].partition(";")[0]
        login.close()
        self._live = http.client.HTTPSConnection(transport.address, timeout=60, context=context)
        self._live.request("GET", "/page/live", headers={"Cookie": cookie})
        self._answer = self._live.getresponse()
        assert self._answer.status == 200, self._answer.status
        self.received = 0
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed under it, when the turn is over
            while data := self._answer.read1(1 << 16):
                self.received += len(data)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._answer.fp.raw._sock.shutdown(socket.SHUT_RDWR)  # type: ignore[attr-defined]
        self._thread.join(10.0)
        self._live.close()


if __name__ == "__main__":
    main()
