"""Real jobs on gloo, each of them one worker, some by torchrun: DDP, FSDP2, and HSDP, against one server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from integration.group_job import SYNC_EVERY, make_model, train_step
from nursery import Child
from outerstep.server import DiLoCoServer
from outerstep.server.publish import Published
from outerstep.server.store import FragmentStore
from outerstep.topology.update import anchor_tree
from outerstep.wire.frames import rows_of
from outerstep.worker import DiLoCoWorker
from ranks import Ranks
from support import assert_same, in_threads, wait_until

pytestmark = pytest.mark.slow

JOB = Path(__file__).with_name("group_job.py")
STEPS = 4 * SYNC_EVERY + 2
PARAMETERS = [name for name, _ in make_model(0).named_parameters()]


class Job:
    """The ranks of a job, which end with it: started by torchrun, or as it would start them."""

    def __init__(
        self,
        folder: Path,
        kind: str,
        address: str,
        *,
        ranks: int = 2,
        steps: int = STEPS,
        dies_at: int = 0,
        torchrun: bool = False,
        script: Path = JOB,
    ) -> None:
        self.folder, self.kind, self.ranks = folder, kind, ranks
        self._end = signal.SIGTERM if torchrun else signal.SIGKILL  # torchrun passes it on
        arguments = [str(script), kind, address, str(folder), str(steps), str(dies_at)]
        if torchrun:
            runner = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
            environ = {**os.environ, "OMP_NUM_THREADS": "1"}
            self._logs = [folder / f"{kind}.log"]
            with self._logs[0].open("wb") as log:
                process = subprocess.Popen([*runner, *arguments], stdout=log, stderr=subprocess.STDOUT, env=environ)
            self._processes: Sequence[Child | subprocess.Popen[bytes]] = [process]
        else:
            self._logs = [folder / f"{kind}-{rank}.log" for rank in range(ranks)]
            self._started = Ranks(arguments, self._logs)
            self._processes = self._started.processes

    def ended(self) -> list[int]:
        return [process.wait(120) for process in self._processes]

    def results(self) -> list[dict[str, Any]]:
        assert not any(self.ended()), "\n".join(log.read_text() for log in self._logs)
        return [json.loads((self.folder / f"{self.kind}-{rank}.json").read_text()) for rank in range(self.ranks)]

    def pid(self, rank: int) -> int:
        return int((self.folder / f"{self.kind}-{rank}.pid").read_text())

    def close(self) -> None:
        for process in self._processes:
            process.send_signal(self._end)
        self.ended()


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    found: list[Job] = []
    yield found
    for job in found:
        job.close()


Versions = dict[tuple[int, int], dict[str, Tensor]]


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> Versions:
    """Every version that a server of this test publishes, by (fragment, version)."""
    kept: Versions = {}
    begin, publish = FragmentStore.__init__, FragmentStore.publish

    def note(store: FragmentStore) -> None:
        kept[store.index, store.newest.version] = {name: theta.clone() for name, theta in store.params().items()}

    def begin_and_note(store: FragmentStore, *args: Any, **settings: Any) -> None:
        begin(store, *args, **settings)
        note(store)

    def publish_and_note(store: FragmentStore, *args: Any) -> Published:
        made = publish(store, *args)
        note(store)
        return made

    monkeypatch.setattr(FragmentStore, "__init__", begin_and_note)
    monkeypatch.setattr(FragmentStore, "publish", publish_and_note)
    return kept


def make_server(**settings: Any) -> DiLoCoServer:
    facts = {"part_size_bytes": 64, "codec": "fp32", "sync_every": SYNC_EVERY, **settings}
    return DiLoCoServer(make_model(0).state_dict(), port=0, **facts)


def expected_hash(params: dict[str, Tensor], sections: int, section: int) -> str:
    """Of what one rank holds of them: its rows of the parameters, buffers whole."""

    def here(name: str, theta: Tensor) -> Tensor:
        rows = rows_of(tuple(theta.shape), sections, section)
        return theta[rows.first_row : rows.first_row + rows.shape[0]] if name in PARAMETERS else theta

    return anchor_tree(here(name, theta) for name, theta in params.items())


def assert_agrees(result: dict[str, Any], versions: Versions, sections: int, section: int) -> None:
    """Every anchor this rank ever held is the server's, bit for bit."""
    for fragment, version, found in result["history"]:
        assert found == expected_hash(versions[fragment, version], sections, section), (fragment, version)


