"""Leased data with real workers, loaders and a server: every sample is in the model once, whoever trained it."""

from __future__ import annotations

import csv
import itertools
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DistributedSampler
from typer.testing import CliRunner

from nursery import start
from outerstep.cli import app
from outerstep.coordination.server.plan import changed
from outerstep.data import (
    DatasetShards,
    ElasticSampler,
    LeasedLoader,
    LeasedSampler,
    LeasedShards,
    LeasedStream,
    MixedLoader,
)
from outerstep.data.order import part_of, samples_of
from outerstep.errors import ConfigError, PlanMismatch, WorkerError
from outerstep.events import Event, UnitsDone, UnitsRepeated
from outerstep.server import DiLoCoServer
from outerstep.types import Assignment, Wishes
from outerstep.worker import DiLoCoWorker
from ranks import Ranks
from support import Relocatable, in_threads, kill, memory_topology, memory_worker

SAMPLES = 48
PLAIN = {"outer_lr": 1.0, "outer_momentum": 0.0, "codec": "fp32", "down_codec": "fp32"}


def cells(samples: int = SAMPLES) -> nn.Module:
    return nn.ParameterDict({"cells": nn.Parameter(torch.zeros(samples))})


class Run:
    """A server, and workers in threads; `drawn`: by worker, the samples that came out of its loader."""

    def __init__(self, workers: int, samples: int = SAMPLES, **settings: Any) -> None:
        self.samples, self.told = samples, list[Event]()
        self.server = DiLoCoServer(
            cells(samples).state_dict(), workers, port=0, sync_every=3, event_sink=self.told.append, **PLAIN, **settings
        )
        if "insecure" not in settings:  # no sockets, unless they are asked for
            self.server.service.start()
        self.drawn: dict[str, list[int]] = {}

    def train(self, worker_id: str, *, batch_size: int = 2, most: int | None = None, **of_data: Any) -> None:
        """Each step adds one to the cells of its samples."""
        of_loader = {name: of_data.pop(name) for name in ("num_workers", "drop_last") if name in of_data}
        model = cells(self.samples)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        data = LeasedSampler(self.samples, unit_samples=4, **of_data)
        loader = LeasedLoader(list(range(self.samples)), data, batch_size=batch_size, **of_loader)  # type: ignore[arg-type]
        with memory_worker(self.server, worker_id, model, optimizer, data=data):
            for epoch in range(max(data.spec.epochs, 1)):
                for step, batch in enumerate(loader):
                    self.drawn.setdefault(worker_id, []).extend(batch.tolist())
                    grad = torch.zeros(self.samples)
                    grad[batch] = -1.0
                    model["cells"].grad = grad
                    optimizer.step()
                    if epoch == 0 and step + 1 == most:
                        break

    @property
    def table(self) -> Any:
        return self.server.service.coordinator.leases.tables["train"]


def test_two_workers_share_an_epoch_and_every_sample_is_done_once() -> None:
    run = Run(2)
    in_threads(lambda: run.train("a"), lambda: run.train("b"))
    assert sorted(itertools.chain(*run.drawn.values())) == list(range(SAMPLES))
    assert run.table.done.total == SAMPLES // 4
    assert run.table.repeated == 0
    told = [event for event in run.told if isinstance(event, UnitsDone)]
    assert sum(end - begin for event in told for begin, end in event.places) == SAMPLES // 4


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_lone_worker_has_every_sample_in_its_model_once(num_workers: int) -> None:
    run = Run(1)
    run.train("a", num_workers=num_workers, batch_size=5)
    assert torch.equal(run.server.get_global_params()["cells"], torch.ones(SAMPLES))
    assert run.drawn["a"] != sorted(run.drawn["a"]), "in an order of its own"


def test_each_epoch_has_every_sample_once_in_another_order() -> None:
    run = Run(1)
    run.train("a", epochs=2)
    first, second = run.drawn["a"][:SAMPLES], run.drawn["a"][SAMPLES:]
    assert sorted(first) == sorted(second) == list(range(SAMPLES))
    assert first != second
    assert torch.equal(run.server.get_global_params()["cells"], 2 * torch.ones(SAMPLES))


