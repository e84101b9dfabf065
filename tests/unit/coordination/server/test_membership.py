"""Who is here: configured, live and expected; starts and restarts; silence; what is remembered of those gone."""

from collections.abc import Callable

import pytest

from outerstep.coordination.server import membership
from outerstep.coordination.server.claims import Claimant
from outerstep.coordination.server.membership import RETURN_S, KnownWorker, Membership
from outerstep.coordination.server.remembered import Acceptance
from outerstep.errors import Busy, Fenced, IdInUse, UnknownWorker
from outerstep.types import JoinAnswer
from unit.coordination.builders import TIMEOUT_S, Desk, make_heartbeat, make_join, make_offer

LIMIT = 12  # of ids known, in place of many thousands


def members_with(*ids: str, heartbeat_timeout_s: float = TIMEOUT_S, now: float = 0.0) -> Membership:
    members = Membership(heartbeat_timeout_s=heartbeat_timeout_s)
    for worker_id in ids:
        members.join(make_join(worker_id), now)
    return members


def go(members: Membership, worker_id: str) -> None:
    members.gone(next(m for m in members if m.worker_id == worker_id))


def known(members: Membership) -> set[str]:
    return {m.worker_id for m in members}


class TestThreeSets:
    def test_before_the_start_workers_are_live_but_not_expected(self) -> None:
        desk = Desk("ab", num_workers=3)
        assert (desk.live, desk.expected()) == ({"a", "b"}, set())

    def test_the_start_expects_all_who_are_live(self) -> None:
        desk = Desk("ab", num_workers=3)
        desk.join("c")
        assert desk.expected() == {"a", "b", "c"}

    def test_a_later_worker_is_live_beyond_the_configured_number_and_not_expected_yet(self) -> None:
        desk = Desk("ab", num_workers=2)
        desk.join("c")
        assert (desk.live, desk.expected()) == ({"a", "b", "c"}, {"a", "b"})

    def test_who_leaves_is_neither_live_nor_expected_and_the_configured_number_stays(self) -> None:
        desk = Desk("abc", num_workers=3)
        desk.leave("b")
        assert (desk.live, desk.expected()) == ({"a", "c"}, {"a", "c"})
        assert desk.coordinator.rules.num_workers == 3

    def test_leaving_twice_is_leaving(self) -> None:
        desk = Desk("ab")
        desk.leave("b")
        before = list(desk.effects)
        desk.leave("b")
        assert desk.effects == before


