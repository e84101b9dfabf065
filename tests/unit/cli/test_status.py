"""`outerstep status` as a person reads it."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from outerstep.cli.status import count, render
from outerstep.errors import ConfigError
from outerstep.observe.quantities import duration, size, sparkline
from typed import typed

WORKER = {"hostname": "alpha", "step": 120, "steps_per_second": 2.5, "loss": 1.5, "last_seen_s": 3.2}
SYNC: dict[str, Any] = {
    "run_id": "abc",
    "mode": "sync",
    "uptime_s": 75.0,
    "sync_round": 4,
    "total_submissions": 8,
    "bytes_received": 2_500_000,
    "bytes_sent": 999,
    "total_worker_deaths": 1,
    "plan": {"sync_every": 500, "codec": "bf16", "num_fragments": 1},
    "workers": {"left": WORKER},
    "failure": "",
    "fragments": [{"version": 4, "contributed": ["left"], "waiting_for": "contributions of right"}],
}
ASYNC = {
    **SYNC,
    "mode": "async",
    "dn_buffer_size": 3,
    "dn_buffered": 2,
    "dylu_enabled": True,
    "dylu_base_sync_every": 500,
    "workers": {
        "left": {
            **WORKER,
            "sync_every": 500,
            "staleness": 2,
            "contributions": 5,
            "bytes_received": 1_000_000,
            "tokens": 7,
        },
        "right": {**WORKER, "sync_every": 200, "staleness": 0, "contributions": 3, "bytes_received": 0, "tokens": 0},
    },
    "tokens": {"total": 2_500_000, "budget": 10_000_000, "per_second": 1500.0, "seconds_left": 5000.0},
}


def text(status: dict[str, Any]) -> str:
    console = Console(width=140, no_color=True)
    with console.capture() as captured:
        console.print(render(status, "h:1"))
    return captured.get()


def test_each_worker_has_its_state_if_the_server_says_it() -> None:
    assert "state" not in text(SYNC)
    shown = text({**SYNC, "workers": {"left": {**WORKER, "state": "TRAINING (sync)"}}})
    assert "state" in shown
    assert "TRAINING (sync)" in shown


def test_an_older_server_that_says_less_is_shown_as_well() -> None:
    shown = text(SYNC)
    for words in (
        "sync",
        "round 4",
        "8 contributions",
        "2.5 MB",
        "999 B",
        "1m15s",
        "sync_every 500, bf16, 1 fragment",
    ):
        assert words in shown
    for absent in ("Nesterov", "dynamic", "tokens", "staleness"):
        assert absent not in shown


def test_an_asynchronous_run_shows_its_buffer_its_pace_and_its_tokens() -> None:
    shown = text(ASYNC)
    assert "delayed Nesterov: 2 of 3 buffered" in shown
    assert "dynamic local updates: H 500 for the fastest" in shown
    assert "tokens: 2.50 M of 10.00 M (25.0%), 1,500/s, about 1h23m to go" in shown
    row = next(line for line in shown.splitlines() if "left" in line and "alpha" in line)
    assert [cell.strip() for cell in row.strip("│").split("│")] == [
        "left", "alpha", "120", "2.50", "500", "1.5000", "5", "1.0 MB", "7", "2", "3 s ago",
    ]  # fmt: skip


def test_how_the_last_round_went_is_shown_as_far_as_it_is_known() -> None:
    [fragment] = SYNC["fragments"]
    watched = {"aggregated_grad_norm": 0.87654, "peer_grad_similarity": 0.72, "weight_divergence": 0.2}
    told = {**SYNC, "workers": {"left": {**WORKER, "delta_norm": 0.9712}}}
    shown = text({**told, "fragments": [{**fragment, "watched": watched}, {**fragment, "watched": {}}]})
    assert "fragment 0: version 4 (‖Δ̄‖ 0.877, similarity 0.72, divergence 0.2); contributed: left" in shown
    assert "fragment 1: version 4; contributed: left" in shown
    assert "0.971" in next(line for line in shown.splitlines() if "alpha" in line)


def test_a_robust_run_shows_its_rule_and_the_rounds_that_moved_nothing() -> None:
    assert "aggregation" not in text({**SYNC, "aggregation": "mean", "min_workers": 1})
    robust = {**SYNC, "aggregation": "krum", "min_workers": 5, "rounds_too_few": 0}
    assert "aggregation: krum, at least 5 contributions\n" in text(robust).replace(" \n", "\n")
    assert "2 rounds moved nothing because too few had trained" in text({**robust, "rounds_too_few": 2})


def test_a_column_that_is_empty_for_all_is_left_out() -> None:
    workers = {name: {**facts, "staleness": 0, "loss": None} for name, facts in ASYNC["workers"].items()}
    shown = text({**ASYNC, "workers": workers})
    assert "staleness" not in shown
    assert "loss" not in shown
    assert "tokens" in shown


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fragment_delay": 5}, "adopted 5 steps later and overwritten"),
        ({"fragment_delay": 5, "fragment_alpha": 0.5}, "later and mixed with α 0.5"),
        ({"fragment_delay": 5, "fragment_carry": True}, "later and carried"),
        ({"revision": 2}, "revision 2"),
    ],
)
def test_the_plan_says_what_is_special_about_it(changes: dict[str, Any], words: str) -> None:
    assert words in text({**SYNC, "plan": {**SYNC["plan"], **changes}})


def test_before_anybody_joined_and_after_the_end() -> None:
    shown = text({**SYNC, "plan": None, "workers": {}, "fragments": [], "closing": "enough", "failure": "disk full"})
    for words in ("open until the first worker joins", "no workers", "shutting down: enough", "disk full"):
        assert words in shown


def test_names_are_not_markup() -> None:
    assert "[red]" in text({**SYNC, "workers": {"[red]": WORKER}})


def test_numbers_are_short() -> None:
    assert [count(n) for n in (0, 12_345, 1e6, 2.5e9, 3e12)] == ["0", "12,345", "1.00 M", "2.50 B", "3.00 T"]
    assert [size(n) for n in (0, 999, 1000, 10**15)] == ["0 B", "999 B", "1.0 kB", "1000.0 TB"]
    assert [duration(s) for s in (5, 65, 3700)] == ["5s", "1m05s", "1h01m"]


@pytest.mark.parametrize(
    ("line", "said"), [("5", "SECONDS needs --watch, got 5"), ("--watch --json", "leave --watch out")]
)
def test_what_makes_no_sense_together_is_refused(line: str, said: str) -> None:
    result = typed(["status", *line.split()])
    assert isinstance(result.exception, ConfigError)
    assert said in str(result.exception)


def test_workers_of_an_older_protocol_are_marked_and_a_run_without_them_has_no_such_column() -> None:
    assert "protocol" not in text({**SYNC, "workers": {"left": {**WORKER, "protocol": 2}}})
    shown = text({**SYNC, "workers": {"left": {**WORKER, "protocol": 2}, "right": {**WORKER, "protocol": 1}}})
    header, (left, right) = (
        next(line for line in shown.splitlines() if "protocol" in line),
        [line for line in shown.splitlines() if "alpha" in line],
    )
    place = [cell.strip() for cell in header.split("┃")].index("protocol")
    assert [line.split("│")[place].strip() for line in (left, right)] == ["", "1"]


def test_a_peers_run_names_its_protocol() -> None:
    shown = text({"mode": "gossip", "peer_id": "p", "run_id": "abc", "begun": True, "protocol": 1, "is_member": True})
    assert "run abc  protocol 1  block 0" in shown


def test_what_a_worker_tells_of_itself_has_a_column_if_anybody_tells_something() -> None:
    assert "says" not in text(SYNC)
    shown = text({**SYNC, "workers": {"left": {**WORKER, "info": {"gpus": 2, "odd": "\x1b[2J", "long": "x" * 256}}}})
    assert "gpus 2, odd \\u001b[2J, long xxx" in shown
    assert "…" in shown


def test_what_the_controller_has_chosen_and_the_links_it_saw_are_shown_as_they_are() -> None:
    """Whatever a member is called: a terminal obeys nothing of it."""
    decision = {"round": 12, "revision": 2, "cause": "slower", "reason": "the target is missed: 40.0 %"}
    layer = {
        "layer": "top",
        "target_utilization": 0.95,
        "utilization": 0.961,
        "plan": {"revision": 2, "from_round": 12, "sync_every": 75, "codec": "int8", "backend": "gloo"},
        "decisions": [decision],
        "last": {**decision, "cause": "kept", "reason": "the target is met", "not_believed": ["link 'x' → 'y': no"]},
    }
    link = {"source": "left", "target": "the server", "bytes_per_s": 12.5e6, "latency_s": 0.02, "measured_by": "[red]x"}
    clusters = {"left": {"members": ["a", "b"], "size": 2}}
    shown = text({**SYNC, "layer": layer, "links": [link] * 40, "clusters": clusters})
    assert "controller of top: target 95.0%, 96.1% expected" in shown
    assert "plan 2 from round 12: every 75, int8, delay 0" in shown
    assert "round 12, slower: the target is missed: 40.0 %" in shown
    assert "round 12, kept: the target is met" in shown
    assert "not believed: link 'x' → 'y': no" in shown
    assert "left → the server" in shown
    assert "100 Mbit/s" in shown
    assert "20 ms" in shown
    assert "[red]x" in shown
    assert "and 8 more (--json)" in shown
    assert "2: a, b" in shown
    assert "controller" not in text(SYNC)
    assert "link" not in text(SYNC)


def test_what_wants_a_look_comes_first_and_the_loss_is_drawn() -> None:
    silent = {**WORKER, "last_seen_s": 70.0, "quarantine": {"left_s": 61.0, "reason": "it sent [red]NaN[/red]"}}
    status = {**SYNC, "trouble": "the disk is full", "closing": "enough", "heartbeat_timeout": 120.0}
    lines = text({**status, "workers": {"left": silent, "right": WORKER}, "losses": [3.0, 2.0, 1.0]}).splitlines()
    assert lines[1:5] == [
        "the disk is full",
        "shutting down: enough",
        "left has been silent for 70 s; in 50 s it counts as dead",
        "left is in quarantine, 1m01s left: it sent [red]NaN[/red]",
    ]
    assert "loss 1  █▅▁  3 rounds, 3 to 1" in lines


def test_a_peers_troubles_come_first_and_its_loss_is_drawn() -> None:
    peer = {
        "mode": "gossip",
        "peer_id": "anna",
        "run_id": "abc",
        "begun": True,
        "failure": "it stopped",
        "trouble": "the disk is full",
        "is_short_of_peers": True,
        "silent": ["ben"],
        "expelled": ["[red]mallory"],
        "refused": {"mallory": 2},
        "members": [{"peer_id": "anna", "loss": 1.0}],
        "losses": [3.0, 2.0, 1.0],
    }
    lines = text(peer).splitlines()
    assert lines[1:8] == [
        "it stopped",
        "the disk is full",
        "it is not a member of the run, or not yet",
        "too few peers are there to decide anything",
        "silent: ben",
        "expelled (proven to lie, or no longer invited): [red]mallory",
        "said, answered or sent what cannot be: mallory 2",
    ]
    assert "loss 1  █▅▁  3 rounds, 3 to 1" in lines
    table = next(i for i, line in enumerate(lines) if "steps/s" in line)
    assert lines.index("loss 1  █▅▁  3 rounds, 3 to 1") < table
    waiting = text({**peer, "begun": False}).splitlines()
    assert "has not joined a run yet" in waiting[0]
    assert "the disk is full" in waiting
    quiet = text({"mode": "gossip", "peer_id": "anna", "run_id": "abc", "begun": True, "is_member": True})
    assert quiet.splitlines()[1].startswith("received"), "nothing is wrong, and no loss is known"


@pytest.mark.parametrize(
    ("values", "drawn"), [([], ""), ([1.0], "▁"), ([2.0, 2.0], "▁▁"), ([0.0, 1.0], "▁█"), ([9.0, 0.0, 7.0], "▁█")]
)
def test_a_sparkline_shows_the_newest_between_least_and_most(values: list[float], drawn: str) -> None:
    assert sparkline(values, width=2) == drawn


def test_a_sparkline_is_drawn_of_whatever_finite_losses_workers_report() -> None:
    assert sparkline([1.7e308, -1.7e308]) == "█▁"
    assert len(sparkline([0.0, 5e-324])) == 2
