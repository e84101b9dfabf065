"""Two clusters of two replicas, a torchft lighthouse in each and a server across, as they are typed: every process is
killed once. A ledger of whole numbers shows which steps are in the model at the end, and how often."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("RUST_LOG", "warn")
pytest.importorskip("torchft")

from clusters import Cluster
from integration.torchft_cluster_job import STEP
from nursery import Child
from ports import free_port

pytestmark = pytest.mark.slow

JOB = Path(__file__).with_name("torchft_cluster_job.py")
EVERY = 2  # rounds of a cluster between two exchanges across
TOP = (  # both clusters are in every round, however long one is away; what they did is added
    "-n", "2", "--codec", "fp32", "--outer-lr", "2", "--outer-momentum", "0", "--heartbeat-timeout", "600",
    "--min-workers", "2",
)  # fmt: skip
INSIDE = {
    "topology": "torchft", "sync_every": 4, "codec": "fp32", "quorum_timeout_s": 3, "transfer_timeout_s": 4,
    "above_every": EVERY, "above_wait_s": 5, "exit_patience_s": 30,
}  # fmt: skip


class Site:
    """The server across, two lighthouses, and replicas that each have a cell of the ledger."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.top = Cluster(folder, *TOP, model="ledger")
        self.lighthouses = {}
        for cluster in ("east", "west"):
            self.lighthouses[cluster] = f"127.0.0.1:{free_port()}"
            port = self.lighthouses[cluster].rpartition(":")[2]
            words = ["lighthouse", "--port", port, "--join-timeout", "5", "--heartbeat-timeout", "1.5"]
            self.top.spawn(f"lighthouse-{cluster}", ["-m", "outerstep", *words])
        self.cells = 0
        self.names: dict[int, str] = {}

    def replica(self, name: str, *, is_typed: bool = False) -> tuple[int, Child]:
        """`is_typed`: on a command line; else as that starts its script, which takes less time."""
        cell, self.cells = self.cells, self.cells + 1
        self.names[cell], cluster = name, name.partition("-")[0]
        said = {
            **INSIDE, "min_replicas": 1, "lighthouse": self.lighthouses[cluster], "above": self.top.address,
            "cluster": cluster, "worker_id": name,
        }  # fmt: skip
        script = [str(JOB), str(cell), str(self.folder)]
        if is_typed:
            flags = [word for field, value in said.items() for word in (flag(field), str(value))]
            words = ["-m", "outerstep", "worker", *flags, "--", sys.executable, *script]
            return cell, self.top.spawn(f"cell-{cell}", words)
        environ = {f"OUTERSTEP_{field.upper()}": str(value) for field, value in said.items()}
        return cell, self.top.spawn(f"cell-{cell}", script, **environ)

    def log(self, cell: int) -> str:
        return self.top.log(f"cell-{cell}")

    def leads_since(self, cell: int) -> float:
        """When it was chosen last; 0 = never."""
        file = self.folder / f"{cell}.leads"
        return float(file.read_text() or 0.0) if file.exists() else 0.0

    def instance(self, cell: int) -> str:
        return (self.folder / f"{cell}.instance").read_text()

    def led_when_it_came(self, cell: int) -> str:
        """The instance that led when this replica first met the others; "" = it has met nobody."""
        file = self.folder / f"{cell}.met"
        return file.read_text() if file.exists() else ""

    def holds(self, *cells: int) -> int:
        """How often these replicas have had their cluster wait for the layer above."""
        files = [self.folder / f"{cell}.holds" for cell in cells]
        return sum(len(file.read_text().splitlines()) for file in files if file.exists())

    def cut(self, cluster: str) -> Path:
        """No leader of this cluster gets through to the layer above while the file is there."""
        file = self.folder / f"{cluster}.cut"
        file.touch()
        return file

    def names_as_missing(self, cluster: str) -> bool:
        return f"of {cluster}" in self.top.status()["fragments"][0]["waiting_for"]

    def ranked(self, cells: Iterable[int]) -> list[int]:
        """The leader first."""
        return sorted(cells, key=self.leads_since, reverse=True)

    def rounds(self, cell: int) -> list[dict[str, Any]]:
        file = self.folder / f"{cell}.rounds"
        text = file.read_text() if file.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def further(self, rounds: int, *cells: int) -> None:
        """Until these replicas have closed so many more."""
        before = [len(self.rounds(cell)) for cell in cells]
        self.wait(
            lambda: all(len(self.rounds(c)) >= b + rounds for c, b in zip(cells, before, strict=True)),
            f"replicas {cells} to close {rounds} rounds",
        )

    def across(self, rounds: int) -> None:
        before = self.top.round()
        self.wait(lambda: self.top.round() >= before + rounds, f"{rounds} rounds across")

    def stop(self, *cells: int) -> None:
        """When all of these stand still after an exchange across, and no other is under way there: so that each cluster
        has one left, and both are in it. A replica that was asked too late waits in vain for the next exchange and then
        continues with rounds of its own: in that case all are asked again."""
        pause, ready = self.folder / "pause", {cell: self.folder / f"{cell}.ready" for cell in cells}

        def stands(cell: int) -> bool:
            return ready[cell].exists()

        for _ in range(10):
            before = {cell: len(self.rounds(cell)) for cell in cells}
            pause.touch()
            self.wait(
                lambda b=before: all(stands(cell) or len(self.rounds(cell)) > b[cell] + 2 * EVERY for cell in cells),
                "every replica to stand still, or to go on without an exchange",
            )
            if all(map(stands, cells)) and self.is_quiet():
                (self.folder / "stop").touch()
                return
            pause.unlink()
            for file in ready.values():
                file.unlink(missing_ok=True)
            self.across(2)  # until they are in step again
        raise AssertionError(f"replicas {cells} never stood still after the same exchange")

    def is_quiet(self) -> bool:
        return not self.top.status()["pending_submissions"]

    def is_whole(self) -> bool:
        """Nobody has ended who was not killed."""
        return all(child.poll() in (None, -signal.SIGKILL) for child in self.top.children)

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        give_up_at = time.monotonic() + 90.0
        while not condition():
            if not self.is_whole() or time.monotonic() > give_up_at:
                logs = "\n".join(f"--- {file.name}\n{file.read_text()[-1500:]}" for file in self.folder.glob("*.log"))
                raise AssertionError(f"waited in vain for {what}\n{logs}")
            time.sleep(0.1)

    # --- the books ----------------------------------------------------------------------------------------------------

    def agreed(self) -> dict[str, dict[int, dict[int, float]]]:
        """By run of a cluster and version: what each cell gained. (A round that only a killed replica had is another
        one's version afterwards.)"""
        instances = {file.read_text(): int(file.stem) for file in self.folder.glob("*.instance")}
        lines = sorted((line for cell in range(self.cells) for line in self.rounds(cell)), key=lambda line: line["at"])
        found: dict[str, dict[int, dict[int, float]]] = defaultdict(dict)
        for line in lines:
            gained = {instances[i]: STEP * steps / len(line["active"]) for i, steps in line["active"].items()}
            found[line["run"]][line["version"]] = gained
        return found