def test_a_loop_that_is_left_early_goes_on_with_the_next_sample() -> None:
    run = Run(1)
    run.train("a", epochs=2, most=3)  # an epoch's loop is left after three batches; the next begins where it was
    assert run.drawn["a"][:6] != run.drawn["a"][6:12]
    assert sorted(run.drawn["a"][:SAMPLES]) == list(range(SAMPLES))


def test_the_rest_of_an_epoch_that_fills_no_batch_may_be_dropped() -> None:
    run = Run(1, samples=50)
    run.train("a", batch_size=8, drop_last=True)
    assert len(run.drawn["a"]) == 48
    assert (run.table.done.total, run.table.free.total) == (12, 1), "what nobody trained is not in the model"


def test_a_worker_that_means_other_data_is_refused() -> None:
    run = Run(1)
    run.train("a")
    with pytest.raises(PlanMismatch, match="seed is 0 in this run, got 7"):
        run.train("b", seed=7)


def test_a_sampler_without_a_worker_says_so() -> None:
    with pytest.raises(WorkerError, match="belongs to no worker"):
        next(iter(LeasedSampler(8)))
    with pytest.raises(ConfigError, match="leave it out"):
        LeasedLoader(list(range(8)), LeasedSampler(8), shuffle=True)  # type: ignore[arg-type]


def test_leased_data_survives_a_restart_of_the_server(tmp_path: Path) -> None:
    run = Run(1, save_dir=str(tmp_path), durability="round")
    line = Relocatable(run.server.service)
    model = cells()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    data = LeasedSampler(SAMPLES, unit_samples=4)
    loader = LeasedLoader(list(range(SAMPLES)), data, batch_size=2)  # type: ignore[arg-type]
    topology = memory_topology(run.server, "a", line)
    again: list[DiLoCoServer] = []
    with DiLoCoWorker(model, optimizer, "memory:1", worker_id="a", topology=topology, data=data):
        for step, batch in enumerate(loader):
            grad = torch.zeros(SAMPLES)
            grad[batch] = -1.0
            model["cells"].grad = grad
            optimizer.step()
            if step == 10:
                kill(run.server)
                resumed = DiLoCoServer(
                    cells().state_dict(), 1, port=0, sync_every=3, save_dir=str(tmp_path), durability="round", **PLAIN
                )
                resumed.service.start()
                line.move(resumed)
                again.append(resumed)
    assert torch.equal(again[0].get_global_params()["cells"], torch.ones(SAMPLES))
    table = again[0].service.coordinator.leases.tables["train"]
    assert (table.done.total, table.repeated) == (SAMPLES // 4, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loaders", "kind", "dies"),
    [
        (0, "samples", "job"),
        (4, "samples", "job"),
        (0, "shards", "job"),
        (2, "shards", "job"),
        (2, "samples", "loader"),
    ],
)
def test_a_worker_killed_by_sigkill_resumes_at_the_exact_sample(
    tmp_path: Path, loaders: int, kind: str, dies: str
) -> None:
    """If one of its loader processes is killed, PyTorch ends the job with an error, wherever it is: also between a
    contribution and the state that knows of it. Units end with the contributions there: a part of a unit would be
    trained once more (docs/concepts/data.md)."""
    every = 3 if dies == "job" else 2
    server = DiLoCoServer(cells().state_dict(), 1, port=0, sync_every=every, insecure=True, host="127.0.0.1", **PLAIN)
    server.start()
    script = str(Path(__file__).parent / "leased_job.py")
    environ = {
        "OUTERSTEP_WORKER_ID": "w", "DILOCO_SERVER": f"http://{server.address}", "OMP_NUM_THREADS": "1",
        "OUTERSTEP_IDENTITY_DIR": str(tmp_path / "keys"),
    }  # fmt: skip
    try:
        for life, die_at in enumerate((4, 7, 0)):
            with (tmp_path / f"log-{life}").open("wb") as log:
                job = [script, str(tmp_path), str(SAMPLES), "2", str(die_at), str(loaders), kind, dies]
                code = run_job(job, log, environ)
            said = (tmp_path / f"log-{life}").read_text()
            assert code == ((-9 if dies == "job" else 1) if die_at else 0), said[-3000:]
            assert not die_at or ("SIGKILL for a loader" in said) == (dies == "loader")
        if dies == "job":
            drawn = [int(word) for word in (tmp_path / "w.log").read_text().split()]
            assert sorted(drawn) == list(range(SAMPLES)), "no sample was left out, and none drawn twice"
        assert torch.equal(server.get_global_params()["cells"], torch.ones(SAMPLES))
        table = server.service.coordinator.leases.tables["train"]
        units = SAMPLES // 4 if kind == "samples" else len(SHARDS)
        assert (table.done.total, table.repeated, table.spent.total) == (units, 0, 0)
    finally:
        server.stop()


