"""Replicas of torchft that are together one worker of a server: two of them in one process, with a real lighthouse,
Managers and gloo. The cells of a ledger show which steps are in a model, and how often."""

from __future__ import annotations

import contextlib
import copy
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

os.environ.setdefault("RUST_LOG", "warn")
pytest.importorskip("torchft")

from torchft.coordination import LighthouseServer

from leader_death import LeaderDeath, Moment
from outerstep import DiLoCoWorker
from outerstep.data import LeasedSampler
from outerstep.errors import BadRequest, ConfigError
from outerstep.events import Event, LeaderOrdered, VersionPublished, WorkerDied, WorkerLeft
from outerstep.hierarchy.leader import Leader
from outerstep.server import DiLoCoServer
from outerstep.topology.leadership import Leadership
from outerstep.topology.torchft.rounds import BroughtAside, RoundOutcome, Rounds, VotedRound
from outerstep.topology.update import anchor_hash
from outerstep.types import Control
from support import Ledger, count, in_threads, tiny_model, train_steps, wait_until

pytestmark = pytest.mark.slow

H = 4
CELLS = 4


@pytest.fixture
def lighthouses() -> Iterator[list[str]]:
    servers = [
        LighthouseServer(
            bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=1000, quorum_tick_ms=20, heartbeat_timeout_ms=800
        )
        for _ in range(2)
    ]
    yield [f"127.0.0.1:{server.address().rpartition(':')[2]}" for server in servers]
    for server in servers:
        server.shutdown()


@pytest.fixture
def above() -> Iterator[DiLoCoServer]:
    """Both clusters are in every round, and what they did is added."""
    server = DiLoCoServer(
        Ledger(CELLS).state_dict(), 2, port=0, insecure=True, outer_lr=2.0, outer_momentum=0.0, codec="fp32",
        heartbeat_timeout_s=600.0,
    )  # fmt: skip
    server.start()
    yield server
    server.stop()


