"""Whose word counts for the plan, and which models are the same."""

from typing import Any

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from outerstep.coordination.server.plan import (
    DEFAULTS,
    MOST_WISHED_STEPS,
    Settled,
    changed,
    check_manifest,
    check_wishes,
    settle,
)
from outerstep.errors import ManifestMismatch, PlanMismatch
from outerstep.types import MOST_ASSIGNED, Assignment, Manifest, ParameterSpec, Plan, Wishes
from unit.coordination.builders import MANIFEST, make_plan

ONE_AND_ANOTHER = [
    ("sync_every", 40, 50),
    ("codec", "fp32", "int8"),
    ("num_fragments", 2, 3),
    ("tokenizer", "t1", "t2"),
]
FLAGS = {"sync_every": "--sync-every", "codec": "--codec", "num_fragments": "--fragments", "tokenizer": "--tokenizer"}


def plan_of(settled: Settled) -> Plan:
    return Plan(
        sync_every=settled.sync_every,
        codec=settled.codec,
        fragments=tuple((f"p{i}",) for i in range(settled.num_fragments)),
        part_size_bytes=64,
        max_staleness=4,
        heartbeat_timeout_s=0.0,
        delay=settled.delay,
        alpha=settled.alpha,
        carry=settled.carry,
        tokenizer=settled.tokenizer,
    )


def wish(name: str, value: Any) -> Wishes:
    return Wishes(**{name: value})


@pytest.mark.parametrize(("name", "one", "another"), ONE_AND_ANOTHER)
class TestSettling:
    def test_what_the_server_says_counts(self, name: str, one: Any, another: Any) -> None:
        settled = settle(wish(name, one), Wishes(), "a")
        assert (getattr(settled, name), settled.said_by[name]) == (one, "the server")

    def test_what_the_server_left_open_the_first_worker_fixes(self, name: str, one: Any, another: Any) -> None:
        settled = settle(Wishes(), wish(name, one), "a")
        assert (getattr(settled, name), settled.said_by[name]) == (one, "worker 'a'")

    def test_what_nobody_said_is_the_default(self, name: str, one: Any, another: Any) -> None:
        settled = settle(Wishes(), Wishes(), "a")
        assert (getattr(settled, name), settled.said_by[name]) == (DEFAULTS[name], "the default")

    def test_a_worker_that_says_the_same_leaves_the_word_to_the_server(self, name: str, one: Any, another: Any) -> None:
        assert settle(wish(name, one), wish(name, one), "a").said_by[name] == "the server"

    def test_a_first_worker_that_contradicts_the_server_is_refused(self, name: str, one: Any, another: Any) -> None:
        with pytest.raises(PlanMismatch, match=rf"wants {name}={another}.*run has {name}={one} \(said by the server\)"):
            settle(wish(name, one), wish(name, another), "a")

    def test_a_later_worker_is_refused_showing_both_values_and_who_said_the_first(
        self, name: str, one: Any, another: Any
    ) -> None:
        settled = settle(Wishes(), wish(name, one), "a")
        with pytest.raises(PlanMismatch) as refusal:
            check_wishes(settled, plan_of(settled), wish(name, another))
        assert f"wants {name}={another}, but the run has {name}={one} (said by worker 'a')" in refusal.value.message
        assert f"leave {name} out" in refusal.value.hint
        assert f"{FLAGS[name]} {another}" in refusal.value.hint

    def test_even_a_default_is_fixed_once_it_is_settled(self, name: str, one: Any, another: Any) -> None:
        settled = settle(Wishes(), Wishes(), "a")
        with pytest.raises(PlanMismatch, match="said by the default"):
            check_wishes(settled, plan_of(settled), wish(name, another))

    def test_a_worker_that_wants_the_same_or_nothing_may_come(self, name: str, one: Any, another: Any) -> None:
        settled = settle(wish(name, one), Wishes(), "a")
        check_wishes(settled, plan_of(settled), wish(name, one))
        check_wishes(settled, plan_of(settled), Wishes())


class TestStreaming:
    def test_a_whole_model_is_taken_over_at_once(self) -> None:
        settled = settle(Wishes(), Wishes(), "a")
        assert (settled.delay, settled.alpha, settled.carry) == (0, 0.0, False)

    def test_a_fragmented_one_a_few_steps_later_but_before_the_next_fragment(self) -> None:
        assert settle(Wishes(sync_every=400, num_fragments=4), Wishes(), "a").delay == 5
        assert settle(Wishes(sync_every=12, num_fragments=4), Wishes(), "a").delay == 2
        assert settle(Wishes(sync_every=4, num_fragments=4), Wishes(), "a").delay == 0

    def test_a_long_delay_carries_the_steps_taken_meanwhile_unless_they_are_mixed(self) -> None:
        assert settle(Wishes(sync_every=100, delay=11), Wishes(), "a").carry
        assert not settle(Wishes(sync_every=100, delay=10), Wishes(), "a").carry
        assert not settle(Wishes(sync_every=100, delay=11, alpha=0.5), Wishes(), "a").carry

    def test_a_fragment_lands_before_it_is_sent_again(self) -> None:
        settle(Wishes(sync_every=6, delay=5), Wishes(), "a")
        with pytest.raises(PlanMismatch, match=r"below sync_every.* got 6 of 6"):
            settle(Wishes(sync_every=6, delay=6), Wishes(), "a")

    def test_carrying_and_mixing_exclude_each_other(self) -> None:
        with pytest.raises(PlanMismatch, match="exclude each other"):
            settle(Wishes(alpha=0.5), Wishes(carry=True), "a")


