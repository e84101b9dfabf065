"""The controller's decisions through a real coordinator: when they hold, who reads what, and how far a lie gets."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from msgspec import UNSET
from msgspec.structs import replace

from outerstep.config.layers.parameters import CONTROLLED, CONTROLLER, ONLY_SAID, markdown_tables
from outerstep.coordination.autoconfig import ControllerState, LayerDecision, LayerPlan, LinkMeter
from outerstep.coordination.autoconfig.collected import facts_of, facts_of_cluster, lacks_link, links_of
from outerstep.coordination.autoconfig.steering import ORDERS, TERMS, Steering, SteeringSettings, as_run_plan
from outerstep.types import (
    THE_SERVER,
    Control,
    Heartbeat,
    Manifest,
    MeasuredLink,
    MemberFacts,
    ParameterSpec,
    Plan,
    Wishes,
    plan_of,
)
from outerstep.versions import as_spoken
from unit.coordination.builders import Desk

MBIT = 1e6 / 8
BIG = Manifest(parameters=(ParameterSpec(name="p0", shape=(10_000_000,), dtype="float32"),))
TARGET = SteeringSettings(target_utilization=0.95)


class Steered:
    """Rounds of workers that tell of themselves, each one letter. `rate`: bytes per second of each one's link; `tells`:
    what one says instead of the truth."""

    def __init__(self, workers: str = "ab", settings: SteeringSettings = TARGET, **more: Any) -> None:
        self.desk = Desk(workers, heartbeat_timeout_s=0.0, **more)
        self.coordinator = self.desk.coordinator
        self.coordinator.manifest = BIG
        self.steering = self.coordinator.steering = Steering(settings)
        self.meter, self.own = LinkMeter(THE_SERVER), {worker: LinkMeter(worker) for worker in workers}
        self.workers, self.sequence = list(workers), 0
        self.rate = dict.fromkeys(workers, 200 * MBIT)
        self.step_s = dict.fromkeys(workers, 1.0)
        self.tells: dict[str, Mapping[str, Any]] = {}
        self.adds: dict[str, Mapping[str, Any]] = {}  # to the facts that it tells
        self.noise, self._rng = 0.0, random.Random(0)
        self.read: dict[int, dict[str, Plan]] = {}  # by revision: what each was told
        self.decisions: list[LayerDecision] = []

    def measured(self, worker: str) -> float:
        return self.rate[worker] * math.exp(self._rng.gauss(0.0, self.noise))

    def beat(self, worker: str) -> None:
        meter, now = self.own[worker], self.desk.now
        for ends in ((worker, THE_SERVER), (THE_SERVER, worker)):
            meter.answered(*ends, 0.02)
            meter.transferred(*ends, 10_000_000, 10_000_000 / self.measured(worker), now)
        links = tuple(
            MeasuredLink(source=r.source, target=r.target, bytes_per_s=r.bytes_per_s, latency_s=r.latency_s)
            for r in meter.reports(now)
        )
        facts = MemberFacts(**{"links": links, **self.adds.get(worker, {})})
        said: dict[str, Any] = {"steps_per_second": 1.0 / self.step_s[worker], "facts": facts}
        said |= self.tells.get(worker, {})
        self.coordinator.heartbeat(Heartbeat(**self.desk.head(worker), step=1, **said), self.desk.now)

    def round(self) -> LayerDecision | None:
        """All tell of themselves and contribute; the round closes, everybody hears of it, and the server decides."""
        self.sequence += 1
        version = self.desk.version()
        self.desk.now += 60.0
        for worker in self.workers:
            self.beat(worker)
            self.meter.transferred(worker, THE_SERVER, 10_000_000, 10_000_000 / self.measured(worker), self.desk.now)
            self.desk.contribute(worker, self.sequence, base_version=version, codec=self.plan.codec)
        for worker in self.workers:
            told = self.desk.poll(worker, version).plan
            if told is not None:
                self.read.setdefault(told.revision, {})[worker] = told
        state = self.steering.state(self.coordinator.steered, self.meter.reports(self.desk.now), self.desk.now)
        if state is None:
            return None
        decision = self.steering.decide(state)
        if self.coordinator.steer(decision):
            self.decisions.append(decision)
        self.desk.carry_out()
        return decision

    def rounds(self, count: int) -> None:
        for _ in range(count):
            self.round()

    @property
    def plan(self) -> Plan:
        """In force."""
        assert self.coordinator.plan is not None
        return self.coordinator.plan

    @property
    def causes(self) -> list[str]:
        return [decision.cause for decision in self.decisions]


def test_a_decision_holds_from_the_next_round_that_closes_and_all_are_told_the_same() -> None:
    run = Steered()
    before = run.plan
    run.round()
    assert run.plan == before, "the round that is open was begun under the old plan"
    assert run.steering.plan is not None
    assert run.steering.plan.from_round == run.desk.version() + 2
    run.round()
    assert run.plan.sync_every == run.steering.plan.sync_every != before.sync_every
    told = run.read[run.plan.revision]
    assert set(told) == {"a", "b"}
    assert told["a"] == told["b"]
    (event,) = run.desk.events("plan_decided")
    assert (event["layer"], event["cause"]) == ("top", "first")
    assert event["utilization"] is not None


def test_nothing_is_chosen_before_anything_was_measured() -> None:
    run = Steered()
    run.tells = {worker: {"steps_per_second": 0.0, "facts": UNSET} for worker in "ab"}
    before = run.plan
    run.rounds(3)
    assert run.decisions == []
    assert run.plan == before
    assert run.steering.last is not None
    assert "nothing that can be believed was measured" in run.steering.last.reason


def test_a_link_ten_times_slower_and_back_is_followed_with_a_reason() -> None:
    run = Steered()
    run.rate = dict.fromkeys("ab", 400 * MBIT)
    run.rounds(12)
    fast = run.plan.sync_every
    run.rate = dict.fromkeys("ab", 40 * MBIT)
    run.rounds(12)
    slow = run.plan.sync_every
    run.rate = dict.fromkeys("ab", 400 * MBIT)
    run.rounds(24)
    assert run.causes == ["first", "slower", "faster"]
    assert slow > 2 * fast
    assert run.plan.sync_every <= 1.6 * fast, "with more room on the way back"
    assert "the target is missed" in run.decisions[1].reason
    assert "the link allows a gentler setting" in run.decisions[2].reason


def test_a_smaller_codec_comes_before_a_longer_interval_and_goes_again() -> None:
    run = Steered()
    run.coordinator.plan = replace(run.plan, codec="bf16", down_codec="bf16")
    run.rate = dict.fromkeys("ab", 400 * MBIT)
    run.rounds(12)
    assert run.plan.codec == "bf16"
    run.rate = dict.fromkeys("ab", 40 * MBIT)
    run.rounds(12)
    assert run.plan.codec == "int4"
    assert run.plan.down_codec == "bf16", "that one is fixed"
    run.rate = dict.fromkeys("ab", 400 * MBIT)
    run.rounds(24)
    assert run.plan.codec == "bf16"
    assert [{c.field: c.after for c in d.changes}.get("codec") for d in run.decisions] == [None, "int4", "bf16"]


@pytest.mark.parametrize(
    ("now", "settled", "may_grow", "wanted"),
    [
        ("bf16", "bf16", True, ("bf16", "int8", "int4")),
        ("int4", "int8", True, ("bf16", "int8", "int4")),
        ("int4", "int8", False, ("int8", "int4")),
        ("fp32", "fp32", True, ("fp32",)),
        ("int8+feedback", "bf16", True, ("int8+feedback",)),
        ("int8", "fp32", False, ("bf16", "int8", "int4")),
    ],
)
def test_a_codec_is_chosen_among_the_usual_ones(now: str, settled: str, may_grow: bool, wanted: object) -> None:
    run = Steered(settings=replace_settings(may_grow=may_grow))
    assert run.steering._codecs(replace(run.plan, codec=now), settled) == wanted


@pytest.mark.parametrize("seed", range(20))
def test_on_a_steady_noisy_link_there_is_at_most_one_change_in_ten_rounds(seed: int) -> None:
    rng = random.Random(seed)
    run = Steered("abc")
    run._rng, run.noise = rng, 0.3
    run.rate = {worker: rng.uniform(20, 2000) * MBIT for worker in "abc"}
    run.step_s = {worker: rng.uniform(0.3, 3.0) for worker in "abc"}
    run.rounds(40)
    began = [decision.plan.from_round for decision in run.decisions]
    assert all(later - earlier >= 10 for earlier, later in pairwise(began)), run.causes


@pytest.mark.parametrize("seed", range(20))
def test_nobody_reads_a_revision_in_another_way_than_the_others(seed: int) -> None:
    """Workers come and go, links and speeds change: whoever was told of a revision was told the same bytes, and does
    what the plan says for its name."""
    rng = random.Random(f"readers {seed}")
    run = Steered("abcd")
    for _ in range(25):
        change = rng.choice(["rate", "speed", "leave", "join", "none"])
        here = list(run.workers)
        if change == "leave" and len(here) > 1:
            gone = rng.choice(here)
            run.workers.remove(gone)
            run.desk.leave(gone)
        if change == "join" and (away := [worker for worker in "abcd" if worker not in here]):
            run.workers.insert(0, away[0])  # nobody expects it in this round: it comes first, or too late
            run.desk.join(away[0], start=run.sequence + 2)
        run.rate |= dict.fromkeys("abcd", 10 ** rng.uniform(5.5, 9.0)) if change == "rate" else {}
        if change == "speed":
            run.step_s[rng.choice("abcd")] = rng.uniform(0.2, 4.0)
        run.round()
    assert len(run.read) > 2
    for revision, told in run.read.items():
        assert len({msgspec.json.encode(plan) for plan in told.values()}) == 1, revision
        for worker, plan in told.items():
            mine = plan_of(plan, worker)
            steps = {each.cluster: each.local_steps for each in plan.assignments or ()}
            assert mine.sync_every == steps.get(worker, plan.sync_every)
            assert replace(mine, sync_every=plan.sync_every, delay=plan.delay) == plan


LIES: list[dict[str, Any]] = [
    {"steps_per_second": 1e9},
    {"steps_per_second": 1e-9},
    {"facts": MemberFacts(batch_size=10**12, unit_steps=10**9, size=10**6)},
    *(
        {
            "facts": MemberFacts(
                links=tuple(
                    MeasuredLink(source=s, target=t, bytes_per_s=rate, latency_s=latency)
                    for s, t in (("d", THE_SERVER), (THE_SERVER, "d"), ("a", THE_SERVER), (THE_SERVER, "b"))
                )
            )
        }
        for rate in (0.0, 1e-3, 1.0, 1e15)
        for latency in (0.0, 59.0, 1e9)
    ),
]


@pytest.mark.parametrize("lie", range(len(LIES)))
def test_a_liar_does_not_move_the_others_interval(lie: int) -> None:
    """Far more than one rung of the ladder; its own steps stay within bounds."""
    honest, run = Steered("abcd"), Steered("abcd")
    run.tells = {"d": LIES[lie]}
    for each in (honest, run):
        each.rounds(12)
    wanted = {each.cluster: each.local_steps for each in honest.plan.assignments or ()}
    got = {each.cluster: each.local_steps for each in run.plan.assignments or ()}
    assert set(got) == set("abcd")
    assert all(wanted[w] / 1.3 <= got[w] <= 1.3 * wanted[w] for w in "abc"), (wanted, got)
    assert 1 <= got["d"] <= 100


def test_a_restarted_server_goes_on_with_the_plan_in_its_journal() -> None:
    run = Steered()
    run.rounds(3)
    kept = run.coordinator.remember()
    assert kept.plan == run.plan
    again = Steered()
    again.coordinator.resume(kept.ledger, kept.totals, msgspec.json.decode(msgspec.json.encode(kept.facts)), 0.0)
    assert again.steering.plan == run.steering.plan
    assert again.coordinator.rules.round_deadline_s == run.coordinator.rules.round_deadline_s is not None


def test_an_operators_deadline_stays() -> None:
    run = Steered(settings=replace_settings(round_deadline_s=7.0), round_deadline_s=7.0)
    run.rounds(3)
    assert run.decisions
    assert run.coordinator.rules.round_deadline_s == 7.0


def test_an_operators_interval_is_carried_out_and_the_target_stays_above_it() -> None:
    run = Steered()
    run.rounds(12)
    chosen = run.plan.sync_every
    run.coordinator.control(Control(kind="plan", changes=Wishes(sync_every=400)), run.desk.now)
    run.round()
    assert (run.plan.sync_every, run.plan.assignments) == (400, UNSET)
    run.rounds(12)
    assert run.plan.sync_every <= 1.6 * chosen
    assert run.causes[-1] == "faster"
    assert run.decisions[-1].changes[0].before == "400"


def test_an_operators_interval_that_will_do_stays_without_a_word() -> None:
    run = Steered()
    run.rounds(12)
    wanted = run.plan.sync_every + 1
    run.coordinator.control(Control(kind="plan", changes=Wishes(sync_every=wanted)), run.desk.now)
    run.rounds(12)
    assert run.plan.sync_every == wanted
    assert run.steering.plan is not None
    assert run.steering.plan.sync_every == wanted
    assert run.causes == ["first"]
    assert len(run.desk.events("plan_decided")) == 1


def test_members_that_come_and_go_are_assigned_at_once() -> None:
    run = Steered("abc")
    run.rounds(3)
    run.workers.remove("c")
    run.desk.leave("c")
    run.rounds(2)
    assert [each.cluster for each in run.plan.assignments or ()] == ["a", "b"]
    assert run.causes == ["first", "members"]


def test_a_policy_is_asked_first_and_one_that_asks_for_nonsense_is_told_of_once() -> None:
    def wants_700(state: ControllerState) -> dict[str, LayerPlan]:
        return {layer.name: replace(layer.plan, sync_every=700) for layer in state.layers if layer.plan is not None}

    run = Steered()
    run.steering._policy = wants_700
    run.rounds(6)
    assert run.plan.sync_every <= 500
    told = run.desk.events("plan_decided")
    assert [event["cause"] for event in told] == ["first", "policy"]
    assert "sync_every must be from 10 to 500, got 700" in str(told[1]["reason"])


def test_a_worker_of_release_0_2_is_told_the_interval_alone() -> None:
    run = Steered()
    run.rounds(3)
    assert run.plan.assignments
    old = as_spoken(run.plan, 1)
    assert old.assignments is UNSET
    assert old.sync_every == run.plan.sync_every


def test_clusters_count_in_steps_of_their_rounds() -> None:
    """Bounds of 10 to 500 steps are 1 to 10 rounds of 50."""
    run = Steered()
    run.rate = dict.fromkeys("ab", 1 * MBIT)
    link = {worker: MeasuredLink(source=THE_SERVER, target=worker, bytes_per_s=MBIT) for worker in "ab"}
    run.tells = {
        worker: {"facts": MemberFacts(unit_steps=50, members=("x", "y"), size=2, links=(link[worker],))}
        for worker in "ab"
    }
    run.rounds(3)
    assert run.plan.sync_every == 10
    assert {each.leader for each in run.plan.assignments or ()} == {"x"}


def test_a_cluster_tells_what_its_members_told() -> None:
    desk = Desk()
    desk.join("a", info={"accelerator": "nvidia:H100", "backends": "nccl, gloo", "data_location": "berlin"})
    desk.join("b", info={"accelerator": "huawei:910B", "backends": "hccl,gloo", "gpus": 8})
    for worker in "ab":
        desk.coordinator.heartbeat(
            Heartbeat(**desk.head(worker), step=1, steps_per_second=2.0, facts=MemberFacts(batch_size=8)), desk.now
        )
    members = list(desk.coordinator.members)
    told = facts_of_cluster(members, desk.coordinator.plan)
    assert (told.members, told.size) == (("a", "b"), 2)
    assert told.accelerators == ("huawei:910B", "nvidia:H100")
    assert told.backends == ("gloo",)
    assert (told.unit_steps, told.batch_size) == (4, 2 * 4 * 8)
    one = facts_of(members[0])
    assert (one.step_s, one.batch_size, one.data_location) == (0.5, 8, "berlin")
    desk.leave("a")
    assert members[0].facts is None


def test_no_member_can_make_its_cluster_say_what_the_layer_above_refuses() -> None:
    """A heartbeat out of bounds is refused, and a cluster whose heartbeats are refused is dead up there."""
    desk = Desk("ab")
    kinds = tuple(f"{number:02d}{'x' * 62}" for number in range(16))
    for worker in "ab":
        said = MemberFacts(
            batch_size=10**12, size=10**6, backends=kinds, accelerators=tuple(worker + k[1:] for k in kinds)
        )
        desk.coordinator.heartbeat(Heartbeat(**desk.head(worker), step=1, steps_per_second=2.0, facts=said), desk.now)
    desk.join("c", info={"accelerator": "y" * 256, "backends": ",".join(["z" * 120, kinds[0], *"klmnopqrstuvw"])})
    assert desk.coordinator.plan is not None
    slow = replace(desk.coordinator.plan, sync_every=2**53)
    for members in (list(desk.coordinator.members), list(desk.coordinator.members)[:2]):
        told = facts_of_cluster(members, slow)
        assert msgspec.json.decode(msgspec.json.encode(told), type=MemberFacts) == told
        assert told.size == 10**6
        assert kinds[0] in told.backends


@pytest.mark.parametrize(
    "said",
    [
        {"links": [{"source": "😀" * 100, "target": "a", "bytes_per_s": 1.0}]},
        {"links": [{"source": "a", "target": "the\nserver", "bytes_per_s": 1.0}]},
        {"links": [{"source": "a", "target": "b", "bytes_per_s": 1.0}] * 65},
        {"accelerators": ["x" * 65]},
        {"backends": [str(number) for number in range(17)]},
        {"states": ["x" * 65]},
        {"states": [""] * 65},
        {"states": [1]},
    ],
)
def test_what_a_member_tells_is_kept_and_therefore_small(said: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(said, MemberFacts)


def test_a_cluster_whose_own_line_is_slow_is_sent_through_one_that_relays_and_back() -> None:
    run = Steered()
    run.rate["a"] = 2 * MBIT
    run.adds["b"] = {"relays": True}

    def tell(straight_mbit: float, via: str) -> None:
        lines = {(THE_SERVER, straight_mbit), ("b", 180.0)}
        links = tuple(
            MeasuredLink(source=source, target=target, bytes_per_s=mbit * MBIT)
            for other, mbit in sorted(lines)
            for source, target in (("a", other), (other, "a"))
        )
        run.adds["a"] = {"links": links, "via": via}

    tell(2.0, "")
    run.rounds(4)
    plan = run.steering.plan
    assert plan is not None
    assert (plan.route, plan.parents) == ("tree", {"a": "b", "b": THE_SERVER})
    assert [each.sends_to for each in run.coordinator.plan.assignments] == ["b", THE_SERVER], "everybody is told"

    run.rate["a"] = 180 * MBIT  # what arrives through the relay
    tell(2.0, "b")
    run.rounds(24)
    assert run.steering.plan.parents["a"] == "b", "it says nothing of the straight line"

    tell(200.0, "b")
    run.rounds(24)
    assert run.steering.plan.parents == {"a": THE_SERVER, "b": THE_SERVER}


def test_a_probe_is_asked_for_where_nothing_was_measured() -> None:
    run = Steered()
    run.beat("a")
    member = run.coordinator.members.find("a")
    assert member is not None
    assert not lacks_link(member)
    beat = Heartbeat(**run.desk.head("b"), step=1, steps_per_second=1.0)
    assert run.coordinator.heartbeat(beat, run.desk.now).measure_link is True
    run.coordinator.steering = None
    assert run.coordinator.heartbeat(beat, run.desk.now).measure_link is UNSET


def test_what_a_member_told_of_its_link_ages_until_it_tells_more() -> None:
    run = Steered()
    run.beat("a")
    member = run.coordinator.members.find("a")
    assert member is not None
    reports = links_of([member], (), {"a": 25.0})
    assert [report.age_s for report in reports] == [25.0, 25.0]


def replace_settings(**changes: Any) -> SteeringSettings:
    return SteeringSettings(**{"target_utilization": 0.95, **changes})


ANOTHER: dict[str, Any] = {
    "layer": "elsewhere",
    "revision": 99,
    "from_round": 99,
    "sync_every": 77,
    "codec": "int4",
    "down_codec": "int4",
    "num_fragments": 3,
    "delay": 2,
    "carry": False,
    "outer_lr": 0.31,
    "timeout_s": 77.0,
    "backend": "nccl",
    "route": "tree",
    "assignments": (),
    "not_planned_for": ("b",),
}


@pytest.mark.parametrize("field", LayerPlan.__struct_fields__)
def test_what_is_carried_out_in_a_run_is_what_the_reference_says(field: str) -> None:
    """One field of a decision is another: the run's plan is, too, if and only if the page says so."""
    run = Steered()
    run.rounds(2)
    now = run.plan
    decided = run.steering.plan
    assert decided is not None
    decided = replace(decided, codec=now.codec)
    other = replace(decided, **{field: ANOTHER[field]})
    assert other != decided
    is_carried_out = as_run_plan(now, decided) != as_run_plan(now, other)
    assert is_carried_out == (field in {*ORDERS, *TERMS, "assignments"})
    if is_carried_out and field != "assignments":
        assert {"delay": "fragment_delay", "carry": "fragment_carry"}.get(field, TERMS.get(field, field)) in CONTROLLED
    assert (field in ONLY_SAID) <= (not is_carried_out)


