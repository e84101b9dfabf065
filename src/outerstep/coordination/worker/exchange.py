"""The worker's side of one exchange, without I/O: offer, send parts, commit, poll, fetch parts.

    exchange = Exchange(…)
    while exchange.outcome is None:
        for call in exchange.calls(now): …send it…        # several may be in flight
        exchange.answered(call, answer, now)               # or exchange.failed(call, error, now)
        …sleep until exchange.wake_at…

The HTTP client and the simulator drive this same machine.

    JOIN ◀──unknown──┐
      └──▶ OFFER ──▶ SEND ──▶ COMMIT ──▶ POLL ──▶ FETCH ──▶ done
             │ stale │          │          │ ▲       │
             └───────┴──────────┴──────────┘ └───────┘ superseded while fetching

A contribution of one small part goes with its offer, and an agreement of that size comes with the answer to the poll:
OFFER ──▶ POLL ──▶ done. That is tried once. On any answer but "accepted" the exchange takes the longer way, which asks
before it sends.

Anything lost is asked again under the same key after a back-off with jitter; anything confusing goes back to OFFER,
whose answer tells what the server has. Without a contribution (a worker that just joined) it begins at POLL. With an
earlier contribution that is not confirmed yet (`Outbox`), that one is offered first, in the same way.

The processes of a sharded group carry one contribution together: each runs this machine with a `Share`. It sends its
own parts, then offers again until the server misses none; only the one that speaks commits. It ends at the agreement,
and each process fetches the parts it needs with a machine that begins at FETCH. The server is where they meet.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, TypedDict, TypeVar

from msgspec import UNSET
from msgspec.structs import asdict, replace

from ...digest import Parts, part_count, payload_hash
from ...errors import (
    Busy,
    Conflict,
    Fenced,
    FutureRound,
    HashMismatch,
    MissingParts,
    OtherCodec,
    OuterstepError,
    ProtocolMismatch,
    Refused,
    RoundStuck,
    ServerError,
    ServerFailed,
    ServerUnreachable,
    StaleRound,
    Superseded,
    TooOld,
    TransportError,
    UnknownWorker,
)
from ...lanes import FEWEST
from ...types import (
    MOST_CARRIED_BYTES,
    Agreement,
    Answer,
    Command,
    Commit,
    CommitAnswer,
    CompleteOffer,
    GetPart,
    GetPartAnswer,
    HeartbeatAnswer,
    Join,
    JoinAnswer,
    OfContribution,
    Offer,
    OfferAnswer,
    Poll,
    PollAnswer,
    PutPart,
    PutPartAnswer,
    Request,
)
from ..backoff import Backoff, jittered_s

LEAST_BUSY_S = 0.05  # the shortest pause after a Busy
ASKING = Backoff(0.02, 0.5)  # how often a process of a group asks whether the others have sent their parts


# --- who we are to the server, and how hard we try --------------------------------------------------------------------


class Session:
    """Who we are to the server. A re-join may change the incarnation for every holder of the session."""

    def __init__(self, join: Join) -> None:
        self._join = join
        self.answer: JoinAnswer | None = None

    @property
    def worker_id(self) -> str:
        return self._join.worker_id

    @property
    def joined(self) -> JoinAnswer:
        assert self.answer is not None, "not joined yet"
        return self.answer

    @property
    def join_request(self) -> Join:
        """A re-join names the run, so that a server which holds another one refuses it."""
        return self._join if self.answer is None else replace(self._join, run_id=self.answer.run_id)

    @property
    def head(self) -> MemberFields:
        joined = self.joined
        return MemberFields(run_id=joined.run_id, worker_id=self._join.worker_id, incarnation=joined.incarnation)

    def next_sequence(self, fragment: int, used: int) -> int:
        """Of a new contribution. (A resumed server that had forgotten us may have taken later ones from another start
        of this worker; it said so when we joined again.)"""
        return max(used, self.joined.fragments[fragment].last_sequence) + 1

    def catching_up(self, fragment: int, *, overtaken: bool) -> tuple[int | None, int]:
        """What to claim and after which version to ask, with a saved state: what has been agreed since; if the server
        has accepted later contributions than the state knows of (`overtaken`), the agreement that holds the last."""
        state = self.joined.fragments[fragment]
        return (state.last_sequence, state.counted_in - 1) if overtaken else (None, -1)


class MemberFields(TypedDict):
    """The fields of `FromMember`."""

    run_id: str
    worker_id: str
    incarnation: int


@dataclass(frozen=True)
class Patience:
    """How hard to try. A failed call is repeated after a pause (backoff.py)."""

    first_backoff_s: float = 0.5
    longest_backoff_s: float = 30.0
    give_up_after_s: float = 900.0  # without any answer at all
    poll_wait_s: float = 5.0
    calls_in_flight: int | None = None  # parts at a time; None = as the link needs (lanes.py)
    stuck_after_s: float | None = None  # while too few workers are alive for the round to close at all; None = wait
    stay_for_own_round: bool = False  # even when late, wait for the agreement that holds the contribution
    damaged_parts: int = 16  # parts that may arrive with a wrong hash before we believe it is not the line

    def backoff_s(self, failures: int, rng: random.Random) -> float:
        return Backoff(self.first_backoff_s, self.longest_backoff_s).pause_s(failures - 1, rng)


@dataclass(frozen=True)
class Orders:
    """`sync_every`: this worker's own H, if it is to differ from the plan's. `drain`, `sync`: why to contribute and
    leave, or to contribute, now ("" = no). `leader`: who is to lead this cluster from now on ("" = no change)."""

    sync_every: int | None = None
    drain: str = ""
    sync: str = ""
    leader: str = ""


class OrderInbox:
    """What the server asks of a worker in its answers to heartbeats. A command comes again until our "got it" arrives,
    and is obeyed once. `asked`: what the training has not taken yet; `received`: what the server has not been told."""

    def __init__(self) -> None:
        self.asked = Orders()
        self.received: set[int] = set()
        self._seen: set[int] = set()

    def heard(self, answer: HeartbeatAnswer, acknowledged: Iterable[int]) -> None:
        """The answer to a heartbeat that told the server of those `acknowledged`."""
        self.asked = dataclasses.replace(self.asked, sync_every=answer.sync_every)
        self.received.difference_update(acknowledged)
        for command in answer.commands:
            if command.id not in self._seen:
                self._seen.add(command.id)
                self.asked = _with(self.asked, command)
            self.received.add(command.id)

    def take(self) -> Orders:
        """For the training thread: after its step it obeys."""
        asked = self.asked
        if asked.drain or asked.sync or asked.leader:
            self.asked = Orders(asked.sync_every)
        return asked


def is_evicted(answer: object, *, has_left: bool) -> bool:
    """Has the server given up a worker that has not left? Then the worker joins again. (The heartbeat of one that has
    said goodbye may arrive after that.)"""
    return isinstance(answer, UnknownWorker) and not has_left


def _with(asked: Orders, command: Command) -> Orders:
    if command.kind == "lead":
        return dataclasses.replace(asked, leader=command.leader or asked.leader)
    reason = command.reason or command.kind
    if command.kind == "drain":
        return dataclasses.replace(asked, drain=reason)
    return dataclasses.replace(asked, sync=reason)


# --- what goes up -----------------------------------------------------------------------------------------------------


# "Accepted" is no promise: a server that is killed before the round is on disk has forgotten it. So a contribution
# stays with its worker until an agreement is held that includes it. One that was late counts in a round after the
# agreement its exchange ended with; it is *unconfirmed*, and goes along with the next exchange of its fragment as
# `earlier`:
#
#     offer the earlier again ──▶ accepted, still or again ──▶ offer the new one ──▶ … ──▶ an agreement with the earlier
#
# So at most one is kept beside the one under way, and no step is lost that was reported as counted.


@dataclass(eq=False)
class Sending:
    """`counted_in`: the version that the server said it counts in; 0 = not accepted, or not any more."""

    offer: Offer
    part_hashes: dict[int, str] = field(default_factory=dict)  # as far as it is encoded
    counted_in: int = 0
    refused: bool = False  # it will not count
    too_old: bool = False  # because of its age

    def ask_again(self) -> None:
        """Whether it counts is not known any more."""
        self.counted_in = 0

    def part_count(self, part_size_bytes: int) -> int:
        return Parts(self.offer.section_bytes or (self.offer.size_bytes,), part_size_bytes).count

    def proof(self, part_size_bytes: int) -> str | None:
        """The hash over all parts; None while some are not encoded yet."""
        count = self.part_count(part_size_bytes)
        if len(self.part_hashes) < count:
            return None
        return payload_hash([self.part_hashes[part] for part in range(count)])


class Outbox:
    """What one exchange has to send, in order: an earlier contribution that is not confirmed, and its own. Or, instead,
    the sequence that it `claims`: of a contribution that was accepted from an earlier start of this worker."""

    def __init__(self, earlier: Sending | None, own: Sending | None, claim: int | None = None) -> None:
        self.earlier, self.own, self.claim = earlier, own, claim
        self._all = [sending for sending in (earlier, own) if sending is not None]
        if earlier is not None:
            earlier.ask_again()

    @property
    def current(self) -> Sending | None:
        """The one that is still to be sent, or to be asked about; None = of each it is known whether it counts."""
        return next((sending for sending in self._all if not sending.counted_in and not sending.refused), None)

    def of(self, request: OfContribution) -> Sending:
        return next(sending for sending in self._all if sending.offer.sequence == request.sequence)

    def offer(self, incarnation: int) -> Offer:
        """Of the current one. The key stays for ever; only the incarnation that speaks for it may be another after a
        re-join."""
        current, follows = self.current, 0
        assert current is not None
        if self.earlier is not None and self.earlier.counted_in and current is self.own:
            follows = self.earlier.offer.sequence
        return replace(current.offer, incarnation=incarnation, follows=follows)

    def awaited(self, after: int, *, stays: bool) -> int:
        """Wait for an agreement newer than this one.

        Newer than what we hold (`after`): on time that is the agreement we are in. A late contribution counts in a
        later one; its worker takes the newest there is and continues, for its steps will come back to it. It is the
        `earlier` one of the next exchange, which waits for the agreement that holds it. `stays`: wait for our own."""
        for sending in self._all:
            if sending.counted_in and (stays or sending is self.earlier):
                after = max(after, sending.counted_in - 1)
        return after

    def forgotten(self, last_sequence: int, incarnation: int) -> bool:
        """The server said "accepted" and no longer knows: it was restarted. Then they are sent again. A server that
        knows us by another number than the one it accepted them under may have taken these sequences from another start
        of this worker; so it is asked again too."""
        lost = [
            s
            for s in self._all
            if s.counted_in and (s.offer.sequence > last_sequence or s.offer.incarnation != incarnation)
        ]
        for sending in lost:
            sending.ask_again()
        return bool(lost)

    def try_again(self) -> bool:
        """Ours was refused because of a round that is not there: that is about to be published, or the server was
        killed before, has forgotten it, and waits for our contribution while we wait for the round."""
        if self.own is None or not self.own.refused:
            return False
        for sending in self._all:
            sending.refused = sending.too_old = False
        return True

    def outcome(self, agreement: Agreement) -> Outcome:
        own = self.own
        return Outcome(
            agreement,
            counted=own.counted_in > 0 if own is not None else self.claim is not None,
            too_old=own is not None and own.too_old,
            counted_in=own.counted_in if own is not None else 0,
            earlier_lost=self.earlier is not None and self.earlier.refused,
        )


@dataclass(frozen=True)
class Share:
    """What one process of a group does of an exchange: its own `parts`; and, if it `speaks`, the commit. `tiled`: the
    sections are those of the worker's tiling."""

    sections: int
    parts: range
    speaks: bool
    tiled: bool = False


