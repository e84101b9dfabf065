"""What the coordinator does about contributions that are too large to be true, about who sends such or other things
that cannot be used, and about who takes room and sends nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ...errors import Absurd, Conflict, Refused
from ...types import ContributionKey, Offer
from .fragment import Closed, Fragment
from .membership import Member
from .offences import is_offence
from .screen import LEAST_CONTRIBUTORS, Size
from .uploads import Upload

if TYPE_CHECKING:
    from .coordinator import Coordinator


def request_room(coordinator: Coordinator, message: Offer, now: float) -> Upload | None:
    """For this offer, or None: it stands in the queue. Whoever holds room and sends nothing makes some; it will offer
    again when it wakes up."""
    upload = coordinator.uploads.request(message, now)
    if upload is not None:
        return upload
    idle = [one.offer for one in coordinator.uploads.standing_still(now)]
    for offer in idle:
        coordinator.event("upload_dropped", worker=offer.worker_id, fragment=offer.fragment)
        coordinator.drop(offer.key)
    return coordinator.uploads.request(message, now) if idle else None


def size_of(coordinator: Coordinator, offer: Offer, norm: float | None) -> Size | None:
    """None: it is not to be screened."""
    return Size(norm, offer.steps) if norm is not None and offer.steps and coordinator.rules.norm_screen else None


def check_size(coordinator: Coordinator, offer: Offer, size: Size | None, now: float) -> None:
    """Refuse what is far larger than this fragment's contributions are. If that hits half of the workers, it is the run
    that has changed: what was usual is forgotten, and nothing is held against them."""
    if size is None:
        return
    fragment = coordinator.fragments[offer.fragment]
    screen, member = fragment.screen, coordinator.members.find(offer.worker_id)
    assert member is not None
    try:
        screen.check(offer.worker_id, size, coordinator.rules.norm_screen)
    except Absurd as refusal:
        is_news = screen.note_refused(offer.worker_id, fragment.round.version)
        coordinator.discard(offer.key, refusal)
        if screen.has_changed(len(coordinator.members.live_ids)):
            coordinator.event("screen_forgotten", fragment=offer.fragment, why="half of the workers were refused by it")
            for other in coordinator.members:
                if other.worker_id in screen.refused:
                    other.conduct.forgive(refusal)
            screen.forget()
        elif is_news:
            note_offence(coordinator, member, refusal, now)
        raise


def must_wait(coordinator: Coordinator, fragment: Fragment, size: Size | None) -> bool:
    """Is it to be kept until its round closes, and looked at again? Always for a rule that compares contributions; to
    look at its norm only in a round of three or more, and if there is room for what everybody sends: else the last
    would wait for the first and the first for the last."""
    if not coordinator.rules.aggregation.is_plain:
        return True
    if size is None or not fragment.screen.needs_second_look(size, coordinator.rules.norm_screen):
        return False
    workers = max(coordinator.rules.num_workers, len(coordinator.members.live_ids))
    needed = workers * sum(one.max_payload_bytes(1) for one in coordinator.fragments)
    enough = workers >= LEAST_CONTRIBUTORS and not coordinator.rules.asynchronous
    return enough and needed <= coordinator.uploads.capacity_bytes


def turned_away(coordinator: Coordinator, fragment: Fragment, now: float) -> frozenset[str]:
    """For a rule: who is here, and not in the open round, because it is in quarantine, or what it brought to this round
    was refused for its size."""
    if coordinator.rules.aggregation.is_plain:
        return frozenset()
    version, refused = fragment.round.version, fragment.screen.refused
    found = {
        member.worker_id
        for member in coordinator.members
        if member.live and (member.conduct.is_quarantined(now) or refused.get(member.worker_id) == version)
    }
    return frozenset(found - fragment.round.contributors)


def leave_out(coordinator: Coordinator, fragment: int, closed: Closed) -> frozenset[ContributionKey]:
    """A round closed without these of its contributions; if too few had trained, without any."""
    if closed.too_few:
        coordinator.total_too_few += 1
        rule = coordinator.rules.aggregation
        facts = {"trained": closed.too_few, "needed": rule.fewest, "aggregation": rule.name}
        coordinator.event("too_few", fragment=fragment, version=closed.version, **facts)
    for outlier in closed.outliers:
        worker_id = outlier.participant.worker_id
        _count_left_out(coordinator, worker_id)
        coordinator.event("left_out", worker=worker_id, fragment=fragment, version=closed.version, **outlier.facts)
    run_id, left_out = coordinator.run_id, [outlier.participant for outlier in closed.outliers]
    return frozenset(
        ContributionKey(run_id=run_id, worker_id=p.worker_id, fragment=fragment, sequence=p.sequence) for p in left_out
    )


def note_verdict(
    coordinator: Coordinator, fragment: int, version: int, refused: Mapping[str, str], unused: Sequence[str]
) -> None:
    """The driver has combined a round: a screen that reads values refused these (worker id → why), and of those the
    rule took nothing. Of the latter one event for all: with Krum it is everybody but one, in every round."""
    for worker_id in (*refused, *unused):
        _count_left_out(coordinator, worker_id)
    for worker_id, why in refused.items():
        coordinator.event("left_out", worker=worker_id, fragment=fragment, version=version, why=why)
    if unused:
        rule = coordinator.rules.aggregation.name
        coordinator.event("not_chosen", fragment=fragment, version=version, workers=list(unused), aggregation=rule)


def _count_left_out(coordinator: Coordinator, worker_id: str) -> None:
    member = coordinator.members.find(worker_id)
    if member is not None:
        member.left_out += 1


@contextmanager
def conflicts_noted(coordinator: Coordinator, member: Member) -> Iterator[None]:
    """The same key with other bytes is an offence."""
    try:
        yield
    except Conflict as refusal:
        note_offence(coordinator, member, refusal, coordinator.now)
        raise


def note_offence(coordinator: Coordinator, member: Member, refusal: Refused, now: float) -> None:
    """Who offends too often is in quarantine: nothing unfinished of it is kept, and nobody waits for it."""
    if not is_offence(refusal):
        return
    one_too_many = member.conduct.offend(refusal, now)
    coordinator.event("offence", worker=member.worker_id, code=refusal.code, count=member.conduct.total)
    if one_too_many:
        left_s = round(member.conduct.until - now)
        coordinator.event("quarantine", worker=member.worker_id, seconds=left_s, reason=member.conduct.reason)
        coordinator.set_aside(member, now)
