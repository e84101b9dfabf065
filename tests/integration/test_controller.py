"""The controller in a run: real workers and sockets, over a line whose rate changes. What is asserted are decisions."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from faults.proxy import Link, Proxy
from outerstep.coordination.autoconfig import Recommendation
from outerstep.coordination.cost import bytes_per_value
from outerstep.errors import ConfigError
from outerstep.events import Event, PlanDecided
from outerstep.hierarchy import Cluster
from outerstep.server import DiLoCoServer
from outerstep.types import THE_SERVER, MeasuredLink, MemberFacts
from outerstep.worker import DiLoCoWorker
from support import Ledger, count, in_threads, wait_until

CELLS = 200_000  # int4 of it is still enough to measure a line with
PLAIN = {"outer_lr": 1.0, "outer_momentum": 0.0}
STEP_S = 0.002
T = TypeVar("T")
FAST, SLOW = Link(80.0, 0.002), Link(8.0, 0.002)


class Line(Proxy):
    """Whose rate may change."""

    def becomes(self, link: Link) -> None:
        for lane in self._lanes.values():
            lane.link = link


def train(
    name: str,
    cell: int,
    address: str,
    over: threading.Event,
    *,
    samples: int = 0,
    advised: Callable[[Recommendation], object] = lambda advice: None,
    prepare: Callable[[DiLoCoWorker], object] = lambda worker: None,
) -> DiLoCoWorker:
    model = Ledger(CELLS)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with DiLoCoWorker(model, optimizer, address, worker_id=name, heartbeat_interval=0.1) as worker:
        worker.on_recommendation(advised)
        prepare(worker)
        while not over.is_set():
            time.sleep(STEP_S)
            worker.count(samples=samples)
            count(model, optimizer, cell, 1)
    return worker


class Run:
    """A server with a target behind a line, and what it has decided."""

    def __init__(self, **settings: Any) -> None:
        self.decided: list[PlanDecided] = []
        self.over = threading.Event()
        usual = {"num_workers": 2, "target_utilization": 0.5, "least_sync_every": 2, "sync_every": 20, **PLAIN}
        self.server = DiLoCoServer(Ledger(CELLS).state_dict(), port=0, event_sink=self._notice, **{**usual, **settings})

    def _notice(self, event: Event) -> None:
        if isinstance(event, PlanDecided):
            self.decided.append(event)

    @property
    def sync_every(self) -> int:
        """In force."""
        plan = self.server.service.coordinator.plan
        assert plan is not None
        return plan.sync_every

    def watch(self, look: Callable[[], T]) -> T:
        try:
            wait_until(lambda: self.decided)
            return look()
        finally:
            self.over.set()

    def with_workers(self, address: str, look: Callable[[], T], **settings: Any) -> tuple[T, list[DiLoCoWorker]]:
        """What `look` finds while two workers train, until it has."""
        trains = [partial(train, f"w{i}", i, address, self.over, **settings) for i in range(2)]
        found, *workers = in_threads(partial(self.watch, look), *trains)
        return found, workers


@pytest.mark.slow
def test_a_line_that_becomes_ten_times_slower_and_back_is_followed() -> None:
    """On the fast line the shortest interval allowed will do with the most exact codec."""
    run = Run(least_sync_every=100, sync_every=100, down_codec="int4")
    with run.server as server, Line(server.address, link=FAST) as line:

        def look() -> dict[str, Any]:
            wait_until(lambda: server.status()["links"])
            status = server.status()
            line.becomes(SLOW)
            wait_until(lambda: run.decided[-1].cause == "slower")
            slower = len(run.decided)
            coordinator = server.service.coordinator
            wait_until(lambda: coordinator.plan.codec != "bf16")  # the next round boundary
            slow = coordinator.plan
            line.becomes(FAST)
            wait_until(lambda: run.decided[-1].cause == "faster")
            wait_until(lambda: coordinator.plan.revision > slow.revision)
            again = coordinator.plan
            return {"status": status, "slow": slow, "again": again, "slower": slower}

        found, workers = run.with_workers(line.address, look)
        layer = server.status()["layer"]
    slower, faster = run.decided[found["slower"] - 1], run.decided[-1]
    assert run.decided[0].cause == "first"
    assert "the target is missed" in slower.reason
    assert "the link allows a gentler setting" in faster.reason
    assert slower.changes["codec"].startswith("bf16 →")
    assert bytes_per_value(found["slow"].codec) < bytes_per_value(found["again"].codec)
    assert faster.from_round >= slower.from_round + 10
    assert {worker.plan.revision for worker in workers} == {server.service.coordinator.plan.revision}
    assert [made["cause"] for made in layer["decisions"]] == [made.cause for made in run.decided]
    links = {(one["source"], one["target"], one["measured_by"]) for one in found["status"]["links"]}
    assert {("w0", THE_SERVER, THE_SERVER), (THE_SERVER, "w0", "w0"), ("w1", THE_SERVER, "w1")} <= links
    assert all(worker.sync_metrics["steps_discarded"] == 0 for worker in workers), "nobody was left behind"


@pytest.mark.slow
def test_a_policy_of_ones_own_a_declared_accelerator_and_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run: the shipped example decides, members tell of themselves, the script hears what is recommended; the
    server is restarted and goes on with the plan in its journal."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    monkeypatch.setenv("OUTERSTEP_ACCELERATOR", "huawei:910B")
    monkeypatch.setenv("OUTERSTEP_DATA_LOCATION", "berlin")
    settings = {
        "policy": "own_policy:codec_only",
        "global_batch": 80,
        "least_sync_every": 20,
        "save_dir": str(tmp_path / "run"),
    }
    run, heard = Run(**settings), list[Recommendation]()
    with run.server as server:

        def look() -> dict[str, Any]:
            wait_until(lambda: heard)
            return server.status()

        status, _ = run.with_workers(server.address, look, samples=8, advised=heard.append)
        kept = server.service.coordinator.steering.plan
        revision = server.service.coordinator.plan.sync_every
    assert kept is not None
    known = status["clusters"]["w0"]
    assert (known["accelerators"], known["backends"], known["data_location"]) == (
        ["huawei:910B"],
        ["hccl", "gloo"],
        "berlin",
    )
    assert known["batch_size"] == 8
    assert status["layer"]["plan"]["backend"] == "hccl", "all are of one vendor"
    assert heard[0].settings.batch_size < 8
    least = sum(
        each.local_steps for each in kept.assignments
    )  # a step has one sample: on a busy machine one is far faster
    assert sum(each.samples for each in kept.assignments) == max(80, least)
    again = Run(**settings)
    with again.server as server:
        assert server.service.coordinator.steering.plan == kept
        assert server.service.coordinator.plan.sync_every == revision
        assert again.decided == []


def test_a_policy_that_cannot_be_found_is_refused_by_name() -> None:
    for name in ("no_such_module:function", "json:no_such_function", "json:__name__", "json"):
        with pytest.raises(ConfigError, match="policy must"):
            Run(policy=name)


def test_a_probe_measures_a_link_that_nothing_travels_on() -> None:
    """A model far below what a measurement needs."""
    settings = {"target_utilization": 0.5, **PLAIN}
    with DiLoCoServer(Ledger().state_dict(), num_workers=1, port=0, **settings) as server:
        model = Ledger()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with DiLoCoWorker(model, optimizer, server.address, worker_id="w", heartbeat_interval=0.05):
            wait_until(lambda: len(server.status()["links"]) == 2)
            links = server.status()["links"]
    assert {(one["source"], one["target"]) for one in links} == {("w", THE_SERVER), (THE_SERVER, "w")}
    assert all(one["bytes_per_s"] > 0.0 and one["measured_by"] == "w" for one in links)


@pytest.mark.slow
def test_a_worker_that_lies_about_everything_makes_nobodys_interval_absurd() -> None:
    """On a fast line three honest workers need few steps. The fourth claims a line of one byte per second, a minute
    away, a speed that no machine has, and a batch of a million million."""
    run = Run(num_workers=4, most_sync_every=500)

    def lie(worker: DiLoCoWorker) -> None:
        link, beat = worker._topology._link, worker._control.heartbeat  # type: ignore[union-attr]
        ends = ((worker.worker_id, THE_SERVER), (THE_SERVER, worker.worker_id), ("w0", THE_SERVER))
        links = tuple(MeasuredLink(source=s, target=t, bytes_per_s=1.0, latency_s=60.0) for s, t in ends)
        link._told = lambda: MemberFacts(batch_size=10**12, unit_steps=10**9, size=10**6, links=links)
        worker._control.heartbeat = lambda step, speed, loss: beat(step, 1e9, loss)  # type: ignore[union-attr]

    with run.server as server:

        def look() -> dict[str, Any]:
            wait_until(lambda: server.sync_round >= 15)
            wait_until(lambda: server.status()["clusters"]["w3"]["size"] == 10**6)
            decided = len(run.decided)
            wait_until(lambda: server.sync_round >= 20 or len(run.decided) > decided)
            return server.status()["layer"]

        trains = [partial(train, f"w{i}", i, server.address, run.over) for i in range(3)]
        trains.append(partial(train, "w3", 3, server.address, run.over, prepare=lie))
        layer, *_ = in_threads(partial(run.watch, look), *trains)
    steps = layer["plan"]["local_steps"]
    assert set(steps) == {"w0", "w1", "w2", "w3"}
    assert all(steps[name] <= 50 for name in ("w0", "w1", "w2")), steps
    assert steps["w3"] <= 500
    assert any("'w0' → 'the server'" in doubt for doubt in layer["last"]["not_believed"]), "of somebody else's link"


@pytest.mark.slow
def test_the_top_decides_for_clusters_whose_leaders_tell_of_them() -> None:
    """Two clusters of one worker each: the unit up there is a round of theirs."""
    top = Run(least_sync_every=1, most_sync_every=8, sync_every=2)
    inside = {"num_workers": 1, "port": 0, "sync_every": 5, **PLAIN}
    with (
        top.server as server,
        DiLoCoServer(Ledger(CELLS).state_dict(), **inside) as east,
        DiLoCoServer(Ledger(CELLS).state_dict(), **inside) as west,
        Cluster(east, server.address, "east"),
        Cluster(west, server.address, "west"),
    ):

        def look() -> tuple[dict[str, Any], Any]:
            wait_until(lambda: server.service.coordinator.plan.assignments)
            return server.status(), server.service.coordinator.plan

        trains = [partial(train, f"w{i}", i, one.address, top.over) for i, one in enumerate((east, west))]
        (status, plan), *_ = in_threads(partial(top.watch, look), *trains)
    known = status["clusters"]
    assert {name: one["members"] for name, one in known.items()} == {"east": ["w0"], "west": ["w1"]}
    assert {one["unit_steps"] for one in known.values()} == {5}
    states = {name: place.split()[0] for one in known.values() for name, place in one["states"].items()}
    assert states == {"w0": "TRAINING", "w1": "TRAINING"}
    assert [each.cluster for each in plan.assignments] == ["east", "west"]
    assert all(1 <= each.local_steps <= 8 for each in plan.assignments)
    assert {each.leader for each in plan.assignments} == {"w0", "w1"}