@dataclass(frozen=True)
class Outcome:
    """The newest agreement, its payload complete and checked; whether our contribution is counted, and in which version
    (a late one: in one still to come); and, if it is not, whether the server called it too old to ever count.
    `earlier_lost`: the earlier one does not count after all; the server forgot it, and would not have it again."""

    agreement: Agreement
    counted: bool
    too_old: bool = False
    counted_in: int = 0
    earlier_lost: bool = False


class Shipped(Protocol):
    """A contribution, as its sender keeps it. `sending` None: this process sends none of it."""

    @property
    def sending(self) -> Sending | None: ...


Kept = TypeVar("Kept", bound=Shipped)


def sent_along(late: Kept | None, offer: Offer) -> Kept | None:
    """The late contribution that goes along with this offer as `earlier`, if there is another than the offer's own."""
    is_another = late is not None and late.sending is not None and late.sending.offer.key != offer.key
    return late if is_another else None


def lost_late(late: Kept | None, own: Shipped, outcome: Outcome) -> Kept | None:
    """The late contribution, if it was said to count and does not after all. `own`: what this exchange was for, which
    may be the late one itself, asked about again."""
    if late is None or late.sending is None or own.sending is None:
        return None
    is_own = late.sending.offer.key == own.sending.offer.key
    return late if (not outcome.counted if is_own else outcome.earlier_lost) else None


