"""The demo: two workers and a server train one model together, compared with three other runs.

    1. a server and k workers, each a separate process          the method itself (or k workers and no server)
    2. one worker alone, at its own best learning rate          what each has without the others
    3. the same worker with the outer step (k = 1)              what the outer step alone contributes
    4. data-parallel with the tokens of all workers             what a data centre would do

Rows 2 to 4 run after row 1, two processes at a time.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from ..installing import install_line
from ..model_folder import load_model, save_model
from ..security import JOIN_VARIABLE, Access, Credentials
from ..wire.http_transport import HttpTransport
from .corpus import evaluation_batches, load_corpus
from .model import build_model
from .processes import Process, free_port, python_module, tell_page, wait_for_server
from .results import Row, plot, print_table
from .train import HELD_OUT_BATCHES
from .training import evaluate

# Each row at the best of the learning rates tried on this model (2e-3, 3e-3, 4e-3; three seeds where it was close).
WORKER_LR = LONE_LR = DATA_PARALLEL_LR = 3e-3
LONE_OUTER_LR = 2e-3
OUTER_LR, OUTER_MOMENTUM = 1.0, 0.5  # few rounds: a long momentum would not pay off before the end
LOOK_S = 0.5


@dataclass(frozen=True)
class DemoSettings:
    folder: Path
    workers: int = 2
    steps: int = 600
    sync_every: int = 25
    seed: int = 0
    topology: Literal["server", "allreduce", "gossip"] = "server"

    @property
    def credentials(self) -> Path:
        """The demo's own, separate from those of this user's other runs."""
        return self.folder.absolute() / "credentials"


@dataclass
class Team:
    """A server and its workers, or one plain process: one row of the table."""

    label: str
    learning_rate: float
    processes: list[Process]
    server: Process | None = None
    address: str = ""
    credentials: Path = Path()
    transport: HttpTransport | None = None
    around: ExitStack = field(default_factory=ExitStack)
    status: dict[str, Any] = field(default_factory=dict)
    tasks: list[TaskID] = field(default_factory=list)

    def start(self, console: Console) -> None:
        if self.server is not None:
            self.server.start()
            self.transport = wait_for_server(self.server, self.address, self.credentials)
            tell_page(self.transport, self.credentials, console, self.around)
            access = Credentials(self.credentials).find(self.address)
            assert access is not None
            for process in self.processes:
                process.environ[JOIN_VARIABLE] = access.join_string  # not in argv, which all users can read
        for process in self.processes:
            process.start()

    def is_running(self) -> bool:
        running = [process.is_running() for process in self.processes]
        if self.transport is not None and any(running):
            self.status = self.transport.status()
        return any(running)

    def stop(self) -> None:
        self.around.close()
        for process in [*self.processes, *([self.server] if self.server else [])]:
            process.stop()

    def row(self) -> Row:
        """The first process represents all: after the last round every worker holds the same model."""
        reports = self.processes[0].reports()
        metrics = reports[-1]["metrics"]
        return Row(
            label=self.label,
            learning_rate=self.learning_rate,
            loss=reports[-1]["final"],
            curve=[(r["step"], r["held_out"]) for r in reports if "held_out" in r],
            bytes_sent=metrics.get("bytes_sent", 0),
            bytes_received=metrics.get("bytes_received", 0),
            rounds=metrics.get("sync_count", 0),
            seconds=reports[-1]["seconds"],
        )


def run_demo(settings: DemoSettings, console: Console) -> list[Row]:
    folder = settings.folder
    folder.mkdir(parents=True, exist_ok=True)
    for old in [*folder.glob("*.jsonl"), *folder.glob("*.log")]:
        old.unlink()
    for old in [*folder.glob("*-run"), *folder.glob("*-peer")]:  # or servers and peers would resume them
        shutil.rmtree(old)
    model = build_model(settings.seed)
    parameters = sum(p.numel() for p in model.parameters())
    save_model(model, folder / "initial")
    console.print(
        f"A byte-level GPT of {parameters:,} parameters on the Python standard library's source: {settings.workers} "
        f"workers, {settings.steps} steps each, an exchange every {settings.sync_every}.\n"
        f"Everything is written to [bold]{folder}[/bold].",
        highlight=False,
    )
    together = _together(settings)
    alone = _plain(settings, "alone", "one worker alone", LONE_LR, [0])
    lone = [_worker(settings, "alone-outer", 0, LONE_OUTER_LR)]
    outer = _team(settings, "one worker, with the outer step", LONE_OUTER_LR, lone, "server-of-one")
    parallel = _plain(
        settings, "data-parallel", "data-parallel, every step", DATA_PARALLEL_LR, list(range(settings.workers))
    )
    _run([[together]], settings, console)
    console.print("Now the runs for comparison.")
    _run([[parallel], [alone, outer]], settings, console)

    rows = [team.row() for team in (alone, outer, together, parallel)]
    _check_checkpoint(folder / "trained", rows[2], settings)
    (folder / "results.json").write_text(json.dumps([asdict(row) for row in rows], indent=2))
    print_table(rows, parameters, settings.workers, settings.steps, console)
    picture = plot(rows, folder / "loss.png")
    console.print(
        f"model: {folder / 'trained'} (loaded again and evaluated)  "
        + (f"plot: {picture}" if picture else f"plot: {escape(install_line('demo'))} to get one")
    )
    return rows


# --- the four rows --------------------------------------------------------------------------------------------------


def _together(settings: DemoSettings) -> Team:
    workers = [
        _worker(settings, f"worker-{i}", i, WORKER_LR, save="trained" if i == 0 else None)
        for i in range(settings.workers)
    ]
    return _team(settings, f"{settings.workers} workers, outer model", WORKER_LR, workers, "server")


def _team(settings: DemoSettings, label: str, learning_rate: float, workers: list[Process], server_name: str) -> Team:
    """With a server of that name, or as ranks that find each other like those of a torchrun job, or as peers."""
    if settings.topology == "server":
        server, address = _server(settings, server_name, len(workers))
        return Team(label, learning_rate, workers, server, address, settings.credentials)
    if settings.topology == "gossip":
        _acquaint(settings, workers)
        return Team(label, learning_rate, workers)
    port = str(free_port())
    for rank, worker in enumerate(workers):
        place = {"RANK": str(rank), "WORLD_SIZE": str(len(workers)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        worker.environ |= place
    return Team(label, learning_rate, workers)


def _acquaint(settings: DemoSettings, workers: list[Process]) -> None:
    """Let the first found the run at an address that the others know."""
    port, identity = free_port(), Credentials(settings.credentials).server_identity()
    place = Access("127.0.0.1", port, identity.tokens.load().run, identity.fingerprint)
    for number, worker in enumerate(workers):
        worker.environ |= {
            "OUTERSTEP_CREDENTIALS": str(settings.credentials),
            "OUTERSTEP_MIN_PEERS": str(len(workers)),
            "OUTERSTEP_LISTEN": f"127.0.0.1:{0 if number else port}",
        }
        if number:
            worker.environ["OUTERSTEP_PEERS"] = place.join_string  # not in argv, which all users can read


def _plain(settings: DemoSettings, name: str, label: str, learning_rate: float, shards: list[int]) -> Team:
    folder = settings.folder
    progress = folder / f"{name}.jsonl"
    command = python_module(
        "outerstep.demo.train", "--alone", *_train_options(settings, shards, learning_rate, progress)
    )
    return Team(label, learning_rate, [Process(name, command, folder / f"{name}.log", progress, _threads(2))])


def _server(settings: DemoSettings, name: str, workers: int) -> tuple[Process, str]:
    port = free_port()
    command = python_module(
        "outerstep", "server", "-m", settings.folder / "initial", "-n", workers, "--port", port,
        "--sync-every", settings.sync_every, "--outer-lr", OUTER_LR, "--outer-momentum", OUTER_MOMENTUM,
        "--save-dir", settings.folder / f"{name}-run",
    )  # fmt: skip
    environ = {"OUTERSTEP_CREDENTIALS": str(settings.credentials)}
    return Process(name, command, settings.folder / f"{name}.log", environ=environ), f"127.0.0.1:{port}"


def _worker(settings: DemoSettings, name: str, shard: int, learning_rate: float, save: str | None = None) -> Process:
    folder = settings.folder
    progress = folder / f"{name}.jsonl"
    script = python_module("outerstep.demo.train", *_train_options(settings, [shard], learning_rate, progress))
    if save:
        script += ["--save", str(folder / save)]
    alone: list[object] = []
    if settings.topology != "server":  # settings that a server would hold
        alone = ["--sync-every", settings.sync_every, "--outer-lr", OUTER_LR, "--outer-momentum", OUTER_MOMENTUM]
    if settings.topology == "allreduce":
        alone += ["--server", "allreduce"]
    role = "worker"
    if settings.topology == "gossip":
        role, alone = "peer", [*alone, "--no-announce", "--peer-dir", folder / f"{name}-peer"]
    command = python_module("outerstep", role, "--worker-id", name, *alone, "--", *script)
    return Process(name, command, folder / f"{name}.log", progress, _threads(settings.workers))


def _train_options(settings: DemoSettings, shards: list[int], learning_rate: float, progress: Path) -> list[object]:
    return [
        "--shards", *shards, "--steps", settings.steps, "--learning-rate", learning_rate,
        "--seed", settings.seed, "--progress", progress,
    ]  # fmt: skip


def _threads(processes: int) -> int:
    """Each process's share of the cores: torch processes that all use all cores stall each other."""
    return max(1, (os.cpu_count() or 1) // processes)


# --- running and watching -------------------------------------------------------------------------------------------


def _run(lanes: list[list[Team]], settings: DemoSettings, console: Console) -> None:
    """Lanes run in parallel, the teams of a lane one after the other."""
    waiting = [list(lane) for lane in lanes]
    running: list[Team | None] = [None] * len(lanes)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:>4.0f}/{task.total:.0f} steps"),
        TextColumn("{task.fields[facts]}"),
        TimeElapsedColumn(),
        console=console,
    ) as progress:
        for team in (team for lane in lanes for team in lane):
            team.tasks = [
                progress.add_task(p.name, total=settings.steps, start=False, facts="") for p in team.processes
            ]
        try:
            while any(waiting) or any(running):
                for i, lane in enumerate(waiting):
                    running[i] = _look_after(running[i], lane, progress)
                time.sleep(LOOK_S)
        finally:
            for left in running:
                if left is not None:
                    left.stop()