class TestStarts:
    def test_the_same_instance_joining_twice_changes_nothing(self) -> None:
        members = members_with("a")
        member, arrived = members.join(make_join("a"), 1.0)
        assert (arrived, member.incarnation, member.live) == (False, 1, True)

    def test_a_start_is_dated(self) -> None:
        members = members_with("a", now=3.0)
        worker, _ = members.join(make_join("a"), 5.0)
        assert (worker.joined_at, worker.last_seen) == (3.0, 5.0)
        worker, _ = members.join(make_join("a", start=2), 7.0)
        assert (worker.joined_at, worker.last_seen) == (7.0, 7.0)

    @pytest.mark.parametrize("start", [1, 2])
    def test_a_worker_that_is_back_is_not_expected_back(self, start: int) -> None:
        members = Membership(heartbeat_timeout_s=TIMEOUT_S)
        members.restore(KnownWorker("a", "a-start-1", "home", 1, 0.0, 0.0))
        worker, _ = members.join(make_join("a", start=start), 1.0)
        assert worker.expected_back is False

    def test_a_new_start_of_a_worker_that_was_removed_is_welcome(self) -> None:
        members = members_with("a")
        worker, _ = members.join(make_join("a"), 0.0)
        worker.kicked = "it is needed elsewhere"
        worker, arrived = members.join(make_join("a", start=2), 1.0)
        assert (worker.kicked, arrived) == ("", True)

    def test_a_repeated_join_gets_the_same_answer_and_causes_nothing(self) -> None:
        desk = Desk("ab")
        desk.contribute("a")
        before = list(desk.effects)
        again = desk.join("a")
        assert again.incarnation == 1
        assert again.fragments[0].last_sequence == 1
        assert desk.effects == before
        assert desk.expected() == {"a", "b"}

    def test_a_repeated_join_is_a_sign_of_life(self) -> None:
        members = members_with("a")
        members.join(make_join("a"), 8.0)
        assert members.next_death() == 8.0 + TIMEOUT_S

    def test_a_restart_on_the_same_host_gets_the_next_incarnation(self) -> None:
        members = members_with("a")
        member, arrived = members.join(make_join("a", start=2), 1.0)
        assert (arrived, member.incarnation) == (True, 2)

    def test_a_restart_fences_the_incarnation_before_it_and_says_what_to_do(self) -> None:
        members = members_with("a")
        members.join(make_join("a", start=2), 1.0)
        with pytest.raises(Fenced, match=r"incarnation 2.*from incarnation 1.*stop this process"):
            members.heard(make_heartbeat("a", incarnation=1), 2.0)
        assert members.heard(make_heartbeat("a", incarnation=2), 2.0).worker_id == "a"

    def test_a_fenced_message_is_no_sign_of_life_of_the_new_start(self) -> None:
        members = members_with("a")
        members.join(make_join("a", start=2), 1.0)
        with pytest.raises(Fenced):
            members.heard(make_heartbeat("a", incarnation=1), 9.0)
        assert members.next_death() == 1.0 + TIMEOUT_S

    @pytest.mark.row("B13")
    def test_the_id_of_a_live_worker_on_another_host_is_in_use_with_the_remedy(self) -> None:
        members = members_with("a")
        with pytest.raises(IdInUse, match=r"'a'.*'home'.*3 s ago.*choose another --worker-id, or stop that worker"):
            members.join(make_join("a", start=2, hostname="away"), 3.0)
        assert members.heard(make_heartbeat("a", incarnation=1), 4.0).hostname == "home"

    @pytest.mark.parametrize(("timeout_s", "known_after_s"), [(TIMEOUT_S, TIMEOUT_S), (0.0, RETURN_S)])
    def test_after_a_restart_of_the_server_an_id_waits_for_its_old_holder_and_then_moves(
        self, timeout_s: float, known_after_s: float
    ) -> None:
        """Whether the old one lives is not known: neither refused for good nor taken at once."""
        members = Membership(heartbeat_timeout_s=timeout_s)
        members.restore(KnownWorker("a", "a-start-1", "home", 1, 100.0, 100.0))
        elsewhere = make_join("a", start=2, hostname="away")
        with pytest.raises(Busy, match="was in use on 'home' before the server was restarted") as refusal:
            members.join(elsewhere, 100.0 + known_after_s)
        assert refusal.value.retry_after_s == 1.0
        member, arrived = members.join(elsewhere, 101.0 + known_after_s)
        assert (arrived, member.incarnation, member.hostname) == (True, 2, "away")

    def test_after_a_restart_of_the_server_an_old_holder_that_speaks_up_keeps_its_id(self) -> None:
        members = Membership(heartbeat_timeout_s=TIMEOUT_S)
        members.restore(KnownWorker("a", "a-start-1", "home", 1, 100.0, 100.0))
        members.heard(make_heartbeat("a", incarnation=1), 101.0)
        with pytest.raises(IdInUse, match=r"in use by a live worker on 'home'.*1 s ago"):
            members.join(make_join("a", start=2, hostname="away"), 102.0)

    def test_where_joins_may_have_been_forgotten_no_number_is_given_twice(self) -> None:
        members = Membership(heartbeat_timeout_s=TIMEOUT_S)
        members.restore(KnownWorker("a", "a-start-1", "home", 1, 0.0, 0.0))
        members.first_incarnation = 1000
        assert members.join(make_join("a", start=3), 1.0)[0].incarnation == 1000
        assert members.join(make_join("b"), 1.0)[0].incarnation == 1000
        assert members.join(make_join("b", start=2), 1.0)[0].incarnation == 1001

    def test_the_id_of_a_dead_worker_may_move_to_another_host(self) -> None:
        members = members_with("a")
        go(members, "a")
        member, arrived = members.join(make_join("a", start=2, hostname="away"), 3.0)
        assert (arrived, member.incarnation, member.hostname) == (True, 2, "away")

    @pytest.mark.parametrize("newer_is_gone", [False, True])
    @pytest.mark.parametrize("hostname", ["home", "away"])
    def test_a_retired_instance_can_never_come_back(self, newer_is_gone: bool, hostname: str) -> None:
        members = members_with("a")
        members.join(make_join("a", start=2), 1.0)
        if newer_is_gone:
            go(members, "a")
        with pytest.raises(Fenced, match="started again elsewhere"):
            members.join(make_join("a", start=1, hostname=hostname), 2.0)

    def test_an_instance_declared_dead_comes_back_as_itself(self) -> None:
        members = members_with("a")
        go(members, "a")
        member, arrived = members.join(make_join("a"), 50.0)
        assert (arrived, member.incarnation, member.live) == (True, 1, True)


