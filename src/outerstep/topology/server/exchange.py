"""One exchange with the server. The machine (coordination/worker/exchange.py) says what to send, threads send it, and
the answers go back to the machine. The training thread watches it and asks for its result."""

from __future__ import annotations

import logging
import queue
import threading
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

from ...coordination.worker.exchange import Call, Exchange, Fetch, Held, Outcome, Sending, Step
from ...digest import part_hash, part_range
from ...errors import (
    Absurd,
    ExchangeFailed,
    NotFinite,
    OuterstepError,
    Quarantined,
    ServerError,
    TransportError,
    WorkerError,
)
from ...threads import process_helpers
from ...types import Answer, CompleteOffer, GetPart, Offer, Poll, PollAnswer, PutPart, Request
from ..payload import Memory, OutgoingFrame, PartReady
from ..protocol import Agreed, Sight
from .link import ServerLink
from .saved import pack

log = logging.getLogger(__name__)

TICK_S = 0.25
QUIET_RETRIES = 2  # a lost packet is not news
USELESS = (NotFinite, Absurd, Quarantined)
"""What the server says to a contribution that it will never take. To send it again changes nothing; to continue from
other weights does."""


class Home(Protocol):
    """The topology: it knows which anchors are held, and what earlier contributions still owe."""

    def settle(self, ticket: ServerTicket, *, reload: bool) -> Agreed: ...

    def adopted(self, agreed: Agreed, intact: bool) -> Agreed | None: ...


@dataclass(frozen=True)
class Delivery:
    """The result of one call: an answer (and the hash of the bytes with it) or an error."""

    call: Call
    answer: Answer | None
    received_hash: str | None
    error: OuterstepError | None
    carried: tuple[memoryview, ...] = ()  # the payloads of an agreement that came with it
    carried_hashes: tuple[str, ...] = ()


