"""The life of a torchft replica, as its own rounds tell it (topology/torchft/rounds.py).

A replica shares a process group with the others, so their comings and goings are its own: a quorum that has grown is a
join that it received, one that has shrunk makes the group anew, and a vote that fails rolls its round back until the
next quorum has met. A replica of a cluster that is at the end of its training says so: the others have noticed a drain,
go on with their rounds, and make their group anew when it has left.
"""

from __future__ import annotations

from .lifecycle import ANOTHERS_FAULT, COMPUTING, GroupState, Happening, Lifecycle, SubStep, TrackedLife

MAKES_ROOM = (Happening.RECEIVED_JOIN, Happening.GROUP_OK, Happening.COMMIT_ADVERTISED)
ANEW = (Happening.GROUP_DOWN, Happening.GROUP_READY)
BEFORE_A_COMMIT = (SubStep.NOTICE_OTHERS, SubStep.RUN_TO_COMMIT)


class ReplicaLife(TrackedLife):
    """`replicas`: in its last quorum."""

    def __init__(self, life: Lifecycle | None = None) -> None:
        super().__init__(life)
        self.replicas = 0

    def meets(self) -> None:
        """It asks for a quorum."""
        if self._life.place == COMPUTING:
            self._feed(Happening.STEP_DUE)

    def met(self, replicas: int, *, healed: bool, heals: bool = False) -> None:
        """So many are in it. `healed`: it was behind, and was given the state of another; `heals`: it gave its own."""
        before, self.replicas = self.replicas, replicas
        if self._life.state is GroupState.INIT:
            self._feed(Happening.FIRST_QUORUM)
        elif self._life.state is GroupState.ROLLBACK:
            self._feed(Happening.GROUP_READY)
        elif self._life.step is SubStep.SURVIVOR_COMMIT and replicas < before:
            self._feed(Happening.MEMBERS_CHANGED, *ANEW)
        elif self._life.state is not GroupState.TRAINING:
            return  # it drains, or has noticed a drain: its rounds go on meanwhile
        elif replicas > before:
            self._feed(*MAKES_ROOM, *ANEW)
        elif replicas < before:
            self._feed(Happening.MEMBERS_CHANGED, *ANEW)
        self.meets()
        if healed:
            self._feed(Happening.NEED_HEAL, Happening.CHECKPOINT_RETURN)
        elif heals:
            self._feed(Happening.PEER_NEEDS_CHECKPOINT, Happening.CHECKPOINT_RETURN)
        else:
            self._feed(Happening.QUORUM_DONE)

    def heard(self, *, ends: bool, another_ends: bool) -> None:
        """In a quorum of a cluster: whether it is at the end of its training itself, or another one is."""
        if ends:
            self._feed(Happening.DRAIN_SELF)
        elif another_ends:
            self._feed(Happening.DRAIN_NOTICED)

    def agreed(self) -> None:
        """The vote was carried."""
        if self._life.state is not GroupState.DRAINING:
            self._feed(Happening.LOCAL_OK, Happening.GROUP_OK, Happening.NEXT_STEP)
        elif self._life.step in BEFORE_A_COMMIT:
            self._feed(Happening.GROUP_OK)

    def failed(self) -> None:
        """Something broke, or the vote was not carried: the round is as if it had not been."""
        self._feed(*ANOTHERS_FAULT)

    def left(self) -> None:
        self._feed(Happening.DRAIN_SELF, Happening.LEFT)