def _look_after(team: Team | None, lane: list[Team], progress: Progress) -> Team | None:
    """Start the lane's next team, show the current one's progress, or stop it when it is done."""
    if team is None:
        team = lane.pop(0) if lane else None
        if team is not None:
            try:
                team.start(progress.console)
            except BaseException:
                team.stop()
                raise
        return team
    still_running = team.is_running()
    _show(team, progress)
    if still_running:
        return team
    team.stop()
    return None


def _show(team: Team, progress: Progress) -> None:
    for process, task in zip(team.processes, team.tasks, strict=True):
        reports = process.reports()
        if not reports:
            continue
        progress.start_task(task)
        loss = next((f"loss {r['loss']:.3f}" for r in reversed(reports) if "loss" in r), "")
        rounds = ""
        if team.status:
            sent = team.status["bytes_received"] + team.status["bytes_sent"]
            rounds = f"  round {team.status['sync_round']}, {sent / 1e6:.0f} MB in all"
        progress.update(task, completed=reports[-1]["step"], facts=loss + rounds)


def _check_checkpoint(folder: Path, row: Row, settings: DemoSettings) -> None:
    """The saved model is the model that was evaluated: load it and evaluate it again."""
    model = build_model(settings.seed + 1)
    load_model(model, folder)
    again = evaluate(model, evaluation_batches(load_corpus().held_out, HELD_OUT_BATCHES))
    if abs(again - row.loss) > 1e-4:
        raise RuntimeError(f"the checkpoint in {folder} evaluates to {again:.4f}, the worker reported {row.loss:.4f}")
