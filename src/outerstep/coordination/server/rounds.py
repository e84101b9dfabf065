"""One fragment's rounds, one after the other: when a round may close, and what it leaves behind when it does.

A round opens the moment the one before it is decided, with the workers live at that moment *expected*. It closes when

- every expected worker's contribution is in (synchronous: quorum None), or
- `quorum` workers are in and `grace_s` has passed since the quorum was complete, or
- `round_deadline_s` has passed since its first contribution,

and never with fewer than `min_workers` contributors, nor than the run's rule for combining them needs
(`Aggregation`), nor before the run has started (coordinator.py). A worker that dies or leaves is no longer expected; a
worker that joins is expected from the next round, and counted in this one if its contribution comes in time.

Between two rounds a version may come from a layer above, without contributions (`Fragment.move`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from dataclasses import replace as replace_fields
from functools import cached_property
from heapq import nsmallest
from typing import Literal

from msgspec.structs import replace

from ...errors import ConfigError
from ...screens import FACTOR, LEAST_FOR_COSINES, NormScreen, Size
from ...tiling import Cutting
from ...types import MOST_FROM_ABOVE, Agreement, Mode, Participant, WeightBy
from ..weights import MAX_WEIGHT_RATIO, UsualWeight
from .claims import NOTHING, Claim, ClaimedWork, UsualRates

RuleName = Literal["mean", "trimmed_mean", "median", "krum", "multi_krum", "geometric_median", "centered_clipping"]

OWN_RULES: dict[str, int] = {}  # a user's, and how many contributions each is defined for (extending.py)

LEAST = 3
HAIR = 1e-9  # as in core/robust/coordinates.py: ⌊(1/49)·49⌋ is 0 in floating point

WHOSE: dict[str, tuple[RuleName, ...]] = {
    "trim_fraction": ("trimmed_mean",),
    "attackers": ("krum", "multi_krum"),
    "clip_radius": ("centered_clipping",),
    "aggregation_iterations": ("geometric_median", "centered_clipping"),
}
MOST_REFUSALS = 3  # of one worker's contributions to one round: then the round closes without it
REMEMBERED = 64  # moments from which a rate of tokens is computed


@dataclass(frozen=True)
class Aggregation:
    """How the contributions of a round become one: the rule's settings by their names, and how many contributions it
    needs. None = the rule's own default (docs/concepts/robust-aggregation.md). core/robust/ combines them.

        rule                        is defined for
        trimmed_mean                ⌈1/trim_fraction⌉ contributions: at least one is trimmed at each end
        median, geometric_median    3
        krum, multi_krum            2·attackers + 3
        mean, centered_clipping     any number
        over buckets of s           (as many − 1)·s + 1
        with the cosine screen      5

    None of them but the plain mean says anything about fewer than three: of two that differ, either may be wrong. A run
    with a rule closes no round with fewer than that. It never falls back on the plain mean.

    Those *offered* count. A worker that a screen turned away or that is in quarantine is one of the bad ones that the
    rule was chosen to withstand: a minority of such counts as if it had been there. Otherwise one worker that sends a
    NaN could stop a run of five."""

    aggregation: RuleName = "mean"
    trim_fraction: float | None = None
    attackers: int | None = None
    clip_radius: float | None = None
    aggregation_iterations: int | None = None
    bucket_size: int = 1
    cosine_screen: bool = False

    def __post_init__(self) -> None:
        for name, rules in WHOSE.items():
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

    @cached_property
    def is_plain(self) -> bool:
        """The weighted mean of all, which takes them one by one."""
        return self.aggregation == "mean" and not self.cosine_screen

    @property
    def name(self) -> str:
        """For messages."""
        buckets = f" over buckets of {self.bucket_size}" if self.bucket_size > 1 else ""
        return f"{self.aggregation}{buckets}{' with the cosine screen' if self.cosine_screen else ''}"

    @cached_property
    def fewest(self) -> int:
        """Contributions of different workers that it takes to close a round; 1 for the plain mean."""
        if self.is_plain:
            return 1
        least = OWN_RULES.get(self.aggregation, 1)
        match self.aggregation:
            case "trimmed_mean" if self.trim_fraction is not None:
                least = max(LEAST, math.ceil(1.0 / self.trim_fraction - HAIR))
            case "krum" | "multi_krum":
                least = 2 * (self.attackers or 1) + 3
            case "trimmed_mean" | "median" | "geometric_median":
                least = LEAST
        return max(LEAST, (least - 1) * self.bucket_size + 1, LEAST_FOR_COSINES if self.cosine_screen else LEAST)

    def needed(self, turned_away: int) -> int:
        """How many must be there beside those that were turned away."""
        return self.fewest - min(turned_away, (self.fewest - 1) // 2)

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


@dataclass(frozen=True)
class RoundRules:
    """How rounds close. `quorum` None = all that are expected."""

    num_workers: int
    min_workers: int = 1
    quorum: int | None = None
    grace_s: float = 0.0
    round_deadline_s: float | None = None
    start_deadline_s: float | None = None
    max_staleness: int = 4
    asynchronous: bool = False  # quorum 1, and nobody waits for anybody at the start
    weigh_staleness: bool = True
    weight_by: WeightBy = "equal"
    max_weight_ratio: float = MAX_WEIGHT_RATIO
    max_tokens_per_s: float | None = None  # that a worker is believed to see; None = by what the others do
    norm_screen: float = FACTOR  # times the usual norm; 0 = off
    aggregation: Aggregation = Aggregation()
    dylu: bool = False
    dylu_base: int | None = None

    @cached_property
    def floor(self) -> int:
        """No round closes with fewer contributors, unless some were turned away."""
        return max(self.min_workers, self.aggregation.needed(0))

    @property
    def floor_is(self) -> str:
        """The setting that `floor` comes from."""
        return "min_workers" if self.min_workers >= self.floor else self.aggregation.name

    @property
    def takes_late(self) -> bool:
        """With a quorum a late contribution counts in the next round; without, it is refused and its worker rebases."""
        return self.quorum is not None

    def may_start(self, live: int, first_join_at: float | None, now: float) -> bool:
        """When all announced workers are live, or at the start deadline with enough of them for a round."""
        deadline_s = self.start_deadline_s
        overdue = deadline_s is not None and first_join_at is not None and now - first_join_at >= deadline_s
        enough = live >= self.num_workers or (self.asynchronous and live > 0)
        return enough or (overdue and live >= self.floor)

    @property
    def mode(self) -> Mode:
        return "async" if self.asynchronous else "sync" if self.quorum is None else "quorum"


@dataclass(frozen=True)
class RoundVerdict:
    """Close now, or wait: until when (None = until something happens) and for what."""

    close: bool
    wake_at: float | None = None
    waiting_for: str = ""
    stuck: bool = False  # only more workers can help


@dataclass
class OpenRound:
    """A fragment's round that collects contributions; it will make `version`."""

    version: int
    expected: set[str]
    participants: list[Participant] = field(default_factory=list)
    contributors: set[str] = field(default_factory=set)  # their worker ids
    reported: list[float] = field(default_factory=list)  # what its contributions said they weigh
    tokens: list[float] = field(default_factory=list)  # and how many tokens count of those they said are in them
    claims: list[Claim] = field(default_factory=list)  # what each of them said, and when
    sizes: list[tuple[str, Size | None]] = field(default_factory=list)  # whose, and how large; None = not screened
    kept: list[bool] = field(default_factory=list)  # and whether they can still be left out
    refusals: dict[str, int] = field(default_factory=dict)  # by worker id, of what it brought to this round
    size_bytes: int = 0  # of its contributions, as they travelled
    first_at: float | None = None
    quorum_at: float | None = None

    def voices(self, worker_id: str) -> list[Participant]:
        """What it has of this worker."""
        if worker_id not in self.contributors:  # nearly always: a round of thousands is not searched for each
            return []
        return [p for p in self.participants if p.worker_id == worker_id]

    def refuse(self, worker_id: str) -> bool:
        """What this worker brought was of no use. True: once too often, nobody waits for it in this round any more. If
        it brings something good in time, that still counts."""
        self.refusals[worker_id] = self.refusals.get(worker_id, 0) + 1
        if self.refusals[worker_id] != MOST_REFUSALS or worker_id in self.contributors:
            return False
        self.expected.discard(worker_id)
        return True

    @property
    def counted_out(self) -> set[str]:
        """The workers that were refused too often."""
        return {w for w, count in self.refusals.items() if count >= MOST_REFUSALS} - self.contributors

    def count(
        self,
        participant: Participant,
        rules: RoundRules,
        now: float,
        *,
        reported: float,
        work: ClaimedWork,
        size: Size | None,
        kept: bool,
    ) -> None:
        self.participants.append(participant)
        self.contributors.add(participant.worker_id)
        self.reported.append(reported)
        self.tokens.append(work.tokens)
        self.claims.append(Claim(participant.worker_id, now, work))
        self.sizes.append((participant.worker_id, size))
        self.kept.append(kept)
        if self.first_at is None:
            self.first_at = now
        if self.quorum_at is None and rules.quorum is not None and len(self.contributors) >= rules.quorum:
            self.quorum_at = now

    def leave_out(self, i: int) -> None:
        """It was there, and counts nothing."""
        self.participants[i] = replace(self.participants[i], weight=0.0)
        self.reported[i] = self.tokens[i] = 0.0
        self.sizes[i] = self.sizes[i][0], None

    @property
    def trained(self) -> int:
        """Workers whose contributions have training in them."""
        return len({p.worker_id for p in self.participants if p.weight > 0.0})

    def wants(self, worker_id: str, rules: RoundRules) -> bool:
        """Does a contributor wait for this worker?"""
        contributors = self.contributors
        if not contributors or worker_id in contributors:
            return False
        return worker_id in self.expected or len(contributors | self.expected) < rules.floor

    def verdict(
        self,
        rules: RoundRules,
        now: float,
        *,
        started: bool,
        live: frozenset[str],
        turned_away: int,
        says_why: bool = True,
    ) -> RoundVerdict:
        """`live`: from whom something would be taken. `turned_away`: how many were here, and were refused. `says_why`:
        somebody wants to know what it waits for. (Nobody does at each contribution, and thousands have names.)"""
        counted_out = self.counted_out if self.refusals else set()
        live = live - counted_out if counted_out else live
        contributors = self.contributors
        if started and not says_why and rules.aggregation.is_plain and len(contributors) >= max(rules.min_workers, 1):
            return self._timed(rules, now, self._misses_any(counted_out))
        missing = self.expected - contributors - counted_out  # a run that starts late expects all that are there
        least = rules.aggregation.needed(turned_away)
        floor = max(rules.min_workers, least)
        if len(contributors) < floor:
            able = live - contributors
            if len(contributors) + len(able) < floor:
                here = f"{len(contributors)} contributed, {len(able)} more alive"
                here += f", {_names(counted_out)} refused {MOST_REFUSALS} times" if counted_out else ""
                return RoundVerdict(False, waiting_for=f"at least {floor} ({rules.floor_is}): {here}", stuck=True)
            awaited = "the next contribution" if rules.asynchronous else f"contributions of {_names(missing or able)}"
            return RoundVerdict(False, waiting_for=awaited)
        if least > 1 and 0 < self.trained < least and live - contributors:  # some of them had nothing to bring
            needed = f"{rules.aggregation.name} needs {least} with training in them"
            return RoundVerdict(False, waiting_for=f"contributions of {_names(live - contributors)}: {needed}")
        if not started:
            return RoundVerdict(
                False, waiting_for=f"{rules.num_workers} workers to join ({len(live)} here)", stuck=True
            )
        timed = self._timed(rules, now, bool(missing))
        if timed.close:
            return timed
        awaited = f"contributions of {_names(missing)}"
        if self.quorum_at is not None:
            awaited = f"{rules.grace_s:g} s of grace, for {awaited}"
        return replace_fields(timed, waiting_for=awaited)

    def _misses_any(self, counted_out: AbstractSet[str]) -> bool:
        """Has somebody expected not contributed? Of two sets the larger one is not within the smaller: no names are
        looked at until the round is nearly complete."""
        present = len(self.contributors) + len(counted_out)
        return len(self.expected) > present or not self.expected <= self.contributors | counted_out

    def _timed(self, rules: RoundRules, now: float, misses_any: bool) -> RoundVerdict:
        """Of a round with enough contributions: does it wait for the others?"""
        if not misses_any:
            return RoundVerdict(True)
        wake_at: list[float] = []
        if rules.round_deadline_s is not None and self.first_at is not None:
            wake_at.append(self.first_at + rules.round_deadline_s)
        if self.quorum_at is not None:
            wake_at.append(self.quorum_at + rules.grace_s)
        if any(moment <= now for moment in wake_at):
            return RoundVerdict(True)
        return RoundVerdict(False, min(wake_at, default=None))