def overtaken(sequences: Sequence[int], last_sequences: Sequence[int]) -> frozenset[int]:
    """The fragments of which the server has accepted later contributions than a saved state knows of. `sequences`: of
    the last one in each fragment of the state; `last_sequences`: of the last one that the server has."""
    pairs = zip(sequences, last_sequences, strict=True)
    return frozenset(fragment for fragment, (known, last) in enumerate(pairs) if last > known)


def is_forgotten(late_sequence: int, last_sequence: int) -> bool:
    """Does the server lack a contribution that was to count in a later round? It was killed before it had closed that
    one. `last_sequence`: of the last that the server has."""
    return last_sequence < late_sequence


def stays_late(counted_in: int, version: int) -> bool:
    """Does it count in a round after the agreement in hand? Then it is kept until an agreement holds it."""
    return counted_in > version


# --- what comes down --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """The anchor we hold: what leads from there to the newest agreement may be sent instead of all of it."""

    version: int
    hash: str


@dataclass(frozen=True, order=True)
class Piece:
    """Part `part` of payload number `payload` of an agreement."""

    payload: int
    part: int


@dataclass(frozen=True)
class Wanted:
    """The pieces of an agreement to fetch, in order. Whether the values in them are right is checked by who asked: a
    payload's hash is over all of its parts."""

    agreement: Agreement
    pieces: tuple[Piece, ...]