def make(
    lighthouse: str, above: DiLoCoServer, cluster: str, name: str, model: torch.nn.Module, lr: float = 2.0, **more: Any
) -> tuple[DiLoCoWorker, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    settings: dict[str, Any] = {
        "sync_every": H, "codec": "fp32", "min_replicas": 1, "quorum_timeout_s": 5.0, "transfer_timeout_s": 10.0,
        "exit_patience_s": 20.0, "handle_signals": False, "above_every": 2, "above_wait_s": 30.0,
    }  # fmt: skip
    where = {"lighthouse": lighthouse, "above": f"http://{above.address}", "cluster": cluster, "worker_id": name}
    return DiLoCoWorker(model, optimizer, "torchft", **{**settings, **where, **more}), optimizer


def anchors(worker: DiLoCoWorker) -> str:
    return anchor_hash(worker._replica.anchors[name] for names in worker.plan.fragments for name in names)


def test_two_clusters_of_two_end_with_what_all_four_learned(lighthouses: list[str], above: DiLoCoServer) -> None:
    def work(i: int) -> tuple[str, list[float]]:
        model = Ledger(CELLS)
        name = ("east", "west")[i // 2]
        worker, optimizer = make(lighthouses[i // 2], above, name, f"{name}-{i % 2}", model, min_replicas=2)
        with worker:
            count(model, optimizer, i, 5 * H + 1)
        return anchors(worker), model.cells.tolist()

    ends = in_threads(*(lambda i=i: work(i) for i in range(4)))
    # A step is 2, and inside a cluster the mean of two halves it.
    assert above.get_global_params()["cells"].tolist() == [5.0 * H + 1] * 4
    assert ends == [ends[0]] * 4
    assert ends[0][1] == [5.0 * H + 1] * 4


def test_what_is_agreed_above_is_handed_to_the_follower_fragment_by_fragment_as_it_arrives(
    lighthouses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of three fragments is held by the replica that does not lead before the next one is agreed on above."""
    model = tiny_model().state_dict()
    above = DiLoCoServer(
        model, 1, port=0, insecure=True, outer_lr=0.5, outer_momentum=0.0, codec="fp32", num_fragments=3
    ).start()
    happened: list[tuple[str, int]] = []
    told: list[dict[str, Any]] = []
    move_on = Rounds._move_on

    def noted(rounds: Rounds, leadership: Leadership, brought: Any, made: VotedRound, aside: BroughtAside) -> Any:
        if not leadership.leads:
            happened.extend(("held", fragment) for fragment in aside.moved)
        return move_on(rounds, leadership, brought, made, aside)

    monkeypatch.setattr(Rounds, "_move_on", noted)
    above.service.events.add(
        lambda event: (
            happened.append(("agreed", event.agreement.fragment)) if isinstance(event, VersionPublished) else None
        )
    )

    def is_over() -> bool:
        return ("held", 0) in happened and len(happened) > happened.index(("held", 0)) + 24

    def work(own: str) -> None:
        model = tiny_model()
        inside = {**SHORT, "num_fragments": 3, "above_every": 3, "sync_every": 6}
        worker, optimizer = make(lighthouses[0], above, "east", own, model, lr=0.01, **inside)
        with worker:
            while not is_over():
                train_steps(model, optimizer, 1, seed=ord(own))
            told.append(above.status()["clusters"]["east"])

    in_threads(lambda: work("a"), lambda: work("b"))
    first = happened.index(("agreed", 0), happened.index(("held", 0)))  # the follower is there
    seen = happened[first : first + 12]
    assert seen == [step for fragment in (0, 1, 2, 0, 1, 2) for step in (("agreed", fragment), ("held", fragment))]
    # And the layer above has heard where each replica is.
    for one in told:
        assert one["states"].keys() == {"a", "b"}
        assert {place.split()[0] for place in one["states"].values()} <= {"TRAINING", "DRAINING"}
    above.stop()


# --- a leader dies wherever it may ------------------------------------------------------------------------------------


class Killed(BaseException):
    """What the training loop of a replica that died raises."""


class Killing:
    """Of the replica whose leader dies: its heartbeats end and its connections break."""

    def __init__(self) -> None:
        self.workers: dict[str, DiLoCoWorker] = {}
        self.killed = ""

    def __call__(self, leader: Leader) -> bool:
        topologies: dict[str, Any] = {name: worker._topology for name, worker in self.workers.items()}

        def led() -> list[str]:
            return [name for name, one in topologies.items() if one._leadership._leader is leader]

        wait_until(lambda: led() or leader.failure)  # it may just begin, or have stood down
        if not led():
            return False
        self.killed = led()[0]
        topology = topologies[self.killed]
        topology._ended = True
        topology._failure = Killed()
        topology._quorums.close()
        topology._groups.drop()
        return True


MOMENTS = {
    "before the others hold what it sends": Moment("_write", is_before=True, offering=True),
    "before it sends": Moment("_write", is_before=False, offering=True),
    "after it has sent": Moment("_sent", is_before=False),
    "before the others hold what was agreed": Moment("_write", is_before=True, offering=False),
    "before what was agreed is in their model": Moment("_move", is_before=True),
    "after what was agreed is in their model": Moment("_move", is_before=False),
}


class Books:
    """What the rounds of a cluster of two gained, as each of the two knows it, by version."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gained: dict[str, dict[int, dict[str, float]]] = {"a": {}, "b": {}}
        self.has_both = threading.Event()  # the two have met
        agree = Rounds._agree

        def noted(rounds: Rounds, brought: Any, made: VotedRound) -> RoundOutcome:
            seen = {offer.worker_id: 2.0 * offer.steps / len(made.active) for offer in made.active}
            self.gained[rounds.own.worker_id][rounds.snapshot.versions[0] + 1] = seen
            if len(seen) == 2:
                self.has_both.set()
            return agree(rounds, brought, made)

        monkeypatch.setattr(Rounds, "_agree", noted)

    def expected(self, left: str) -> list[float]:
        """In the model above, which makes twice as much of all that goes up. `left`: who was there to the end. (Whoever
        came second was healed: the first rounds are known to the other alone.)"""
        other = "a" if left == "b" else "b"
        first = min(self.gained[left])
        known = {**{v: g for v, g in self.gained[other].items() if v < first}, **self.gained[left]}
        return [2.0 * sum(one.get(own, 0.0) for one in known.values()) for own in "ab"]


def one_cluster_above() -> DiLoCoServer:
    return DiLoCoServer(
        Ledger(CELLS).state_dict(), 1, port=0, insecure=True, outer_lr=2.0, outer_momentum=0.0, codec="fp32",
        heartbeat_timeout_s=600.0,
    ).start()  # fmt: skip


SHORT = {"quorum_timeout_s": 2.0, "transfer_timeout_s": 4.0, "above_wait_s": 10.0}


@pytest.mark.parametrize("moment", MOMENTS)
def test_no_step_is_lost_or_counted_twice_when_a_leader_dies(
    moment: str, lighthouses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outerstep.topology.torchft.quorum.CONNECT_S", 1.0)
    books, killing = Books(monkeypatch), Killing()
    death = LeaderDeath(MOMENTS[moment], books.has_both, killing)
    death.prepare(monkeypatch)
    above = one_cluster_above()
    models = {"a": Ledger(CELLS), "b": Ledger(CELLS)}

    def work(own: str) -> bool:
        """Says whether it lived."""
        model = models[own]
        worker, optimizer = make(lighthouses[0], above, "east", own, model, **SHORT)
        killing.workers[own] = worker
        try:
            with worker:
                while not death.has_come.is_set():
                    count(model, optimizer, "ab".index(own), 1)
                    time.sleep(0.01)
                count(model, optimizer, "ab".index(own), 6 * H + 1)
        except Killed:
            return False
        return True

    assert sum(in_threads(lambda: work("a"), lambda: work("b"))) == 1
    left = "a" if killing.killed == "b" else "b"
    cells = above.get_global_params()["cells"].tolist()
    assert cells[:2] == books.expected(left)
    assert models[left].cells.tolist() == cells
    above.stop()


# --- a leader that hands over -----------------------------------------------------------------------------------------


def test_the_lead_moves_by_order_for_a_faster_line_and_before_a_leader_leaves(
    lighthouses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is lost by it, nothing counts twice, and the cluster is never away in the layer above."""
    monkeypatch.setattr("outerstep.topology.leadership.SETTLED_S", 0.0)
    rates = {"a": 1e6, "b": 1e6}
    books, above = Books(monkeypatch), one_cluster_above()
    told: list[Event] = []
    above.service.events.add(told.append)
    models = {name: Ledger(CELLS) for name in "ab"}
    is_over = {name: threading.Event() for name in "ab"}
    leaderships: dict[str, Leadership] = {}

    def work(own: str) -> None:
        worker, optimizer = make(lighthouses[0], above, "east", own, models[own], **SHORT)
        leaderships[own] = leadership = worker._topology._leadership  # type: ignore[union-attr]
        leadership.reach = lambda: (True, rates[own])
        with worker:
            while not is_over[own].is_set():
                count(models[own], optimizer, "ab".index(own), 1)
                time.sleep(0.01)

    def led_by() -> str:
        return above.status()["clusters"]["east"]["leader"]

    def leads(name: str) -> bool:
        return [own for own in "ab" if leaderships[own].leads] == [name] and led_by() == name

    def watch() -> None:
        try:
            assert books.has_both.wait(60.0)
            wait_until(lambda: above.status()["clusters"].get("east", {}).get("members") == ["a", "b"])
            first = led_by()
            second = "b" if first == "a" else "a"
            with pytest.raises(BadRequest, match="must be one of a, b, got c"):
                above.service.answer(Control(kind="lead", worker_id="east", leader="c"))
            above.service.answer(Control(kind="lead", worker_id="east", leader=second))
            wait_until(lambda: leads(second))
            rates[first] = 10 * rates[second]
            wait_until(lambda: leads(first))
            rates[second] = rates[first]
            is_over[first].set()
            wait_until(lambda: leads(second))
        finally:
            for one in is_over.values():
                one.set()

    in_threads(watch, lambda: work("a"), lambda: work("b"))
    orders = [event for event in told if isinstance(event, LeaderOrdered)]
    left = "a" if orders[0].leader == "a" else "b"
    cells = above.get_global_params()["cells"].tolist()
    assert cells[:2] == books.expected(left)
    assert models[left].cells.tolist() == cells
    assert above.service.coordinator.members.find("east").incarnation >= 4, "each leader fences the one before"
    gone = [event for event in told if isinstance(event, WorkerLeft | WorkerDied)]
    assert [type(event) for event in gone] == [WorkerLeft], "the cluster leaves once, at the end"
    above.stop()


# --- a whole cluster dies, and its replicas resume from what they saved ---------------------------------------------


@pytest.mark.parametrize("later", [0, 3 * H], ids=["newest states", "old states"])
def test_a_cluster_that_resumes_from_its_replicas_states_counts_no_step_twice(
    later: int, lighthouses: list[str]
) -> None:
    """`later`: the steps that each replica took after it had saved; of those some went up before both died."""
    above = one_cluster_above()
    first_lives = threading.Barrier(2)

    def first_life(own: str) -> dict[str, Any]:
        model = Ledger(CELLS)
        worker, optimizer = make(lighthouses[0], above, "east", own, model, min_replicas=2, **SHORT)
        with contextlib.suppress(Killed), worker:
            count(model, optimizer, "ab".index(own), 4 * H + 2)
            state = copy.deepcopy({"model": model.state_dict(), "worker": worker.state_dict()})
            count(model, optimizer, "ab".index(own), later)
            first_lives.wait(60.0)
            raise Killed
        return state

    def second_life(own: str, state: dict[str, Any]) -> list[float]:
        model = Ledger(CELLS)
        worker, optimizer = make(lighthouses[1], above, "east", own, model, min_replicas=2, **SHORT)
        model.load_state_dict(state["model"])
        worker.load_state_dict(state["worker"])
        with worker:
            count(model, optimizer, 2 + "ab".index(own), 3 * H + 1)
        return model.cells.tolist()

    states = in_threads(*(lambda own=own: first_life(own) for own in "ab"))
    sent = above.get_global_params()["cells"].tolist()
    ends = in_threads(*(lambda i=i: second_life("ab"[i], states[i]) for i in range(2)))
    cells = above.get_global_params()["cells"].tolist()
    assert ends == [cells, cells]
    # A step is 2, the mean of two halves it, and of all that goes up the layer above makes twice as much.
    assert cells[2:] == [2.0 * (3 * H + 1)] * 2
    assert cells[:2] == (sent[:2] if later else [2.0 * (4 * H + 2)] * 2)
    above.stop()


def test_a_cluster_that_leases_data_must_be_able_to_wait_for_it(above: DiLoCoServer) -> None:
    """(What replicas lease is in test_leased_members_processes.py.) It is refused before anybody is met."""
    more = {"num_fragments": 2, "fragment_delay": 1, "data": LeasedSampler(40, unit_samples=2)}
    worker, _ = make("127.0.0.1:1", above, "east", "east-0", tiny_model(), **more)
    with pytest.raises(ConfigError, match="fragment_delay must be 0"):
        worker.start()