class ServerTicket:
    """Carried by a helper of its own. `offer` and `payload`: the contribution, if there is one; `earlier`: the bytes of
    the one before it, which may have to be sent again; `claim`: the sequence of one that an earlier start of this
    worker made; `held`: the anchor that the server was told of. `again`: the same exchange from the beginning, with
    this stuck_after_s. `over`: it has an outcome or a failure, or was cancelled."""

    def __init__(
        self,
        home: Home,
        link: ServerLink,
        memory: Memory,
        exchange: Exchange,
        fragment: int,
        *,
        again: Callable[[float | None], ServerTicket],
        held: Held | None = None,
        offer: Offer | None = None,
        claim: int | None = None,
        payload: OutgoingFrame | None = None,
        earlier: OutgoingFrame | None = None,
    ) -> None:
        self.fragment, self.exchange = fragment, exchange
        self.held, self.offer, self.claim, self.payload = held, offer, claim, payload
        self.bytes_sent = self.bytes_received = 0
        self._home, self._link, self._memory, self._again = home, link, memory, again
        self.confirm = home.adopted
        self._earlier = earlier
        self._pinned = payload is not None and payload.data.is_pinned()
        self._fetch: Fetch | None = None
        self._part_size_bytes = 0  # of what is fetched
        self._received: list[memoryview] = []
        self._deliveries: queue.SimpleQueue[Delivery | PartReady | BaseException | None] = queue.SimpleQueue()
        self._cancelled = False
        self.over = threading.Event()
        self._crash: BaseException | None = None
        if payload is not None:
            payload.listen(self._deliveries.put)
        process_helpers().run(self._carry, name=f"outerstep-exchange-{fragment}")

    # --- for the training thread ----------------------------------------------------------------------------------

    def look(self, timeout_s: float) -> Sight:
        done, exchange = self.over.wait(timeout_s), self.exchange
        outcome, crashed = exchange.outcome, self._crash is not None
        return Sight(
            done,
            exchange.wanted,
            exchange.waiting_for,
            exchange.silent_s(time.monotonic()),
            missed=outcome is not None and not outcome.counted,
            failed=done and (crashed or (outcome is None and not isinstance(exchange.failure, USELESS))),
        )

    def finish(self, *, reload: bool = False) -> Agreed:
        self.join()
        return self._home.settle(self, reload=reload)

    def resume(self, *, stuck_after_s: float | None = None) -> ServerTicket:
        self.cancel()
        return self._again(stuck_after_s)

    def pack(self) -> dict[str, Any]:
        if self.offer is None and self.claim is not None:  # its bytes are with the server
            return {"sequence": self.claim}
        assert self.offer is not None, "only a contribution can be carried on elsewhere"
        assert self.payload is not None
        return pack(self.offer, self.payload)

    def cancel(self) -> None:
        self._cancelled = True
        self._deliveries.put(None)

    # --- its result -----------------------------------------------------------------------------------------------

    def join(self) -> None:
        while not self.over.wait(1.0):  # in slices, so that Ctrl-C gets through
            pass

    def outcome(self) -> Outcome:
        """The outcome of an exchange that is over. An error from a background thread is raised here, with its cause."""
        failure = self._crash or self.exchange.failure
        if isinstance(failure, WorkerError):
            raise failure
        if failure is not None:
            raise ExchangeFailed(f"the exchange of fragment {self.fragment} failed: {failure}") from failure
        if self.exchange.outcome is None:
            raise ExchangeFailed(f"the exchange of fragment {self.fragment} was cancelled")
        return self.exchange.outcome

    @property
    def sending(self) -> Sending | None:
        """The contribution, with what the server has said about it so far."""
        return self.exchange.outbox.own

    @property
    def frames(self) -> list[memoryview]:
        """What was downloaded: per payload of the agreement, the fetched parts one after the other."""
        return self._received if self._fetch is self.exchange.fetch else []

    def place(self, payload: int, offset: int) -> int:
        """Where byte number `offset` of a payload is in `frames[payload]`; its part must be among those fetched."""
        assert self._fetch is not None
        part, within = divmod(offset, self._part_size_bytes)
        parts = [piece.part for piece in self._fetch.pieces if piece.payload == payload]
        return bisect_left(parts, part) * self._part_size_bytes + within

    # --- carrying it: a helper, and one per call ------------------------------------------------------------------

    def _carry(self) -> None:
        """Run until the exchange has an outcome or a failure, or is cancelled."""
        exchange = self.exchange
        try:
            while not exchange.done and not self._cancelled:
                room = None
                if exchange.step in (Step.SEND, Step.FETCH):  # parts travel in these alone
                    up, wanted = exchange.step is Step.SEND, exchange.connections
                    room = self._link.parts_at_a_time(up=up, parts=exchange.parts, connections=wanted)
                for call in exchange.calls(time.monotonic(), room):
                    buffer, source = self._buffer(call.request)
                    process_helpers().run(self._perform, call, buffer, source)
                until_s = max(exchange.wake_at - time.monotonic(), 0.0)
                try:
                    delivery = self._deliveries.get(timeout=min(until_s, TICK_S) if until_s else TICK_S)
                except queue.Empty:
                    continue
                match delivery:
                    case Delivery(call, answer, received_hash, None) if answer is not None:
                        exchange.answered(
                            call,
                            answer,
                            time.monotonic(),
                            received_hash=received_hash,
                            carried_hashes=delivery.carried_hashes,
                        )
                        if delivery.carried and exchange.outcome is not None:
                            self._keep(delivery.carried)
                    case Delivery(call, _, _, error) if error is not None:
                        self._failed(call, error)
                    case PartReady(part, its_hash):
                        exchange.part_ready(part, its_hash)
                    case BaseException():
                        raise delivery
        except BaseException as error:  # noqa: BLE001 - it surfaces in outcome(), in the training thread
            self._crash = error
        finally:
            self.over.set()

    def _failed(self, call: Call, error: OuterstepError) -> None:
        now = time.monotonic()
        self.exchange.failed(call, error, now)
        if isinstance(error, TransportError | ServerError) and self.exchange.retries > QUIET_RETRIES:
            log.warning("%s; trying again in %.1f s", error, max(self.exchange.wake_at - now, 0.0))

    def _buffer(self, request: Request) -> tuple[memoryview | None, OutgoingFrame | None]:
        """The bytes to send, and the frame they are from; or memory for the bytes to come."""
        if isinstance(request, PutPart | CompleteOffer):
            earlier = self.exchange.outbox.earlier
            is_earlier = earlier is not None and earlier.offer.sequence == request.sequence
            source = self._earlier if is_earlier else self.payload
            assert source is not None
            return source.read(request.part if isinstance(request, PutPart) else 0), source
        if isinstance(request, Poll):
            return self._memory.take(request.takes_bytes) if request.takes_bytes else None, None
        if isinstance(request, GetPart):
            fetch = self.exchange.fetch
            assert fetch is not None
            if fetch is not self._fetch:
                self._begin_fetch(fetch)
            piece = fetch.piece(request)
            size_bytes = fetch.agreement.payloads[piece.payload].size_bytes
            begin, end = part_range(piece.part, size_bytes, self._part_size_bytes)
            offset = self.place(piece.payload, begin)
            return self._received[piece.payload][offset : offset + end - begin], None
        return None, None

    def _keep(self, carried: tuple[memoryview, ...]) -> None:
        """Keep an agreement that came whole with the answer to a poll, and was checked."""
        assert self.exchange.fetch is not None
        self._begin_fetch(self.exchange.fetch)
        for place, data in zip(self._received, carried, strict=True):
            place[:] = data
            self.bytes_received += len(data)

    def _begin_fetch(self, fetch: Fetch) -> None:
        """Take a fresh buffer per payload and attempt: this one must not get late bytes of an abandoned attempt."""
        agreement, forms = fetch.agreement, self._link.forms
        size = self._part_size_bytes = self._link.session.joined.plan.part_size_bytes
        limit = forms[self.fragment].full.size_bytes if forms else None  # not known before we have joined
        announced = sum(payload.size_bytes for payload in agreement.payloads)
        if limit is not None and announced > limit:
            raise TransportError(f"the server announces {announced} bytes, at most {limit} make sense")
        versions = [payload.version for payload in agreement.payloads]
        if sorted(set(versions)) != versions:
            raise TransportError(f"the server announces payloads of versions {versions}; in a chain they ascend")
        sizes = [0] * len(agreement.payloads)
        for piece in fetch.pieces:
            begin, end = part_range(piece.part, agreement.payloads[piece.payload].size_bytes, size)
            sizes[piece.payload] += end - begin
        self._received, self._fetch = [self._memory.take(size, pinned=self._pinned) for size in sizes], fetch

    def _perform(self, call: Call, buffer: memoryview | None, source: OutgoingFrame | None) -> None:
        answer: Answer | None = None
        received_hash: str | None = None
        error: OuterstepError | None = None
        carried: tuple[memoryview, ...] = ()
        carried_hashes: tuple[str, ...] = ()
        try:
            if isinstance(call.request, Poll) and buffer is not None:
                answer = self._link.call(call.request, into=buffer)
                carried = _carried(answer, buffer)
                carried_hashes = tuple(map(part_hash, carried))
            elif isinstance(call.request, GetPart) and buffer is not None:
                answer = self._link.call(call.request, into=buffer)
                received_hash = part_hash(buffer)
                self.bytes_received += len(buffer)
            else:
                answer = self._link.call(call.request, body=buffer)
                self.bytes_sent += len(buffer) if buffer is not None else 0
        except OuterstepError as expected:
            error = expected
        except Exception as unexpected:  # a bug in this thread must not leave the exchange waiting for ever
            log.exception("%s failed", type(call.request).__name__)
            error = OuterstepError(f"{type(call.request).__name__}: {type(unexpected).__name__}: {unexpected}")
        if source is not None:
            source.done_reading()
        self._deliveries.put(Delivery(call, answer, received_hash, error, carried, carried_hashes))


def _carried(answer: Answer, buffer: memoryview) -> tuple[memoryview, ...]:
    """The payloads that came with the answer to a poll, one after the other."""
    assert isinstance(answer, PollAnswer)
    if not answer.carried_bytes:
        return ()
    sizes = [payload.size_bytes for payload in answer.agreement.payloads] if answer.agreement is not None else []
    if sum(sizes) != answer.carried_bytes:
        raise TransportError(f"the server carries {answer.carried_bytes} bytes of payloads of {sizes} bytes")
    ends = list(accumulate(sizes))
    return tuple(buffer[end - size : end] for end, size in zip(ends, sizes, strict=True))