def test_no_setting_of_a_layer_without_a_server_is_said_to_be_the_controllers() -> None:
    """A controller is a server's: replicas and ranks have none."""
    tables = markdown_tables()
    assert CONTROLLER in tables["server layers"]
    assert not any(CONTROLLER in tables[name] for name in ("torchft layers", "allreduce layers", "job layers"))
    held = {line.split("`")[1] for line in tables["server layers"].splitlines() if line.endswith(f"{CONTROLLER} |")}
    assert held == CONTROLLED


def test_an_operators_terms_stay() -> None:
    """Neither η nor the deadline of rounds is in the plan then."""
    run = Steered(settings=replace_settings(outer_lr=0.5, round_deadline_s=7.0), round_deadline_s=7.0)
    run.rounds(3)
    assert run.decisions
    assert (run.plan.outer_lr, run.plan.round_deadline_s) == (UNSET, UNSET)


def test_outer_lr_grows_with_the_interval_and_changes_with_it_only() -> None:
    run = Steered()
    run.rate = dict.fromkeys("ab", 400 * MBIT)
    run.rounds(12)
    fast = run.plan
    run.rate = dict.fromkeys("ab", 40 * MBIT)
    run.rounds(12)
    assert run.plan.sync_every > fast.sync_every
    assert run.plan.outer_lr > fast.outer_lr
    assert [decision.plan.outer_lr for decision in run.decisions] == [fast.outer_lr, run.plan.outer_lr]