class Fetch:
    """One attempt at an agreement. The next attempt is another object, with memory of its own: late bytes of this one
    may still arrive."""

    def __init__(self, agreement: Agreement, pieces: Iterable[Piece]) -> None:
        self.agreement = agreement
        self.pieces = tuple(pieces)
        self._left = list(self.pieces)
        self._hashes: dict[Piece, str] = {}

    def next(self, fragment: int, session: Session) -> GetPart | None:
        if not self._left:
            return None
        piece = self._left.pop(0)
        payload = self.agreement.payloads[piece.payload]
        return GetPart(**session.head, fragment=fragment, version=payload.version, kind=payload.kind, part=piece.part)

    def piece(self, request: GetPart) -> Piece:
        """What was asked for. (The payloads of a chain have different versions.)"""
        versions = [payload.version for payload in self.agreement.payloads]
        return Piece(versions.index(request.version), request.part)

    def again(self, request: GetPart) -> None:
        """It did not come, or not as it was sent."""
        self._left.insert(0, self.piece(request))

    def carried(self, part_hashes: Sequence[str]) -> bool:
        """All of it came with the announcement, a part for each payload. True: and as it is announced."""
        if [piece.part for piece in self.pieces] != [0] * len(part_hashes):
            return False
        self._left, self._hashes = [], dict(zip(self.pieces, part_hashes, strict=True))
        return self.is_as_announced

    def arrived(self, request: GetPart, part_hash: str) -> bool:
        """True: that was the last one."""
        self._hashes[self.piece(request)] = part_hash
        return len(self._hashes) == len(self.pieces)

    @property
    def is_as_announced(self) -> bool:
        """The parts make the payloads that the agreement names."""
        return all(
            payload_hash([self._hashes[piece] for piece in sorted(self._hashes) if piece.payload == i]) == payload.hash
            for i, payload in enumerate(self.agreement.payloads)
        )