class TestChanges:
    plan = plan_of(settle(Wishes(sync_every=40, num_fragments=2, delay=3), Wishes(), "a"))

    def test_a_change_is_the_next_revision_and_keeps_the_rest(self) -> None:
        made = changed(self.plan, Wishes(sync_every=60))
        assert made == replace(self.plan, sync_every=60, revision=1)

    @pytest.mark.parametrize("changes", [{"down_codec": "fp32"}, {"num_fragments": 3}])
    def test_what_the_wire_depends_on_cannot_change(self, changes: dict[str, Any]) -> None:
        with pytest.raises(PlanMismatch, match="cannot change during a run"):
            changed(self.plan, Wishes(**changes))

    @pytest.mark.parametrize("changes", [{"sync_every": 1}, {"delay": 40}, {"alpha": 0.5, "carry": True}])
    def test_a_change_must_make_sense(self, changes: dict[str, Any]) -> None:
        with pytest.raises(PlanMismatch):
            changed(self.plan, Wishes(**changes))

    def test_each_fragment_needs_one_step_and_no_more(self) -> None:
        assert changed(self.plan, Wishes(sync_every=2, delay=1)).sync_every == 2

    def test_who_asks_for_the_old_value_or_the_new_one_may_come(self) -> None:
        settled = settle(Wishes(sync_every=40), Wishes(), "a")
        now = changed(plan_of(settled), Wishes(sync_every=60))
        check_wishes(settled, now, Wishes(sync_every=40))
        check_wishes(settled, now, Wishes(sync_every=60))
        with pytest.raises(PlanMismatch, match="wants sync_every=50"):
            check_wishes(settled, now, Wishes(sync_every=50))


WTE, HEAD = MANIFEST.parameters


def with_parameters(*parameters: ParameterSpec) -> Manifest:
    return replace(MANIFEST, parameters=parameters)


class TestManifests:
    def test_the_same_model_may_come(self) -> None:
        check_manifest(MANIFEST, with_parameters(WTE, HEAD))

    @pytest.mark.parametrize(
        ("offered", "difference"),
        [
            (with_parameters(WTE), "'head' is missing"),
            (with_parameters(WTE, HEAD, replace(HEAD, name="bias")), "'bias' is not in the run"),
            (with_parameters(replace(WTE, shape=(4, 8)), HEAD), "'wte': got [4, 8], run has [8, 4]"),
            (with_parameters(WTE, replace(HEAD, dtype="bfloat16")), "'head': got bfloat16, run has float32"),
            (with_parameters(HEAD, WTE), "the parameters are in another order"),
            (replace(MANIFEST, aliases={}), "other parameters are tied: got {}, run has {'lm_head': 'wte'}"),
        ],
    )
    def test_another_model_is_refused_by_its_difference(self, offered: Manifest, difference: str) -> None:
        with pytest.raises(ManifestMismatch) as refusal:
            check_manifest(MANIFEST, offered)
        assert refusal.value.message == f"this worker's model is not the run's: {difference}"
        assert "build the same model, in the same dtype" in refusal.value.hint

    @pytest.mark.parametrize("what", ["buffers", "frozen"])
    @pytest.mark.parametrize(("ours", "theirs"), [(("a", "b"), ("a",)), (("a",), ("a", "b"))])
    def test_a_buffer_or_a_frozen_parameter_of_only_one_of_them_is_named(
        self, what: str, ours: tuple[str, ...], theirs: tuple[str, ...]
    ) -> None:
        run, offered = (replace(MANIFEST, **{what: names}) for names in (ours, theirs))
        check_manifest(run, run)
        with pytest.raises(ManifestMismatch, match=f"'b' is among the {what} of only one of them"):
            check_manifest(run, offered)

    def test_they_are_named_after_what_else_differs(self) -> None:
        run = replace(MANIFEST, buffers=("mean",))
        with pytest.raises(ManifestMismatch, match="'head' is missing; 'mean' is among the buffers of only one of"):
            check_manifest(run, with_parameters(WTE))

    def test_where_the_run_knows_of_neither_they_make_no_difference(self) -> None:
        check_manifest(MANIFEST, replace(MANIFEST, buffers=("mean",), frozen=("bias",)))

    @pytest.mark.parametrize(
        ("run", "offered", "difference"),
        [
            (MANIFEST, replace(with_parameters(WTE), buffers=("head",)), "'head' is kept local"),
            (replace(with_parameters(WTE), buffers=("head",)), MANIFEST, "'head' is exchanged, and local in the run"),
            (MANIFEST, with_parameters(WTE, replace(HEAD, role="buffer")), "'head': got the role 'buffer', run has"),
        ],
    )
    def test_where_a_setting_makes_the_difference_it_is_named(
        self, run: Manifest, offered: Manifest, difference: str
    ) -> None:
        with pytest.raises(ManifestMismatch) as refusal:
            check_manifest(run, offered)
        assert difference in refusal.value.message
        assert "(the workers' `buffers` setting)" in refusal.value.message

    def test_three_differences_are_named_and_the_rest_is_counted(self) -> None:
        run = with_parameters(*(replace(HEAD, name=f"p{i}") for i in range(5)))
        with pytest.raises(ManifestMismatch, match="'p0' is missing; 'p1' is missing; 'p2' is missing; and 2 more"):
            check_manifest(run, with_parameters())

    def test_four_differences_leave_one_to_count(self) -> None:
        run = with_parameters(*(replace(HEAD, name=f"p{i}") for i in range(4)))
        with pytest.raises(ManifestMismatch, match="; and 1 more"):
            check_manifest(run, with_parameters())

    def test_three_differences_leave_nothing_to_count(self) -> None:
        run = with_parameters(*(replace(HEAD, name=f"p{i}") for i in range(3)))
        with pytest.raises(ManifestMismatch) as refusal:
            check_manifest(run, with_parameters())
        assert "more" not in refusal.value.message