@dataclass(frozen=True)
class Outlier:
    """A contribution that was left out when its round closed, and why."""

    participant: Participant
    facts: Mapping[str, object]


@dataclass(frozen=True)
class Closed:
    """A round that has ended."""

    version: int
    participants: tuple[Participant, ...]
    tokens: int
    outliers: tuple[Outlier, ...]
    too_few: int = 0  # so many had trained, fewer than the run's rule needs: all were left out


@dataclass
class Fragment:
    """Its newest agreement, the round that is open on top of it, and how much and how large contributions to it are."""

    published: Agreement
    round: OpenRound
    max_payload_bytes: Callable[[Cutting, str], int]  # of a contribution in so many sections, by its codec
    max_sections: int = 1  # more would be empty
    mean_bytes: int = 0  # of a round's mean in a journal record
    usual: UsualWeight = field(default_factory=UsualWeight)
    usual_tokens: UsualWeight = field(default_factory=UsualWeight)
    screen: NormScreen = field(default_factory=NormScreen)
    rates: UsualRates = field(default_factory=lambda: UsualRates({}))
    done: ClaimedWork = NOTHING  # what accepted contributions say they hold, since this start
    above: list[int] = field(default_factory=list)  # recent versions that came from a layer above
    upper_version: int = 0  # of the layer above, that the last of them brought
    moves_next: int | None = None  # this one waits to become the next version

    @classmethod
    def at(
        cls,
        published: Agreement,
        max_payload_bytes: int | Callable[[Cutting, str], int],
        max_sections: int = 1,
        mean_bytes: int = 0,
    ) -> Fragment:
        """With the first round open on top of what is published. A number holds for any number of sections."""
        first = OpenRound(published.version + 1, set())
        limit = max_payload_bytes if callable(max_payload_bytes) else lambda sections, codec: max_payload_bytes
        return cls(published, first, limit, max_sections, mean_bytes)

    def staleness(self, base_version: int) -> int:
        """How many rounds have closed since this version. One that came from a layer above is no round of ours: a Δ is
        the same from whichever anchor, so such a version makes no contribution older."""
        newest = self.round.version - 1
        return newest - base_version - sum(base_version < version <= newest for version in self.above)

    def move(self, max_staleness: int) -> int:
        """The next version comes from above, and the open round will make the one after it. Workers were told which
        version they count in, so nothing may have been accepted."""
        assert not self.round.participants
        assert self.moves_next is not None
        version, self.upper_version, self.moves_next = self.round.version, self.moves_next, None
        self.round.version = version + 1
        self.above.append(version)
        self.above = [v for v in self.above if self.staleness(v) <= max_staleness][-MOST_FROM_ABOVE:]
        return version

    def close(self, rules: RoundRules, expected: Iterable[str], turned_away: int) -> Closed:
        """The open round ends as it is, less what is left out of it; what it took in is part of what is usual from now
        on. The next one opens."""
        closing, ratio = self.round, rules.max_weight_ratio
        outliers, trained, needed = [], closing.trained, rules.aggregation.needed(turned_away)
        too_few = trained < needed
        if not rules.aggregation.is_plain:
            outliers = _too_few(closing, rules, needed) if too_few else _repeated(closing)
        for i, times in self.screen.left_out(closing.sizes, rules.norm_screen).items():  # without a screen no sizes
            _, size = closing.sizes[i]
            if closing.kept[i] and size is not None:
                facts = {"norm": size.norm, "steps": size.steps, "times_usual": round(times, 2)}
                outliers.append(_left_out(closing, i, facts))
        self.screen.include(closing.sizes)
        self.usual.include(closing.reported, ratio)
        tokens = self.usual_tokens.include(closing.tokens, ratio)
        self.round = OpenRound(closing.version + 1, set(expected))
        return Closed(
            closing.version, tuple(closing.participants), round(sum(tokens)), tuple(outliers), trained if too_few else 0
        )


