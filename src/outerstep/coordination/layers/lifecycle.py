"""The life of a replica group: a table of its states and of what can happen in each of them.

    life = Lifecycle()                              # in INIT
    life.feed(Happening.FIRST_QUORUM)               # in TRAINING, compute
    life.feed(Happening.STEP_DUE, Happening.QUORUM_DONE)
    life.state, life.step                           # TRAINING, sync
    life.feed(Happening.ADVERTISE_JOIN)             # NoSuchEdge: TRAINING has no such edge

A *replica group* takes part in one layer under one name: a worker of a server, a replica of a torchft run, or a cluster
that is a worker of the server above. One table, `EDGES`, holds for all of them. Its states and sub-steps come from the
state diagram that the hierarchy was designed with. docs/concepts/lifecycle.md is made from this file and shows the two
side by side. `Edge.theirs` is the label in that diagram; "" = the edge is ours, and `why` gives its purpose.

A group is in one place at a time. A happening moves it along an edge. Or a rule with a reason (`IGNORED`) ignores the
happening and counts it. Anything else raises `NoSuchEdge`, because the caller is wrong about the group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import NamedTuple


class GroupState(StrEnum):
    """The states of a group; docs/concepts/lifecycle.md says what each means."""

    INIT = "INIT"
    TRAINING = "TRAINING"
    ROLLBACK = "ROLLBACK"
    IDLE = "IDLE"
    DRAINING = "DRAINING"
    REJOIN = "REJOIN"
    RECEIVED_JOIN = "RECEIVED_JOIN"
    EXIT = "EXIT"


class SubStep(StrEnum):
    """The place of a group within its state. INIT, IDLE and EXIT have no sub-steps."""

    NONE = ""
    # TRAINING: one round of its own layer
    COMPUTE = "compute"
    QUORUM = "quorum"
    SEND_CHECKPOINT = "send checkpoint"
    FETCH_CHECKPOINT = "fetch checkpoint"
    SYNC = "sync"
    VOTE = "vote"
    COMMIT = "commit"
    # TRAINING: the layer above, seen as a cluster's leader
    GLOBAL_QUORUM = "global quorum"
    GLOBAL_SEND_CHECKPOINT = "send global checkpoint"
    GLOBAL_FETCH_CHECKPOINT = "fetch global checkpoint"
    PSEUDOGRADIENT = "pseudo-gradient"
    GLOBAL_ALLREDUCE = "global all-reduce"
    BROADCAST = "broadcast"
    GLOBAL_VOTE = "global vote"
    GLOBAL_COMMIT = "global commit"
    GLOBAL_SHUTDOWN = "shut global group down"
    GLOBAL_RECONFIGURE = "reconfigure globally"
    # TRAINING: the layer above, seen as a follower
    WAIT_BROADCAST = "wait for broadcast"
    ASSIST = "assist"
    FOLLOWER_COMMIT = "follower's commit"
    # ROLLBACK
    TELL_ROLLBACK = "tell rollback"
    CANCEL = "cancel"
    # DRAINING: the group itself, or another group that it has noticed
    NOTICE_OTHERS = "notice others"
    LAST_COMMIT = "last commit"
    RUN_TO_COMMIT = "run to commit"
    SURVIVOR_COMMIT = "survivor's commit"
    # REJOIN
    ADVERTISE = "advertise"
    WAIT_CURRENT = "wait for the current round"
    # RECEIVED_JOIN
    FINISH_ROUND = "finish the round"
    ADVERTISE_COMMIT = "advertise commit"
    # rebuilding the process group, in any state that needs it
    SHUTDOWN = "shut group down"
    RECONFIGURE = "reconfigure"


class Happening(StrEnum):
    """What can happen to a group."""

    FIRST_QUORUM = "first_quorum"
    STEP_DUE = "step_due"
    QUORUM_DONE = "quorum_done"
    QUORUM_FAULT = "quorum_fault"
    MEMBERS_CHANGED = "members_changed"
    PEER_NEEDS_CHECKPOINT = "peer_needs_checkpoint"
    NEED_HEAL = "need_heal"
    CHECKPOINT_RETURN = "checkpoint_return"
    LOCAL_OK = "local_ok"
    GROUP_OK = "group_ok"
    NEXT_STEP = "next_step"
    LEAD_GLOBAL = "lead_global"
    FOLLOW_GLOBAL = "follow_global"
    CALC_DONE = "calc_done"
    ALLREDUCE_DONE = "allreduce_done"
    BROADCAST_DONE = "broadcast_done"
    BROADCAST_RECEIVED = "broadcast_received"
    ASSIST_ASKED = "assist_asked"
    ASSIST_DONE = "assist_done"
    GLOBAL_COMMITTED = "global_committed"
    GLOBAL_PUT_OFF = "global_put_off"
    FAULT = "fault"
    ROLLBACK_TOLD = "rollback_told"
    CANCELLED = "cancelled"
    GROUP_DOWN = "group_down"
    GROUP_READY = "group_ready"
    SELF_FAULT = "self_fault"
    ADVERTISE_JOIN = "advertise_join"
    JOIN_HEARD = "join_heard"
    COMMITS_SEEN = "commits_seen"
    RECEIVED_JOIN = "received_join"
    COMMIT_ADVERTISED = "commit_advertised"
    DRAIN_SELF = "drain_self"
    DRAIN_NOTICED = "drain_noticed"
    DRAIN_WITHDRAWN = "drain_withdrawn"
    LEFT = "left"
    PREEMPTED = "preempted"


class GroupPlace(NamedTuple):
    """A state and a sub-step of it."""

    state: GroupState
    step: SubStep = SubStep.NONE

    def __str__(self) -> str:
        return f"{self.state} ({self.step})" if self.step else str(self.state)


class Edge(NamedTuple):
    """An edge of the table. `source.step` NONE in a state with sub-steps: from each of them. `theirs`: the edge's label
    in the diagram that we follow; "" = that diagram lacks it, and `why` gives the reason for the edge."""

    source: GroupPlace
    happening: Happening
    target: GroupPlace
    theirs: str = ""
    why: str = ""


class NoSuchEdge(Exception):
    """This cannot happen to a group in that place. It is a bug, never a user's error, and stays inside."""