class TestTheStepsOfTheFastest:
    def test_everybody_begins_with_them_if_nobody_says_otherwise(self) -> None:
        settled = settle(Wishes(), Wishes(), "a", base_sync_every=70)
        assert (settled.sync_every, settled.said_by["sync_every"]) == (70, "dynamic local updates")
        assert settled.num_fragments == DEFAULTS["num_fragments"]
        assert settled.codec == DEFAULTS["codec"]

    def test_what_server_or_worker_say_comes_first(self) -> None:
        assert settle(Wishes(sync_every=40), Wishes(), "a", base_sync_every=70).sync_every == 40
        assert settle(Wishes(), Wishes(sync_every=50), "a", base_sync_every=70).sync_every == 50


class TestWhatAWorkerMayNotWish:
    def test_more_steps_than_anybody_needs(self) -> None:
        assert settle(Wishes(), Wishes(sync_every=MOST_WISHED_STEPS), "a").sync_every == MOST_WISHED_STEPS
        with pytest.raises(PlanMismatch, match="at most"):
            settle(Wishes(), Wishes(sync_every=MOST_WISHED_STEPS + 1), "a")

    def test_to_adopt_nothing_of_what_is_agreed(self) -> None:
        assert settle(Wishes(), Wishes(alpha=0.99, num_fragments=2, sync_every=40), "a").alpha == 0.99
        with pytest.raises(PlanMismatch, match="below 1"):
            settle(Wishes(), Wishes(alpha=1.0, num_fragments=2, sync_every=40), "a")

    def test_unless_the_server_says_the_same(self) -> None:
        steps = MOST_WISHED_STEPS + 1
        assert settle(Wishes(sync_every=steps), Wishes(sync_every=steps), "a").sync_every == steps
        both = Wishes(alpha=1.0, num_fragments=2, sync_every=40)
        assert settle(both, Wishes(alpha=1.0), "a").alpha == 1.0


def test_the_delay_of_fragments_is_a_whole_number_of_steps() -> None:
    settled = settle(Wishes(sync_every=7, num_fragments=2), Wishes(), "a")
    assert (settled.delay, type(settled.delay)) == (2, int)


class TestWhatEachMemberDoes:
    SHARE = Assignment(cluster="a", leader="", sends_to="server", local_steps=4, batch_size=1)

    def test_it_stays_unless_a_number_that_it_replaces_changes(self) -> None:
        plan = replace(make_plan(), assignments=(self.SHARE,))
        assert changed(plan, Wishes(alpha=0.5)).assignments == (self.SHARE,)
        assert changed(plan, Wishes(sync_every=8)).assignments is UNSET
        assert changed(plan, Wishes(delay=1)).assignments is UNSET

    def test_it_is_what_was_assigned_unless_that_is_too_much_to_tell(self) -> None:
        most = [replace(self.SHARE, cluster=f"c{i}") for i in range(MOST_ASSIGNED)]
        assert changed(make_plan(), Wishes(sync_every=8), most).assignments == tuple(most)
        assert changed(make_plan(), Wishes(), [*most, self.SHARE]).assignments is UNSET
