"""Leased data through two levels: the top leases to clusters, and their servers lease on to workers."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from outerstep.data import LeasedLoader, LeasedSampler
from outerstep.errors import BadRequest, PlanMismatch
from outerstep.events import Event, UnitsDone
from outerstep.hierarchy import Cluster
from outerstep.server import DiLoCoServer
from support import EAGER, Relocatable, in_threads, kill, memory_worker, wait_until

SAMPLES, UNIT = 96, 4
UNITS = SAMPLES // UNIT
PLAIN: dict[str, Any] = {"port": 0, "outer_lr": 1.0, "outer_momentum": 0.0, "codec": "fp32", "down_codec": "fp32"}
SUM: dict[str, Any] = {**PLAIN, "async_mode": True, "dn_buffer_size": 0, "heartbeat_timeout_s": 60.0}


def cells() -> nn.Module:
    return nn.ParameterDict({"cells": nn.Parameter(torch.zeros(SAMPLES))})


class Layers:
    """A top, and clusters of it, each a server; `drawn`: by worker, the samples that came out of its loader."""

    def __init__(
        self, *names: str, place: Path | None = None, workers: int = 2, of_top: dict[str, Any] | None = None
    ) -> None:
        self.told: list[Event] = []
        settings = {"num_workers": len(names), **SUM, **(of_top or {})}
        self.top = DiLoCoServer(cells().state_dict(), event_sink=self.told.append, **settings)
        self.top.service.start()
        self.place, self.drawn = place, dict[str, list[int]]()
        self.servers: dict[str, DiLoCoServer] = {}
        self.clusters: dict[str, Cluster] = {}
        for name in names:
            self.begin(name, workers)

    def make(self, name: str, workers: int) -> DiLoCoServer:
        folder = self.place / name if self.place is not None else None
        found = folder is not None and (folder / "run.json").exists()
        saved = {"save_dir": str(folder)} if folder is not None else {}
        server = DiLoCoServer(None if found else cells().state_dict(), workers, sync_every=3, **PLAIN, **saved)
        server.service.start()
        self.servers[name] = server
        return server

    def begin(self, name: str, workers: int) -> DiLoCoServer:
        server, transport = self.make(name, workers), Relocatable(self.top.service)
        self.clusters[name] = Cluster(server, "memory:1", name, every=2, transport=transport, patience=EAGER).start()
        return server

    def train(self, cluster: str, worker_id: str, transport: Any = None, **of_data: Any) -> None:
        model = cells()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        data = LeasedSampler(SAMPLES, **{"unit_samples": UNIT, **of_data})
        loader = LeasedLoader(list(range(SAMPLES)), data, batch_size=2)  # type: ignore[arg-type]
        with memory_worker(self.servers[cluster], worker_id, model, optimizer, transport, data=data):
            for batch in loader:
                self.drawn.setdefault(worker_id, []).extend(batch.tolist())
                grad = torch.zeros(SAMPLES)
                grad[batch] = -1.0
                model["cells"].grad = grad
                optimizer.step()

    def stop(self) -> None:
        in_threads(*(cluster.stop for cluster in self.clusters.values()))
        for server in (*self.servers.values(), self.top):
            server.service.stop()

    def table(self, cluster: str = "") -> Any:
        server = self.servers[cluster] if cluster else self.top
        return server.service.coordinator.leases.tables["train"]


def test_four_workers_of_two_clusters_share_an_epoch_and_every_unit_is_done_once_above() -> None:
    run = Layers("east", "west")
    in_threads(*(lambda c=c, w=w: run.train(c, f"{c}-{w}") for c in ("east", "west") for w in ("left", "right")))
    run.stop()
    assert sorted(itertools.chain(*run.drawn.values())) == list(range(SAMPLES)), "each sample was drawn once"
    assert bool((run.top.get_global_params()["cells"] > 0).all()), "and is in the model above"
    assert (run.table().done.total, run.table().repeated, run.table().spent.total) == (UNITS, 0, 0)
    assert run.table().done_by.keys() == {"east", "west"}
    told = [event for event in run.told if isinstance(event, UnitsDone)]
    assert sum(end - begin for event in told for begin, end in event.places) == UNITS
    for name in ("east", "west"):
        below = run.table(name)
        assert below.done.total == run.table().done_by[name], "below it is done by members"
        assert not below.granted, "and nothing stays with the cluster"


@pytest.mark.parametrize(
    ("name", "times", "comes_first"),
    [
        ("_write", 3, False),  # before it is durable that it sends
        ("_sent", 1, True),  # after it has sent
        ("_write", 4, False),  # before it is durable what was agreed
        ("_move", 1, False),  # before what was agreed is in its model
        ("_move", 2, True),  # and after
    ],
)
def test_no_unit_is_missed_or_trained_twice_when_a_clusters_server_dies(
    name: str, times: int, comes_first: bool, tmp_path: Path
) -> None:
    run = Layers("west", place=tmp_path, workers=1, of_top={"num_workers": 2})
    server, way = run.make("east", 1), Relocatable(run.top.service)
    doomed = Cluster(server, "memory:1", "east", every=2, wait_s=0.2, transport=way, patience=EAGER)
    left, is_dead, carry_out = times, threading.Event(), getattr(doomed, name)

    def die(*args: Any) -> None:
        nonlocal left
        left -= 1
        if left == 0 and comes_first:
            carry_out(*args)
        if left == 0:
            is_dead.set()
            threading.Event().wait()  # for ever
        carry_out(*args)

    setattr(doomed, name, die)
    run.clusters["east"], line = doomed.start(), Relocatable(server.service)

    def revive() -> None:
        assert is_dead.wait(60.0), "it never came to that"
        assert doomed._lease_thread is not None
        doomed._lease_thread.end()
        kill(run.servers["east"])
        line.move(run.begin("east", 1))

    in_threads(lambda: run.train("east", "e", line), lambda: run.train("west", "w"), revive)
    wait_until(lambda: run.clusters["east"].describe().state.startswith("TRAINING"))
    run.stop()
    assert run.clusters["east"] is not doomed
    assert sorted(itertools.chain(*run.drawn.values())) == list(range(SAMPLES))
    assert torch.equal(run.top.get_global_params()["cells"], torch.ones(SAMPLES))
    assert (run.table().done.total, run.table().repeated, run.table().spent.total) == (UNITS, 0, 0)
    assert run.table("east").repeated == 0


def test_members_wait_for_the_layer_above_and_are_told_so_and_what_it_refuses_they_are_told_too(
    tmp_path: Path,
) -> None:
    run = Layers("east", "west")
    in_threads(*(lambda w=w: run.train("west", w) for w in ("a", "b")))
    assert run.table().done_by.keys() <= {"west"}
    with pytest.raises(PlanMismatch, match="seed is 0 in this run, got 7"):
        run.train("east", "c", seed=7)
    [shown] = [one for one in run.servers["east"].status()["data"] if one["name"] == "train"]
    assert "seed is 0" in shown["waiting_for"]
    run.stop()


def test_a_server_that_may_go_back_leases_on_nothing(tmp_path: Path) -> None:
    server = DiLoCoServer(
        cells().state_dict(), 1, sync_every=3, save_dir=str(tmp_path), durability="checkpoint", **PLAIN
    )
    server.expect_layer_above()
    server.service.start()
    model = cells()
    data = LeasedSampler(SAMPLES, unit_samples=UNIT)
    worker = memory_worker(server, "w", model, torch.optim.SGD(model.parameters(), lr=1.0), data=data)
    with worker, pytest.raises(BadRequest, match="records checkpoints"):
        next(iter(LeasedLoader(list(range(SAMPLES)), data, batch_size=2)))  # type: ignore[arg-type]
    server.service.stop()