def assert_final(result: dict[str, Any], newest: dict[str, Tensor], sections: int, section: int) -> None:
    assert result["final"] == expected_hash({name: newest[name] for name in PARAMETERS}, sections, section)


def plain_worker(address: str) -> dict[str, Any]:
    model = make_model(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    source = torch.Generator().manual_seed(7)
    with DiLoCoWorker(model, optimizer, address, worker_id="plain") as worker:
        for step in range(STEPS):
            train_step(model, optimizer, source)
            if step == SYNC_EVERY + 1:
                worker.force_sync()
    return worker.sync_metrics


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "fragments-with-delay"])
def test_a_ddp_pair_an_fsdp2_pair_and_a_plain_worker_agree_bit_for_bit(
    tmp_path: Path, versions: Versions, jobs: list[Job], streaming: bool
) -> None:
    fragments = {"num_fragments": 2, "fragment_delay": 2, "fragment_carry": True} if streaming else {}
    with make_server(num_workers=3, **fragments) as server:
        jobs += [Job(tmp_path, kind, server.address, torchrun=streaming) for kind in ("ddp", "fsdp")]
        (alone,) = in_threads(lambda: plain_worker(server.address), timeout_s=200)
        ddp, fsdp = (job.results() for job in jobs)
        newest = server.get_global_params()
        workers = {p.worker_id for store in server.service.stores for p in store.newest.agreement.participants}
        assert server.status()["total_worker_deaths"] == 0
    rounds = [max(v for f, v in versions if f == fragment) for fragment in range(2 if streaming else 1)]
    for result in (*ddp, *fsdp, alone):
        assert result["versions"] == rounds  # nobody missed a round, so all end with the newest
        assert result["sync_count"] == sum(rounds) >= 5
    assert workers == {"ddp", "fsdp", "plain"}
    for rank in range(2):
        assert_agrees(ddp[rank], versions, 1, 0)
        assert_agrees(fsdp[rank], versions, 2, rank)
        assert_final(ddp[rank], newest, 1, 0)
        assert_final(fsdp[rank], newest, 2, rank)
    for name in ("peer_grad_similarity", "aggregated_grad_norm", "weight_divergence"):
        assert {result[name] for result in (*ddp, *fsdp, alone)} == {alone[name]} != {None}
    for name in ("pseudo_grad_norm", "inner_grad_norm"):  # of the group, on each of its ranks
        assert ddp[0][name] == ddp[1][name] > 0.0
        assert fsdp[0][name] == fsdp[1][name] > 0.0


def test_an_fsdp2_pair_alone_ends_with_the_servers_model_and_moved_only_its_rows(
    tmp_path: Path, versions: Versions, jobs: list[Job]
) -> None:
    with make_server(num_workers=1) as server:
        jobs.append(Job(tmp_path, "fsdp", server.address))
        results = jobs[0].results()
        newest = server.get_global_params()
        submissions = server.status()["total_submissions"]
    rounds = max(v for _, v in versions)
    model = 4 * sum(p.numel() for p in make_model(0).parameters())
    for rank, result in enumerate(results):
        assert_agrees(result, versions, 2, rank)
        assert_final(result, newest, 2, rank)
        share = 4 * sum(rows_of(tuple(newest[name].shape), 2, rank).numel for name in PARAMETERS)
        edges = 2 * 64 * (len(PARAMETERS) + 2)  # each tensor may begin and end within a part
        assert share * rounds <= result["bytes_received"] <= (share + edges) * rounds
        assert result["bytes_received"] < model * rounds
        assert result["bytes_sent"] >= share * rounds
    assert submissions == rounds


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_weights_loaded_behind_a_groups_back_are_given_up_by_all_ranks_together(
    tmp_path: Path, versions: Versions, jobs: list[Job], kind: str
) -> None:
    (tmp_path / "loads").touch()
    with make_server(num_workers=1, num_fragments=2, fragment_delay=2, fragment_carry=True) as server:
        jobs.append(Job(tmp_path, kind, server.address))
        results = jobs[0].results()
        newest = server.get_global_params()
    sections = 2 if kind == "fsdp" else 1
    for rank, result in enumerate(results):
        assert result["outside_changes"] == 2
        assert_agrees(result, versions, sections, rank % sections)
        assert_final(result, newest, sections, rank % sections)
    assert len({result["steps_discarded"] for result in results}) == 1
    assert all(float(theta.abs().max()) < 10.0 for params in versions.values() for theta in params.values())


