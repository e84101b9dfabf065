"""An offer that brings its contribution along (`CompleteOffer`): an offer, its only part and a commit in one message.

Each of the three is decided as if it came alone. So nothing else has to be known of it: what is refused is refused for
the same reasons, a repeated one is a duplicate, and one that was cut off goes on from where it was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from msgspec.structs import asdict

from ...digest import payload_hash
from ...errors import BadRequest
from ...types import (
    Commit,
    CommitAnswer,
    CompleteOffer,
    CompleteOfferAnswer,
    OfContribution,
    Offer,
    OfferAnswer,
    PutPart,
)


class ThreeInOne(NamedTuple):
    offer: Offer
    part: PutPart
    commit: Commit


def take_apart(message: CompleteOffer) -> ThreeInOne:
    if message.section_bytes:
        raise BadRequest(
            f"contribution {message.key} has {message.sections} sections; one that comes with its offer has one part",
            hint="offer it, and let each process send its parts",
        )
    head = {name: getattr(message, name) for name in OfContribution.__struct_fields__}
    return ThreeInOne(
        Offer(**{name: getattr(message, name) for name in Offer.__struct_fields__}),
        PutPart(**head, part=0, hash=message.hash),
        Commit(**head, payload_hash=payload_hash([message.hash])),
    )


def reads_part(answer: OfferAnswer) -> bool:
    """To the offer alone: is it worth reading on? Where there is no room the part is not read, nor where the run cuts
    this contribution into several. One that is accepted already is compared with what was accepted."""
    return answer.state == "accepted" or (answer.state == "send" and answer.missing in ((), (0,)))


def take(
    message: CompleteOffer,
    offer: Callable[[Offer], OfferAnswer],
    put: Callable[[PutPart], object],
    commit: Callable[[Commit], CommitAnswer],
) -> CompleteOfferAnswer:
    """One after the other, as far as it goes."""
    alone = take_apart(message)
    answer = offer(alone.offer)
    if not reads_part(answer):
        return CompleteOfferAnswer(**asdict(answer))
    if answer.missing:
        put(alone.part)
    return CompleteOfferAnswer(state="accepted", version=commit(alone.commit).version)
