"""What a worker calls: one request, one answer. HTTP and the in-memory twin both are this."""

from __future__ import annotations

from typing import Protocol

from ..types import Answer, Request


class Transport(Protocol):
    @property
    def address(self) -> str: ...

    @property
    def protocol(self) -> int:
        """The highest that both ends speak, as far as is known: ours, before the first answer."""

    def call(
        self,
        request: Request,
        *,
        body: memoryview | None = None,
        into: memoryview | None = None,
        timeout_s: float | None = None,
    ) -> Answer:
        """Send `request`, with the bytes of a PutPart or a CompleteOffer as `body`; the bytes of a GetPart are written
        to `into`, and so are those that the answer to a Poll carries (at most as many as it takes). `timeout_s`: of
        silence; None = the transport's own. A join is signed with the worker's key on the way.

        Raises a Refused if the server says no, a TransportError if there was no answer."""

    def show_session(self, worker_id: str, session: str) -> None:
        """Show this secret with every later request of that worker. (Of one that joins here it is done already.)"""

    def status(self) -> dict[str, object]: ...

    def close(self) -> None: ...