_S, _P, _H = GroupState, SubStep, Happening


def _training(step: SubStep) -> GroupPlace:
    return GroupPlace(_S.TRAINING, step)


INIT, IDLE, EXIT = GroupPlace(_S.INIT), GroupPlace(_S.IDLE), GroupPlace(_S.EXIT)
COMPUTING = _training(_P.COMPUTE)
ROLLING_BACK = GroupPlace(_S.ROLLBACK, _P.TELL_ROLLBACK)
LEAVING = GroupPlace(_S.DRAINING, _P.NOTICE_OTHERS)


def _round() -> Iterable[Edge]:
    """One round of the group's own layer."""
    quorum, sync, vote, commit = map(_training, (_P.QUORUM, _P.SYNC, _P.VOTE, _P.COMMIT))
    send, fetch = _training(_P.SEND_CHECKPOINT), _training(_P.FETCH_CHECKPOINT)
    yield Edge(INIT, _H.FIRST_QUORUM, COMPUTING, "first quorum / pg.configure()")
    yield Edge(COMPUTING, _H.STEP_DUE, quorum, "forward_done, backward_done")
    yield Edge(COMPUTING, _H.NEED_HEAL, fetch, why="a round closed without the group, so it is behind before it asks")
    yield Edge(quorum, _H.QUORUM_DONE, sync, "quorum_done")
    yield Edge(quorum, _H.PEER_NEEDS_CHECKPOINT, send, "pg_same & peer_needs_ckpt?")
    yield Edge(quorum, _H.NEED_HEAL, fetch, "pg_same & need_heal?")
    yield Edge(quorum, _H.MEMBERS_CHANGED, _training(_P.SHUTDOWN), "pg_diff")
    yield Edge(send, _H.CHECKPOINT_RETURN, sync, "checkpoint_return")
    yield Edge(fetch, _H.CHECKPOINT_RETURN, sync, "checkpoint_return")
    yield Edge(sync, _H.LOCAL_OK, vote, "local_ok (allreduce & quorum)")
    yield Edge(vote, _H.GROUP_OK, commit, "group_ok")
    yield Edge(commit, _H.NEXT_STEP, COMPUTING, "step++, no global sync")


