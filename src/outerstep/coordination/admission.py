"""May this contribution come in? The rules that look at one offer and the state of its fragment."""

from __future__ import annotations

from ..errors import BadRequest, FutureRound, PlanMismatch, StaleRound, TooLarge, TooOld
from ..types import Offer, Plan
from .rounds import RoundRules


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