class TestHearing:
    @pytest.mark.parametrize(("worker_id", "incarnation"), [("b", 1), ("a", 2)])
    def test_who_has_not_joined_is_told_to_join_first(self, worker_id: str, incarnation: int) -> None:
        with pytest.raises(UnknownWorker, match="join first"):
            members_with("a").heard(make_heartbeat(worker_id, incarnation=incarnation), 1.0)

    def test_who_was_declared_dead_is_told_to_join_again(self) -> None:
        members = members_with("a")
        go(members, "a")
        with pytest.raises(UnknownWorker, match=r"declared dead after 10 s.*join again"):
            members.heard(make_heartbeat("a"), 1.0)

    def test_a_heartbeat_brings_progress(self) -> None:
        member = members_with("a").heard(make_heartbeat("a", step=7, steps_per_second=2.5, loss=0.25), 1.0)
        assert (member.step, member.steps_per_second, member.loss) == (7, 2.5, 0.25)


def restart(desk: Desk) -> JoinAnswer:
    return desk.join("a", start=2)


def die_and_return(desk: Desk) -> JoinAnswer:
    desk.later(TIMEOUT_S + 1.0, alive="b")
    assert desk.live == {"b"}
    return desk.join("a")


def leave_and_return_as_a_new_process(desk: Desk) -> JoinAnswer:
    desk.leave("a")
    return desk.join("a", start=2, hostname="away")


class TestLedger:
    @pytest.mark.parametrize("interruption", [restart, die_and_return, leave_and_return_as_a_new_process])
    def test_the_ledger_of_sequences_survives(self, interruption: Callable[[Desk], JoinAnswer]) -> None:
        desk = Desk("ab", fragments=2)
        desk.contribute("a", 3, fragment=1)
        assert [state.last_sequence for state in interruption(desk).fragments] == [0, 3]

    def test_the_ledger_of_one_worker_is_not_that_of_another(self) -> None:
        desk = Desk("ab")
        desk.contribute("a", 3)
        assert desk.join("b").fragments[0].last_sequence == 0


class TestWhatWasAccepted:
    """A worker's line in the status: it adds up over its contributions."""

    def test_contributions_and_bytes_add_up(self) -> None:
        worker = KnownWorker("a", "a-start-1", "home", 1, 0.0, 0.0)
        worker.enter(make_offer("a", 1, size_bytes=16), Acceptance(sequence=1, payload_hash="ab", version=1), 0, 1.5)
        assert (worker.contributions, worker.bytes_received) == (1, 16)
        worker.enter(make_offer("a", 2, size_bytes=24), Acceptance(sequence=2, payload_hash="cd", version=4), 2, 0.5)
        assert (worker.contributions, worker.bytes_received) == (2, 40)
        assert (worker.staleness, worker.delta_norm) == (2, 0.5)
        assert worker.accepted == {0: Acceptance(sequence=2, payload_hash="cd", version=4)}

    def test_each_fragment_has_a_last_one(self) -> None:
        worker = KnownWorker("a", "a-start-1", "home", 1, 0.0, 0.0)
        for fragment in (0, 1, 2):
            worker.enter(
                make_offer("a", 1, fragment=fragment), Acceptance(sequence=1, payload_hash="ab", version=1), 0, None
            )
        assert worker.contributions == 3
        assert worker.accepted == dict.fromkeys(range(3), Acceptance(sequence=1, payload_hash="ab", version=1))

    def test_it_may_claim_what_it_did_since_it_joined_and_keeps_nothing_before_it_claims(self) -> None:
        worker, _ = Membership(heartbeat_timeout_s=10.0).join(make_join("a"), 50.0)
        assert (worker.claimant(0).last_at, worker.claims) == (50.0, {})
        worker.claims[0] = Claimant(70.0)
        assert worker.claimant(0) is worker.claims[0]
        assert worker.claimant(1).last_at == 50.0

    def test_a_round_that_closes_takes_the_last_of_its_contributors_alone(self) -> None:
        members = members_with("a", "b")
        entry = Acceptance(sequence=1, payload_hash="ab", version=1)
        for worker in members:
            worker.enter(make_offer(worker.worker_id, 1), entry, 0, None)
        members.round_closed(0, ["a", "forgotten"])
        assert {worker.worker_id: worker.closed for worker in members} == {"a": {0: entry}, "b": {}}