def _leader() -> Iterable[Edge]:
    """A global sync, seen as the cluster's leader."""
    quorum, calc, reduce, spread, vote, commit = map(
        _training,
        (
            _P.GLOBAL_QUORUM,
            _P.PSEUDOGRADIENT,
            _P.GLOBAL_ALLREDUCE,
            _P.BROADCAST,
            _P.GLOBAL_VOTE,
            _P.GLOBAL_COMMIT,
        ),
    )
    send, fetch = _training(_P.GLOBAL_SEND_CHECKPOINT), _training(_P.GLOBAL_FETCH_CHECKPOINT)
    down, anew = _training(_P.GLOBAL_SHUTDOWN), _training(_P.GLOBAL_RECONFIGURE)
    yield Edge(_training(_P.COMMIT), _H.LEAD_GLOBAL, quorum, "local_commit; yes & leader")
    yield Edge(quorum, _H.QUORUM_DONE, calc, "quorum_ok")
    yield Edge(quorum, _H.PEER_NEEDS_CHECKPOINT, send, "quorum_ok")
    yield Edge(quorum, _H.NEED_HEAL, fetch, "quorum_ok")
    yield Edge(quorum, _H.QUORUM_FAULT, down, "quorum_fault")
    yield Edge(down, _H.GROUP_DOWN, anew, "pg_down && pg_other_fault (Err 1)")
    yield Edge(anew, _H.GROUP_READY, quorum, "pg_ready")
    yield Edge(send, _H.CHECKPOINT_RETURN, calc, "ckpt_done")
    yield Edge(fetch, _H.CHECKPOINT_RETURN, calc, "heal_done")
    yield Edge(calc, _H.CALC_DONE, reduce, "calc_done")
    yield Edge(reduce, _H.ALLREDUCE_DONE, spread, "allreduce_done")
    yield Edge(spread, _H.BROADCAST_DONE, vote, why="the diagram has no edge out of the broadcast")
    yield Edge(vote, _H.GROUP_OK, commit, "group_ok")
    yield Edge(commit, _H.GLOBAL_COMMITTED, COMPUTING, "global_commit")
    for waits in (quorum, reduce, down, anew):
        yield Edge(waits, _H.GLOBAL_PUT_OFF, COMPUTING, why="nobody above answers: the cluster's own rounds continue")


def _follower() -> Iterable[Edge]:
    """A global sync, seen as another member of the cluster."""
    wait, assist, commit = map(_training, (_P.WAIT_BROADCAST, _P.ASSIST, _P.FOLLOWER_COMMIT))
    yield Edge(_training(_P.COMMIT), _H.FOLLOW_GLOBAL, wait, "local_commit; yes & follower")
    yield Edge(COMPUTING, _H.FOLLOW_GLOBAL, wait, why="a version from above may arrive during the next steps")
    yield Edge(wait, _H.ASSIST_ASKED, assist, "send_ckpt_assist_message")
    yield Edge(assist, _H.ASSIST_DONE, wait, "assist_done")
    yield Edge(wait, _H.BROADCAST_RECEIVED, commit, "bcast_received")
    yield Edge(commit, _H.GLOBAL_COMMITTED, COMPUTING, "global_commit")
    yield Edge(wait, _H.GLOBAL_PUT_OFF, COMPUTING, why="members wait for the layer above up to a limit, then train on")


