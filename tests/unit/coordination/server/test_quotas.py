"""What a token and a worker may cost: who pays, when it is too much, and that nobody pays for another."""

from __future__ import annotations

import pytest

from outerstep.coordination.server.quotas import BURST_MIN, MOST_ACCOUNTS, QuotaLimits, Quotas
from outerstep.errors import Busy, QuotaExceeded
from outerstep.types import ContributionKey

LIMITS = QuotaLimits(joins=60, records=60, refused=60, bytes=6000, open_uploads=2)


def key(worker_id: str, sequence: int = 1) -> ContributionKey:
    return ContributionKey(run_id="0123456789abcdef", worker_id=worker_id, fragment=0, sequence=sequence)


def join(quotas: Quotas, worker_id: str, now: float, *, token: str = "site", is_newcomer: bool = True) -> None:
    quotas.check("joins", token, worker_id, now, is_newcomer=is_newcomer)
    quotas.charge("joins", token, worker_id, now, is_newcomer=is_newcomer)


def use_up(quotas: Quotas, token: str = "site") -> None:
    for i in range(60 * BURST_MIN):
        join(quotas, f"w{i}", 0.0, token=token)


def test_newcomers_with_one_token_share_what_it_may_cost() -> None:
    quotas = Quotas(LIMITS)
    use_up(quotas)
    with pytest.raises(QuotaExceeded) as refused:
        join(quotas, "one-more", 0.0)
    said = refused.value
    assert said.message == (
        "newcomers with the token 'site' may have 60 joins a minute (max_joins_per_minute), and used them up"
    )
    assert "ask again in 1 s" in said.hint
    assert "outerstep token new NAME" in said.hint
    assert (said.status, said.retry_after_s) == (429, 1.0)
    assert isinstance(said, Busy), "a worker asks again by itself"


def test_it_fills_up_again_with_time_and_no_further_than_a_burst() -> None:
    quotas = Quotas(LIMITS)
    use_up(quotas)
    join(quotas, "late", 1.0)
    with pytest.raises(QuotaExceeded):
        join(quotas, "later", 1.0)
    for i in range(60 * BURST_MIN):
        join(quotas, f"next{i}", 1e6)
    with pytest.raises(QuotaExceeded):
        join(quotas, "one-more", 1e6)


def test_another_token_is_not_concerned_nor_is_a_worker_that_has_contributed() -> None:
    quotas = Quotas(LIMITS)
    use_up(quotas)
    join(quotas, "elsewhere", 0.0, token="other")
    join(quotas, "honest", 0.0, is_newcomer=False)


def test_one_worker_has_a_tenth() -> None:
    quotas = Quotas(LIMITS)
    for _ in range(6 * BURST_MIN):
        join(quotas, "flapping", 0.0, is_newcomer=False)
    with pytest.raises(QuotaExceeded, match=r"worker 'flapping' may have 6 joins a minute \(max_joins_per_minute\)"):
        join(quotas, "flapping", 0.0, is_newcomer=False)
    join(quotas, "other", 0.0, is_newcomer=False)


def test_what_is_known_afterwards_is_paid_before_the_next() -> None:
    quotas = Quotas(LIMITS)
    quotas.check("bytes", "site", "w", 0.0, is_newcomer=False)
    quotas.charge("bytes", "site", "w", 0.0, is_newcomer=False, amount=30_000.0)
    with pytest.raises(QuotaExceeded, match=r"6000 bytes of contributions a minute") as refused:
        quotas.check("bytes", "site", "w", 0.0, is_newcomer=False)
    assert refused.value.retry_after_s == 60.0
    quotas.check("bytes", "site", "w", 61.0, is_newcomer=False)


def test_so_many_contributions_of_newcomers_are_open_and_no_more() -> None:
    quotas, open_ = Quotas(LIMITS), {key("a"), key("b")}
    for each in (key("a"), key("b"), key("a")):
        quotas.open_upload("site", each, open_.__contains__)
    with pytest.raises(
        QuotaExceeded, match=r"may have 2 contributions on their way in \(max_open_uploads\)"
    ) as refused:
        quotas.open_upload("site", key("c"), open_.__contains__)
    assert refused.value.retry_after_s == 1.0
    quotas.open_upload("other", key("c"), open_.__contains__)
    open_.remove(key("a"))
    quotas.open_upload("site", key("c"), open_.__contains__)


def test_bytes_are_not_limited_unless_a_limit_is_set() -> None:
    quotas = Quotas(QuotaLimits())
    for _ in range(100):
        quotas.check("bytes", "site", "w", 0.0, is_newcomer=True)
        quotas.charge("bytes", "site", "w", 0.0, is_newcomer=True, amount=1e15)


def test_accounts_of_workers_are_bounded() -> None:
    quotas = Quotas(QuotaLimits())
    for i in range(MOST_ACCOUNTS + 100):
        quotas.charge("bytes", "site", f"w{i}", 0.0, is_newcomer=False)
        quotas.charge("refused", "site", f"w{i}", 0.0, is_newcomer=False)
    assert len(quotas._of_workers) == MOST_ACCOUNTS


def test_the_account_that_was_not_used_for_longest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outerstep.coordination.server.quotas.MOST_ACCOUNTS", 2)
    quotas = Quotas(LIMITS)
    for worker in ("a", "b", "a", "c"):
        quotas.charge("joins", "site", worker, 0.0, is_newcomer=False, amount=24.0)
    for worker, is_used_up in (("a", True), ("c", True), ("b", False)):
        if is_used_up:
            with pytest.raises(QuotaExceeded):
                quotas.check("joins", "site", worker, 0.0, is_newcomer=False)
        else:
            quotas.check("joins", "site", worker, 0.0, is_newcomer=False)


def test_a_worker_has_one_a_minute_at_least() -> None:
    quotas = Quotas(QuotaLimits(joins=5))
    for _ in range(BURST_MIN):
        join(quotas, "w", 0.0, is_newcomer=False)
    with pytest.raises(QuotaExceeded, match="worker 'w' may have 1 joins a minute"):
        join(quotas, "w", 0.0, is_newcomer=False)


def test_the_clock_may_go_back() -> None:
    quotas = Quotas(LIMITS)
    use_up(quotas)
    with pytest.raises(QuotaExceeded):
        join(quotas, "w", -1e6)


def test_the_defaults_let_256_workers_start_four_times_in_a_minute() -> None:
    quotas = Quotas(QuotaLimits())
    for start in range(4):
        for i in range(256):
            join(quotas, f"w{i}", 15.0 * start, token="run")
            for _ in ("join", "leave"):
                quotas.check("records", "run", f"w{i}", 15.0 * start, is_newcomer=True)
                quotas.charge("records", "run", f"w{i}", 15.0 * start, is_newcomer=True)


def test_who_has_no_token_is_told_so() -> None:
    quotas = Quotas(LIMITS)
    use_up(quotas, token="")
    with pytest.raises(QuotaExceeded, match="newcomers with no token may have 60 joins"):
        join(quotas, "late", 0.0, token="")
