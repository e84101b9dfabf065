"""An exchange, and answers for it: the test plays the server."""

from __future__ import annotations

import random
from typing import Any

from outerstep.coordination.worker.exchange import Call, Exchange, Patience, Sending, Session, Step
from outerstep.errors import (
    OuterstepError,
    TransportError,
)
from outerstep.types import (
    Agreement,
    Answer,
    CommitAnswer,
    GetPart,
    GetPartAnswer,
    JoinAnswer,
    JoinedFragment,
    OfferAnswer,
    PollAnswer,
    PutPartAnswer,
    Request,
)
from unit.coordination.builders import (
    MANIFEST,
    PART_BYTES,
    RUN,
    agreement_hashes,
    contribution_hashes,
    make_agreement,
    make_join,
    make_key,
    make_offer,
    make_plan,
)

LOST = TransportError("connection reset")
STORED = PutPartAnswer(state="stored")
ACCEPTED = CommitAnswer(version=1)
WAIT_S = Patience().poll_wait_s


def joined(incarnation: int = 1) -> JoinAnswer:
    return JoinAnswer(
        run_id=RUN,
        incarnation=incarnation,
        plan=make_plan(),
        manifest=MANIFEST,
        fragments=(JoinedFragment(version=0, last_sequence=0),),
    )


def send(*missing: int) -> OfferAnswer:
    return OfferAnswer(state="send", missing=missing)


def agreed(version: int = 1, *, last_sequence: int = 1, parts: int = 2) -> PollAnswer:
    return PollAnswer(agreement=make_agreement(version, parts=parts), last_sequence=last_sequence)


def nothing_yet(**facts: Any) -> PollAnswer:
    return PollAnswer(**{"agreement": None, "last_sequence": 1, "retry_after_s": 0.5, **facts})


class Talk:
    """An exchange and the test that plays the server: each `say` takes the next call and answers it."""

    def __init__(
        self,
        *,
        contributes: bool = True,
        is_joined: bool = True,
        parts: int = 2,
        seed: int = 0,
        claim: int | None = None,
        **patience: Any,
    ) -> None:
        self.now = 1000.0
        self.session = Session(make_join("a"))
        if is_joined:
            self.session.answer = joined()
        size_bytes = parts * PART_BYTES
        self.hashes = tuple(contribution_hashes(make_key("a"), size_bytes))
        self.exchange = Exchange(
            self.session,
            fragment=0,
            after=0 if contributes or claim is not None else -1,
            now=self.now,
            claim=claim,
            offer=make_offer("a", size_bytes=size_bytes) if contributes else None,
            part_hashes=self.hashes if contributes else (),
            patience=Patience(**patience),
            rng=random.Random(seed),
        )
        self._made: list[Call] = []
        self.earlier: Sending | None = None

    def next(self) -> Call:
        """The next call, as soon as the machine wants to make one."""
        if not self._made:
            self.now = max(self.now, self.exchange.wake_at)
            self._made = self.exchange.calls(self.now)
        assert self._made, f"nothing to send in step {self.exchange.step}"
        return self._made.pop(0)

    def say(self, *answers: Answer | OuterstepError) -> Request:
        """Answer the next calls, one each; returns the last request."""
        for answer in answers:
            call = self.next()
            self.reply(call, answer)
        return call.request

    def reply(self, call: Call, answer: Answer | OuterstepError, *, received: str | None = None) -> None:
        step = self.exchange.step
        if isinstance(answer, OuterstepError):
            self.exchange.failed(call, answer, self.now)
        else:
            hash_ = received if received is not None else getattr(answer, "hash", None)
            self.exchange.answered(call, answer, self.now, received_hash=hash_)
        if self.exchange.step is not step:
            self._made.clear()  # nobody waits for these any more

    def hand_over(self, agreement: Agreement) -> None:
        """Give it every part that it asks for."""
        hashes = agreement_hashes(agreement.fragment, agreement.version, agreement.size_bytes // PART_BYTES)
        while self.exchange.step is Step.FETCH and not self.exchange.done:
            call = self.next()
            assert isinstance(call.request, GetPart)
            self.reply(call, GetPartAnswer(hash=hashes[call.request.part]))

    def brought_to(self, step: Step) -> Talk:
        """The happy path up to the first call of `step`."""
        script: list[tuple[Step, list[Answer]]] = [
            (Step.JOIN, [joined()]),
            (Step.OFFER, [send(*range(len(self.hashes)))]),
            (Step.SEND, [STORED] * len(self.hashes)),
            (Step.COMMIT, [ACCEPTED]),
            (Step.POLL, [agreed()]),
        ]
        for at, answers in script:
            if self.exchange.step is at and at is not step:
                self.say(*answers)
        assert self.exchange.step is step
        return self

    @property
    def waits_s(self) -> float:
        return self.exchange.wake_at - self.now