def _faults() -> Iterable[Edge]:
    """A fault cancels everything in progress. After another's fault the group is rebuilt. After its own it is idle."""
    told = GroupPlace(_S.ROLLBACK, _P.CANCEL)
    down, anew = GroupPlace(_S.ROLLBACK, _P.SHUTDOWN), GroupPlace(_S.ROLLBACK, _P.RECONFIGURE)
    yield Edge(GroupPlace(_S.TRAINING), _H.FAULT, ROLLING_BACK, "relevant_fault")
    for state in (_S.INIT, _S.DRAINING, _S.REJOIN, _S.RECEIVED_JOIN):
        yield Edge(GroupPlace(state), _H.FAULT, ROLLING_BACK, why="a fault can also happen before the group trains")
    yield Edge(ROLLING_BACK, _H.ROLLBACK_TOLD, told, "rollback_broadcasted")
    yield Edge(told, _H.CANCELLED, down, "futs_cancelled")
    yield Edge(down, _H.SELF_FAULT, IDLE, "self_fault (Err-2)")
    yield Edge(anew, _H.FAULT, ROLLING_BACK, why="a second fault while the group is being rebuilt: start again")
    yield Edge(IDLE, _H.ADVERTISE_JOIN, GroupPlace(_S.REJOIN, _P.ADVERTISE), "advertise_join")
    yield Edge(IDLE, _H.PREEMPTED, EXIT, "pre-empted")


def _joins() -> Iterable[Edge]:
    """A group rejoins, and the others receive it, both after the open round has closed."""
    advertise, wait = GroupPlace(_S.REJOIN, _P.ADVERTISE), GroupPlace(_S.REJOIN, _P.WAIT_CURRENT)
    finish = GroupPlace(_S.RECEIVED_JOIN, _P.FINISH_ROUND)
    told = GroupPlace(_S.RECEIVED_JOIN, _P.ADVERTISE_COMMIT)
    yield Edge(advertise, _H.JOIN_HEARD, wait, "ack_from_peers")
    yield Edge(wait, _H.COMMITS_SEEN, GroupPlace(_S.REJOIN, _P.SHUTDOWN), "all_commits_seen")
    yield Edge(GroupPlace(_S.TRAINING), _H.RECEIVED_JOIN, finish, "received_join")
    yield Edge(finish, _H.GROUP_OK, told, "run_until_commit")
    yield Edge(told, _H.COMMIT_ADVERTISED, GroupPlace(_S.RECEIVED_JOIN, _P.SHUTDOWN), "advertise_commit")


def _drains() -> Iterable[Edge]:
    """A group leaves, and the others notice. Both finish the open round."""
    last, exit_ = GroupPlace(_S.DRAINING, _P.LAST_COMMIT), EXIT
    run, survive = GroupPlace(_S.DRAINING, _P.RUN_TO_COMMIT), GroupPlace(_S.DRAINING, _P.SURVIVOR_COMMIT)
    down = GroupPlace(_S.DRAINING, _P.SHUTDOWN)
    yield Edge(GroupPlace(_S.TRAINING), _H.DRAIN_SELF, LEAVING, "drain_self")
    yield Edge(GroupPlace(_S.TRAINING), _H.DRAIN_NOTICED, run, "drain_noticed")
    for state in (_S.INIT, _S.ROLLBACK, _S.REJOIN, _S.RECEIVED_JOIN):
        yield Edge(GroupPlace(state), _H.DRAIN_SELF, LEAVING, why="an order to leave holds in any state")
    for noticed in (run, survive, down, GroupPlace(_S.DRAINING, _P.RECONFIGURE)):
        yield Edge(noticed, _H.DRAIN_SELF, LEAVING, why="a group that noticed a drain may be told to leave, too")
    yield Edge(LEAVING, _H.GROUP_OK, last, "local_ok / implicit_sync")
    yield Edge(last, _H.LEFT, exit_, "if_drainer")
    yield Edge(LEAVING, _H.LEFT, exit_, why="nothing is left to commit, or the time for it is over")
    yield Edge(LEAVING, _H.DRAIN_WITHDRAWN, COMPUTING, why="the order was withdrawn before the group obeyed it")
    yield Edge(last, _H.DRAIN_WITHDRAWN, COMPUTING, why="the order was withdrawn before the group obeyed it")
    yield Edge(run, _H.GROUP_OK, survive, "proceed_to_commit")
    yield Edge(survive, _H.MEMBERS_CHANGED, down, "if_survivor | collective_timeout")


