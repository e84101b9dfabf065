"""What is refused, and why: the rules that look at one message and at what it is about.

A contribution passes `check_offer` when it is offered, and again when it is whole: its round may have closed meanwhile.
(What is refused for its size: outerstep/screens.py. A worker in quarantine: membership.py.)
"""

from __future__ import annotations

from collections.abc import Collection

from msgspec import UNSET
from msgspec.structs import replace

from ...errors import (
    BadRequest,
    Conflict,
    FutureRound,
    NoIdentity,
    OtherCodec,
    OtherRun,
    StaleRound,
    TooLarge,
    TooOld,
)
from ...tiling import Cutting, FragmentTiling, ModelTiling
from ...types import Commit, Join, Offer, Plan, PutPart
from ..weights import reported
from .rounds import Fragment, RoundRules

NEXT_SEQUENCE = "a key is fixed when its contribution is begun; use the next sequence for a new one"


def check_identity(message: Join, *, vouched: bool) -> None:
    """Refuse a worker without a key on a server that requires one."""
    if message.proof is UNSET and not vouched:
        raise NoIdentity(
            f"this server takes workers with a key only (require_identity), and {message.worker_id!r} brings none",
            hint="install a newer outerstep on the worker's machine, or give the worker a token of its own",
        )


def other_run(named: str, held: str) -> OtherRun:
    return OtherRun(
        f"this server holds run {held}, not {named}", hint="restart the worker to join the new run from its beginning"
    )


def check_tiling(message: Join) -> ModelTiling | None:
    """What its sections hold, checked. That needs nothing but the message, and may take a second."""
    if message.tiling is UNSET or message.manifest is None:
        return None
    checked = ModelTiling(message.tiling, message.manifest.parameters)
    assert checked.digest
    assert checked.weight  # known from now on: they are asked for under the lock
    return checked


def check_same_offer(message: Offer, known: Offer) -> None:
    # The loss is for people, and lost by a restart; how long the answer may take is of this one request.
    if replace(message, loss=UNSET, wait_s=UNSET) != replace(known, loss=UNSET, wait_s=UNSET):
        raise Conflict(f"contribution {message.key} was offered before with other facts", hint=NEXT_SEQUENCE)


def check_same_part(message: PutPart, stored: str) -> None:
    if message.hash != stored:
        raise Conflict(f"part {message.part} of {message.key} was stored with hash {stored}, not {message.hash}")


def check_accepted(message: Commit, accepted: str | None) -> None:
    """Is it the payload that was accepted under this key?"""
    if message.payload_hash != accepted:
        raise Conflict(
            f"contribution {message.key} was accepted with payload {accepted}; this one is {message.payload_hash}",
            hint=NEXT_SEQUENCE,
        )


def check_received(message: Commit, received: str) -> None:
    if message.payload_hash != received:
        raise Conflict(
            f"contribution {message.key}: the parts received make {received}, not {message.payload_hash}",
            hint="parts of two different payloads were sent under one key",
        )


def check_offer(
    offer: Offer,
    fragment: Fragment,
    plan: Plan,
    rules: RoundRules,
    earlier_codecs: Collection[str] = (),
    cutting: Cutting | None = None,
) -> None:
    """Does it report what the run weighs by, is it in the run's form, not too large, not too old, and its worker's
    only voice? `earlier_codecs`: of plans before this one. What was encoded as they say is the same Δ.
    `cutting`: how it is cut into sections (None = by rows)."""
    reported(offer, rules.weight_by)
    check_sections(offer.sections, fragment, cutting)
    if offer.codec != plan.codec and offer.codec not in earlier_codecs:
        raise OtherCodec(
            f"contribution is encoded as {offer.codec!r}; the run uses {plan.codec!r}",
            hint="poll for the plan, and send these steps with the next contribution",
        )
    if offer.section_bytes and sum(offer.section_bytes) != offer.size_bytes:
        raise BadRequest(f"sections of {sum(offer.section_bytes)} bytes in a contribution of {offer.size_bytes}")
    cutting = offer.sections if cutting is None else cutting
    max_payload_bytes = fragment.max_payload_bytes(cutting, offer.codec)
    if offer.size_bytes > max_payload_bytes:
        raise TooLarge(
            f"contribution of {offer.size_bytes} bytes; fragment {offer.fragment} as {offer.codec} "
            f"takes at most {max_payload_bytes}"
        )
    check_age(offer, fragment, rules)
    check_voice(offer, fragment, rules)


def check_sections(sections: int, fragment: Fragment, cutting: Cutting | None = None) -> None:
    if isinstance(cutting, FragmentTiling):
        if sections != cutting.sections:
            raise BadRequest(f"got {sections} sections; the worker's tiling has {cutting.sections}")
    elif sections > fragment.max_sections:
        raise BadRequest(f"{sections} sections are too many: fragment {fragment.published.fragment} has fewer rows")


def check_age(offer: Offer, fragment: Fragment, rules: RoundRules) -> None:
    """`newest` is the version under the open round: one more than the published one while a round is closing."""
    published, newest = fragment.published.version, fragment.round.version - 1
    if offer.base_version > published or offer.oldest_base > offer.base_version:
        raise FutureRound(
            f"fragment {offer.fragment} is at version {published}; "
            f"got base_version {offer.base_version}, oldest_base {offer.oldest_base}",
            hint="0 ≤ oldest_base ≤ base_version ≤ current version",
        )
    if fragment.staleness(offer.base_version) > 0 and not rules.takes_late:
        raise StaleRound(
            f"round {offer.base_version + 1} of fragment {offer.fragment} closed without this contribution; "
            f"it is at version {newest}",
            hint="fetch the newest anchor and rebase",
        )
    age = fragment.staleness(offer.oldest_base)
    if age > rules.max_staleness:
        raise TooOld(
            f"the oldest step in this contribution was taken on version {offer.oldest_base}, "
            f"{age} before the newest; max_staleness is {rules.max_staleness}",
            hint="discard it and adopt the newest anchor",
        )


def check_voice(offer: Offer, fragment: Fragment, rules: RoundRules) -> None:
    """A worker has one voice in a round. Where late contributions are taken it may have two: a late one, and one on a
    newer version. Any other waits until the round has closed; to its worker that is a round which closes without it."""
    voices = fragment.round.voices(offer.worker_id)
    if not voices:
        return
    if rules.takes_late and len(voices) == 1 and fragment.staleness(offer.base_version) < voices[0].staleness:
        return
    raise StaleRound(
        f"round {fragment.round.version} of fragment {offer.fragment} has contribution #{voices[-1].sequence} of "
        f"worker {offer.worker_id!r}, and takes one of each worker; this is #{offer.sequence}",
        hint="it waits for the next round: offer it again when this one has closed, or fetch the newest anchor and "
        "rebase",
    )
