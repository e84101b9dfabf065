"""The stage of the demos of clusters: a server at the top, clusters behind slow links, groups that train.

    top server ── emulated link ── cluster's server ── groups       each a process, each cluster at a site of its own

Everything that a demo says about the run comes from what these processes say: their status, their event logs and the
progress of their scripts. Whatever happens, `with Stage(…)` ends every process that it started.
"""

from __future__ import annotations

import json
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ..errors import TransportError
from ..model_folder import load_state_dict, save_model
from ..security import Credentials
from ..wire.http_transport import HttpTransport
from .ends import End
from .link import EmulatedLink, Link
from .member import SMALL, weights_hash
from .model import build_model
from .processes import DemoFailed, Process, free_port, python_module, tell_page, wait_for_server
from .sites import Site, Sites, network_of

OUTER_LR, OUTER_MOMENTUM = 1.0, 0.5  # across; inside, clusters average
DEAD_AFTER_S = 6.0  # without a sign of life inside a cluster
SIGN_OF_LIFE_S = 1.0
LOOK_S = 0.25
PATIENCE_S = 300.0  # without a new round at the top, something is wrong
END_S = 120.0
ROUND_S = 60.0
INSIDE_TARGET = 0.001  # that every exchange inside a cluster meets, however busy the machine is
DECIDED = "plan_decided"


@dataclass(frozen=True)
class StageSettings:
    """`separate`: each cluster has a network of its own; else `why_shared` says why not. `inside_every`: steps between
    two rounds of a cluster. `across_every`: rounds of a cluster between two exchanges across, to begin with. `pace_s`:
    the least time of a step. `target`: the utilization that the top server's controller aims at, with no shorter
    interval than the first; None = it has none.
    `inside_batch`: the samples of a cluster's round that its own server's controller keeps to; None = it has none."""

    folder: Path
    seed: int = 0
    separate: bool = False
    why_shared: str = ""
    pace_s: float = 0.05
    inside_every: int = 5
    across_every: int = 4
    link: Link = Link(mbit_per_s=20.0, rtt_ms=20.0)  # noqa: RUF009 - frozen
    target: float | None = None
    inside_batch: int | None = None


@dataclass
class DemoCluster:
    """A cluster's server, its link across and its groups."""

    name: str
    site: Site
    line: EmulatedLink
    server: Process
    address: str
    transport: HttpTransport
    groups: dict[str, Process] = field(default_factory=dict)
    status: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LoggedEvent:
    """An event, as the server at `place` logged it."""

    time: float
    place: str
    kind: str
    facts: dict[str, Any]


