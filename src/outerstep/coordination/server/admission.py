"""May this come in? The rules that look at one message and at what it is about."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...errors import (
    BadRequest,
    Closing,
    Conflict,
    FutureRound,
    OtherRun,
    PlanMismatch,
    ProtocolMismatch,
    StaleRound,
    TooLarge,
    TooOld,
)
from ...types import PROTOCOL_VERSION, Commit, Join, Offer, Plan, PutPart
from .plan import check_manifest, check_wishes
from .rounds import RoundRules

if TYPE_CHECKING:
    from .coordinator import Coordinator

NEXT_SEQUENCE = "a key is fixed when its contribution is begun; use the next sequence for a new one"


def check_join(coordinator: Coordinator, message: Join) -> None:
    """Everything about a join that does not depend on who is here."""
    if message.protocol != PROTOCOL_VERSION:
        raise ProtocolMismatch(
            f"this worker speaks protocol {message.protocol}, the server speaks {PROTOCOL_VERSION}",
            hint="install the same version of outerstep on both",
        )
    if message.run_id is not None:
        check_run(message.run_id, coordinator.run_id)
    if coordinator.closing and not coordinator.members.knows(message):
        raise Closing(f"the run is coming to its end: {coordinator.closing}", hint="start the server again to go on")
    plan, settled, manifest = coordinator.plan, coordinator.settled, coordinator.manifest
    if settled is not None and plan is not None and manifest is not None:
        check_wishes(settled, coordinator.next_plan or plan, message.wishes)
        if message.manifest is not None:
            check_manifest(manifest, message.manifest)


def check_run(named: str, held: str) -> None:
    if named != held:
        raise OtherRun(
            f"this server holds run {held}, not {named}",
            hint="restart the worker to join the new run from its beginning",
        )


def check_same_offer(message: Offer, known: Offer) -> None:
    if message != known:
        raise Conflict(f"contribution {message.key} was offered before with other facts", hint=NEXT_SEQUENCE)


def check_same_part(message: PutPart, stored: str) -> None:
    if message.hash != stored:
        raise Conflict(f"part {message.part} of {message.key} was stored with hash {stored}, not {message.hash}")


def check_accepted(message: Commit, accepted: str) -> None:
    """It is in already: is it the same?"""
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


def check_form(offer: Offer, plan: Plan, max_payload_bytes: int) -> None:
    """Is it encoded with the run's codec, do its sections add up, and is it not too large?"""
    if offer.codec != plan.codec:
        raise PlanMismatch(f"contribution is encoded as {offer.codec!r}; the run uses {plan.codec!r}")
    if offer.section_bytes and sum(offer.section_bytes) != offer.size_bytes:
        raise BadRequest(f"sections of {sum(offer.section_bytes)} bytes in a contribution of {offer.size_bytes}")
    if offer.size_bytes > max_payload_bytes:
        raise TooLarge(
            f"contribution of {offer.size_bytes} bytes; fragment {offer.fragment} as {plan.codec} "
            f"takes at most {max_payload_bytes}"
        )


def check_age(offer: Offer, *, published: int, newest: int, rules: RoundRules) -> None:
    """`newest` is the version under the open round: one more than `published` while a round is closing."""
    if offer.base_version > published or offer.oldest_base > offer.base_version:
        raise FutureRound(
            f"fragment {offer.fragment} is at version {published}; "
            f"got base_version {offer.base_version}, oldest_base {offer.oldest_base}",
            hint="0 ≤ oldest_base ≤ base_version ≤ current version",
        )
    if offer.base_version < newest and not rules.takes_late:
        raise StaleRound(
            f"round {offer.base_version + 1} of fragment {offer.fragment} closed without this contribution; "
            f"it is at version {newest}",
            hint="fetch the newest anchor and rebase",
        )
    if newest - offer.oldest_base > rules.max_staleness:
        raise TooOld(
            f"the oldest step in this contribution was taken on version {offer.oldest_base}, "
            f"{newest - offer.oldest_base} before the newest; max_staleness is {rules.max_staleness}",
            hint="discard it and adopt the newest anchor",
        )
