"""A run that was founded with --invite-only, over TLS on this machine: the run's token alone makes no member."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from outerstep import GradientGossip
from outerstep.errors import ConfigError
from outerstep.statements import Converse, Withdrawal, invitation_body, withdrawal_body
from outerstep.topology.gossip.node.invitations import invite
from outerstep.wire.http_transport import HttpTransport
from peers import RULES, Peer, agree, stop_peers
from support import wait_until
from typed import typed


@pytest.fixture
def run() -> Iterator[list[Peer]]:
    """Its founder, who invites; and one that was invited."""
    founder = Peer("founder")
    founder.rules = dataclasses.replace(RULES, inviter=founder.node.key)
    peers = [founder.found()]
    peers.append(invited(founder, "guest").join())
    yield peers
    stop_peers(peers)


def invited(founder: Peer, name: str, peer_id: str | None = None) -> Peer:
    peer = Peer(name, join=(founder.node.join_string,), rules=founder.rules)
    body = invitation_body(founder.node.peer.run_id, peer_id or name, peer.node.key)
    peer.node.settings = dataclasses.replace(peer.node.settings, invitation=founder.node._key.sign(body).hex())
    return peer


def members(peer: Peer) -> list[str]:
    with peer.node.lock:
        return [member.peer_id for member in peer.node.peer.state.members]


def test_an_invited_peer_belongs_and_one_with_the_token_alone_never_does(run: list[Peer]) -> None:
    """Mallory's software does not ask for an invitation, and claims the guest's."""
    founder, guest = run
    mallory = Peer("mallory", join=(founder.node.join_string,))
    run.append(mallory)
    terms = mallory.node.ask_terms(30.0)
    mallory.begin(terms)
    mallory.heal()
    mallory.node.peer._invitation = guest.node.settings.invitation
    mallory.node.belong()
    wait_until(lambda: all(mallory.node.key in one.node.peer.contacts for one in (founder, guest)))
    for _ in range(5):
        decided = agree([founder, guest])
        assert [peer_id for peer_id, _, _ in decided[0].contributions] == ["founder", "guest"]
    assert members(founder) == members(guest) == ["founder", "guest"]
    late = invited(founder, "late").join()
    run.append(late)
    assert members(late) == ["founder", "guest", "late"]


@pytest.mark.parametrize("what", ["none", "another"])
def test_a_peer_without_its_invitation_is_told_what_to_do(run: list[Peer], what: str) -> None:
    peer = Peer("new", join=(run[0].node.join_string,), rules=run[0].rules)
    if what == "another":
        peer.node.settings = dataclasses.replace(peer.node.settings, invitation=run[1].node.settings.invitation)
    run.append(peer)
    with pytest.raises(ConfigError, match=f"has {what}.*`outerstep invite new {peer.node.key}`"):
        peer.begin(peer.node.ask_terms(30.0))


def test_the_founder_invites_from_its_folder_while_it_runs_and_a_restart_needs_no_second_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        own: dict[str, Any] = {"listen": "127.0.0.1:0", "credentials": str(tmp_path / "credentials")}
        grad, house, hut = {"w": torch.ones(4)}, str(tmp_path / "anna"), str(tmp_path / "ben")
        async with GradientGossip("anna", invite_only=True, folder=house, codec="fp32", **own) as anna:
            first = asyncio.create_task(anna.gossip_round(grad))
            await asyncio.to_thread(wait_until, lambda: anna._node.shared.has_begun and anna.peers)
            ben = GradientGossip("ben", [anna.join_string], folder=hut, **own)
            key = ben._node.key
            with pytest.raises(ConfigError, match=f"outerstep invite ben {key}"):
                await ben.gossip_round(grad)
            ben._node.stop()
            said = typed(["invite", "ben", key, "--peer-dir", house])
            assert said.exit_code == 0, said.output
            ben = GradientGossip("ben", [anna.join_string], folder=hut, invitation=said.output.strip(), **own)
            await asyncio.gather(first, ben.gossip_round(grad))
            ben._node.stop()
            ben = GradientGossip("ben", [anna.join_string], folder=hut, **own)
            await asyncio.gather(anna.gossip_round(grad), ben.gossip_round(grad))
            assert anna.peers == ben.peers == ("anna", "ben")
            said = typed(["invite", "ben", key, "--peer-dir", house, "--withdraw"])
            assert said.exit_code == 0, said.output
            assert "ben is expelled by the next block" in said.output
            await asyncio.to_thread(wait_until, lambda: anna.peers == ("anna",))
            ben._node.stop()

    asyncio.run(asyncio.wait_for(scenario(), 120.0))


def withdrawal(by: Peer, peer: Peer) -> Withdrawal:
    body = withdrawal_body(by.node.peer.run_id, peer.name, peer.node.key)
    return Withdrawal(peer_id=peer.name, key=peer.node.key, signature=by.node._key.sign(body).hex())


def tell(peer: Peer, *withdrawn: Withdrawal) -> None:
    told = Converse(run_id=peer.node.peer.run_id, sender="somebody", height=0, withdrawn=withdrawn)
    HttpTransport(peer.node.join_string).ask(told)


def test_a_withdrawn_invitation_ends_a_membership_by_a_block_whoever_is_told(run: list[Peer]) -> None:
    founder, guest = run
    late = invited(founder, "late").join()
    run.append(late)
    tell(late, withdrawal(founder, guest))
    wait_until(lambda: members(founder) == members(late) == ["founder", "late"])
    agree([founder, late])
    with founder.node.lock:
        assert [member.peer_id for member in founder.node.peer.state.expelled] == ["guest"]
    assert members(founder) == ["founder", "late"]  # though the guest still asks, with its invitation
    assert [peer.node.failure for peer in (founder, late)] == ["", ""]


def test_whoever_is_withdrawn_before_it_comes_never_belongs(run: list[Peer]) -> None:
    founder, guest = run
    late = invited(founder, "late")
    run.append(late)
    tell(guest, withdrawal(founder, late))
    wait_until(lambda: [one.peer_id for one in founder.node.peer.state.expelled] == ["late"])
    late.begin(late.node.ask_terms(30.0))
    late.heal()
    late.node.belong()
    wait_until(lambda: late.node.key in founder.node.peer.contacts)
    for _ in range(3):
        agree([founder, guest])
    assert members(founder) == ["founder", "guest"]


def test_nobody_but_the_inviter_withdraws_anybody_and_not_even_it_itself(run: list[Peer]) -> None:
    founder, guest = run
    tell(founder, withdrawal(guest, founder), withdrawal(founder, founder))
    tell(guest, withdrawal(guest, guest))
    agree([founder, guest])
    assert members(founder) == members(guest) == ["founder", "guest"]
    assert founder.node.status().refused == {"somebody": 2}


def test_what_invite_cannot_do_it_says(tmp_path: Path) -> None:
    for peer_id, key in (("a b", "0" * 64), ("ben", "xyz")):
        with pytest.raises(ConfigError, match="wants a peer's id and its public key"):
            invite(tmp_path, peer_id, key)
    with pytest.raises(ConfigError, match="not the folder of a peer that has begun"):
        invite(tmp_path, "ben", "0" * 64)
