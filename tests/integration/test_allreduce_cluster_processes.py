"""Two all-reduce jobs of two ranks and a server across, each a process: jobs are killed in the middle of an exchange
and restarted from what they had saved, and so is the server. A ledger of whole numbers shows which steps are in the
model at the end, and how often."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clusters import Cluster
from integration.test_torchft_cluster_processes import TOP
from ranks import Ranks

pytestmark = pytest.mark.slow

JOB = Path(__file__).with_name("allreduce_cluster_job.py")
H, EVERY = 4, 2
INSIDE = {"topology": "allreduce", "sync_every": H, "codec": "fp32", "above_every": EVERY, "peer_timeout_s": 60}


class Life(Ranks):
    """A job of two ranks, from its start to its end. `after`: it goes on from what that one had saved. `death`: where
    rank 0 dies."""

    def __init__(
        self, site: Site, cluster: str, after: Life | None = None, death: str = "", wait_s: float = 60.0
    ) -> None:
        self.name, self.cell, self.folder = f"{cluster}{len(site.lives)}", 2 * len(site.lives), site.folder
        said = {**INSIDE, "above": site.top.address, "cluster": cluster, "above_wait_s": wait_s}
        settings = {f"OUTERSTEP_{field.upper()}": str(value) for field, value in said.items()}
        settings |= {"DEATH": death, "AFTER": after.name if after is not None else ""}
        logs = [self.folder / f"{self.name}-{rank}.log" for rank in (0, 1)]
        super().__init__([str(JOB), self.name, str(self.cell), str(self.folder)], logs, settings=settings)
        site.lives.append(self)

    def read(self, what: str) -> str:
        file = self.folder / f"{self.name}.{what}"
        return file.read_text() if file.exists() else ""

    @property
    def offers(self) -> list[int]:
        """How many of its own steps were in each of its contributions."""
        return [int(json.loads(line)[self.cell]) for line in self.read("offers").splitlines()]

    def ends(self) -> list[dict[str, Any]]:
        for process in self.processes:
            assert process.wait(120) == 0, self.log()
        return [json.loads((self.folder / f"{self.name}-{rank}.end").read_text()) for rank in (0, 1)]

    def log(self) -> str:
        return "\n".join((self.folder / f"{self.name}-{rank}.log").read_text()[-3000:] for rank in (0, 1))


class Site:
    def __init__(self, folder: Path) -> None:
        self.folder, self.lives = folder, list[Life]()
        self.top = Cluster(folder, *TOP, model="ledger")

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        give_up_at = time.monotonic() + 120.0
        while not condition():
            ended = [life for life in self.lives if any(each.poll() not in (None, -9) for each in life.processes)]
            if time.monotonic() > give_up_at or ended:
                raise AssertionError(f"waited in vain for {what}\n" + "\n".join(life.log() for life in self.lives))
            time.sleep(0.05)

    def across(self, rounds: int) -> None:
        before = self.top.round()
        self.wait(lambda: self.top.round() >= before + rounds, f"{rounds} rounds across")

    def dies(self, life: Life) -> None:
        """Rank 0 where it was told to, and the other with it, as torchrun ends a job."""
        (self.folder / f"{life.name}.armed").touch()
        first, second = life.processes
        self.wait(lambda: first.poll() is not None, f"the death of {life.name}")
        second.kill()
        assert first.wait(30) == -signal.SIGKILL, life.log()
        second.wait(30)

    def close(self) -> None:
        self.top.close()
        for life in self.lives:
            life.close()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.close()


def test_jobs_that_are_killed_go_on_from_their_states_and_no_step_counts_twice(site: Site) -> None:
    west, first = Life(site, "west"), Life(site, "east", death="before _move")
    site.across(2)

    # What it sent was agreed on, and its states do not know: they are older than the contribution.
    site.dies(first)
    second = Life(site, "east", first, death="after _sent")
    site.across(2)

    # What it sent may have arrived, or not.
    site.dies(second)
    third = Life(site, "east", second, death="before _move saved", wait_s=0.0)
    site.across(2)

    # Its ranks train on meanwhile, so a state knows of the contribution that is under way.
    site.dies(third)
    fourth = Life(site, "east", third)
    site.across(1)

    # The server across. (Both clusters are in each of its rounds.)
    site.top.server.kill()
    site.top.server.wait(30)
    site.top.start_server(*TOP)
    site.wait(site.top.answers, "the server")
    site.across(2)

    (site.folder / "stop").write_text(str(site.top.round() + 2))
    ends = [*west.ends(), *fourth.ends()]
    assert len({end["hash"] for end in ends}) == 1
    cells = ends[0]["cells"]
    assert [end["cells"] for end in ends] == [cells] * 4
    assert site.top.participants() == ["east", "west"]
    check_books(site, cells)


def check_books(site: Site, cells: list[float]) -> None:
    west, first, second, third, fourth = site.lives
    for life in site.lives:
        assert cells[life.cell] == cells[life.cell + 1] == int(cells[life.cell])
    counted = {life.name: int(cells[life.cell]) for life in site.lives}
    for life in (west, fourth):
        assert [end["steps"] for end in life.ends()] == [counted[life.name]] * 2
    resumed = {life.name: int(life.read("resumed")) for life in (first, second, third)}
    # The state was older than what was sent last: that counts, and what the state knew beside it is not added again.
    assert counted[first.name] == first.offers[-1] > resumed[first.name]
    assert counted[second.name] in (second.offers[-1], resumed[second.name])
    assert third.offers[-1] < counted[third.name] == resumed[third.name]