class Stage:
    def __init__(self, settings: StageSettings, console: Console) -> None:
        self.settings, self.console, self.folder = settings, console, settings.folder
        self.clusters: dict[str, DemoCluster] = {}
        self.status: dict[str, Any] = {}
        self.seen: list[tuple[float, dict[str, Any]]] = []  # what the top server said, and when
        self.began_at = self.ended_at = time.time()  # of the training
        self._sites = Sites(settings.separate)
        self.network = network_of("self")  # of the top
        self._all: list[Process] = []
        self._shards = 0
        self._go, self._until = self.folder / "go", self.folder / "until"
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("round {task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[facts]}"),
            TimeElapsedColumn(),
            console=console,
        )
        self.transport: HttpTransport | None = None
        self._around = ExitStack()
        self._before: dict[int, Any] = {}
        self._is_starting = self._is_interrupted = False

    # --- beginning and end --------------------------------------------------------------------------------------------

    def __enter__(self) -> Stage:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._interrupt)
        try:
            self._tidy()
            save_model(build_model(self.settings.seed, SMALL), self.folder / "initial")
            self._progress.start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _tidy(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for old in [*self.folder.glob("*.jsonl"), *self.folder.glob("*.log"), self._go, self._until]:
            old.unlink(missing_ok=True)
        for old in self.folder.glob("*-run"):  # or servers would resume them
            shutil.rmtree(old)

    def _end(self) -> None:
        """Nobody is left behind, also if Ctrl-C is pressed again meanwhile."""
        if threading.current_thread() is threading.main_thread():
            for number in self._before:
                signal.signal(number, signal.SIG_IGN)
        for process in self._all:
            process.kill()
        self._progress.stop()
        self._around.close()
        if self.transport is not None:
            self.transport.close()
        for cluster in self.clusters.values():
            cluster.transport.close()
            cluster.line.__exit__()
        self._sites.close()
        for number, before in self._before.items():
            signal.signal(number, before)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._is_interrupted = True
        if not self._is_starting:
            raise KeyboardInterrupt

    @contextmanager
    def _starting(self) -> Iterator[None]:
        """An interruption in the middle would leave a process behind that nobody knows of: it waits for the end."""
        self._is_starting = True
        try:
            yield
        finally:
            self._is_starting = False
        if self._is_interrupted:
            raise KeyboardInterrupt

    def _start(self, process: Process) -> Process:
        self._all.append(process)
        with self._starting():
            return process.start()

    def start_top(self, clusters: int) -> None:
        settings = self.settings
        flags: list[object] = ["--outer-lr", OUTER_LR, "--outer-momentum", OUTER_MOMENTUM]
        flags += ["--sync-every", settings.across_every]
        if settings.target is not None:
            # A busy machine is no slow member: rounds wait for all.
            flags += ["--target-utilization", settings.target, "--round-deadline", ROUND_S]
            flags += ["--least-sync-every", settings.across_every]
        site = Site("top", network=self.network)
        process, self.address = self._server("top", site, clusters, flags)
        self.top = self._start(process)
        self.transport = wait_for_server(self.top, self.address, self.credentials)
        if not self.settings.separate:  # no browser is inside
            tell_page(self.transport, self.credentials, self.console, self._around)

    @property
    def credentials(self) -> Path:
        """The demo's own, separate from those of this user's other runs."""
        return self.folder.absolute() / "credentials"

    def add_clusters(self, groups: dict[str, list[str]], accelerator: str = "") -> None:
        """Their servers, their links, their groups; by name of the cluster. They train when all have joined above."""
        for name, members in groups.items():
            with self._starting():
                site = self._sites.open(name)
            line = EmulatedLink(self.address, self.settings.link, site.gate).__enter__()
            flags: list[object] = ["--cluster", name, "--sync-every", self.settings.inside_every]
            flags += ["--heartbeat-timeout", DEAD_AFTER_S, "--codec", "fp32"]  # exact: the network inside is fast
            flags += self._steering_inside()
            server, address = self._server(name, site, len(members), flags)
            server.environ["OUTERSTEP_ABOVE"] = self._join_string(line.address)
            if accelerator:
                server.environ["OUTERSTEP_ACCELERATOR"] = accelerator
            transport = HttpTransport(self._join_string(address), timeout_s=5.0)
            self.clusters[name] = DemoCluster(name, site, line, server, address, transport)
            self._start(server)
        for name, members in groups.items():
            cluster = self.clusters[name]
            wait_for_server(cluster.server, self._join_string(cluster.address), self.credentials).close()
            for group in members:
                self.add_group(name, group, accelerator)
        self.watch_until(lambda: all(name in self.status.get("workers", {}) for name in groups))
        if not self._go.exists():
            self._go.touch()
            self.began_at = time.time()

    def _steering_inside(self) -> list[object]:
        """A controller that has nothing to choose but who brings how many samples: the interval stays."""
        settings = self.settings
        if settings.inside_batch is None:
            return []
        every = settings.inside_every
        flags: list[object] = ["--target-utilization", INSIDE_TARGET, "--global-batch", settings.inside_batch]
        return [*flags, "--least-sync-every", every, "--most-sync-every", every, "--round-deadline", ROUND_S]

    def add_group(self, cluster_name: str, name: str, accelerator: str = "") -> Process:
        """A process that trains in this cluster."""
        cluster, settings = self.clusters[cluster_name], self.settings
        life = sum(process.name.startswith(f"{cluster_name}-{name}") for process in self._all)
        full = f"{cluster_name}-{name}" + (f"-{life + 1}" if life else "")
        progress = self.folder / f"{full}.jsonl"
        script = python_module(
            "outerstep.demo.member", "--cluster", cluster_name, "--shard", self._shards, "--seed", settings.seed,
            "--pace", settings.pace_s, "--go", self._go, "--until", self._until, "--progress", progress,
        )  # fmt: skip
        self._shards += 1
        environ = {  # what `outerstep worker` would set; one process less to start
            "DILOCO_SERVER": self._join_string(cluster.address),
            "DILOCO_WORKER_ID": name,
            "DILOCO_HEARTBEAT_INTERVAL": str(SIGN_OF_LIFE_S),
        }
        if accelerator:
            environ["OUTERSTEP_ACCELERATOR"] = accelerator
        process = Process(
            full, [*cluster.site.enter, *script], self.folder / f"{full}.log", progress, environ=environ, apart=True
        )
        cluster.groups[name] = process
        return self._start(process)

    def kill_group(self, cluster: str, name: str) -> Process:
        """SIGKILL. What becomes of it is for the others to find out."""
        process = self.clusters[cluster].groups.pop(name)
        process.kill()
        return process

    def set_link(self, link: Link) -> None:
        """Of every cluster, from now on."""
        for cluster in self.clusters.values():
            cluster.line.link = link

    def _server(self, name: str, site: Site, members: int, flags: list[object]) -> tuple[Process, str]:
        port = free_port()
        command = python_module(
            "outerstep", "server", "-m", self.folder / "initial", "-n", members, "--host", site.host, "--port", port,
            "--weight-by", "samples", "--save-dir", self.folder / f"{name}-run",
            "--event-log", self._event_log(name), *flags,
        )  # fmt: skip
        process = Process(
            name,
            [*site.enter, *command],
            self.folder / f"{name}.log",
            environ={"OUTERSTEP_CREDENTIALS": str(self.credentials)},
            apart=True,
        )
        return process, f"{site.host}:{port}"

    def _join_string(self, address: str) -> str:
        """Of the server that is reached at `address`; all of them have one owner, and so one token and certificate. It
        goes into the environment, not into argv, which all users can read."""
        access = Credentials(self.credentials).find(self.address)
        assert access is not None
        host, _, port = address.rpartition(":")
        return replace(access, host=host, port=int(port)).join_string

    # --- while it runs ------------------------------------------------------------------------------------------------

    @property
    def round(self) -> int:
        """Of the layer across."""
        return int(self.status.get("sync_round", 0))

    @property
    def now(self) -> float:
        """Seconds since it began."""
        return time.time() - self.began_at

    @property
    def ever(self) -> list[Process]:
        """Every group that there was, also those that were killed."""
        return [process for process in self._all if process.progress is not None]

    def act(self, what: str, rounds: int, after: Callable[[], bool] = lambda: True) -> None:
        """What is to be seen next, and how many rounds across it takes, once `after` is true: the progress bar."""
        for task in self._progress.task_ids:
            self._progress.stop_task(task)
        self._task, self._rounds = self._progress.add_task(what, total=rounds, facts=""), rounds
        self._first_round = self.round
        self.watch_until(after)
        self._first_round = self.round
        self.watch_until(lambda: self.round >= self._first_round + rounds)

    def watch_until(self, done: Callable[[], bool]) -> None:
        """Look after the processes until it is `done`."""
        moved_at, seen = time.monotonic(), -1
        while True:
            self.look()
            if done():
                return
            for process in self._groups:
                if not process.is_running():
                    raise DemoFailed(f"{process.name} ended too soon; see {process.log}")
            if self.round != seen:
                moved_at, seen = time.monotonic(), self.round
            if time.monotonic() - moved_at > PATIENCE_S:
                raise DemoFailed(f"round {seen + 1} across did not close within {PATIENCE_S:g} s; see {self.folder}")
            time.sleep(LOOK_S)

    @property
    def _groups(self) -> list[Process]:
        return [process for cluster in self.clusters.values() for process in cluster.groups.values()]

    def look(self) -> None:
        """Ask the servers, and show what they say. A server that does not answer in time is asked again later."""
        for server in (self.top, *(cluster.server for cluster in self.clusters.values())):
            if not server.is_running():
                raise DemoFailed(f"{server.name} ended too soon; see {server.log}")
        assert self.transport is not None
        self.status = _status(self.transport) or self.status
        self.seen.append((time.time(), self.status))
        for cluster in self.clusters.values():
            cluster.status = _status(cluster.transport) or cluster.status
        if not self._progress.task_ids:
            return
        losses = [
            worker["loss"]
            for cluster in self.clusters.values()
            for worker in cluster.status.get("workers", {}).values()
            if worker.get("loss") is not None
        ]
        facts = f"loss {sum(losses) / len(losses):.3f}  " if losses else ""
        self._progress.update(
            self._task,
            completed=min(self.round - self._first_round, self._rounds),  # a last one may close while it is ending
            facts=f"{facts}{self.across_bytes / 1e6:.1f} MB across",
        )

    def has_planned_for(self, cluster: str, *members: str) -> bool:
        """Whether the plan inside this cluster is one for these members."""
        plan = (self.clusters[cluster].status.get("layer") or {}).get("plan") or {}
        return set(plan.get("batch_sizes", ())) == set(members)

    def members(self, cluster: str) -> set[str]:
        """As its server says."""
        return set(self.clusters[cluster].status.get("workers", {}))

    @property
    def across_bytes(self) -> int:
        return sum(cluster.line.carried_bytes for cluster in self.clusters.values())

    @property
    def inside_bytes(self) -> int:
        return sum(c.status.get("bytes_received", 0) + c.status.get("bytes_sent", 0) for c in self.clusters.values())

    def finish(self) -> dict[str, End]:
        """Everybody ends in order: groups, then clusters, which contribute what is left, then the top. Returns what
        each ended with, by name."""
        self._say_when()
        self.ended_at = time.time()
        for process in self._groups:
            _wait(process)
        self.look()
        servers = [cluster.server for cluster in self.clusters.values()]
        for server in servers:
            assert server.child is not None
            server.child.terminate()
        for server in servers:
            _wait(server)
        self.top.stop()
        self.top.is_running()
        self._progress.stop()
        return self._ends()

    def _ends(self) -> dict[str, End]:
        agreed = {
            (one.place, one.facts["version"]): one.facts["hash"] for one in self.told() if one.kind == "round"
        }  # every demo has one fragment
        newest = {place: max(version for at, version in agreed if at == place) for place in ("top", *self.clusters)}
        found = {
            place: End(weights_hash(self.weights(place)), place, version, agreed[place, version])
            for place, version in newest.items()
        }
        for name, cluster in self.clusters.items():
            for process in cluster.groups.values():
                last = process.reports()[-1]
                (version,) = last["metrics"]["versions"]
                found[process.name] = End(last["hash"], name, version, agreed[name, version])
        return found

    def _say_when(self) -> None:
        """Every group ends with the second agreement across after the newest one that all clusters hold: then all of
        them, and the top, hold the same weights."""
        held: dict[str, dict[str, int]] = {}  # by hash: the version it has at each place
        for one in self.told():
            if one.kind == "round":
                held.setdefault(one.facts["hash"], {})[one.place] = one.facts["version"]
        common = [places for places in held.values() if places.keys() == {"top", *self.clusters}]
        until = max(common, key=lambda places: places["top"], default=dict.fromkeys(self.clusters, 0))
        unfinished = self._until.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(until))
        unfinished.replace(self._until)

    def weights(self, place: str = "top") -> dict[str, Any]:
        """Those of the server there, at the end."""
        return load_state_dict(self.folder / f"{place}-run" / "latest")

    def _event_log(self, name: str) -> Path:
        return self.folder / f"{name}-events.jsonl"

    def told(self, *places: str) -> list[LoggedEvent]:
        """The events of these servers (none named: of all), in the order of their times."""
        found = []
        for place in places or ("top", *self.clusters):
            text = self._event_log(place).read_text() if self._event_log(place).exists() else ""
            for line in text[: text.rfind("\n") + 1].splitlines():
                facts = json.loads(line)
                found.append(LoggedEvent(facts.pop("time") - self.began_at, place, facts.pop("event"), facts))
        return sorted(found, key=lambda told: told.time)


def _status(transport: HttpTransport) -> dict[str, Any]:
    try:
        return transport.status()
    except TransportError:
        return {}


def _wait(process: Process) -> None:
    give_up_at = time.monotonic() + END_S
    while process.is_running():
        if time.monotonic() > give_up_at:
            raise DemoFailed(f"{process.name} did not end within {END_S:g} s; see {process.log}")
        time.sleep(LOOK_S)