class TestSilence:
    @pytest.mark.parametrize(("silent_s", "dead"), [(TIMEOUT_S, False), (TIMEOUT_S + 0.01, True)])
    def test_silence_beyond_the_timeout_kills(self, silent_s: float, dead: bool) -> None:
        members = members_with("a")
        assert [m.worker_id for m in members.silent(silent_s)] == (["a"] if dead else [])

    def test_only_the_silent_one_dies_and_the_death_is_counted_and_told(self) -> None:
        desk = Desk("ab")
        desk.later(TIMEOUT_S - 1.0, alive="b")
        desk.later(2.0)
        assert desk.live == {"b"}
        assert desk.coordinator.members.total_deaths == 1
        assert desk.events("death") == [{"worker": "a", "silent_s": 11.0}]

    def test_the_dead_do_not_die_again(self) -> None:
        desk = Desk("a")
        desk.later(TIMEOUT_S + 1.0)
        desk.later(TIMEOUT_S + 1.0)
        assert desk.coordinator.members.total_deaths == 1

    @pytest.mark.parametrize("sign", ["poll", "offer", "heartbeat", "get_part"])
    def test_every_message_is_a_sign_of_life(self, sign: str) -> None:
        desk = Desk("a")
        desk.later(TIMEOUT_S - 1.0)
        getattr(desk, sign)("a", *((0,) if sign == "get_part" else ()))
        desk.later(TIMEOUT_S - 1.0)
        assert desk.live == {"a"}

    def test_a_timeout_of_zero_never_kills(self) -> None:
        members = members_with("a", heartbeat_timeout_s=0.0)
        assert members.silent(1e9) == []
        assert members.next_death() is None

    def test_any_other_timeout_does_however_short(self) -> None:
        members = members_with("a", heartbeat_timeout_s=0.5)
        assert members.next_death() == 0.5
        assert [m.worker_id for m in members.silent(0.6)] == ["a"]

    def test_where_nobody_is_live_nobody_can_die(self) -> None:
        members = members_with("a")
        go(members, "a")
        assert members.next_death() is None

    def test_the_next_death_is_that_of_the_one_heard_longest_ago(self) -> None:
        members = members_with("a", "b", "c")
        members.heard(make_heartbeat("a"), 5.0)
        go(members, "b")
        members.heard(make_heartbeat("c"), 3.0)
        assert members.next_death() == 3.0 + TIMEOUT_S


