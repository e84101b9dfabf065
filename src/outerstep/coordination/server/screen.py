"""Which contributions are too large to be true.

    size of a contribution   r½ = ‖Δ‖/√s  and  r₁ = ‖Δ‖/s,   s = min(steps, MOST_STEPS · usual steps)
    usual                    the (lower) medians of r½, r₁ and steps over what the fragment's last ROUNDS closed rounds
                             took in, if LEAST_CONTRIBUTORS workers or more are among them
    times                    min(r½ / usual r½, r₁ / usual r₁): how many times as large as usual

Steps that point anywhere grow as √steps, steps that agree as steps; honest ones lie between, so what is large by one
measure alone is only longer or shorter than the others' (a worker of another speed, or one that was away). What is
*usual* is known before a round begins, and so is the limit: who came first makes no difference.

    times > FAR · norm_screen   refused at once, by name: nothing that a schedule does looks like this
    times > norm_screen         kept until its round closes, and left out if it is as large beside the *round's own*
                                medians, where three or more took part

The second look is what a warm-up or a restart of the learning rate needs: there everybody's norms grow together, to
three times the usual and more, and nobody is an outlier. It is also all there is in a fragment's first round. If even
the first limit is wrong (a schedule that goes from nearly nothing to everything), half of the workers are refused
with their next contributions; then it is the run that has changed, and what was usual is forgotten.

This is the screen of a server, whichever rule then combines what it let through. Who aggregates without one has another
(core/robust/screens.py), with the same factor, the same eight rounds and the same three contributors, because it is in
another place:

- it is asked about a whole round at once; here about one contribution, when nobody knows yet what the others bring, so
  that what is usual can be added and its bytes freed;
- it can only leave out; here the sender waits for an answer, is told at once, goes on from the agreed weights, and is
  put aside if that does not help. So there are two limits, and the first must not hit the honest;
- its peers must agree to the bit on whom they refuse, from as little as can be handed to one that joins: a list of
  ‖Δ‖/√steps. Here one decides for all, and can afford a second measure for workers of other speeds.

What this one leaves out of a round, that one would refuse as well; where a round has grown as a whole, that one is the
stricter of the two (tests/unit/coordination/test_screen.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import sqrt
from statistics import median_low
from typing import Any

from ...errors import Absurd

ROUNDS = 8
LEAST_CONTRIBUTORS = 3
FAR = 10.0
MOST_STEPS = 4.0  # times the usual: a large number of steps, which a worker only claims, excuses no more than that
MOST_REMEMBERED = 64  # sizes of one round; of more, evenly spread ones


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
        steps = median_low([size.steps for size in sizes])
        bounded = [(size.norm, _bounded(size.steps, steps)) for size in sizes]
        by_root = median_low([norm / sqrt(s) for norm, s in bounded])
        by_steps = median_low([norm / s for norm, s in bounded])
        return cls(by_root, by_steps, steps) if by_root > 0.0 and by_steps > 0.0 else None

    def times(self, size: Size) -> float:
        s = _bounded(size.steps, self.steps)
        return min(size.norm / sqrt(s) / self.by_root, size.norm / s / self.by_steps)


def _bounded(steps: float, usual: float) -> float:
    return min(steps, MOST_STEPS * usual)


@dataclass
class NormScreen:
    """One fragment's. `rounds`: of each closed round some of its contributors' names, and the sizes it took in."""

    rounds: deque[tuple[tuple[str, ...], tuple[Size, ...]]] = field(default_factory=lambda: deque(maxlen=ROUNDS))
    refused: dict[str, int] = field(default_factory=dict)  # who, and last for which version; until one is taken
    usual: Usual | None = None

    def check(self, worker_id: str, size: Size, limit: float) -> None:
        """Refuse what is far too large."""
        times = self.times(size)
        if times is None or times <= FAR * limit:
            self.refused.pop(worker_id, None)
            return
        assert self.usual is not None
        raise Absurd(
            f"this contribution is {times:.3g} times as large as usual: ‖Δ‖ = {size.norm:.4g} in {size.steps} steps, "
            f"‖Δ‖/√steps = {size.norm / sqrt(size.steps):.4g} where the median is {self.usual.by_root:.4g}; at most "
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

    def needs_second_look(self, size: Size, limit: float) -> bool:
        times = self.times(size)
        return times is None or times > limit

    def left_out(self, taken: Sequence[tuple[str, Size | None]], limit: float) -> dict[int, float]:
        """Which of a round's contributions, given by worker id and size, are too large beside the others and beside
        what was usual; and how many times. The lower median is never among them, so something always remains."""
        sizes = [size for _, size in taken if size is not None]
        own = Usual.of(sizes)
        if own is None or len({worker for worker, size in taken if size is not None}) < LEAST_CONTRIBUTORS:
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
            self.rounds.append((tuple(names), _spread(ordered)))
            self._look_again()

    def forget(self) -> None:
        self.rounds.clear()
        self.refused.clear()
        self.usual = None

    def _look_again(self) -> None:
        contributors = {name for names, _ in self.rounds for name in names}
        sizes = [size for _, round_ in self.rounds for size in round_]
        self.usual = Usual.of(sizes) if len(contributors) >= LEAST_CONTRIBUTORS else None

    # --- over a restart -------------------------------------------------------------------------------------------

    def remembered(self) -> list[Any]:
        return [[list(names), [[size.norm, size.steps] for size in sizes]] for names, sizes in self.rounds]

    @classmethod
    def resumed(cls, remembered: Iterable[Any]) -> NormScreen:
        screen = cls()
        for names, sizes in remembered:
            screen.rounds.append((tuple(names), tuple(Size(float(norm), int(steps)) for norm, steps in sizes)))
        screen._look_again()
        return screen


def _spread(sizes: Sequence[Size]) -> tuple[Size, ...]:
    """All of them, or as many as are remembered."""
    if len(sizes) <= MOST_REMEMBERED:
        return tuple(sizes)
    return tuple(sizes[i * (len(sizes) - 1) // (MOST_REMEMBERED - 1)] for i in range(MOST_REMEMBERED))
