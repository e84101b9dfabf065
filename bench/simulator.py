"""Does `outerstep simulate` tell the truth, and can it play ten thousand workers?

    python bench/simulator.py play examples/simulate/ten-thousand.toml     # half an hour of processor time at most
    python bench/simulator.py play examples/simulate/thousand-flat.toml
    python bench/simulator.py real                                         # eight real workers, about ten minutes
    python bench/simulator.py failures                                     # planned beside simulated, a minute

`play` simulates a scenario file and notes the processor time and the memory that it takes.

`real` compares the simulator with a run: a server and eight workers, all processes, each worker over an emulated link
of its own (bench/links.py), killed with SIGKILL at random moments and started again a while later. It is the scenario
of examples/simulate/eight.toml fifty times as fast: a step takes 0.1 s, asleep, as if an accelerator computed it. What
is counted begins with the first round, when codecs are compiled and everybody is warm. The simulator plays the same
clusters, link, settings and rates of failure, with twenty seeds. Compared is the useful work: steps that rounds
took in, as a share of what eight workers could have taken.

`failures` plays a day of workers of one server that fail, and compares the useful work with what the planner says of
it: rounds that wait for all, and those that close as it recommends.

    … --json bench/results/simulator.json         # what was measured is added to that file
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import resource
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

from links import Link, emulated, validate
from provenance import provenance

# --- a scenario, played -----------------------------------------------------------------------------------------------


def play(file: str, seed: int | None, hours: float | None) -> dict[str, Any]:
    from outerstep.cli.simulate_file import read_scenario
    from outerstep.simulate.fleet import run_fleet

    scenario = read_scenario(file, seed=seed, hours=hours)
    began_s = time.process_time()
    report = run_fleet(scenario).as_plain()
    report.pop("moments")
    cpu_s = time.process_time() - began_s
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"file": file, "cpu_s": cpu_s, "peak_bytes": peak_bytes, **report}


# --- failures, planned and simulated ----------------------------------------------------------------------------------

FAILING = ((8, 0.05), (8, 0.5), (24, 0.05), (24, 0.5), (100, 0.05))  # workers; of each, per hour


def failing(workers: int, per_hour: float) -> Iterator[dict[str, Any]]:
    """The scenario of the examples: a billion parameters, int4, H = 500, steps of 1 s, servers of 32 cores."""
    from outerstep.coordination.cost import NOMINAL
    from outerstep.coordination.failures import Failures
    from outerstep.coordination.planning import Choice
    from outerstep.simulate.fleet import FleetScenario, run_fleet
    from outerstep.simulate.fleet.scenario import FleetClusters, LayerSetting, recommended

    mbit, noticed_s, speed, parameters = 1e6 / 8, 180.0, 16.0, 10**9
    there = (FleetClusters("worker", workers, 1, 110 * mbit, 500 * mbit, 0.04, 1.0),)
    failures = Failures(per_hour, 600.0)
    closings: list[tuple[str, float | None]] = [("all", 1e9), ("as planned", None)]
    for name, worth in closings:
        with contextlib.ExitStack() as stack:
            if worth is not None:  # no quorum is worth so much
                stack.enter_context(mock.patch("outerstep.coordination.failures.WORTH_A_QUORUM", worth))
            chosen = recommended(
                parameters,
                there,
                Choice(500, "int4", 1, 0),
                NOMINAL.with_servers(speed),
                server_in_bytes_per_s=0.0,
                server_out_bytes_per_s=0.0,
                target=0.95,
                failures=failures,
                noticed_s=noticed_s,
            )
        setting: LayerSetting = chosen.across
        report = run_fleet(
            FleetScenario(
                parameters=parameters,
                clusters=there,
                topology="server",
                across=setting,
                hours=24.0,
                seed=1,
                heartbeat_s=60.0,
                heartbeat_timeout_s=noticed_s,
                server_speed=speed,
                pool_bytes=600 * 10**9,
                failures=failures,
            )
        )
        assert not report.broken, report.broken
        quorum = "all" if setting.quorum is None else f"{round(setting.quorum * workers)}, {setting.grace_s:g} s"
        planned, useful = chosen.utilization, report.useful_share
        yield {
            "workers": workers,
            "per_hour": per_hour,
            "waits for": name,
            "quorum": quorum,
            "failures": report.failures,
            "planned": planned,
            "simulated": useful,
            "ratio": useful / planned,
        }


# --- eight real workers -----------------------------------------------------------------------------------------------

WORKERS = 8
LAYERS, WIDTH = 16, 250  # 1.0M parameters
STEP_S, SYNC_EVERY = 0.1, 100
FASTER = 50  # than the scenario: 500 steps of 1 s
LINK = Link(mbit_per_s=11, rtt_ms=40)
CODEC = "int4"
QUORUM, GRACE_S = 6, 0.3
HEARTBEAT_TIMEOUT_S = 6.0
PER_HOUR, RESTART_S = 0.05 * FASTER, 600.0 / FASTER
SEEDS = 20
NEAR = 0.10


@dataclass(frozen=True)
class RealRun:
    """`useful`: steps that rounds took in; `taken`: all that workers took; `down_s`: of each restart, until its
    process was ready to join."""

    seconds: float
    useful: float
    taken: int
    rounds: int
    kills: int
    down_s: list[float]
    step_s: float

    @property
    def useful_share(self) -> float:
        return self.useful * self.step_s / (WORKERS * self.seconds)


def make_model() -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def serve(pipe: Connection) -> None:
    """The server process: says its address; then how many rounds there were, and how many steps are in them."""
    import torch

    from outerstep import DiLoCoServer

    torch.set_num_threads(1)
    settings = {"sync_every": SYNC_EVERY, "codec": CODEC, "num_fragments": 1, "fragment_delay": 0, "quorum": QUORUM}
    settings |= {"grace_s": GRACE_S, "heartbeat_timeout_s": HEARTBEAT_TIMEOUT_S, "num_workers": WORKERS}
    with DiLoCoServer(make_model().state_dict(), port=0, insecure=True, **settings) as server:
        pipe.send(server.address)
        with contextlib.suppress(EOFError):
            while True:
                pipe.recv()
                coordinator = server.service.coordinator
                pipe.send((coordinator.sync_round, coordinator.fragments[0].done.steps))


def train(pipe: Connection, name: str, address: str, taken: Any) -> None:
    """A worker, until it is killed."""
    import torch

    from outerstep import DiLoCoWorker

    torch.set_num_threads(1)
    model = make_model()
    for values in model.parameters():
        values.grad = torch.randn_like(values)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    pipe.send("ready")
    pipe.recv()
    with DiLoCoWorker(model, optimizer, f"http://{address}", worker_id=name):
        pipe.send("joined")
        while True:
            began_s = time.perf_counter()
            time.sleep(STEP_S)
            taken[0] += 1
            taken[1] += time.perf_counter() - began_s
            optimizer.step()


def real(seconds: float, seed: int) -> RealRun:
    import multiprocessing

    from child import Helper

    rng, context = random.Random(seed), multiprocessing.get_context("spawn")
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(Helper(serve))
        address = server.hear()
        ways = [stack.enter_context(emulated(LINK, address)) for _ in range(WORKERS)]
        books = []

        def begin(i: int) -> Any:
            book = context.Array("d", 2, lock=False)
            books.append(book)
            return stack.enter_context(Helper(train, f"worker-{i}", ways[i], book))

        helpers = [begin(i) for i in range(WORKERS)]
        for helper in helpers:
            helper.hear()
        for helper in helpers:
            helper.pipe.send("go")
        for helper in helpers:
            helper.hear()
        while server.ask("how many?")[0] < 1:
            time.sleep(0.1)
        began, (_, useful_before), taken_before = time.monotonic(), server.ask("how many?"), totals(books)
        kills = sorted((at, i) for i in range(WORKERS) for at in moments(rng, PER_HOUR / 3600.0, seconds - RESTART_S))
        waiting: dict[int, float] = {}  # who starts again: since when it is down
        down_s: list[float] = []
        while (now := time.monotonic() - began) < seconds:
            while kills and kills[0][0] <= now:
                _, i = kills.pop(0)
                if i not in waiting:
                    helpers[i].process.kill()
                    helpers[i] = begin(i)  # it takes a while until it is ready: torch
                    waiting[i] = now
            for i, since in list(waiting.items()):
                if now - since >= RESTART_S and helpers[i].pipe.poll():
                    helpers[i].hear()
                    helpers[i].pipe.send("go")
                    down_s.append(now - since)
                    del waiting[i]
            time.sleep(0.02)
        lasted_s, (rounds, useful) = time.monotonic() - began, server.ask("how many?")
        taken, training_s = (now - before for now, before in zip(totals(books), taken_before, strict=True))
        for helper in helpers:
            helper.process.kill()
        kill_count = len(down_s) + len(waiting)
        step_s = training_s / taken
        return RealRun(lasted_s, useful - useful_before, int(taken), rounds - 1, kill_count, down_s, step_s)


def totals(books: list[Any]) -> tuple[float, float]:
    """Steps, and the seconds that they took."""
    return sum(book[0] for book in books), sum(book[1] for book in books)


def moments(rng: random.Random, per_s: float, until: float) -> Iterator[float]:
    at = rng.expovariate(per_s)
    while at < until:
        yield at
        at += RESTART_S + rng.expovariate(per_s)


def simulated(run: RealRun, seed: int) -> float:
    """The same, with what the machine really took for a step and a restart."""
    from outerstep.coordination.failures import Failures
    from outerstep.simulate.fleet import FleetScenario, run_fleet
    from outerstep.simulate.fleet.scenario import FleetClusters, LayerSetting

    rate = LINK.bytes_per_s
    report = run_fleet(
        FleetScenario(
            parameters=LAYERS * WIDTH * (WIDTH + 1),
            clusters=(FleetClusters("worker", WORKERS, 1, rate, rate, LINK.rtt_ms / 1e3, run.step_s),),
            topology="server",
            across=LayerSetting(SYNC_EVERY, CODEC, quorum=QUORUM / WORKERS, grace_s=GRACE_S),
            hours=run.seconds / 3600.0,
            seed=seed,
            heartbeat_s=HEARTBEAT_TIMEOUT_S / 3,
            heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S,
            failures=Failures(PER_HOUR, statistics.mean(run.down_s) if run.down_s else RESTART_S),
        )
    )
    assert not report.broken, report.broken
    return report.useful_share


def compare(seconds: float, seed: int) -> dict[str, Any]:
    seen = validate(LINK)
    print(f"{LINK.mbit_per_s:g} Mbit/s, {LINK.rtt_ms:g} ms; seen: {seen}", flush=True)
    run = real(seconds, seed)
    shares = [simulated(run, seed) for seed in range(SEEDS)]
    mean = statistics.mean(shares)
    print(
        f"real: {run.useful_share:.1%} useful work in {run.rounds} rounds, {run.kills} kills, {run.step_s:.4f} s a step"
    )
    print(f"simulated: {mean:.1%} ({min(shares):.1%} to {max(shares):.1%}, {SEEDS} seeds)")
    ratio = run.useful_share / mean
    print(f"real ÷ simulated: {ratio:.3f}, {'within' if abs(ratio - 1.0) <= NEAR else 'NOT within'} {NEAR:.0%}")
    return {
        "link": seen.as_json(),
        "real": {**vars(run), "useful_share": run.useful_share},
        "simulated": {"mean": mean, "least": min(shares), "most": max(shares), "seeds": SEEDS},
        "ratio": ratio,
    }


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    parser = argparse.ArgumentParser(description="Time the simulator, and compare it with a real run.")
    commands = parser.add_subparsers(dest="what", required=True)
    playing = commands.add_parser("play", help="a scenario file")
    playing.add_argument("file")
    playing.add_argument("--hours", type=float, default=None, help="instead of the file's")
    running = commands.add_parser("real", help="eight real workers beside eight simulated ones")
    running.add_argument("--seconds", type=float, default=300.0)
    comparing = commands.add_parser("failures", help="planned beside simulated")
    for each in (playing, running, comparing):
        each.add_argument("--seed", type=int, default=None)
        each.add_argument("--json", type=Path, metavar="FILE", help="add what was measured to this file")
    given = parser.parse_args()
    machine = provenance(*(("torch",) if given.what == "real" else ()))
    if given.what == "play":
        found, key = play(given.file, given.seed, given.hours), Path(given.file).stem
        shown = {name: found[name] for name in ("useful_share", "shares", "lost_share", "cpu_s", "peak_bytes")}
        print(json.dumps({**shown, "broken": found["broken_count"], "layers": found["layers"]}, indent=2))
    elif given.what == "failures":
        rows = [row for case in FAILING for row in failing(*case)]
        for row in rows:
            print(" | ".join(f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values()))
        found, key = {"rows": rows}, "failures"
    else:
        found, key = compare(given.seconds, given.seed or 1), "real"
    if given.json:
        known = json.loads(given.json.read_text()) if given.json.exists() else {}
        given.json.write_text(json.dumps({**known, key: {"machine": machine, **found}}, indent=2) + "\n")


if __name__ == "__main__":
    main()
