"""How long does a GPU stand still for an exchange?

One machine: a server, and a worker that trains linear layers of `--width` on a GPU. Per mode:

    stall       a cycle of H steps with its exchange, less H steps without outerstep; the median of `--cycles`
    lost        that, as a share of the H steps
    bare        the same bytes up and down between two processes, over eight sockets and nothing else; with `--tls`, TLS
    fsync       what the journal of a round writes, written and synced once (only with `--durability round`)
    memory      what the worker needs on the GPU beside the model and its optimizer; the server's resident peak

    python bench/gpu.py                                   # 1.0 B parameters: a large GPU, 32 GiB of memory, ten minutes
    python bench/gpu.py --billions 0.1 1 --tls --durability round
    python bench/gpu.py --billions 3 --anchor host --modes "blocking int4"
    python bench/gpu.py --server-device cuda               # the server works on the GPU, too
    python bench/gpu.py --billions 0.002 --width 256 --device cpu      # works, and says nothing
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import os
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bare_sockets import BareClient, BareServer
from harness import Actor, median, print_table, say, status_bytes, write_json
from outerstep import DiLoCoServer, DiLoCoWorker
from provenance import provenance

SOCKETS = 8
MODES: dict[str, dict[str, Any]] = {
    "blocking bf16": {"codec": "bf16", "down_codec": "bf16"},
    "blocking int4": {"codec": "int4", "down_codec": "int4"},
    "streaming int4": {"codec": "int4", "down_codec": "int4", "num_fragments": 8, "fragment_delay": 5},
}


@dataclass(frozen=True)
class Shape:
    layers: int
    width: int

    @property
    def parameters(self) -> int:
        return self.layers * self.width**2

    def build(self, device: str, dtype: torch.dtype) -> nn.Module:
        torch.manual_seed(0)
        with torch.device(device):
            first = Layer(
                self.width, dtype, self.layers**-0.5
            )  # all begin alike: a billion random numbers take the host ten seconds
            return nn.Sequential(first, *(copy.deepcopy(first) for _ in range(self.layers - 1)))


class Layer(nn.Module):
    """Beside a way around it: else nothing that is learned gets through sixty of them. Each adds its `share`, so that
    what comes out of two hundred is not beyond what bf16 can hold."""

    def __init__(self, width: int, dtype: torch.dtype, share: float) -> None:
        super().__init__()
        self.share = share
        self.linear = nn.Linear(width, width, bias=False, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.gelu(self.linear(x)) * self.share


class BigServer:
    """With as many threads as the machine has."""

    def __init__(self, shape: Shape, *, tls: bool, save_dir: str | None, **settings: Any) -> None:
        os.environ.pop("OMP_NUM_THREADS", None)  # harness.py sets it: elsewhere several processes share the cores
        torch.set_num_threads(os.cpu_count() or 1)
        state = shape.build("cpu", torch.float32).state_dict()
        self._server = DiLoCoServer(state, 1, port=0, insecure=not tls, save_dir=save_dir, **settings)
        self._server.start()

    def address(self) -> str:
        return f"http://{self._server.address}" if self._server.config.insecure else self._server.access.join_string

    def facts(self) -> dict[str, Any]:
        """Where it works at the end, and what it has taken of a GPU."""
        status = self._server.typed_status()
        peak = torch.cuda.max_memory_allocated() if status.device != "cpu" else 0
        return {"server_device": status.device, "device_left": status.device_left, "server_gpu_bytes": peak}

    def close(self) -> None:
        self._server.stop()


class GpuWorker:
    def __init__(self, shape: Shape, device: str, batch: int, settings: dict[str, Any]) -> None:
        self._device, self._settings = device, settings
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self._model = shape.build(device, dtype)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1.0)
        self._batch = torch.randn(batch, shape.width, device=device, dtype=dtype)
        self._worker: DiLoCoWorker | None = None

    def steps(self, count: int) -> float:
        """Seconds for so many, to the end of the last."""
        self._synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            self._model(self._batch).float().square().mean().backward()
            nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)  # steps that move every weight, and never far
            self._optimizer.step()
            self._optimizer.zero_grad()
        self._synchronize()
        return time.perf_counter() - begin

    def join(self, address: str) -> None:
        self._before = torch.cuda.memory_allocated() if self._device == "cuda" else 0
        if self._device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self._worker = DiLoCoWorker(self._model, self._optimizer, address, worker_id="w", **self._settings)
        self._worker.start()

    def facts(self) -> dict[str, Any]:
        assert self._worker is not None
        metrics = self._worker.sync_metrics
        peak = torch.cuda.max_memory_allocated() if self._device == "cuda" else 0
        names = ("versions", "bytes_sent", "bytes_received", "seconds_waiting", "steps_discarded", "anchor_repairs")
        return {"gpu_extra_bytes": peak - self._before, **{name: metrics[name] for name in names if name in metrics}}

    def close(self) -> None:
        if self._worker is not None:
            self._worker.abandon("measured")

    def _synchronize(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()


class BareTransfer:
    """The same bytes by several sockets at once."""

    def __init__(self, file: str, down_bytes: int, port: int, *, tls: bool) -> None:
        self._clients = [BareClient(file, down_bytes, port, tls=tls) for _ in range(SOCKETS)]

    def exchange(self) -> None:
        for method in (BareClient.upload, BareClient.fetch):
            threads = [threading.Thread(target=method, args=(client,)) for client in self._clients]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    def close(self) -> None:
        for client in self._clients:
            client.close()


def bare_s(up_bytes: int, down_bytes: int, *, tls: bool) -> float:
    with tempfile.NamedTemporaryFile() as file, contextlib.ExitStack() as stack:
        file.write(bytes(max(up_bytes // SOCKETS, 1)))
        file.flush()
        share = max(down_bytes // SOCKETS, 1)
        server = stack.enter_context(Actor(BareServer, SOCKETS, max(up_bytes // SOCKETS, 1), share, tls=tls))
        client = stack.enter_context(Actor(BareTransfer, file.name, share, server.ask("port"), tls=tls))
        client.ask("exchange")
        spans = []
        for _ in range(3):
            client.tell("exchange")
            spans.append(client.hear())
        return median(span.end_s - span.start_s for span in spans)


def fsync_s(size_bytes: int, folder: str) -> float:
    """Written and synced once, by the MiB."""
    piece = memoryview(bytearray(os.urandom(1 << 20)))
    begin = time.perf_counter()
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        for start in range(0, size_bytes, len(piece)):
            file.write(piece[: min(len(piece), size_bytes - start)])
        os.fsync(file.fileno())
    return time.perf_counter() - begin


def journal_bytes(folder: Path) -> int:
    """Of the newest record."""
    records = sorted(folder.rglob("record-*"))
    return records[-1].stat().st_size if records else 0


def measure(arguments: argparse.Namespace, shape: Shape, mode: str) -> dict[str, Any]:
    tls, durable = arguments.tls, arguments.durability == "round"
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder, contextlib.ExitStack() as stack:
        settings = {"sync_every": arguments.steps, "device": arguments.server_device, **MODES[mode]}
        if durable:
            settings |= {"durability": "round"}
        server = stack.enter_context(
            Actor(BigServer, shape, start="spawn", tls=tls, save_dir=folder if durable else None, **settings)
        )
        given = {"anchor": arguments.anchor}
        worker = stack.enter_context(Actor(GpuWorker, shape, arguments.device, arguments.batch, given, start="spawn"))
        worker.ask("steps", 3)
        alone_s = median(worker.ask("steps", arguments.steps) for _ in range(2))
        worker.ask("join", server.ask("address"))
        cycles = [worker.ask("steps", arguments.steps) for _ in range(arguments.cycles + 1)][1:]  # one warms up
        facts = {**worker.ask("facts"), **server.ask("facts")}
        if facts["device_left"]:
            raise RuntimeError(f"the server left its device: {facts['device_left']}")
        rounds = arguments.cycles + 1
        if min(facts["versions"]) < rounds - 1:  # streaming: the last may be under way
            raise RuntimeError(f"{rounds} cycles made {facts['versions']} rounds: this measured something else")
        up_bytes, down_bytes = facts["bytes_sent"] // rounds, facts["bytes_received"] // rounds
        written = journal_bytes(Path(folder)) if durable else 0
        row = {
            "mode": mode,
            "parameters": shape.parameters,
            "tls": tls,
            "durability": arguments.durability,
            "alone_s": alone_s,
            "cycles_s": cycles,
            "stall_s": median(cycles) - alone_s,
            "lost": median(cycles) / alone_s - 1,
            "server_peak_bytes": status_bytes(server.pid, "VmHWM"),
            "journal_bytes": written,
            **facts,
        }
    row["bare_s"] = bare_s(up_bytes, down_bytes, tls=tls)
    row["fsync_s"] = fsync_s(written, arguments.folder) if written else 0.0
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--billions", type=float, nargs="+", default=[1.0])
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--steps", type=int, default=60, help="per cycle (H)")
    parser.add_argument("--cycles", type=int, default=3)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--anchor", choices=["device", "host"], default="device")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--server-device", choices=["cuda", "cpu"], default="cpu")
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--durability", choices=["none", "round"], default="none")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on the disk that the journal is to be on")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    report: dict[str, Any] = {"machine": provenance("torch"), "rows": []}
    if arguments.device == "cuda":
        report["machine"]["gpu"] = torch.cuda.get_device_name()
    for billions in arguments.billions:
        shape = Shape(max(round(billions * 1e9 / arguments.width**2), 1), arguments.width)
        for mode in arguments.modes:
            row = measure(arguments, shape, mode)
            say(f"{shape.parameters / 1e9:.2f} B, {mode}: {row['stall_s']:.3f} s")
            report["rows"].append(row)
    machine = report["machine"].get("gpu", arguments.device)
    print_table(
        f"{machine}, {os.cpu_count()} cores, server on {arguments.server_device}",
        [
            "mode",
            "billions",
            "alone s",
            "stall s",
            "lost",
            "bare s",
            "fsync s",
            "stall/(bare+fsync)",
            "GPU MiB",
            "server MiB",
            "its GPU MiB",
        ],
        (
            (
                row["mode"],
                f"{row['parameters'] / 1e9:.2f}",
                f"{row['alone_s']:.2f}",
                f"{row['stall_s']:.3f}",
                f"{row['lost']:.1%}",
                f"{row['bare_s']:.3f}",
                f"{row['fsync_s']:.3f}",
                f"{row['stall_s'] / (row['bare_s'] + row['fsync_s']):.2f}",
                f"{row['gpu_extra_bytes'] >> 20}",
                f"{row['server_peak_bytes'] >> 20}",
                f"{row['server_gpu_bytes'] >> 20}",
            )
            for row in report["rows"]
        ),
    )
    write_json(arguments.json, report)


if __name__ == "__main__":
    main()
