"""One registered worker in the run, and what it has under way.

The old protocol has no keys: a client that lost the answer to a submit sends it again, or registers again and then
submits. What is counted is therefore decided here, per worker and fragment:

1. A worker contributes **once to each version it was handed**. Until it has been handed a newer one (by an answer that
   was written to the end, or by registering), whatever it submits is a repeat of its first submission: it is not
   counted, and is answered when that one is. (Other bytes on the same version hold the same steps and more; what they
   hold more is lost, which the log says.)
2. After such an answer the **same payload** (by hash) is still a repeat, as long as nothing shows that the answer
   arrived. It did arrive if the client then spoke again on that connection, or closed it in good order after it had
   acknowledged every byte; a submit may overtake that news, so it is waited for a moment.

The limit of 2: a client that keeps the connection of its last answer open and silent, and submits byte-identical
pseudo-gradients in the next round on another one, is taken at its first word. One behind a proxy that swallows an
answer after taking it whole is counted twice.

An id that was registered here belongs to this server: nobody can join under it on the other port, and nobody can
register here under an id that belongs to a worker there. Among the clients of this port an id belongs to the address
that registered it, for as long as its worker is alive.

After a restart of the server its clients go on as if nothing had been, so their places are made again from the ledger:
who was here, from where, and which version holds the last contribution of each. What a client submits then was computed
from that version, unless these are the very bytes that are in it already, and nothing shows that the client has got its
answer (heard.py): those are a repeat. (By the hash of what they become in the run's codec. One with error feedback
makes other bytes of the same values each time; there such a repeat counts again.)

What the server asks of a worker (to finish, to exchange now) the old protocol cannot say. A client that is to finish
gets the answer it waits for, and then leaves the run: `CompatClient` does so for it, and refuses what it says next.
"""

from __future__ import annotations

import logging
import secrets
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from ..coordination.server.membership import KnownWorker
from ..coordination.server.remembered import Acceptance
from ..coordination.worker.exchange import Patience
from ..digest import payload_hash
from ..errors import Busy, Closing, NotOwner, OuterstepError, Refused, ServerError, StaleRound
from ..pool import Pool, Room
from ..server.service import ParameterService
from ..topology.protocol import Agreed, Contribution, anchors_of
from ..topology.server.exchange import ServerTicket
from ..topology.server.topology import HEAR, ServerTopology
from ..types import Plan, Wishes
from .names import Introduction

log = logging.getLogger(__name__)

PATIENCE = Patience(first_backoff_s=0.05, longest_backoff_s=1.0, poll_wait_s=1.0)
"""The server is in this process. A poll counts as a sign of life, so it must end soon after its client has gone."""

POLLS_PER_TIMEOUT = 4
"""And it must come again before a short heartbeat timeout is over."""

NEWS_S = 2.0
"""How long a submit waits for the news that its client has got the answer before."""

TRIES = 4
"""Rounds that may close without a contribution before its client is told."""


class ReadPayload:
    """A body that was read, and the tensors in it; its room is given back when nobody needs them any more."""

    def __init__(self, pool: Pool, room: Room, digest: str, tensors: Mapping[str, Tensor]) -> None:
        self.digest = digest
        self.tensors = tensors
        weakref.finalize(self, pool.give_back, room)


