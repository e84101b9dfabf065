"""Exchanges with the server are set going here, each carried by a thread of its own."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable

from ...coordination.worker.exchange import Exchange, Patience, Share
from ...coordination.worker.fetch import Held, Wanted
from ...types import Offer
from ..memory import Memory
from ..payload import Payload
from .courier import Courier
from .door import Door
from .member import Member
from .ticket import Home, ServerTicket

EXIT_FACTOR = 10  # how many times longer than for a stuck round a leaving worker waits for a silent server


class Dispatch:
    """`seed`: of the pauses between tries."""

    def __init__(self, door: Door, member: Member, memory: Memory, home: Home, seed: str) -> None:
        self._door = door
        self._member = member
        self._memory = memory
        self._home = home
        self._rng = random.Random(seed)

    def start(
        self,
        fragment: int,
        *,
        after: int,
        patience: Patience,
        again: Callable[[float | None], ServerTicket],
        share: Share | None = None,
        held: Held | None = None,
        fetch: Wanted | None = None,
        claim: int | None = None,
        offer: Offer | None = None,
        payload: Payload | None = None,
        earlier: ServerTicket | None = None,
    ) -> ServerTicket:
        """As in `Exchange`, and `again` as in `ServerTicket`. `payload`: what was offered; `earlier`: the contribution
        before it, if it is not confirmed."""
        session = self._member.introduced
        exchange = Exchange(
            session,
            fragment=fragment,
            after=after,
            now=time.monotonic(),
            offer=offer,
            earlier=earlier.sending if earlier is not None else None,
            share=share,
            fetch=fetch,
            held=held,
            claim=claim,
            patience=patience,
            rng=self._rng,
        )
        courier = Courier(
            self._door,
            exchange,
            part_size_bytes=lambda: session.joined.plan.part_size_bytes,
            memory=self._memory,
            payload=payload,
            earlier=earlier.courier.payload if earlier is not None else None,
            pinned=payload is not None and payload.data.is_pinned(),
            max_download_bytes=lambda: self._most_bytes(fragment),
        )
        return ServerTicket(fragment, courier, self._home, held=held, offer=offer, claim=claim, again=again)

    def _most_bytes(self, fragment: int) -> int | None:
        """That an agreement may have; not known before we have joined."""
        return self._member.forms[fragment].full.size_bytes if self._member.forms else None


def with_limit(patience: Patience, give_up_after_s: float, stuck_after_s: float | None = None) -> Patience:
    """With a limit on being stuck it is the worker's last contribution, which is worth waiting for; but not for hours
    if there is no server any more."""
    if stuck_after_s is not None:
        give_up_after_s = min(give_up_after_s, EXIT_FACTOR * stuck_after_s)
    return dataclasses.replace(
        patience,
        give_up_after_s=give_up_after_s,
        stuck_after_s=stuck_after_s,
        stay_for_own_round=stuck_after_s is not None,
    )