@pytest.mark.slow
@pytest.mark.parametrize("resumes", [True, False])
def test_a_part_of_a_unit_that_is_trained_once_more_after_sigkill_is_counted(tmp_path: Path, resumes: bool) -> None:
    """Killed between a contribution and the state that would know of it: that ends in the middle of a unit, for six
    samples are in a round and four in a unit. It resumes from before, or another trains the unit from its start."""
    log = tmp_path / "events.jsonl"
    settings = {**PLAIN, "insecure": True, "host": "127.0.0.1", "event_log": str(log), "heartbeat_timeout": 6.0}
    server = DiLoCoServer(cells().state_dict(), 1, port=0, sync_every=3, **settings)
    server.start()
    script = str(Path(__file__).parent / "leased_job.py")
    try:
        for life, die_at in enumerate((3, 0)):
            environ = {
                "OUTERSTEP_WORKER_ID": "w" if life == 0 or resumes else "other", "OMP_NUM_THREADS": "1",
                "DILOCO_SERVER": f"http://{server.address}", "OUTERSTEP_IDENTITY_DIR": str(tmp_path / "keys"),
                "SAVE_EVERY": "2",
            }  # fmt: skip
            while life and not resumes and "w" in server.service.coordinator.members.live_ids:
                time.sleep(0.05)
            with (tmp_path / f"log-{life}").open("wb") as out:
                code = run_job([script, str(tmp_path), str(SAMPLES), "2", str(die_at), "0", "samples"], out, environ)
            assert code == (-9 if die_at else 0), (tmp_path / f"log-{life}").read_text()[-3000:]
        twice = (server.get_global_params()["cells"] - 1.0).nonzero().flatten().tolist()
        place = 1
        dataset = server.service.coordinator.leases.tables["train"].dataset
        assert sorted(twice) == sorted(samples_of(dataset, place)[:2]), "the first half of the second unit"
        table = server.service.coordinator.leases.tables["train"]
        assert (table.done.total, table.repeated, table.spent.total) == (SAMPLES // 4, 1, 0)
        told = [json.loads(line) for line in log.read_text().splitlines()]
        assert [one["places"] for one in told if one["event"] == UnitsRepeated.kind] == [[[place, place + 1]]]
    finally:
        server.stop()


def test_a_loop_for_pytorchs_distributed_sampler_runs_without_a_world_size() -> None:
    run = Run(2)
    drawn: list[list[int]] = [[], []]

    def train(index: int) -> None:
        model = cells()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        sampler = ElasticSampler(range(SAMPLES), unit_samples=4, epochs=2)
        loader = LeasedLoader(list(range(SAMPLES)), batch_size=2, sampler=sampler)  # type: ignore[arg-type]
        assert len(loader) == SAMPLES // 2
        with memory_worker(run.server, f"w{index}", model, optimizer, data=sampler):
            for epoch in range(2):
                sampler.set_epoch(epoch)
                for batch in loader:
                    drawn[index].extend(batch.tolist())
                    model["cells"].grad = torch.zeros(SAMPLES)
                    optimizer.step()

    in_threads(lambda: train(0), lambda: train(1))
    assert sorted(drawn[0] + drawn[1]) == sorted(2 * list(range(SAMPLES)))
    assert (run.table.done.total, run.table.repeated) == (2 * SAMPLES // 4, 0)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("samples", [47, 48, 49])
def test_fixed_shards_are_pytorchs_and_torchfts(samples: int, drop_last: bool) -> None:
    dataset, groups, per_group = list(range(samples)), 3, 2
    for group in range(groups):
        for rank in range(per_group):
            of = {"num_replicas": per_group * groups, "rank": rank + per_group * group}
            theirs = DistributedSampler(dataset, **of, shuffle=False, drop_last=drop_last)  # type: ignore[arg-type]
            ours = ElasticSampler(dataset, **of, shuffle=False, drop_last=drop_last)
            assert list(ours) == list(theirs)
            assert len(ours) == len(theirs)
    torchft = pytest.importorskip("torchft.data")
    theirs = torchft.DistributedSampler(
        dataset, replica_rank=2, num_replica_groups=3, group_rank=1, num_replicas=2, shuffle=False, drop_last=drop_last
    )
    assert list(ours) == list(theirs)


def test_fixed_shards_of_an_epoch_have_every_sample_once_in_the_epochs_own_order() -> None:
    shards = [ElasticSampler(range(48), num_replicas=4, rank=rank) for rank in range(4)]
    first = [list(each) for each in shards]
    assert sorted(sample for each in first for sample in each) == list(range(48))
    for each in shards:
        each.set_epoch(1)
    assert [list(each) for each in shards] != first
    with pytest.raises(ConfigError, match="belong together"):
        ElasticSampler(range(48), rank=0)
    with pytest.raises(ConfigError, match="from 0 to 3"):
        ElasticSampler(range(48), 4, 4)


SIZES = (1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 5, 5)
SHARDS = [range(sum(SIZES[:i]), sum(SIZES[: i + 1])) for i in range(len(SIZES))]
"""Of one to seven samples, as in leased_job.py."""


def train_shards(run: Run, worker_id: str, *, most: int | None = None, loaders: int = 0, **of_stream: Any) -> None:
    model = cells(run.samples)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    data = LeasedShards(SHARDS, epochs=2 if most else 1)
    stream = LeasedStream(SHARDS, data, read=iter, num_workers=loaders, **{"batch_size": 4, **of_stream})
    with memory_worker(run.server, worker_id, model, optimizer, data=data):
        for epoch in range(data.spec.epochs):
            for step, batch in enumerate(stream):
                run.drawn.setdefault(worker_id, []).extend(batch.tolist())
                grad = torch.zeros(run.samples)
                grad[batch] = -1.0
                model["cells"].grad = grad
                optimizer.step()
                if epoch == 0 and step + 1 == most:
                    break


@pytest.mark.parametrize("loaders", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_shards_of_unknown_size_are_trained_once_each(loaders: int) -> None:
    run = Run(1)
    train_shards(run, "a", loaders=loaders)
    assert torch.equal(run.server.get_global_params()["cells"], torch.ones(SAMPLES))
    assert (run.table.done.total, run.table.repeated) == (len(SHARDS), 0)
    assert run.drawn["a"] != sorted(run.drawn["a"]), "in an order of its own"


def test_two_workers_share_the_shards() -> None:
    run = Run(2)
    in_threads(lambda: train_shards(run, "a"), lambda: train_shards(run, "b"))
    assert sorted(itertools.chain(*run.drawn.values())) == list(range(SAMPLES))
    assert (run.table.done.total, run.table.repeated) == (len(SHARDS), 0)


def test_a_loop_over_shards_that_is_left_early_goes_on_with_the_next_sample() -> None:
    run = Run(1)
    train_shards(run, "a", most=3)  # the next epoch's loop begins where this one was left
    assert sorted(run.drawn["a"][:SAMPLES]) == list(range(SAMPLES))


def test_a_stream_that_does_not_fit_its_shards_is_refused() -> None:
    with pytest.raises(ConfigError, match="one shard"):
        LeasedShards(SHARDS, unit_samples=2)
    with pytest.raises(ConfigError, match="13 shards are leased, and 2"):
        LeasedStream(SHARDS[:2], LeasedShards(SHARDS), read=iter)
    with pytest.raises(ConfigError, match="needs LeasedShards"):
        LeasedStream(SHARDS, LeasedSampler(SHARDS), read=iter)  # type: ignore[arg-type]


class Rows:
    """What a `datasets.Dataset` is to a loader: rows by number, or many at once (`__getitems__`), as dicts."""

    def __init__(self, rows: int) -> None:
        self._rows, self.asked = rows, list[list[int]]()

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, row: int) -> dict[str, int]:
        return {"row": int(row)}

    def __getitems__(self, rows: list[int]) -> list[dict[str, int]]:
        self.asked.append(rows)
        return [self[row] for row in rows]


def test_a_dataset_of_rows_like_hugging_faces_is_leased_as_it_stands() -> None:
    run, rows = Run(1), Rows(SAMPLES)
    model = cells()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    data = LeasedSampler(rows, unit_samples=4)
    with memory_worker(run.server, "a", model, optimizer, data=data):
        for batch in LeasedLoader(rows, data, batch_size=8):  # type: ignore[arg-type]
            grad = torch.zeros(SAMPLES)
            grad[batch["row"]] = -1.0
            model["cells"].grad = grad
            optimizer.step()
    assert torch.equal(run.server.get_global_params()["cells"], torch.ones(SAMPLES))
    assert [len(asked) for asked in rows.asked] == [8] * 6, "many at once"


def test_a_hugging_face_dataset_is_leased_by_its_index() -> None:
    datasets = pytest.importorskip("datasets")
    run, rows = Run(1), datasets.Dataset.from_dict({"row": list(range(SAMPLES))}).with_format("torch")
    model = cells()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    data = LeasedSampler(rows, unit_samples=4)
    with memory_worker(run.server, "a", model, optimizer, data=data):
        for batch in LeasedLoader(rows, data, batch_size=8):
            add(model, optimizer, batch["row"])
    assert torch.equal(run.server.get_global_params()["cells"], torch.ones(SAMPLES))


@pytest.mark.parametrize("loaders", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("buffer", [0, 16])
def test_a_streamed_hugging_face_dataset_is_leased_by_its_shards(loaders: int, buffer: int) -> None:
    """In the order of a shuffle with a fixed seed, too; and a loop that is left early goes on with the next row."""
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"row": list(range(SAMPLES))}).to_iterable_dataset(num_shards=7)
    shards = DatasetShards(rows.shuffle(seed=1, buffer_size=buffer) if buffer else rows)
    run, model, drawn = Run(1), cells(), list[int]()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    data = LeasedShards(shards)
    stream = LeasedStream(shards, data, batch_size=5, num_workers=loaders)
    with memory_worker(run.server, "a", model, optimizer, data=data):
        for most in (3, None):
            for step, batch in enumerate(stream):
                drawn.extend(batch["row"].tolist())
                add(model, optimizer, batch["row"])
                if step + 1 == most:
                    break
    assert sorted(drawn) == list(range(SAMPLES))
    assert torch.equal(run.server.get_global_params()["cells"], torch.ones(SAMPLES))
    assert (run.table.done.total, run.table.repeated) == (7, 0)


def test_what_has_no_shards_is_refused() -> None:
    with pytest.raises(ConfigError, match="IterableDataset, got Rows"):
        DatasetShards(Rows(4))  # type: ignore[arg-type]


def add(model: Any, optimizer: torch.optim.Optimizer, samples: torch.Tensor) -> None:
    """A step that adds one to the cells of these."""
    grad = torch.zeros(len(model["cells"]))
    grad[samples] = -1.0
    model["cells"].grad = grad
    optimizer.step()


@pytest.mark.parametrize("loaders", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_batches_follow_each_workers_share_of_the_global_batch(loaders: int) -> None:
    """20 samples in a round of 4 steps: 14 for the fast one, 6 for the other. (Who decides that: test_controller.py.)
    The script counts none; they are counted as they come, and weigh when their round is agreed."""
    run, sizes, rounds = Run(2, samples=400, weight_by="samples"), dict[str, list[int]](), list[dict[str, float]]()
    samples: dict[str, Any] = {}
    shares = [
        Assignment(cluster="a", leader="", sends_to="", local_steps=4, batch_size=3, larger_batches=2),
        Assignment(cluster="b", leader="", sends_to="", local_steps=4, batch_size=1, larger_batches=2),
    ]

    def train(worker_id: str) -> None:
        model = cells(400)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        data = LeasedSampler(400, unit_samples=1)
        loader = LeasedLoader(list(range(400)), data, batch_size=2, shared=True, num_workers=loaders)  # type: ignore[arg-type]
        mine = sizes.setdefault(worker_id, [])
        with memory_worker(run.server, worker_id, model, optimizer, data=data) as worker:
            if worker_id == "a":
                worker.on_round(lambda report: rounds.append({p.worker_id: p.weight for p in report.participants}))
                coordinator = run.server.service.coordinator
                coordinator.next_plan = changed(coordinator.plan, Wishes(sync_every=4), shares)
            for batch in itertools.islice(loader, 3 + 4 * 5):
                mine.append(len(batch))
                add(model, optimizer, batch)
            samples[worker_id] = worker.sync_metrics["samples"]

    in_threads(lambda: train("a"), lambda: train("b"))
    drawn_ahead = 2 * loaders  # by the loader's processes, before the run had said anything
    for worker_id, shared in (("a", 2 * [4, 4, 3, 3]), ("b", 2 * [2, 2, 1, 1])):
        assert sizes[worker_id][: 3 + drawn_ahead] == [2] * (3 + drawn_ahead), "as the script says, until the run does"
        assert sizes[worker_id][15:23] == shared
    weights = [one["a"] / one["b"] for one in rounds]
    assert weights[0] == 1.0
    assert weights[4:6] == pytest.approx([14 / 6, 14 / 6])
    assert samples == {name: sum(drawn) for name, drawn in sizes.items()}


def test_two_datasets_are_mixed_by_weight_and_each_is_trained_once() -> None:
    run = Run(1)
    model, mixed = cells(), list[int]()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    books, code = LeasedSampler(36, name="books", unit_samples=4), LeasedSampler(12, name="code", unit_samples=4)
    loader = MixedLoader([
        (LeasedLoader(list(range(36)), books, batch_size=4), 3.0),  # type: ignore[arg-type]
        (LeasedLoader(list(range(36, 48)), code, batch_size=4), 1.0),  # type: ignore[arg-type]
    ])  # fmt: skip
    with memory_worker(run.server, "a", model, optimizer, data=[books, code]):
        for batch in loader:
            mixed.append(int(batch[0] >= 36))
            add(model, optimizer, batch)
    assert [sum(mixed[i : i + 4]) for i in range(0, 12, 4)] == [1, 1, 1], "one in four"
    assert torch.equal(run.server.get_global_params()["cells"], torch.ones(SAMPLES))
    assert list(MixedLoader([([1, 1], 1.0), ([2, 2, 2], 1.0)], until="first")) == [1, 2, 1, 2]
    assert list(MixedLoader([([1, 1], 1.0), ([2, 2, 2], 1.0)])) == [1, 2, 1, 2, 2]
    with pytest.raises(ConfigError, match="the weight of loader 0 must be above 0"):
        MixedLoader([([1], 0.0)])
    with pytest.raises(ConfigError, match="got none"):
        MixedLoader([])


@pytest.mark.slow
@pytest.mark.parametrize("loaders", [0, 4])
def test_a_hugging_face_trainer_is_killed_and_resumes_at_the_exact_sample(tmp_path: Path, loaders: int) -> None:
    pytest.importorskip("transformers")
    server = DiLoCoServer(cells().state_dict(), 1, port=0, sync_every=3, insecure=True, host="127.0.0.1", **PLAIN)
    server.start()
    environ = {
        "DILOCO_WORKER_ID": "w", "DILOCO_SERVER": f"http://{server.address}", "OMP_NUM_THREADS": "1",
        "OUTERSTEP_IDENTITY_DIR": str(tmp_path / "keys"), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    script = str(Path(__file__).parent / "leased_trainer_job.py")
    try:
        for life, die_at in enumerate((4, 15, 0)):
            with (tmp_path / f"log-{life}").open("wb") as log:
                code = run_job([script, str(tmp_path), str(SAMPLES), "5", str(die_at), str(loaders)], log, environ)
            assert code == (-9 if die_at else 0), (tmp_path / f"log-{life}").read_text()[-3000:]
        drawn = [int(word) for word in (tmp_path / "drawn.log").read_text().split()]
        assert sorted(drawn[:SAMPLES]) == sorted(drawn[SAMPLES:]) == list(range(SAMPLES)), "each epoch has each once"
        assert torch.equal(server.get_global_params()["cells"], 2 * torch.ones(SAMPLES))
        table = server.service.coordinator.leases.tables["train"]
        assert (table.done.total, table.repeated, table.spent.total) == (2 * SAMPLES // 4, 0, 0)
    finally:
        server.stop()


@pytest.mark.slow
def test_three_workers_of_speeds_1_2_4_share_an_epoch_by_their_speeds(tmp_path: Path) -> None:
    units, unit = 105, 4
    state = cells(units * unit).state_dict()
    of_run = {**PLAIN, "async_mode": True}
    server = DiLoCoServer(state, 3, port=0, sync_every=8, insecure=True, host="127.0.0.1", **of_run)
    server.start()
    seconds = {"slow": 0.4, "middle": 0.2, "fast": 0.1}
    jobs = []
    try:
        for name, each in seconds.items():
            environ = {
                "OUTERSTEP_WORKER_ID": name, "DILOCO_SERVER": f"http://{server.address}", "OMP_NUM_THREADS": "1",
                "OUTERSTEP_IDENTITY_DIR": str(tmp_path / f"keys-{name}"),
            }  # fmt: skip
            script = str(Path(__file__).parent / "paced_job.py")
            log = (tmp_path / f"log-{name}").open("wb")
            asked = [script, str(tmp_path), str(units * unit), str(unit), str(each)]
            jobs.append(start(asked, log=log, cwd=tmp_path, env={**os.environ, **environ}))
        while not all((tmp_path / f"{name}.here").exists() for name in seconds):
            assert all(job.poll() is None for job in jobs)
            time.sleep(0.05)
        (tmp_path / "go").touch()
        assert [job.wait(240) for job in jobs] == [0, 0, 0], [p.read_text()[-2000:] for p in tmp_path.glob("log-*")]
        table = server.service.coordinator.leases.tables["train"]
        assert (table.done.total, table.repeated, table.spent.total) == (units, 0, 0)
        shares = {"slow": units / 7, "middle": units * 2 / 7, "fast": units * 4 / 7}
        for name, share in shares.items():
            assert abs(table.done_by[name] - share) <= 3, f"{table.done_by}, by speed {shares}"
    finally:
        for job in jobs:
            job.kill()
        server.stop()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "loaders", "parts"),
    [
        ("ddp", 0, [[0], [1]]),
        ("ddp", 2, [[0], [1]]),
        ("fsdp2", 0, [[0], [1]]),
        ("tp", 0, [[0, 1]]),
        ("dp_tp", 2, [[0, 1], [2, 3]]),
    ],
)
def test_the_ranks_of_a_group_share_each_unit_and_resume_at_the_exact_sample(
    tmp_path: Path, kind: str, loaders: int, parts: list[list[int]]
) -> None:
    """`parts`: the ranks that train the same samples, of each part of the units."""
    server = DiLoCoServer(cells().state_dict(), 1, port=0, sync_every=3, insecure=True, host="127.0.0.1", **PLAIN)
    server.start()
    script = str(Path(__file__).parent / "leased_group_job.py")
    try:
        for life, die_at in enumerate((4, 3, 0)):
            logs = [tmp_path / f"log-{life}-{rank}" for rank in range(sum(map(len, parts)))]
            address = f"http://{server.address}"
            job = [script, kind, address, str(tmp_path), str(SAMPLES), "3", str(die_at), str(loaders)]
            group = Ranks(job, logs, settings={"OUTERSTEP_IDENTITY_DIR": str(tmp_path / "keys")})
            try:
                codes = [process.wait(120) for process in group.processes]
            finally:
                group.close()
            assert codes == [9 if die_at else 0] * len(logs), "\n".join(log.read_text()[-3000:] for log in logs)
        drawn: list[list[int]] = []
        for same in parts:
            texts = {(tmp_path / f"rank-{rank}.log").read_text() for rank in same}
            assert len(texts) == 1
            drawn.append([int(word) for word in texts.pop().split()])
        assert {len(samples) for samples in drawn} == {SAMPLES // len(parts)}
        assert sorted(sample for part in drawn for sample in part) == list(range(SAMPLES))
        counted = server.service.coordinator.fragments[0].done.samples
        assert counted == SAMPLES, "samples that several ranks train count once"
        assert torch.equal(server.get_global_params()["cells"], torch.ones(SAMPLES))
        table = server.service.coordinator.leases.tables["train"]
        assert (table.done.total, table.repeated, table.spent.total) == (SAMPLES // 4, 0, 0)
    finally:
        server.stop()


@pytest.mark.slow
def test_a_job_whose_ranks_train_the_same_samples_must_say_so(tmp_path: Path) -> None:
    script, server = (
        str(Path(__file__).parent / "leased_group_job.py"),
        DiLoCoServer(cells().state_dict(), 1, port=0, sync_every=3, insecure=True, host="127.0.0.1", **PLAIN),
    )
    server.start()
    logs = [tmp_path / f"log-{rank}" for rank in range(2)]
    try:
        job = [script, "tp_unsaid", f"http://{server.address}", str(tmp_path), str(SAMPLES), "3", "0", "0"]
        group = Ranks(job, logs, settings={"OUTERSTEP_IDENTITY_DIR": str(tmp_path / "keys")})
        try:
            assert all(process.wait(120) for process in group.processes)
        finally:
            group.close()
        for log in logs:
            assert "needs data_part=(i, n): this process trains part i of n" in log.read_text()
    finally:
        server.stop()


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_the_parts_of_a_unit_are_of_one_size_and_miss_nothing(ranks: int) -> None:
    for unit in ([5], [3, 1, 2], list(range(8))):
        parts = [part_of(unit, rank, ranks) for rank in range(ranks)]
        assert {len(part) for part in parts} == {-(-len(unit) // ranks)}
        assert {sample for part in parts for sample in part} == set(unit)


def run_job(arguments: list[str], log: Any, environ: dict[str, str]) -> int:
    return start(arguments, log=log, cwd=Path(arguments[1]), env={**os.environ, **environ}).wait(240)


def test_the_command_shows_how_far_the_data_is_and_lists_every_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, table = tmp_path / "events.jsonl", tmp_path / "samples.csv"
    run = Run(1, event_log=str(log), insecure=True, host="127.0.0.1")
    run.server.start()
    try:
        run.train("a")
        monkeypatch.setenv("DILOCO_SERVER", f"http://{run.server.address}")
        assert "train: 12 of 12 units (100.0%) done" in CliRunner().invoke(app, ["data"]).output
        asked = ["data", "--export", str(table), "--events", str(log)]
        assert CliRunner().invoke(app, asked).output == f"{SAMPLES} samples in {table}\n"
        rows = list(csv.DictReader(table.read_text().splitlines()))
        assert sorted(int(row["sample"]) for row in rows) == list(range(SAMPLES))
        assert {row["worker"] for row in rows} == {"a"}
        assert max(int(row["version"]) for row in rows) == run.server.sync_round
        with pytest.raises(ConfigError, match="belong together"):
            CliRunner().invoke(app, ["data", "--export", str(table)], catch_exceptions=False)
        once_more, rows = log.read_text(), table.read_text()
        log.write_text('{"event": "data", "dataset": 3}\n')
        with pytest.raises(ConfigError, match="line 1 of"):
            CliRunner().invoke(app, asked, catch_exceptions=False)
    finally:
        run.server.stop()
    log.write_text(once_more)
    monkeypatch.delenv("DILOCO_SERVER")
    table.unlink()
    assert CliRunner().invoke(app, asked).output == f"{SAMPLES} samples in {table}\n", "the run is over"
    assert table.read_text() == rows
    log.write_text("".join(line for line in once_more.splitlines(keepends=True) if '"data_leased"' not in line))
    monkeypatch.setenv("DILOCO_SERVER", f"http://{run.server.address}")
    with pytest.raises(ConfigError, match="give the whole log of a server"):
        CliRunner().invoke(app, asked, catch_exceptions=False)
