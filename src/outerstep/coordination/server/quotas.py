"""What one token, and one worker id, may cost the server. No clock: the time is given.

A token that joins makes as many worker ids as its holder likes, so a limit per id bounds nobody; a limit per token
does. But many share a token, and one of them must not use up what the others need. So there are two accounts:

- a *newcomer* pays from its token's account, which all newcomers with that token share, and from its own;
- a worker that has had a contribution accepted pays from its own alone. So does one that was never refused a
  contribution, where refused contributions are counted.

An account is a bucket: it holds BURST_MIN minutes' worth, and fills up by a minute's worth a minute. What it costs is
often known afterwards only (bytes, refusals), so an account may be overdrawn; whoever asks next waits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal

from ...errors import QuotaExceeded
from ...types import ContributionKey

BURST_MIN = 4
WORKER_SHARE = 0.1  # of a token's quota; those aside, of which one worker may need all
NEEDS_ALL: Collection[Cost] = ("bytes", "hashed")
MOST_ACCOUNTS = 16_384  # of workers; the one that was not used for longest is forgotten

Cost = Literal["joins", "records", "refused", "bytes", "hashed"]
SAID: dict[Cost, str] = {
    "joins": "joins",
    "records": "records in the journal",
    "refused": "refused contributions",
    "bytes": "bytes of contributions",
    "hashed": "bytes hashed for the processes of groups",
}


@dataclass(frozen=True)
class QuotaLimits:
    """Per token: so many a minute of each cost, and so many contributions on their way in. `bytes` None = any.
    `hashed`: or one whole model, if that is more."""

    joins: int = 600
    records: int = 1200
    refused: int = 120
    bytes: int | None = None
    open_uploads: int = 16_384
    hashed: int = 64 << 30


@dataclass
class Account:
    left: float
    at: float  # when that was so


class Quotas:
    def __init__(self, limits: QuotaLimits) -> None:
        self.limits = limits
        self.model_bytes = 0
        self._of_tokens: dict[tuple[Cost, str], Account] = {}
        self._of_workers: OrderedDict[tuple[Cost, str], Account] = OrderedDict()
        self._open: dict[str, set[ContributionKey]] = {}  # by token: of newcomers, some of them gone meanwhile

    def check(self, cost: Cost, token: str, worker_id: str, now: float, *, is_newcomer: bool) -> None:
        """Raises QuotaExceeded if an account is empty."""
        for account, per_minute, whose in self._accounts(cost, token, worker_id, now, is_newcomer):
            if account.left < 1.0:
                self._refuse(cost, whose, per_minute, (1.0 - account.left) * 60.0 / per_minute)

    def charge(
        self, cost: Cost, token: str, worker_id: str, now: float, *, is_newcomer: bool, amount: float = 1.0
    ) -> None:
        for account, _, _ in self._accounts(cost, token, worker_id, now, is_newcomer):
            account.left -= amount

    def open_upload(self, token: str, key: ContributionKey, is_open: Callable[[ContributionKey], bool]) -> None:
        """A newcomer wants to send this. Raises QuotaExceeded if too many with its token are doing so."""
        most = self.limits.open_uploads
        keys = self._open.setdefault(token, set())
        if key in keys:
            return
        if len(keys) >= most:
            keys.intersection_update([each for each in keys if is_open(each)])
        if len(keys) >= most:
            raise QuotaExceeded(
                f"newcomers with {named(token)} may have {most} contributions on their way in (max_open_uploads), "
                f"and have {len(keys)}",
                hint=f"ask again; or ask the operator for {REMEDY}",
                retry_after_s=1.0,
            )
        keys.add(key)

    def _accounts(
        self, cost: Cost, token: str, worker_id: str, now: float, is_newcomer: bool
    ) -> list[tuple[Account, float, str]]:
        """Those that pay: the account, what it gets a minute, and whose it is."""
        limit = getattr(self.limits, cost)
        if limit is None:
            return []
        if cost == "hashed":
            limit = max(limit, self.model_bytes)
        own_limit = limit if cost in NEEDS_ALL else max(limit * WORKER_SHARE, 1.0)
        own = self._of_workers.setdefault((cost, worker_id), Account(BURST_MIN * own_limit, now))
        self._of_workers.move_to_end((cost, worker_id))
        if len(self._of_workers) > MOST_ACCOUNTS:
            self._of_workers.popitem(last=False)
        paying = [(own, own_limit, f"worker {worker_id!r}")]
        if is_newcomer:
            shared = self._of_tokens.setdefault((cost, token), Account(BURST_MIN * limit, now))
            paying.append((shared, limit, f"newcomers with {named(token)}"))
        for account, per_minute, _ in paying:
            filled = account.left + max(now - account.at, 0.0) * per_minute / 60.0
            account.left, account.at = min(filled, BURST_MIN * per_minute), now
        return paying

    @staticmethod
    def _refuse(cost: Cost, whose: str, per_minute: float, wait_s: float) -> None:
        raise QuotaExceeded(
            f"{whose} may have {per_minute:g} {SAID[cost]} a minute (max_{cost}_per_minute), and used them up",
            hint=f"ask again in {wait_s:.0f} s; or ask the operator for {REMEDY}",
            retry_after_s=min(max(wait_s, 1.0), 60.0),
        )


REMEDY = "a higher limit, or for a token of your own (`outerstep token new NAME`)"


def named(token: str) -> str:
    return f"the token {token!r}" if token else "no token"
