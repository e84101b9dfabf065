"""How the contributions of a round become one: the rule's name and settings, and how many contributions it needs.

What can be known before any of them is there, without tensors; core/robust/ combines them.

    rule                        is defined for
    trimmed_mean                ⌈1/trim_fraction⌉ contributions: at least one is trimmed at each end
    median, geometric_median    3
    krum, multi_krum            2·attackers + 3
    mean, centered_clipping     any number
    over buckets of s           (as many − 1)·s + 1
    with the cosine screen      5

and none of them says anything about fewer than three, but for the plain mean: of two that differ, either may be wrong.
A run with a rule closes no round with fewer than that (rounds.py). It never falls back on the plain mean.

They are those *offered*. A worker that a screen turned away or that is in quarantine is one of the bad ones that the
rule was chosen to withstand: a minority of such counts as if it had been there. Else one worker that sends a NaN could
stop a run of five.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ...errors import ConfigError
from ...screens import LEAST_FOR_COSINES

RuleName = Literal["mean", "trimmed_mean", "median", "krum", "multi_krum", "geometric_median", "centered_clipping"]

LEAST = 3
HAIR = 1e-9  # as in core/robust/coordinates.py: ⌊(1/49)·49⌋ is 0 in floating point

_WHOSE: dict[str, tuple[RuleName, ...]] = {
    "trim_fraction": ("trimmed_mean",),
    "attackers": ("krum", "multi_krum"),
    "clip_radius": ("centered_clipping",),
    "aggregation_iterations": ("geometric_median", "centered_clipping"),
}


@dataclass(frozen=True)
class Aggregation:
    """The settings of the rule, by their names. None = what the rule has for itself (docs/concepts/
    robust-aggregation.md)."""

    aggregation: RuleName = "mean"
    trim_fraction: float | None = None
    attackers: int | None = None
    clip_radius: float | None = None
    aggregation_iterations: int | None = None
    bucket_size: int = 1
    cosine_screen: bool = False

    def __post_init__(self) -> None:
        for name, rules in _WHOSE.items():
            value = getattr(self, name)
            if value is not None and self.aggregation not in rules:
                raise ConfigError(
                    f"{name} is for aggregation {' and '.join(map(repr, rules))}, got {value:g} with "
                    f"{self.aggregation!r}; leave one of the two out"
                )
        if self.trim_fraction is not None and not 0.0 < self.trim_fraction < 0.5:
            raise ConfigError(
                f"trim_fraction must be above 0 and below 0.5 (it is cut off at both ends), got {self.trim_fraction:g}"
            )
        if self.clip_radius is not None and not self.clip_radius > 0.0:
            raise ConfigError(
                f"clip_radius must be above 0, got {self.clip_radius:g}; left out, it is the median distance"
            )
        if self.aggregation == "mean" and self.bucket_size > 1:
            raise ConfigError(
                f"bucket_size {self.bucket_size} averages some before a rule sees them, and aggregation is 'mean': the "
                "mean of means is no other; choose a rule, or leave bucket_size out"
            )

    @property
    def is_plain(self) -> bool:
        """The weighted mean of all, which takes them one by one."""
        return self.aggregation == "mean" and not self.cosine_screen

    @property
    def name(self) -> str:
        """For messages."""
        buckets = f" over buckets of {self.bucket_size}" if self.bucket_size > 1 else ""
        return f"{self.aggregation}{buckets}{' with the cosine screen' if self.cosine_screen else ''}"

    @property
    def fewest(self) -> int:
        """Contributions of different workers that it takes to close a round; 1 for the plain mean."""
        if self.is_plain:
            return 1
        buckets = (self._fewest_of_rule - 1) * self.bucket_size + 1
        return max(LEAST, buckets, LEAST_FOR_COSINES if self.cosine_screen else LEAST)

    def needed(self, turned_away: int) -> int:
        """How many must be there beside those that were turned away."""
        return self.fewest - min(turned_away, (self.fewest - 1) // 2)

    @property
    def _fewest_of_rule(self) -> int:
        match self.aggregation:
            case "trimmed_mean":
                return LEAST if self.trim_fraction is None else max(LEAST, math.ceil(1.0 / self.trim_fraction - HAIR))
            case "krum" | "multi_krum":
                return 2 * (self.attackers or 1) + 3
            case "median" | "geometric_median":
                return LEAST
            case _:
                return 1

    def check_run(
        self, *, num_workers: int, quorum: int | None, asynchronous: bool, weigh: str, norm_screen: float
    ) -> None:
        """Refuse a run in which it could never do what it says. `weigh`: what makes weights unequal, "" = nothing."""
        if self.is_plain:
            return
        if asynchronous:
            raise ConfigError(
                f"aggregation {self.name!r} compares the contributions of a round, and async_mode has one in each; "
                "leave async_mode out (quorum and grace_s let a round close without the slowest), or use 'mean'"
            )
        if self.cosine_screen and not norm_screen:
            raise ConfigError(
                "cosine_screen needs the norm screen in front of it, got norm_screen 0: what is long enough turns the "
                "mean of the others around, and the honest ones would be left out; leave one of the two out"
            )
        if self.aggregation == "krum" and weigh:
            raise ConfigError(
                f"aggregation 'krum' takes one contribution as it is and cannot weigh them, got {weigh}; use "
                "'multi_krum', or equal weights"
            )
        for name, count in (("num_workers", num_workers), ("quorum", quorum)):
            if count is not None and count < self.fewest:
                raise ConfigError(
                    f"aggregation {self.name!r} needs at least {self.fewest} contributions in a round"
                    f"{self._why(count)}, got {name} {count}; {self._remedy(name, count)}"
                )

    def _why(self, count: int) -> str:
        if self.bucket_size > 1:
            return f" ({count} are {-(-count // self.bucket_size)} buckets, bucket_size is {self.bucket_size})"
        if self._trims_nothing(count):
            return (
                f": a trim_fraction of {self.trim_fraction:g} trims nothing of {count}, "
                f"⌊{self.trim_fraction:g}·{count}⌋ = 0"
            )
        if self.aggregation in ("krum", "multi_krum"):
            return f" (2·attackers + 3, attackers is {self.attackers or 1})"
        return " (cosine_screen: among fewer it would refuse honest ones)" if self.cosine_screen else ""

    def _remedy(self, name: str, count: int) -> str:
        more = f"raise {name} to {self.fewest}"
        if self.bucket_size == 1 and self._trims_nothing(count) and not self.cosine_screen:
            return f"{more}, or trim_fraction to {math.ceil(1e4 / count) / 1e4:g}, the smallest that trims one"
        return f"{more}, or use another rule"

    def _trims_nothing(self, count: int) -> bool:
        return self.trim_fraction is not None and count >= LEAST and self.trim_fraction * count + HAIR < 1.0