# --- one request after another ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """One request to send. The driver attaches the bytes: the part to a PutPart, the first one to a CompleteOffer; a
    place to put it to a GetPart, and one for what a Poll takes along."""

    id: int
    request: Request


class Step(Enum):
    JOIN = "join"
    OFFER = "offer"
    SEND = "send"
    COMMIT = "commit"
    POLL = "poll"
    FETCH = "fetch"


class Exchange:
    def __init__(
        self,
        session: Session,
        *,
        fragment: int,
        after: int,
        now: float,
        offer: Offer | None = None,
        part_hashes: tuple[str, ...] = (),
        earlier: Sending | None = None,
        share: Share | None = None,
        fetch: Wanted | None = None,
        held: Held | None = None,
        claim: int | None = None,
        patience: Patience = Patience(),  # noqa: B008 - frozen
        rng: random.Random | None = None,
    ) -> None:
        """`after`: the version we hold; without an offer, anything newer is fetched. `offer` carries the facts of the
        contribution (its incarnation is replaced by the session's); its parts are sent as far as their hashes are
        known, all of them or one by one with `part_ready`. `earlier`: one of this fragment that no agreement we hold
        includes; it is confirmed, or lost, when this exchange is over. With a `share` it ends at the agreement; with
        `fetch` it begins there. `held` tells the server what we have, if we do. `claim`, instead of an offer: the
        sequence of a contribution that the server has accepted from an earlier start of this worker."""
        self._session = session
        self._fragment = fragment
        self._newer_than = self._after = after
        own = Sending(offer, dict(enumerate(part_hashes))) if offer is not None else None
        self.outbox = Outbox(earlier, own, claim)
        self._share = share
        self._speaks = share is None or share.speaks
        self._wanted_pieces = fetch
        self._held = held
        self._patience = patience
        self._rng = rng or random.Random()
        self._stays = patience.stay_for_own_round
        self.outcome: Outcome | None = None
        self.failure: OuterstepError | None = None
        self.agreement: Agreement | None = fetch.agreement if fetch else None  # the one being fetched
        self.retries = 0
        self.rejoins = 0
        self.waiting_for = ""  # what the server said the round waits for
        self.wanted: frozenset[tuple[int, int]] = frozenset()  # (fragment, version) of other rounds that wait for us
        self.fetch: Fetch | None = None  # the one under way, or the last
        self._to_send: list[int] = []  # parts
        self.parts = 0  # that this step began with
        self._in_flight: dict[int, Call] = {}
        self._next_id = 0
        self._failures = 0
        self._damaged = 0
        self._asked = 0  # times that only the others' parts were missing
        self._asks_first = share is not None  # no contribution goes with its offer (any more)
        self.wake_at = now  # nothing is worth sending before this moment
        self._last_answer_at = now
        self._stuck_since: float | None = None
        self.step = Step.JOIN
        if session.answer is not None:
            self._go_on()

    def _go_on(self) -> None:
        """To what is next of our contributions; when the server has said of each whether it counts, to the agreement.
        Only where a quorum closes rounds may a contribution be late: everywhere else its worker waits for the round it
        is in, also if a layer above has moved the model meanwhile. So does a worker that leaves."""
        if self._wanted_pieces is not None:
            self._begin_fetch(Fetch(self._wanted_pieces.agreement, self._wanted_pieces.pieces))
        elif self.outbox.current is not None:
            self._go(Step.OFFER)
        else:
            stays = self._stays or self._session.joined.plan.mode != "quorum"
            self._after = self.outbox.awaited(self._newer_than, stays=stays)
            self._go(Step.POLL)

    def _begin_fetch(self, fetch: Fetch) -> None:
        self._go(Step.FETCH)
        self.fetch, self.parts = fetch, len(fetch.pieces)
        if not fetch.pieces:
            self.outcome = self.outbox.outcome(fetch.agreement)  # it is what we hold

    def part_ready(self, part: int, part_hash: str) -> None:
        """This part of the contribution is encoded, and may be sent."""
        assert self.outbox.own is not None
        self.outbox.own.part_hashes[part] = part_hash

    @property
    def done(self) -> bool:
        return self.outcome is not None or self.failure is not None

    def silent_s(self, now: float) -> float:
        """For how long an answer is overdue. (A poll and an offer may take the time they were given.)"""
        allowed_s = self._patience.poll_wait_s if self.step in (Step.POLL, Step.OFFER) else 0.0
        return max(now - self._last_answer_at - allowed_s, 0.0)

    # --- what to send ---------------------------------------------------------------------------------------------

    @property
    def connections(self) -> int | None:
        """That parts may use at a time; None = as the link needs."""
        return self._patience.calls_in_flight

    def calls(self, now: float, at_a_time: int | None = None) -> list[Call]:
        """What to send now. Empty: wait for an answer, or until `wake_at`. `at_a_time`: parts, as the driver knows its
        link."""
        if self.done or now < self.wake_at:
            return []
        made: list[Call] = []
        room = at_a_time or self.connections or FEWEST if self.step in (Step.SEND, Step.FETCH) else 1
        while len(self._in_flight) < room:
            request = self._next_request()
            if request is None:
                break
            call = Call(self._next_id, request)
            self._next_id += 1
            self._in_flight[call.id] = call
            made.append(call)
        return made

    def _next_request(self) -> Request | None:
        sending = self.outbox.current
        match self.step:
            case Step.JOIN:
                return self._session.join_request
            case Step.OFFER:
                assert sending is not None
                return self._offer(sending)
            case Step.SEND:
                assert sending is not None
                hashes, sequence = sending.part_hashes, sending.offer.sequence
                part = next((part for part in self._to_send if part in hashes), None)
                if part is None:
                    return None
                self._to_send.remove(part)
                return PutPart(
                    **self._session.head, fragment=self._fragment, sequence=sequence, part=part, hash=hashes[part]
                )
            case Step.COMMIT:
                assert sending is not None
                proof, sequence = sending.proof(self._session.joined.plan.part_size_bytes), sending.offer.sequence
                if proof is None:
                    return None
                return Commit(**self._session.head, fragment=self._fragment, sequence=sequence, payload_hash=proof)
            case Step.POLL:
                return Poll(
                    **self._session.head,
                    fragment=self._fragment,
                    after=self._after,
                    held=self._held.version if self._held else 0,
                    held_hash=self._held.hash if self._held else None,
                    wait_s=self._patience.poll_wait_s if self._speaks else 0.0,
                    sections=self._share.sections if self._share else 1,
                    plan_revision=self._session.joined.plan.revision,
                    takes_bytes=MOST_CARRIED_BYTES if self._share is None and not self._damaged else UNSET,
                    trees=True,
                    tiled=True if self._share is not None and self._share.tiled else UNSET,
                )
            case Step.FETCH:
                return self.fetch.next(self._fragment, self._session) if self.fetch else None

    def _offer(self, sending: Sending) -> Offer | None:
        """With the contribution, if it is small; None while that is not encoded yet. An earlier one is asked about
        first: the server has it, unless it was restarted."""
        offer = self.outbox.offer(self._session.joined.incarnation)
        if offer.data is not UNSET:
            return self._held_open(offer)  # its facts are lists, and fit into no line of a request that has bytes
        is_small = offer.size_bytes <= min(MOST_CARRIED_BYTES, self._session.joined.plan.part_size_bytes)
        if self._asks_first or not is_small or sending is self.outbox.earlier:
            return self._held_open(offer)
        part_hash = sending.part_hashes.get(0)
        return None if part_hash is None else CompleteOffer(**asdict(offer), hash=part_hash)

    def _held_open(self, offer: Offer) -> Offer:
        """Where there is no room, its answer waits for our turn."""
        return replace(offer, wait_s=self._patience.poll_wait_s)

    # --- what came back -------------------------------------------------------------------------------------------

    def answered(
        self,
        call: Call,
        answer: Answer,
        now: float,
        *,
        received_hash: str | None = None,
        carried_hashes: Sequence[str] = (),
    ) -> None:
        """`received_hash`: of the bytes that came with a GetPart, computed by the driver; `carried_hashes`: of each
        payload that came with the answer to a Poll."""
        if self._in_flight.pop(call.id, None) is None or self.done:
            return  # an answer to a question of an earlier step
        self._last_answer_at = now
        self._failures = 0
        match call.request, answer:
            case Join(), JoinAnswer():
                self._session.answer = answer
                self._go_on()
            case Offer(), OfferAnswer():
                self._offered(self.outbox.of(call.request), answer, now)
            case PutPart(), PutPartAnswer():
                if not self._to_send and not self._in_flight:
                    self._go(Step.COMMIT if self._share is None else Step.OFFER)
            case Commit(), CommitAnswer():
                self._accepted(self.outbox.of(call.request), answer.version)
            case Poll(), PollAnswer():
                self._polled(answer, now, carried_hashes)
            case GetPart(), GetPartAnswer():
                self._got_part(call.request, answer, received_hash)
            case _:
                self._fail(TransportError(f"{type(call.request).__name__} was answered by {type(answer).__name__}"))

    def failed(self, call: Call, error: OuterstepError, now: float) -> None:
        """The call got no answer (TransportError) or a "no" (Refused)."""
        if self._in_flight.pop(call.id, None) is None or self.done:
            return
        request = call.request
        if isinstance(request, CompleteOffer):
            self._asks_first = True
        if isinstance(error, Refused) and not isinstance(error, ServerError):
            self._last_answer_at = now
        match error:
            case UnknownWorker():
                self.rejoins += 1
                self._go(Step.JOIN)
                self._back_off(now)
            case Fenced() if not isinstance(request, Join):
                # By a newer start; or by ourselves, if another exchange of ours has joined again. The server knows.
                self._go(Step.JOIN)
            case StaleRound() | TooOld() | FutureRound() | OtherCodec() if isinstance(request, OfContribution):
                self._will_not_count(self.outbox.of(request), error)
            case Conflict() | Superseded() if isinstance(request, Offer | Commit) and self._is_renamed(
                self.outbox.of(request)
            ):
                self._will_not_count(self.outbox.of(request), error)
            case MissingParts():
                if self.outbox.earlier is not None:
                    self.outbox.earlier.ask_again()  # if the server was restarted, that is missing too
                self._go(Step.OFFER)
                self._back_off(now)
            case Superseded() if isinstance(request, GetPart) and self._wanted_pieces is None:
                self.retries += 1
                self._go(Step.POLL)
            case Superseded() if isinstance(request, OfContribution) and self.outbox.of(request) is self.outbox.earlier:
                # The next one was accepted after it. Which round it is in is not known, but none after that one's.
                self._stays = True
                self._accepted(self.outbox.of(request), 1)
            case Superseded() if isinstance(request, OfContribution):
                # Somebody else has spoken for this worker. Its steps go with its next contribution, which continues
                # from the sequence that a join names; meanwhile, whatever is newest will do.
                self.outbox.of(request).refused, self._newer_than = True, -1
                self._go(Step.JOIN)
            case HashMismatch() if isinstance(request, PutPart | CompleteOffer):
                self._part_damaged(request)
            case ProtocolMismatch() if isinstance(request, CompleteOffer):
                pass  # the server knows plain offers only: that is the next call
            case ServerFailed():
                self._fail(error)
            case Busy() | TransportError() | ServerError():
                self._again(request, error, now)
            case _:
                self._fail(error)

    def _offered(self, sending: Sending, answer: OfferAnswer, now: float) -> None:
        if answer.state == "accepted" and self._speaks and self._is_renamed(sending):
            self._go(Step.COMMIT)  # it compares what we have with what it has
        elif answer.state == "accepted":
            self._accepted(sending, answer.version)
        elif answer.state == "wait":
            self._asks_first = True
            self.wake_at = now + jittered_s(answer.retry_after_s, self._rng)
        elif any(part >= sending.part_count(self._session.joined.plan.part_size_bytes) for part in answer.missing):
            self._fail(TransportError(f"the server misses parts that do not exist: {answer.missing[-1]}"))
        elif ours := [part for part in answer.missing if self._share is None or part in self._share.parts]:
            self._go(Step.SEND)
            self._to_send, self.parts = ours, len(ours)
        elif answer.missing or not self._speaks:
            self.waiting_for = "the other processes of this group to send their rows"
            self.wake_at = now + ASKING.pause_s(self._asked, self._rng)
            self._asked = min(self._asked + 1, 16)
        else:
            self._go(Step.COMMIT)

    def _is_renamed(self, sending: Sending) -> bool:
        """The server knows this start of the worker by another number than when the contribution was begun: it was
        resumed from an older state, and may have taken this sequence from another start meanwhile."""
        return sending.offer.incarnation != self._session.joined.incarnation

    def _accepted(self, sending: Sending, version: int) -> None:
        """By a server that knows us by this number."""
        sending.counted_in = version
        sending.offer = replace(sending.offer, incarnation=self._session.joined.incarnation)
        self._go_on()

    def _will_not_count(self, sending: Sending, error: Refused) -> None:
        """The round closed without it. Fetch what it agreed on; the worker rebases or discards. Or the server was
        resumed from a state older than what we hold: everybody continues from what it has, also with its codec."""
        sending.refused, sending.too_old = True, isinstance(error, TooOld)
        if isinstance(error, FutureRound | OtherCodec):
            self._newer_than = -1
        self._go_on()

    def _polled(self, answer: PollAnswer, now: float, carried_hashes: Sequence[str]) -> None:
        if self.outbox.forgotten(answer.last_sequence, self._session.joined.incarnation):
            self._go_on()
        elif self.outbox.claim is not None and answer.last_sequence < self.outbox.claim:
            # What we claim is forgotten too, and we cannot send it again: whatever is newest will do.
            self.outbox.claim, self._newer_than = None, -1
            self._go_on()
        elif answer.agreement is None:
            self._check_stuck(answer, now)
            self.wanted = frozenset(answer.wanted)
            self.waiting_for = answer.waiting_for
            pause_s = answer.retry_after_s if self._speaks else self._patience.poll_wait_s
            self.wake_at = now + jittered_s(pause_s, self._rng)
            if self.outbox.try_again():
                self._go_on()
        else:
            self.agreement = answer.agreement
            if answer.plan is not None:
                self._session.answer = replace(self._session.joined, plan=answer.plan)
            if self._share is not None:
                self.outcome = self.outbox.outcome(self.agreement)
                return
            size = self._session.joined.plan.part_size_bytes
            counts = [part_count(payload.size_bytes, size) for payload in self.agreement.payloads]
            pieces = [Piece(i, part) for i, count in enumerate(counts) for part in range(count)]
            fetch = Fetch(self.agreement, pieces)
            if carried_hashes and fetch.carried(carried_hashes):
                self.fetch, self.outcome = fetch, self.outbox.outcome(fetch.agreement)
                return
            self._begin_fetch(Fetch(self.agreement, pieces))
            if carried_hashes:  # what came along is not what was announced: fetch it
                self._damaged += 1
                self._check_damage()

    def _check_stuck(self, answer: PollAnswer, now: float) -> None:
        if not answer.stuck:
            self._stuck_since = None
        elif self._stuck_since is None:
            self._stuck_since = now
        limit_s = self._patience.stuck_after_s
        if self._stuck_since is not None and limit_s is not None and now - self._stuck_since >= limit_s:
            self._fail(RoundStuck(f"the round cannot close: it waits for {answer.waiting_for}"))

    def _got_part(self, request: GetPart, answer: GetPartAnswer, received_hash: str | None) -> None:
        fetch = self.fetch
        assert fetch is not None
        if received_hash != answer.hash:
            self._part_damaged(request)
            return
        if not fetch.arrived(request, answer.hash):
            return
        if self._wanted_pieces is None and not fetch.is_as_announced:
            self._damaged += 1
            self._check_damage()
            self._go(Step.POLL)
            return
        self.outcome = self.outbox.outcome(fetch.agreement)

    # --- trouble --------------------------------------------------------------------------------------------------

    def _part_damaged(self, request: PutPart | CompleteOffer | GetPart) -> None:
        """A byte changed on its way: only that part travels again."""
        self._damaged += 1
        self._put_back(request)
        self._check_damage()

    def _put_back(self, request: Request) -> None:
        if isinstance(request, PutPart):
            self._to_send.insert(0, request.part)
        elif isinstance(request, GetPart) and self.fetch is not None:
            self.fetch.again(request)

    def _check_damage(self) -> None:
        if self._damaged > self._patience.damaged_parts:
            self._fail(
                HashMismatch(f"{self._damaged} parts arrived changed", hint="something on the path rewrites data")
            )

    def _again(self, request: Request, error: OuterstepError, now: float) -> None:
        self._put_back(request)
        if isinstance(error, Busy):
            self.wake_at = now + jittered_s(max(error.retry_after_s, LEAST_BUSY_S), self._rng, least=1.0)
            return
        silent_s = now - self._last_answer_at
        if silent_s > self._patience.give_up_after_s:
            self._fail(
                ServerUnreachable(
                    f"no answer from the server for {silent_s:.0f} s (the limit is "
                    f"{self._patience.give_up_after_s:g} s); last error: {error}"
                )
            )
            return
        self._back_off(now)

    def _back_off(self, now: float) -> None:
        self._failures += 1
        self.retries += 1
        self.wake_at = now + self._patience.backoff_s(self._failures, self._rng)

    def _fail(self, error: OuterstepError) -> None:
        self.failure = error
        self._in_flight.clear()

    def _go(self, step: Step) -> None:
        """Answers still on their way belong to the step that is left, and will be ignored."""
        self.step = step
        self._in_flight.clear()
        self._to_send = []
