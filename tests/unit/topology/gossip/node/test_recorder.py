"""Nothing is said or acted on before it is on the disk; and the disk is written no more often than needed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import cast

import pytest

from outerstep.coordination.gossip import GossipPeer, GossipRules, Keepsake
from outerstep.coordination.gossip.chain import found
from outerstep.security.signing import make_key, verify
from outerstep.statements import ChainState, Decision, Member
from outerstep.topology.gossip.node.records import PeerFolder, Recorder
from outerstep.topology.gossip.node.shared import Shared
from support import wait_until


class SlowFolder:
    """A disk that writes when it is let."""

    place = "slow"

    def __init__(self) -> None:
        self.may_write = threading.Event()
        self.is_asked = threading.Event()
        self.kept: list[Keepsake] = []

    def keep(self, keepsake: Keepsake) -> None:
        self.is_asked.set()
        self.may_write.wait()
        self.kept.append(keepsake)


class Desk:
    """A run of one, which decides at once whatever it offers."""

    def __init__(self, folder: SlowFolder | None) -> None:
        key = make_key()
        member = Member(peer_id="a", key=key.public)
        state = found(member, 1)
        self.shared = Shared(lambda: 0.0)
        rules = GossipRules(min_peers=1)
        self.peer = GossipPeer(
            "run", member, key.sign, verify, rules, Keepsake(run_id="run", state=state), (8,), 0.0, address="a:1"
        )
        self.shared.begin(self.peer)
        self.decided: list[Decision] = []
        self.leaps: list[ChainState] = []
        self.recorder = Recorder(self.shared, cast(PeerFolder | None, folder), self.decided.append, self.leaps.append)
        self.recorder.start()

    def offer(self) -> None:
        with self.shared.lock:
            self.peer.offer(0, "d" * 64, "0" * 32, 0.0, steps=1)
            self.recorder.note()

    def is_kept(self) -> bool:
        with self.shared.lock:
            return self.recorder.wait_until_kept(0.0)


@pytest.fixture
def folder() -> SlowFolder:
    return SlowFolder()


@pytest.fixture
def desk(folder: SlowFolder) -> Iterator[Desk]:
    made = Desk(folder)
    yield made
    folder.may_write.set()
    assert made.shared.stop(5.0) == []


def test_a_block_is_acted_on_when_it_is_written(desk: Desk, folder: SlowFolder) -> None:
    desk.offer()
    folder.is_asked.wait(60.0)
    assert desk.peer.state.height == 1
    assert desk.decided == []
    assert not desk.is_kept()
    folder.may_write.set()
    wait_until(lambda: desk.decided)
    assert desk.is_kept()
    assert folder.kept[-1].state.height == 1


def test_changes_while_the_disk_is_busy_cost_one_more_write(desk: Desk, folder: SlowFolder) -> None:
    desk.offer()
    folder.is_asked.wait(60.0)
    for _ in range(5):
        desk.offer()
    folder.may_write.set()
    wait_until(desk.is_kept)
    assert len(folder.kept) == 2
    assert [decision.block.height for decision in desk.decided] == [1, 2, 3, 4, 5, 6]


def test_what_has_not_changed_is_not_written_again(desk: Desk, folder: SlowFolder) -> None:
    folder.may_write.set()
    desk.offer()
    wait_until(desk.is_kept)
    written = len(folder.kept)
    with desk.shared.lock:
        desk.peer.tick(0.0)
        desk.recorder.note()
    assert desk.is_kept()
    assert len(folder.kept) == written


def test_what_is_not_kept_is_not_waited_for() -> None:
    desk = Desk(None)
    desk.offer()
    assert [decision.block.height for decision in desk.decided] == [1]
    assert desk.is_kept()


def test_after_a_leap_blocks_are_taken_from_there(desk: Desk, folder: SlowFolder) -> None:
    ahead = ChainState(height=70, tip="1" * 64, members=desk.peer.state.members, versions=(30,))
    desk.offer()
    with desk.shared.lock:
        desk.recorder.leap(ahead)
    desk.offer()
    assert desk.leaps == []
    folder.may_write.set()
    wait_until(lambda: desk.decided and desk.decided[-1].block.height == 71)
    assert desk.leaps == [ahead]
    assert [decision.block.height for decision in desk.decided][-1:] == [71]