def _reconfigures() -> Iterable[Edge]:
    """The process group is shut down and rebuilt. Until it is ready, the group stays in the state that needed it. If a
    quorum showed the need, the group asks for that quorum again."""
    for state in (_S.TRAINING, _S.ROLLBACK, _S.DRAINING, _S.REJOIN, _S.RECEIVED_JOIN):
        down, anew = GroupPlace(state, _P.SHUTDOWN), GroupPlace(state, _P.RECONFIGURE)
        yield Edge(down, _H.GROUP_DOWN, anew, "pg_down && pg_other_fault (Err 1)")
        yield Edge(anew, _H.GROUP_READY, _training(_P.QUORUM) if state is _S.TRAINING else COMPUTING, "pg_ready")


EDGES: tuple[Edge, ...] = (
    *_round(),
    *_leader(),
    *_follower(),
    *_faults(),
    *_joins(),
    *_drains(),
    *_reconfigures(),
)
"""Everything that may happen. The groups, the diagram and the tests all use this table."""

_GONE = "it has left"
_APART = "it does not train, so it has nothing in progress"
_ANEW = "it will meet the others again anyway"

IGNORED: Mapping[tuple[GroupState, Happening], str] = {
    **{(_S.EXIT, what): _GONE for what in (_H.FAULT, _H.DRAIN_SELF, _H.DRAIN_NOTICED, _H.RECEIVED_JOIN, _H.LEFT)},
    **{(_S.IDLE, what): _APART for what in (_H.FAULT, _H.DRAIN_SELF, _H.DRAIN_NOTICED, _H.RECEIVED_JOIN)},
    **{(state, _H.RECEIVED_JOIN): _ANEW for state in (_S.INIT, _S.ROLLBACK, _S.REJOIN, _S.RECEIVED_JOIN)},
    **{(state, _H.DRAIN_NOTICED): _ANEW for state in (_S.INIT, _S.ROLLBACK, _S.REJOIN, _S.RECEIVED_JOIN)},
    (_S.DRAINING, _H.RECEIVED_JOIN): "it leaves, or rebuilds its group when this round has closed",
    (_S.DRAINING, _H.DRAIN_NOTICED): "it leaves itself, or has noticed a drain: one rebuilt group serves both",
    (_S.DRAINING, _H.DRAIN_SELF): "it drains already",
    (_S.ROLLBACK, _H.FAULT): "it is rolling back already",
}
"""Happenings that may reach a group without effect, and why that is no error. An edge takes precedence."""


_ALONE = "the server above holds the model: no cluster sends or takes a checkpoint of the layer above"
_NO_HELP = "the leader sends everything itself and asks no follower for help"
_ONE_VOTE = "a contribution is ready and stored before it is known whether anybody answers"

RESERVED: Mapping[tuple[GroupPlace, Happening], str] = {
    (_training(_P.GLOBAL_QUORUM), _H.PEER_NEEDS_CHECKPOINT): _ALONE,
    (_training(_P.GLOBAL_QUORUM), _H.NEED_HEAL): _ALONE,
    (_training(_P.GLOBAL_SEND_CHECKPOINT), _H.CHECKPOINT_RETURN): _ALONE,
    (_training(_P.GLOBAL_FETCH_CHECKPOINT), _H.CHECKPOINT_RETURN): _ALONE,
    (_training(_P.WAIT_BROADCAST), _H.ASSIST_ASKED): _NO_HELP,
    (_training(_P.ASSIST), _H.ASSIST_DONE): _NO_HELP,
    (_training(_P.GLOBAL_QUORUM), _H.GLOBAL_PUT_OFF): _ONE_VOTE,
    (_training(_P.GLOBAL_SHUTDOWN), _H.GLOBAL_PUT_OFF): "there is a server, so no shutdown can take long",
    (
        _training(_P.GLOBAL_RECONFIGURE),
        _H.GLOBAL_PUT_OFF,
    ): "the cluster stays there until the layer above answers again",
    (_training(_P.COMMIT), _H.FOLLOW_GLOBAL): "a server learns of the exchange after its members' next steps began",
}
"""Edges of that diagram that nothing in outerstep takes today, and why."""


def _places() -> dict[GroupState, tuple[SubStep, ...]]:
    found: dict[GroupState, dict[SubStep, None]] = {state: {} for state in GroupState}
    for edge in EDGES:
        for place in (edge.source, edge.target):
            if place.step:
                found[place.state][place.step] = None
    return {state: tuple(steps) or (SubStep.NONE,) for state, steps in found.items()}


