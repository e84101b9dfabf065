"""An id belongs to the keys that were brought under it, and a start is spoken for by whoever knows its session."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec import UNSET

from outerstep.coordination.server.commits import Commits
from outerstep.coordination.server.membership import MOST_KEYS, KnownWorker, Membership
from outerstep.coordination.server.remembered import WorkerRecord
from outerstep.errors import Fenced, NoIdentity, NoSession, NotOwner, UnknownWorker
from outerstep.types import Control, Join, JoinProof
from unit.coordination.builders import TIMEOUT_S, Desk, make_heartbeat, make_join

MINE, OTHER = "11" * 32, "22" * 32


def signed(key: str, worker_id: str = "a", **facts: Any) -> Join:
    """As if its signature had been checked."""
    return make_join(worker_id, **facts, proof=JoinProof(key=key, nonce="00" * 32, signature="00" * 64))


@pytest.fixture
def members() -> Membership:
    return Membership(heartbeat_timeout_s=TIMEOUT_S, session_secret=b"of the run")


class TestJoining:
    @pytest.mark.parametrize("live", [True, False])
    @pytest.mark.parametrize("start", [1, 2])
    @pytest.mark.parametrize("by", [OTHER, None])
    def test_an_id_with_a_key_is_nobody_elses(
        self, members: Membership, live: bool, start: int, by: str | None
    ) -> None:
        mine, _ = members.join(signed(MINE), 0.0)
        mine.live = live
        before = (mine.instance, mine.incarnation, mine.session, tuple(mine.retired))
        with pytest.raises(NotOwner, match="'a' belongs to"):
            members.join(make_join(start=start) if by is None else signed(by, start=start), 1.0)
        assert (mine.instance, mine.incarnation, mine.session, tuple(mine.retired)) == before
        assert mine.keys == (MINE,)

    def test_its_key_starts_it_again(self, members: Membership) -> None:
        worker, _ = members.join(signed(MINE), 0.0)
        first = worker.session
        members.join(signed(MINE, start=2), 1.0)
        assert (worker.incarnation, worker.keys) == (2, (MINE,))
        assert worker.session != first

    def test_whoever_is_vouched_for_is_enrolled_with_the_others(self, members: Membership) -> None:
        members.join(signed(MINE), 0.0)
        worker, _ = members.join(signed(OTHER, start=2), 1.0, vouched=True)
        assert worker.keys == (MINE, OTHER)
        members.join(signed(MINE, start=3), 2.0)
        members.join(signed(OTHER, start=4), 3.0)
        members.join(make_join(start=5), 4.0, vouched=True)  # of protocol 1, with a token of its own
        assert worker.keys == (MINE, OTHER)

    def test_of_too_many_keys_the_oldest_is_forgotten(self, members: Membership) -> None:
        for i in range(MOST_KEYS + 1):
            worker, _ = members.join(signed(f"{i:064x}", start=i), float(i), vouched=True)
        assert worker.keys == tuple(f"{i:064x}" for i in range(1, MOST_KEYS + 1))

    def test_without_a_key_it_is_as_it_was(self, members: Membership) -> None:
        members.join(make_join(), 0.0)
        worker, _ = members.join(make_join(start=2), 1.0)
        assert (worker.incarnation, worker.keys) == (2, ())
        worker, _ = members.join(signed(MINE, start=3), 2.0)  # it was upgraded
        assert worker.keys == (MINE,)

    def test_a_refused_join_enrols_nothing(self, members: Membership) -> None:
        members.join(signed(MINE), 0.0)
        members.join(signed(MINE, start=2), 1.0)
        with pytest.raises(Fenced):
            members.join(signed(OTHER), 2.0, vouched=True)
        assert [worker.keys for worker in members] == [(MINE,)]

    def test_a_server_may_ask_everybody_for_a_key(self) -> None:
        desk = Desk()
        desk.coordinator.require_identity = True
        with pytest.raises(NoIdentity, match="'a' brings none"):
            desk.coordinator.join(make_join(), 0.0)
        with pytest.raises(NoIdentity):
            desk.coordinator.check_join(make_join(), 0.0)
        with pytest.raises(NoIdentity):
            Commits(desk.coordinator, "round").answer(make_join(), 0.0)
        assert list(desk.coordinator.members) == []
        desk.coordinator.join(signed(MINE), 0.0)
        desk.coordinator.join(make_join("b"), 0.0, vouched=True)


class TestSessions:
    def test_the_answer_holds_it_if_a_key_was_proved(self) -> None:
        desk = Desk()
        kept, none = (desk.coordinator.join(message, 0.0) for message in (signed(MINE), make_join("b")))
        assert (kept.session, none.session) == (desk.coordinator.members.find("a").session, UNSET)  # type: ignore[union-attr]

    def test_a_repeated_join_has_the_same_one(self, members: Membership) -> None:
        first = members.join(signed(MINE), 0.0)[0].session
        assert members.join(signed(MINE), 1.0)[0].session == first

    @pytest.mark.parametrize("shown", ["", "0" * 64, "é" * 8])
    def test_whoever_does_not_know_it_does_not_speak(self, members: Membership, shown: str) -> None:
        worker, _ = members.join(signed(MINE), 0.0)
        with pytest.raises(NoSession, match="does not carry the session"):
            members.check_session(make_heartbeat(), shown)
        assert not members.holds_session("a", shown)
        members.check_session(make_heartbeat(), worker.session)
        assert members.holds_session("a", worker.session)
        assert not members.holds_session("b", worker.session)

    def test_an_older_start_is_fenced_and_not_asked(self, members: Membership) -> None:
        old = members.join(signed(MINE), 0.0)[0].session
        members.join(signed(MINE, start=2), 1.0)
        members.check_session(make_heartbeat(), old)
        with pytest.raises(Fenced):
            members.heard(make_heartbeat(), 2.0)
        with pytest.raises(NoSession):
            members.check_session(make_heartbeat(incarnation=2), old)

    def test_they_outlive_the_process_with_the_secret(self, members: Membership) -> None:
        worker, _ = members.join(signed(MINE), 0.0)
        for secret, same in ((b"of the run", True), (b"of another", False)):
            again = Membership(heartbeat_timeout_s=TIMEOUT_S, session_secret=secret)
            again.restore(KnownWorker.recorded("a", worker.record(), 5.0))
            assert again.holds_session("a", worker.session) == same
            with pytest.raises(NotOwner):
                again.join(signed(OTHER, start=2), 6.0)


class TestRelease:
    def test_it_belongs_to_nobody_then_and_a_live_start_joins_again(self) -> None:
        desk = Desk()
        coordinator = desk.coordinator
        coordinator.join(signed(MINE), 0.0)
        coordinator.control(Control(kind="release", worker_id="a", reason="lost"), 1.0)
        desk.carry_out()
        assert [(e["worker"], e["keys"], e["reason"]) for e in desk.events("release")] == [("a", 1, "lost")]
        with pytest.raises(UnknownWorker):
            coordinator.heartbeat(make_heartbeat(run_id=coordinator.run_id), 2.0)
        coordinator.join(signed(MINE), 3.0)
        with pytest.raises(NotOwner):
            coordinator.join(signed(OTHER, start=2), 4.0)

    def test_a_live_one_is_out_and_its_round_closes_without_it(self) -> None:
        desk = Desk("ab")
        desk.contribute("b")
        answer = desk.coordinator.control(Control(kind="release", worker_id="a"), desk.now)
        desk.carry_out()
        assert answer.done.startswith("a no longer belongs to a key")
        assert desk.closed == [(1, "b")]
        [left] = desk.events("leave")
        assert (left["worker"], left["reason"]) == ("a", "an operator released its id")

    def test_of_one_that_is_away_or_was_never_here(self) -> None:
        desk = Desk("b")
        desk.coordinator.join(signed(MINE), 0.0)
        desk.coordinator.members.gone(desk.coordinator.members.find("a"))  # type: ignore[arg-type]
        desk.coordinator.control(Control(kind="release", worker_id="a"), 1.0)
        desk.coordinator.join(signed(OTHER, start=2), 2.0)
        with pytest.raises(UnknownWorker, match="no worker 'c' is known"):
            desk.coordinator.control(Control(kind="release", worker_id="c"), 3.0)


class TestOnDisk:
    def test_a_key_is_durable_before_its_worker_hears(self) -> None:
        desk = Desk()
        commits = Commits(desk.coordinator, "round")
        _, first = commits.answer(signed(MINE), 0.0)
        _, again = commits.answer(signed(MINE), 1.0)
        assert first == again > 0
        _, enrolled = commits.answer(signed(OTHER), 2.0, vouched=True)  # the same start: only its keys changed
        assert enrolled > first
        assert desk.coordinator.remember().ledger["a"].keys == (MINE, OTHER)
        _, released = commits.answer(Control(kind="release", worker_id="a"), 3.0)
        assert released > enrolled

    def test_records_of_release_0_2_have_none_and_are_written_as_they_were(self) -> None:
        old = b'{"instance":"iiiiiiii","hostname":"","incarnation":1,"retired":[],"accepted":{}}'
        record = msgspec.json.decode(old, type=WorkerRecord)
        assert record.keys == ()
        assert msgspec.json.encode(record) == old
