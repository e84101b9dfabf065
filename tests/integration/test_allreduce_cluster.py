"""Ranks of an all-reduce job that are together one worker of a server: as threads of one process, with real leaders.
The cells of a ledger show which steps are in a model, and how often."""

from __future__ import annotations

import copy
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore

from contract.adapters import ThreadLinks
from leader_death import LeaderDeath, Moment
from outerstep import DiLoCoWorker, register_topology
from outerstep.config import WorkerConfig
from outerstep.coordination.layers.between import LayerTerms
from outerstep.core.outer import OuterRule
from outerstep.data import LeasedSampler
from outerstep.errors import ConfigError, PeerLost
from outerstep.hierarchy.leader import Leader
from outerstep.hierarchy.members_below import as_cluster
from outerstep.server import DiLoCoServer
from outerstep.topology.allreduce.peers import Peers
from outerstep.topology.allreduce.topology import AllReduceSettings, AllReduceTopology
from outerstep.topology.local_worker import LocalWorker
from outerstep.topology.update import anchor_hash
from outerstep.types import Control
from ports import free_port
from support import Ledger, TwoLedgers, count, in_threads, wait_until

pytestmark = pytest.mark.slow

H, EVERY = 4, 2
RANKS = "threads-of-a-job"
Model = Ledger | TwoLedgers
MakeAbove = Callable[..., DiLoCoServer]
Save = dict[str, Any]


class Job:
    """Two ranks that meet at a store of their own."""

    def __init__(self, above: DiLoCoServer | str, cluster: str = "east", wait_s: float = 30.0, **settings: Any) -> None:
        place = above if isinstance(above, str) else above.address
        store, boxes = HashStore(), {(i, j): queue.SimpleQueue[Tensor]() for i in (0, 1) for j in (0, 1)}

        def make(worker: LocalWorker, config: WorkerConfig) -> AllReduceTopology:
            rank = int(worker.worker_id[-1])
            return AllReduceTopology(
                worker_id=worker.worker_id,
                hostname="test",
                tensors=worker.tensors,
                anchors=worker.anchors,
                settings=AllReduceSettings(OuterRule(1.0, 0.0, nesterov=False), "equal", 60.0, "stop"),
                peers=Peers(store, rank, 2, name="test", timeout_s=60.0),
                links=ThreadLinks(rank, 2, boxes),  # type: ignore[arg-type]
                cluster=as_cluster(
                    f"http://{place}", cluster, every=EVERY, wait_s=wait_s, credentials=None, terms=LayerTerms(0.0),
                    any_may_lead=False,
                ),
            )  # fmt: skip

        self._make, self._settings = make, settings
        self.topologies: dict[int, AllReduceTopology] = {}

    def members(
        self,
        kind: type[Model],
        cells: int,
        saved: Sequence[Save] = (),
        data: Sequence[LeasedSampler | None] = (None,) * 2,
    ) -> list[Member]:
        """Its ranks, made one after the other; or made again, from what they saved."""
        register_topology(RANKS, self._make)
        made = []
        for rank in (0, 1):
            model = kind(cells)
            optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
            worker = DiLoCoWorker(
                model, optimizer, topology=RANKS, worker_id=f"rank-{rank}", sync_every=H, codec="fp32",
                handle_signals=False, exit_patience_s=20.0, data=data[rank] or (), **self._settings,
            )  # fmt: skip
            self.topologies[rank] = worker._topology  # type: ignore[assignment]
            if saved:
                model.load_state_dict(saved[rank]["model"])
                worker.load_state_dict(saved[rank]["worker"])
            made.append(Member(rank, model, worker, optimizer))
        return made


@dataclass(frozen=True)
class Member:
    rank: int
    model: Any
    worker: DiLoCoWorker
    optimizer: torch.optim.Optimizer

    def count(self, cell: int, steps: int) -> None:
        count(self.model, self.optimizer, cell, steps)

    def save(self) -> Save:
        return copy.deepcopy({"model": self.model.state_dict(), "worker": self.worker.state_dict()})