def flag(field: str) -> str:
    return "--" + field.removesuffix("_s").replace("_", "-")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.top.close()


def kill(*children: Child) -> None:
    for child in children:
        child.kill()
    for child in children:
        child.wait(30)


def test_two_clusters_of_two_outlive_every_process_and_lose_only_a_killed_ones_own_steps(site: Site) -> None:
    east = dict([site.replica("east-0", is_typed=True), site.replica("east-1")])
    west = dict([site.replica("west-0"), site.replica("west-1")])
    site.across(1)
    site.further(1, *east, *west)

    # A follower.
    leader, follower = site.ranked(east)
    kill(east.pop(follower))
    site.across(1)
    east |= [site.replica(site.names[follower])]
    site.further(2 * EVERY, *east)

    # The leader: the other takes over, and it comes back as a follower.
    leader, follower = site.ranked(east)
    led_since = site.leads_since(follower)
    cut, round_before, holds_before = site.cut("east"), site.top.round(), site.holds(*west)
    kill(east.pop(leader))
    site.wait(lambda: site.leads_since(follower) > led_since, "the follower to lead")
    site.wait(lambda: site.names_as_missing("east"), "the report of the stall")
    # However long the new leader takes to get through: both clusters' own rounds go on, and no round across closes but
    # the one that the dead leader may have contributed to. West waits once for each exchange that it begins.
    site.further(2 * EVERY + 1, follower, *west)
    closed, held = site.top.round() - round_before, site.holds(*west) - holds_before
    assert closed <= 1
    assert held <= closed + 1
    assert site.names_as_missing("east")
    cut.unlink()
    site.across(1)
    assert site.top.participants() == ["east", "west"]
    cell, child = site.replica(site.names[leader])
    east[cell] = child
    site.further(2 * EVERY, *east)
    # Whoever falls behind the others, in a vote that failed for it alone, stands down: later on it may lead again.
    assert site.led_when_it_came(cell) == site.instance(follower)
    site.across(1)

    # The whole cluster: the other one's rounds go on meanwhile, and it is said for whom the one across waits.
    dead = site.rounds(follower)[-1]["run"]
    kill(*east.values())
    site.further(2 * EVERY + 1, *west)
    site.wait(lambda: site.names_as_missing("east"), "the report of the stall")
    east = dict([site.replica("east-0"), site.replica("east-1")])
    site.across(1)
    site.further(1, *east)

    # The server across.
    kill(site.top.server)
    site.further(2 * EVERY, *east, *west)
    site.top.start_server(*TOP)
    site.wait(site.top.answers, "the server")
    site.across(2)

    site.stop(*east, *west)
    everybody = east | west
    for cell, child in everybody.items():
        assert child.wait(90) == 0, site.log(cell)
    ends = [json.loads((site.folder / f"{cell}.end").read_text()) for cell in everybody]
    assert len({end["hash"] for end in ends}) == 1
    cells = ends[0]["cells"]
    assert [end["cells"] for end in ends] == [cells] * 4
    check_books(site, cells, dead)


def check_books(site: Site, cells: list[float], dead: str) -> None:
    """Every round that a surviving run has agreed on is in the model once; of the dead one, those up to some version,
    which is no older than its last exchange."""
    agreed = site.agreed()
    assert len(agreed) == 3
    for run, versions in agreed.items():
        own = sorted({cell for gained in versions.values() for cell in gained})
        sums = list(
            accumulate(
                ([gained.get(cell, 0.0) for cell in own] for _, gained in sorted(versions.items())),
                lambda left, right: [x + y for x, y in zip(left, right, strict=True)],
            )
        )
        there = [cells[cell] for cell in own]
        if run == dead:
            assert there in sums[-2 * EVERY - 1 :]
        else:
            assert there == sums[-1]
    assert all(value == int(value) for value in cells)
