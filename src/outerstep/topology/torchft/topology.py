"""Contributions become agreements among replicas that torchft holds together: a lighthouse, a Manager each.

torchft elects the quorum of every exchange, heals a replica that was away, and takes the vote on each commit.
What travels and what is done with it is ours, as in every other topology: fragments, codecs and error feedback, one
mean with the same bits everywhere, a portable outer step in fp32 on everybody's own copy, hashes that are compared.

One thread carries the exchanges, fragment by fragment in the order of their versions; the next begins when the one
before was adopted, so that there is one state to heal from at any time. (A delay longer than the way from one
fragment to the next therefore hides nothing more.) Replicas meet only there: they need not take the same number of
steps in between.

rounds.py is one such exchange, quorum.py the Manager, process_groups.py what bytes travel by, state.py what the
replicas have in common, ../leadership.py what they are to a layer above.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import msgspec
import torch
from torch import Tensor

from ...coordination.shared_leases import terms_of
from ...coordination.shared_sub_leases import SharedSubLeases
from ...coordination.worker.units import LeaseRequest
from ...core.feedback import ErrorFeedback
from ...errors import AnchorsDiffer, ConfigError, RoundStuck, WorkerError
from ...types import LeaseAnswer, Manifest, Plan, Wishes
from ..carrying import step_aside
from ..cluster_part import ClusterPart
from ..encode import Encoded, as_deltas, sender_to_peers, write_at
from ..group.ranks import Ranks
from ..group.topology import Amount, of_all
from ..leadership import ClusterSettings, KeptRecord, Leadership
from ..local_worker import Inner
from ..protocol import Agreed, Contribution, DataVoice, FinishedTicket, Joined, Orders, Sight
from ..terms import Rank, check_loaded, check_loaded_table, draw_up, introduction
from ..update import MeanStep, copies
from .process_groups import ProcessGroups
from .quorum import Quorums, TorchftSettings
from .rounds import NO_KINDS, Brought, RoundOutcome, Rounds
from .state import NOTHING, Measured, ReplicaKinds, RunSnapshot, Snapshots, write_state

log = logging.getLogger(__name__)

TOO_LARGE = "what this worker learned of fragment {} is NaN, Inf or absurdly large, and was not sent"
FAREWELL_S = 10.0  # for the last comparison of anchors, which others may be late for
LOOK_S = 1.0
SHARE_OF_TIMEOUT = 0.8  # of the time that a healing may take, for the training thread to come to its next step


class Ended(Exception):
    """This worker has left; nobody waits for the exchange any more."""


class TorchftTicket:
    """An exchange in its turn."""

    def __init__(self, brought: Brought, stuck_after_s: float | None, topology: TorchftTopology) -> None:
        self.brought, self.fragment, self.stuck_after_s = brought, brought.fragment, stuck_after_s
        self.begun_at = time.monotonic()
        self.outcome: RoundOutcome | None = None
        self.error: BaseException | None = None
        self._topology = topology

    @property
    def done(self) -> bool:
        return self.outcome is not None or self.error is not None

    def look(self, timeout_s: float) -> Sight:
        return self._topology.look(self, timeout_s)

    def finish(self, *, reload: bool = False) -> Agreed:
        return self._topology.settle(self, reload=reload)

    def confirm(self, agreed: Agreed, intact: bool) -> None:
        self._topology.adopted(agreed, intact)

    def resume(self, *, stuck_after_s: float | None = None) -> TorchftTicket:
        """It continues by itself, or it has failed for good."""
        if stuck_after_s is not None:
            self.stuck_after_s, self.begun_at = stuck_after_s, time.monotonic()
        return self

    def pack(self) -> dict[str, Any]:
        """No server keeps a contribution for a replica that is away."""
        return {}

    def cancel(self) -> None:
        """A replica that leaves is missed by the others, and they vote again."""


class TorchftTopology:
    def __init__(
        self,
        *,
        worker_id: str,
        hostname: str,
        instance: str,
        tensors: Mapping[str, Tensor],
        anchors: Mapping[str, Tensor],
        settings: TorchftSettings,
        inner: Inner,
        ranks: Ranks | None = None,
        sections: int = 1,
        cluster: ClusterSettings | None = None,
        kinds: ReplicaKinds = NO_KINDS,
    ) -> None:
        """`tensors`: the model's by name, of a sharded one this process's rows; `anchors`: where the last agreed ones
        are found. `ranks`: the processes that are this replica, each of which exchanges what it holds with the same
        rank of the other replicas. `cluster`: the replicas are together one worker of a layer above. `kinds`: what the
        others are told of this replica."""
        self._worker_id, self._hostname, self._instance = worker_id, hostname, instance
        self._tensors, self._anchors = tensors, anchors
        self._settings, self._inner, self._ranks, self._sections = settings, inner, ranks, sections
        device = next(iter(tensors.values())).device
        self._groups = ProcessGroups(settings.backend, device, settings.transfer_timeout_s)
        self._feedback = ErrorFeedback()
        self._changed = threading.Condition()
        self._snapshots = Snapshots(inner.state, self._changed)
        self._queue: dict[int, TorchftTicket] = {}  # begun and not exchanged, by fragment
        self._unconfirmed: set[int] = set()  # fragments of the last exchange that were not adopted yet
        self._comparing = self._ended = False
        self._failure: BaseException | None = None
        self._sequence = 0
        self._saved: Mapping[str, Any] | None = None
        self._begins: dict[int, Agreed] = {}  # what this replica has to catch up with
        self._landed = RunSnapshot.fresh(0)  # as the replica holds it, and
        self._landed_step = 0  # the votes until then
        self._joined: tuple[Rounds, Quorums] | None = None
        self._cluster = cluster
        self._leadership = Leadership(cluster.wait_s, cluster.reach) if cluster is not None else None
        self._kinds = kinds
        self._voice: DataVoice | None = None

    # --- membership -----------------------------------------------------------------------------------------------

    def join(self, manifest: Manifest | None, wishes: Wishes) -> Joined:
        """At the next exchange of those who are there already, or as soon as enough are to begin."""
        try:
            return self._join(manifest, wishes)
        except BaseException as error:
            self.leave(f"{type(error).__name__}: {error}")  # else the lighthouse would go on counting on us
            raise

    def _join(self, manifest: Manifest | None, wishes: Wishes) -> Joined:
        assert manifest is not None
        plan = draw_up(wishes, self._settings.weight_by, manifest, self._worker_id)
        if self._voice is not None and self._cluster is not None and plan.delay:
            raise ConfigError(
                f"fragment_delay must be 0 in a cluster that leases data from a layer above, got {plan.delay}: a "
                "replica that has none left waits for it, and can adopt nothing meanwhile"
            )
        own = self._introduction(manifest, plan)
        rounds = Rounds(
            own,
            self._instance,
            self._settings,
            self._groups,
            self._tensors,
            self._anchors,
            self._leadership,
            self._kinds,
        )
        quorums = Quorums(self._worker_id, self._settings, self._groups, self._ranks, state=self._state)
        self._joined = rounds, quorums
        if self._voice is not None:
            rounds.share_data(self._voice)
        if self._cluster is not None and self._leadership is not None:
            self._leadership.make_leader = self._cluster.lead(self._leadership, rounds, manifest)
        if self._saved is not None:
            self._go_on_from(self._saved, plan)
        before = list(rounds.snapshot.versions)
        threading.Thread(target=self._carry, name="outerstep-torchft", daemon=True).start()
        log.info("waiting for the quorum of the lighthouse at %s", self._settings.lighthouse)
        ticket = self._put(Brought(NOTHING, 0), None)
        self._begins = {one.fragment: one for one in self._land(ticket)}
        work, overtaken = (0, 0, 0), frozenset[int]()
        if self._saved is None and rounds.healed_from is not None:
            work = self._inner.load(rounds.healed_from)
        elif self._saved is not None:
            overtaken = self._overtaken(self._saved)
            for fragment in overtaken & self._begins.keys():
                self._begins[fragment] = replace(self._begins[fragment], counted=True)
            if rounds.snapshot.versions == before and not overtaken:  # the replica holds it all
                self._all_adopted()
        self._saved = rounds.healed_from = None
        return Joined(self._worker_id, plan, manifest, overtaken, work=work)

    def _overtaken(self, saved: Mapping[str, Any]) -> frozenset[int]:
        """The fragments of which the run has later contributions than this state knows of, made by the process that
        saved it: steps that were unsent in it are among them. In a cluster, all of them if the leader has doubts."""
        now = self._rounds.snapshot.counted
        if self._rounds.doubts:
            return frozenset(range(len(now)))
        instance, then = saved.get("instance", ""), saved.get("counted", now)  # states of 0.2 do not say
        return frozenset(f for f, counted in enumerate(now) if counted.get(instance, 0) > then[f].get(instance, 0))

    def _introduction(self, manifest: Manifest, plan: Plan) -> Rank:
        size = self._ranks.size if self._ranks is not None else 1
        own = introduction(self._worker_id, self._hostname, size, manifest, plan, self._settings.outer)
        shape = {
            "number of processes": size,
            "number of shards": self._sections,
            "replica_backend": self._settings.backend,
        }
        terms = self._cluster.terms if self._cluster is not None else {}
        terms = {**terms, **(terms_of(self._voice.datasets) if self._voice is not None else {})}
        return msgspec.structs.replace(own, outer={**own.outer, **shape, **terms})

    def _go_on_from(self, saved: Mapping[str, Any], plan: Plan) -> None:
        check_loaded(plan, saved["versions"], saved["anchors"].keys())
        counted = saved.get("counted") or [{} for _ in plan.fragments]
        snapshot = RunSnapshot(
            saved["run_id"], list(saved["versions"]), list(saved["hashes"]), [dict(one) for one in counted]
        )
        snapshot.data = saved.get("data")
        if self._leadership is not None and "cluster" in saved:
            snapshot.cluster = msgspec.json.decode(saved["cluster"], type=ClusterPart)
            self._rounds.record = KeptRecord(saved["record"])
        if self._rounds.leases is not None:
            check_loaded_table(self._rounds.leases, snapshot.data)
        anchors = {name: tensor.reshape(self._tensors[name].shape) for name, tensor in copies(saved["anchors"]).items()}
        self._rounds.begin_at(snapshot, anchors, copies(saved["momentum"]))
        if isinstance(self._rounds.leases, SharedSubLeases):
            self._rounds.leases.doubt()
        self._quorums.step = saved["step"]

    def heartbeat(self, step: int, steps_per_second: float, loss: float | None) -> None:
        """The Manager's own tell the lighthouse."""
        self._groups.memory.rest()

    def orders(self, *, at_exchange: bool) -> Orders:
        self._snapshots.serve()
        self._raise_failure()
        return Orders(drain=self._rounds.drain)

    @property
    def life_state(self) -> str:
        """(`Tracked`.)"""
        return self._rounds.life.place

    def leave(self, reason: str) -> None:
        """The last anchors are compared first, if the others come to it."""
        with self._changed:
            self._changed.wait_for(lambda: not self._comparing or reason != "done", FAREWELL_S)
            self._ended = True
            self._changed.notify_all()
        if self._leadership is not None and self._cluster is not None:
            self._leadership.close()
            self._cluster.close()
        if self._joined is not None:
            self._quorums.close()
            self._groups.drop()
            self._rounds.life.left()
        failure, self._failure = self._failure, None
        if failure is not None and reason == "done":
            raise failure

    def part(self, patience_s: float) -> list[FinishedTicket]:
        """(`Parting`.) What is left goes up if all are at the end of their training, and what is agreed comes down."""
        if self._leadership is None:
            return []
        ticket = self._put(Brought(NOTHING, self._sequence, last=True), patience_s)
        try:
            landed = self._land(ticket)
        except RoundStuck as error:
            log.warning("%s; leaving without the others", error)
            return []
        return [FinishedTicket(agreed, self.adopted) for agreed in landed]

    # --- leased data (SharesData) -------------------------------------------------------------------------------------

    @property
    def data_part(self) -> tuple[int, int]:
        """Each replica trains its own units."""
        return 0, 1

    def share_data(self, voice: DataVoice) -> None:
        self._voice = voice

    def is_admitted(self) -> bool:
        """In a cluster that goes on from saved states not before the layer above has said what is still theirs."""
        leases = self._rounds.leases
        if not isinstance(leases, SharedSubLeases) or leases.is_confirmed or self._rounds.drain:
            return True
        self.wait_for_data()
        return False

    def leased(self, request: LeaseRequest) -> LeaseAnswer:
        return self._rounds.leased(request)

    def wait_for_data(self) -> str | None:
        """In a cluster: until the replicas have met. (Whoever heals from this one meanwhile gets its state.)"""
        rounds = self._rounds
        leases = rounds.leases
        if not isinstance(leases, SharedSubLeases) or rounds.data is None or rounds.drain:
            return None
        self._raise_failure()
        if leases.trouble:
            raise WorkerError(f"the layer above leases nothing more to these replicas: {leases.trouble}")
        self._land(self._put(Brought(NOTHING, self._sequence, dry=True), None))
        return None if rounds.drain else rounds.data.waiting_for

    def data_progress(self) -> list[dict[str, Any]]:
        return self._rounds.data_progress()

    @property
    def _rounds(self) -> Rounds:
        assert self._joined is not None
        return self._joined[0]

    @property
    def _quorums(self) -> Quorums:
        assert self._joined is not None
        return self._joined[1]

    # --- exchanges ------------------------------------------------------------------------------------------------

    def begin(self, contribution: Contribution, *, stuck_after_s: float | None = None) -> TorchftTicket:
        """Encode now (the weights will change); it is exchanged when its fragment's turn comes."""
        self._raise_failure()
        if self._ranks is not None:
            own = Amount(contribution.samples, contribution.tokens)
            contribution = of_all(contribution, self._ranks.gather(lambda: own, Amount))
        self._sequence += 1
        fragment = contribution.fragment
        brought = Brought(
            fragment,
            self._sequence,
            contribution.steps,
            contribution.samples,
            contribution.tokens,
            trained=contribution.data,
        )
        ticket = self._put(brought, stuck_after_s)  # the quorum forms while we encode
        measured = Measured(as_deltas(contribution.deltas))
        if contribution.owes_nothing:
            self._feedback.forget(fragment, self._rounds.forms[fragment].rules)
        try:
            payload = self._encode(fragment, measured, brought.sequence)
            brought.fill(
                payload, "" if math.isfinite(measured.squares) else TOO_LARGE.format(fragment), measured.squares
            )
        except BaseException as error:
            brought.fill(None, error=error)
            raise
        return ticket

    def _encode(self, fragment: int, deltas: Measured, sequence: int) -> Encoded:
        form, run_id = self._rounds.forms[fragment], self._rounds.run_id
        sender = sender_to_peers(
            form, fragment, deltas, self._feedback, run_id=run_id, worker_id=self._worker_id, sequence=sequence
        )
        return write_at(self._groups, form.up, sender)

    def _put(self, brought: Brought, stuck_after_s: float | None) -> TorchftTicket:
        ticket = TorchftTicket(brought, stuck_after_s, self)
        with self._changed:
            self._queue[brought.fragment] = ticket
            self._changed.notify_all()
        return ticket

    def look(self, ticket: TorchftTicket, timeout_s: float) -> Sight:
        """While it waits for its turn, another fragment's contribution may be what everybody waits for."""
        with self._changed:
            self._changed.wait_for(lambda: ticket.done or self._snapshots.wanted, timeout_s)
        self._snapshots.serve()
        self._raise_failure()
        if ticket.done:
            return Sight(done=True, failed=ticket.error is not None)
        return Sight(False, self._wanted(), "the other replicas", self._quorums.silent_s)

    def _wanted(self) -> frozenset[tuple[int, int]]:
        with self._changed:
            snapshot = self._rounds.snapshot
            versions, turn = snapshot.versions, snapshot.turn
            if self._unconfirmed:
                return frozenset((fragment, versions[fragment]) for fragment in self._unconfirmed)
            return frozenset() if turn in self._queue else frozenset([(turn, versions[turn] + 1)])

    def settle(self, ticket: TorchftTicket, *, reload: bool) -> Agreed:
        """Wait for it. A replica that fell behind gets the other fragments too."""
        *others, agreed = self._land(ticket)
        outcome, brought = ticket.outcome, ticket.brought
        assert outcome is not None
        if self._feedback.is_used:
            self._feedback.settle(ticket.fragment, brought.sequence, counted=outcome.counted)
        if brought.refused and not reload:
            raise WorkerError(f"{brought.refused}; lower the learning rate, or clip the gradients")
        return replace(agreed, refused=brought.refused, also=tuple(others))

    def _land(self, ticket: TorchftTicket) -> list[Agreed]:
        """Wait for it. The agreements, that of its own fragment last."""
        while not ticket.done:  # in slices, so that Ctrl-C gets through
            ticket.look(LOOK_S)
        if ticket.error is not None:
            raise ticket.error
        assert ticket.outcome is not None
        return [self._agreed(fragment, ticket) for fragment in ticket.outcome.updates]

    def _agreed(self, fragment: int, ticket: TorchftTicket) -> Agreed:
        assert ticket.outcome is not None
        outcome, own = ticket.outcome, fragment == ticket.fragment
        update, state = outcome.updates[fragment], self._rounds.states[fragment]
        counted = own and outcome.counted
        if isinstance(update, MeanStep) and update.frame.is_cuda:  # it was made on another stream
            update.frame.record_stream(torch.cuda.current_stream(update.frame.device))
        return Agreed(
            fragment=fragment,
            version=state.version,
            counted=counted,
            update=update,
            anchor_hash=state.anchor_hash,
            participants=outcome.participants if own else (),
            above=self._rounds.cluster.above[fragment] if self._rounds.cluster is not None else (),
            bytes_sent=outcome.bytes_sent if own else 0,
            bytes_received=outcome.bytes_received if own else 0,
            plan=self._rounds.plan,
            counted_in=state.version if counted else 0,
            watched=outcome.watched if own and self._sections == 1 else None,
        )

    def adopted(self, agreed: Agreed, intact: bool) -> None:
        """It was adopted; when all that came with it was, the carrying thread compares the anchors and goes on."""
        self._rounds.states[agreed.fragment].arrive(agreed.version, agreed.update.digest)  # they will be compared
        if isinstance(agreed.update, MeanStep):
            self._groups.give_back(agreed.update.frame)
        with self._changed:
            self._unconfirmed.discard(agreed.fragment)
            if self._unconfirmed:
                return
        self._all_adopted()

    def _all_adopted(self) -> None:
        with self._changed:
            self._rounds.caught_up()
            self._landed, self._landed_step = self._rounds.snapshot, self._quorums.step
            self._unconfirmed.clear()
            self._changed.notify_all()

    # --- the carrying thread --------------------------------------------------------------------------------------

    def _carry(self) -> None:
        step_aside(self._groups.home if self._groups.is_open else self._groups.device)
        while (ticket := self._next()) is not None:
            self._exchange(ticket)

    def _next(self) -> TorchftTicket | None:
        rounds = self._rounds

        def found() -> TorchftTicket | None:
            return self._queue.get(NOTHING) or self._queue.get(rounds.snapshot.turn)

        with self._changed:
            self._changed.wait_for(lambda: self._ended or (not self._unconfirmed and found() is not None))
            return None if self._ended else found()

    def _exchange(self, ticket: TorchftTicket) -> None:
        outcome, error = None, None
        try:
            outcome = self._rounds.run(ticket.brought, self._quorums, lambda: self._lose_patience(ticket))
        except BaseException as caught:  # noqa: BLE001 - it surfaces in finish(), in the training thread
            error = caught
            self._groups.drop()
        if ticket.brought.payload is not None:
            ticket.brought.payload.release()
        if outcome is not None and ticket.brought.dry and self._rounds.holds_all:
            self._all_adopted()
        with self._changed:
            del self._queue[ticket.fragment]
            if outcome is not None:
                self._unconfirmed, self._comparing = set(outcome.updates), True
            ticket.outcome, ticket.error = outcome, error
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._ended or not self._unconfirmed)
        if outcome is None or self._ended:
            return
        try:
            self._rounds.compare(self._quorums)
        except AnchorsDiffer as error:
            self._failure = error
        with self._changed:
            self._comparing = False
            self._changed.notify_all()

    def _lose_patience(self, ticket: TorchftTicket) -> None:
        if self._ended:
            raise Ended
        waited_s = time.monotonic() - ticket.begun_at
        if ticket.stuck_after_s is not None and waited_s > ticket.stuck_after_s:
            raise RoundStuck(f"no quorum of replicas came about for {waited_s:.0f} s")

    def _raise_failure(self) -> None:
        failure = self._failure
        if failure is not None:
            self._failure = None
            raise failure

    # --- what must not be forgotten -------------------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        """For a replica that heals from this one; in a thread of the Manager's, while the carrying thread waits."""
        rounds = self._rounds
        worker = rounds.healed_from  # of one that waits until its cluster has joined the layer above, say
        if worker is None:
            worker = self._snapshots.ask(SHARE_OF_TIMEOUT * self._settings.transfer_timeout_s)
        anchors = rounds.ahead if rounds.ahead is not None else self._anchors
        log.info("another replica heals from this one")
        record = rounds.record.data if self._leadership is not None else None
        return write_state(rounds.snapshot, anchors, rounds.outer.momentum.flat, worker, record)

    def state_dict(self, under_way: Collection[int]) -> dict[str, Any]:
        """Anchor and momentum too: there is no server that keeps them. (What is under way is lost with the process:
        its steps are unsent.)"""
        landed = self._landed
        return {
            "run_id": landed.run_id,
            "step": self._landed_step,
            "versions": list(landed.versions),
            "hashes": list(landed.hashes),
            "counted": [dict(one) for one in landed.counted],
            "instance": self._instance,
            "anchors": dict(self._anchors),
            "momentum": self._rounds.outer.momentum.flat,
            "feedback": self._feedback.state_dict(()),
            **({} if landed.data is None else {"data": landed.data}),
            **self._cluster_state(landed),
        }

    def _cluster_state(self, landed: RunSnapshot) -> dict[str, Any]:
        if landed.cluster is None:
            return {}
        return {"cluster": msgspec.json.encode(landed.cluster).decode(), "record": self._rounds.record.data}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._saved = state
        self._feedback.load_state_dict(state["feedback"])

    def catch_up(self, fragment: int) -> FinishedTicket:
        return FinishedTicket(self._begins.pop(fragment), lambda agreed, intact: self.adopted(agreed, intact))

    def reopen(self, fragment: int, packed: Mapping[str, Any], *, late: bool = False) -> None:
        """What was under way was lost with the process: its steps are unsent."""


__all__ = ["ClusterSettings", "Inner", "TorchftSettings", "TorchftTicket", "TorchftTopology"]
