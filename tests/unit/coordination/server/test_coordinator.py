"""The server's decisions, message by message."""

from typing import Any

import pytest
from msgspec.structs import replace

from outerstep.coordination.server.commits import is_news
from outerstep.coordination.server.effects import Accumulate, CloseRound
from outerstep.errors import (
    BadRequest,
    Fenced,
    ManifestMismatch,
    MissingParts,
    OtherRun,
    PlanMismatch,
    ProtocolMismatch,
    TooLarge,
    UnknownWorker,
)
from outerstep.events import Event, GroupStateChanged, RunStarted, WorkerJoined
from outerstep.types import PROTOCOL_VERSION, Participant, Wishes
from unit.coordination.builders import (
    MANIFEST,
    PART_BYTES,
    SIZE_BYTES,
    TIMEOUT_S,
    Desk,
    make_agreement,
    make_key,
)
from unit.coordination.speaking import CONTRIBUTING, SPEAKING, Speak, full_rounds, saying, traces


class TestWhoMaySpeak:
    @saying(SPEAKING)
    def test_an_unregistered_worker_gets_nothing_accepted(self, say: Speak) -> None:
        desk = Desk("ab")
        before = traces(desk)
        with pytest.raises(UnknownWorker):
            say(desk, "x")
        assert traces(desk) == before
        assert desk.live == {"a", "b"}

    @saying(SPEAKING)
    def test_a_worker_declared_dead_gets_nothing_accepted_before_it_joins_again(self, say: Speak) -> None:
        desk = Desk("ab")
        desk.offer("a")
        desk.later(TIMEOUT_S + 1.0, alive="b")
        before = traces(desk)
        with pytest.raises(UnknownWorker, match="join again"):
            say(desk, "a")
        assert traces(desk) == before

    @pytest.mark.row("F07")
    @saying({**SPEAKING, "leave": lambda desk, worker: desk.leave(worker)})
    def test_an_older_start_is_fenced(self, say: Speak) -> None:
        desk = Desk("ab")
        desk.join("a", start=2)
        desk.incarnations["a"] = 1
        before = traces(desk)
        with pytest.raises(Fenced):
            say(desk, "a")
        assert traces(desk) == before
        assert desk.live == {"a", "b"}

    @saying({**SPEAKING, "leave": lambda desk, worker: desk.leave(worker)})
    def test_who_speaks_of_another_run_is_refused_naming_both(self, say: Speak) -> None:
        desk = Desk("ab")
        desk.run_id = "other"
        with pytest.raises(OtherRun, match="holds run run, not other"):
            say(desk, "a")
        assert desk.live == {"a", "b"}

    @saying(
        {
            "offer": lambda desk, worker: desk.offer(worker, fragment=2),
            "commit": lambda desk, worker: desk.commit(worker, fragment=2),
            "poll": lambda desk, worker: desk.poll(worker, fragment=2),
            "get_part": lambda desk, worker: desk.get_part(worker, 0, fragment=2),
        }
    )
    def test_an_unknown_fragment_is_refused_with_the_number_there_are(self, say: Speak) -> None:
        with pytest.raises(BadRequest, match="fragment 2 does not exist: the plan has 2"):
            say(Desk("ab", fragments=2), "a")


