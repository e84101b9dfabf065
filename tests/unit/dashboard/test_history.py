"""What the page remembers is bounded, whatever workers call themselves and however long the run is."""

from __future__ import annotations

import math

import msgspec

from outerstep.dashboard.history import (
    MOST_CHARACTERS,
    MOST_CODES,
    MOST_CURVES,
    MOST_GONE,
    MOST_POINTS,
    MOST_ROUNDS,
    MOST_TOLD,
    PageCurve,
    PageHistory,
)
from outerstep.events import (
    ContributionLeftOut,
    GroupStateChanged,
    RefusalsSuppressed,
    RequestRefused,
    RoundDecided,
    WorkerDied,
    WorkerJoined,
    WorkerLeft,
)
from outerstep.observe.status import PeerMemberStatus, PeerStatus, ServerStatus, WorkerStatus


def status(*, losses: dict[str, tuple[int, float | None]], received: int = 0, sync_round: int = 0) -> ServerStatus:
    workers = {name: WorkerStatus(step=step, loss=loss) for name, (step, loss) in losses.items()}
    return ServerStatus(mode="sync", workers=workers, bytes_received=received, sync_round=sync_round)


def test_a_full_curve_keeps_the_whole_run_with_half_the_points() -> None:
    curve = PageCurve()
    for i in range(100 * MOST_POINTS):
        curve.add((float(i), 0.0))
    assert MOST_POINTS // 4 <= len(curve.points) < MOST_POINTS
    assert curve.points[0][0] == 0.0
    assert curve.points[-1][0] > 95 * MOST_POINTS
    gaps = {b[0] - a[0] for a, b in zip(curve.points, curve.points[1:], strict=False)}
    assert max(gaps) <= 2 * min(gaps)


def test_a_loss_is_a_point_when_its_worker_has_taken_steps() -> None:
    history = PageHistory()
    for time_s, step in ((1.0, 5), (2.0, 5), (3.0, 9)):
        history.sample(status(losses={"left": (step, 2.5), "right": (1, None)}), time_s)
    assert history.losses.keys() == {"left"}
    assert history.losses["left"].points == [(1.0, 5, 2.5), (3.0, 9, 2.5)]


def test_a_loss_that_is_not_finite_is_no_point() -> None:
    history = PageHistory()
    history.sample(status(losses={"left": (1, math.nan), "right": (1, math.inf)}), 1.0)
    assert history.losses == {}
    assert msgspec.json.decode(msgspec.json.encode(history.everything()))["mean"] == []


def test_the_mean_has_a_point_per_round() -> None:
    history = PageHistory()
    both = {"left": (1, 2.0), "right": (1, 4.0)}
    history.sample(status(losses=both), 1.0)
    history.sample(status(losses=both), 2.0)
    history.hear(RoundDecided(0, 1, ["left", "right"]), 2.5)
    history.sample(status(losses=both, sync_round=1), 3.0)
    assert history.mean.points == [(1.0, 0, 3.0), (3.0, 1, 3.0)]


def test_a_thousand_workers_have_so_many_curves_and_a_newcomer_takes_that_of_one_who_left() -> None:
    history = PageHistory()
    history.sample(status(losses={f"w{i}": (1, 1.0) for i in range(1000)}), 1.0)
    assert len(history.losses) == MOST_CURVES
    history.sample(status(losses={f"w{i}": (2, 1.0) for i in range(1, MOST_CURVES)} | {"new": (1, 1.0)}), 2.0)
    assert len(history.losses) == MOST_CURVES
    assert "new" in history.losses
    assert "w0" not in history.losses


def test_who_died_is_remembered_until_it_is_back() -> None:
    history = PageHistory()
    history.hear(WorkerDied("left", 31.0), 5.0)
    assert history.gone["left"]["how"] == "death"
    assert history.gone["left"]["silent_s"] == 31.0
    history.hear(WorkerJoined("left", "host", 2), 6.0)
    assert history.gone == {}
    for i in range(3 * MOST_GONE):
        history.hear(WorkerLeft(f"w{i}", "done"), 7.0)
    assert len(history.gone) == MOST_GONE


def test_a_flood_of_anything_stays_small() -> None:
    history = PageHistory()
    for i in range(2000):
        history.hear(RequestRefused(f"code{i}", "10.0.0.1", "/" + "x" * 5000, "id", "why " * 5000), float(i))
        history.hear(RoundDecided(0, i, [f"w{j}" for j in range(100)]), float(i))
        history.hear(ContributionLeftOut("<b>" * 500, 0, i, {f"k{j}": "v" * 5000 for j in range(100)}), float(i))
        history.hear(RefusalsSuppressed(count=7), float(i))
    assert len(history.refusals) <= MOST_CODES + 2
    assert history.refusals["suppressed"] == 14_000
    assert len(history.rounds) == MOST_ROUNDS
    assert len(history.told) == MOST_TOLD
    shown = history.everything()
    assert len(msgspec.json.encode(shown)) < 1 << 20
    assert max(len(told["worker"]) for told in shown["told"]) == MOST_CHARACTERS


def test_what_is_fresh_is_told_once() -> None:
    history = PageHistory()
    history.hear(WorkerJoined("left", "<img src=x>", 1), 1.0)
    history.hear(GroupStateChanged("left", "TRAINING"), 1.0)
    history.sample(status(losses={"left": (1, 2.0)}), 1.0)
    history.sample(status(losses={"left": (1, 2.0)}, received=500), 2.0)
    fresh = history.take_fresh()
    assert [told["kind"] for told in fresh["told"]] == ["join"]
    assert fresh["told"][0]["host"] == "<img src=x>"
    assert fresh["losses"] == {"left": [(1.0, 1, 2.0)]}
    assert fresh["traffic"] == [(2.0, 500, 0)]
    assert history.take_fresh() == {"refusals": {}, "gone": {}}


def test_a_peers_status_is_sampled_too() -> None:
    history = PageHistory()
    history.sample(
        PeerStatus(mode="gossip", peer_id="a", members=[PeerMemberStatus(peer_id="b", step=1, loss=1.5)]), 1.0
    )
    assert history.losses["b"].points == [(1.0, 1, 1.5)]


def test_workers_that_have_no_curve_because_there_are_many_are_not_remembered() -> None:
    history = PageHistory()
    here = {f"w{i}": (1, 1.0) for i in range(MOST_CURVES)}
    for i in range(1000):
        history.sample(status(losses={**here, f"passing-{i}": (i, 1.0)}), float(i))
    assert len(history._last_step) <= MOST_CURVES + 1