def test_with_hsdp_each_row_is_sent_once_and_every_replica_gets_it(
    tmp_path: Path, versions: Versions, jobs: list[Job]
) -> None:
    with make_server(num_workers=1) as server:
        jobs.append(Job(tmp_path, "hsdp", server.address, ranks=4))
        results = jobs[0].results()
        newest = server.get_global_params()
    for rank, result in enumerate(results):
        assert_agrees(result, versions, 2, rank % 2)
        assert_final(result, newest, 2, rank % 2)
        assert (result["bytes_sent"] > 0) == (rank < 2)


def test_if_a_rank_is_killed_its_job_ends_and_the_others_go_on(tmp_path: Path, jobs: list[Job]) -> None:
    (tmp_path / "slowly").touch()
    with make_server(num_workers=2, heartbeat_timeout=4.0) as server:
        for kind, steps in (("ddp", 300), ("fsdp", 10**6)):
            jobs.append(Job(tmp_path, kind, server.address, steps=steps, torchrun=True))
        wait_until(lambda: server.sync_round >= 2, timeout_s=120)
        os.kill(jobs[1].pid(1), signal.SIGKILL)
        assert any(jobs[1].ended())
        wait_until(lambda: "fsdp" not in server.status()["workers"])  # type: ignore[operator]
        at = server.sync_round
        wait_until(lambda: server.sync_round >= at + 3)
        jobs[0].results()
        last = server.service.stores[0].newest.agreement
        assert [p.worker_id for p in last.participants] == ["ddp"]


@pytest.mark.row("F10")
def test_a_notice_to_one_rank_lets_all_of_them_leave_at_the_same_step(tmp_path: Path, jobs: list[Job]) -> None:
    (tmp_path / "slowly").touch()
    with make_server(num_workers=1) as server:
        jobs.append(Job(tmp_path, "ddp", server.address, steps=10**6, torchrun=True))
        wait_until(lambda: server.sync_round >= 2, timeout_s=120)
        os.kill(jobs[0].pid(1), signal.SIGUSR1)  # rank 0 speaks with the server, and has heard nothing
        first, second = jobs[0].results()
        assert first["local_step"] == second["local_step"]
        assert first["versions"] == second["versions"] == [server.sync_round]
        assert server.status()["workers"] == {}
        assert server.status()["total_worker_deaths"] == 0


@pytest.mark.row("F29")
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_group_goes_on_from_its_checkpoints_bit_for_bit(tmp_path: Path, jobs: list[Job], kind: str) -> None:
    """Each rank from its own, with a contribution under way."""

    def run(folder: Path, *deaths: int) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
        folder.mkdir()
        streaming = {"num_fragments": 2, "fragment_delay": 2, "fragment_carry": True, "codec": "int4+feedback"}
        with make_server(num_workers=1, **streaming) as server:
            for step in deaths:
                jobs.append(Job(folder, kind, server.address, dies_at=step))
                assert all(jobs[-1].ended())
            jobs.append(Job(folder, kind, server.address))
            return jobs[-1].results(), server.get_global_params()

    results, found = run(tmp_path / "killed", SYNC_EVERY // 2 + 1, 3 * SYNC_EVERY + 1)
    straight, expected = run(tmp_path / "straight")
    assert_same(found, expected)
    for result, usual in zip(results, straight, strict=True):
        for fact in ("final", "local_step", "samples", "sync_count", "missed_rounds", "anchor_repairs", "versions"):
            assert result[fact] == usual[fact], fact


def test_what_cannot_be_exchanged_is_refused_by_name_on_every_rank(tmp_path: Path, jobs: list[Job]) -> None:
    with make_server(num_workers=1) as server:
        jobs.append(Job(tmp_path, "refuse", server.address))
        for said in jobs[0].results():
            assert "'layers.0.bias' is placed as (Partial(sum),)" in said["partial"]
            assert "only Shard and Replicate are exchanged" in said["partial"]
            assert "FSDP1" in said["fsdp1"]
            assert "fully_shard" in said["fsdp1"]
            assert "sharded over 2 processes" in said["off"]
            assert "ranks 0 and 1 hold different models" in said["pipeline"]
        assert server.status()["workers"] == {}