def _too_few(closing: OpenRound, rules: RoundRules, needed: int) -> list[Outlier]:
    """Nobody is left to come, and too few had trained for the rule to mean anything: it would be the plain mean of
    those there. Nothing of it is taken."""
    why = f"{closing.trained} had trained, and {rules.aggregation.name} needs {needed}"
    return [_left_out(closing, i, {"why": why}) for i, p in enumerate(closing.participants) if p.weight > 0.0]


def _repeated(closing: OpenRound) -> list[Outlier]:
    """A worker may have a late contribution beside its current one. To a rule everybody is one: the last counts."""
    last = {p.worker_id: i for i, p in enumerate(closing.participants) if p.weight > 0.0}
    why = {"why": "it was late, and its worker has a newer one in the round"}
    return [
        _left_out(closing, i, why)
        for i, p in enumerate(closing.participants)
        if p.weight > 0.0 and last[p.worker_id] != i
    ]


def _left_out(closing: OpenRound, i: int, facts: Mapping[str, object]) -> Outlier:
    outlier = Outlier(closing.participants[i], facts)
    closing.leave_out(i)
    return outlier


def _names(workers: AbstractSet[str]) -> str:
    shown = ", ".join(nsmallest(4, workers))
    return shown + (f" and {len(workers) - 4} more" if len(workers) > 4 else "")


