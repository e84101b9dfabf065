"""Memory, disk and journal: the constants are those of the code, and the page is current."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outerstep.config import server as config_of_server
from outerstep.config.server import ServerConfig
from outerstep.coordination.planning import capacity
from outerstep.coordination.planning.capacity import (
    Sizing,
    journal_bytes_per_round,
    server_disk,
    server_memory,
    server_traffic,
    staleness,
    state_bytes,
    worker_memory,
)
from outerstep.coordination.planning.tables import renew
from outerstep.server import publish

ROOT = Path(__file__).parents[4]


def test_constants_are_those_of_the_code() -> None:
    assert capacity.OLDER_HELD == publish.OLDER_HELD
    assert capacity.OLDER_HELD_IF_EXACT == publish.OLDER_HELD_IF_EXACT
    assert capacity.LEAST_POOL_BYTES == config_of_server.LEAST_POOL_BYTES
    assert ServerConfig.keep_saves == capacity.KEPT_STATES


def test_a_server_of_bf16_has_twenty_six_bytes_per_parameter() -> None:
    made = server_memory(Sizing(1e9, 2))
    assert (made.total_bytes - made.process_bytes) / 1e9 == pytest.approx(4 + 4 + 4 + 4 + 2 + 4 + 4)


def test_memory_does_not_grow_with_workers_beyond_two() -> None:
    two, many = (server_memory(Sizing(1e9, k)).total_bytes for k in (2, 1000))
    assert two == many


def test_an_exact_downlink_has_no_outer_parameters_of_its_own_and_no_updates() -> None:
    made = server_memory(Sizing(1e9, 2, "fp32", "fp32"))
    assert made.target_bytes == made.updates_bytes == 0.0
    assert made.reader_bytes == 8e9


def test_smaller_updates_are_kept_in_greater_number_within_half_of_the_whole() -> None:
    for codec in ("bf16", "int8", "int4"):
        run = Sizing(1e9, 2, codec, codec)
        kept = server_memory(run).updates_bytes
        assert kept % run.down_bytes == pytest.approx(0.0)
        assert kept <= 2e9 < kept + run.down_bytes


def test_a_round_of_the_journal_is_the_smaller_of_mean_and_contributions() -> None:
    assert journal_bytes_per_round(Sizing(1e9, 1, "bf16")) == 2e9
    assert journal_bytes_per_round(Sizing(1e9, 8, "bf16")) == 4e9
    assert journal_bytes_per_round(Sizing(1e9, 2, "int4")) < 1.1e9


def test_a_state_has_the_model_twice_unless_it_is_fp32() -> None:
    assert state_bytes(Sizing(1e9, 2, weights="bf16")) == 14e9
    assert state_bytes(Sizing(1e9, 2, weights="fp32")) == 12e9
    assert state_bytes(Sizing(1e9, 2, "fp32", "fp32", weights="fp32")) == 8e9


def test_what_finds_no_room_in_memory_is_in_the_spool() -> None:
    assert server_disk(Sizing(1e9, 2)).spool_bytes == 0.0
    assert server_disk(Sizing(1e9, 10)).spool_bytes == 8 * 2e9
    assert server_disk(Sizing(1e9, 100)).spool_bytes == 16 << 30


def test_everything_goes_through_the_server_once_for_each_worker() -> None:
    made = server_traffic(Sizing(1e9, 10, "int8", "bf16"))
    assert made.in_bytes == pytest.approx(10e9, rel=1e-3)
    assert made.out_bytes == 20e9


def test_fragments_divide_what_is_under_way_and_nothing_else() -> None:
    whole, cut = worker_memory(Sizing(1e9, 2)), worker_memory(Sizing(1e9, 2, num_fragments=4))
    assert whole.anchor_bytes == cut.anchor_bytes
    assert whole.sent_bytes == 4 * cut.sent_bytes
    assert worker_memory(Sizing(1e9, 2, "int8+feedback")).feedback_bytes == 4e9


def test_staleness_counts_the_interval_and_the_delay() -> None:
    assert staleness(100, 5, 8).news_steps == 105
    assert staleness(100, 5, 8).versions == 0.0
    assert staleness(100, 0, 8, asynchronous=True).versions == 7.0


def test_the_page_is_current() -> None:
    page = (ROOT / "docs" / "reference" / "capacity.md").read_text()
    assert page == renew(page), "run: python -m outerstep.coordination.planning.tables docs/reference/capacity.md"


def test_measured_servers_need_what_the_model_says() -> None:
    """`bench/memory.py --default` of real servers with thin clients: everything counted, all settings as they are."""
    for row in json.loads((ROOT / "bench" / "results" / "memory_planned.json").read_text())["runs"]:
        run = Sizing(row["parameters"], row["workers"], row["codec"], row["codec"], weights="fp32")
        assert server_memory(run).total_bytes == pytest.approx(row["most_resident_bytes"], rel=0.20), row
