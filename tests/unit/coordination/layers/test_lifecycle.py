"""The life of a replica group, state by state, and what holds for every life."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outerstep.coordination.layers.lifecycle import (
    BREAKS_DOWN,
    COMES_BACK,
    COMPUTING,
    EDGES,
    EXIT,
    IDLE,
    IGNORED,
    INIT,
    IS_TAKEN_IN,
    LEAVING,
    PLACES,
    ROLLING_BACK,
    STEPS,
    TARGETS,
    GroupPlace,
    GroupState,
    Happening,
    Lifecycle,
    NoSuchEdge,
    SubStep,
    possible,
    targets,
)

S, P, H = GroupState, SubStep, Happening


def walked(life: Lifecycle, *happenings: Happening) -> list[str]:
    """The sub-steps that these lead through."""
    return [life.feed(happening).step for happening in happenings]


class TestInit:
    def test_a_group_begins_with_nothing_and_trains_from_its_first_quorum_on(self) -> None:
        life = Lifecycle()
        assert life.place == INIT
        assert life.feed(H.FIRST_QUORUM) == COMPUTING

    def test_a_group_that_breaks_before_it_trained_rolls_nothing_back_and_stands_idle(self) -> None:
        assert Lifecycle().feed(*BREAKS_DOWN) == IDLE

    def test_a_group_that_is_told_to_go_before_it_trained_leaves(self) -> None:
        assert Lifecycle().feed(H.DRAIN_SELF, H.LEFT) == EXIT


class TestTraining:
    def test_a_round_goes_from_compute_over_quorum_sync_and_vote_to_its_commit(self) -> None:
        life = Lifecycle(COMPUTING)
        steps = walked(life, H.STEP_DUE, H.QUORUM_DONE, H.LOCAL_OK, H.GROUP_OK, H.NEXT_STEP)
        assert steps == ["quorum", "sync", "vote", "commit", "compute"]

    @pytest.mark.parametrize(
        ("found", "step"), [(H.NEED_HEAL, P.FETCH_CHECKPOINT), (H.PEER_NEEDS_CHECKPOINT, P.SEND_CHECKPOINT)]
    )
    def test_healing_comes_before_the_sync_of_the_same_round(self, found: Happening, step: SubStep) -> None:
        life = Lifecycle(COMPUTING)
        assert walked(life, H.STEP_DUE, found, H.CHECKPOINT_RETURN) == ["quorum", step, "sync"]

    def test_a_group_that_missed_a_round_is_behind_and_syncs_when_it_has_caught_up(self) -> None:
        life = Lifecycle(COMPUTING)
        assert walked(life, H.NEED_HEAL, H.CHECKPOINT_RETURN) == ["fetch checkpoint", "sync"]

    def test_a_quorum_of_others_makes_the_process_group_anew_and_is_asked_for_again(self) -> None:
        life = Lifecycle(COMPUTING)
        steps = walked(life, H.STEP_DUE, H.MEMBERS_CHANGED, H.GROUP_DOWN, H.GROUP_READY, H.QUORUM_DONE)
        assert steps == ["quorum", "shut group down", "reconfigure", "quorum", "sync"]
        assert life.state is S.TRAINING

    def test_a_leader_goes_through_a_global_sync_after_its_commit(self) -> None:
        life = Lifecycle(GroupPlace(S.TRAINING, P.COMMIT))
        steps = walked(life, H.LEAD_GLOBAL, H.QUORUM_DONE, H.CALC_DONE, H.ALLREDUCE_DONE, H.BROADCAST_DONE, H.GROUP_OK)
        assert steps == [
            *("global quorum", "pseudo-gradient", "global all-reduce", "broadcast", "global vote", "global commit")
        ]
        assert life.feed(H.GLOBAL_COMMITTED) == COMPUTING

    def test_a_global_quorum_that_fails_is_made_anew_without_leaving_training(self) -> None:
        life = Lifecycle(GroupPlace(S.TRAINING, P.GLOBAL_QUORUM))
        life.feed(H.QUORUM_FAULT, H.GROUP_DOWN)
        assert life.place == (S.TRAINING, P.GLOBAL_RECONFIGURE)
        assert life.feed(H.GROUP_READY).step is P.GLOBAL_QUORUM

    def test_a_leader_whom_nobody_above_answers_goes_on_with_its_own_rounds(self) -> None:
        for step in (P.GLOBAL_QUORUM, P.GLOBAL_ALLREDUCE, P.GLOBAL_RECONFIGURE):
            assert Lifecycle(GroupPlace(S.TRAINING, step)).feed(H.GLOBAL_PUT_OFF) == COMPUTING

    def test_a_follower_waits_for_what_its_leader_brings(self) -> None:
        life = Lifecycle(GroupPlace(S.TRAINING, P.COMMIT))
        steps = walked(life, H.FOLLOW_GLOBAL, H.BROADCAST_RECEIVED, H.GLOBAL_COMMITTED)
        assert steps == ["wait for broadcast", "follower's commit", "compute"]

    def test_a_follower_that_has_assisted_still_waits_for_the_broadcast(self) -> None:
        life = Lifecycle(GroupPlace(S.TRAINING, P.WAIT_BROADCAST))
        assert walked(life, H.ASSIST_ASKED, H.ASSIST_DONE) == ["assist", "wait for broadcast"]

    def test_a_follower_does_not_wait_for_the_layer_above_for_ever(self) -> None:
        assert Lifecycle(GroupPlace(S.TRAINING, P.WAIT_BROADCAST)).feed(H.GLOBAL_PUT_OFF) == COMPUTING

    @pytest.mark.parametrize("step", STEPS[S.TRAINING])
    def test_wherever_it_is_a_fault_rolls_back_and_a_drain_drains(self, step: SubStep) -> None:
        there = GroupPlace(S.TRAINING, step)
        assert Lifecycle(there).feed(H.FAULT) == ROLLING_BACK
        assert Lifecycle(there).feed(H.DRAIN_SELF) == LEAVING
        assert Lifecycle(there).feed(H.DRAIN_NOTICED).step is P.RUN_TO_COMMIT
        assert Lifecycle(there).feed(H.RECEIVED_JOIN).state is S.RECEIVED_JOIN


class TestRollback:
    def test_anothers_fault_is_over_when_the_process_group_is_made_anew(self) -> None:
        life = Lifecycle(COMPUTING)
        happened = (H.FAULT, H.ROLLBACK_TOLD, H.CANCELLED, H.GROUP_DOWN, H.GROUP_READY)
        assert walked(life, *happened) == ["tell rollback", "cancel", "shut group down", "reconfigure", "compute"]
        assert life.place == COMPUTING

    def test_its_own_fault_leaves_it_idle(self) -> None:
        assert Lifecycle(COMPUTING).feed(*BREAKS_DOWN) == IDLE

    def test_a_second_fault_while_the_group_is_made_anew_begins_again(self) -> None:
        assert Lifecycle(GroupPlace(S.ROLLBACK, P.RECONFIGURE)).feed(H.FAULT) == ROLLING_BACK

    def test_a_second_fault_before_that_changes_nothing_and_is_counted(self) -> None:
        life = Lifecycle(ROLLING_BACK)
        assert life.feed(H.FAULT) == ROLLING_BACK
        assert life.ignored == {(S.ROLLBACK, H.FAULT): 1}


class TestIdleAndRejoin:
    def test_an_idle_group_comes_back_and_waits_for_the_round_that_is_open(self) -> None:
        life = Lifecycle(IDLE)
        assert life.feed(*COMES_BACK) == (S.REJOIN, P.WAIT_CURRENT)
        assert life.feed(*IS_TAKEN_IN) == COMPUTING

    def test_an_idle_group_that_is_pre_empted_is_gone(self) -> None:
        assert Lifecycle(IDLE).feed(H.PREEMPTED) == EXIT

    def test_an_idle_group_does_not_hear_of_the_others(self) -> None:
        life = Lifecycle(IDLE)
        assert life.feed(H.FAULT, H.DRAIN_NOTICED, H.RECEIVED_JOIN) == IDLE
        assert life.ignored.total() == 3

    def test_a_group_that_breaks_on_its_way_back_is_idle_again(self) -> None:
        for step in STEPS[S.REJOIN]:
            assert Lifecycle(GroupPlace(S.REJOIN, step)).feed(*BREAKS_DOWN) == IDLE


class TestReceivedJoin:
    def test_the_others_finish_their_round_before_they_make_room(self) -> None:
        life = Lifecycle(COMPUTING)
        steps = walked(life, H.RECEIVED_JOIN, H.GROUP_OK, H.COMMIT_ADVERTISED, H.GROUP_DOWN, H.GROUP_READY)
        assert steps == ["finish the round", "advertise commit", "shut group down", "reconfigure", "compute"]

    def test_a_second_join_meanwhile_needs_no_second_group(self) -> None:
        life = Lifecycle(COMPUTING)
        life.feed(H.RECEIVED_JOIN, H.RECEIVED_JOIN)
        assert (life.state, life.ignored.total()) == (S.RECEIVED_JOIN, 1)


class TestDraining:
    def test_who_drains_commits_once_more_and_leaves(self) -> None:
        life = Lifecycle(COMPUTING)
        assert walked(life, H.DRAIN_SELF, H.GROUP_OK) == ["notice others", "last commit"]
        assert life.feed(H.LEFT) == EXIT

    def test_who_has_nothing_left_to_commit_leaves_at_once(self) -> None:
        assert Lifecycle(LEAVING).feed(H.LEFT) == EXIT

    def test_who_notices_a_drain_commits_with_it_and_goes_on_in_a_smaller_group(self) -> None:
        life = Lifecycle(COMPUTING)
        steps = walked(life, H.DRAIN_NOTICED, H.GROUP_OK, H.MEMBERS_CHANGED, H.GROUP_DOWN, H.GROUP_READY)
        assert steps == ["run to commit", "survivor's commit", "shut group down", "reconfigure", "compute"]

    def test_who_notices_a_drain_may_be_told_to_go_too(self) -> None:
        for step in (P.RUN_TO_COMMIT, P.SURVIVOR_COMMIT, P.SHUTDOWN, P.RECONFIGURE):
            assert Lifecycle(GroupPlace(S.DRAINING, step)).feed(H.DRAIN_SELF) == LEAVING

    def test_a_drain_that_is_withdrawn_in_time_leaves_the_group_training(self) -> None:
        assert Lifecycle(LEAVING).feed(H.DRAIN_WITHDRAWN) == COMPUTING

    def test_who_noticed_a_drain_cannot_leave_for_it(self) -> None:
        with pytest.raises(NoSuchEdge, match=r"left cannot happen to a group in DRAINING \(run to commit\)"):
            Lifecycle(COMPUTING).feed(H.DRAIN_NOTICED, H.LEFT)


class TestExit:
    def test_nothing_moves_a_group_that_has_left(self) -> None:
        assert possible(EXIT) == ()
        life = Lifecycle(EXIT)
        assert life.has_ended
        life.feed(H.FAULT, H.DRAIN_NOTICED)
        assert life.place == EXIT
        with pytest.raises(NoSuchEdge, match="first_quorum cannot happen to a group in EXIT"):
            life.feed(H.FIRST_QUORUM)


class TestEveryLife:
    def test_every_place_can_be_reached(self) -> None:
        reached, new = {INIT}, {INIT}
        while new:
            new = {TARGETS[place, what] for place in new for what in possible(place)} - reached
            reached |= new
        assert reached == set(PLACES)

    @pytest.mark.parametrize("place", [place for place in PLACES if place != EXIT], ids=str)
    def test_from_everywhere_but_exit_a_group_can_train_again(self, place: GroupPlace) -> None:
        reached, new = {place}, {place}
        while new:
            new = {TARGETS[at, what] for at in new for what in possible(at)} - reached
            reached |= new
        assert COMPUTING in reached
        assert EXIT in reached

    def test_every_happening_has_an_edge_and_every_edge_a_reason(self) -> None:
        assert {edge.happening for edge in EDGES} == set(Happening)
        assert all(bool(edge.theirs) != bool(edge.why) for edge in EDGES)

    def test_no_rule_hides_behind_edges_that_take_all_it_would_ignore(self) -> None:
        for state, happening in IGNORED:
            assert any((GroupPlace(state, step), happening) not in TARGETS for step in STEPS[state])

    def test_two_edges_for_one_happening_are_refused(self) -> None:
        with pytest.raises(AssertionError, match="two edges from INIT on first_quorum"):
            targets([EDGES[0], EDGES[0]])

    def test_a_state_without_one_of_its_edges_is_noticed(self) -> None:
        lame = targets([edge for edge in EDGES if edge.happening is not H.GROUP_READY])
        with pytest.raises(NoSuchEdge, match=r"group_ready cannot happen to a group in ROLLBACK \(reconfigure\)"):
            Lifecycle(COMPUTING, lame).feed(H.FAULT, H.ROLLBACK_TOLD, H.CANCELLED, H.GROUP_DOWN, H.GROUP_READY)

    @given(st.lists(st.sampled_from(Happening), max_size=60))
    def test_whatever_happens_it_moves_along_an_edge_or_is_ignored_by_rule_or_cannot_be(
        self, happenings: list[Happening]
    ) -> None:
        life = Lifecycle()
        for happening in happenings:
            before, ignored = life.place, life.ignored.total()
            try:
                after = life.feed(happening)
            except NoSuchEdge:
                assert (before, happening) not in TARGETS
                assert (before.state, happening) not in IGNORED
                assert life.place == before
            else:
                moved = TARGETS.get((before, happening))
                assert after == (before if moved is None else moved)
                assert life.ignored.total() - ignored == (moved is None)

    @given(st.data())
    def test_no_sequence_of_possible_happenings_ends_but_in_exit(self, data: st.DataObject) -> None:
        life = Lifecycle()
        for _ in range(40):
            choices = possible(life.place)
            if life.has_ended:
                assert not choices
                return
            life.feed(data.draw(st.sampled_from(choices)))