@dataclass
class TokenBudget:
    """How many tokens are in the model, how fast they come, and when there will be enough. Each fragment sees every
    token once; a token is in the model when all fragments have it."""

    limit: int | None = None  # None = no end
    per_fragment: dict[int, int] = field(default_factory=dict)
    announced: bool = False  # the workers have been told to finish
    _moments: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=REMEMBERED))

    def fix(self, fragments: int) -> None:
        self.per_fragment = {i: self.per_fragment.get(i, 0) for i in range(fragments)}

    @property
    def total(self) -> int:
        return min(self.per_fragment.values(), default=0)

    @property
    def is_spent(self) -> bool:
        return self.limit is not None and self.total >= self.limit

    @property
    def share(self) -> float | None:
        """How much of it is spent; None = no end."""
        return min(self.total / self.limit, 1.0) if self.limit else None

    def add(self, fragment: int, tokens: int, now: float) -> None:
        self.per_fragment[fragment] += tokens
        if not self._moments or self._moments[-1][1] != self.total:
            self._moments.append((now, self.total))

    @property
    def per_second(self) -> float:
        """Over the remembered moments; 0 while there are too few."""
        if len(self._moments) < 2:
            return 0.0
        (first_at, first), (last_at, last) = self._moments[0], self._moments[-1]
        return (last - first) / (last_at - first_at) if last_at > first_at else 0.0

    @property
    def seconds_left(self) -> float | None:
        """None = no end in sight: no limit, or no rate yet."""
        if self.limit is None or self.per_second <= 0.0:
            return None
        return max(self.limit - self.total, 0) / self.per_second
