"""A simulated worker with a valid token that wants to count for more than one, or to keep everybody waiting.

    voices     contributes to every open round as often as it is taken, and claims a trillion tokens each time
    refused    is alive, and brings only what is refused

It speaks at its own pace, on a line that loses nothing. What it sends is told apart from the others' steps by name.
"""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from ..coordination.worker.exchange import MemberFields
from ..digest import part_hash, payload_hash
from ..errors import OuterstepError, UnknownWorker
from ..types import (
    PROTOCOL_VERSION,
    Answer,
    Commit,
    CommitAnswer,
    Join,
    JoinAnswer,
    Offer,
    OfferAnswer,
    PutPart,
    Trained,
)
from .agenda import Agenda
from .history import StepName
from .scenario import Scenario
from .server import PART_BYTES, SimServer

SPEAKS_EVERY_S = 0.7
TRILLION = 10**12


class SimLiar:
    def __init__(self, scenario: Scenario, agenda: Agenda, server: SimServer) -> None:
        self._scenario, self._agenda, self._server = scenario, agenda, server
        self._joined: JoinAnswer | None = None
        self._said = 0
        self._sequences = [0] * scenario.fragments
        agenda.after(SPEAKS_EVERY_S, self._speak)

    def _speak(self) -> None:
        self._agenda.after(SPEAKS_EVERY_S, self._speak)
        joined = self._joined
        if not self._server.is_up:
            return
        if joined is None:
            join = Join(protocol=PROTOCOL_VERSION, worker_id="liar", instance="instance-liar", hostname="liar")
            self._server.handle(join, [], self._heard_of_joining)
            return
        for fragment in range(self._scenario.fragments):
            self._contribute(joined, fragment)

    def _heard_of_joining(self, answer: Answer | OuterstepError) -> None:
        if isinstance(answer, JoinAnswer):
            self._joined = answer
            self._sequences = [state.last_sequence for state in answer.fragments]

    def _claimed(self) -> tuple[Trained, ...] | UnsetType:
        """The units that are said to be in a contribution (data.py)."""
        return UNSET

    def _contribute(self, joined: JoinAnswer, fragment: int) -> None:
        """Offer, parts and commit at once, as far as it is heard."""
        self._said += 1
        steps: list[StepName] = [("liar", self._said)]
        newest = self._server.coordinator.fragments[fragment].published.version
        head = MemberFields(run_id=joined.run_id, worker_id="liar", incarnation=joined.incarnation)
        offer = Offer(
            **head,
            fragment=fragment,
            sequence=self._sequences[fragment] + 1,
            base_version=newest,
            oldest_base=newest,
            steps=1,
            codec="fp32" if self._scenario.liar == "voices" else "nonsense",
            size_bytes=self._scenario.parts * PART_BYTES,
            tokens=TRILLION,
            data=self._claimed(),
        )
        hashes = [part_hash(f"{offer.key} {self._said} {i}".encode()) for i in range(self._scenario.parts)]

        def offered(answer: Answer | OuterstepError) -> None:
            if isinstance(answer, UnknownWorker):
                self._joined = None
            if not isinstance(answer, OfferAnswer) or answer.state != "send":
                return
            for part in answer.missing:
                put = PutPart(**head, fragment=fragment, sequence=offer.sequence, part=part, hash=hashes[part])
                self._server.handle(put, steps, lambda answer: None)
            commit = Commit(**head, fragment=fragment, sequence=offer.sequence, payload_hash=payload_hash(hashes))
            self._server.handle(commit, [], committed)

        def committed(answer: Answer | OuterstepError) -> None:
            if isinstance(answer, CommitAnswer):
                self._sequences[fragment] += 1

        self._server.handle(offer, [], offered)
