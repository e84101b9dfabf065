"""The life of a cluster that is a worker of the layer above, as its leader sees it.

    machine.life.place                 # TRAINING (reconfigure globally): nobody above answers

`ClusterMachine` reports what happens; this file translates that into the table (lifecycle.py). The cluster's own rounds
count as its computing. An exchange with the layer above is a global sync, seen as the leader:

    global quorum           the last round before an exchange has closed
    pseudo-gradient         the contribution is ready, and the layer below stores the record of it
    global all-reduce       the contribution is sent, and its round above is open
    broadcast               the agreement is moving into the layer below
    global commit           the layer below has the agreement, and members continue
    reconfigure globally    nobody above answers. The cluster's own rounds continue, so this is no rollback

A cluster that has lost the layer above for good is idle.
"""

from __future__ import annotations

from .lifecycle import (
    BREAKS_DOWN,
    COMES_BACK,
    COMPUTING,
    IDLE,
    IS_TAKEN_IN,
    GroupPlace,
    GroupState,
    Happening,
    Lifecycle,
    SubStep,
    TrackedLife,
)

OWN_ROUND = (Happening.STEP_DUE, Happening.QUORUM_DONE, Happening.LOCAL_OK, Happening.GROUP_OK)
"""A round of the layer below has closed."""


def _leading(step: SubStep) -> GroupPlace:
    return GroupPlace(GroupState.TRAINING, step)


CALCULATING, REDUCING = _leading(SubStep.PSEUDOGRADIENT), _leading(SubStep.GLOBAL_ALLREDUCE)
SPREADING, COMMITTING = _leading(SubStep.BROADCAST), _leading(SubStep.GLOBAL_COMMIT)
UNHEARD = _leading(SubStep.GLOBAL_RECONFIGURE)


class ClusterLife(TrackedLife):
    """A cluster's life, told in the words of its machine."""

    def was_here(self) -> None:
        """The record shows an earlier leader: this process resumes the life of a process that is gone."""
        self._life = Lifecycle(IDLE)

    def joined(self) -> None:
        if self._life.state is GroupState.IDLE:
            self._feed(*COMES_BACK, *IS_TAKEN_IN)
        elif self._life.state is GroupState.INIT:
            self._feed(Happening.FIRST_QUORUM)

    def sent(self) -> None:
        """A contribution is ready. Its record is being stored."""
        if self._life.place == COMPUTING:
            self._feed(*OWN_ROUND, Happening.LEAD_GLOBAL, Happening.QUORUM_DONE)

    def let_go(self) -> None:
        """The record is stored, and the contribution may be sent."""
        if self._life.place == CALCULATING:
            self._feed(Happening.CALC_DONE)

    def exchanged(self, *, answered: bool, moved: bool) -> None:
        """`answered`: no exchange has failed to reach the layer above. `moved`: there is an agreement."""
        if self._life.state is GroupState.DRAINING:
            if answered and self._life.step is SubStep.NOTICE_OTHERS:
                self._feed(Happening.GROUP_OK)
        elif not answered:
            self._put_off()
            if self._life.place == COMPUTING:
                self._feed(*OWN_ROUND, Happening.LEAD_GLOBAL, Happening.QUORUM_FAULT, Happening.GROUP_DOWN)
        elif moved:
            if self._life.place == UNHEARD:
                self._feed(Happening.GROUP_READY, Happening.QUORUM_DONE)
            self.let_go()
            if self._life.place == REDUCING:
                self._feed(Happening.ALLREDUCE_DONE)

    def _put_off(self) -> None:
        """The exchange in progress has failed."""
        self.let_go()
        if self._life.place == REDUCING:
            self._feed(Happening.GLOBAL_PUT_OFF)

    def moved_below(self) -> None:
        """The layer below has the agreement."""
        if self._life.place == SPREADING:
            self._feed(Happening.BROADCAST_DONE, Happening.GROUP_OK)

    def handed_down(self) -> None:
        """The members continue."""
        if self._life.place == COMMITTING:
            self._feed(Happening.GLOBAL_COMMITTED)

    def drains(self) -> None:
        """The cluster contributes the rest and leaves."""
        self._feed(Happening.DRAIN_SELF)

    def left(self) -> None:
        """The cluster has left, whether or not it ever joined."""
        if self._life.state is GroupState.INIT:
            self._feed(Happening.DRAIN_SELF)
        if self._life.state is GroupState.DRAINING:
            self._feed(Happening.LEFT)

    def lost(self) -> None:
        """The layer above is lost for good, or another process speaks for the cluster now."""
        if self._life.state not in (GroupState.IDLE, GroupState.EXIT):
            self._feed(*BREAKS_DOWN)
