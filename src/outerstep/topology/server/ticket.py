"""An exchange with the server, as the training thread sees it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from ...coordination.worker.exchange import Outcome
from ...coordination.worker.fetch import Held
from ...coordination.worker.sending import Sending
from ...errors import Absurd, ExchangeFailed, NotFinite, Quarantined, Refused, WorkerError
from ...types import Offer
from ..protocol import Agreed, Sight
from .courier import Courier
from .saved import pack

USELESS = (NotFinite, Absurd, Quarantined)
"""What the server says to a contribution that it will never take. Sending it again changes nothing; going on from other
weights does."""


class Home(Protocol):
    """What belongs to the topology: the anchors that are held, and what becomes of a contribution."""

    def settle(self, ticket: ServerTicket, *, reload: bool) -> Agreed: ...

    def adopted(self, agreed: Agreed, intact: bool) -> Agreed | None: ...


class ServerTicket:
    """Carried by a thread of its own. `offer`: of the contribution, if there is one; `claim`: the sequence of one that
    an earlier start of this worker made; `held`: the anchor that the server was told of."""

    def __init__(
        self,
        fragment: int,
        courier: Courier,
        home: Home,
        *,
        held: Held | None,
        offer: Offer | None,
        again: Callable[[float | None], ServerTicket],
        claim: int | None = None,
    ) -> None:
        self.fragment = fragment
        self.courier = courier
        self._home = home
        self.held = held
        self.offer = offer
        self.claim = claim
        self._again = again  # the same exchange, from the beginning, with this stuck_after_s
        self._done = threading.Event()
        self._crash: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"outerstep-exchange-{fragment}", daemon=True)
        self._thread.start()

    @property
    def useless(self) -> Refused | None:
        """Why the server has no use for the contribution, if that is how it ended."""
        failure = self.courier.exchange.failure
        return failure if isinstance(failure, USELESS) else None

    @property
    def sending(self) -> Sending | None:
        """The contribution, as far as the server has said what becomes of it."""
        return self.courier.exchange.outbox.own

    def look(self, timeout_s: float) -> Sight:
        done, exchange = self.wait(timeout_s), self.courier.exchange
        missed = exchange.outcome is not None and not exchange.outcome.counted
        failed = done and (self._crash is not None or (exchange.outcome is None and self.useless is None))
        return Sight(done, exchange.wanted, exchange.waiting_for, exchange.silent_s(time.monotonic()), missed, failed)

    def finish(self, *, reload: bool = False) -> Agreed:
        self.join()
        return self._home.settle(self, reload=reload)

    def confirm(self, agreed: Agreed, intact: bool) -> Agreed | None:
        return self._home.adopted(agreed, intact)

    def resume(self, *, stuck_after_s: float | None = None) -> ServerTicket:
        self.cancel()
        return self._again(stuck_after_s)

    def pack(self) -> dict[str, Any]:
        assert self.offer is not None, "only a contribution can be carried on elsewhere"
        assert self.courier.payload is not None
        return pack(self.offer, self.courier.payload)

    def wait(self, timeout_s: float) -> bool:
        return self._done.wait(timeout_s)

    def join(self) -> None:
        while not self.wait(1.0):  # in slices, so that Ctrl-C gets through
            pass

    def cancel(self) -> None:
        self.courier.cancel()

    @contextmanager
    def cancelled_on_error(self) -> Iterator[None]:
        """For what must still be done so that the exchange can go on."""
        try:
            yield
        except BaseException:
            self.cancel()
            raise

    def outcome(self) -> Outcome:
        """What the exchange came to; whatever went wrong in the background is raised here, with its cause."""
        exchange = self.courier.exchange
        failure = self._crash or exchange.failure
        if isinstance(failure, WorkerError):
            raise failure
        if failure is not None:
            raise ExchangeFailed(f"the exchange of fragment {self.fragment} failed: {failure}") from failure
        if exchange.outcome is None:
            raise ExchangeFailed(f"the exchange of fragment {self.fragment} was cancelled")
        return exchange.outcome

    def _run(self) -> None:
        try:
            self.courier.run()
        except BaseException as error:  # noqa: BLE001 - it surfaces in outcome(), in the training thread
            self._crash = error
        finally:
            self._done.set()
