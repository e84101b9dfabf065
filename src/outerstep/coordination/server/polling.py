"""What somebody who asks for an agreement is told."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...types import Poll, PollAnswer
from .fragment import Fragment
from .membership import Member

if TYPE_CHECKING:
    from .coordinator import Coordinator

ASK_AGAIN_S = 0.5
ASK_AGAIN_SOON_S = 0.1  # by then there is room, or it has contributed to the round that wants it


def answer_poll(coordinator: Coordinator, member: Member, fragment: Fragment, message: Poll, now: float) -> PollAnswer:
    last_sequence, plan = member.last_sequence(message.fragment), coordinator.plan
    # Who waits for something newer than the open round holds an agreement from before the server was resumed.
    if fragment.published.version > message.after or message.after >= fragment.round.version:
        newer = plan if plan is not None and plan.revision != message.plan_revision else None
        return PollAnswer(agreement=fragment.published, last_sequence=last_sequence, plan=newer)
    verdict = coordinator.verdict(fragment, now)
    wanted = tuple(
        (i, other.round.version)
        for i, other in enumerate(coordinator.fragments)
        if other is not fragment
        and other.round.wants(member.worker_id, coordinator.rules)
        and not member.conduct.is_quarantined(now)
    )
    return PollAnswer(
        agreement=None,
        last_sequence=last_sequence,
        waiting_for=verdict.waiting_for[:256],
        stuck=verdict.stuck,
        wanted=wanted,
        retry_after_s=ASK_AGAIN_SOON_S if wanted else ASK_AGAIN_S,
    )
