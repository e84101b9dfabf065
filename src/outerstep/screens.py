"""The norm screen: which contributions are too large to be true. Plain numbers in, plain numbers out.

    rate      ‖Δ‖/√steps: noisy steps add up like a random walk
    usual     the median of what the fragment's last ROUNDS rounds took in, if LEAST_CONTRIBUTORS or more are among it:
              a minority cannot move a median by much
    limit     FACTOR times the usual

It is asked in two places, which know different things (docs/operating/screens.md):

**Peers** (`norm_screen`) ask about a whole round at once. They can only leave out, and must agree to the bit on whom,
from as little as can be handed to one that joins: a list of rates. There is one limit. A majority that has grown is no
attack: when more than half of a round exceed the limit, as they do while the learning rate warms up, the round's own
median counts, as it does without a history.

**A server** (`NormScreen`) asks about one contribution when nobody knows yet what the others bring, so that what is
usual can be added at once and its bytes freed. The sender waits for the answer, resumes from the agreed weights, and is
put aside if that does not help. So there are two limits, and the first must not hit the honest:

    times > FAR · limit   refused at once, by name: nothing that a schedule does looks like this
    times > limit         kept until its round closes, and left out if it is as large beside the *round's own* medians,
                          where three or more took part

    times = min(r½ / usual r½, r₁ / usual r₁),  r½ = ‖Δ‖/√s,  r₁ = ‖Δ‖/s,  s = min(steps, MOST_STEPS · usual steps)

Steps that point anywhere grow as √steps, steps that agree as steps; honest ones lie between, so what is large by one
measure alone is only longer or shorter than the others' (a worker of another speed, or one that was away). What is
*usual* is known before a round begins, and so is the limit: who came first makes no difference. The second look is what
a warm-up or a restart of the learning rate needs: there everybody's norms grow together, and nobody is an outlier. It
is also all there is in a fragment's first round. If even the first limit is wrong (a schedule that goes from nearly
nothing to everything), half of the workers are refused with their next contributions; then it is the run that has
changed, and what was usual is forgotten.

What a server leaves out of a round, peers would refuse as well; where a round has grown as a whole, peers are the
stricter of the two (tests/unit/test_screens.py). A contribution is never judged by both. The cosine screen reads
values: core/robust/cosines.py.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from .errors import Absurd, ConfigError

ROUNDS = 8
LEAST_CONTRIBUTORS = 3
FACTOR = 2.0
FAR = 10.0
MOST_STEPS = 4.0  # times the usual: a large number of steps, which a worker only claims, excuses no more than that
MOST_REMEMBERED = 64  # sizes of one round; of more, evenly spread ones
LEAST_FOR_COSINES = 5  # with fewer, chance alone would put an honest one below the cosine screen's limit

T = TypeVar("T")

History = tuple[tuple[float, ...], ...]
"""Rates of those accepted, of the last rounds, the newest last"""


def rate(norm: float, steps: float) -> float:
    """‖Δ‖/√steps: what the norm screen compares."""
    if steps < 1:
        raise ConfigError(f"a contribution must have at least one step in it, got {steps}; leave it out")
    return norm / math.sqrt(steps)


def remember(history: tuple[T, ...], accepted: T) -> tuple[T, ...]:
    """With one more round, and without those that are too old. A round that accepted nobody says nothing."""
    return (*history, accepted)[-ROUNDS:] if accepted else history


# --- peers: a whole round at once -----------------------------------------------------------------------------------


def norm_screen(rates: Sequence[float], history: History = ()) -> dict[int, str]:
    """Who is refused, and why. `rates`: of the finite contributions of this round, all ≥ 0."""
    if len(rates) < LEAST_CONTRIBUTORS:
        return {}
    own = statistics.median(rates)
    usual = statistics.median([each for accepted in history for each in accepted]) if history else own
    if sum(each > FACTOR * usual for each in rates) > len(rates) // 2:
        usual = own
    return {
        i: f"its ‖Δ‖/√steps is {each:.3g}, more than {FACTOR:g} times the usual {usual:.3g}"
        for i, each in enumerate(rates)
        if each > FACTOR * usual
    }


def check_history(history: Mapping[str, History]) -> None:
    """Of a saved state: everything must be a number that a screen could have accepted."""
    for fragment, rounds in history.items():
        wrong = [each for accepted in rounds for each in accepted if not 0.0 <= each < math.inf]
        if wrong or len(rounds) > ROUNDS or not all(rounds):
            raise ConfigError(
                f"the norm history of fragment {fragment} must be at most {ROUNDS} rounds of numbers ≥ 0, got "
                f"{len(rounds)} rounds{f' with {wrong[0]} in one' if wrong else ''}"
            )


# --- a server: one contribution when it arrives, and the round when it closes -----------------------------------------


@dataclass(frozen=True)
class Size:
    """‖Δ‖, and the steps that are said to be in it (at least one)."""

    norm: float
    steps: int


@dataclass(frozen=True)
class Usual:
    """Medians. None of them is 0."""

    by_root: float
    by_steps: float
    steps: float

    @classmethod
    def of(cls, sizes: Sequence[Size]) -> Usual | None:
        """None: there is nothing to compare with."""
        if not sizes:
            return None
        steps = statistics.median_low([size.steps for size in sizes])
        bounded = [(size.norm, min(size.steps, MOST_STEPS * steps)) for size in sizes]
        by_root = statistics.median_low([rate(norm, s) for norm, s in bounded])
        by_steps = statistics.median_low([norm / s for norm, s in bounded])
        return cls(by_root, by_steps, steps) if by_root > 0.0 and by_steps > 0.0 else None

    def times(self, size: Size) -> float:
        s = min(size.steps, MOST_STEPS * self.steps)
        return min(rate(size.norm, s) / self.by_root, size.norm / s / self.by_steps)


SizedRound = tuple[tuple[str, ...], tuple[Size, ...]]
"""Some of a round's contributors' names, and the sizes that it took in"""


@dataclass
class NormScreen:
    """One fragment's."""

    rounds: tuple[SizedRound, ...] = ()
    refused: dict[str, int] = field(default_factory=dict)  # who, and last for which version; until one is taken
    usual: Usual | None = None

    def check(self, worker_id: str, size: Size, limit: float) -> bool:
        """Refuse what is far too large. True: look at it again when its round closes."""
        times = None if self.usual is None else self.usual.times(size)
        if times is None or times <= FAR * limit:
            self.refused.pop(worker_id, None)
            return times is None or times > limit
        assert self.usual is not None
        raise Absurd(
            f"this contribution is {times:.3g} times as large as usual: ‖Δ‖ = {size.norm:.4g} in {size.steps} steps, "
            f"‖Δ‖/√steps = {rate(size.norm, size.steps):.4g} where the median is {self.usual.by_root:.4g}; at most "
            f"{FAR * limit:g} times is taken ({FAR:g} · norm_screen={limit:g})",
            hint="it was not applied: reload the agreed weights; if it is honest, look at the learning rate, or start "
            "the server with another --norm-screen",
        )

    def note_refused(self, worker_id: str, version: int) -> bool:
        """Is it news? Not if it only tries again in the same round."""
        is_news = self.refused.get(worker_id) != version
        self.refused[worker_id] = version
        return is_news

    def has_changed(self, workers: int) -> bool:
        """Half of the workers that are here were refused, and have had nothing taken since."""
        return len(self.refused) >= max(2, (workers + 1) // 2)

    def times(self, size: Size) -> float | None:
        """How many times as large as usual; None = nobody knows."""
        return None if self.usual is None else self.usual.times(size)

    def left_out(self, taken: Sequence[tuple[str, Size | None]], limit: float) -> dict[int, float]:
        """Which of a round's contributions, given by worker id and size, are too large beside the others and beside
        what was usual; and how many times. The lower median is never among them, so something always remains."""
        if len({worker for worker, size in taken if size is not None}) < LEAST_CONTRIBUTORS:
            return {}
        own = Usual.of([size for _, size in taken if size is not None])
        if own is None:
            return {}
        measures = [own] if self.usual is None else [own, self.usual]
        times = {i: min(m.times(size) for m in measures) for i, (_, size) in enumerate(taken) if size is not None}
        return {i: found for i, found in times.items() if found > limit}

    def include(self, taken: Iterable[tuple[str, Size | None]]) -> None:
        """What a closed round took in."""
        present = [(worker, size) for worker, size in taken if size is not None]
        if present:
            names = sorted({worker for worker, _ in present})[:LEAST_CONTRIBUTORS]  # to tell whether there are enough
            ordered = sorted((size for _, size in present), key=lambda size: (size.norm, size.steps))
            if len(ordered) > MOST_REMEMBERED:
                ordered = [ordered[i * (len(ordered) - 1) // (MOST_REMEMBERED - 1)] for i in range(MOST_REMEMBERED)]
            self._look_again(remember(self.rounds, (tuple(names), tuple(ordered))))

    def forget(self) -> None:
        self.refused.clear()
        self._look_again(())

    def _look_again(self, rounds: tuple[SizedRound, ...]) -> None:
        self.rounds = rounds
        contributors = {name for names, _ in self.rounds for name in names}
        sizes = [size for _, round_ in self.rounds for size in round_]
        self.usual = Usual.of(sizes) if len(contributors) >= LEAST_CONTRIBUTORS else None

    def remembered(self) -> list[Any]:
        return [[list(names), [[size.norm, size.steps] for size in sizes]] for names, sizes in self.rounds]

    @classmethod
    def resumed(cls, remembered: Iterable[Any]) -> NormScreen:
        screen, rounds = cls(), tuple[SizedRound, ...]()
        for names, sizes in remembered:
            rounds = remember(rounds, (tuple(names), tuple(Size(float(norm), int(steps)) for norm, steps in sizes)))
        screen._look_again(rounds)
        return screen