class TestJoining:
    def test_another_protocol_is_refused_naming_both(self) -> None:
        with pytest.raises(
            ProtocolMismatch, match=f"protocol {PROTOCOL_VERSION + 1}; understood: 1-{PROTOCOL_VERSION}"
        ):
            Desk("a").join("b", protocol=PROTOCOL_VERSION + 1)

    def test_a_rejoin_to_another_run_is_refused(self) -> None:
        with pytest.raises(OtherRun, match="holds run run, not old"):
            Desk("a").join("b", run_id="old")

    def test_another_plan_is_refused_showing_both_values_and_who_said_the_first(self) -> None:
        with pytest.raises(PlanMismatch, match=r"sync_every=9.*sync_every=4 \(said by the server\)"):
            Desk("a").join("b", wishes=Wishes(sync_every=9))
        with pytest.raises(PlanMismatch, match=r"num_fragments=2.*num_fragments=1 \(said by worker 'first'\)"):
            Desk("a").join("b", wishes=Wishes(num_fragments=2))

    def test_another_model_is_refused_naming_the_first_differences(self) -> None:
        wte, head = MANIFEST.parameters
        other = replace(MANIFEST, parameters=(replace(wte, shape=(4, 8)), replace(head, dtype="bfloat16")))
        with pytest.raises(ManifestMismatch, match=r"got \[4, 8\], run has \[8, 4\]; 'head': got bfloat16, run has"):
            Desk("a").join("b", manifest=other)

    @pytest.mark.parametrize(
        "changes", [{"protocol": 99}, {"run_id": "old"}, {"wishes": Wishes(codec="int8")}], ids=lambda c: next(iter(c))
    )
    def test_who_is_refused_is_not_a_member(self, changes: dict[str, Any]) -> None:
        desk = Desk("a")
        with pytest.raises((ProtocolMismatch, OtherRun, PlanMismatch)):
            desk.join("b", **changes)
        assert desk.live == {"a"}

    def test_the_answer_brings_the_run_the_plan_and_where_every_fragment_stands(self) -> None:
        desk = Desk("ab", fragments=2)
        desk.contribute("a", fragment=1)
        desk.contribute("b", fragment=1)
        answer = desk.join("c", run_id="run", manifest=MANIFEST, wishes=Wishes(sync_every=4))
        assert (answer.run_id, answer.incarnation, answer.manifest) == ("run", 1, MANIFEST)
        assert answer.plan == desk.coordinator.plan
        assert [state.version for state in answer.fragments] == [0, 1]

    def test_the_heartbeat_answer_tells_the_rounds_that_every_fragment_has_completed(self) -> None:
        desk = Desk("a", fragments=2)
        desk.contribute("a", fragment=0)
        assert desk.heartbeat("a").sync_round == 0
        desk.contribute("a", fragment=1)
        assert desk.heartbeat("a").sync_round == 1


class TestShape:
    def test_another_codec_is_refused_naming_both(self) -> None:
        with pytest.raises(PlanMismatch, match="encoded as 'int8'; the run uses 'fp32'"):
            Desk("a").offer("a", codec="int8")

    def test_too_large_is_refused_with_the_limit(self) -> None:
        desk = Desk("a", max_payload_bytes=100)
        with pytest.raises(TooLarge, match=r"101 bytes.*at most 100"):
            desk.offer("a", size_bytes=101)
        assert desk.coordinator.uploads.held_bytes == 0
        assert desk.offer("a", size_bytes=100).state == "send"

    def test_a_commit_with_missing_parts_lists_them(self) -> None:
        desk = Desk("a")
        desk.offer("a", size_bytes=3 * PART_BYTES)
        desk.put("a", 1)
        with pytest.raises(MissingParts, match=r"misses 2 of 3 parts: \[0, 2\]"):
            desk.commit("a", size_bytes=3 * PART_BYTES)

    def test_a_part_out_of_range_is_refused(self) -> None:
        desk = Desk("a")
        desk.offer("a")
        with pytest.raises(BadRequest, match="part 2 is out of range"):
            desk.put("a", 2)

    @pytest.mark.parametrize("say", [CONTRIBUTING["part"], CONTRIBUTING["commit"]], ids=["part", "commit"])
    def test_what_was_not_offered_is_told_to_be_offered(self, say: Speak) -> None:
        with pytest.raises(MissingParts, match=r"not on offer.*offer it"):
            say(Desk("a"), "a")