def each(members: Sequence[Member], job: Callable[[Member], Any]) -> list[Any]:
    return in_threads(*[lambda m=member: job(m) for member in members])


def make_above(clusters: int, model: Model, outer_lr: float, place: str) -> DiLoCoServer:
    port = int(place.rpartition(":")[2])
    server = DiLoCoServer(
        model.state_dict(), clusters, port=port, insecure=True, outer_lr=outer_lr, outer_momentum=0.0,
        codec="fp32", heartbeat_timeout_s=600.0,
    )  # fmt: skip
    server.start()
    return server


@pytest.fixture
def above() -> Iterator[MakeAbove]:
    made: list[DiLoCoServer] = []

    def make(clusters: int, model: Model, outer_lr: float, place: str = "127.0.0.1:0") -> DiLoCoServer:
        made.append(make_above(clusters, model, outer_lr, place))
        return made[-1]

    yield make
    for server in made:
        server.stop()


def anchors(worker: DiLoCoWorker) -> str:
    return anchor_hash(worker._replica.anchors[name] for names in worker.plan.fragments for name in names)


@pytest.mark.parametrize(
    ("settings", "wait_s", "names"),
    [
        ({}, 30.0, ("east", "west")),
        ({}, 0.0, ("east",)),  # two that do not wait are not in every round together
        ({"num_fragments": 2}, 30.0, ("east", "west")),
        ({"num_fragments": 2, "fragment_delay": 1, "fragment_carry": True}, 30.0, ("east", "west")),
    ],
    ids=["waiting", "not waiting", "fragments", "streaming"],
)
def test_all_ranks_of_all_clusters_end_with_what_all_of_them_learned(
    above: MakeAbove, settings: dict[str, Any], wait_s: float, names: tuple[str, ...]
) -> None:
    kind = TwoLedgers if settings else Ledger
    ranks = 2 * len(names)
    server = above(len(names), kind(ranks), float(len(names)))  # what they did is added
    jobs = [Job(server, name, wait_s, **settings) for name in names]

    members = [member for job in jobs for member in job.members(kind, ranks)]

    def work(member: Member) -> tuple[str, list[list[float]]]:
        with member.worker:
            member.count(members.index(member), 5 * H + 1)
        return anchors(member.worker), [param.tolist() for param in member.model.parameters()]

    ends = each(members, work)
    # A step is 2, and inside a cluster the mean of two halves it.
    for values in server.get_global_params().values():
        assert values.tolist() == [5.0 * H + 1] * ranks
    assert ends == [ends[0]] * ranks
    assert ends[0][1][0] == [5.0 * H + 1] * ranks


def test_when_the_run_above_ends_all_ranks_end_after_the_same_step(above: MakeAbove) -> None:
    server = above(1, Ledger(2), 2.0)
    job = Job(server)

    def work(member: Member) -> int:
        with member.worker:
            for step in range(1, 100 * H):
                if member.rank == 0 and step == 3 * H:
                    server.service.answer(Control(kind="shutdown", reason="enough"))
                member.count(member.rank, 1)
                if member.worker.should_stop:
                    assert member.model.cells.tolist() == server.get_global_params()["cells"].tolist()
                    return step
        raise AssertionError("nobody told it to end")

    first, second = each(job.members(Ledger, 2), work)
    assert 3 * H < first == second
    assert server.get_global_params()["cells"].tolist() == [2.0 * first] * 2


# --- a job dies wherever it may, and is restarted ---------------------------------------------------------------------


MOMENTS = {
    "before the record of what it sends": Moment("_write", is_before=True, offering=True),
    "before it sends": Moment("_write", is_before=False, offering=True),
    "after it has sent": Moment("_sent", is_before=False),
    "before the record of what was agreed": Moment("_write", is_before=True, offering=False),
    "before what was agreed is in the model": Moment("_move", is_before=True),
    "after what was agreed is in the model": Moment("_move", is_before=False),
}


