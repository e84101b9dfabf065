"""How a simulated worker's requests travel through the simulated network and drive the real exchange machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ..coordination.worker.exchange import Call, Exchange
from ..errors import OuterstepError, TransportError
from ..types import Answer, CompleteOffer, GetPartAnswer, Offer, PollAnswer, PutPart, Request
from .agenda import Agenda
from .history import History, StepName
from .network import Network
from .server import SimServer

CALL_TIMEOUT_S = 6.0
DAMAGED = "0" * 16  # the hash of what came instead

Bodies = Mapping[int, list[StepName]]
"""What is sent under each sequence."""
Soon = Callable[[float, Callable[[], None]], None]


class SimCarrier:
    """Of one worker. `soon`: do something later, if the worker lives and is not paused."""

    def __init__(
        self, link: str, agenda: Agenda, network: Network, server: SimServer, history: History, soon: Soon
    ) -> None:
        self._link, self._agenda, self._network, self._server, self._history = link, agenda, network, server, history
        self._soon = soon
        self._finished: set[Exchange] = set()

    def carry(self, exchange: Exchange, bodies: Bodies, on_done: Callable[[], None]) -> None:
        """Until it is over. Its first calls go out by the agenda, so that whoever began it has it in hand when the
        answers come."""

        def drive() -> None:
            if exchange in self._finished:
                return
            if exchange.done:
                self._finished.add(exchange)
                on_done()
                return
            now = self._agenda.now
            for call in exchange.calls(now):
                self._call(exchange, call, bodies, drive)
            if exchange.wake_at > now:
                self._soon(exchange.wake_at - now, drive)

        self._soon(0.0, drive)

    def drop(self, exchange: Exchange) -> None:
        """Nobody waits for it any more."""
        self._finished.add(exchange)

    def _call(self, exchange: Exchange, call: Call, bodies: Bodies, drive: Callable[[], None]) -> None:
        def answered(answer: Answer | OuterstepError, damaged: bool, carried: Sequence[str]) -> None:
            if exchange in self._finished:
                return
            if isinstance(answer, OuterstepError):
                exchange.failed(call, answer, self._agenda.now)
            else:
                received = None
                if isinstance(answer, GetPartAnswer):
                    received = DAMAGED if damaged else answer.hash
                came = [DAMAGED] * len(carried) if damaged else carried
                exchange.answered(call, answer, self._agenda.now, received_hash=received, carried_hashes=came)
            drive()

        def timed_out() -> None:
            exchange.failed(call, TransportError("no answer"), self._agenda.now)
            drive()

        body: list[StepName] = []
        if isinstance(call.request, PutPart | CompleteOffer):
            body = bodies[call.request.sequence]
            part = call.request.part if isinstance(call.request, PutPart) else 0
            self._history.sent["up", call.request.key, part] += 1
        self._request(call.request, body, answered)
        wait_s = call.request.wait_s or 0.0 if isinstance(call.request, Offer) else 0.0
        self._soon(CALL_TIMEOUT_S + wait_s, timed_out)

    def fire(self, request: Request, on_answer: Callable[[Answer | OuterstepError], None]) -> None:
        """Once: if nothing comes back, nothing comes back."""
        self._request(request, [], lambda answer, damaged, carried: on_answer(answer))

    def _request(
        self,
        request: Request,
        body: list[StepName],
        on_answer: Callable[[Answer | OuterstepError, bool, Sequence[str]], None],
    ) -> None:
        """There and back again, each way at the network's mercy. A connection is to one process: what was sent to a
        server that died meanwhile does not reach the next. With the answer comes whether it was damaged, and the hashes
        of the payloads that it carries."""
        server, epoch = self._server, self._server.epoch

        def reply(answer: Answer | OuterstepError) -> None:
            if isinstance(answer, GetPartAnswer):
                self._history.sent["down", self._link, answer.hash] += 1
            carried = server.carried(answer) if isinstance(answer, PollAnswer) and answer.carried_bytes else []
            for part_hash in carried:
                self._history.sent["down", self._link, part_hash] += 1

            def back(damaged: bool) -> None:
                self._soon(0.0, lambda: on_answer(answer, damaged, carried))

            self._network.send("server", self._link, back)

        def at_server(damaged: bool) -> None:
            if server.is_up and server.epoch == epoch:
                server.handle(request, body, reply, damaged=damaged)
            elif server.refuses:
                reply(TransportError("connection refused"))

        self._network.send(self._link, "server", at_server)
