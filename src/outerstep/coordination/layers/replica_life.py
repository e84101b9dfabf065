"""The life of a torchft replica, as its own rounds show it (topology/torchft/rounds.py).

A replica shares a process group with the others, so every change of the group concerns it. A larger quorum means that
the replica received a join. A smaller quorum means that the group is rebuilt. A failed vote rolls the round back until
the next quorum has met. In a cluster, a replica at the end of its training announces that: the others notice a drain,
continue their rounds, and rebuild the group when that replica has left.
"""

from __future__ import annotations

from .lifecycle import ANOTHERS_FAULT, COMPUTING, GroupState, Happening, Lifecycle, SubStep, TrackedLife

MAKES_ROOM = (Happening.RECEIVED_JOIN, Happening.GROUP_OK, Happening.COMMIT_ADVERTISED)
ANEW = (Happening.GROUP_DOWN, Happening.GROUP_READY)
BEFORE_A_COMMIT = (SubStep.NOTICE_OTHERS, SubStep.RUN_TO_COMMIT)


class ReplicaLife(TrackedLife):
    """A replica's life. `replicas`: how many its last quorum had."""

    def __init__(self, life: Lifecycle | None = None) -> None:
        super().__init__(life)
        self.replicas = 0

    def meets(self) -> None:
        """The replica asks for a quorum."""
        if self._life.place == COMPUTING:
            self._feed(Happening.STEP_DUE)

    def met(self, replicas: int, *, healed: bool, heals: bool = False) -> None:
        """A quorum of this many replicas has met. `healed`: this one was behind and received a state. `heals`: it sent
        one."""
        before, self.replicas = self.replicas, replicas
        if self._life.state is GroupState.INIT:
            self._feed(Happening.FIRST_QUORUM)
        elif self._life.state is GroupState.ROLLBACK:
            self._feed(Happening.GROUP_READY)
        elif self._life.step is SubStep.SURVIVOR_COMMIT and replicas < before:
            self._feed(Happening.MEMBERS_CHANGED, *ANEW)
        elif self._life.state is not GroupState.TRAINING:
            return  # it drains, or has noticed a drain: its rounds continue meanwhile
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
        """In a cluster's quorum: is this replica, or another one, at the end of its training?"""
        if ends:
            self._feed(Happening.DRAIN_SELF)
        elif another_ends:
            self._feed(Happening.DRAIN_NOTICED)

    def agreed(self) -> None:
        """The vote succeeded."""
        if self._life.state is not GroupState.DRAINING:
            self._feed(Happening.LOCAL_OK, Happening.GROUP_OK, Happening.NEXT_STEP)
        elif self._life.step in BEFORE_A_COMMIT:
            self._feed(Happening.GROUP_OK)

    def failed(self) -> None:
        """Something broke, or the vote failed: the round is rolled back."""
        self._feed(*ANOTHERS_FAULT)

    def left(self) -> None:
        self._feed(Happening.DRAIN_SELF, Happening.LEFT)
