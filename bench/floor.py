"""How near to bare sockets can a round come at all, on this machine?

A round reads and writes memory that bare sockets do not touch. This measures the least of it, in the fewest passes that
torch has for it, by cache-sized blocks, without any protocol, hash or check, beside bare sockets in the same run:

    send     each of k workers: bf16(anchor − local)
    close    the server, one process per core: mean of k contributions, outer step, bf16(update), apply
    adopt    each of k workers: anchor += update; local = anchor

If sockets and arithmetic each keep all cores busy, as they do here, a round takes at least bare + send + close + adopt:
the *floor*. bare ÷ floor is then the most of bare sockets' rate that a round can reach.

    python bench/floor.py                          # 103M parameters, k = 4; a minute
    python bench/floor.py --json floor.json
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
from pathlib import Path

from bare_sockets import BareClient, BareServer
from harness import Actor, median, print_table, say, together, wall_s, write_json
from models import count
from provenance import provenance

BLOCK = 1 << 16  # values: 256 KiB of fp32, so that what lies between two passes stays in a core's cache
PHASES = ("send", "close", "adopt")


class FloorWorker:
    def __init__(self, numel: int) -> None:
        import torch

        self._anchor, self._local = torch.randn(numel), torch.randn(numel)
        self._sent = torch.zeros(numel, dtype=torch.bfloat16)
        self._update = torch.full((numel,), 1e-3, dtype=torch.bfloat16)
        self._room = torch.empty(BLOCK)

    def send(self) -> None:
        import torch

        for anchor, local, sent in _blocks(self._anchor, self._local, self._sent):
            sent.copy_(torch.sub(anchor, local, out=self._room[: len(sent)]))

    def adopt(self) -> None:
        for anchor, local, update in _blocks(self._anchor, self._local, self._update):
            room = self._room[: len(update)]
            local.copy_(anchor.add_(room.copy_(update)))

    def close(self) -> None:
        """An actor's end."""


class FloorServer:
    """A part of the model, on one core."""

    def __init__(self, numel: int, workers: int) -> None:
        import torch

        self._received = [torch.full((numel,), 1e-3, dtype=torch.bfloat16) for _ in range(workers)]
        self._theta, self._buf = torch.randn(numel), torch.zeros(numel)
        self._update = torch.zeros(numel, dtype=torch.bfloat16)
        self._g, self._room = torch.empty(BLOCK), torch.empty(BLOCK)

    def close_round(self) -> None:
        """θ is moved by what is sent, so that it and the target lie together; the target is a scratch block."""
        for theta, buf, update, *received in _blocks(self._theta, self._buf, self._update, *self._received):
            g, room = self._g[: len(update)], self._room[: len(update)]
            g.copy_(received[0])
            for other in received[1:]:
                g.add_(room.copy_(other))
            g.mul_(1.0 / len(received))
            buf.mul_(0.9).add_(g)
            update.copy_(g.add_(buf, alpha=0.9).mul_(-0.7))
            theta.add_(room.copy_(update))

    def close(self) -> None:
        """An actor's end."""


def _blocks(*tensors):  # type: ignore[no-untyped-def]  # torch is not imported in the parent
    return zip(*(tensor.split(BLOCK) for tensor in tensors), strict=True)


def measure(numel: int, workers: int, rounds: int) -> list[dict[str, float]]:
    runs: list[dict[str, float]] = []
    cores = os.cpu_count() or 1
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        file = Path(folder, "frame")
        file.write_bytes(bytes(2 * numel))
        bare_server = stack.enter_context(Actor(BareServer, workers, 2 * numel, 2 * numel))
        port = bare_server.ask("port")
        bare = [stack.enter_context(Actor(BareClient, str(file), 2 * numel, port)) for _ in range(workers)]
        clients = [stack.enter_context(Actor(FloorWorker, numel)) for _ in range(workers)]
        servers = [stack.enter_context(Actor(FloorServer, numel // cores, workers)) for _ in range(cores)]
        for number in range(rounds + 1):
            run = {"bare": wall_s(together(bare, "upload")) + wall_s(together(bare, "fetch"))}
            run["send"] = wall_s(together(clients, "send"))
            run["close"] = wall_s(together(servers, "close_round"))
            run["adopt"] = wall_s(together(clients, "adopt"))
            if number > 0:  # the first one touches the memory
                runs.append(run)
                say(", ".join(f"{name} {seconds:.3f} s" for name, seconds in run.items()))
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="8M parameters")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    numel, _ = count("8M" if given.quick else "103M")
    runs = measure(numel, given.workers, given.rounds)
    seconds = {name: median([run[name] for run in runs]) for name in ("bare", *PHASES)}
    floor = sum(seconds.values())
    most = median([run["bare"] / sum(run.values()) for run in runs])
    rows = [[name, f"{value:.3f}"] for name, value in seconds.items()]
    print_table(f"{given.workers} workers, {numel / 1e6:.0f}M parameters, bf16", ["what", "seconds"], rows)
    print(f"a round takes at least {floor:.3f} s, so it reaches at most {most:.2f} of bare sockets")
    if given.json is not None:
        facts = {"machine": provenance(), "workers": given.workers, "parameters": numel, "runs": runs, "most": most}
        write_json(given.json, facts)


if __name__ == "__main__":
    main()
