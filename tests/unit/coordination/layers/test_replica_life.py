"""The life of a torchft replica, as its rounds tell it."""

from __future__ import annotations

from outerstep.coordination.layers.lifecycle import GroupPlace, Happening, Lifecycle
from outerstep.coordination.layers.replica_life import ReplicaLife


def training(replicas: int = 2) -> ReplicaLife:
    life = ReplicaLife()
    life.meets()
    life.met(replicas, healed=False)
    life.agreed()
    assert life.place == "TRAINING (compute)"
    return life


def test_a_replica_is_in_init_until_its_first_quorum() -> None:
    life = ReplicaLife()
    life.meets()
    assert life.place == "INIT"
    life.met(1, healed=False)
    assert life.place == "TRAINING (sync)"


def test_a_round_waits_for_its_quorum_and_ends_with_its_vote() -> None:
    life = training()
    life.meets()
    assert life.place == "TRAINING (quorum)"
    life.met(2, healed=False)
    assert life.place == "TRAINING (sync)"
    life.agreed()
    assert life.place == "TRAINING (compute)"


def test_a_replica_that_was_behind_is_healed_and_takes_part() -> None:
    life = ReplicaLife()
    life.met(3, healed=True)
    assert life.place == "TRAINING (sync)"
    life.agreed()
    assert life.place == "TRAINING (compute)"


def test_a_vote_that_fails_rolls_back_until_the_next_quorum_has_met() -> None:
    life = training()
    life.meets()
    life.met(2, healed=False)
    life.failed()
    assert life.place == "ROLLBACK (reconfigure)"
    life.meets()
    assert life.place == "ROLLBACK (reconfigure)", "the others are not met yet"
    life.met(1, healed=False)
    assert life.place == "TRAINING (sync)"


def test_quorums_that_grow_and_shrink_make_the_group_anew_and_go_on() -> None:
    life = training(2)
    for replicas in (3, 1, 2, 2):
        life.meets()
        life.met(replicas, healed=False)
        assert (life.place, life.replicas) == ("TRAINING (sync)", replicas)
        life.agreed()
    assert not life.unclear


def test_a_replica_may_leave_whatever_it_is_doing() -> None:
    for life in (ReplicaLife(), training()):
        life.left()
        assert life.place == "EXIT"
    broken = training()
    broken.meets()
    broken.met(2, healed=False)
    broken.failed()
    broken.left()
    assert broken.place == "EXIT"


def test_a_replica_that_heals_others_takes_part_afterwards() -> None:
    life, seen = watched()
    life.met(1, healed=False)
    life.agreed()
    life.meets()
    life.met(2, healed=False, heals=True)
    assert life.place == "TRAINING (sync)"
    assert seen.happened[-2:] == [Happening.PEER_NEEDS_CHECKPOINT, Happening.CHECKPOINT_RETURN]


def test_whoever_is_at_its_end_drains_and_the_others_make_their_group_anew_when_it_has_left() -> None:
    ending, staying = training(3), training(3)
    for life in (ending, staying):
        life.meets()
        life.met(3, healed=False)
    ending.heard(ends=True, another_ends=False)
    staying.heard(ends=False, another_ends=True)
    assert (ending.place, staying.place) == ("DRAINING (notice others)", "DRAINING (run to commit)")
    for life in (ending, staying):
        life.agreed()
    assert (ending.place, staying.place) == ("DRAINING (last commit)", "DRAINING (survivor's commit)")
    staying.meets()
    staying.met(3, healed=False)
    staying.heard(ends=False, another_ends=True)
    staying.agreed()
    assert staying.place == "DRAINING (survivor's commit)", "it has not left yet, and rounds go on"
    ending.left()
    staying.meets()
    staying.met(2, healed=False)
    assert (ending.place, staying.place) == ("EXIT", "TRAINING (sync)")
    assert not ending.unclear + staying.unclear


def test_whoever_has_noticed_a_drain_may_be_at_its_own_end_and_a_vote_may_fail_meanwhile() -> None:
    life = training(2)
    life.meets()
    life.met(2, healed=False)
    life.heard(ends=False, another_ends=True)
    life.failed()
    assert life.place == "ROLLBACK (reconfigure)"
    life.met(2, healed=False)
    life.heard(ends=False, another_ends=True)
    life.agreed()
    life.met(2, healed=False)
    life.heard(ends=True, another_ends=True)
    assert life.place == "DRAINING (notice others)"
    life.agreed()
    life.left()
    assert life.place == "EXIT"
    assert not life.unclear


class Heard(Lifecycle):
    def __init__(self) -> None:
        super().__init__()
        self.happened: list[Happening] = []

    def feed(self, *happenings: Happening) -> GroupPlace:
        self.happened += happenings
        return super().feed(*happenings)


def watched() -> tuple[ReplicaLife, Heard]:
    heard = Heard()
    return ReplicaLife(heard), heard
