"""Where a run has an inviter: a block that lets in somebody without the inviter's signature cannot be voted for."""

from __future__ import annotations

import pytest
from msgspec import UNSET

from outerstep.coordination.gossip import GossipRules, chain
from outerstep.coordination.gossip.book import Book
from outerstep.coordination.gossip.meaning import wrong_with_block
from outerstep.errors import ConfigError
from outerstep.simulate.gossip import Registry
from outerstep.statements import Beat, Change, Member, Signed, body_of, invitation_body

RUN = "a-run"


@pytest.mark.parametrize(
    ("invited", "may_come"),
    [(None, False), (("new", "own"), True), (("old", "own"), False), (("new", "other"), False)],
    ids=["without", "with its own", "with another name's", "with another key's"],
)
def test_a_change_lets_in_only_who_is_invited(invited: tuple[str, str] | None, may_come: bool) -> None:
    registry = Registry()
    (inviter, sign_inviter), (key, sign), (other, _) = (registry.enter(name) for name in ("founder", "new", "other"))
    founder, newcomer = Member(peer_id="founder", key=inviter), Member(peer_id="new", key=key)
    state = chain.found(founder, 1)
    invitation: str | None = None
    if invited is not None:
        body = invitation_body(RUN, invited[0], {"own": key, "other": other}[invited[1]])
        invitation = sign_inviter(body).hex()
    beat = Beat(
        run_id=RUN,
        peer_id="new",
        incarnation=1,
        number=1,
        address="h:1",
        invitation=UNSET if invitation is None else invitation,
    )
    applied = Signed(author=key, body=body_of(beat), signature=sign(body_of(beat)))
    change = Change(
        height=state.height + 1, parent=state.tip, members=chain.in_order([founder, newcomer]), applied=(applied,)
    )
    book = Book(RUN, inviter, sign_inviter, registry.verify, inviter=inviter)
    assert (wrong_with_block(change, state, book) == "") is may_come
    anywhere = Book(RUN, inviter, sign_inviter, registry.verify)
    assert wrong_with_block(change, state, anywhere) == ""


def test_invitations_need_the_protocol_that_has_them() -> None:
    with pytest.raises(ConfigError, match="invite_only needs protocol 2, got 1"):
        GossipRules(protocol=1, inviter="0" * 64)