class TestPolling:
    def test_nothing_newer_tells_what_the_round_waits_for(self) -> None:
        desk = Desk("ab")
        desk.contribute("a")
        answer = desk.poll("a")
        assert (answer.agreement, answer.last_sequence, answer.stuck) == (None, 1, False)
        assert answer.waiting_for == "contributions of b"
        assert answer.retry_after_s > 0

    def test_a_silent_partner_is_named_with_what_becomes_of_it(self) -> None:
        desk = Desk("ab", heartbeat_timeout_s=120.0)
        desk.contribute("a")
        desk.now += 59.0
        assert desk.poll("a").waiting_for == "contributions of b", "a beat may be that late"
        desk.now += 12.0
        assert desk.poll("a").waiting_for == (
            "contributions of b; b has been silent for 71 s; in 49 s it counts as dead and the round goes on without "
            "it (--heartbeat-timeout)"
        )

    def test_where_nobody_ever_counts_as_dead_nothing_is_announced(self) -> None:
        desk = Desk("ab", heartbeat_timeout_s=0.0)
        desk.contribute("a")
        desk.now += 1e6
        assert desk.poll("a").waiting_for == "contributions of b"

    @pytest.mark.parametrize("after", [-1, 0, 1])
    def test_the_newest_agreement_is_handed_to_whoever_holds_an_older_one(self, after: int) -> None:
        desk = Desk("ab")
        full_rounds(desk, 2)
        answer = desk.poll("a", after)
        assert answer.agreement is not None
        assert answer.agreement.version == 2
        assert answer.last_sequence == 2

    def test_nobody_is_told_of_a_round_before_it_is_published(self) -> None:
        desk = Desk("a", prompt=False)
        desk.contribute("a")
        assert desk.closed == [(1, "a")]
        assert desk.poll("a").agreement is None
        desk.publish(desk.closings[0])
        assert desk.poll("a").agreement == make_agreement(1, participants=desk.closings[0].participants)

    def test_wanted_names_the_rounds_of_other_fragments_that_wait_for_the_worker(self) -> None:
        desk = Desk("ab", fragments=4)
        desk.contribute("a", fragment=3)
        desk.contribute("b", fragment=3)
        desk.contribute("a", fragment=0)
        desk.contribute("a", 2, fragment=3, base_version=1)
        desk.contribute("b", fragment=1)
        assert desk.poll("b", fragment=1).wanted == ((0, 1), (3, 2))
        assert desk.poll("a", fragment=0).wanted == ((1, 1),)

    def test_the_polled_fragment_itself_is_not_wanted(self) -> None:
        desk = Desk("ab", fragments=2)
        desk.contribute("a", fragment=0)
        assert desk.poll("b", fragment=0).wanted == ()

    def test_only_a_member_may_fetch(self) -> None:
        desk = Desk("ab")
        desk.get_part("a", 0)
        desk.leave("a")
        with pytest.raises(UnknownWorker):
            desk.get_part("a", 0)


class TestEffects:
    def test_a_contribution_is_added_before_its_round_closes(self) -> None:
        desk = Desk("ab", prompt=False)
        desk.contribute("a")
        desk.contribute("b")
        effects = [e for e in desk.effects if not isinstance(e, Event)]
        participants = tuple(Participant(worker_id=w, sequence=1, weight=x) for w, x in (("a", 1.0), ("b", 1.0)))
        assert effects == [
            Accumulate(make_key("a"), 1, 1.0, 1.0, 0, "fp32", first=True),
            Accumulate(make_key("b"), 1, 1.0, 1.0, 0, "fp32"),
            CloseRound(0, 1, participants),
        ]

    def test_of_a_round_the_first_contribution_and_the_agreement_are_news(self) -> None:
        desk = Desk("abc", prompt=False)
        for worker in "abc":
            desk.contribute(worker)
        news = {type(effect): is_news(effect) for effect in desk.effects if not isinstance(effect, Accumulate)}
        assert [is_news(effect) for effect in desk.effects if isinstance(effect, Accumulate)] == [True, False, False]
        assert news == {WorkerJoined: True, RunStarted: True, CloseRound: False, GroupStateChanged: False}

    def test_effects_are_handed_out_once(self) -> None:
        desk = Desk("a", prompt=False)
        desk.offer("a")
        desk.put("a", 0)
        desk.put("a", 1)
        desk.coordinator.accept(desk.commit_message("a"), desk.now)
        assert [type(e) for e in desk.coordinator.take_effects()] == [Accumulate, CloseRound]
        assert desk.coordinator.take_effects() == []

    def test_fragments_close_their_rounds_by_themselves(self) -> None:
        desk = Desk("ab", fragments=2)
        for worker in "ab":
            desk.contribute(worker, fragment=1)
        assert [(e.fragment, e.version) for e in desk.closings] == [(1, 1)]
        assert (desk.version(0), desk.version(1)) == (0, 1)

    def test_the_next_round_is_open_while_the_outer_step_is_taken(self) -> None:
        desk = Desk("ab", quorum=1, prompt=False)
        desk.contribute("a")
        assert desk.contribute("b", base_version=0).version == 2
        assert desk.closed == [(1, "a"), (2, "b")]

    @pytest.mark.parametrize("version", [0, 2])
    def test_agreements_must_be_published_in_order(self, version: int) -> None:
        with pytest.raises(AssertionError, match="published in order"):
            Desk("a").coordinator.published(make_agreement(version), 0.0)

    def test_a_published_round_is_told(self) -> None:
        desk = Desk("ab")
        full_rounds(desk, 1)
        [told] = desk.events("round")
        told.pop("hash")
        assert told == {
            "fragment": 0,
            "version": 1,
            "workers": ["a", "b"],
            "sequences": [1, 1],
            "staleness": [0, 0],
            "weights": [1.0, 1.0],
            "loss": None,
            "losses": [None, None],
            "waited_s": 0.0,
            "bytes": 2 * SIZE_BYTES,
        }
