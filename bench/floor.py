"""How close to bare sockets can a round come on this machine?

A round reads and writes memory that bare sockets do not touch. This measures the least of it, in the fewest passes that
torch has for it, by cache-sized blocks and without any protocol, beside bare sockets in the same run:

    send     each of k workers: bf16(anchor − local)
    close    the server, one process per core: mean of k contributions, outer step, bf16(update), apply
    adopt    each of k workers: anchor += update; local = anchor

and the same with what tells damage and divergence: a hash of all that is sent and received and of each new anchor, and
a norm of what the server received, which is not finite if a value is not.

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

import xxhash

from bare_sockets import BareClient, BareServer
from harness import Actor, median, print_table, say, together, wall_s, write_json
from models import count
from provenance import provenance

BLOCK = 1 << 20  # values: of 64K, 256K and a million the fastest
PHASES = ("send", "close", "adopt")
WITH_CHECKS = ", with checks"


class FloorWorker:
    def __init__(self, numel: int) -> None:
        import torch

        self._anchor, self._local = torch.randn(numel), torch.randn(numel)
        self._sent = torch.zeros(numel, dtype=torch.bfloat16)
        self._update = torch.full((numel,), 1e-3, dtype=torch.bfloat16)
        self._room = torch.empty(BLOCK)

    def send(self, checks: bool) -> None:
        import torch

        hashed = xxhash.xxh3_64()
        for anchor, local, sent in _blocks(self._anchor, self._local, self._sent):
            sent.copy_(torch.sub(anchor, local, out=self._room[: len(sent)]))
            if checks:
                hashed.update(_bytes(sent))

    def adopt(self, checks: bool) -> None:
        received, anchored = xxhash.xxh3_64(), xxhash.xxh3_128()
        for anchor, local, update in _blocks(self._anchor, self._local, self._update):
            if checks:
                received.update(_bytes(update))
            local.copy_(anchor.add_(self._room[: len(update)].copy_(update)))
            if checks:
                anchored.update(_bytes(anchor))

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

    def close_round(self, checks: bool) -> None:
        """θ is moved by what is sent, so that it and the target lie together; the target is a scratch block."""
        if checks:
            self._look()
        sent, anchored = xxhash.xxh3_64(), xxhash.xxh3_128()
        for theta, buf, update, *received in _blocks(self._theta, self._buf, self._update, *self._received):
            g, room = self._g[: len(update)], self._room[: len(update)]
            g.copy_(received[0])
            for other in received[1:]:
                g.add_(room.copy_(other))
            g.mul_(1.0 / len(received))
            buf.mul_(0.9).add_(g)
            update.copy_(g.add_(buf, alpha=0.9).mul_(-0.7))
            theta.add_(room.copy_(update))
            if checks:
                sent.update(_bytes(update))
                anchored.update(_bytes(theta))

    def _look(self) -> None:
        """At contributions, as they come in."""
        import torch

        for contribution in self._received:
            hashed = xxhash.xxh3_64()
            for part in contribution.split(8 * BLOCK):
                hashed.update(_bytes(part))
                float(torch.linalg.vector_norm(part))

    def close(self) -> None:
        """An actor's end."""


def _bytes(tensor):  # type: ignore[no-untyped-def]  # torch is not imported in the parent
    import torch

    return tensor.view(torch.uint8).numpy().data


def _blocks(*tensors):  # type: ignore[no-untyped-def]  # torch is not imported in the parent
    return zip(*(tensor.split(BLOCK) for tensor in tensors), strict=True)


def measure(numel: int, workers: int, rounds: int) -> list[dict[str, float]]:
    """Seconds of each phase; those with checks under names of their own."""
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
            for checks in (False, True):
                seconds = {
                    "send": wall_s(together(clients, "send", checks)),
                    "close": wall_s(together(servers, "close_round", checks)),
                    "adopt": wall_s(together(clients, "adopt", checks)),
                }
                run |= {f"{name}{WITH_CHECKS if checks else ''}": value for name, value in seconds.items()}
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
    seconds = {name: median([run[name] for run in runs]) for name in runs[0]}
    rows = [[name, f"{value:.3f}"] for name, value in seconds.items()]
    print_table(f"{given.workers} workers, {numel / 1e6:.0f}M parameters, bf16", ["what", "seconds"], rows)
    most = {}
    for kind in ("", WITH_CHECKS):
        floor = sum(seconds[name] for name in ("bare", *(f"{phase}{kind}" for phase in PHASES)))
        most[kind] = median([run["bare"] / (run["bare"] + sum(run[f"{p}{kind}"] for p in PHASES)) for run in runs])
        print(f"a round{kind} takes at least {floor:.3f} s, so it reaches at most {most[kind]:.2f} of bare sockets")
    if given.json is not None:
        facts = {"machine": provenance(), "workers": given.workers, "parameters": numel, "runs": runs}
        write_json(given.json, {**facts, "most": most[""], "most_with_checks": most[WITH_CHECKS]})


if __name__ == "__main__":
    main()