class TestLimit:
    @pytest.fixture
    def full(self, monkeypatch: pytest.MonkeyPatch) -> Membership:
        monkeypatch.setattr(membership, "MAX_KNOWN_WORKERS", LIMIT)
        return members_with(*(f"w{i}" for i in range(LIMIT)))

    def test_the_longest_gone_is_forgotten_first(self, full: Membership) -> None:
        for worker_id in ("w7", "w3", "w5"):
            go(full, worker_id)
        full.join(make_join("new"), 1.0)
        assert "w7" not in known(full)
        assert {"w3", "w5", "new"} <= known(full)
        assert len(known(full)) == LIMIT

    def test_who_came_back_and_went_again_counts_from_the_last_time(self, full: Membership) -> None:
        go(full, "w7")
        full.join(make_join("w7"), 1.0)
        go(full, "w3")
        go(full, "w7")
        full.join(make_join("new"), 2.0)
        assert "w3" not in known(full)
        assert "w7" in known(full)

    def test_the_ledger_keeps_the_ids_of_an_open_round_whoever_joins(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """An id that was forgotten with its round still open would be counted again under the same key."""
        monkeypatch.setattr(membership, "MAX_KNOWN_WORKERS", LIMIT)
        desk = Desk("ab")
        desk.contribute("a")
        desk.leave("a")
        for guest in range(2 * LIMIT):
            desk.join(f"guest{guest}")
            desk.leave(f"guest{guest}")
        assert desk.join("a", start=2).fragments[0].last_sequence == 1
        assert desk.offer("a").state == "accepted"
        assert len(known(desk.coordinator.members)) == LIMIT

    def test_a_guest_is_forgotten_before_a_worker_that_has_contributed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(membership, "MAX_KNOWN_WORKERS", LIMIT)
        desk = Desk("ab")
        desk.contribute("a")
        desk.contribute("b")
        assert desk.coordinator.sync_round == 1
        desk.leave("a")
        for guest in range(2 * LIMIT):
            desk.join(f"guest{guest}")
            desk.leave(f"guest{guest}")
        assert desk.join("a", start=2).fragments[0].last_sequence == 1

    def test_without_guests_who_left_first_is_forgotten(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(membership, "MAX_KNOWN_WORKERS", 2)
        desk = Desk("ab")
        for worker in "ab":
            desk.contribute(worker)
        for worker in "ba":
            desk.leave(worker)
        desk.join("c")
        assert known(desk.coordinator.members) == {"a", "c"}

    def test_an_id_that_was_forgotten_comes_back_under_a_number_that_nobody_had(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Else an old process of that id would speak for the new one."""
        monkeypatch.setattr(membership, "MAX_KNOWN_WORKERS", 2)
        members = members_with("a")
        go(members, "a")
        members.join(make_join("b"), 1.0)
        members.join(make_join("c"), 1.0)
        assert known(members) == {"b", "c"}
        go(members, "b")
        assert members.join(make_join("a", start=2), 2.0)[0].incarnation == 2
        with pytest.raises(Fenced):
            members.heard(make_heartbeat("a", incarnation=1), 3.0)

    def test_when_everybody_has_something_in_an_open_round_a_newcomer_waits(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(membership, "MAX_KNOWN_WORKERS", 2)
        desk = Desk("ab", num_workers=3)
        desk.contribute("a")
        desk.leave("a")
        with pytest.raises(Busy, match="2 workers are live, or in a round that is open"):
            desk.join("c")

    def test_a_live_one_is_never_forgotten_a_newcomer_waits_instead(self, full: Membership) -> None:
        with pytest.raises(Busy, match=f"{LIMIT} workers are live") as refusal:
            full.join(make_join("new"), 1.0)
        assert refusal.value.retry_after_s == 60.0
        assert "new" not in known(full)

    def test_a_known_worker_returns_at_the_limit_and_nobody_is_forgotten(self, full: Membership) -> None:
        before = known(full)
        go(full, "w3")
        assert full.join(make_join("w3", start=2), 1.0)[1]
        assert known(full) == before


def test_a_speed_that_is_no_machines_does_not_slow_the_others_down() -> None:
    members = Membership(heartbeat_timeout_s=10.0)
    for name, speed in (("a", 2.0), ("b", 1.0), ("liar", 1e6)):
        member, _ = members.join(make_join(name), 0.0)
        member.steps_per_second = speed
    assert members.fastest == 2.0


class TestWhatAWorkerSaysOfItself:
    def test_is_kept_until_it_goes_and_outlives_the_server(self) -> None:
        members = Membership(heartbeat_timeout_s=TIMEOUT_S)
        worker, _ = members.join(make_join("a", info={"gpu": "none"}), 0.0)
        worker.token = "site"
        assert worker.info == {"gpu": "none"}
        back = KnownWorker.recorded("a", worker.record(), 5.0)
        assert (back.info, back.token) == ({"gpu": "none"}, "site")
        members.join(make_join("a"), 1.0)
        assert worker.info == {"gpu": "none"}, "who says nothing takes nothing back"
        members.gone(worker)
        assert worker.info == {}


class TestPerhapsDead:
    def test_after_half_of_the_timeout_the_one_that_is_silent_for_longest_is_named(self) -> None:
        members = members_with("a", heartbeat_timeout_s=20.0)
        members.join(make_join("b"), 1.0)
        ids = frozenset("ab")
        assert members.perhaps_dead(ids, 10.0) == ""
        assert members.perhaps_dead(ids, 12.0).startswith("a has been silent for 12 s; in 8 s it counts as dead")
        assert members.perhaps_dead(frozenset("b"), 12.0).startswith("b has been silent for 11 s; in 9 s")
        assert "in 0 s it counts as dead" in members.perhaps_dead(ids, 25.0)
        assert members.perhaps_dead(frozenset("c"), 25.0) == ""

    def test_where_nobody_times_out_nobody_is(self) -> None:
        assert members_with("a", heartbeat_timeout_s=0.0).perhaps_dead(frozenset("a"), 99.0) == ""


def test_the_session_of_an_unknown_worker_is_nobodys_business() -> None:
    members_with("a").check_session(make_heartbeat("b"), "")


def test_a_worker_whose_fragments_all_come_as_zeros_is_named_once_until_one_does_not() -> None:
    desk = Desk("a", fragments=2)
    counts = []
    for sequence, norms in enumerate([(0.0, 1.0), (1.0, 0.0), (0.0, 0.0), (0.0, 0.0), (1.0, 0.0), (0.0, 0.0)], 1):
        for fragment, norm in enumerate(norms):
            base = desk.version(fragment)
            desk.contribute("a", sequence, fragment=fragment, norm=norm, base_version=base, steps=3)
        counts.append(len(desk.events("zeros")))
    assert counts == [0, 0, 1, 1, 1, 2]
    assert desk.events("zeros")[0] == {"worker": "a", "steps": 3, "why": desk.events("zeros")[0]["why"]}
