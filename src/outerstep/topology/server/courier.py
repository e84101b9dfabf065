"""Carries one exchange: the machine says what to send, threads send it, the answers go back to the machine."""

from __future__ import annotations

import logging
import queue
import threading
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

from ...coordination.worker.exchange import Call, Exchange
from ...coordination.worker.fetch import Fetch
from ...digest import part_hash, part_range
from ...errors import OuterstepError, ServerError, TransportError
from ...types import Answer, GetPart, PutPart
from ...wire.transport import Transport
from ..memory import Memory
from ..payload import Payload

log = logging.getLogger(__name__)

TICK_S = 0.25
QUIET_RETRIES = 2  # a lost packet is not news


@dataclass(frozen=True)
class Delivery:
    """What came back for one call: an answer (and the hash of the bytes with it) or an error."""

    call: Call
    answer: Answer | None
    received_hash: str | None
    error: OuterstepError | None


@dataclass(frozen=True)
class Ready:
    """A part of the contribution is written."""

    part: int
    hash: str


class Courier:
    """One per exchange. `payload` is what to upload, as far as it is written, and `earlier` that of the contribution
    before, which may have to be sent again; `frames` is what was downloaded, when it is done: per payload of the
    agreement, the fetched parts one after the other."""

    def __init__(
        self,
        transport: Transport,
        exchange: Exchange,
        *,
        part_size_bytes: Callable[[], int],
        memory: Memory,
        payload: Payload | None = None,
        earlier: Payload | None = None,
        pinned: bool = False,
        max_download_bytes: Callable[[], int | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._transport = transport
        self.exchange = exchange
        self.payload = payload
        self._earlier = earlier
        self._memory = memory
        self._pinned = pinned
        self._part_size_bytes = part_size_bytes
        self._max_download_bytes = max_download_bytes
        self._clock = clock
        self._deliveries: queue.SimpleQueue[Delivery | Ready | BaseException | None] = queue.SimpleQueue()
        self._fetch: Fetch | None = None
        self._received: list[memoryview] = []
        self.bytes_sent = 0
        self.bytes_received = 0
        self._cancelled = False
        if payload is not None:
            payload.listen(self)

    def part_ready(self, part: int, part_hash: str) -> None:
        """From whichever thread encodes."""
        self._deliveries.put(Ready(part, part_hash))

    def broken(self, error: BaseException) -> None:
        self._deliveries.put(error)

    @property
    def frames(self) -> list[memoryview]:
        return self._received if self._fetch is self.exchange.fetch else []

    def let_go(self) -> None:
        """The contribution will not be sent any more."""
        if self.payload is not None:
            self.payload.release()

    def cancel(self) -> None:
        self._cancelled = True
        self._deliveries.put(None)

    def run(self) -> None:
        """Until the exchange has an outcome or a failure, or is cancelled."""
        exchange = self.exchange
        while not exchange.done and not self._cancelled:
            for call in exchange.calls(self._clock()):
                # A daemon thread per call: nothing of it keeps the user's process alive, and parts are large.
                threading.Thread(target=self._perform, args=(call, self._buffer(call)), daemon=True).start()
            until_s = max(exchange.wake_at - self._clock(), 0.0)
            try:
                delivery = self._deliveries.get(timeout=min(until_s, TICK_S) if until_s else TICK_S)
            except queue.Empty:
                continue
            match delivery:
                case Delivery():
                    self._hand_over(delivery)
                case Ready():
                    exchange.part_ready(delivery.part, delivery.hash)
                case BaseException():
                    raise delivery

    def _hand_over(self, delivery: Delivery) -> None:
        now = self._clock()
        if delivery.error is not None:
            self.exchange.failed(delivery.call, delivery.error, now)
            if isinstance(delivery.error, TransportError | ServerError) and self.exchange.retries > QUIET_RETRIES:
                wait_s = max(self.exchange.wake_at - now, 0.0)
                log.warning("%s; trying again in %.1f s", delivery.error, wait_s)
        elif delivery.answer is not None:
            self.exchange.answered(delivery.call, delivery.answer, now, received_hash=delivery.received_hash)

    def _buffer(self, call: Call) -> memoryview | None:
        """The bytes to send, or the place for those to come."""
        request, size = call.request, self._part_size_bytes
        if isinstance(request, PutPart):
            return self._source(request).read(request.part)
        if isinstance(request, GetPart):
            fetch = self.exchange.fetch
            assert fetch is not None
            if fetch is not self._fetch:
                self._fetch = fetch
                self._received = self._new_buffers(fetch)
            piece = fetch.piece(request)
            begin, end = part_range(piece.part, fetch.agreement.payloads[piece.payload].size_bytes, size())
            offset = self.place(piece.payload, begin)
            return self._received[piece.payload][offset : offset + end - begin]
        return None

    def _source(self, request: PutPart) -> Payload:
        earlier = self.exchange.outbox.earlier
        is_earlier = earlier is not None and earlier.offer.sequence == request.sequence
        payload = self._earlier if is_earlier else self.payload
        assert payload is not None
        return payload

    def _new_buffers(self, fetch: Fetch) -> list[memoryview]:
        """A fresh one per payload and attempt: late bytes of an abandoned attempt must not land in this one."""
        agreement, limit = fetch.agreement, self._max_download_bytes()
        if limit is not None and agreement.size_bytes > limit:
            raise TransportError(f"the server announces {agreement.size_bytes} bytes, at most {limit} make sense")
        versions = [payload.version for payload in agreement.payloads]
        if sorted(set(versions)) != versions:
            raise TransportError(f"the server announces payloads of versions {versions}; in a chain they ascend")
        sizes = [0] * len(agreement.payloads)
        for piece in fetch.pieces:
            begin, end = part_range(piece.part, agreement.payloads[piece.payload].size_bytes, self._part_size_bytes())
            sizes[piece.payload] += end - begin
        return [self._memory.take(size, pinned=self._pinned) for size in sizes]

    def place(self, payload: int, offset: int) -> int:
        """Where in `frames[payload]` its byte number `offset` is; its part must be one of those fetched."""
        assert self._fetch is not None
        part, within = divmod(offset, self._part_size_bytes())
        parts = [piece.part for piece in self._fetch.pieces if piece.payload == payload]
        return bisect_left(parts, part) * self._part_size_bytes() + within

    def _perform(self, call: Call, buffer: memoryview | None) -> None:
        answer: Answer | None = None
        received_hash: str | None = None
        error: OuterstepError | None = None
        try:
            if isinstance(call.request, GetPart) and buffer is not None:
                answer = self._transport.call(call.request, into=buffer)
                received_hash = part_hash(buffer)
                self.bytes_received += len(buffer)
            else:
                answer = self._transport.call(call.request, body=buffer)
                self.bytes_sent += len(buffer) if buffer is not None else 0
        except OuterstepError as expected:
            error = expected
        except Exception as unexpected:  # a bug in this thread must not leave the exchange waiting for ever
            log.exception("%s failed", type(call.request).__name__)
            error = OuterstepError(f"{type(call.request).__name__}: {type(unexpected).__name__}: {unexpected}")
        if isinstance(call.request, PutPart):
            self._source(call.request).done_reading()
        self._deliveries.put(Delivery(call, answer, received_hash, error))
