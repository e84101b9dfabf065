"""The life of a cluster that is a worker of the layer above, as its own leader knows it.

    machine.life.place                 # TRAINING (reconfigure globally): nobody above answers

`ClusterMachine` says what happens; here is what that means in the table (lifecycle.py). Its own rounds are what the
cluster computes, seen from here; what it does above is a global sync, as its leader goes through it:

    global quorum           a round has closed after which it exchanges
    pseudo-gradient         the contribution is ready, and the layer below keeps the record of it
    global all-reduce       it is let go, and its round above is open
    broadcast               what was agreed is on its way into the layer below
    global commit           it is there, and members go on
    reconfigure globally    nobody above answers. Its own rounds go on; so this is no rollback

A cluster that has lost the layer above for good stands idle.
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
    def was_here(self) -> None:
        """The record says so: this process takes up the life of one that is gone."""
        self._life = Lifecycle(IDLE)

    def joined(self) -> None:
        if self._life.state is GroupState.IDLE:
            self._feed(*COMES_BACK, *IS_TAKEN_IN)
        elif self._life.state is GroupState.INIT:
            self._feed(Happening.FIRST_QUORUM)

    def sent(self) -> None:
        """A contribution is ready, and is being kept."""
        if self._life.place == COMPUTING:
            self._feed(*OWN_ROUND, Happening.LEAD_GLOBAL, Happening.QUORUM_DONE)

    def let_go(self) -> None:
        """It is kept, and on its way."""
        if self._life.place == CALCULATING:
            self._feed(Happening.CALC_DONE)

    def exchanged(self, *, answered: bool, moved: bool) -> None:
        """`answered`: no exchange has found nobody. (There may have been none.) `moved`: there is an agreement."""
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
        """What is under way above comes to nothing."""
        self.let_go()
        if self._life.place == REDUCING:
            self._feed(Happening.GLOBAL_PUT_OFF)

    def moved_below(self) -> None:
        """What was agreed is in the layer below."""
        if self._life.place == SPREADING:
            self._feed(Happening.BROADCAST_DONE, Happening.GROUP_OK)

    def handed_down(self) -> None:
        """And its members go on."""
        if self._life.place == COMMITTING:
            self._feed(Happening.GLOBAL_COMMITTED)

    def drains(self) -> None:
        """It contributes what is left, and leaves."""
        self._feed(Happening.DRAIN_SELF)

    def left(self) -> None:
        """Whether or not it has ever joined."""
        if self._life.state is GroupState.INIT:
            self._feed(Happening.DRAIN_SELF)
        if self._life.state is GroupState.DRAINING:
            self._feed(Happening.LEFT)

    def lost(self) -> None:
        """For good, or this process must not speak for the cluster any more."""
        if self._life.state not in (GroupState.IDLE, GroupState.EXIT):
            self._feed(*BREAKS_DOWN)