STEPS: Mapping[GroupState, tuple[SubStep, ...]] = _places()
"""The sub-steps of each state, in the order of the table."""

PLACES: tuple[GroupPlace, ...] = tuple(GroupPlace(state, step) for state, steps in STEPS.items() for step in steps)

_IN_WORDS: frozenset[str] = frozenset(map(str, PLACES))


def known_place(said: str) -> str:
    """The place that a group reports, or "" if there is no such place."""
    return said if said in _IN_WORDS else ""


EdgeTable = Mapping[tuple[GroupPlace, Happening], GroupPlace]


def targets(edges: Iterable[Edge] = EDGES) -> EdgeTable:
    """(place, happening) → the next place. An edge from a whole state starts at each of its sub-steps."""
    found: dict[tuple[GroupPlace, Happening], GroupPlace] = {}
    for edge in edges:
        steps = (edge.source.step,) if edge.source.step else STEPS[edge.source.state]
        for step in steps:
            key = GroupPlace(edge.source.state, step), edge.happening
            assert key not in found, f"two edges from {key[0]} on {key[1]}"
            found[key] = edge.target
    return found


TARGETS: EdgeTable = targets()


def possible(place: GroupPlace) -> tuple[Happening, ...]:
    """The happenings that move a group from this place."""
    return tuple(happening for happening in Happening if (place, happening) in TARGETS)


class Lifecycle:
    """The life of one group. `at`: where it starts. `table`: replaces ours in tests."""

    __slots__ = ("ignored", "place", "table")

    def __init__(self, at: GroupPlace = INIT, table: EdgeTable = TARGETS) -> None:
        self.place = at
        self.table = table
        self.ignored: Counter[tuple[GroupState, Happening]] = Counter()

    @property
    def state(self) -> GroupState:
        return self.place.state

    @property
    def step(self) -> SubStep:
        return self.place.step

    @property
    def has_ended(self) -> bool:
        """The group has left for good. A restart under the same name is a new life."""
        return self.place == EXIT

    def feed(self, *happenings: Happening) -> GroupPlace:
        """Apply these happenings in order. Returns the group's new place."""
        for happening in happenings:
            target = self.table.get((self.place, happening))
            if target is not None:
                self.place = target
            elif (self.state, happening) in IGNORED:
                self.ignored[self.state, happening] += 1
            else:
                raise NoSuchEdge(f"{happening} cannot happen to a group in {self.place}")
        return self.place

    def may(self, happening: Happening) -> bool:
        """Is there an edge for this happening?"""
        return (self.place, happening) in self.table


class TrackedLife:
    """A life that follows decisions made elsewhere. `unclear`: a happening that the table does not allow. Such a
    bug must stop nobody; the place is unknown from then on. `life`: an existing life to follow."""

    def __init__(self, life: Lifecycle | None = None) -> None:
        self._life = Lifecycle(INIT) if life is None else life
        self.unclear = ""

    @property
    def place(self) -> str:
        return "" if self.unclear else str(self._life.place)

    def _feed(self, *happenings: Happening) -> None:
        try:
            if not self.unclear:
                self._life.feed(*happenings)
        except NoSuchEdge as error:
            self.unclear = str(error)


BREAKS_DOWN = (_H.FAULT, _H.ROLLBACK_TOLD, _H.CANCELLED, _H.SELF_FAULT)
"""A group's own fault, seen from outside: everything that it had in progress is cancelled, and it is idle."""

ANOTHERS_FAULT = (_H.FAULT, _H.ROLLBACK_TOLD, _H.CANCELLED, _H.GROUP_DOWN)
"""Another group's fault: everything in progress is cancelled, and the group waits to meet the others again."""

COMES_BACK = (_H.ADVERTISE_JOIN, _H.JOIN_HEARD)
"""The group has rejoined, and waits for the open round to close."""

IS_TAKEN_IN = (_H.COMMITS_SEEN, _H.GROUP_DOWN, _H.GROUP_READY)
"""That round has closed: the group takes part from now on."""
