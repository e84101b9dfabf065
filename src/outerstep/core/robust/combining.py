"""Robust aggregation of streamed contributions, in two passes: measure and screen, then combine.

    1. every contribution is read once: norms, or all inner products if rule or screen need them
       non-finite → norm screen → cosine screen (by choice): who is refused, and why
    2. those accepted are read once more, and the rule makes each block of the aggregate

Memory is one block of each contribution, whatever the size of the model (streams.py). The contributions are processed
in the order of their worker ids, whatever the order in which they are passed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Generic

import torch

from ...errors import ConfigError, NotFinite
from ...screens import LEAST_FOR_COSINES, History, norm_screen, rate
from ..watch import sum_of_squares
from .buckets import Bucketing
from .centres import CenteredClipping, GeometricMedian
from .coordinates import Median, TrimmedMean
from .cosines import check_enough_for_cosines, cosine_screen
from .products import Products, products, squares
from .rule import BlockFunction, Mean, Rule, RuleInputs, Selection
from .selection import Krum, MultiKrum
from .streams import B, Reader, ShareBlocks, Stack, TensorSpan, Writer, Zeros, check_blocks, cut, one_by_one

CPU = torch.device("cpu")
DEVICE_STACK_VALUES = 1 << 26  # 256 MiB of fp32: few large kernels; the bits do not depend on it (streams.py)


@dataclass(frozen=True)
class Candidate(Generic[B]):
    """A contribution that may be accepted.

    steps: its local steps. norm: ‖Δ‖, if already measured (a server measures it on arrival); if all have one and
    nothing more is needed, the first pass is skipped. Peers must leave it out: another way of adding the squares gives
    other bits. refused: the reason, if it was already refused (by a server's norm screen). It is then not read, but it
    was offered: the rule must be defined for that many.
    """

    worker_id: str
    values: Reader[B]
    weight: float = 1.0
    steps: int = 1
    norm: float | None = None
    refused: str = ""


@dataclass(frozen=True)
class Screening:
    """The checks before the rule; the finite check is always on.

    history: what was accepted of this fragment before (`screens.remember`). cosine: also the cosine screen. arrived: a
    server has checked each contribution on arrival and refused non-finite and too long ones; they are not checked
    again.
    """

    history: History = ()
    cosine: bool = False
    arrived: bool = False

    def check(self, offered: int) -> None:
        if self.cosine:
            check_enough_for_cosines(offered)


@dataclass(frozen=True)
class ScreenVerdict:
    """Which contributions are in the aggregate."""

    accepted: tuple[str, ...]  # worker ids, in order
    refused: Mapping[str, str] = field(default_factory=dict)  # worker id → why
    rates: tuple[float, ...] = ()  # ‖Δ‖/√steps of the accepted, for `screens.remember`
    unused: tuple[str, ...] = ()  # accepted, but the rule chose others (Krum)
    mean_norm: float | None = field(default=None, repr=False, compare=False)
    """‖Σ w·Δ / Σ w‖ of the accepted; None: the aggregate is that mean. Only to be watched, so its last bits may be a
    machine's own."""


def combine(
    candidates: Sequence[Candidate[TensorSpan]],
    sizes: Mapping[str, int],
    out: Writer[TensorSpan],
    rule: Rule,
    *,
    seed: str = "",
    screening: Screening = Screening(),  # noqa: B008 (frozen)
    centre: Reader[TensorSpan] | None = None,
    device: torch.device = CPU,
    share: ShareBlocks = one_by_one,
) -> ScreenVerdict:
    """The aggregate of a round, in every topology: `aggregate` over blocks of tensors of these sizes, taken in their
    order (sums over whole contributions depend on it in their last bits). `seed`: of the buckets, if the rule has
    them."""
    if isinstance(rule, Bucketing):
        rule = replace(rule, seed=seed)
    rows = sum(not candidate.refused for candidate in candidates)
    blocks = cut(sizes, rows) if device.type == "cpu" else cut(sizes, rows, stack_values=DEVICE_STACK_VALUES)
    return aggregate(candidates, blocks, out, rule, screening=screening, centre=centre, device=device, share=share)


@torch.no_grad()
def aggregate(
    candidates: Sequence[Candidate[B]],
    blocks: Sequence[B],
    out: Writer[B],
    rule: Rule = Mean(),  # noqa: B008 (frozen)
    *,
    screening: Screening = Screening(),  # noqa: B008 (frozen)
    centre: Reader[B] | None = None,
    device: torch.device = CPU,
    share: ShareBlocks = one_by_one,
) -> ScreenVerdict:
    """Screen, combine by `rule`, write to `out`. `centre`: the previous aggregate, for a rule that starts from it.
    `share`: who goes through the blocks. (A rule of somebody else's sees one block at a time: it may keep things.)

    Raises:
        ConfigError: the rule or the screen is not defined for so many, or for these weights.
        NotFinite: none of them is finite; nothing was written.
    """
    ordered = in_order(candidates)
    rule.check(len(ordered), [candidate.weight for candidate in ordered])
    screening.check(len(ordered))
    check_blocks(blocks)
    offered, ordered = len(ordered), [candidate for candidate in ordered if not candidate.refused]
    found = _measure(ordered, blocks, rule, screening, centre, device, share)
    chosen, verdict = _judge(ordered, found, screening)
    between = _of(found, chosen, with_centre=rule.needs_centre) if rule.needs_products else None
    combine = rule.begin(RuleInputs(offered, tuple(ordered[i].weight for i in chosen), between))
    used: list[Reader[B]] = [ordered[i].values for i in chosen]
    if rule.needs_centre:
        used.insert(0, centre or Zeros())
    mean, total = _mean_of([ordered[i].weight for i in chosen], device), 0.0

    def combine_block(block: B, stack: Stack) -> float:
        values = stack.fill(used, block)
        # Without the centre; while they are in the cache.
        squares = 0.0 if isinstance(rule, Mean) else sum_of_squares(mean(values[-len(chosen) :]))
        out.write(block, combine(values))
        return squares

    def add_up(_: B, squares: float) -> None:
        nonlocal total
        total += squares

    (share if _is_known(rule) else one_by_one)(blocks, lambda: Stack(len(used), blocks, device), combine_block, add_up)
    unused = combine.unused if isinstance(combine, Selection) else ()
    return replace(
        verdict,
        unused=tuple(verdict.accepted[i] for i in unused),
        mean_norm=None if isinstance(rule, Mean) else math.sqrt(total),
    )


def _mean_of(weights: Sequence[float], device: torch.device) -> BlockFunction:
    """[n, m] → Σ w·Δ / Σ w of a block. Nothing is decided by it, so its last bits need not be the same everywhere."""
    shares = torch.tensor(weights, dtype=torch.float64, device=device).div_(sum(weights)).float()
    return lambda values: shares @ values


def _is_known(rule: Rule) -> bool:
    if isinstance(rule, Bucketing):
        return _is_known(rule.rule)
    return isinstance(rule, Mean | TrimmedMean | Median | Krum | MultiKrum | GeometricMedian | CenteredClipping)


def in_order(candidates: Sequence[Candidate[B]]) -> list[Candidate[B]]:
    """By worker id."""
    ordered = sorted(candidates, key=lambda candidate: candidate.worker_id)
    ids = [candidate.worker_id for candidate in ordered]
    twice = [a for a, b in pairwise(ids) if a == b]
    if twice:
        raise ConfigError(f"a worker contributes once to a round, {twice[0]!r} came twice; keep its newest")
    return ordered


@dataclass(frozen=True)
class _Found:
    squares: list[float]  # of each contribution
    products: Products | None  # of the centre, if the rule needs one, and then of each contribution


def _measure(
    ordered: Sequence[Candidate[B]],
    blocks: Sequence[B],
    rule: Rule,
    screening: Screening,
    centre: Reader[B] | None,
    device: torch.device,
    share: ShareBlocks,
) -> _Found:
    """The first pass; no more than is needed."""
    readers: list[Reader[B]] = [candidate.values for candidate in ordered]
    if not (rule.needs_products or screening.cosine):
        if screening.arrived:
            return _Found([0.0] * len(ordered), None)
        known = [candidate.norm**2 for candidate in ordered if candidate.norm is not None]
        return _Found(known if len(known) == len(ordered) else squares(readers, blocks, device, share), None)
    first: list[Reader[B]] = [centre or Zeros()] if rule.needs_centre else []
    found = products([*first, *readers], blocks, device, share)
    return _Found([row[i] for i, row in enumerate(found.rows)][len(first) :], found)


def _judge(ordered: Sequence[Candidate[B]], found: _Found, screening: Screening) -> tuple[list[int], ScreenVerdict]:
    """The screens, in order. Each sees only what the previous one let through."""
    ids, refused = [candidate.worker_id for candidate in ordered], {}
    left = []
    for i, square in enumerate(found.squares):
        if math.isfinite(square):
            left.append(i)
        else:
            refused[ids[i]] = "it holds NaN or Inf"
    if not left:
        raise NotFinite(
            f"none of the {len(ordered)} contributions is finite", hint="lower the learning rate, or reload the model"
        )
    rates: dict[int, float] = {}
    if not screening.arrived:
        rates = {i: rate(math.sqrt(found.squares[i]), ordered[i].steps) for i in left}
        left = _without(norm_screen([rates[i] for i in left], screening.history), left, ids, refused)
    if screening.cosine and len(left) >= LEAST_FOR_COSINES:
        assert found.products is not None
        left = _without(cosine_screen(_of(found, left)), left, ids, refused)
    return left, ScreenVerdict(tuple(ids[i] for i in left), refused, tuple(rates[i] for i in left if i in rates))


def _without(said: Mapping[int, str], left: Sequence[int], ids: Sequence[str], refused: dict[str, str]) -> list[int]:
    """`said` counts among those left."""
    refused.update({ids[left[i]]: why for i, why in said.items()})
    return [each for i, each in enumerate(left) if i not in said]


def _of(found: _Found, chosen: Sequence[int], *, with_centre: bool = False) -> Products:
    assert found.products is not None
    first = len(found.products) - len(found.squares)
    return found.products.of([*([0] if with_centre else []), *(first + i for i in chosen)])