class FragmentSubmission:
    """A worker's contribution to one fragment, from its first submission until its answer is known to have arrived.

    It makes progress only while a connection *holds* it, that is, while a client waits for it: the exchange asks the
    server again and again, and that must not keep a worker alive whose client is gone. A contribution that was accepted
    stays accepted; the next connection to hold the submission resumes it under the same key. The agreement, too, is
    kept only while it is held: it is as large as the fragment, and a client that asks again can have the newest one.
    """

    def __init__(
        self,
        topology: ServerTopology,
        fragment: int,
        names: Sequence[str],
        payload: ReadPayload,
        base: int,
        steps: int,
        counted_in: int | None = None,
    ) -> None:
        """`counted_in`: the version that holds it already; None = it is begun now."""
        self.fragment = fragment
        self.base = base
        self.digest = payload.digest
        self.agreed: Agreed | None = None
        self.version = counted_in  # the agreed one, also when that is gone
        self.failure: Refused | None = None
        self.on_their_way = 0  # answers that were written, and nobody knows yet whether they arrived
        self._topology = topology
        self._names = names
        self._payload: ReadPayload | None = payload if counted_in is None else None
        self._steps = steps
        self._tries = 0
        self._holders = 0
        self._carried = True
        self._lock = threading.Lock()
        self._ticket: ServerTicket | None = self._begin(base) if counted_in is None else None

    @property
    def settled(self) -> bool:
        return self.version is not None or self.failure is not None

    @property
    def is_held(self) -> bool:
        return self._holders > 0

    def hold(self) -> None:
        with self._lock:
            self._holders += 1
            if not self._carried and self._ticket is not None:
                self._ticket = self._ticket.resume()
                self._carried = True

    def let_go(self) -> None:
        with self._lock:
            self._holders -= 1
            if self._holders == 0:
                self.agreed = None
                if self._ticket is not None:
                    self._ticket.cancel()
                    self._carried = False

    def wait(self, timeout_s: float) -> bool:
        """Is it settled? The thread that waits also takes the next step."""
        with self._lock:
            if self._ticket is not None and self._ticket.over.wait(timeout_s):
                self._adopt(self._ticket)
            return self.settled

    def end(self, failure: Refused) -> None:
        """The clients that wait are told `failure`."""
        with self._lock:
            if not self.settled:
                self._settle(None, failure)

    def _begin(self, base: int) -> ServerTicket:
        assert self._payload is not None
        self._tries += 1
        return self._topology.begin(contribution_of(self.fragment, self._names, self._payload, base, self._steps))

    def _adopt(self, ticket: ServerTicket) -> None:
        """If the round had closed without us, the same steps go into the next one: a rebased pseudo-gradient is the
        same pseudo-gradient."""
        try:
            agreed = ticket.finish()
            if agreed.counted:
                self._settle(agreed, None)
            elif self._tries < TRIES:
                self._ticket = self._begin(agreed.version)
            else:
                self._settle(None, StaleRound(f"{TRIES} rounds of fragment {self.fragment} closed without it"))
        except OuterstepError as error:
            self._settle(None, as_refusal(error))

    def _settle(self, agreed: Agreed | None, failure: Refused | None) -> None:
        self.agreed, self.failure = agreed, failure
        self.version = None if agreed is None else agreed.version
        if self._ticket is not None:
            self._ticket.cancel()
        self._ticket = self._payload = None


def contribution_of(fragment: int, names: Sequence[str], payload: ReadPayload, base: int, steps: int) -> Contribution:
    deltas = {name: payload.tensors[name] for name in names}
    return Contribution(fragment, base_version=base, oldest_base=base, steps=steps, samples=0, tokens=0, deltas=deltas)