def live_again(member: Member) -> list[float]:
    with member.worker:
        member.count(2 + member.rank, 3 * H + 1)
    return member.model.cells.tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("age", [0, H + 1], ids=["newest state", "old state"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_no_step_counts_twice_when_a_job_dies_and_goes_on_from_its_states(
    moment: str, age: int, above: MakeAbove, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, is_armed = above(1, Ledger(4), 2.0), threading.Event()
    first = Job(server)

    def end(leader: Leader) -> bool:
        for topology in first.topologies.values():
            topology._peers.fail(RuntimeError("killed"))
        return True

    death = LeaderDeath(MOMENTS[moment], is_armed, end)
    death.prepare(monkeypatch)
    saved: list[dict[int, Save]] = [{}, {}]  # of each rank, by the steps it had taken
    offers: list[float] = []  # how many steps of each rank were in T with each contribution
    sent = Leader._sent

    def noted(leader: Leader) -> None:
        offers.append(leader.below.done().steps / 2)
        sent(leader)

    monkeypatch.setattr(Leader, "_sent", noted)

    def live(member: Member) -> None:
        try:
            with member.worker:
                for step in range(1, 10 * H):
                    if step == 3 * H:
                        is_armed.set()
                    member.count(member.rank, 1)
                    saved[member.rank][step] = member.save()
        except PeerLost:
            if not death.has_come.wait(10.0):
                raise

    each(first.members(Ledger, 4), live)
    assert death.has_come.is_set()
    monkeypatch.setattr(Leader, "_sent", sent)
    step = max(saved[0].keys() & saved[1].keys()) - age
    ends = each(Job(server).members(Ledger, 4, [one[step] for one in saved]), live_again)
    cells = server.get_global_params()["cells"].tolist()
    assert ends == [cells, cells]
    counted = [cell / 2.0 for cell in cells]  # of all that goes up the layer above makes twice as much
    assert counted[2:] == [3.0 * H + 1] * 2  # nothing of the second job is lost
    assert counted[0] == counted[1]
    # Of the first, what its last contribution held that arrived; or all that its state knows, if that is newer.
    arrived = [offer for offer in offers if offer > step]
    assert counted[0] in ([*arrived[-1:], step] if "sends" in moment or "sent" in moment else arrived[-1:] or [step])


def test_a_state_from_before_the_cluster_had_joined_is_given_up_if_it_has_contributed_since(above: MakeAbove) -> None:
    """Its record knows of no contribution, but what its ranks had learned may be in one."""
    place = f"127.0.0.1:{free_port()}"
    first = Job(place, wait_s=0.2)
    saved: list[Save] = [{}, {}]

    def live(member: Member) -> int:
        with member.worker as worker:
            member.count(member.rank, H + 1)
            saved[member.rank] = member.save()
            if member.rank == 0:
                above(1, Ledger(4), 2.0, place)
            leader: Any = first.topologies[0]._cluster.leadership._leader  # type: ignore[union-attr]
            wait_until(lambda: leader.worker is not None)
            member.count(member.rank, 2 * EVERY * H)
        return int(worker.sync_metrics["local_step"])  # type: ignore[arg-type]

    taken, others = each(first.members(Ledger, 4), live)
    assert taken == others
    ends = each(Job(place).members(Ledger, 4, saved), live_again)
    assert ends == [[2.0 * taken] * 2 + [2.0 * (3 * H + 1)] * 2] * 2


# --- leased data ------------------------------------------------------------------------------------------------------


def test_a_cluster_that_leases_data_has_nothing_under_way_while_it_draws(above: MakeAbove) -> None:
    """(What its ranks lease is in test_leased_members_processes.py.)"""
    server = above(1, TwoLedgers(2), 2.0)
    data = [LeasedSampler(40, unit_samples=2) for _ in range(2)]
    job = Job(server, num_fragments=2, fragment_delay=1, fragment_carry=True)
    members = job.members(TwoLedgers, 2, data=data)
    refused: list[str] = []

    def work(member: Member) -> None:
        try:
            member.worker.start()
        except ConfigError as error:
            refused.append(str(error))

    each(members, work)
    assert len(refused) == 2
    assert all("fragment_delay must be 0" in said for said in refused)