class CompatClient:
    """One registered worker, made by `join`, which also gives the newest anchors (they are not kept: that would be a
    model per client); or by `restored`, of a worker that was here before the server was restarted. That one joins when
    its client speaks: nothing else is a sign of life."""

    @classmethod
    def join(
        cls, service: ParameterService, introduction: Introduction, wishes: Wishes
    ) -> tuple[CompatClient, Sequence[Agreed]]:
        client = cls(service, introduction, secrets.token_hex(8))
        joined, anchors = client._join_now(wishes)
        client.topology, client.plan = joined
        client._versions = [agreed.version for agreed in anchors]
        return client, anchors

    @classmethod
    def restored(cls, service: ParameterService, worker: KnownWorker, heard: Mapping[int, int]) -> CompatClient | None:
        """None: it did not come in here. `heard`: per fragment, the newest version that it is known to have got."""
        introduction = Introduction.remembered(worker.worker_id, worker.hostname, worker.info)
        if introduction is None or not service.is_own(worker):
            return None
        client = cls(service, introduction, worker.instance)
        client._before = {i: entry for i, entry in worker.closed.items() if heard.get(i, -1) < entry.version}
        return client

    def __init__(self, service: ParameterService, introduction: Introduction, instance: str) -> None:
        self.worker_id = introduction.worker_id
        self.hostname, self.address = introduction.hostname, introduction.address
        self.instance = instance
        self._introduction = introduction
        self.sync_every: int | None = None  # if the run gives this worker a number of its own
        self.left = False  # it was told to finish, and has
        self._service = service
        self._steps_per_second = 0.0
        self._drain = ""  # why it is to finish
        self.topology = self._new_topology()
        self.plan: Plan | None = None
        self._versions: list[int] = []  # what the client was handed
        self._before: dict[int, Acceptance] = {}  # per fragment, what may have counted before the server was restarted
        naming = service.coordinator.naming
        self._first = 0 if naming is None else naming.first  # the version of what it was given and nobody had named
        self._submissions: dict[int, FragmentSubmission] = {}
        self._lock = threading.Condition()

    @property
    def shown(self) -> str:
        return self._introduction.shown

    @property
    def is_idle(self) -> bool:
        return not self._submissions

    def wake(self) -> Plan:
        """The client speaks: if that is the first time since the server was restarted, it takes its place again."""
        with self._lock:
            if self.plan is None:
                self.topology.introduce(None, Wishes(), HEAR)
                joined = self.topology.session.joined
                self._versions = [
                    min(state.counted_in, state.version) if state.last_sequence else state.version
                    for state in joined.fragments
                ]
                self.plan = joined.plan
            return self.plan

    def join_again(self) -> Sequence[Agreed]:
        """For a client that came back: as the same start of the same worker, so that what it had under way stays.
        Brings it back to life if it was declared dead meanwhile, and fetches the newest anchors."""
        return self._join_now()[1]

    def _join_now(self, wishes: Wishes = Wishes()) -> tuple[tuple[ServerTopology, Plan], Sequence[Agreed]]:  # noqa: B008
        """Once more if what the run trains was settled meanwhile: the anchors must be of one plan."""
        for _ in range(TRIES):
            topology = self._new_topology()
            try:
                joined = topology.join(None, wishes)
                anchors = [agreed for _, agreed in anchors_of(topology, joined)]
            except OuterstepError:
                if not self._is_outdated(topology):
                    raise
                continue
            if not self._is_outdated(topology):
                return (topology, joined.plan), anchors
        raise Busy("what the run trains is being settled", hint="register again", retry_after_s=1.0)

    def _is_outdated(self, topology: ServerTopology) -> bool:
        now, joined = self._service.coordinator.plan, topology.plan
        return now is not None and joined is not None and now.fragments != joined.fragments

    def follow_plan(self) -> Plan:
        """The fragments as they are now: they may have been settled since this client registered. Those that are new to
        it begin with the weights that it was given then."""
        with self._lock:
            plan, now = self.wake(), self._service.coordinator.plan
            assert now is not None
            if now.fragments != plan.fragments:
                self.plan = plan = self.topology.learn_plan()
                new = [self._first] * (len(plan.fragments) - len(self._versions))
                self._versions = [*self._versions, *new][: len(plan.fragments)]
            return plan

    def listen(self, steps_per_second: float | None = None) -> None:
        """The client has spoken: a sign of life, in answer to which the server says what it asks of this worker. To
        exchange now is not for us to do, the client has the steps; it is left at that."""
        self.check_here()
        if steps_per_second is not None:
            self._steps_per_second = steps_per_second
        self.topology.heartbeat(0, self._steps_per_second, None)
        orders = self.topology.orders(at_exchange=False)
        self.sync_every = orders.sync_every
        self._drain = orders.drain or self._drain

    def obey(self) -> None:
        """If this worker is to finish, and its client does not wait for a round: leave."""
        with self._lock:
            if not self._drain or self.left or any(submission.is_held for submission in self._submissions.values()):
                return
            self.left = True
        self.leave(self._farewell(), f"told to finish: {self._drain}")

    def _farewell(self) -> Closing:
        return Closing(
            f"worker {self.worker_id!r} was told to finish ({self._drain}), and has left the run",
            hint="stop this client; POST /register to take part again, if the run continues",
        )

    def is_reconnect(self, introduction: Introduction) -> bool:
        """Is this the same client, which lost its connection?"""
        same = (introduction.hostname, introduction.address) == (self.hostname, self.address)
        return same and not self.left and self._introduction.is_named(introduction.said or "")

    def check_speaker(self, said: str, address: str) -> None:
        """The old protocol has neither keys nor tokens: that it comes from where the worker registered is all there is
        to tell its client by."""
        if not self._introduction.is_named(said):
            raise NotOwner(
                f"worker id {self.worker_id!r} stands for that of another client here", hint="choose another worker id"
            )
        if address != self.address:
            raise NotOwner(
                f"worker {self.worker_id!r} is registered from {self.address}, and this comes from {address}",
                hint="choose another worker id; or, if it is the same worker, let it deregister there, or be declared "
                "dead, and register again",
            )

    def check_here(self) -> None:
        """Has it not left?"""
        if self.left:
            raise self._farewell()

    def check_open(self) -> None:
        """May it still submit?"""
        self.check_here()
        if self._drain:
            raise Closing(
                f"worker {self.worker_id!r} is to finish ({self._drain}); nothing more is taken from it",
                hint="stop this client",
            )

    def leave(self, why: Refused, reason: str) -> None:
        with self._lock:
            submissions = list(self._submissions.values())
            self._submissions.clear()
        for submission in submissions:
            submission.end(why)  # first: an exchange under way would join again
        self.topology.leave(reason)

    def end(self, why: Refused) -> None:
        with self._lock:
            submissions = list(self._submissions.values())
        for submission in submissions:
            submission.end(why)

    def take(self, fragments: Sequence[int], payload: ReadPayload) -> list[FragmentSubmission]:
        """The submissions to wait for, held: those under way if this is a repeat, else new ones. Let go of each."""
        taken: list[FragmentSubmission] = []
        try:
            with self._lock:
                self.check_open()  # again: reading the payload took a while
                for fragment in fragments:
                    self._await_news(fragment, payload)
                    submission = self._submissions.get(fragment)
                    if submission is None or not self._is_repeat(submission, payload):
                        submission = self._submissions[fragment] = self._new_submission(fragment, payload)
                    submission.hold()
                    taken.append(submission)
        except BaseException:
            for submission in taken:
                submission.let_go()
            raise
        return taken

    def hand_anchors(self, anchors: Iterable[Agreed]) -> None:
        """The client gets these versions: what it sends from now on was computed from them."""
        with self._lock:
            for agreed in [one for one in anchors if one.fragment < len(self._versions)]:
                self._versions[agreed.fragment] = max(self._versions[agreed.fragment], agreed.version)
                self._before.pop(agreed.fragment, None)

    def agreements(self, submissions: Sequence[FragmentSubmission]) -> list[Agreed]:
        """What these submissions came to, while they are held. In place of one that was answered before, the newest."""
        held = [submission.agreed for submission in submissions]
        newest = self.join_again() if None in held else ()
        return [agreed or newest[submission.fragment] for agreed, submission in zip(held, submissions, strict=True)]

    def is_out(self, agreed: Agreed) -> bool:
        """Was this worker's contribution there, and not taken?"""
        return any(p.worker_id == self.worker_id and p.weight == 0.0 for p in agreed.participants)

    def hand_answer(self, submissions: Sequence[FragmentSubmission], anchors: Iterable[Agreed]) -> None:
        """The same, in answer to a submit. `answer_ended` must follow."""
        with self._lock:
            self.hand_anchors(anchors)
            for submission in submissions:
                submission.on_their_way += 1

    def answer_ended(self, submissions: Sequence[FragmentSubmission], *, arrived: bool) -> None:
        with self._lock:
            for submission in submissions:
                submission.on_their_way -= 1
            if arrived:
                self.forget(submissions)
            self._lock.notify_all()

    def forget(self, submissions: Sequence[FragmentSubmission]) -> None:
        """Their answer has arrived, or they were refused: nothing will be a repeat of them."""
        with self._lock:
            for submission in submissions:
                if self._submissions.get(submission.fragment) is submission:
                    del self._submissions[submission.fragment]

    def _await_news(self, fragment: int, payload: ReadPayload) -> None:
        submission = self._submissions.get(fragment)
        if submission is not None and submission.digest == payload.digest and submission.on_their_way:
            self._lock.wait_for(
                lambda: self._submissions.get(fragment) is not submission or not submission.on_their_way, NEWS_S
            )

    def _is_repeat(self, submission: FragmentSubmission, payload: ReadPayload) -> bool:
        if submission.failure is not None:
            return False
        if submission.digest == payload.digest:
            return True
        if self._versions[submission.fragment] > submission.base:
            return False
        log.warning(
            "%s submitted fragment %d twice on version %d, the second time with other values; the first counts",
            self.worker_id,
            submission.fragment,
            submission.base,
        )
        return True

    def _new_submission(self, fragment: int, payload: ReadPayload) -> FragmentSubmission:
        plan, base = self.wake(), self._base(fragment)
        names, counted_in = plan.fragments[fragment], None
        before = self._before.pop(fragment, None)
        if before is not None and self._is_in(contribution_of(fragment, names, payload, base, 0), before):
            log.info("%s submits again what it had submitted before the restart; it is in", self.worker_id)
            counted_in = before.version
        return FragmentSubmission(self.topology, fragment, names, payload, base, self._steps(plan), counted_in)

    def _base(self, fragment: int) -> int:
        """The version that a submission was computed from. Of a fragment of buffers the client knows nothing: that they
        have not moved is true of the newest."""
        coordinator = self._service.coordinator
        assert coordinator.manifest is not None
        names = self.wake().fragments[fragment]
        if any(spec.role == "parameter" for spec in coordinator.manifest.parameters if spec.name in names):
            return self._versions[fragment]
        return coordinator.fragments[fragment].published.version

    def _steps(self, plan: Plan) -> int:
        """The client does not say how many steps it took. What it was started with, or told to do, is the best guess;
        then what the plan asks for."""
        advised = self.sync_every if self._introduction.follows_advice else None
        return advised or self._introduction.sync_every or plan.sync_every

    def _is_in(self, contribution: Contribution, before: Acceptance) -> bool:
        """Would this be what was accepted then, in one of the codecs that the run has had?"""
        codecs = self._service.coordinator.codecs
        return any(self._hash_of(contribution, before.sequence, codec) == before.payload_hash for codec in codecs)

    def _hash_of(self, contribution: Contribution, sequence: int, codec: str) -> str:
        """Of what goes to the server if this is contributed under that number."""
        twin = self._new_topology()
        twin.follow(self.topology.session.join_request, self.topology.session.joined)
        form = twin.form_of(contribution.fragment, codec)
        frame = twin.new_payload(contribution.deltas, form.up)
        twin.encode(contribution, sequence, frame, form)
        hashes = frame.known_hashes
        frame.release()
        return payload_hash([hashes[part] for part in sorted(hashes)])

    def _new_topology(self) -> ServerTopology:
        alive_s = self._service.config.heartbeat_timeout_s / POLLS_PER_TIMEOUT or PATIENCE.poll_wait_s
        return ServerTopology(
            self._service.transport_of(self.worker_id),
            worker_id=self.worker_id,
            instance=self.instance,
            hostname=self.hostname,
            patience=replace(PATIENCE, poll_wait_s=min(PATIENCE.poll_wait_s, alive_s)),
            info=self._introduction.info,
        )


def as_refusal(error: OuterstepError) -> Refused:
    """What the server said, without the words of those who passed it on."""
    if isinstance(error, Refused):
        return error
    if isinstance(error.__cause__, Refused):
        return error.__cause__
    return ServerError(str(error))
